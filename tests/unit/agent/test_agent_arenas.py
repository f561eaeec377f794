"""The pool of arenas: who gets what, when, and what becomes of it."""

from __future__ import annotations

import os
import threading

import pytest
from agent_fakes import Work

from safehold.agent import arenas as arenas_module
from safehold.agent.arenas import Arena, ArenaPool
from safehold.errors import CheckpointError, ConfigurationError, StorageFullError
from safehold.host import memfd
from safehold.types import CommitId

MiB = 1 << 20
COMMIT = CommitId(10, 1, 0)


class Pool:
    """A pool and what it answered."""

    def __init__(self, budget_bytes: int = 64 * MiB) -> None:
        self.work = Work()
        self.released: list[int] = []
        self.pool = ArenaPool(self.work.post, budget_bytes, released=self.released.append)
        self.pool.fitting(0, 1, [0], MiB)
        self.answers: list[tuple[Arena | None, CheckpointError | None]] = []

    def ask(self, rank: int, size_bytes: int) -> list[tuple[Arena | None, CheckpointError | None]]:
        answers: list[tuple[Arena | None, CheckpointError | None]] = []
        self.pool.acquire(rank, size_bytes, lambda arena, error: answers.append((arena, error)))
        return answers

    def take(self, rank: int, size_bytes: int) -> Arena:
        answers = self.ask(rank, size_bytes)
        self.work.run_until(lambda: answers)
        arena, error = answers[0]
        assert error is None and arena is not None
        return arena


@pytest.fixture
def p() -> Pool:
    return Pool()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_an_arena_is_populated_once_and_then_given_at_once(p: Pool) -> None:
    arena = p.take(0, 5000)
    assert arena.size_bytes == 8192 and os.fstat(arena.fd).st_size == 8192
    assert p.ask(0, 8192) == [(arena, None)]
    assert p.pool.total_bytes == 8192


def test_while_it_is_populated_everybody_waits_and_is_called_once(p: Pool) -> None:
    first, second = p.ask(0, 5000), p.ask(0, 6000)
    assert not first and not second
    p.work.run_until(lambda: first)
    p.work.run()
    assert first == second and len(first) == 1


def test_whoever_waits_for_a_larger_one_gets_a_larger_one(p: Pool) -> None:
    first, second = p.ask(0, 5000), p.ask(0, 3 * MiB)
    p.work.run_until(lambda: second)
    assert first[0][0] is not second[0][0]
    assert second[0][0] is p.pool.of(0) and second[0][0].size_bytes == 3 * MiB
    assert p.pool.total_bytes == 3 * MiB


def test_a_busy_arena_is_waited_for(p: Pool) -> None:
    arena = p.take(0, 5000)
    arena.use()
    first, second = p.ask(0, 5000), p.ask(0, 5000)
    assert not first and not second
    arena_taken = []
    p.pool.acquire(0, 5000, lambda found, error: arena_taken.append(found.use()))
    p.pool.free(arena)
    assert first == second == [(arena, None)]
    assert arena_taken == [2] and arena.busy
    late = p.ask(0, 5000)
    p.pool.free(arena)
    assert late == [(arena, None)]


def test_taken_by_the_first_of_two_who_wait_the_second_waits_on(p: Pool) -> None:
    arena = p.take(0, 5000)
    arena.use()
    order: list[str] = []
    p.pool.acquire(0, 5000, lambda found, error: (order.append("first"), found.use()))
    p.pool.acquire(0, 5000, lambda found, error: order.append("second"))
    p.pool.free(arena)
    assert order == ["first"]
    p.pool.free(arena)
    assert order == ["first", "second"]


def test_growing_lets_go_of_the_old_one_and_says_so(p: Pool) -> None:
    old = p.take(0, 5000)
    new = p.take(0, MiB)
    assert new is not old and old.fd == -1 and p.released == [old.arena_id]
    assert new.arena_id > old.arena_id
    assert p.pool.total_bytes == MiB


