"""Documents of a restore in a whole job: read from storage once, handed from node to node, whatever link is cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from worlds import whole_save

from safehold.policy import document_tree as tree
from safehold.testing.world import Setting, World
from safehold.testing.world.job import Job


def restart(world: World) -> Job:
    """End the job, and let its next start restore; counts from here on."""
    job = world.job
    assert job is not None
    job.end()
    assert world.timeline.run(60.0, lambda: world.job is not job)
    again = world.job
    assert again is not None
    assert world.timeline.run(60.0, lambda: again.phase == "joined")
    world.storage.read_bytes = 0
    world.fabric.counts = Counter()
    return again


def given(world: World, job: Job) -> list[int]:
    return [world.fabric.counts["given_bytes", (job.wire.token, machine.name)] for machine in job.machines]


def sources(world: World) -> list[str]:
    found: list[str] = []

    def listen(event: Any) -> None:
        if event.phase == "documents" and event.stage == "note":
            found.append(event.fields["source"])

    streams = world.events
    world.events = lambda who: _listening(streams(who), listen)  # type: ignore[method-assign]
    return found


def _listening(stream: Any, listen: Any) -> Any:
    stream.subscribe(listen)
    return stream


@pytest.mark.parametrize("interleaved", [True, False])
def test_storage_is_read_once_and_no_node_gives_much(interleaved: bool) -> None:
    with World(Setting(num_nodes=11, ranks_per_node=2, interleaved=interleaved, every_steps=50), seed=1) as world:
        whole_save(world, 120.0)
        job = restart(world)
        assert world.timeline.run(30.0, lambda: job.is_training)
        counts, size = given(world, job), world.storage.documents_bytes(world.checks.believed[-1])
        taken = sum(counts) // 10
        assert size <= taken < 2 * size and sum(counts) == 10 * taken
        assert max(counts) == tree.DEGREE * taken and counts[0] == max(counts)
        assert world.storage.read_bytes < 3 * size, "not by 22 ranks, nor by 11 nodes"


def test_switched_off_every_rank_reads() -> None:
    setting = Setting(num_nodes=3, ranks_per_node=2, every_steps=50, config={"restore_pass_on": "off"})
    with World(setting, seed=1) as world:
        whole_save(world, 120.0)
        job = restart(world)
        assert world.timeline.run(30.0, lambda: job.is_training)
        size = world.storage.documents_bytes(world.checks.believed[-1])
        assert not any(given(world, job)) and world.storage.read_bytes > 6 * size


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_cannot_reach_the_one_above_takes_from_the_lead(seed: int) -> None:
    with World(Setting(num_nodes=6, every_steps=50), seed=seed) as world:
        whole_save(world, 120.0)
        world.fabric.cut("n1", "n5")
        job = restart(world)
        assert tree.above(5, 0) == [1, 0]
        assert world.timeline.run(60.0, lambda: job.is_training)
        counts = given(world, job)
        assert counts[1] == 0 and counts[0] == 5 * (sum(counts) // 5), "its own four children, and the other's"
        world.finish()


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_dies_while_others_wait_for_it_ends_in_a_restore_of_the_next_start(seed: int) -> None:
    with World(Setting(num_nodes=7, every_steps=50), seed=seed) as world:
        found = sources(world)
        whole_save(world, 120.0)
        job = restart(world)
        assert world.timeline.run(30.0, lambda: bool(found))
        job.machines[1].die()
        world.finish()
        assert "storage" in found and any(entry.startswith("node ") for entry in found)
