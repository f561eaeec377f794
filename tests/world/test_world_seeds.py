"""Hundreds of small worlds with random faults; `live` raises with seed and trace where an invariant does not hold."""

from __future__ import annotations

from collections import Counter

import pytest
from worlds import live

from safehold.testing.world import Setting, World

NUM_SEEDS, BLOCK = 96, 12


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BLOCK))
def test_worlds_with_random_faults(first: int) -> None:
    struck, verdicts = Counter[str](), Counter[str]()
    for seed in range(first, first + BLOCK):
        world, faults = live(seed, 100.0)
        struck.update(faults.struck)
        verdicts.update(world.checks.verdicts)
    assert len(struck) >= 10
    assert min(verdicts["durable"], verdicts["failed"]) > 40


@pytest.mark.parametrize("first", range(10_000, 10_000 + NUM_SEEDS // 2, BLOCK))
def test_worlds_in_which_hardly_anything_works(first: int) -> None:
    for seed in range(first, first + BLOCK):
        live(seed, 60.0, every_s=(0.2, 5.0))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_nodes", [3, 10])
def test_a_seed_gives_the_same_world_each_time(interleaved: bool, num_nodes: int) -> None:
    def traced() -> list[object]:
        world, _ = live(7, 100.0, interleaved=interleaved, num_nodes=num_nodes)
        return [world.timeline.num_events, *world.timeline.trace]

    assert traced() == traced()


@pytest.mark.parametrize("every_seconds", [0.0, 8.0])
def test_without_faults_every_save_is_durable(every_seconds: float) -> None:
    with World(Setting(num_nodes=3, ranks_per_node=2, every_seconds=every_seconds), seed=1) as world:
        world.start_job()
        world.run(120.0)
        world.finish()
        assert world.checks.verdicts["durable"] >= 6 * 20
        assert world.checks.verdicts["failed"] == world.checks.verdicts["skipped"] == 0
        assert len(world.checks.believed) == 3
