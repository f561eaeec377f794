"""Readers' leases: what is leased stays, what a dead reader left does not hold for ever, and nobody slips between the two."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from run_dirs import RunDir, flip

from safehold.errors import DeadlineError, StorageError
from safehold.format import paths, records
from safehold.pipeline import leases, ledger, sweep
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.leases import Observer, Reader
from safehold.policy.leases import MAX_LEASES
from safehold.policy.retention import Keep
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.base import Tier
from safehold.types import CommitId

ID = "0a" * 16


def put(run: RunDir, commit: CommitId, reader: str = ID, **changes: Any) -> str:
    """Leave a lease of a reader elsewhere."""
    fields: dict[str, Any] = {"host": "h", "pid": 1, "lease_s": 600.0, "renewals": 0, "created_s": 1.0}
    lease = records.Lease(commit=commit, reader=reader, **(fields | changes))
    path = paths.lease(commit.step, reader)
    run.tier.put(path, records.encode_lease(lease))
    return path


class BeforeTombstone(FakeTier):
    """Something happens just before a tombstone is laid."""

    def __init__(self, inner: Tier, action: Callable[[], object]) -> None:
        super().__init__(inner)
        self.action = action

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        if "tombstone" in path:
            self.action()
        super().put(path, data, exclusive=exclusive)


def there(run: RunDir) -> list[int]:
    """Steps that still have bytes."""
    return sorted({commit.step for commit in Catalog(run.tier).listing().attempts})


def steps(run: RunDir) -> list[int]:
    return [view.commit.step for view in Catalog(run.tier).commits()]


def retire(run: RunDir, observer: Observer, grace_s: float = 0.0, **options: Any) -> sweep.Swept:
    keep = Keep(last=1)
    return sweep.retire(
        run.tier, keep, incarnation=run.incarnation, grace_s=grace_s, observer=observer, clock=run, **options
    )


def files(run: RunDir) -> list[str]:
    return [f"{paths.LEASES}/{entry.name}" for entry in run.tier.list(paths.LEASES)]


# -- retention -------------------------------------------------------------------------------------------------------------


def test_a_leased_checkpoint_stays_until_its_reader_has_been_silent_for_long(run: RunDir):
    commit = run.save(10)
    run.save(20)
    path = put(run, commit)
    observer = Observer(run)
    assert retire(run, observer) == sweep.Swept() and steps(run) == [20, 10]
    run.now_s += 500
    put(run, commit, renewals=1)
    assert retire(run, observer) == sweep.Swept()
    run.now_s += 599
    assert retire(run, observer) == sweep.Swept() and steps(run) == [20, 10]
    run.now_s += 1
    swept = retire(run, observer)
    assert swept.uncommitted == swept.deleted == (commit,) and swept.files == (path,)
    assert there(run) == [20] and files(run) == []


def test_no_clock_of_the_reader_and_no_time_of_a_file_counts(run: RunDir):
    commit = run.save(10)
    run.save(20)
    put(run, commit, created_s=1e15)
    observer = Observer(run)
    retire(run, observer)
    run.now_s += 600
    assert retire(run, observer).deleted == (commit,)


def test_a_lease_on_another_attempt_holds_the_bytes_of_that_one_only(run: RunDir):
    old = run.save(10)
    new = run.save(10, attempt=1)
    run.save(20)
    path = put(run, old)
    observer = Observer(run)
    assert retire(run, observer).deleted == (new,) and steps(run) == [20]
    assert there(run) == [10, 20] and run.path(old, "manifest.json").exists()
    run.tier.delete(path)
    assert retire(run, observer).deleted == (old,)


def test_what_is_leased_only_after_it_was_uncommitted_keeps_its_bytes(run: RunDir):
    """The reader looked before the tombstone was there, and its lease came after retention had looked for leases."""
    commit = run.save(10)
    run.save(20)
    tier = BeforeTombstone(run.tier, lambda: put(run, commit))
    observer = Observer(run)
    swept = sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, observer=observer, clock=run)
    assert swept.uncommitted == (commit,) and swept.deleted == () and there(run) == [10, 20]
    assert not leases.is_committed(run.tier, commit), "and a reader that looks now takes another one"
    assert retire(run, observer).deleted == ()
    run.now_s += 600
    assert retire(run, observer).deleted == (commit,) and there(run) == [20]


def test_leases_that_are_on_nothing_go(run: RunDir):
    commit = run.save(20)
    kept = put(run, commit)
    gone = [put(run, CommitId(10, 1, 0)), put(run, CommitId(20, 1, 5), "0b" * 16)]
    run.root.joinpath(paths.LEASES, "notes.txt").write_text("somebody's")
    assert sorted(retire(run, Observer(run), dry_run=True).files) == []
    assert sorted(retire(run, Observer(run)).files) == sorted(gone)
    assert sorted(files(run)) == sorted([kept, "leases/notes.txt"])


def test_a_lease_on_what_was_committed_meanwhile_stays(run: RunDir):
    """Retention has listed the checkpoints, and comes to the leases a save and a reader later."""
    run.save(10)
    tier = FakeTier(run.tier)
    listed, kept = tier.list, []

    def list_later(directory: str) -> Any:
        if directory == paths.LEASES and not kept:
            kept.append(put(run, run.save(20)))
            put(run, CommitId(20, 1, 9), "0b" * 16)
        return listed(directory)

    tier.list = list_later  # type: ignore[method-assign]
    swept = sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, clock=run)
    assert swept.files == (paths.lease(20, "0b" * 16),) and files(run) == kept


def test_a_lease_that_cannot_be_deleted_is_in_nobodys_way(run: RunDir):
    commit = run.save(10)
    run.save(20)
    put(run, commit)
    tier = FakeTier(run.tier)
    tier.fail("delete", path="leases/*", times=-1, error=OSError(errno.EACCES, "another user's"))
    observer = Observer(run)
    for _ in range(3):
        swept = sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, observer=observer, clock=run)
        run.now_s += 600
    assert there(run) == [20] and swept.files == ()


# -- what lies there may be anything ---------------------------------------------------------------------------------------

SWAPPED = {"reader": "0b" * 16, "commit": CommitId(11, 1, 0)}


@pytest.mark.parametrize(
    "damage", ["flipped", "empty", "large", "unreadable", "directory", "reader", "commit", "newer"]
)
def test_a_lease_that_does_not_verify_holds_its_step_for_a_while(run: RunDir, damage: str):
    commit = run.save(10)
    run.save(20)
    path = put(run, commit)
    file, tier = run.root / path, FakeTier(run.tier)
    match damage:
        case "flipped":
            flip(file, 100)
        case "empty":
            file.write_bytes(b"")
        case "large":
            file.write_bytes(b"x" * (1 << 20))
        case "unreadable":
            tier.fail("get", path=path, times=-1, error=OSError(errno.EACCES, "another user's"))
        case "directory":
            file.unlink()
            file.mkdir()
        case "newer":
            file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":2'))
        case _:
            other = put(run, SWAPPED["commit"] if damage == "commit" else commit, SWAPPED["reader"])
            (run.root / other).rename(file)
    observer = Observer(run)
    for _ in range(2):
        swept = sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, observer=observer, clock=run)
        assert swept.deleted == () and there(run) == [10, 20]
        run.now_s += 599
    run.now_s += 2
    swept = sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, observer=observer, clock=run)
    assert swept.deleted == (commit,) and there(run) == [20]


def test_names_that_are_no_leases_hold_nothing(run: RunDir):
    run.save(10)
    run.save(20)
    folder = run.root / paths.LEASES
    folder.mkdir()
    for name in (
        f"10-{ID}.json",
        f"000000010-{ID}.json~",
        f"000000010-{ID[:-1]}G.json",
        "000000010-..json",
        f"{ID}.json",
    ):
        folder.joinpath(name).write_bytes(b"x")
    assert [commit.step for commit in retire(run, Observer(run)).deleted] == [10]
    assert len(files(run)) == 5


def test_no_more_leases_are_read_than_there_may_be(run: RunDir):
    commit = run.save(10)
    run.save(20)
    folder = run.root / paths.LEASES
    folder.mkdir()
    for number in range(MAX_LEASES + 1):
        (run.root / paths.lease(10, f"{number:032x}")).write_bytes(b"x")
    tier, observer = FakeTier(run.tier), Observer(run)
    assert len(observer.look(tier).found) == MAX_LEASES + 1 and observer.look(tier).on(commit) is not None
    assert tier.count("get") == 2 * MAX_LEASES
    for _ in range(4):
        run.now_s += 600
        retire(run, observer)
    assert there(run) == [20], "those that were read go, and then the others are"


# -- sweeping and making room ----------------------------------------------------------------------------------------------


def test_the_sweep_leaves_what_is_leased(run: RunDir):
    commit = run.save(10)
    run.save(20)
    retire(run, Observer(run), grace_s=100.0)
    path = put(run, commit)
    run.now_s += 1000
    assert sweep.sweep(run.tier, incarnation=1, clock=run) == sweep.Swept()
    dry = sweep.sweep(run.tier, incarnation=1, ignore_leases=True, dry_run=True, clock=run)
    assert dry.deleted == (commit,) and dry.files == (path,) and there(run) == [10, 20]
    swept = sweep.sweep(run.tier, incarnation=1, ignore_leases=True, clock=run)
    assert swept.deleted == (commit,) and swept.files == (path,) and there(run) == [20] and files(run) == []


def test_what_a_rollback_set_aside_stays_while_it_is_read(run: RunDir):
    run.save(10)
    commit = run.save(20)
    run.open(up_to_step=10)
    run.now_s += 100
    put(run, commit)
    assert sweep.sweep(run.tier, incarnation=2, set_aside=True, clock=run).deleted == ()
    run.tier.delete(paths.lease(20, ID))
    assert sweep.sweep(run.tier, incarnation=2, set_aside=True, clock=run).deleted == (commit,)


def test_room_for_a_save_is_not_made_of_what_is_read(run: RunDir):
    commits = [run.save(step) for step in (10, 20, 30)]
    put(run, commits[0])
    room = sweep.make_room(run.tier, 1 << 60, keep=Keep(last=1), incarnation=1, clock=run)
    assert room.swept.uncommitted == (commits[1],) and there(run) == [10, 30]
    observer = Observer(run)
    ask = {"keep": Keep(last=1), "incarnation": 1, "observer": observer, "clock": run}
    assert sweep.make_room(run.tier, 1 << 60, **ask).swept.uncommitted == ()
    run.now_s += 600
    assert sweep.make_room(run.tier, 1 << 60, **ask).swept.deleted == (commits[0],) and there(run) == [30]


def test_room_is_not_made_of_what_is_leased_meanwhile(run: RunDir):
    commits = [run.save(step) for step in (10, 20, 30)]
    tier = BeforeTombstone(run.tier, lambda: put(run, commits[0]))
    room = sweep.make_room(tier, 1 << 60, keep=Keep(last=1), incarnation=1, clock=run)
    assert room.swept.uncommitted == tuple(commits[:2]) and room.swept.deleted == (commits[1],)
    assert there(run) == [10, 30]


def test_bytes_go_under_the_hands_of_a_reader_only_if_that_is_asked_for(run: RunDir):
    commit = run.save(10)
    run.save(20)
    ledger.uncommit(run.tier, 10, incarnation=1, reason="x", clock=run)
    put(run, commit)
    assert sweep.delete_bytes(run.tier, [commit], incarnation=1, observer=Observer(run)) == ((), 0)
    assert sweep.delete_bytes(run.tier, [commit], incarnation=1, observer=None)[0] == (commit,)


# -- who reads -------------------------------------------------------------------------------------------------------------


def reader(tier: Any, lease_s: float = 600.0, limit_s: float = 10.0) -> Reader:
    return Reader(tier, lease_s=lease_s, limit_s=limit_s, host="h\udc80" + "x" * 300, pid=7)


def test_a_reader_takes_renews_and_releases(run: RunDir):
    first, second = run.save(10), run.save(20)
    observer = Observer(run)
    with reader(run.tier, lease_s=1.0) as own:
        assert own.hold(first)
        held = observer.look(run.tier).on(first)
        assert held is not None and held.lease is not None and held.lease.pid == 7 and len(held.lease.host) == 255
        deadline = time.monotonic() + 10
        while observer.look(run.tier).on(first).lease.renewals < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert own.hold(second) and len(files(run)) == 1
        assert observer.look(run.tier).held([first, second]) == {second}
    assert files(run) == [] and "safehold-lease" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_lease_is_released_whatever_happens(run: RunDir, error: type[BaseException]):
    commit = run.save(10)
    with pytest.raises(error), reader(run.tier) as own:
        own.hold(commit)
        raise error
    assert files(run) == []


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_who_cannot_write_reads_without_and_says_so_once(
    run: RunDir, code: int, applied: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leases, "_told", set())
    commit = run.save(10)
    tier = FakeTier(run.tier)
    tier.fail("put", times=-1, error=OSError(code, "no"), applied=applied)
    with caplog.at_level(logging.WARNING, "safehold"):
        for _ in range(2):
            with reader(tier) as own:
                assert not own.hold(commit) and not own.hold(commit)
    assert [record.message.count("without a lease") for record in caplog.records] == [1]
    assert tier.count("put") == 2 and files(run) == []


def test_storage_that_does_not_answer_is_told(run: RunDir):
    commit = run.save(10)
    tier = FakeTier(run.tier)
    gate = tier.hang("put")
    own = reader(tier, limit_s=0.05)
    with pytest.raises(DeadlineError, match="taking a lease"):
        own.hold(commit)
    gate.release()
    own.let_go()
    assert files(run) == [], "what was put late is removed all the same"


def test_a_lease_that_is_not_renewed_is_told_once_and_tried_again(run: RunDir, caplog: pytest.LogCaptureFixture):
    commit = run.save(10)
    tier = FakeTier(run.tier)
    with reader(tier, lease_s=1.0) as own, caplog.at_level(logging.WARNING, "safehold"):
        own.hold(commit)
        tier.fail("put", times=2, error=OSError(errno.EIO, "no"))
        deadline = time.monotonic() + 10
        while tier.count("put") < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert [record.message.count("is not renewed") for record in caplog.records] == [1] and files(run) == []


def test_whether_it_is_still_committed(run: RunDir):
    old, new = run.save(10), run.save(10, attempt=1)
    unfinished = run.save(20, publish=False)
    assert [leases.is_committed(run.tier, c) for c in (old, new, unfinished)] == [True, True, False]
    ledger.uncommit(run.tier, 10, incarnation=1, reason="x", clock=run)
    assert not leases.is_committed(run.tier, old)


def test_leases_that_cannot_be_listed_stop_the_deletion(run: RunDir):
    run.save(10)
    run.save(20)
    tier = FakeTier(run.tier)
    tier.fail("list", path=paths.LEASES, error=OSError(errno.EIO, "no"))
    with pytest.raises(StorageError):
        sweep.retire(tier, Keep(last=1), incarnation=1, grace_s=0.0, clock=run)
    assert steps(run) == [20, 10]
