"""The disks of several nodes as one tier: the tier's suite, and what happens when one of them fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from safehold.errors import IntegrityError, StorageError, StorageFullError
from safehold.testing.fake_tier import FakeTier
from safehold.testing.tier_suite import TierSuite
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.tiers.joined import JoinedTier


class TestJoinedFlash(TierSuite):
    """The own disk is the one that decides who was first."""

    own = "a"

    def make_tier(self, directory: Path) -> Tier:
        disks = {node: FlashTier(directory / node / "run") for node in "abc"}
        return JoinedTier(disks.pop(self.own), disks, node=self.own)

    def reopen(self, tier: Tier, directory: Path) -> Tier:
        """What another node sees."""
        disks = {node: FlashTier(directory / node / "run") for node in "abc"}
        return JoinedTier(disks.pop("b"), disks, node="b")


class TestJoinedFlashElsewhere(TestJoinedFlash):
    """Another node's disk decides."""

    own = "c"


class TestJoinedFakes(TierSuite):
    def make_tier(self, directory: Path) -> Tier:
        return JoinedTier(FakeTier(), {"b": FakeTier(), "a": FakeTier()}, node="own")


class TestJoinedAlone(TierSuite):
    """A job that has shrunk to one node."""

    def make_tier(self, directory: Path) -> Tier:
        return JoinedTier(FlashTier(directory / "run"), {}, node="a")


class Three:
    """Three nodes' disks, and each node's view of them."""

    def __init__(self) -> None:
        self.disks = {node: FakeTier() for node in "abc"}

    def seen_by(self, node: str, **options: Any) -> JoinedTier:
        others = {name: disk for name, disk in self.disks.items() if name != node}
        return JoinedTier(self.disks[node], others, node=node, **options)

    def contents(self, path: str) -> dict[str, bytes]:
        found = {}
        for node, disk in self.disks.items():
            try:
                found[node] = disk.inner.get(path, limit_bytes=1 << 20)
            except FileNotFoundError:
                continue
        return found


@pytest.fixture
def three() -> Three:
    return Three()


