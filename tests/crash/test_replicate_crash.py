"""Power cuts after every operation of a replication: the second place has a checkpoint whole or not at all, and goes on from there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_dirs import RunDir

from safehold.errors import CheckpointError
from safehold.format import paths
from safehold.pipeline import ledger, replica_claim, replicas
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.replicate import replicate
from safehold.pipeline.trials import CopySettings
from safehold.pipeline.verify import verify
from safehold.policy import belief
from safehold.policy.retention import Keep
from safehold.testing.crash_model import Survival
from safehold.testing.disk_faults import Op, PowerLostError
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

SURVIVALS: tuple[tuple[int, Survival], ...] = ((0, "lost"), (0, "kept"), (1, "random"))
ONE_BY_ONE = CopySettings(packs_at_once=1, threads=1, chunk_bytes=1 << 20, retry_s=0.0)
"""One thread, so that a seed and a number of operations always mean the same."""


@pytest.fixture(autouse=True)
def dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever met a power cut is dead, though here it is the process of the test."""
    monkeypatch.setattr(replica_claim, "_is_alive", lambda record: False)


def tier_of(disk: FakeDisk) -> FlashTier:
    return FlashTier(disk.root, disk)


@pytest.fixture
def source() -> RunDir:
    """Two checkpoints of one rank with two packs each."""
    disk = FakeDisk("/fake/source")
    run = RunDir(Path(disk.root), tier_of(disk))
    for step in (10, 20):
        tensors = {name: np.full((40, 20), step + n, np.float64) for n, name in enumerate("ab")}
        run.save(step, tensors, {"step": step}, world_size=1, pack_size_bytes=8192)
    return run


def copy(run: RunDir, disk: FakeDisk, commit: CommitId) -> int:
    """Copy one checkpoint; return how many bytes were sent."""
    target: Any = tier_of(disk)
    return replicate(
        run.tier, target, commit, settings=ONE_BY_ONE, clock=run, rng=random.Random(0), patience_s=0.0
    ).sent_bytes


def whole(disk: FakeDisk) -> set[CommitId]:
    """What counts there; whatever has a manifest verifies."""
    tier = tier_of(disk)
    listing = Catalog(tier).listing()
    for commit, view in listing.attempts.items():
        if view.has_manifest and not view.tombstones:
            report = verify(tier, commit, direct=False, patience_s=0.0)
            assert report.ok, report
    return set(belief.believed(listing))


def cut_everywhere(base: FakeDisk, act: Callable[[FakeDisk], object], check: Callable[[FakeDisk, bool], None]) -> int:
    """Do something with the power cut in each operation that changes something; check what survives, and go on from it where chance
    decided what does. Return how many there were."""
    disk = base.crash(survival="kept")
    act(disk)
    changing = [op.index for op in disk.log if op.changes]
    for index in changing:
        disk = base.crash(seed=index, survival="kept")
        disk.crash_after(index)
        with pytest.raises((PowerLostError, CheckpointError)):
            act(disk)
        for seed, survival in SURVIVALS:
            survivor = disk.crash(seed=1000 * seed + index, survival=survival)
            try:
                check(survivor, survival == "random")
            except BaseException as exc:
                exc.add_note(f"power cut in operation {index}, {survival}, seed {seed}")
                raise
    return len(changing)


def commits(run: RunDir) -> tuple[CommitId, CommitId]:
    late, early = belief.believed(Catalog(run.tier).listing())
    return early, late


def test_into_a_new_directory(source: RunDir) -> None:
    _, late = commits(source)

    def check(disk: FakeDisk, goes_on: bool) -> None:
        assert whole(disk) <= {late}
        if goes_on:
            copy(source, disk, late)
            assert whole(disk) == {late}

    assert cut_everywhere(FakeDisk(), lambda disk: copy(source, disk, late), check) > 40


def test_beside_an_older_checkpoint_of_an_older_incarnation(source: RunDir) -> None:
    """The source has let go of what the second place still has: that one counts until the new one does."""
    early, late = commits(source)
    base = FakeDisk()
    copy(source, base, early)
    ledger.uncommit(source.tier, 10, incarnation=1, reason="retention")
    source.open()

    def check(disk: FakeDisk, goes_on: bool) -> None:
        found = whole(disk)
        incarnations = {entry.name for entry in tier_of(disk).list(paths.INCARNATIONS)}
        # Between the new incarnation and the manifest lies one operation, with all bytes there.
        assert found in ({early}, {late}) or (incarnations == {"1.json", "2.json"} and not found)
        if goes_on:
            copy(source, disk, late)
            assert whole(disk) == {late}

    assert cut_everywhere(base, lambda disk: copy(source, disk, late), check) > 30


