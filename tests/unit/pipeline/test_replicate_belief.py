"""What counts at a second place, what is refused, and several replications at once."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replica_runs import FakeClock, believed, copy, is_whole, save, tree
from run_dirs import RunDir, flip

from safehold.clock import SYSTEM_CLOCK
from safehold.errors import (
    CheckpointError,
    ChecksumError,
    CommitError,
    ConfigurationError,
    DeadlineError,
    ManifestError,
    SkippedError,
    StepNotFoundError,
    StorageError,
    SupersededError,
)
from safehold.format import paths
from safehold.pipeline import ledger, replica_claim
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId


@pytest.fixture
def there(tmp_path: Path) -> FakeTier:
    return FakeTier(FlashTier(tmp_path / "there"))


# Belief.


def test_only_what_is_believed_is_copied(run: RunDir, there: FakeTier) -> None:
    early, late = save(run, 10), save(run, 20)
    unpublished = save(run, 30, publish=False)
    run.open(up_to_step=10)
    for commit in (late, unpublished, CommitId(99, 1, 0)):
        with pytest.raises(StepNotFoundError):
            copy(run, there, commit)
    copy(run, there, early)
    assert believed(there) == [10]


def test_another_run_is_refused_by_name(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    other = RunDir(tmp_path / "there")
    other.save(5)
    before = tree(tmp_path / "there")
    with pytest.raises(ConfigurationError, match="another run") as caught:
        copy(run, there, commit)
    assert other.run_id in caught.value.message and run.run_id in caught.value.message
    assert tree(tmp_path / "there") == before


def test_a_directory_with_something_else_in_it_is_refused(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        copy(run, there, commit)


def test_a_rolled_back_source_rolls_the_copy_back(run: RunDir, there: FakeTier) -> None:
    early, late = save(run, 10), save(run, 20)
    copy(run, there, early)
    copy(run, there, late)
    run.open(up_to_step=10)
    assert copy(run, there, early).was_there
    assert believed(there) == [10]


def test_new_incarnations_never_leave_a_place_with_nothing(run: RunDir, there: FakeTier) -> None:
    """The job kept only what came later: until the new checkpoint is there, the old one is the only one there."""
    early, late = save(run, 10), save(run, 20)
    copy(run, there, early)
    ledger.uncommit(run.tier, 10, incarnation=1, reason="retention")
    run.open()
    there.fail("finish", times=-1)
    with pytest.raises(StorageError):
        copy(run, there, late)
    assert believed(there) == [10]
    there.heal()
    copy(run, there, late)
    assert believed(there) == [20]


def test_two_jobs_that_went_apart_are_refused(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    first = save(run, 10)
    copy(run, there, first)
    other = RunDir(tmp_path / "there")
    other.now_s += 5.0
    other.open()
    with pytest.raises(SupersededError, match="incarnation 2 of the second place does not list") as caught:
        copy(run, there, save(run, 20))
    assert caught.value.step == 20
    run.open()
    commit = save(run, 30)
    before = tree(tmp_path / "there")
    with pytest.raises(ManifestError, match="incarnation 2 is not the same") as other_error:
        copy(run, there, commit)
    assert other_error.value.path == "incarnations/2.json" and tree(tmp_path / "there") == before


def test_another_manifest_is_never_replaced(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    twin = RunDir(tmp_path / "there")
    shutil.rmtree(twin.path(commit))
    twin.incarnation = 1
    twin.save(10, {"w": np.ones(3)})
    before = tree(tmp_path / "there")
    with pytest.raises(ManifestError, match="another manifest"):
        copy(run, there, commit)
    assert tree(tmp_path / "there") == before


def test_one_that_is_uncommitted_meanwhile_is_not_completed(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    save(run, 20)
    gate = there.hang("finish")
    failures: list[CheckpointError] = []

    def work() -> None:
        try:
            copy(run, there, commit)
        except CheckpointError as exc:
            failures.append(exc)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert gate.reached.wait(20)
    ledger.uncommit(run.tier, 10, incarnation=1, reason="test")
    gate.release()
    thread.join(20)
    assert len(failures) == 1 and type(failures[0]) is CommitError and "un-committed" in failures[0].message
    assert believed(there) == [] and not there.list(paths.checkpoint_dir(commit)) and not there.list(paths.REPLICATIONS)


def test_bytes_that_go_after_it_was_uncommitted_are_told_as_that(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    source = FakeTier(run.tier)

    def vanish(path: str, **options: Any) -> Any:
        ledger.uncommit(run.tier, 10, incarnation=1, reason="test")
        raise FileNotFoundError(errno.ENOENT, "gone", path)

    source.open_pack = vanish  # type: ignore[method-assign]
    with pytest.raises(CommitError, match="un-committed at the source"):
        copy(run, there, commit, source=source)
    assert believed(there) == []


def test_one_that_was_deleted_there_can_be_sent_again(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    save(run, 20)
    copy(run, there, commit)
    ledger.uncommit(there, 10, incarnation=1, reason="retention")
    assert believed(there) == []
    done = copy(run, there, commit)
    assert done.kept_bytes == 0 and believed(there) == [10] and is_whole(there, commit)


# One at a time, cancelled, paced, stuck.


def test_a_second_replication_of_one_checkpoint_is_refused(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    there.put("run.json", (run.root / "run.json").read_bytes())
    claim = replica_claim.take(there, commit, "first", clock=FakeClock())
    with pytest.raises(ConfigurationError, match="of this host is copying this checkpoint"):
        copy(run, there, commit)
    claim.leave()
    copy(run, there, commit)
    assert is_whole(there, commit)


def test_a_claim_whose_answer_was_lost_is_ones_own(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    there.fail("put", path=f"{paths.REPLICATIONS}/*", applied=True)
    copy(run, there, commit, settings={"retry_s": 30.0})
    assert is_whole(there, commit) and not there.list(paths.REPLICATIONS)


def test_one_of_another_host_is_taken_over_and_cannot_commit(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    gate = there.hang("finish")
    failures: list[CheckpointError] = []

    def work() -> None:
        try:
            copy(run, there, commit)
        except CheckpointError as exc:
            failures.append(exc)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert gate.reached.wait(20)
    replica_claim.take(there, commit, "other", clock=FakeClock(), host="elsewhere")
    gate.release()
    thread.join(20)
    assert [type(exc) for exc in failures] == [SupersededError]
    assert believed(there) == []


def test_cancelled(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    cancelled = threading.Event()
    with pytest.raises(SkippedError, match="cancelled"):
        copy(run, there, commit, cancelled=cancelled, progress=lambda done, total: cancelled.set())
    assert believed(there) == []
    copy(run, there, commit)
    assert is_whole(there, commit)


def test_the_rate_is_kept(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    clock = FakeClock()
    began = clock.now_s
    done = copy(run, there, commit, clock=clock, settings={"rate_bytes_s": 1000, "threads": 1, "packs_at_once": 1})
    assert clock.now_s - began >= done.sent_bytes / 1000 * 0.999


def test_memory_is_bounded_by_the_buffers(run: RunDir, there: FakeTier) -> None:
    commit = run.save(10, {"w": np.zeros(1 << 20)}, world_size=1)
    copy(run, there, commit, settings={"chunk_bytes": 1 << 20, "threads": 3})
    assert max(op.nbytes for op in there.log if op.kind == "write_at") == 1 << 20
    assert is_whole(there, commit)


def test_storage_that_never_answers_is_given_up(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    gate = there.hang("write_at", times=-1)
    try:
        with pytest.raises(DeadlineError, match="no byte was copied"):
            copy(run, there, commit, clock=SYSTEM_CLOCK, settings={"stall_s": 0.3})
    finally:
        gate.release()
    assert believed(there) == []


def test_a_place_is_not_copied_onto_itself(run: RunDir) -> None:
    commit = save(run, 10)
    with pytest.raises(ConfigurationError, match="onto itself"):
        copy(run, run.tier, commit)


def test_fetched_back_into_an_empty_directory(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    back = FlashTier(tmp_path / "back")
    copy(run, back, commit, source=there, restrict=True)
    assert tree(tmp_path / "back") == tree(run.root)


def test_fetching_takes_nothing_away(run: RunDir, there: FakeTier, tmp_path: Path) -> None:
    """Somebody went on from the copy: its incarnation does not know what the run has made since."""
    first = save(run, 10)
    copy(run, there, first)
    save(run, 20)
    other = RunDir(tmp_path / "there", now_s=run.now_s + 5.0)
    other.open()
    moved = other.save(30)
    before = tree(run.root)
    with pytest.raises(ConfigurationError, match="step 20 would not count here any more"):
        copy(run, run.tier, moved, source=there, restrict=True)
    assert tree(run.root) == before


def test_missing_pieces_of_the_run_can_be_fetched(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    copy(run, there, commit)
    flip(run.path(commit, "00000-00000.0.safetensors"), 9000)
    with pytest.raises(ChecksumError):
        copy(run, FlashTier(run.root.parent / "third"), commit)
    ledger.put_quarantine(run.tier, commit, incarnation=1, reason="test")
    copy(run, run.tier, commit, source=there, restrict=True)
    assert is_whole(run.tier, commit)


class Careless(FlashTier):
    """Does not refuse to create a file twice, as some object stores."""

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        super().put(path, data)


def test_a_careless_store_may_hold_a_replica(run: RunDir, tmp_path: Path) -> None:
    there = Careless(tmp_path / "there")
    first = save(run, 10)
    copy(run, there, first)
    run.open()
    second = save(run, 20)
    copy(run, there, second)
    assert tree(tmp_path / "there") == tree(run.root) and is_whole(there, second)


def test_what_a_careless_store_has_is_not_replaced_either(run: RunDir, tmp_path: Path) -> None:
    """Another writer comes between our looking and our writing."""
    there = Careless(tmp_path / "there")
    commit = save(run, 10)
    incarnation = (run.root / "incarnations" / "1.json").read_bytes()
    twin = RunDir(tmp_path / "twin", now_s=run.now_s + 9.0)
    twin.tier.put("run.json", (run.root / "run.json").read_bytes())
    twin.open()
    foreign = (tmp_path / "twin" / "incarnations" / "1.json").read_bytes()
    assert foreign != incarnation
    source = FakeTier(run.tier)
    get, asked = source.get, [0]

    def racing(path: str, **options: Any) -> bytes:
        asked[0] += path == "incarnations/1.json"
        if asked[0] == 3:  # twice it is looked at, then it is copied
            FlashTier(tmp_path / "there").put("incarnations/1.json", foreign)
        return get(path, **options)

    source.get = racing  # type: ignore[method-assign]
    with pytest.raises(ManifestError, match="another incarnation of this number is there"):
        copy(run, there, commit, source=source)
    assert (tmp_path / "there" / "incarnations" / "1.json").read_bytes() == foreign


def test_cancelled_while_it_waits_for_its_rate(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    with pytest.raises(SkippedError, match="cancelled"):
        copy(run, there, commit, cancelled=cancelled, clock=SYSTEM_CLOCK, settings={"rate_bytes_s": 10})
    assert believed(there) == []


def test_a_record_that_a_committed_copy_left_is_removed(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    there.fail("delete", path=f"{paths.REPLICATIONS}/*", times=-1)
    assert copy(run, there, commit, settings={"retry_s": 0.0}).sent_bytes
    there.heal()
    assert believed(there) == [10] and there.list(paths.REPLICATIONS)
    assert copy(run, there, commit).was_there
    assert not there.list(paths.REPLICATIONS)


def test_a_damaged_record_of_another_replication_vouches_for_nothing(run: RunDir, there: FakeTier) -> None:
    commit = save(run, 10)
    there.put("run.json", (run.root / "run.json").read_bytes())
    there.put(paths.replication(commit, 4), b"rubbish")
    copy(run, there, commit)
    assert is_whole(there, commit) and not there.list(paths.REPLICATIONS)
