"""Retention, sweeping, making room: what goes, when, and that the last good checkpoint never does."""

from __future__ import annotations

import os
import time

import pytest
from run_dirs import RunDir, flip

from safehold.errors import IntegrityError, StorageError, SupersededError
from safehold.format import paths
from safehold.pipeline import ledger, sweep
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.policy.retention import Best, Keep
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId


def steps(run: RunDir) -> list[int]:
    return [view.commit.step for view in Catalog(run.tier).commits()]


def there(run: RunDir) -> list[int]:
    """Steps that still have bytes."""
    return sorted({commit.step for commit in Catalog(run.tier).listing().attempts})


def retire(run: RunDir, keep: Keep, grace_s: float = 100.0, **options) -> sweep.Swept:
    return sweep.retire(run.tier, keep, incarnation=run.incarnation, grace_s=grace_s, clock=run, **options)


def test_uncommits_first_and_deletes_after_the_grace_time(run: RunDir):
    for step in (10, 20, 30):
        run.save(step)
    swept = retire(run, Keep(last=1))
    assert [commit.step for commit in swept.uncommitted] == [10, 20] and swept.deleted == ()
    assert steps(run) == [30] and there(run) == [10, 20, 30]
    run.now_s += 99
    assert retire(run, Keep(last=1)).deleted == ()
    run.now_s += 2
    swept = retire(run, Keep(last=1))
    assert [commit.step for commit in swept.deleted] == [10, 20] and swept.freed_bytes > 0
    assert there(run) == [30]


def test_without_a_grace_time_bytes_go_at_once(run: RunDir):
    run.save(10)
    run.save(20)
    assert [commit.step for commit in retire(run, Keep(last=1), 0.0).deleted] == [10]


def test_what_is_kept(run: RunDir):
    run.save(10, metrics={"loss": 1.0})
    run.save(20, metrics={"loss": float("nan")})
    run.save(30, final=True)
    run.save(40)
    leased = run.save(50)
    run.save(60)
    ledger.put_pin(run.tier, 40, clock=run)
    retire(run, Keep(last=1, best=Best(metric="loss")), leased={leased})
    assert steps(run) == [60, 50, 40, 30, 10]


def test_dry_run_says_and_does_nothing(run: RunDir):
    run.save(10)
    run.save(20)
    tier = FakeTier(run.tier)
    swept = sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, dry_run=True, clock=run)
    assert [commit.step for commit in swept.uncommitted] == [10] and steps(run) == [20, 10]
    sweep.sweep(tier, incarnation=1, live=(), plans_in_use=(), dry_run=True, clock=run)
    assert not {op.kind for op in tier.log} & {"put", "delete", "delete_tree", "sweep_temporaries"}


def test_a_superseded_job_deletes_nothing(run: RunDir):
    run.save(10)
    run.save(20)
    retire(run, Keep(last=1))
    old, run.now_s = run.incarnation, run.now_s + 1000
    run.open()
    for action in (
        lambda: sweep.retire(run.tier, Keep(last=1), incarnation=old, grace_s=0.0, clock=run),
        lambda: sweep.sweep(run.tier, incarnation=old, live=(), clock=run),
        lambda: sweep.make_room(run.tier, 1 << 60, keep=Keep(last=1), incarnation=old, clock=run),
        lambda: sweep.delete_bytes(run.tier, [CommitId(10, 1, 0)], incarnation=old),
    ):
        with pytest.raises(SupersededError):
            action()
    assert there(run) == [10, 20]


def test_an_incarnation_that_appears_in_between_stops_the_deletion(run: RunDir):
    for step in (10, 20, 30):
        run.save(step)
    tier = FakeTier(run.tier)
    put = tier.put

    def put_and_open(path: str, *args, **options):
        put(path, *args, **options)
        if "tombstone" in path and run.incarnation == 1:
            run.open()

    tier.put = put_and_open  # type: ignore[method-assign]
    with pytest.raises(SupersededError):
        sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, clock=run)
    assert there(run) == [10, 20, 30]
    # 20 had not been un-committed yet, 10 had: the new one saw it.
    assert steps(run) == [30, 20]


