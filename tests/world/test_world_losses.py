"""Nodes that lose each other for a while: what was begun meanwhile ends by name, and saves go on afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import whole_save

from safehold.errors import RankLostError
from safehold.testing.world import Setting, World
from safehold.testing.world.trainer import Handle, Trainer

SETTING = Setting(num_nodes=2, every_steps=4)


@pytest.fixture(params=range(4))
def world(request: pytest.FixtureRequest) -> Any:
    with World(SETTING, seed=request.param) as world:
        whole_save(world)
        yield world


def follow(world: World) -> list[tuple[Trainer, Handle, float]]:
    """Collect the verdicts from here on, each with the time that it took."""
    found: list[tuple[Trainer, Handle, float]] = []
    told = world.checks.verdict

    def verdict(trainer: Trainer, handle: Handle) -> None:
        told(trainer, handle)
        found.append((trainer, handle, world.timeline.now - handle.begun_at))

    world.checks.verdict = verdict  # type: ignore[method-assign]
    return found


def test_saves_go_on_after_a_cut(world: World) -> None:
    world.fabric.cut("n0", "n1")
    world.run(30.0)
    world.fabric.heal()
    healed = world.timeline.now
    world.run(30.0)
    assert world.checks.num_whole_since(healed) >= 3


def test_a_save_that_begins_while_the_lead_is_lost_fails_at_once(world: World) -> None:
    world.fabric.cut("n0", "n1")
    world.run(12.0)
    verdicts = follow(world)
    world.run(12.0)
    mine = [(handle, took_s) for trainer, handle, took_s in verdicts if trainer.rank == 1]
    assert len(mine) >= 2
    assert all(isinstance(handle.error, RankLostError) and took_s < 0.1 for handle, took_s in mine)
    assert "the lead agent, on node n0, was lost" in str(mine[0][0].error)


def test_a_save_that_waited_to_be_let_in_fails_when_the_lead_is_lost(world: World) -> None:
    world.storage.hanging.add("n1")  # so that another agent cannot be told what is committed
    for agent in world.machines[1].agents:
        agent.process.kill()
    assert world.timeline.run(10.0, lambda: 1 in [rank for job in [world.job] if job for rank in _waiting(job)])
    world.fabric.cut("n0", "n1")
    verdicts = follow(world)
    world.run(11.0)
    errors = [handle.error for trainer, handle, _ in verdicts if trainer.rank == 1]
    assert errors and isinstance(errors[0], RankLostError)


def _waiting(job: Any) -> list[int]:
    return [trainer.rank for trainer in job.trainers if trainer.handles]


def test_an_agent_whose_lead_and_ranks_are_gone_leaves(world: World) -> None:
    agent = world.machines[1].agents[0]
    agent.process.stop()
    world.fabric.changed()
    world.run(3.0)
    world.machines[0].die()
    world.run(20.0)
    agent.process.resume()
    world.fabric.changed()
    world.finish()  # which looks for agents that do not leave