def write_pack(tier: Tier, path: str, data: bytes) -> None:
    writer = tier.create_pack(path, len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()


def read_pack(tier: Tier, path: str) -> bytes:
    reader = tier.open_pack(path)
    buffer = bytearray(reader.size_bytes)
    reader.read_into(0, memoryview(buffer))
    reader.close()
    return bytes(buffer)


def test_small_files_are_on_all_nodes_and_packs_on_their_own(three: Three) -> None:
    tier = three.seen_by("b")
    tier.put("run.json", b"run")
    tier.put("incarnations/1.json", b"one", exclusive=True)
    write_pack(tier, "c/p", b"bytes of b")
    assert three.contents("run.json") == dict.fromkeys("abc", b"run")
    assert three.contents("incarnations/1.json") == dict.fromkeys("abc", b"one")
    assert three.contents("c/p") == {"b": b"bytes of b"}
    assert read_pack(three.seen_by("a"), "c/p") == b"bytes of b"
    assert [entry.name for entry in three.seen_by("c").list("")] == ["c", "incarnations", "run.json"]
    assert three.seen_by("c").holders("c") == {"p": ("b",)}


def test_the_own_copy_is_read_first_and_a_guess_before_all_are_asked(three: Three) -> None:
    three.seen_by("a").put("f", b"x")
    three.disks["c"].inner.put("g", b"y")
    tier = three.seen_by("a", guess=lambda path: "c")
    asked = {node: disk.count("get") for node, disk in three.disks.items()}
    assert tier.get("f", limit_bytes=9) == b"x"
    assert tier.get("g", limit_bytes=9) == b"y"
    assert {node: disk.count("get") - asked[node] for node, disk in three.disks.items()} == {"a": 2, "b": 0, "c": 1}


def test_who_was_found_to_have_a_file_is_asked_first_the_next_time(three: Three) -> None:
    three.disks["c"].inner.put("d/g", b"y")
    for look in (lambda tier: tier.list("d"), lambda tier: tier.size("d/g")):
        tier = three.seen_by("a")
        look(tier)
        asked = three.disks["b"].count("get")
        assert tier.get("d/g", limit_bytes=9) == b"y"
        assert three.disks["b"].count("get") == asked


# -- who is first ------------------------------------------------------------------------------------------------------


def test_of_nodes_that_create_at_once_one_wins_everywhere(three: Three) -> None:
    barrier = threading.Barrier(3)
    outcomes: dict[str, bool] = {}

    def create(node: str) -> None:
        tier = three.seen_by(node)
        barrier.wait()
        try:
            tier.put("incarnations/1.json", node.encode(), exclusive=True)
            outcomes[node] = True
        except FileExistsError:
            outcomes[node] = False

    threads = [threading.Thread(target=create, args=(node,)) for node in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    winners = [node for node, won in outcomes.items() if won]
    assert len(winners) == 1
    assert three.contents("incarnations/1.json") == dict.fromkeys("abc", winners[0].encode())


def test_who_is_told_that_a_file_exists_finds_it_on_all_nodes(three: Three) -> None:
    """Its maker died after the first node had it."""
    three.disks["a"].inner.put("m", b"first")
    with pytest.raises(FileExistsError):
        three.seen_by("c").put("m", b"second", exclusive=True)
    assert three.contents("m") == dict.fromkeys("abc", b"first")


def test_a_file_that_cannot_be_brought_to_all_is_not_said_to_exist(three: Three) -> None:
    three.disks["a"].inner.put("m", b"first")
    three.disks["b"].fail("put", times=-1)
    with pytest.raises(StorageError, match="injected") as caught:
        three.seen_by("c").put("m", b"second", exclusive=True)
    assert caught.value.node == "b"


def test_another_file_on_a_later_node_was_there_first(three: Three) -> None:
    three.disks["b"].inner.put("m", b"other")
    with pytest.raises(FileExistsError):
        three.seen_by("c").put("m", b"mine", exclusive=True)
    assert three.contents("m") == {"b": b"other"}


def test_the_same_file_on_a_later_node_is_as_good_as_put(three: Three) -> None:
    three.disks["b"].inner.put("m", b"mine")
    three.seen_by("c").put("m", b"mine", exclusive=True)
    assert three.contents("m") == dict.fromkeys("abc", b"mine")


def test_two_files_of_one_name_are_not_chosen_between(three: Three) -> None:
    three.disks["a"].inner.put("m", b"of a")
    three.disks["c"].inner.put("m", b"of c")
    with pytest.raises(IntegrityError, match="nodes a and c have different files") as caught:
        three.seen_by("b").put("m", b"x", exclusive=True)
    assert "move the run directory away" in (caught.value.hint or "")
    assert three.contents("m") == {"a": b"of a", "b": b"of a", "c": b"of c"}


def test_an_exclusive_put_can_be_repeated_after_one_node_failed(three: Three) -> None:
    three.disks["b"].fail("put")
    with pytest.raises(StorageError) as caught:
        three.seen_by("a").put("m", b"mine", exclusive=True)
    assert caught.value.node == "b"
    with pytest.raises(FileExistsError):
        three.seen_by("a").put("m", b"mine", exclusive=True)
    assert three.contents("m") == dict.fromkeys("abc", b"mine")


# -- one node fails ----------------------------------------------------------------------------------------------------

DECIDES: dict[str, Callable[[JoinedTier], object]] = {
    "list": lambda tier: tier.list("d"),
    "put": lambda tier: tier.put("d/new", b"x"),
    "put exclusive": lambda tier: tier.put("d/new", b"x", exclusive=True),
    "delete": lambda tier: tier.delete("d/f"),
    "delete_tree": lambda tier: tier.delete_tree("d"),
    "delete_if_empty": lambda tier: tier.delete_if_empty("d"),
    "sync_tree": lambda tier: tier.sync_tree("d"),
    "make_directory": lambda tier: tier.make_directory("e"),
    "sweep_temporaries": lambda tier: tier.sweep_temporaries(""),
    "probe": lambda tier: tier.probe(),
}


@pytest.mark.parametrize("bad", ["a", "b", "c"])
@pytest.mark.parametrize("operation", DECIDES)
def test_what_decides_needs_every_node_and_names_the_one_that_fails(three: Three, operation: str, bad: str) -> None:
    tier = three.seen_by("b")
    tier.put("d/f", b"x")
    three.disks[bad].fail(operation.split()[0], times=-1)
    with pytest.raises(StorageError, match="injected") as caught:
        DECIDES[operation](tier)
    assert caught.value.node == bad
    three.disks[bad].heal()
    if operation == "put exclusive":
        with pytest.raises(FileExistsError) if bad != "a" else nullcontext():
            DECIDES[operation](tier)
        assert three.contents("d/new") == dict.fromkeys("abc", b"x")
    else:
        DECIDES[operation](tier)


READS: dict[str, Callable[[JoinedTier], object]] = {
    "get": lambda tier: tier.get("d/f", limit_bytes=9),
    "size": lambda tier: tier.size("d/f"),
    "open_pack": lambda tier: read_pack(tier, "d/f"),
}


@pytest.mark.parametrize("operation", READS)
def test_a_read_goes_on_while_one_node_has_the_file(three: Three, operation: str) -> None:
    three.seen_by("a").put("d/f", b"x")
    for bad in ("ab", "bc", "ac"):
        for node in bad:
            three.disks[node].fail(operation, times=-1)
        READS[operation](three.seen_by("a"))
        for node in bad:
            three.disks[node].heal()
    for disk in three.disks.values():
        disk.fail(operation, times=-1)
    with pytest.raises(StorageError):
        READS[operation](three.seen_by("a"))


@pytest.mark.parametrize("operation", READS)
def test_a_file_that_a_lost_node_may_have_is_not_said_to_be_absent(three: Three, operation: str) -> None:
    with pytest.raises(FileNotFoundError):
        READS[operation](three.seen_by("a"))
    three.disks["c"].fail(operation, times=-1)
    with pytest.raises(StorageError) as caught:
        READS[operation](three.seen_by("a"))
    assert caught.value.node == "c"


def test_a_node_that_hangs_holds_no_read_that_another_one_can_answer(three: Three) -> None:
    three.disks["b"].inner.put("d/f", b"x")
    three.disks["c"].hang("get", times=-1)
    begun = time.monotonic()
    assert three.seen_by("a").get("d/f", limit_bytes=9) == b"x"
    assert time.monotonic() - begun < 5
    three.disks["c"].heal()


def test_a_file_damaged_on_the_own_disk_is_read_from_another(three: Three) -> None:
    three.seen_by("a").put("d/f", b"x")
    three.disks["a"].inner.put("d/f", b"longer than it may be")
    assert three.seen_by("a").get("d/f", limit_bytes=9) == b"x"


def test_a_full_disk_is_told_before_one_that_is_silent(three: Three) -> None:
    three.disks["a"].fail("put")
    three.disks["c"].fail("put", error=StorageFullError("full"))
    with pytest.raises(StorageFullError) as caught:
        three.seen_by("b").put("f", b"x")
    assert caught.value.node == "c"


def test_a_directory_that_some_nodes_lack_is_synced_where_it_is(three: Three) -> None:
    write_pack(three.seen_by("b"), "c/1/p", b"x")
    three.seen_by("a").sync_tree("c/1")
    with pytest.raises(StorageError):
        three.seen_by("a").sync_tree("c/2")


def test_a_file_is_looked_for_as_long_as_asked(three: Three) -> None:
    waiting = threading.Timer(0.1, lambda: three.disks["c"].inner.put("f", b"x"))
    waiting.start()
    assert three.seen_by("a").get("f", limit_bytes=9, retry_s=5.0) == b"x"
    waiting.join()