def test_another_agent_gives_other_ids_that_count_on(p: Pool) -> None:
    arena = p.take(0, 5000)
    assert Pool().take(0, 5000).arena_id > arena.arena_id


def test_the_budget_refuses_by_name_and_takes_nothing() -> None:
    p = Pool(budget_bytes=2 * MiB)
    p.take(0, MiB)
    [(arena, error)] = p.ask(1, 2 * MiB)
    assert arena is None and isinstance(error, ConfigurationError)
    assert error.rank == 1 and "2,097,152" in str(error)
    assert p.pool.total_bytes == MiB and p.pool.of(1) is None


def test_arenas_of_ranks_that_are_gone_make_room() -> None:
    p = Pool(budget_bytes=3 * MiB)
    for rank in (0, 1, 2):
        p.pool.hold(p.take(rank, MiB), 0, COMMIT, [])
    p.pool.drop_idle({0}, keep={0, 1})
    assert p.pool.of(2) is None and p.pool.of(1) is not None
    assert p.take(0, 2 * MiB + 1).size_bytes == 2 * MiB + 4096
    assert p.pool.of(1) is None and p.pool.total_bytes <= 3 * MiB


def test_a_busy_arena_of_a_rank_that_is_gone_stays(p: Pool) -> None:
    arena = p.take(1, MiB)
    arena.use()
    p.pool.drop_idle({0}, set())
    assert p.pool.of(1) is arena
    p.pool.free(arena)
    p.pool.drop_idle({0}, set())
    assert p.pool.of(1) is None


def test_given_up_while_it_is_populated_everybody_is_told(p: Pool) -> None:
    waiting = p.ask(1, MiB)
    p.pool.drop_idle({0}, set())
    again = p.ask(1, 2 * MiB)
    p.work.run_until(lambda: waiting and again)
    assert waiting[0][0] is None and "given up" in str(waiting[0][1])
    assert again[0][0] is p.pool.of(1) and again[0][1] is None


