"""Reading a run directory: what is believed, and what is refused by name."""

from __future__ import annotations

import shutil

import msgspec
import numpy as np
import pytest
from run_dirs import RunDir, flip

from safehold.errors import (
    ConfigurationError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    StepNotFoundError,
    TornFileError,
)
from safehold.format import paths, records
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.policy import belief
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.open import open_tier
from safehold.types import CommitId


def steps(run: RunDir) -> list[int]:
    return [view.commit.step for view in Catalog(run.tier).commits()]


def candidate(run: RunDir, step: int | None = None, **options):
    return find_restore_candidate(run.tier, step, clock=run, **options)


def test_an_absent_an_empty_and_a_fresh_run_have_no_candidate(run: RunDir):
    assert candidate(run).checkpoint is None
    run.root.mkdir()
    assert candidate(run).checkpoint is None
    run.open()
    found = candidate(run)
    assert (found.checkpoint, found.rejected, found.problems) == (None, (), ())


def test_newest_is_by_number_not_by_name_or_age(run: RunDir):
    for step in (10_000, 9_900, 1_000_000_000, 100):
        run.save(step)
    assert steps(run) == [1_000_000_000, 10_000, 9_900, 100]
    assert candidate(run).checkpoint.commit.step == 1_000_000_000


def test_facts_of_commits(run: RunDir):
    run.save(10, metrics={"loss": 0.5}, world_size=3, ranks_per_node=2)
    ledger.put_pin(run.tier, 10, note="good", clock=run)
    (view,) = Catalog(run.tier).commits()
    assert view.commit == CommitId(10, 1, 0)
    assert view.pinned and view.quarantine is None and view.error is None
    assert (view.manifest.metrics, view.manifest.world_size, len(view.manifest.nodes)) == ({"loss": 0.5}, 3, 2)
    on_disk = sum(file.stat().st_size for file in run.path(view.commit).iterdir())
    assert view.stored_bytes == on_disk > view.manifest.total_bytes > 0


@pytest.mark.parametrize("name", ["000000020.backup", "0000000020", "20", "000000020 ", "step-20", "-00000020"])
def test_look_alikes_of_step_directories_are_not_taken_for_one(run: RunDir, name: str):
    run.save(10)
    commit = run.save(20)
    run.path(commit).parent.rename(run.root / "checkpoints" / name)
    assert steps(run) == [10]


def test_copied_attempt_directory_is_refused_as_a_copy(run: RunDir):
    commit = run.save(10)
    shutil.copytree(run.path(commit), run.path(CommitId(20, 1, 0)))
    found = candidate(run)
    assert found.checkpoint.commit == commit
    ((bad, error),) = found.rejected
    assert bad.step == 20 and "step 10" in error.message and error.path.endswith("manifest.json")


def test_uncommitted_attempts_are_invisible(run: RunDir):
    run.save(10)
    run.save(20, publish=False)
    assert steps(run) == [10]
    assert candidate(run).rejected == ()
    with pytest.raises(StepNotFoundError, match="no such checkpoint") as caught:
        candidate(run, 20)
    assert caught.value.step == 20 and "10" in caught.value.hint


def damage_manifest(run, commit):
    flip(run.path(commit, "manifest.json"))


def cut_manifest(run, commit):
    file = run.path(commit, "manifest.json")
    file.write_bytes(file.read_bytes()[:-1])


def empty_manifest(run, commit):
    run.path(commit, "manifest.json").write_bytes(b"")


def swap_manifest(run, commit):
    shutil.copy(run.path(CommitId(10, 1, 0), "manifest.json"), run.path(commit, "manifest.json"))


def swap_record(run, commit):
    shutil.copy(run.path(CommitId(10, 1, 0), "node-00001.json"), run.path(commit, "node-00001.json"))


def exchange_records(run, commit):
    one, other = run.path(commit, "node-00000.json"), run.path(commit, "node-00001.json")
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def lose_record(run, commit):
    run.path(commit, "node-00001.json").unlink()


