"""A second place that is full: what goes to make room for a replication, what stays, and what is told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from replica_runs import FakeClock, believed, is_whole, save
from run_dirs import RunDir

from safehold.config import Config
from safehold.errors import StorageError, StorageFullError
from safehold.format import paths
from safehold.format.records import Lease, Replication, encode_lease, encode_replication
from safehold.pipeline import ledger, replica_claim, replica_room, replicas
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.leases import Observer, Reader
from safehold.pipeline.remote_calls import RemoteCalls
from safehold.pipeline.trials import Trials
from safehold.policy.retention import Keep
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

PACKS_BYTES = 100_000
"""More than what a checkpoint of `save` takes, less than what two do."""


class SmallTier(FlashTier):
    """A place of so many bytes; `honest`: it says how many are free, which one with a quota does not."""

    limit_bytes = 1 << 40
    honest = True

    def _used(self) -> int:
        return sum(file.stat().st_size for file in Path(self.root).rglob("*") if file.is_file())

    def free_bytes(self) -> int | None:
        return max(0, self.limit_bytes - self._used()) if self.honest else 1 << 40

    def _refuse(self, size: int) -> None:
        if self._used() + size > self.limit_bytes:
            raise StorageFullError("writing failed: No space left on device [ENOSPC]", tier=self.name, path=self.url)

    def create_pack(self, path: str, size_bytes: int) -> Any:
        self._refuse(size_bytes)
        return super().create_pack(path, size_bytes)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        self._refuse(len(data))
        super().put(path, data, exclusive=exclusive)

    def probe(self) -> Any:
        self._refuse(4096)
        return super().probe()

    def fill(self, left: int = 0) -> None:
        self.limit_bytes = self._used() + left


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.open()
    return found


@pytest.fixture
def there(tmp_path: Path) -> SmallTier:
    return SmallTier(tmp_path / "there", name="remote")


def calls_of(run: RunDir, there: SmallTier, **settings: Any) -> RemoteCalls:
    return RemoteCalls(run.tier, there, Config(remote=there.url, remote_timeout_s=60.0, **settings), None)


def wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def begin(calls: RemoteCalls, commit: CommitId, *, full: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = calls.operations["copy_begin"]({"key": "k", "commit": wire(commit), "full": full})
    return found


def replicate(calls: RemoteCalls, commit: CommitId, *, full: bool = False, keep: int = 9) -> None:
    begun = begin(calls, commit, full=full)
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"], "node": 0, "nodes": begun["nodes"]}
    calls.operations["copy_data"](asked)
    assert calls.operations["copy_finish"]({"key": "k", "keep": keep}) == {"problem": None}


def half_copy(calls: RemoteCalls, commit: CommitId) -> None:
    """All packs are sent, and then it is given up."""
    begun = begin(calls, commit)
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"], "node": 0, "nodes": begun["nodes"]}
    calls.operations["copy_data"](asked)
    calls.operations["copy_leave"]({"key": "k"})


def is_there(there: SmallTier, commit: CommitId) -> bool:
    return (Path(there.root) / paths.checkpoint_dir(commit)).exists()


def test_what_was_left_half_copied_goes_for_the_next_and_what_counts_stays(run: RunDir, there: SmallTier) -> None:
    calls = calls_of(run, there)
    kept, left, newest = save(run, 10), save(run, 20), save(run, 30)
    replicate(calls, kept)
    half_copy(calls, left)
    there.fill(left=10_000)
    replicate(calls, newest)
    assert believed(there) == [30, 10] and is_whole(there, newest) and is_whole(there, kept)
    assert not is_there(there, left) and not replica_claim.unfinished(there)


def test_a_claim_that_could_not_even_be_left_is_over_in_the_same_process(run: RunDir, there: SmallTier) -> None:
    calls = calls_of(run, there)
    oldest, old, newest = save(run, 5), save(run, 10), save(run, 20)
    half_copy(calls, oldest)
    begun = begin(calls, old)
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"], "node": 0, "nodes": begun["nodes"]}
    calls.operations["copy_data"](asked)
    there.fill()
    calls.operations["copy_leave"]({"key": "k"})
    replicate(calls, newest)
    assert believed(there) == [20] and not is_there(there, old)


def test_what_another_process_may_still_copy_is_left_alone_and_the_place_is_told_to_be_full(
    run: RunDir, there: SmallTier
) -> None:
    calls = calls_of(run, there)
    other, newest = save(run, 10), save(run, 20)
    half_copy(calls, other)
    record = Replication(
        commit=other, number=9, token="t", host="another-host", pid=1, pid_ticks=1, created_s=1.0, finished=()
    )
    there.put(paths.replication(other, 9), encode_replication(record), exclusive=True)
    there.fill(left=10_000)
    for full in (False, True):
        with pytest.raises(StorageFullError, match=r"is full: \d+ bytes are to be sent, and \d+ are free") as caught:
            begin(calls, newest, full=full)
        assert caught.value.tier == "remote" and caught.value.step == 20
    assert is_there(there, other) and not believed(there)
    there.limit_bytes += PACKS_BYTES
    replicate(calls, newest)
    assert believed(there) == [20] and is_there(there, other)


def test_what_was_uncommitted_goes_unless_somebody_reads_it(run: RunDir, there: SmallTier) -> None:
    calls = calls_of(run, there)
    commits = [save(run, step) for step in (10, 20, 30)]
    for commit in commits[:2]:
        replicate(calls, commit, keep=1)
    assert believed(there) == [20] and is_there(there, commits[0]), "its grace time is not over"
    with Reader(there, lease_s=60.0, limit_s=60.0, host="h", pid=1) as reader:
        reader.hold(commits[0])
        there.fill(left=10_000)
        with pytest.raises(StorageFullError, match="is full"):
            begin(calls, commits[2])
        assert is_whole(there, commits[1]) and is_there(there, commits[0])
    there.fill(left=10_000)
    replicate(calls, commits[2])
    assert believed(there) == [30, 20] and not is_there(there, commits[0])


def test_a_place_that_does_not_even_take_a_claim_is_told_to_be_full(run: RunDir, there: SmallTier) -> None:
    calls = calls_of(run, there)
    replicate(calls, save(run, 10))
    there.fill(left=1)
    with pytest.raises(StorageFullError, match=r"is full: \d{4,} bytes are to be sent, and 1 are free"):
        begin(calls, save(run, 20))
    assert believed(there) == [10]


def test_a_quota_that_free_space_does_not_show(run: RunDir, there: SmallTier) -> None:
    calls = calls_of(run, there)
    old, newest = save(run, 10), save(run, 20)
    half_copy(calls, old)
    there.fill(left=10_000)
    there.honest = False
    begun = begin(calls, newest)
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"], "node": 0, "nodes": begun["nodes"]}
    with pytest.raises(StorageFullError, match=r"is full: \d+ bytes are to be sent"):
        calls.operations["copy_data"](asked)
    calls.operations["copy_leave"]({"key": "k"})
    assert is_there(there, old)
    replicate(calls, newest, full=True)
    assert believed(there) == [20] and not is_there(there, old)


def test_a_place_that_is_to_keep_fewer_lets_go_when_it_is_full(run: RunDir, there: SmallTier) -> None:
    commits = [save(run, step) for step in (10, 20, 30, 40)]
    for commit in commits[:3]:
        replicate(calls_of(run, there), commit)
    there.fill(left=10_000)
    with pytest.raises(StorageFullError, match="is full"):
        begin(calls_of(run, there, remote_keep=3), commits[3])
    assert believed(there) == [30, 20, 10]
    replicate(calls_of(run, there, remote_keep=2), commits[3], keep=2)
    assert believed(there) == [40, 30] and not is_there(there, commits[0])


def test_what_was_uncommitted_does_not_count_again_after_a_restart(run: RunDir, there: SmallTier) -> None:
    commits = [save(run, step) for step in (10, 20)]
    for commit in commits:
        replicate(calls_of(run, there), commit, keep=1)
    for step in (30, 40):
        run.open()  # its incarnation lists step 10, which is still here
        calls = calls_of(run, there)
        held = calls.operations["remote_look"]({})["held"]
        assert 10 not in [entry[0] for entry in held]
        commit = save(run, step)
        begin(calls, commit)
        assert is_there(there, commits[0]) and 10 not in believed(there) and 20 in believed(there)
        replicate(calls, commit)
        assert believed(there) == list(range(step, 10, -10))


def test_without_room_for_a_tombstone_the_bytes_go(run: RunDir, there: SmallTier) -> None:
    commits = [save(run, step) for step in (10, 20)]
    for commit in commits:
        replicate(calls_of(run, there), commit, keep=1)
    run.open()
    there.fill(left=PACKS_BYTES)
    there.limit_bytes -= 1
    newest = save(run, 30)
    put = there.put

    def no_tombstones(path: str, data: bytes, *, exclusive: bool = False) -> None:
        if "tombstone" in path:
            raise StorageFullError("full", tier="remote")
        put(path, data, exclusive=exclusive)

    there.put = no_tombstones  # type: ignore[method-assign]
    replicate(calls_of(run, there), newest)
    assert believed(there) == [30, 20] and not is_there(there, commits[0])


def test_a_full_place_is_told_to_be_full_at_the_start_and_what_it_holds_counts(run: RunDir, there: SmallTier) -> None:
    replicate(calls_of(run, there), save(run, 10))
    there.fill(left=3)
    seen = calls_of(run, there).operations["remote_look"]({})
    assert [entry[0] for entry in seen["held"]] == [10]
    (warning,) = seen["warnings"]
    assert "is full: 3 bytes are free, and a checkpoint needs about" in warning


def test_a_place_that_was_removed_is_made_again_by_the_next_replication(run: RunDir, there: SmallTier) -> None:
    calls = calls_of(run, there)
    replicate(calls, save(run, 10))
    shutil.rmtree(there.root)
    assert snapshots.identify(there) is None and replicas.survey(run.tier, there).complete == set()
    commit = save(run, 20)
    replicate(calls, commit)
    assert believed(there) == [20] and is_whole(there, commit) and (Path(there.root) / "run.json").exists()


@pytest.mark.parametrize("when", ["copy_data", "copy_finish"])
def test_a_place_that_is_removed_in_a_replication_fails_by_name_and_the_next_one_works(
    run: RunDir, there: SmallTier, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "wait", lambda self, seconds: None)
    calls = calls_of(run, there)
    commit = save(run, 10)
    begun = begin(calls, commit)
    asked = {"key": "k", "commit": begun["commit"], "claim": begun["claim"], "node": 0, "nodes": begun["nodes"]}
    for operation, arguments in (("copy_data", asked), ("copy_finish", {"key": "k", "keep": 9})):
        if operation == when:
            shutil.rmtree(there.root)
            with pytest.raises(StorageError) as caught:
                calls.operations[operation](arguments)
            assert str(there.root) in str(caught.value) or "remote" in str(caught.value)
            break
        calls.operations[operation](arguments)
    calls.operations["copy_leave"]({"key": "k"})
    assert not believed(there)
    replicate(calls, commit)
    assert believed(there) == [10] and is_whole(there, commit)


def test_what_is_fetched_is_leased_as_long_as_that_takes(
    run: RunDir, there: SmallTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safehold.pipeline import remote_calls

    commit, newest = save(run, 10), save(run, 20)
    for saved in (commit, newest):
        replicate(calls_of(run, there), saved)
    copy = remote_calls.replicate

    def meanwhile(*args: Any, **more: Any) -> Any:
        replicas.let_go((), there, Keep(last=1), grace_s=0.0)
        ledger.uncommit(there, 10, incarnation=1, reason="somebody deletes it now")
        assert replica_room.free(there, newest, None, own_is_over=True) == 0
        assert is_there(there, commit)
        monkeypatch.undo()
        raise StorageError("enough was seen")

    monkeypatch.setattr(remote_calls, "replicate", meanwhile)
    new = RunDir(tmp_path / "new")
    with pytest.raises(StorageError, match="enough"):
        calls_of(new, there).operations["fetch"]({"commit": wire(commit), "key": "f"})
    assert not there.list(paths.LEASES) and remote_calls.replicate is copy
    assert replica_room.free(there, newest, None, own_is_over=True) == 1 and not is_there(there, commit)


def test_a_lease_of_a_reader_that_is_dead_expires(run: RunDir, there: SmallTier) -> None:
    clock = FakeClock()
    commits = [save(run, step) for step in (10, 20)]
    for commit in commits:
        replicate(calls_of(run, there), commit, keep=1)
    lease = Lease(commit=commits[0], reader="a" * 32, host="h", pid=1, lease_s=60.0, renewals=0, created_s=clock.wall())
    there.put(paths.lease(10, "a" * 32), encode_lease(lease))
    observer = Observer(clock)
    for passes_s, gone in ((0.0, 0), (30.0, 0), (600.0, 1)):
        clock.sleep(passes_s)
        found = replica_room.free(there, commits[1], None, own_is_over=True, observer=observer, clock=clock)
        assert found == gone, passes_s
    assert not is_there(there, commits[0])
