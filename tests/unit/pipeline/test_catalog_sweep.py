"""Retention, sweeping, making room: what goes, when, and that the last good checkpoint never does."""

from __future__ import annotations

import os
import time

import pytest
from run_dirs import RunDir, flip

from safehold.errors import IntegrityError, StorageError, StorageFullError, SupersededError
from safehold.format import paths
from safehold.pipeline import ledger, leftovers, sweep
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
        lambda: sweep.delete_bytes(run.tier, [CommitId(10, 1, 0)], incarnation=old, observer=None),
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


# -- attempts that do not count ----------------------------------------------------------------------------------------


def attempts(run: RunDir) -> list[tuple[int, int, int]]:
    """What still has bytes."""
    return sorted((c.step, c.incarnation, c.attempt) for c in Catalog(run.tier).listing().attempts)


def test_an_attempt_that_a_newer_one_replaced_goes_after_the_grace_time(run: RunDir):
    run.save(10)
    run.save(10, attempt=1)
    run.save(20)
    swept = retire(run, Keep(last=5))
    assert swept.uncommitted == (CommitId(10, 1, 0),) and swept.deleted == ()
    assert attempts(run) == [(10, 1, 0), (10, 1, 1), (20, 1, 0)]
    run.now_s += 101
    assert retire(run, Keep(last=5)).deleted == (CommitId(10, 1, 0),)
    assert steps(run) == [20, 10] and attempts(run) == [(10, 1, 1), (20, 1, 0)]
    assert retire(run, Keep(last=5)) == sweep.Swept()


def test_an_attempt_that_the_newer_incarnation_lists_and_has_replaced_goes_too(run: RunDir):
    run.save(10)
    run.open()
    run.save(10)
    assert retire(run, Keep(last=5), 0.0).deleted == (CommitId(10, 1, 0),)
    assert attempts(run) == [(10, 2, 0)]


@pytest.mark.parametrize("damage", ["pack", "record", "manifest", "plan", "quarantine", "leased", "not acknowledged"])
def test_a_replaced_attempt_stays_while_it_may_be_needed(run: RunDir, damage: str):
    old, new = run.save(10), run.save(10, attempt=1, world_size=3)
    options: dict = {"acknowledged": {old, new}}
    match damage:
        case "quarantine":
            ledger.put_quarantine(run.tier, new, incarnation=1, reason="x", clock=run)
        case "leased":
            options["leased"] = {old}
        case "not acknowledged":
            options["acknowledged"] = {old}
        case "plan":
            for plan in (run.root / "plans").iterdir():
                plan.write_bytes(b"")
        case _:
            names = {"pack": "00000-00000.0.safetensors", "record": "node-00000.json", "manifest": "manifest.json"}
            run.path(new, names[damage]).write_bytes(b"")
    assert retire(run, Keep(last=5), 0.0, **options) == sweep.Swept()
    assert attempts(run) == [(10, 1, 0), (10, 1, 1)]


def test_what_replaces_is_durable_before_what_it_replaces_is_uncommitted(run: RunDir):
    run.save(10)
    run.save(10, attempt=1)
    tier = FakeTier(run.tier)
    sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=100.0, clock=run)
    changes = [(op.kind, op.path.split("/", 2)[2]) for op in tier.log if op.kind in ("put", "sync_tree", "delete_tree")]
    assert changes == [("sync_tree", "1-1"), ("put", "1-0/tombstone-1.json")]


def test_nothing_goes_on_account_of_a_commit_that_may_be_withdrawn_yet(run: RunDir):
    first, second = run.save(10), run.save(20)
    publishing = run.save(30)  # its manifest is visible, and its publish has not been answered
    assert retire(run, Keep(last=1), 0.0, acknowledged={first, second}).uncommitted == (first,)
    assert ledger.withdraw(run.tier, publishing, clock=run)
    assert steps(run) == [20]
    run.save(40)
    assert retire(run, Keep(last=1), 0.0, acknowledged={second, CommitId(40, 1, 0)}).uncommitted == (second,)