@pytest.mark.parametrize("failure", [MemoryError("none left"), OSError(12, "no memory"), StorageFullError("full")])
def test_no_memory_is_an_error_for_all_who_wait(p: Pool, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    made: list[int] = []

    def create(size_bytes: int, name: str) -> int:
        made.append(memfd.create(size_bytes, name))
        return made[-1]

    def populate(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr(arenas_module.memfd, "populate", populate)
    first, second = p.ask(0, 5000), p.ask(0, 9000)
    p.work.run_until(lambda: first and second)
    for arena, error in (*first, *second):
        assert arena is None and isinstance(error, StorageFullError)
    assert p.pool.of(0) is None and p.pool.total_bytes == 0
    monkeypatch.undo()
    assert p.take(0, 5000).fd >= 0


def test_no_thread_is_an_error_too(p: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    [(arena, error)] = p.ask(0, 5000)
    assert arena is None and isinstance(error, StorageFullError)


def test_content_belongs_to_the_last_user(p: Pool) -> None:
    arena = p.take(0, 5000)
    use = arena.use()
    p.pool.free(arena)
    p.pool.hold(arena, use, COMMIT, [(0, 4096)])
    assert p.pool.holding(COMMIT) == [arena] and arena.packs == [(0, 4096)]
    later = arena.use()
    assert arena.content is None
    p.pool.hold(arena, use, COMMIT, [(0, 4096)])  # late news of the save before
    assert arena.content is None and not p.pool.holding(COMMIT)
    p.pool.hold(arena, later, CommitId(20, 1, 0), [])
    assert p.pool.ranks_with_content({20}) == {0} and p.pool.ranks_with_content({10}) == set()


def test_given_up_its_bytes_count_until_the_process_is_gone() -> None:
    p = Pool(budget_bytes=3 * MiB)
    arena = p.take(0, 2 * MiB)
    use = arena.use()
    waiting = p.ask(0, 2 * MiB)
    p.pool.give_up(arena)
    assert waiting[0][0] is None and isinstance(waiting[0][1], ConfigurationError)
    assert p.pool.total_bytes == 2 * MiB and p.pool.of(0) is None
    small = p.take(0, MiB)
    p.pool.hold(arena, use, COMMIT, [])
    assert arena.content is None
    p.pool.give_up(arena)  # told twice, counted once
    assert p.pool.total_bytes == 3 * MiB
    p.pool.recovered()
    assert p.pool.total_bytes == MiB and p.pool.of(0) is small


def test_who_waited_for_one_that_is_given_up_gets_another(p: Pool) -> None:
    arena = p.take(0, MiB)
    arena.use()
    waiting = p.ask(0, MiB)
    p.pool.give_up(arena)
    p.work.run_until(lambda: waiting)
    assert waiting[0][0] is p.pool.of(0) is not arena


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "granted"),
    [
        (10 * MiB, 1, 10 * MiB),
        (64 * MiB, 1, 64 * MiB),
        (65 * MiB, 1, 64 * MiB),  # a ring
        (40 * MiB, 2, 32 * MiB),
        (33 * MiB, 3, 20 * MiB),  # a multiple of the smallest ring
        (5 * MiB, 32, 5 * MiB),  # not even a ring: acquire refuses it by name
    ],
)
def test_how_much_a_rank_gets(p: Pool, wanted: int, num_ranks: int, granted: int) -> None:
    assert p.pool.fitting(0, wanted, range(num_ranks), 4 * MiB) == granted


def test_uneven_ranks_get_all_where_all_fit_together(p: Pool) -> None:
    """Rank 0 has 50 of 64 MiB, rank 1 the rest; until rank 1 has asked, it may want as much."""
    fitting = lambda rank, mib: p.pool.fitting(rank, mib * MiB, [0, 1], 4 * MiB) // MiB  # noqa: E731
    assert fitting(0, 50) == 32
    assert fitting(1, 10) == 10 and fitting(0, 50) == 50
    large = p.take(0, 50 * MiB)
    assert fitting(1, 10) == 10
    p.take(1, 10 * MiB)
    large.use()
    assert fitting(1, 20) == 12, "it grows, and rank 0 has its arena still: a ring in what is left"
    assert fitting(0, 50) == 32 and p.pool.of(0) is large, "which is in use"
    p.pool.free(large)
    assert fitting(0, 50) == 32 and p.pool.of(0) is None
    p.take(0, 32 * MiB)
    assert fitting(1, 20) == 20 and p.take(1, 20 * MiB).size_bytes == 20 * MiB
    p.pool.configure(64 * MiB)  # another job
    assert fitting(0, 50) == 32


def test_trimmed_pages_go_back_and_the_arena_is_smaller_from_then_on() -> None:
    p = Pool(budget_bytes=1 << 30)
    arena = p.take(0, 80 * MiB)
    before = os.fstat(arena.fd).st_blocks
    p.pool.trim(0, 5 * MiB + 1)
    assert arena.size_bytes == 5 * MiB + 4096 == p.pool.total_bytes
    assert os.fstat(arena.fd).st_blocks < before / 8
    p.pool.trim(0, MiB)  # not worth it
    assert arena.size_bytes == 5 * MiB + 4096
    assert p.ask(0, 5 * MiB)[0][0] is arena
    assert p.take(0, 6 * MiB) is not arena


def test_close_frees_everything(p: Pool) -> None:
    fds = [p.take(rank, 5000).fd for rank in range(3)]
    p.pool.close()
    assert not any(map(is_open, fds)) and p.pool.total_bytes == 0


def test_pages_come_from_the_node_that_the_rank_named_before_they_are_touched(
    p: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []
    populate = arenas_module.memfd.populate
    monkeypatch.setattr(arenas_module.numa, "prefer", lambda mapping, node: order.append(node))
    monkeypatch.setattr(
        arenas_module.memfd, "populate", lambda *args, **more: (order.append("populate"), populate(*args, **more))[1]
    )
    p.pool.prefer(0, 3)
    p.take(0, 4096)
    p.take(1, 4096)
    assert order == [3, "populate", -1, "populate"]
