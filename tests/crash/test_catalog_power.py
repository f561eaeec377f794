"""Power lost after every operation of a save, a retirement, an opening: the newest that survives is whole."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run_dirs import RunDir

from safehold.errors import CheckpointError
from safehold.pipeline import sweep
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.verify import verify
from safehold.policy.retention import Keep
from safehold.testing.disk_faults import PowerLostError
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.flash import FlashTier

SEEDS = (1, 2, 3)


def run_on(disk: FakeDisk) -> RunDir:
    run = RunDir(Path(disk.root), FlashTier(disk.root, disk))
    run.incarnation = Catalog(run.tier).snapshot().newest
    return run


def prepared() -> FakeDisk:
    """Three commits of one incarnation, the oldest two un-committed long ago."""
    disk = FakeDisk(seed=0)
    run = run_on(disk)
    for step in (10, 20, 30):
        run.save(step, {"w": np.arange(12.0)}, {"step": step})
    sweep.retire(run.tier, Keep(last=2), incarnation=1, grace_s=1e6, clock=run)
    return disk.crash(survival="lost")


READS = {"pread", "size", "scan", "stat", "open", "close", "free_bytes", "file_system"}


def cut_after_every_operation(action, check, seed: int) -> None:
    """Run `action` on a fresh copy once for each operation that changes something, the power cut in it; and once to its end."""
    base = prepared()
    whole = base.crash(seed=seed)
    run = run_on(whole)
    begun = whole.num_ops
    action(run)
    cuts = [op.index - begun for op in whole.log if op.index >= begun and op.kind not in READS]
    assert len(cuts) > 3
    check(run_on(whole.crash(seed=seed)), True)
    for count in cuts:
        disk = base.crash(seed=seed)
        run = run_on(disk)
        disk.crash_after(disk.num_ops + count)
        with pytest.raises((PowerLostError, CheckpointError)):
            action(run)
        check(run_on(disk.crash(seed=seed * 1000 + count)), False)


def newest_is_whole(run: RunDir) -> int:
    found = find_restore_candidate(run.tier, clock=run, patience_s=0.0)
    assert found.checkpoint is not None and found.rejected == () and found.problems == ()
    for view in Catalog(run.tier).commits():
        report = verify(run.tier, view.commit, direct=False, patience_s=0.0)
        assert report.ok, report
    return found.checkpoint.commit.step


@pytest.mark.parametrize("seed", SEEDS)
def test_save(seed: int):
    def check(run: RunDir, ended: bool) -> None:
        step = newest_is_whole(run)
        assert step == 40 if ended else step in (30, 40)

    cut_after_every_operation(lambda run: run.save(40, {"w": np.ones(9)}, {"step": 40}), check, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_retire_and_sweep(seed: int):
    def act(run: RunDir) -> None:
        run.now_s += 1e9
        sweep.retire(run.tier, Keep(last=1), incarnation=1, grace_s=0.0, clock=run)
        sweep.sweep(run.tier, incarnation=1, live=(), plans_in_use=(), clock=run)

    def check(run: RunDir, ended: bool) -> None:
        assert newest_is_whole(run) == 30
        left = [view.commit.step for view in Catalog(run.tier).commits()]
        # What was un-committed before does not come back.
        assert left == [30] if ended else left in ([30, 20], [30])

    cut_after_every_operation(act, check, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_open_incarnation(seed: int):
    def check(run: RunDir, ended: bool) -> None:
        assert newest_is_whole(run) == 20 if run.incarnation == 2 else newest_is_whole(run) == 30
        assert run.incarnation == 2 if ended else run.incarnation in (1, 2)

    cut_after_every_operation(lambda run: run.open(up_to_step=20), check, seed)
