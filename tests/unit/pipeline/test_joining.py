"""Bringing the parts of a node-local run together, and who may write there."""

from __future__ import annotations

from pathlib import Path

import pytest
from joined_disks import LocalJob, LocalWorld
from whole_saves import Promises, believed, check

from safehold.errors import ConfigurationError, StorageError, SupersededError, TornFileError
from safehold.format import paths, records
from safehold.pipeline import joining, ledger
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.verify import verify
from safehold.testing.disk_faults import Op
from safehold.tiers import flash_probe
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.tiers.joined import JoinedTier
from safehold.types import CommitId


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)


@pytest.fixture
def world() -> LocalWorld:
    """Two nodes with one checkpoint, of incarnation 1."""
    found = LocalWorld(["a", "b"])
    job = LocalJob(found, Promises())
    job.open()
    job.save(10, 1)
    return found


COMMIT = CommitId(10, 1, 0)
MANIFEST = f"{paths.checkpoint_dir(COMMIT)}/{paths.MANIFEST}"


def common(tier: Tier) -> dict[str, bytes]:
    """What every node must have, of one disk."""
    found = {}
    for path in (
        paths.RUN_JSON,
        *(f"{d}/{e.name}" for d in ("incarnations", "plans", "quarantine") for e in tier.list(d)),
    ):
        found[path] = tier.get(path, limit_bytes=1 << 20)
    for step in tier.list(paths.CHECKPOINTS):
        for attempt in tier.list(f"checkpoints/{step.name}"):
            directory = f"checkpoints/{step.name}/{attempt.name}"
            for entry in tier.list(directory):
                if paths.node_of(entry.name) is None:
                    found[f"{directory}/{entry.name}"] = tier.get(f"{directory}/{entry.name}", limit_bytes=1 << 20)
    return found


def test_nothing_is_written_where_all_have_all(world: LocalWorld) -> None:
    before = {node: disk.num_ops for node, disk in world.disks.items()}
    changes: list[Op] = []
    for node, disk in world.disks.items():
        disk.fail_at(lambda op: op.changes and not changes.append(op), 5, times=-1)  # type: ignore[func-returns-value]
        assert before[node] == disk.num_ops
    assert joining.heal(world.view()) == []
    assert not changes


def test_an_empty_disk_gets_what_every_node_must_have(world: LocalWorld) -> None:
    view = world.view()
    ledger.put_quarantine(view, COMMIT, incarnation=1, reason="looked odd")
    grown = LocalWorld(["a", "b", "c"], world.disks)
    assert joining.heal(grown.view()) == ["node c lacked 5 small files of the run; brought there"]
    assert common(grown.tiers["c"]) == common(grown.tiers["a"])
    assert believed(grown.tiers["c"]) == [COMMIT]


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_damaged_copy_is_replaced_by_the_whole_one(world: LocalWorld, node: str) -> None:
    whole = common(world.tiers["a"])
    for path, data in whole.items():
        world.tiers[node].put(path, data[:-3])
        assert joining.heal(world.view()) == [f"node {node} lacked 1 small file of the run; brought there"]
        assert common(world.tiers[node]) == whole


def test_a_file_that_is_whole_nowhere_is_left_to_whoever_reads_it(world: LocalWorld) -> None:
    for node in "ab":
        world.tiers[node].put(MANIFEST, node.encode())
    assert joining.heal(world.view()) == []
    assert world.tiers["a"].get(MANIFEST, limit_bytes=9) == b"a"


def test_a_manifest_that_came_to_one_node_only_counts_and_comes_to_all(world: LocalWorld) -> None:
    """All nodes had recorded before it was begun."""
    world.disks["b"].unlink(MANIFEST)
    assert believed(world.view(1)) == [COMMIT]
    again = LocalJob(world, Promises(begun={COMMIT: 1}, kept={COMMIT}))
    again.open()
    assert again.steps == [10]
    assert believed(world.tiers["b"]) == [COMMIT]
    check(world.view(), again.promises)


def test_a_tombstone_of_the_newest_incarnation_comes_to_all_and_an_older_one_is_void(world: LocalWorld) -> None:
    ledger.bury(world.tiers["b"], COMMIT, incarnation=1, reason="half way")
    assert believed(world.view()) == []
    joining.heal(world.view())
    stone = f"{paths.checkpoint_dir(COMMIT)}/{paths.tombstone(1)}"
    assert world.tiers["a"].size(stone)
    for disk in world.disks.values():
        disk.unlink(stone)
    job = LocalJob(world, Promises())
    job.open()
    ledger.bury(world.tiers["b"], COMMIT, incarnation=1, reason="late")
    joining.heal(world.view())
    with pytest.raises(FileNotFoundError):
        world.tiers["a"].size(stone)
    assert believed(world.view()) == [COMMIT]


def test_what_was_set_aside_is_left_where_it_is(world: LocalWorld) -> None:
    job = LocalJob(world, Promises())
    job.open()
    job.save(20, 2)
    LocalJob(world, Promises()).open(up_to=COMMIT)
    grown = LocalWorld(["a", "b", "c"], world.disks)
    joining.heal(grown.view())
    assert sorted(entry.name for entry in grown.tiers["c"].list(paths.CHECKPOINTS)) == ["000000010"]


