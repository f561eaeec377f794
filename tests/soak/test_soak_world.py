"""Worlds that are large, or many, or gone through whole: minutes of CPU, hours of virtual time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "world"))

import test_world_orders as orders
import worlds

from safehold.testing.world import Setting, World
from safehold.testing.world.faults import Faults

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
HOUR_S = 3600.0


@pytest.mark.parametrize("seed", [1, 2])
def test_an_hour_of_128_nodes_with_8_ranks_each(seed: int) -> None:
    setting = Setting(num_nodes=128, ranks_per_node=8, every_steps=60, interleaved=False, hang_s=180.0)
    with World(setting, seed=seed) as world:
        world.start_job()
        faults = Faults(world, every_s=(20.0, 180.0))
        world.run(HOUR_S)
        world.finish()
        assert sum(faults.struck.values()) > 20
        assert world.checks.verdicts["durable"] > 10 * setting.world_size


@pytest.mark.parametrize("first", range(100_000, 103_000, 250))
def test_thousands_of_small_worlds(first: int) -> None:
    for seed in range(first, first + 250):
        worlds.live(seed, 150.0, every_s=(0.5, 20.0))


@pytest.mark.parametrize("explore", [orders.explore_faults, orders.explore_messages, orders.explore_losses])
def test_every_order_of_a_save(explore: orders.Explore) -> None:
    assert explore(1, 0) > 100
