"""Saves that stay in memory, with copies at partners: several sessions, whose nodes are lost and whose trainers die."""

from __future__ import annotations

import itertools

import pytest
from memory_nodes import PACK_BYTES, SAVE, MemoryJob

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import ConfigurationError, from_wire


def test_a_memory_save_touches_no_storage_and_is_durable_once_all_nodes_and_partners_have_it() -> None:
    job = MemoryJob(4)
    job.save_in_memory(5)
    for rank in range(4):
        durable = job.peers[rank].last(m.Durable)
        assert (durable.step, durable.tier) == (5, "memory")
    asked = {name for flusher in job.flushers for name, _ in flusher.log}
    assert asked <= {"hold", "sweep"}, "neither plan, nor record, nor manifest, nor packs"
    told = [pool.held.told() for pool in job.pools]
    assert all(entry[0].manifest and entry[0].commit.step == 5 for entry in told)
    assert all(len(entry[0].shares) == 2 for entry in told), "its own, and that of one other"


@pytest.mark.parametrize("lost", [set(), {0}, {2}, {0, 2}, {1, 2}, {0, 1}, {1, 3}, {0, 1, 2}])
def test_what_is_left_decides_what_is_restored(lost: set[int]) -> None:
    """Sweep: which nodes are lost decides whether the newest save is whole; if it is, every rank gets its bytes."""
    job = MemoryJob(4)
    for step in (5, 6):
        job.save_in_memory(step)
    partners = job.sessions[0].memory.partners.of
    whole = all(node not in lost or not set(partners[node]) <= lost for node in range(4)) and len(lost) < 4
    job.restart(lost)
    offers = job.ask_restore()
    if not whole:
        assert [offer.step for offer in offers] == [None] * 4
        assert any("step 6 was in memory and cannot be used" in text for text in offers[0].skipped)
        return
    assert [(offer.step, offer.tier) for offer in offers] == [(6, "memory")] * 4
    assert job.steps == [6]
    for rank, old in itertools.product(range(4), range(4)):
        assert job.pack_of(offers[rank], rank, old, old) == job.bytes_of(old, 6), f"rank {rank} of old rank {old}"