def test_a_disk_that_holds_something_else_is_refused_by_its_node(world: LocalWorld) -> None:
    grown = LocalWorld(["a", "b", "c"], world.disks)
    grown.tiers["c"].put("thesis.tex", b"x")
    with pytest.raises(ConfigurationError, match="thesis") as caught:
        joining.heal(grown.view())
    assert caught.value.node == "c"


def test_a_disk_that_cannot_be_read_ends_the_start_by_its_node(world: LocalWorld) -> None:
    world.disks["b"].fail_at(lambda op: op.kind == "scan", 5, times=-1)
    with pytest.raises(StorageError) as caught:
        joining.heal(world.view())
    assert caught.value.node == "b"


def test_where_what_lies(world: LocalWorld) -> None:
    view = world.view()
    assert joining.holders(view, COMMIT) == {0: "a", 1: "b"}
    likely = joining.guess(["a", "b"])
    directory = paths.checkpoint_dir(COMMIT)
    assert likely(f"{directory}/{paths.pack(1, 5, 0)}") == "b"
    assert likely(f"{directory}/{paths.node_objects(0)}") == "a"
    assert likely(f"{directory}/{paths.node_record(7)}") is likely(MANIFEST) is likely("plans/x") is None
    likely = joining.guess_for(directory, {1: "z"})
    assert likely(f"{directory}/{paths.node_record(1)}") == "z"
    assert likely(f"{directory}/{paths.node_record(0)}") is likely("checkpoints/000000011/1-0/node-00001.json") is None


def test_the_manifest_says_whose_disks_and_one_disk_alone_is_no_damage(world: LocalWorld) -> None:
    """Seen from node b: what is here verifies, what is not is told by name, and a restore says which node it lacks."""
    alone = world.tiers["b"]
    _, manifest = Catalog(alone).read_manifest(COMMIT)
    assert manifest.own_disks == ("a", "b")
    names = [entry.name for entry in alone.list(paths.checkpoint_dir(COMMIT))]
    assert joining.not_here(manifest, names) == ["a"]
    report = verify(alone, COMMIT, patience_s=0.0)
    assert report.ok and report.notes == ("node a: what it saved is on its own disk, and was not read",)
    assert report.num_files == 5  # manifest, record, plan, objects, pack
    with pytest.raises(
        TornFileError, match="the record of node a, which keeps what it saves on a disk of its own"
    ) as caught:
        Catalog(alone, patience_s=0.0).load(COMMIT)
    assert caught.value.node == "a"
    world.disks["b"].unlink(f"{paths.checkpoint_dir(COMMIT)}/{paths.node_record(1)}")
    assert not verify(alone, COMMIT, patience_s=0.0).ok  # its packs are here, so this is damage


def test_a_manifest_without_own_disks_is_as_before() -> None:
    fields = {"run_id": "r", "commit": COMMIT, "world_size": 1, "plan_digest": "0" * 64, "plan_size_bytes": 1}
    ref = records.NodeRef(node=0, size_bytes=1, blake3="0" * 64)
    manifest = records.Manifest(**fields, nodes=(ref,), total_bytes=1, crc32=0, created_s=0.0, library="x")
    assert b"own_disks" not in records.encode_manifest(manifest)
    with pytest.raises(ValueError, match="has no name"):
        bad = (records.NodeRef(node=1, size_bytes=1, blake3="0" * 64),)
        records.encode_manifest(
            records.Manifest(**fields, nodes=bad, total_bytes=1, crc32=0, created_s=0.0, library="x", own_disks=("a",))
        )


def test_who_has_seen_a_newer_incarnation_refuses_to_write_for_an_older_one(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path / "run")
    assert ledger.open_incarnation(tier, "one").record.number == 1
    stone = f"{paths.checkpoint_dir(COMMIT)}/{paths.tombstone(1)}"
    for path in (MANIFEST, stone, "plans/x", f"{paths.checkpoint_dir(COMMIT)}/{paths.node_record(0)}"):
        joining.refuse_stale(tier, path)
    ledger.open_incarnation(tier, "two", lambda listing: [])
    for path in (MANIFEST, stone):
        with pytest.raises(SupersededError, match="incarnation 2 owns the run now, this is 1"):
            joining.refuse_stale(tier, path)
    joining.refuse_stale(tier, f"{paths.checkpoint_dir(COMMIT)}/{paths.node_record(0)}")
    ledger.open_incarnation(tier, "three", lambda listing: [COMMIT])
    joining.refuse_stale(tier, MANIFEST)  # listed: a copy of it may come
    with pytest.raises(SupersededError):
        joining.refuse_stale(tier, stone)


def test_two_incarnations_of_one_number_are_found_whoever_looks(world: LocalWorld) -> None:
    for node in "ab":
        ledger.open_incarnation(world.tiers[node], f"token of {node}")
        world.tiers[node].put(f"{paths.checkpoint_dir(CommitId(20, 2, 0))}/{paths.node_record(0)}", b"at work")
    for node in (0, 1):
        with pytest.raises(ConfigurationError, match="incarnation 2 was opened on node a and, without it, on node b"):
            joining.heal(world.view(node))
    assert isinstance(world.view(), JoinedTier)