def test_attempts_that_were_given_up_go_and_no_others(run: RunDir):
    run.save(5, publish=False)
    run.open()
    run.save(10)
    failed, live = run.save(20, publish=False), run.save(30, publish=False)
    visible = run.save(40)
    names = {failed, visible, CommitId(50, 2, 0), CommitId(5, 1, 0)}
    assert retire(run, Keep(last=5), given_up=names).deleted == ()
    assert (run.path(failed) / "tombstone-2.json").exists()
    for day in range(2):  # the second time the agent names nobody
        run.now_s += 101
        assert retire(run, Keep(last=5)).deleted == (() if day else (failed,))
    assert attempts(run) == [(5, 1, 0), (10, 2, 0), (30, 2, 0), (40, 2, 0)]
    assert run.path(live, "node-00000.json").exists()
    assert not (run.root / "checkpoints" / "000000020").exists()


def test_a_manifest_that_comes_after_its_attempt_was_given_up_counts_for_nothing(run: RunDir):
    run.save(10)
    commit = run.save(20)
    data = run.path(commit, "manifest.json").read_bytes()
    run.path(commit, "manifest.json").unlink()
    retire(run, Keep(last=5), given_up={commit})
    run.path(commit, "manifest.json").write_bytes(data)
    assert steps(run) == [10]
    run.now_s += 101
    assert retire(run, Keep(last=5)).deleted == (commit,)


def test_what_was_given_up_is_spared_where_a_newer_incarnation_owns_the_run(run: RunDir):
    run.save(10)
    failed = run.save(20, publish=False)
    old = run.incarnation
    run.open()
    with pytest.raises(SupersededError):
        sweep.retire(run.tier, Keep(last=1), incarnation=old, grace_s=0.0, given_up={failed}, clock=run)
    assert attempts(run) == [(10, 1, 0), (20, 1, 0)] and not (run.path(failed) / "tombstone-1.json").exists()


def test_empty_directories_of_steps_go_below_the_newest(run: RunDir):
    run.save(10)
    for step in (5, 15, 30):
        sweep.discard(run.tier, run.save(step, publish=False))
    run.save(20)
    retire(run, Keep(last=5))
    assert sorted(path.name for path in (run.root / "checkpoints").iterdir()) == ["000000010", "000000020", "000000030"]


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
    old = time.time() - 2 * leftovers.TEMPORARY_AGE_S
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


@pytest.mark.parametrize("full", [False, True])
def test_make_room_takes_what_was_given_up_at_once_and_leaves_who_is_saving(run: RunDir, full: bool):
    run.save(10)
    failed, visible, live = run.save(20, publish=False), run.save(25), run.save(30, publish=False)
    tier = Small(run, used(run))
    if full:
        tier.fail("put", path="*tombstone*", error=StorageFullError("full"), times=9)
    room = sweep.make_room(tier, 1000, keep=Keep(last=1), incarnation=1, given_up={failed, visible}, clock=run)
    assert room.enough and room.swept.deleted == (failed,) and room.swept.freed_bytes > 0
    assert there(run) == [10, 25, 30] and run.path(live).exists() and steps(run) == [25, 10]


def test_make_room_takes_what_is_uncommitted_before_its_grace_time(run: RunDir):
    run.save(10)
    run.save(20)
    retire(run, Keep(last=1))
    assert there(run) == [10, 20]
    sweep.make_room(Small(run, 0), 1, keep=Keep(last=1), incarnation=1, clock=run)
    assert there(run) == [20]


def test_retention_on_full_storage_deletes_at_once_what_it_cannot_bury(run: RunDir):
    for step in (10, 20, 30):
        run.save(step)
    tier = FakeTier(run.tier)
    tier.fail("put", path="*tombstone*", error=StorageFullError("full"), times=-1)
    swept = sweep.retire(tier, keep=Keep(last=1), incarnation=1, grace_s=60.0, clock=run)
    assert [commit.step for commit in swept.deleted] == [10, 20] and swept.freed_bytes > 0
    assert there(run) == steps(run) == [30]
