"""What the agent has its flusher do besides writing packs."""

from __future__ import annotations

import threading

import pytest
from run_dirs import RunDir

from safehold.config import Config
from safehold.errors import SupersededError, TornFileError
from safehold.events import EventStream
from safehold.format import paths, records
from safehold.pipeline import maintenance
from safehold.pipeline.several import RECORD_READERS
from safehold.policy.retention import Keep
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

KEEP = maintenance.keep_to_wire(Keep(last=1))


def test_a_sweep_leaves_what_the_own_incarnation_is_saving(run: RunDir) -> None:
    """It runs beside the first save, which may even be committed while it looks around."""
    run.open()
    old = run.save(5, publish=False)
    run.open()
    saving = run.save(10, publish=False)
    done = maintenance.sweep_debris(run.tier, Config(delete_grace_s=0.0), {"incarnation": 2}, EventStream())
    assert done["deleted"] == [[old.step, old.incarnation, old.attempt]]
    assert run.path(saving, "node-00000.json").exists()


def test_making_room_leaves_every_attempt_of_the_own_incarnation(run: RunDir) -> None:
    run.open()
    in_doubt, saving = run.save(10, publish=False), run.save(20, publish=False)
    arguments = {
        "packs": [[0, 1 << 60]],
        "num_ranks": 1,
        "keep": KEEP,
        "incarnation": 1,
        "commit": [saving.step, saving.incarnation, saving.attempt],
        "given_up": [],
    }
    assert not maintenance.make_room(run.tier, Config(), arguments, EventStream())
    for commit in (in_doubt, saving):
        assert run.path(commit, "node-00000.json").exists()
    assert isinstance(in_doubt, CommitId)


def test_what_an_agent_that_takes_over_has_to_know(run: RunDir) -> None:
    older = run.save(5)
    run.open()
    own = run.save(10)
    left = run.save(20, publish=False)
    config, events = Config(), EventStream()
    tier = FakeTier(run.tier)
    found = maintenance.OPERATIONS["known"](tier, config, {"incarnation": 2}, events)
    assert found == {"steps": [older.step, 10], "commits": [[10, 2, 0]], "left": [[left.step, 2, 0]]}
    assert [op.path for op in tier.log if op.kind == "sync_tree"] == [f"checkpoints/{own.step:09d}/2-0"]
    run.open()
    with pytest.raises(SupersededError):
        maintenance.known(run.tier, config, {"incarnation": 2}, events)


def test_retention_lets_go_of_what_the_agent_names(run: RunDir) -> None:
    run.open()
    run.save(10)
    failed, newest = run.save(20, publish=False), run.save(30)
    arguments = {"keep": KEEP, "incarnation": 1, "acknowledged": [[10, 1, 0], [30, 1, 0]], "given_up": [[20, 1, 0]]}
    done = maintenance.retire(run.tier, Config(delete_grace_s=0.0), arguments, EventStream())
    assert done == {"uncommitted": [[10, 1, 0]], "deleted": [[10, 1, 0], [20, 1, 0]], "problem": None}
    assert not run.path(failed).exists() and run.path(newest).exists()


def test_keep_rules_cross_the_socket() -> None:
    for keep in (Keep(last=3), Keep(last=1, every_steps=100, every_hours=2.0)):
        assert maintenance.keep_from_wire(maintenance.keep_to_wire(keep)) == keep


def publishing(run: RunDir, num_nodes: int) -> tuple[CommitId, dict[str, object]]:
    """A checkpoint of so many nodes that lacks only its manifest, and what publishing it is told."""
    commit = run.save(10, world_size=num_nodes)
    manifest = run.path(commit, paths.MANIFEST)
    found = records.decode_manifest(manifest.read_bytes(), path="")
    manifest.unlink()
    return commit, {
        "commit": [commit.step, commit.incarnation, commit.attempt],
        "run_id": found.run_id,
        "world_size": num_nodes,
        "nodes": [{"node": ref.node, "size_bytes": ref.size_bytes, "blake3": ref.blake3} for ref in found.nodes],
        "plan_digest": found.plan_digest,
        "plan_size": found.plan_size_bytes,
        "metrics": {},
        "final": False,
    }


def test_a_commit_reads_the_records_of_many_nodes_several_at_a_time(run: RunDir) -> None:
    commit, arguments = publishing(run, RECORD_READERS + 1)
    together = threading.Barrier(2, timeout=10.0)

    class Waiting(FakeTier):
        def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
            if path.endswith(("node-00000.json", "node-00001.json")):
                together.wait()  # each comes only while the other is under way
            return super().get(path, limit_bytes=limit_bytes, retry_s=retry_s)

    maintenance.publish(Waiting(run.tier), Config(), arguments, EventStream())
    assert run.path(commit, paths.MANIFEST).exists()


def test_a_commit_names_the_first_record_that_is_gone(run: RunDir) -> None:
    commit, arguments = publishing(run, RECORD_READERS + 1)
    for node in (7, 3):
        run.path(commit, paths.node_record(node)).unlink()
    with pytest.raises(TornFileError, match="the record of node 3 is gone"):
        maintenance.publish(run.tier, Config(), arguments, EventStream())
    assert not run.path(commit, paths.MANIFEST).exists()
