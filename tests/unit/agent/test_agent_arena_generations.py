"""Two generations of arenas where memory is a tier: the last good snapshot is never the one that is being made."""

from __future__ import annotations

import pytest
from agent_fakes import Work

from safehold.agent.arenas import Arena, ArenaPool
from safehold.types import CommitId

MiB = 1 << 20
FIRST, SECOND = CommitId(10, 1, 0), CommitId(11, 1, 0)


class Pool:
    """A pool with one rank, whose saves go through `save`."""

    def __init__(self, budget_bytes: int = 64 * MiB) -> None:
        self.work = Work()
        self.pool = ArenaPool(self.work.post, budget_bytes)
        self.pool.fitting(0, 1, [0], MiB)

    def take(self, size_bytes: int = MiB) -> Arena:
        self.pool.turn(0, size_bytes)
        found: list[Arena | None] = []
        self.pool.acquire(0, size_bytes, lambda arena, error: found.append(arena))
        self.work.run_until(lambda: found)
        assert found[0] is not None
        return found[0]

    def save(self, commit: CommitId | None, size_bytes: int = MiB, *, in_memory: bool = True) -> Arena:
        arena = self.take(size_bytes)
        use = self.pool.let_in(arena)
        if commit is not None:
            self.pool.hold(arena, use, commit, [(0, 4096)], in_memory=in_memory)
        self.pool.free(arena)
        return arena


@pytest.fixture
def p() -> Pool:
    return Pool()


def test_a_save_never_takes_the_arena_of_the_last_good_one(p: Pool) -> None:
    first = p.save(FIRST)
    failed = p.save(None)
    assert failed is not first and first.content == FIRST
    assert p.save(None) is failed, "what holds nothing is used again"
    second = p.save(SECOND)
    assert second is failed and {arena.content for arena in p.pool.of_all(0)} == {FIRST, SECOND}
    assert p.save(None) is first, "the older of two is next"
    assert p.pool.holding(SECOND) == [second] and p.pool.holding(FIRST) == []
    assert p.pool.facts()["steps"] == {"0": 11}
    assert p.pool.total_bytes == 2 * MiB
    p.pool.drop_kept()
    assert p.pool.total_bytes == MiB


def test_one_generation_is_enough_where_nobody_turns(p: Pool) -> None:
    first = p.save(FIRST)
    found: list[Arena | None] = []
    p.pool.acquire(0, MiB, lambda arena, error: found.append(arena))
    assert found == [first] and p.pool.total_bytes == MiB


def test_a_snapshot_gives_way_only_where_the_budget_has_no_room_for_another() -> None:
    p = Pool(budget_bytes=MiB + MiB // 2)
    first = p.save(FIRST)
    assert p.save(SECOND) is first
    assert p.pool.only_in_memory(0)


def test_a_snapshot_survives_that_a_larger_arena_is_wanted(p: Pool) -> None:
    first = p.save(FIRST)
    larger = p.save(None, 2 * MiB)
    assert larger.size_bytes == 2 * MiB and p.pool.holding(FIRST) == [first]
    second = p.save(SECOND, 2 * MiB)
    assert second is larger
    third = p.save(None, 2 * MiB)
    assert third is not first and third.size_bytes == 2 * MiB, "the smaller one is let go for it"
    assert p.pool.total_bytes == 4 * MiB


def test_both_are_prepared_ahead(p: Pool) -> None:
    first = p.take()
    found: list[Arena | None] = []
    p.pool.acquire_kept(0, MiB, lambda arena, error: found.append(arena))
    p.work.run_until(lambda: found)
    assert found[0] is not None and found[0] is not first
    p.pool.acquire_kept(0, MiB, lambda arena, error: found.append(arena))
    assert found[1] is found[0]
    saved = p.save(FIRST)
    assert saved is first
    assert p.take() is found[0]
    p.pool.acquire_kept(0, 2 * MiB, lambda arena, error: found.append(arena))
    assert found[2] is None and p.pool.holding(FIRST) == [first], "what holds a snapshot is not touched"


def test_only_what_a_new_incarnation_believes_of_what_is_on_no_storage_counts(p: Pool) -> None:
    flash = p.save(FIRST, in_memory=False)
    memory = p.save(SECOND)
    p.pool.accept(None)
    assert flash.content == FIRST and memory.content is None
    assert not p.pool.only_in_memory(0)


def test_all_goes_with_a_rank_that_is_parted_with_and_at_the_end(p: Pool) -> None:
    p.save(FIRST)
    p.save(SECOND)
    p.pool.part_with(0)
    assert p.pool.total_bytes == 0
    p.save(FIRST)
    p.save(SECOND)
    p.pool.drop_idle({1}, set())
    assert p.pool.total_bytes == 0
    p.save(FIRST)
    p.save(SECOND)
    p.pool.close()
    assert p.pool.total_bytes == 0