def cut_pack(run, commit):
    file = run.path(commit, "00001-00001.0.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def lose_pack(run, commit):
    run.path(commit, "00000-00000.0.safetensors").unlink()


def lengthen_objects(run, commit):
    with open(run.path(commit, "node-00000.objects"), "ab") as file:
        file.write(b"\0")


DAMAGES = [
    (damage_manifest, "manifest.json"),
    (cut_manifest, "manifest.json"),
    (empty_manifest, "manifest.json"),
    (swap_manifest, "manifest.json"),
    (swap_record, "node-00001.json"),
    (exchange_records, "node-00000.json"),
    (lose_record, "node-00001.json"),
    (cut_pack, "00001-00001.0.safetensors"),
    (lose_pack, "00000-00000.0.safetensors"),
    (lengthen_objects, "node-00000.objects"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_what_is_damaged_is_named_and_the_one_before_is_taken(run: RunDir, damage, name: str):
    good, bad = run.save(10), run.save(20)
    damage(run, bad)
    found = candidate(run)
    assert found.checkpoint.commit == good
    ((commit, error),) = found.rejected
    assert commit == bad and isinstance(error, IntegrityError)
    assert error.step == 20 and error.path.endswith(name)
    with pytest.raises(type(error)):
        candidate(run, 20)
    with pytest.raises(StepNotFoundError, match="none of the 2"):
        candidate(run, exclude=[good])


def test_plan_damaged_or_swapped(run: RunDir):
    run.save(10, world_size=3)
    bad = run.save(20)
    _, manifest = Catalog(run.tier).read_manifest(bad)
    plan = run.root / paths.plan(manifest.plan_digest)
    whole = plan.read_bytes()
    flip(plan, len(whole) // 2)
    assert candidate(run).checkpoint.commit.step == 10
    other = next(file for file in plan.parent.iterdir() if file != plan)
    plan.write_bytes(other.read_bytes())
    ((_, error),) = candidate(run).rejected
    assert "plans/" in error.path
    plan.unlink()
    ((_, error),) = candidate(run).rejected
    assert isinstance(error, TornFileError) and "missing" in error.message


def test_manifest_of_another_run_is_refused_by_its_run_id(run: RunDir, tmp_path):
    run.save(10)
    other = RunDir(tmp_path / "other")
    commit = other.save(20)
    shutil.copytree(other.path(commit), run.path(commit))
    ((_, error),) = candidate(run).rejected
    assert "another run" in f"{error.message} {error.hint}" and other.run_id in error.message


def test_newer_format_is_never_worked_around(run: RunDir):
    run.save(10)
    commit = run.save(20)
    file = run.path(commit, "manifest.json")
    file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":2', 1))
    with pytest.raises(FormatVersionError):
        candidate(run)


def test_quarantined_ones_are_tried_last(run: RunDir):
    first, second = run.save(10), run.save(20)
    ledger.put_quarantine(run.tier, second, incarnation=1, reason="bad block", path="x", clock=run)
    assert candidate(run).checkpoint.commit == first
    assert candidate(run, 20).checkpoint.commit == second
    assert candidate(run, exclude=[first]).checkpoint.commit == second
    flip(run.root / paths.quarantine(second))
    found = candidate(run)
    assert found.checkpoint.commit == first and len(found.problems) == 1
    ledger.clear_quarantine(run.tier, second)
    assert candidate(run).checkpoint.commit == second


def test_an_earlier_attempt_at_a_step_comes_before_an_older_step(run: RunDir):
    run.save(10)
    earlier = run.save(20, attempt=0)
    later = run.save(20, attempt=1)
    assert candidate(run).checkpoint.commit == later
    damage_manifest(run, later)
    found = candidate(run)
    assert found.checkpoint.commit == earlier and [commit for commit, _ in found.rejected] == [later]


def test_rolled_back_commits_are_not_believed(run: RunDir):
    run.save(10)
    run.save(20)
    run.open(up_to_step=10)
    assert steps(run) == [10]
    run.save(15)
    assert steps(run) == [15, 10]
    run.open()
    assert steps(run) == [15, 10]


def test_late_commit_of_an_older_incarnation_is_not_believed(run: RunDir):
    run.save(10)
    run.open()
    run.save(30, incarnation=1)
    assert steps(run) == [10]


def test_damaged_incarnation_is_inferred_and_told(run: RunDir):
    for step in (10, 20, 30):
        run.save(step)
    run.open(up_to_step=20)
    run.save(25)
    flip(run.root / paths.incarnation(2))
    seen = Catalog(run.tier).snapshot()
    # 30 was rolled back: the damaged file's own first commit is below it.
    assert [commit.step for commit in belief.believed(seen.listing)] == [25, 20, 10]
    assert [problem.path for problem in seen.problems] == [paths.incarnation(2)]
    assert seen.newest == 2
    run.open()
    assert run.incarnation == 3 and steps(run) == [25, 20, 10]


def test_foreign_and_swapped_incarnations_do_not_count(run: RunDir, tmp_path):
    run.save(10)
    other = RunDir(tmp_path / "other")
    other.open()
    other.open()
    shutil.copy(other.root / paths.incarnation(2), run.root / paths.incarnation(2))
    seen = Catalog(run.tier).snapshot()
    assert sorted(seen.listing.incarnations) == [1] and seen.newest == 2 and "another run" in seen.problems[0].message
    assert run.open() == 3
    shutil.copy(run.root / paths.incarnation(3), run.root / paths.incarnation(4))
    assert "swapped or copied" in Catalog(run.tier).snapshot().problems[-1].message


@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink()], ids=["damaged", "lost"])
def test_run_json_can_be_done_without(run: RunDir, damage):
    run.save(10)
    run_id = run.run_id
    damage(run.root / paths.RUN_JSON)
    found = candidate(run)
    assert found.checkpoint.commit.step == 10
    assert [problem.path for problem in found.problems] == [paths.RUN_JSON]
    assert Catalog(run.tier).require_run().run_id == run_id


def test_run_json_damaged_without_incarnations(run: RunDir):
    assert run.run_id
    flip(run.root / paths.RUN_JSON)
    with pytest.raises(ManifestError, match="cannot tell which run"):
        Catalog(run.tier).snapshot()


def test_no_run_directory_says_what_was_looked_at(run: RunDir):
    with pytest.raises(ConfigurationError) as caught:
        Catalog(run.tier).require_run()
    assert str(run.root) in caught.value.path and "does not exist" in caught.value.message
    run.root.mkdir()
    (run.root / "model.pt").touch()
    (run.root / "step_10").mkdir()
    with pytest.raises(ConfigurationError) as caught:
        Catalog(run.tier).require_run()
    assert "run.json" in caught.value.hint and "model.pt, step_10/" in caught.value.hint
    with pytest.raises(ConfigurationError, match="no directory"):
        Catalog(open_tier(run.root / "model.pt")).require_run()


def test_damaged_pins_still_pin_and_damaged_tombstones_do_not_bury(run: RunDir):
    run.save(10)
    run.save(20)
    ledger.put_pin(run.tier, 10, clock=run)
    flip(run.root / paths.pin(10))
    ledger.uncommit(run.tier, 20, incarnation=1, reason="test", clock=run)
    assert steps(run) == [10]
    flip(run.path(CommitId(20, 1, 0), paths.tombstone(1)))
    seen = Catalog(run.tier).snapshot()
    assert 10 in seen.pins and len(seen.problems) == 2
    assert steps(run) == [20, 10]


def test_files_that_are_seen_late_are_waited_for(run: RunDir):
    commit = run.save(10)
    tier = FakeTier(run.tier)
    tier.lie("get", path="*/manifest.json", times=2)
    tier.lie("get", path="*/node-00001.json", times=2)
    tier.fail("get", path="plans/*", times=2)
    started = run.now_s
    found = find_restore_candidate(tier, clock=run, patience_s=1.0)
    assert found.checkpoint.commit == commit and not found.rejected
    assert 0 < run.now_s - started < 1.0


def test_what_stays_missing_is_given_up_after_the_patience(run: RunDir):
    run.save(10)
    commit = run.save(20)
    lose_pack(run, commit)
    started = run.now_s
    assert find_restore_candidate(run.tier, clock=run, patience_s=1.0).checkpoint.commit.step == 10
    assert 1.0 <= run.now_s - started < 3.0


def test_an_incarnation_that_opens_during_a_look_starts_it_again(run: RunDir):
    run.save(10)
    tier = FakeTier(run.tier)
    listed = tier.list

    def list_and_open(directory: str):
        if directory == paths.CHECKPOINTS and run.incarnation == 1:
            run.open(up_to_step=5)
        return listed(directory)

    tier.list = list_and_open  # type: ignore[method-assign]
    seen = Catalog(tier).snapshot()
    assert seen.newest == 2 and belief.believed(seen.listing) == []


def test_load_with_the_manifest_handed_out(run: RunDir):
    commit = run.save(10)
    catalog = Catalog(run.tier)
    data, manifest = catalog.read_manifest(commit)
    run.path(commit, "manifest.json").unlink()
    checkpoint = catalog.load(commit, manifest_bytes=data)
    assert checkpoint.manifest == manifest and set(checkpoint.records) == {0, 1}
    assert sum(pack.size_bytes for pack in checkpoint.packs().values()) < manifest.total_bytes
    for rank, part in checkpoint.packs():
        assert (run.root / checkpoint.pack_path(rank, part)).is_file()
    expected = {file.name: file.stat().st_size for file in run.path(commit).iterdir()}
    assert checkpoint.expected_files() == expected
    with pytest.raises(ManifestError):
        catalog.load(CommitId(11, 1, 0), manifest_bytes=data)


def test_documents_that_verify_and_contradict_each_other(run: RunDir):
    """Whole files, rightly sealed, with a plan of another layout: only the comparison finds it."""
    commit = run.save(10)
    other = run.save(20, {"w": np.zeros((400, 400))})
    catalog = Catalog(run.tier)
    _, manifest = catalog.read_manifest(commit)
    _, foreign = catalog.read_manifest(other)
    mixed = records.encode_manifest(
        msgspec.structs.replace(manifest, plan_digest=foreign.plan_digest, plan_size_bytes=foreign.plan_size_bytes)
    )
    with pytest.raises(ManifestError, match="by its record and"):
        catalog.load(commit, manifest_bytes=mixed)


def test_a_lazy_load_reads_only_the_records_that_are_looked_at(run: RunDir):
    commit = run.save(10, world_size=4, ranks_per_node=1)
    tier = FakeTier(run.tier)
    eager, lazy = Catalog(run.tier).load(commit), Catalog(tier).load(commit, lazy=True)
    assert not [op.path for op in tier.log if "node-" in op.path]
    packs = lazy.packs()
    assert packs[2, 0] == eager.packs()[2, 0] and packs[2, 0].rank == 2
    assert [op.path[-15:] for op in tier.log if "node-" in op.path] == ["node-00002.json"]
    assert dict(packs) == dict(eager.packs()) and len(packs) == len(list(packs))
    assert dict(lazy.records) == dict(eager.records) and lazy.expected_files() == eager.expected_files()
    for key in ((4, 0), (-1, 0), (0, 9)):
        with pytest.raises(KeyError):
            packs[key]
    flip(run.path(commit, "node-00003.json"))
    with pytest.raises(IntegrityError, match="node 3"):
        Catalog(run.tier).load(commit, lazy=True).records[3]
