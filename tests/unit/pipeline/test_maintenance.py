"""What the agent has its flusher do besides writing packs."""

from __future__ import annotations

from run_dirs import RunDir

from safehold.config import Config
from safehold.events import EventStream
from safehold.pipeline import maintenance
from safehold.policy.retention import Keep
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
    }
    assert not maintenance.make_room(run.tier, Config(), arguments, EventStream())
    for commit in (in_doubt, saving):
        assert run.path(commit, "node-00000.json").exists()
    assert isinstance(in_doubt, CommitId)


def test_keep_rules_cross_the_socket() -> None:
    for keep in (Keep(last=3), Keep(last=1, every_steps=100, every_hours=2.0)):
        assert maintenance.keep_from_wire(maintenance.keep_to_wire(keep)) == keep