@pytest.mark.parametrize("name", ["manifest.json", "node-00000.json", "00000-00000.0.safetensors"])
def test_nothing_goes_on_account_of_a_newest_that_is_not_whole(run: RunDir, name: str):
    run.save(10)
    commit = run.save(20)
    file = run.path(commit, name)
    file.write_bytes(file.read_bytes()[:-1])
    swept = retire(run, Keep(last=1), 0.0)
    assert swept.uncommitted == () and there(run) == [10, 20]
    if name != "manifest.json":
        assert isinstance(swept.problem, IntegrityError) and name in swept.problem.path
    assert find_restore_candidate(run.tier, clock=run).checkpoint.commit.step == 10


def test_retired_step_does_not_bring_an_earlier_attempt_to_light(run: RunDir):
    run.save(10, attempt=0)
    run.save(10, attempt=1)
    run.save(20)
    retire(run, Keep(last=1))
    assert steps(run) == [20]
    run.now_s += 200
    assert len(retire(run, Keep(last=1)).deleted) == 2
    assert there(run) == [20]


@pytest.mark.parametrize("applied", [False, True])
def test_cut_short_anywhere_the_newest_stays_and_nothing_comes_back(run: RunDir, applied: bool):
    """Fails each operation in turn, before or after it took effect; goes on until a whole pass met no failure."""
    for step in (10, 20, 30, 40):
        run.save(step)
    passed = False
    at = 0
    while not passed:
        tier = FakeTier(run.tier)
        tier.fail("*", at=at, applied=applied)
        try:
            sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, clock=run)
            passed = len(tier.log) <= at
        except StorageError:
            pass
        left = steps(run)
        assert left[0] == 40 and set(left) <= {10, 20, 30, 40}
        assert find_restore_candidate(run.tier, clock=run).checkpoint.commit.step == 40
        at += 1
    assert there(run) == [40]


def test_sweep_takes_dead_attempts_and_spares_live_ones(run: RunDir):
    run.save(10)
    dead = run.save(20, publish=False)
    run.open()
    live = run.save(30, publish=False)
    given_up = run.save(40, publish=False)
    swept = sweep.sweep(run.tier, incarnation=2, live=None, clock=run)
    assert swept.deleted == (dead,) and swept.freed_bytes > 0
    swept = sweep.sweep(run.tier, incarnation=2, live={live}, clock=run)
    assert swept.deleted == (given_up,)
    assert there(run) == [10, 30]
    assert not (run.root / "checkpoints" / "000000040").exists() or not run.path(given_up).exists()


def test_sweep_spares_a_checkpoint_whose_manifest_is_damaged(run: RunDir):
    commit = run.save(10)
    run.save(20)
    flip(run.path(commit, "manifest.json"))
    run.open()
    run.now_s += 1e6
    assert sweep.sweep(run.tier, incarnation=2, live=(), clock=run).deleted == ()
    assert there(run) == [10, 20]


def test_sweep_takes_unused_plans_only_if_it_knows_all_that_are_used(run: RunDir):
    run.save(10)
    run.save(20, world_size=3)
    run.save(30, world_size=4, publish=False)
    plans = {view.commit.step: view.manifest.plan_digest for view in Catalog(run.tier).commits()}
    assert sweep.sweep(run.tier, incarnation=1, clock=run).plans == ()
    unused = {file.name for file in (run.root / "plans").iterdir()} - set(plans.values())
    assert sweep.sweep(run.tier, incarnation=1, plans_in_use=unused, clock=run).plans == ()
    flip(run.path(CommitId(10, 1, 0), "manifest.json"))
    assert sweep.sweep(run.tier, incarnation=1, plans_in_use=(), clock=run).plans == ()
    flip(run.path(CommitId(10, 1, 0), "manifest.json"))
    assert set(sweep.sweep(run.tier, incarnation=1, plans_in_use=(), clock=run).plans) == unused
    assert find_restore_candidate(run.tier, clock=run).checkpoint.commit.step == 20


