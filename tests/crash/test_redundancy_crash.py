"""Power cuts after every operation of making redundancy and of rebuilding: what is believed afterwards is whole.

And each bug that they could have is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redundant_nodes import DIRECTORY, Nodes

from safehold.errors import CheckpointError, IntegrityError
from safehold.format import crc, paths, redundancy
from safehold.pipeline.block_work import Effort
from safehold.pipeline.rebuild import rebuild
from safehold.pipeline.redundancy import protect
from safehold.policy.placement import Layout, RedundancySet, parse_scheme, place
from safehold.testing.crash_model import Survival
from safehold.testing.disk_faults import PowerLostError
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier

ONE = Effort(threads=1)
SURVIVALS: tuple[tuple[int, Survival], ...] = ((0, "lost"), (0, "kept"), (1, "random"), (2, "random"), (3, "random"))


def layout(words: str, count: int = 4) -> Layout:
    scheme = parse_scheme(copies=words) if words.isdigit() else parse_scheme(parity=words)
    assert scheme is not None
    return place(scheme, range(count))


def small_nodes() -> Nodes:
    return Nodes(None, [[4096, 100], [5000], [], [9000]], objects={0: 300, 3: 40})


def cut_everywhere(work: Callable[[Tier], Any], disk: FakeDisk, check: Callable[[Tier], None], make: Any) -> int:
    """Cut the power after each operation of `work` on copies of a disk, and check what survives."""
    base = disk.crash(survival="kept")
    cuts = 0
    while True:
        trial = base.crash(survival="kept")
        begun = trial.num_ops
        trial.crash_after(begun + cuts)
        try:
            work(make(trial))
        except (PowerLostError, CheckpointError):
            pass
        done = trial.num_ops <= begun + cuts
        for seed, survival in SURVIVALS:
            left = trial.crash(seed=seed, survival=survival)
            try:
                check(FlashTier(left.root, left))
            except Exception as exc:
                exc.add_note(f"cut in operation {cuts}, survival {survival} {seed}")
                raise
        if done:
            return cuts
        cuts += 1


def protecting(
    words: str, before: str | None = None, make: Callable[[FakeDisk], Tier] = lambda disk: FlashTier(disk.root, disk)
) -> int:
    """Node 0 makes its share, over what an earlier scheme has left; the others have made theirs."""
    nodes = small_nodes()
    if before is not None:
        nodes.protect(layout(before), nodes=[0])
    nodes.protect(layout(words), nodes=[1, 2, 3])
    one = layout(words).set_of(0)
    assert isinstance(one, RedundancySet)

    def check(tier: Tier) -> None:
        """A record that is there vouches for shares that are there, and with them a lost node comes back."""
        nodes.tiers[0] = tier
        assert nodes.own_files(0) == nodes.wanted[0]
        path = f"{DIRECTORY}/{paths.redundancy_record(0)}"
        try:
            data = tier.get(path, limit_bytes=1 << 30)
        except FileNotFoundError:
            data = None
        if data is not None:
            record, _ = redundancy.decode_redundancy(data, path=path)
            for share in record.shares:
                if share.size_bytes:
                    stored = tier.get(f"{DIRECTORY}/{share.file}", limit_bytes=1 << 30)
                    assert len(stored) == share.size_bytes
                    assert crc.crc(stored) == share.crc32
        protect(tier, nodes.manifest, 0, one, nodes, effort=ONE)  # and it goes on from there
        nodes.silent = {3}
        lost = nodes.lost(3)
        for name, data in nodes.wanted[3].items():
            buffer = bytearray(len(data))
            if name != paths.node_record(3):
                lost.read_range(name, 0, memoryview(buffer))
                assert buffer == data
        assert not lost.faults
        nodes.silent = set()

    work = lambda tier: protect(tier, nodes.manifest, 0, one, nodes, effort=ONE)  # noqa: E731
    return cut_everywhere(work, nodes.disks[0], check, make)


@pytest.mark.parametrize(("words", "before"), [("1", None), ("xor:4", None), ("rs:2+2", None), ("xor:4", "2")])
def test_a_power_cut_while_redundancy_is_made(words: str, before: str | None) -> None:
    assert protecting(words, before) > 20


def rebuilding(make: Callable[[FakeDisk], Tier] = lambda disk: FlashTier(disk.root, disk)) -> int:
    nodes = small_nodes()
    nodes.protect(layout("rs:2+2"))
    nodes.lose(0)
    lost = nodes.lost(0)
    nodes.replace(0)
    disk = nodes.disks[0]

    def check(tier: Tier) -> None:
        """Where the node record is, all that it names is."""
        nodes.tiers[0] = tier
        if paths.node_record(0) in {entry.name for entry in tier.list(DIRECTORY)}:
            assert nodes.files(0) == nodes.wanted[0]
        rebuild(tier, lost, effort=ONE)  # and it goes on from there
        assert nodes.files(0) == nodes.wanted[0]

    return cut_everywhere(lambda tier: rebuild(tier, lost, effort=ONE), disk, check, make)


def test_a_power_cut_while_a_node_is_rebuilt() -> None:
    assert rebuilding() > 30


# Bugs that they could have; each must be found.


class SyncsNoPack(FlashTier):
    def create_pack(self, path: str, size_bytes: int) -> Any:
        writer = super().create_pack(path, size_bytes)
        writer._buffered.fsync = lambda: None  # type: ignore[method-assign]
        return writer


class KeepsTheRecord(FlashTier):
    """Deletes no record before the shares that it names are touched."""

    def delete(self, path: str) -> None:
        if not path.endswith("redundancy-00000.json"):
            super().delete(path)


@pytest.mark.parametrize("tier_class", [SyncsNoPack, KeepsTheRecord])
def test_careless_making_is_found(tier_class: type[FlashTier]) -> None:
    with pytest.raises((AssertionError, IntegrityError, FileNotFoundError)):
        protecting("xor:4", "2", make=lambda disk: tier_class(disk.root, disk))


def test_careless_rebuilding_is_found() -> None:
    with pytest.raises((AssertionError, IntegrityError)):
        rebuilding(make=lambda disk: SyncsNoPack(disk.root, disk))
