"""Opening incarnations, committing, un-committing: two jobs in one directory, lost replies, races with a deletion."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest
from run_dirs import RunDir, flip

from safehold.errors import ConfigurationError, ManifestError, StorageError, SupersededError
from safehold.format import paths, records
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog
from safehold.policy import belief
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId


def believed(run: RunDir) -> list[CommitId]:
    return belief.believed(Catalog(run.tier).listing())


class Meddler(FakeTier):
    """Runs a function once, just before an operation on a path that ends so."""

    def meddle(self, kind: str, end: str, action) -> None:
        whole = getattr(self, kind)

        def wrapped(path: str, *args, **options):
            nonlocal action
            if action is not None and path.endswith(end):
                run_it, action = action, None
                run_it()
            return whole(path, *args, **options)

        setattr(self, kind, wrapped)


def test_first_use_makes_the_run(run: RunDir):
    opened = ledger.open_incarnation(run.tier, "t1", clock=run, library="9.9")
    assert opened.record.number == 1 and opened.accepted == () and opened.record.token == "t1"
    info = records.decode_run((run.root / "run.json").read_bytes())
    assert info.run_id == opened.record.run_id and len(info.run_id) == 32 and info.library == "9.9"
    assert ledger.open_incarnation(run.tier, "t2").record.number == 2


def test_foreign_directory_is_refused_and_left_alone(run: RunDir):
    run.root.mkdir()
    (run.root / "model.pt").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"holds model\.pt") as caught:
        ledger.open_incarnation(run.tier, "t")
    assert caught.value.hint and os.listdir(run.root) == ["model.pt"]


@pytest.mark.parametrize("name", ["lost+found", ".tmp-1-abc"])
def test_what_file_systems_and_crashes_leave_is_no_foreign_file(run: RunDir, name: str):
    (run.root / name).mkdir(parents=True)
    assert ledger.open_incarnation(run.tier, "t").record.number == 1


def test_lost_run_json_is_written_again(run: RunDir):
    run.save(10)
    run_id = run.run_id
    (run.root / "run.json").unlink()
    run.open()
    assert records.decode_run((run.root / "run.json").read_bytes()).run_id == run_id


def test_two_jobs_that_start_at_once_get_different_runs_never(run: RunDir):
    tier = Meddler(run.tier)
    tier.meddle("put", "run.json", lambda: run.open())
    opened = ledger.open_incarnation(tier, "late")
    assert opened.record.run_id == run.run_id and opened.record.number == 2


def test_number_taken_by_another_looks_again(run: RunDir):
    run.save(10)
    run.save(20)
    tier = Meddler(run.tier)
    tier.meddle("put", "2.json", lambda: run.open(up_to_step=10))
    opened = ledger.open_incarnation(tier, "late")
    assert run.incarnation == 2 and opened.record.number == 3
    # What the other rolled back stays rolled back.
    assert opened.accepted == (CommitId(10, 1, 0),)


def test_a_lost_reply_gives_the_same_incarnation_again(run: RunDir):
    run.save(10)
    tier = FakeTier(run.tier)
    tier.fail("put", path="incarnations/*", error=OSError(errno.EIO, "reply lost"), applied=True)
    with pytest.raises(StorageError):
        ledger.open_incarnation(tier, "mine")
    again = ledger.open_incarnation(tier, "mine")
    assert again.record.number == 2 and again.accepted == (CommitId(10, 1, 0),)
    assert ledger.open_incarnation(tier, "other").record.number == 3


def test_the_accept_rule_decides(run: RunDir):
    for step in (10, 20, 30):
        run.save(step)
    opened = ledger.open_incarnation(run.tier, "t", ledger.accept_all(up_to_step=20), "rollback")
    assert opened.accepted == (CommitId(20, 1, 0), CommitId(10, 1, 0)) and opened.record.reason == "rollback"
    opened = ledger.open_incarnation(run.tier, "u", ledger.accept_all(exclude={CommitId(20, 1, 0)}))
    assert [commit.step for commit in opened.accepted] == [10]


def test_deleted_while_opening_is_withdrawn_for_good(run: RunDir):
    """The old job un-commits 10 after the new one has looked: its bytes may be going, so the new one must not rely on it."""
    run.save(10)
    run.save(20)
    tier = Meddler(run.tier)
    tier.meddle("put", "2.json", lambda: ledger.uncommit(run.tier, 10, incarnation=1, reason="retention", clock=run))
    opened = ledger.open_incarnation(tier, "new")
    assert opened.withdrawn == (CommitId(10, 1, 0),) and opened.accepted == (CommitId(20, 1, 0),)
    assert [commit.step for commit in believed(run)] == [20]
    # The next one does not bring it back either.
    ledger.open_incarnation(run.tier, "next")
    assert [commit.step for commit in believed(run)] == [20]


def test_a_tombstone_that_was_void_before_is_no_reason_to_withdraw(run: RunDir):
    run.save(10)
    run.open()
    ledger.uncommit(run.tier, 10, incarnation=1, reason="late deleter", clock=run)
    assert [commit.step for commit in believed(run)] == [10]
    opened = ledger.open_incarnation(run.tier, "third")
    assert opened.withdrawn == () and [commit.step for commit in opened.accepted] == [10]


def test_publish_is_idempotent_and_never_replaces(run: RunDir):
    commit = run.save(10)
    data = run.path(commit, "manifest.json").read_bytes()
    ledger.publish(run.tier, commit, data)
    manifest = records.decode_manifest(data, path="")
    other = records.encode_manifest(msgspec.structs.replace(manifest, metrics={"loss": 1.0}))
    with pytest.raises(ManifestError, match="never replaced"):
        ledger.publish(run.tier, commit, other)
    assert run.path(commit, "manifest.json").read_bytes() == data


def publishable(run: RunDir) -> tuple[CommitId, bytes]:
    """An attempt that only lacks its manifest."""
    commit = run.save(20)
    file = run.path(commit, "manifest.json")
    data = file.read_bytes()
    file.unlink()
    return commit, data


def test_publish_checks_what_it_is_given(run: RunDir):
    commit, data = publishable(run)
    with pytest.raises(ManifestError):
        ledger.publish(run.tier, commit, data[:-1])
    with pytest.raises(ManifestError, match="another checkpoint"):
        ledger.publish(run.tier, CommitId(21, 1, 0), data)
    plan = next((run.root / "plans").iterdir())
    whole = plan.read_bytes()
    plan.write_bytes(whole[:-1])
    with pytest.raises(ManifestError, match="bytes, the manifest says"):
        ledger.publish(run.tier, commit, data)
    plan.write_bytes(whole)
    flip(plan, len(whole) // 2)
    with pytest.raises(ManifestError, match="damaged") as caught:
        ledger.publish(run.tier, commit, data)
    assert caught.value.path == f"plans/{plan.name}", "so that whoever has the plan can write it again"
    plan.unlink()
    with pytest.raises(ManifestError, match="is missing"):
        ledger.publish(run.tier, commit, data)
    assert believed(run) == []
    plan.write_bytes(whole)
    ledger.publish(run.tier, commit, data)
    assert believed(run) == [commit]


def test_publish_of_a_superseded_job_is_told(run: RunDir):
    commit, data = publishable(run)
    tier = Meddler(run.tier)
    tier.meddle("put", "manifest.json", lambda: run.open())
    with pytest.raises(SupersededError, match="took over while step 20"):
        ledger.publish(tier, commit, data)
    run.path(commit, "manifest.json").unlink()
    with pytest.raises(SupersededError, match="incarnation 2 owns"):
        ledger.publish(run.tier, commit, data)
    assert believed(run) == []


def test_publish_that_the_next_incarnation_saw_counts(run: RunDir):
    commit, data = publishable(run)
    tier = FakeTier(run.tier)
    wrote = tier.put

    def put(path: str, *args, **options):
        wrote(path, *args, **options)
        run.open()

    tier.put = put  # type: ignore[method-assign]
    ledger.publish(tier, commit, data)
    assert run.incarnation == 2 and believed(run) == [commit]


@pytest.mark.parametrize("fail_at", range(6))
def test_a_publish_that_fails_anywhere_can_be_repeated(run: RunDir, fail_at: int):
    commit, data = publishable(run)
    tier = FakeTier(run.tier)
    tier.fail("*", at=fail_at)
    try:
        ledger.publish(tier, commit, data)
    except StorageError:
        ledger.publish(tier, commit, data)
    assert believed(run) == [commit]


def test_uncommit_buries_every_attempt_the_one_that_counts_last(run: RunDir):
    run.save(10)
    run.save(20, attempt=0)
    run.save(20, attempt=1)
    tier = FakeTier(run.tier)
    done = ledger.uncommit(tier, 20, incarnation=1, reason="test", clock=run)
    assert done == [CommitId(20, 1, 0), CommitId(20, 1, 1)]
    assert [op.path.split("/")[2] for op in tier.log if op.kind == "put"] == ["1-0", "1-1"]
    assert [commit.step for commit in believed(run)] == [10]
    assert ledger.uncommit(run.tier, 20, incarnation=1, reason="again", clock=run) == done


def test_a_tombstone_is_void_where_a_newer_incarnation_lists_the_checkpoint(run: RunDir):
    run.save(10)
    run.open()
    ledger.uncommit(run.tier, 10, incarnation=1, reason="by the old job", clock=run)
    assert [commit.step for commit in believed(run)] == [10]
    ledger.uncommit(run.tier, 10, incarnation=2, reason="by the new job", clock=run)
    assert believed(run) == []


def test_put_plan_heals_a_damaged_one_and_checks_the_digest(run: RunDir):
    run.save(10)
    plan = next((run.root / "plans").iterdir())
    whole = plan.read_bytes()
    plan.write_bytes(b"rotten")
    ledger.put_plan(run.tier, plan.name, whole)
    assert plan.read_bytes() == whole
    with pytest.raises(ManifestError, match="digest"):
        ledger.put_plan(run.tier, plan.name, b"other")


def test_put_plan_replaces_one_that_cannot_be_read(run: RunDir):
    run.save(10)
    plan = next((run.root / "plans").iterdir())
    whole = plan.read_bytes()
    plan.write_bytes(b"rotten")
    tier = FakeTier(run.tier)
    tier.fail("get")
    ledger.put_plan(tier, plan.name, whole)
    assert plan.read_bytes() == whole


def test_buried_before_its_manifest_comes_an_attempt_is_never_believed(run: RunDir):
    run.save(10)
    commit, data = publishable(run)
    ledger.bury(run.tier, commit, incarnation=1, reason="given up", clock=run)
    ledger.bury(run.tier, commit, incarnation=1, reason="again", clock=run)
    ledger.publish(run.tier, commit, data)
    assert [commit.step for commit in believed(run)] == [10]


def test_pins(run: RunDir):
    run.save(10)
    ledger.put_pin(run.tier, 10, note="a", clock=run)
    ledger.put_pin(run.tier, 10, note="b", clock=run)
    assert Catalog(run.tier).snapshot().pins[10].note == "b"
    ledger.remove_pin(run.tier, 10)
    ledger.remove_pin(run.tier, 10)
    assert not Catalog(run.tier).snapshot().pins and not (run.root / paths.pin(10)).exists()