def test_mending_a_copy(source: RunDir) -> None:
    early, late = commits(source)
    base = FakeDisk()
    for commit in (early, late):
        copy(source, base, commit)
    name = f"{paths.checkpoint_dir(late)}/00000-00000.1.safetensors"
    base.truncate(name, 100)

    def check(disk: FakeDisk, goes_on: bool) -> None:
        tier = tier_of(disk)
        listing = Catalog(tier).listing()
        assert early in belief.believed(listing)
        if listing.attempts[late].has_manifest and tier.size(name) > 100:
            assert verify(tier, late, direct=False, patience_s=0.0).ok
        if goes_on:
            copy(source, disk, late)
            assert whole(disk) == {early, late}

    assert cut_everywhere(base, lambda disk: copy(source, disk, late), check) > 15


def test_again_after_it_was_deleted_there(source: RunDir) -> None:
    early, late = commits(source)
    base = FakeDisk()
    for commit in (early, late):
        copy(source, base, commit)
    ledger.uncommit(tier_of(base), 10, incarnation=1, reason="retention")

    def check(disk: FakeDisk, goes_on: bool) -> None:
        assert late in whole(disk) <= {early, late}
        if goes_on:
            copy(source, disk, early)
            assert whole(disk) == {early, late}

    assert cut_everywhere(base, lambda disk: copy(source, disk, early), check) > 30


def test_letting_go_there(source: RunDir) -> None:
    early, late = commits(source)
    base = FakeDisk()
    for commit in (early, late):
        copy(source, base, commit)

    def act(disk: FakeDisk) -> None:
        for _ in range(2):
            replicas.let_go((), tier_of(disk), Keep(last=1), grace_s=0.0, clock=source)

    def check(disk: FakeDisk, goes_on: bool) -> None:
        assert late in whole(disk) <= {early, late}

    assert cut_everywhere(base, act, check) > 3


def test_a_resumed_one_sends_less(source: RunDir) -> None:
    """A power cut after the first pack is durable: it is not sent again."""
    _, late = commits(source)
    disk = FakeDisk()
    total = copy(source, disk, late)
    noted = [op.index for op in disk.log if op.kind == "rename" and op.path.startswith(paths.REPLICATIONS)]
    assert len(noted) >= 2
    cut = FakeDisk()
    synced = next(
        op.index for op in disk.log if op.index > noted[0] and op.kind == "create" and "safetensors" in op.path
    )
    cut.crash_after(synced)
    with pytest.raises(PowerLostError):
        copy(source, cut, late)
    survivor = cut.crash(survival="kept")
    assert 0 < copy(source, survivor, late) < total
    assert whole(survivor) == {late}


# Bugs that a replication could have; each must be found.


class SyncsWithTheManifest(FlashTier):
    """Makes names in a checkpoint's directory durable together with its manifest, and not before."""

    syncs = True

    def sync_tree(self, directory: str) -> None:
        return

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        self.syncs = "/node-" not in path
        super().put(path, data, exclusive=exclusive)

    def _sync_upward(self, directory: str) -> None:
        if self.syncs:
            super()._sync_upward(directory)


class FinishesNothing(FlashTier):
    def create_pack(self, path: str, size_bytes: int) -> Any:
        writer = super().create_pack(path, size_bytes)
        writer._buffered.fsync = lambda: None  # type: ignore[method-assign]
        return writer


@pytest.mark.parametrize("tier_class", [FinishesNothing, SyncsWithTheManifest, FlashTier])
def test_a_careless_place_is_found(source: RunDir, tier_class: type[FlashTier]) -> None:
    _, late = commits(source)

    def run(disk: FakeDisk) -> None:
        target = tier_class(disk.root, disk)
        replicate(source.tier, target, late, settings=ONE_BY_ONE, clock=source, rng=random.Random(0), patience_s=0.0)

    disk = FakeDisk()
    run(disk)
    visible = next(op.index for op in disk.log if op.kind == "link" and op.path.endswith("manifest.json"))
    cut = FakeDisk()
    cut.crash_after(visible + 1)
    with pytest.raises(PowerLostError):
        run(cut)

    def is_broken(seed: int) -> bool:
        try:
            whole(cut.crash(seed=seed))
        except AssertionError:
            return True
        return False

    assert any(is_broken(seed) for seed in range(100)) == (tier_class is not FlashTier)


def test_a_claim_vouches_for_nothing_that_is_being_written(source: RunDir) -> None:
    _, late = commits(source)
    disk = FakeDisk()
    copies: list[Op] = []
    copy(source, disk, late)
    copies = [op for op in disk.log if op.kind == "create" and op.path.endswith(".safetensors")]
    assert len(copies) == 2
    for op in copies:
        cut = FakeDisk()
        cut.crash_after(op.index + 2)
        with pytest.raises(PowerLostError):
            copy(source, cut, late)
        left = tier_of(cut.crash(survival="kept"))
        record = replica_claim.unfinished(left)[late]
        assert record is not None and op.path.rpartition("/")[2] not in record.finished
