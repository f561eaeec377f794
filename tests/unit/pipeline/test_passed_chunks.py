"""A rank's part in passing chunks on: what it takes from the node's cache, what it reads for all, and what it does without either."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from any_plans import Made, destination, one_leaf, reading

from safehold.errors import AgentUnavailableError, ChecksumError
from safehold.format import crc
from safehold.pipeline import passed_chunks, restore
from safehold.pipeline.passed_chunks import GIVEN_UP, PassedChunks
from safehold.policy import passing_on
from safehold.policy.passing_on import Group, Numbering
from safehold.testing.fake_tier import FakeTier
from safehold.types import Rect

NAMES = ["here", "there"]


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(crc, "BLOCK_BYTES", 64)
    patch.setattr(restore, "CHUNK_BYTES", 256)
    patch.setattr(passing_on, "CHUNK_BYTES", 256)
    patch.setattr(passed_chunks, "CHUNK_BYTES", 256)
    yield
    patch.undo()


class Cache:
    """The memory, the agent and the other node at once."""

    def __init__(self, made: Made, own: Sequence[int] = ()) -> None:
        self.numbering = Numbering(made.checkpoint.plan.pack_sizes)
        self.num = self.numbering.num_chunks
        self.memory = memoryview(bytearray(4 * self.num + 256 * self.num))
        self.table: Any = np.frombuffer(self.memory[: 4 * self.num], "<u4")
        self.own, self.made, self.alive = list(own), made, True
        self.read: list[tuple[int, int]] = []
        self.failed: list[int] = []
        self.told: list[tuple[int, bool]] = []
        self.lock = threading.Lock()
        tree = made.disk.tree()
        self.packs = {key: tree[made.checkpoint.pack_path(*key)] for key in made.checkpoint.packs()}

    def arrive(self, number: int, *, wrong: bool = False) -> None:
        """The other node passes a chunk on."""
        rank, part, offset, size = self.numbering.locate(number)
        at = 4 * self.num + 256 * number
        data = bytearray(self.packs[rank, part][offset : offset + size])
        data[-1] ^= wrong
        self.memory[at : at + size] = data
        self.table[number] = number + 1

    def passed(self, tier: Any = None, patience_s: float = 5.0) -> PassedChunks:
        own, theirs = np.array(self.own), np.setdiff1d(np.arange(self.num), self.own)
        groups = [Group((0,), own), Group((1,), theirs)]
        return PassedChunks(
            self.memory,
            4 * self.num,
            groups=groups,
            node=0,
            names=NAMES,
            tier=tier or self.made.tier,
            checkpoint=self.made.checkpoint,
            talk=self,
            patience_s=patience_s,
        )

    # -- Talk

    def ask(self, read: list[tuple[int, int]], failed: list[int], read_s: float) -> tuple[list[tuple[int, int]], bool]:
        with self.lock:
            self.read += read
            self.failed += failed
            for number, _ in read:
                self.table[number] = number + 1
            for number in failed:
                self.table[number] = GIVEN_UP
            given, self.own = self.own[:2], self.own[2:]
        return [(number, number) for number in given], not given

    def used(self, number: int, *, wrong: bool) -> None:
        self.told.append((number, wrong))


def whole(made: Made, tier: Any = None, **options: Any) -> tuple[np.ndarray, Any]:
    view = np.full(made.raw["w"].shape[0], -1.0)
    wanted = [destination("w", made.spec("w"), [(Rect.whole(view.shape), view)])]
    return view, reading(tier or made.tier, made.checkpoint, wanted, passing=True, **options)


def test_chunks_come_from_others_and_own_ones_are_read_for_all() -> None:
    made = one_leaf(world_size=2)
    cache = Cache(made, own=range(0, 18, 3))
    tier = FakeTier(made.tier)
    view, task = whole(made, tier)
    num, wanted = task.wants
    assert num == cache.num and wanted, "what is wanted is counted in chunks"
    for number in set(range(num)) - set(cache.own):
        cache.arrive(number)
    own = [number for number in cache.own if number < num]
    cache.own = own
    task.take_from(cache.passed(tier))
    figures = task.run()
    assert view.tobytes() == made.raw["w"].tobytes()
    assert figures.bytes_by_source.keys() == {"flash", "peers"} and not figures.replaced
    assert sorted(number for number, _ in cache.read) == own and not cache.failed
    direct = sum(figures.bytes_by_source.values()) - figures.bytes_by_source["peers"]
    assert figures.storage_bytes <= direct + sum(size for _, size in cache.read)
    assert sorted(cache.told) == [(number, False) for number in wanted], "each is given back once"


def test_a_chunk_that_comes_late_is_waited_for_while_other_bytes_are_read() -> None:
    made = one_leaf()
    cache = Cache(made)
    view, task = whole(made, num_threads=1)
    wanted = task.wants[1]
    task.take_from(cache.passed())
    timer = threading.Timer(0.1, lambda: [cache.arrive(number) for number in wanted])
    timer.start()
    figures = task.run()
    assert view.tobytes() == made.raw["w"].tobytes() and not figures.replaced
    assert set(figures.bytes_by_source) <= {"peers", "flash"} and figures.bytes_by_source["peers"]


@pytest.mark.parametrize("how", ["given up", "wrong", "late", "no agent"])
def test_what_does_not_come_as_it_should_is_read_from_storage_aloud(how: str) -> None:
    made = one_leaf()
    cache = Cache(made)
    view, task = whole(made)
    wanted = task.wants[1]
    for number in wanted:
        cache.arrive(number, wrong=how == "wrong" and number == wanted[1])
    if how == "given up":
        cache.table[wanted[1]] = GIVEN_UP
    elif how != "wrong":
        cache.table[wanted[1]] = 0
        cache.alive = how != "no agent"
    task.take_from(cache.passed(patience_s=0.05))
    figures = task.run()
    assert view.tobytes() == made.raw["w"].tobytes()
    assert len(figures.replaced) == 1 and "peers, node there" in figures.replaced[0], figures.replaced
    assert figures.bytes_by_source["flash"] >= 64
    assert dict(cache.told) == {number: how == "wrong" and number == wanted[1] for number in wanted}


def test_failures_of_one_node_are_told_once() -> None:
    made = one_leaf()
    cache = Cache(made)
    _, task = whole(made)
    wanted = task.wants[1]
    cache.table[:] = GIVEN_UP
    task.take_from(cache.passed())
    [text] = task.run().replaced
    assert f"({restore.MAX_FAILURES} reads)" in text and len(wanted) > restore.MAX_FAILURES, "then it is not asked"


def test_a_damaged_block_is_shown_to_nobody_and_found_by_who_wants_it() -> None:
    made = one_leaf()
    cache = Cache(made)
    _, task = whole(made)
    wanted = task.wants[1]
    _, _, offset, _ = cache.numbering.locate(wanted[1])
    made.disk.corrupt(made.checkpoint.pack_path(0, 0), offset + 70, mask=4)
    cache.own = list(range(cache.num))
    task.take_from(cache.passed())
    with pytest.raises(ChecksumError, match="does not match its checksum"):
        task.run()
    assert cache.failed == [wanted[1]] and wanted[1] not in dict(cache.read)


def test_an_agent_that_goes_leaves_the_reading_to_storage() -> None:
    made = one_leaf()
    cache = Cache(made, own=range(20))
    cache.own = cache.own[: cache.num]

    def gone(*_: Any) -> Any:
        cache.alive = False
        raise AgentUnavailableError("gone")

    cache.ask = gone  # type: ignore[method-assign]
    view, task = whole(made)
    assert task.wants[1]
    task.take_from(cache.passed())
    figures = task.run()
    assert view.tobytes() == made.raw["w"].tobytes() and figures.bytes_by_source.keys() == {"flash"}


def test_of_which_a_rank_wants_little_is_not_asked_for() -> None:
    made = one_leaf(num=4000)
    view = np.full(2, -1.0)
    wanted = [destination("w", made.spec("w"), [(Rect((2000,), (2,)), view)])]
    task = reading(made.tier, made.checkpoint, wanted, passing=True)
    assert task.wants[1] == []
    assert reading(made.tier, made.checkpoint, wanted).wants == (0, []), "not where nothing is passed on"