def test_sweep_takes_our_stale_temporaries_and_nothing_else(run: RunDir):
    commit = run.save(10)
    old = time.time() - 2 * sweep.TEMPORARY_AGE_S
    ours = [run.root / ".tmp-1-aa", run.root / "incarnations" / ".tmp-2-bb", run.path(commit, ".tmp-3-cc")]
    others = [run.root / "notes.txt", run.root / "checkpoints" / "000000010.backup", run.root / ".cache"]
    for file in (*ours, *others):
        file.write_text("x")
        os.utime(file, (old, old))
    fresh = run.root / ".tmp-4-dd"
    fresh.write_text("a living writer's")
    swept = sweep.sweep(run.tier, incarnation=1, live=(), clock=run)
    assert len(swept.files) == 3 and not any(file.exists() for file in ours)
    assert all(file.exists() for file in others) and fresh.exists()


def test_sweep_removes_records_and_directories_of_what_is_gone(run: RunDir):
    gone = run.save(10)
    run.save(20)
    ledger.put_quarantine(run.tier, gone, incarnation=1, reason="x", clock=run)
    retire(run, Keep(last=1), 0.0)
    sweep.sweep(run.tier, incarnation=1, live=(), clock=run)
    assert not (run.root / paths.quarantine(gone)).exists()
    assert [file.name for file in (run.root / "checkpoints").iterdir()] == ["000000020"]


def test_discard_refuses_what_is_committed(run: RunDir):
    committed = run.save(10)
    attempt = run.save(20, publish=False)
    sweep.discard(run.tier, attempt)
    assert there(run) == [10]
    with pytest.raises(IntegrityError, match="is committed"):
        sweep.discard(run.tier, committed)
    sweep.discard(run.tier, attempt)


class Small(FakeTier):
    """A tier of a fixed capacity."""

    def __init__(self, run: RunDir, capacity: int) -> None:
        super().__init__(run.tier)
        self.root, self.capacity = run.root, capacity

    def free_bytes(self) -> int | None:
        used = sum(file.stat().st_size for file in self.root.rglob("*") if file.is_file())
        return max(0, self.capacity - used)


def used(run: RunDir) -> int:
    return sum(file.stat().st_size for file in run.root.rglob("*") if file.is_file())


def test_make_room_does_nothing_where_it_fits(run: RunDir):
    run.save(10)
    run.save(20)
    room = sweep.make_room(Small(run, used(run) + 1000), 1000, keep=Keep(last=1), incarnation=1, clock=run)
    assert room.enough and room.swept == sweep.Swept() and steps(run) == [20, 10]


def test_make_room_takes_debris_first_then_the_oldest_that_would_go_anyway(run: RunDir):
    run.save(5, publish=False)
    run.open()
    for step in (10, 20, 30):
        run.save(step)
    tier = Small(run, used(run))
    room = sweep.make_room(tier, 1000, keep=Keep(last=2), incarnation=2, live=(), clock=run)
    assert room.enough and room.swept.uncommitted == () and there(run) == [10, 20, 30]
    room = sweep.make_room(tier, tier.free_bytes() + 1, keep=Keep(last=2), incarnation=2, live=(), clock=run)
    assert room.enough and [c.step for c in room.swept.uncommitted] == [10] and steps(run) == [30, 20]
    room = sweep.make_room(tier, 1 << 40, keep=Keep(last=2), incarnation=2, live=(), clock=run)
    # Keep(last=2) lets 20 go once the new save is there; the newest good one stays.
    assert not room.enough and steps(run) == [30]
    room = sweep.make_room(tier, 1 << 40, keep=Keep(last=1), incarnation=2, live=(), clock=run)
    assert not room.enough and steps(run) == [30]


def test_make_room_spares_the_newest_good_and_pinned_and_the_live_attempt(run: RunDir):
    for step in (10, 20, 30):
        run.save(step)
    live = run.save(40, publish=False)
    ledger.put_pin(run.tier, 10, clock=run)
    ledger.put_quarantine(run.tier, CommitId(30, 1, 0), incarnation=1, reason="x", clock=run)
    sweep.make_room(Small(run, 0), 1 << 40, keep=Keep(last=1), incarnation=1, live={live}, clock=run)
    assert 20 in steps(run) and 10 in steps(run) and run.path(live).exists()


def test_make_room_takes_what_is_uncommitted_before_its_grace_time(run: RunDir):
    run.save(10)
    run.save(20)
    retire(run, Keep(last=1))
    assert there(run) == [10, 20]
    sweep.make_room(Small(run, 0), 1, keep=Keep(last=1), incarnation=1, clock=run)
    assert there(run) == [20]
