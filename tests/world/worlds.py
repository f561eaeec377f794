"""Worlds that a seed makes, for tests."""

from __future__ import annotations

import random
from typing import Any

from safehold.testing.world import Setting, World
from safehold.testing.world.faults import Faults


def random_setting(seed: int, **fixed: Any) -> Setting:
    """What a world of this seed is like."""
    chance = random.Random(seed)
    found: dict[str, Any] = {
        "num_nodes": chance.choice([1, 2, 2, 2, 3, 3, 4, 5]),
        "ranks_per_node": chance.choice([1, 1, 2]),
        "interleaved": chance.random() < 0.7,
        "every_steps": chance.choice([3, 5, 5, 10]),
        "every_seconds": chance.choice([0.0, 0.0, 0.0, 8.0]),
        "config": {"overlap_policy": chance.choice(["wait", "wait", "skip", "replace"])},
    }
    return Setting(**{**found, **fixed})


def live(
    seed: int, seconds: float, *, every_s: tuple[float, float] = (1.0, 25.0), **fixed: Any
) -> tuple[World, Faults]:
    """Let a world with faults run, heal and come to rest; returns both, for a look at their figures."""
    with World(random_setting(seed, **fixed), seed=seed) as world:
        world.start_job()
        faults = Faults(world, every_s=every_s)
        world.run(seconds)
        world.finish()
    return world, faults


def whole_save(world: World, limit_s: float = 60.0) -> None:
    """Start the job and let it run until its first save is durable on all ranks."""
    world.start_job()
    assert world.timeline.run(limit_s, lambda: world.checks.num_whole_since(0.0) >= 1)
