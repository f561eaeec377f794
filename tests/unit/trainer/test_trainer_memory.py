"""Memory as a tier, as a trainer sees it: which saves are flushed, what waiting means, and reading from other nodes."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.cli.slots import memory_of, status_of
from safehold.config import Config
from safehold.errors import AgentUnavailableError, ConfigurationError, TornFileError
from safehold.format import paths
from safehold.host import memfd
from safehold.pipeline.catalog import Catalog
from safehold.tiers.open import open_tier
from safehold.trainer.connection import Run, _world, map_arena
from safehold.trainer.handles import SaveHandle
from safehold.trainer.held_tier import PLANS, HeldTier
from safehold.types import CommitId, Membership


def steps_on_storage(ckpt: Any) -> list[int]:
    return sorted(view.commit.step for view in Catalog(open_tier(ckpt.path)).commits())


def test_every_so_manyth_save_is_flushed_and_those_that_are_asked_for(make: Any) -> None:
    state = {"w": torch.arange(1000.0)}
    ckpt = make(flush_every=3, keep=10)
    tiers = []
    for step, options in enumerate([{}, {}, {}, {}, {}, {"flush": True}, {}, {}, {}, {"final": True}], start=1):
        state["w"] += 1
        handle = ckpt.save(step, state, **options)
        handle.wait(20)
        assert handle.durable
        tiers.append(handle.tier)
    assert tiers == ["flash", "memory", "memory", "flash", "memory", "flash", "memory", "memory", "flash", "flash"]
    assert steps_on_storage(ckpt) == [1, 4, 6, 9, 10]
    ckpt.close()


def test_waiting_for_storage_fails_at_once_where_the_save_never_comes_there(make: Any) -> None:
    ckpt = make(flush_every=2)
    state = {"w": torch.zeros(10)}
    ckpt.save(1, state).wait(20, tier="flash")
    handle = ckpt.save(2, state)
    with pytest.raises(ConfigurationError, match="step 2 stays in memory") as found:
        handle.wait(20, tier="flash")
    assert "flush=True" in str(found.value)
    handle.wait(20, tier="memory")
    assert handle.durable and handle.figures.num_files == 0
    ckpt.save(3, state, final=True)
    ckpt.close()


def test_memory_means_committed_there_for_a_save_that_stays_there() -> None:
    handle = SaveHandle(5, 0, flush_timeout_s=0.01, tier="memory")
    handle._advance("staged")
    with pytest.raises(Exception, match="not durable"):
        handle.wait(tier="memory")
    staged = SaveHandle(5, 0, flush_timeout_s=0.01)
    staged._advance("staged")
    staged.wait(tier="memory")


def test_what_was_restored_from_memory_is_followed_by_a_flush(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safehold")
    state = {"w": torch.zeros(1000)}
    ckpt = make(flush_every=10)
    for step in (1, 2, 3):
        state["w"] += step
        ckpt.save(step, state).wait(20)
    memory = memory_of(status_of(ckpt._run.client._slot))
    assert memory is not None and (memory["step"], memory["copies"]) == (3, {}) and memory["bytes"] > 0
    ckpt.close()
    assert "step 3 is in memory only" in caplog.text
    again = make(flush_every=10)
    state["w"].zero_()
    assert again.restore(state) == 3
    assert again.last_restore.tier == again.last_restore.source == "memory"
    assert "on no storage yet" in caplog.text and "memory saves take 2 x" in caplog.text
    assert state["w"][0] == 6
    handle = again.save(4, state)
    handle.wait(20)
    assert handle.tier == "flash" and steps_on_storage(again) == [1, 4]
    again.close()


def test_the_state_need_not_be_as_large_as_it_was(make: Any) -> None:
    ckpt = make(flush_every=10)
    for step, size in enumerate([10, 1 << 20, 100, 1 << 21, 1 << 21], start=1):
        ckpt.save(step, {"w": torch.full((size,), float(step))}).wait(20)
    found = {"w": torch.zeros(1 << 21)}
    assert ckpt.restore(found) == 5 and ckpt.last_restore.source == "memory"
    assert found["w"][-1] == 5
    ckpt.save(6, found, final=True)
    ckpt.close()


def new_run(generations: int) -> Run:
    client: Any = SimpleNamespace(generation=1, rank=0, control=None, closed=False, alive=True)
    world = m.World("t", 2, [0, 1], ["n0", "n1"])
    return Run(client=client, world=world, run_id="run", newest_step=None, notes=[], generations=generations)


@pytest.mark.parametrize("generations", [1, 2])
def test_so_many_arenas_stay_mapped_as_there_are_generations(generations: int) -> None:
    run = new_run(generations)
    for number in (3, 4, 3, 4, 5) if generations == 2 else (3, 4, 5):
        map_arena(run, number, 4096, [memfd.create(4096, "arena")])
    assert sorted(run.arenas) == [3, 4, 5][-generations:]
    assert len(run.retired) == 3 - generations
    late = map_arena(run, 2, 4096, [memfd.create(4096, "arena")])
    assert late in run.retired and sorted(run.arenas) == [3, 4, 5][-generations:]


COMMIT = CommitId(5, 1, 0)


class Nodes:
    """A client whose agent reaches two nodes, of which some give bytes."""

    rank, alive = 1, True

    def __init__(self, gives: dict[int, bytes]) -> None:
        self.gives = gives
        self.asked: list[tuple[int, str]] = []

    def request(
        self, message: held_messages.HeldAsk, expect: type, timeout_s: float, doing: str
    ) -> tuple[Any, list[int]]:
        assert expect is held_messages.HeldBytes
        self.asked.append((message.node, message.path))
        if message.node not in self.gives:
            raise AgentUnavailableError(f"node {message.node} does not answer")
        data = self.gives[message.node][message.offset : message.offset + message.size]
        fd = memfd.create(len(data), "read")
        os.pwrite(fd, data, 0)
        return held_messages.HeldBytes(message.id, len(data)), [fd]


def tier_over(nodes: Nodes) -> HeldTier:
    run = new_run(1)
    run.client = nodes  # type: ignore[assignment]
    return HeldTier(run, Config(), COMMIT, {0: [0, 1], 1: [1], PLANS: [0]})


def test_documents_are_asked_of_whoever_has_them_the_own_node_first() -> None:
    nodes = Nodes({0: b"a" * 10, 1: b"b" * 10})
    tier = tier_over(nodes)
    directory = paths.checkpoint_dir(COMMIT)
    assert tier.get(f"{directory}/{paths.node_record(0)}", limit_bytes=10) == b"b" * 10
    assert tier.get("plans/" + "0" * 64, limit_bytes=4) == b"aaaa"
    del nodes.gives[1]
    assert tier.get(f"{directory}/{paths.node_objects(0)}", limit_bytes=10) == b"a" * 10
    with pytest.raises(TornFileError, match="did not answer before"):
        tier.get(f"{directory}/{paths.node_record(1)}", limit_bytes=10)
    assert nodes.asked.count((1, f"{directory}/{paths.node_record(1)}")) == 0, "it is asked once, not for each read"
    with pytest.raises(TornFileError, match="no node has it"):
        tier.get(f"{directory}/{paths.node_record(7)}", limit_bytes=10)


def test_packs_are_read_in_ranges_and_what_is_short_or_unreachable_is_torn() -> None:
    nodes = Nodes({0: bytes(range(100)), 1: b"short"})
    tier = tier_over(nodes)
    checkpoint: Any = SimpleNamespace(
        pack_path=lambda rank, part: f"pack-{rank}-{part}", plan=SimpleNamespace(nodes=[0, 1])
    )
    near, far = tier.sources(checkpoint, 0, 0)
    buffer = memoryview(bytearray(50))
    assert bytes(far.read(10, 20, buffer)) == bytes(range(10, 30))
    assert (far.name, far.verified) == ("partner", False)
    with pytest.raises(TornFileError, match="fewer bytes"):
        near.read(0, 20, buffer)
    nodes.alive = False  # type: ignore[misc]
    nodes.gives.clear()
    with pytest.raises(AgentUnavailableError):  # the own agent died: nothing is wrong with the checkpoint
        far.read(0, 20, buffer)


def test_failure_domains_travel_with_the_world() -> None:
    entries = [
        {"node": node, "domain": domain, "url": "u", "config": b""}
        for node, domain in [("a", "r1"), ("b", ""), ("a", "r1")]
    ]
    world = _world(entries, Membership(rank=0, world_size=3, store=None), None)
    assert (world["node_of"], world["domains"]) == ([0, 1, 0], ["r1", ""])
