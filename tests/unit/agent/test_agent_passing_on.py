"""Passing chunks on between the agents of several nodes: each is read once, whatever fails is read again, and nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from passing_ranks import SIZE, Ranks
from several_nodes import Job

from safehold.agent import chunk_messages
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.passing_on import PATIENCE_S
from safehold.policy.passing_on import CHUNK_BYTES, encode

FOUND = {"commit": [10, 1, 0], "manifest": b"m", "newest": [10, 1, 0], "any_commit": True, "bad": [], "skipped": []}


def replicas(num_nodes: int = 3, per_node: int = 2, num_chunks: int = 12, **settings: Any) -> tuple[Job, Ranks]:
    job = Job(num_nodes, per_node, **settings)
    ranks = Ranks(job, {rank: list(range(num_chunks)) for rank in range(job.world_size)}, num_chunks)
    ranks.plan()
    return job, ranks


def lost_bytes(job: Job) -> list[int]:
    return [pool.total_bytes for pool in job.pools]


def test_what_all_want_is_read_once_and_taken_once_per_node() -> None:
    job, ranks = replicas()
    assert all(found > 12 * CHUNK_BYTES for found in lost_bytes(job)), "memory is lent of the budget"
    ranks.run()
    assert ranks.all_read() == list(range(12)), "each once, on all nodes together"
    assert ranks.loads() == {0: 4, 1: 4, 2: 4} and not any(ranks.storage.values())
    assert job.read_bytes == dict.fromkeys(job.names, 2 * 4 * SIZE), "each chunk once to each other node"
    ranks.end()
    assert job.peers[3].last(chunk_messages.NodeRead).storage_bytes == 4 * SIZE
    assert lost_bytes(job) == [0, 0, 0] and all(session.passing._passage is None for session in job.sessions)
    told = job.told(w.Chunks)
    assert len(told) < 60, "what is told is gathered"


@pytest.mark.parametrize("slots", [8, 9, 13])
def test_a_cache_that_is_much_smaller_than_what_is_passed_on_suffices(slots: int) -> None:
    fits = slots * CHUNK_BYTES
    job, ranks = replicas(3, 2, 60, restore_cache_bytes=fits)
    assert all(session.passing._passage.cache.num_slots == slots for session in job.sessions)
    ranks.run()
    assert ranks.all_read() == list(range(60)) and not any(ranks.storage.values())


def test_ranks_of_a_node_that_want_different_chunks_share_one_cache() -> None:
    job = Job(2, 2)
    wants = {0: list(range(20)), 1: list(range(20, 40)), 2: list(range(10, 30)), 3: [*range(10), *range(30, 40)]}
    ranks = Ranks(job, wants, 40)
    ranks.plan()
    ranks.run()
    assert ranks.all_read() == list(range(40)) and not any(ranks.storage.values())


def test_chunks_that_one_node_wants_are_its_own_business() -> None:
    job = Job(3)
    ranks = Ranks(job, {0: list(range(10)), 1: list(range(10)), 2: list(range(10, 20))}, 20)
    ranks.plan()
    assert job.sessions[2].passing._passage is None and job.peers[2].last(chunk_messages.Cache).size_bytes == 0
    ranks.run()
    assert ranks.storage[2] == list(range(10, 20)) and ranks.loads() == {0: 5, 1: 5, 2: 0}


def test_too_little_to_be_worth_it_is_not_passed_on() -> None:
    job = Job(2)
    ranks = Ranks(job, {0: [0, 1], 1: [0, 1]}, 20)
    ranks.plan()
    assert not job.told(w.PassOn)


def test_a_node_that_is_cut_off_is_replaced_by_storage_at_both_ends() -> None:
    job, ranks = replicas(3, 1, 30)
    for _ in range(3):
        for rank in range(3):
            ranks.step(rank)
    job.cut(1, 2, noticed=False)  # those two only: the lead reaches both
    ranks.run()
    assert ranks.storage[1] and ranks.storage[2] and not ranks.storage[0]
    own = set(ranks.read[2])
    assert set(ranks.storage[1]) <= own and set(ranks.storage[2]) <= set(ranks.read[1])


def test_a_node_that_is_known_to_be_lost_is_not_waited_for() -> None:
    job, ranks = replicas(3, 1, 30)
    job.sessions[0].passing.node_lost(1)
    begun = job.clock.now
    while ranks.wants[0]:
        for rank in (0, 2):
            ranks.step(rank)
        job.tick(0.02)
    assert job.clock.now - begun < PATIENCE_S[1] and len(ranks.storage[0]) == 10


def test_a_node_whose_ranks_are_stuck_costs_patience_and_no_more() -> None:
    _, ranks = replicas(3, 1, 30)
    ranks.asleep.add(1)
    ranks.run()
    assert len(ranks.storage[0]) == len(ranks.storage[2]) == 10 and ranks.loads() == {0: 10, 2: 10, 1: 0}


def test_a_node_that_takes_nothing_holds_up_nobody_for_long() -> None:
    job, ranks = replicas(3, 1, 60, restore_cache_bytes=8 * CHUNK_BYTES)
    for _ in range(6):
        for rank in range(3):
            ranks.step(rank)
    ranks.asleep.add(1)
    begun = job.clock.now
    ranks.run()
    assert not ranks.wants[0] and not ranks.wants[2] and job.clock.now - begun < 60
    assert set(ranks.storage[0]) <= set(range(60)) and len(ranks.storage[0]) < 40


def test_bytes_that_do_not_verify_are_taken_from_their_node_no_more() -> None:
    _, ranks = replicas(3, 1, 60)
    ranks.lying.add(1)
    ranks.run()
    assert len(ranks.storage[0]) >= 1 and not ranks.wants[0]
    assert set(ranks.storage[0]) | set(ranks.storage[2]) <= set(range(60)) - set(ranks.read[0]) - set(ranks.read[2])


def test_what_cannot_be_read_for_all_is_said_at_once() -> None:
    job, ranks = replicas(3, 2, 24)
    ranks.broken = {5, 6}
    begun = job.clock.now
    ranks.run()
    assert all(sorted(ranks.storage[rank]) == [5, 6] for rank in range(6)), "each finds out for itself why"
    assert job.clock.now - begun < PATIENCE_S[0]


def test_a_node_without_memory_reads_for_itself_and_lets_nobody_wait() -> None:
    job = Job(3)
    job.pools[1]._budget = 1 << 20
    ranks = Ranks(job, {rank: list(range(30)) for rank in range(3)}, 30)
    ranks.plan()
    assert job.sessions[1].passing._passage is None and job.pools[1].total_bytes == 0
    begun = job.clock.now
    ranks.run()
    assert job.clock.now - begun < PATIENCE_S[1] and len(ranks.storage[0]) == 10 and len(ranks.storage[1]) == 30


def test_a_rank_that_dies_ends_the_restore_and_frees_the_memory() -> None:
    job, ranks = replicas(2, 2)
    ranks.step(0)
    for rank in (0, 1):
        job.sessions[0].detach(rank, job.peers[rank], orderly=False)
    job.deliver()
    assert job.pools[0].total_bytes == 0 and job.sessions[0].passing._passage is None
    for rank in (2, 3):
        job.send(rank, m.Vote(0, ranks.round, "verified"))
    for rank in (2, 3):
        assert "left" in str(job.peers[rank].refusal())
        job.send(rank, chunk_messages.ReadingOver(0, ranks.round, False))
    assert job.pools[1].total_bytes == 0


def test_the_next_round_begins_with_nothing_of_the_one_before() -> None:
    job, ranks = replicas(2, 1)
    ranks.run()
    for rank in range(2):
        job.send(rank, chunk_messages.ReadingOver(0, ranks.round, False))
    job.send(0, m.Vote(0, ranks.round, "verified", {"class": "StorageError", "message": "no"}))
    job.send(1, m.Vote(0, ranks.round, "verified"))
    again = Ranks(job, {0: list(range(12)), 1: list(range(12))}, 12)
    again.plan()
    assert again.round != ranks.round
    job.send(0, chunk_messages.ChunksAsk(0, ranks.round, [(1, 10)]))
    assert job.peers[0].last(chunk_messages.ChunksToRead).over, "of a round that is over"
    again.run()
    assert not any(again.storage.values())


def test_a_lead_that_counts_from_the_start_again_meets_nothing_old() -> None:
    job, ranks = replicas(2, 2)
    told = len(job.told(w.Wants))
    job.sessions[0].restores._end()
    job.sessions[0].restores._count = ranks.round - 1
    for rank in range(4):
        job.send(rank, m.RestoreAsk(0, None))
    job.flushers[0].answer("find", FOUND)
    job.deliver()
    assert job.peers[2].last(m.RestoreOffer).round == ranks.round
    job.send(2, m.Vote(0, ranks.round, "planned", num_chunks=12, wants=encode([1], 12)))
    assert len(job.told(w.Wants)) == told, "its other rank has not voted yet"


def test_only_what_is_there_is_given_to_others() -> None:
    job, ranks = replicas(2, 1)
    provide = job.wires["n0"].providers["chunk"]
    names = (f"{ranks.round}-0", f"{ranks.round}-99", f"{ranks.round}-x", f"{ranks.round}-²", "0", "", "9-0")
    assert all(provide("n1", name) is None for name in names)


@pytest.mark.parametrize(
    "word",
    [
        w.PassOn(1, 12, [([0, 2], encode([1], 12))]),
        w.PassOn(1, 12, [([0, 1, 1], encode([1], 12))]),
        w.PassOn(1, 12, [([0, 1, 9], encode([1], 12))]),
        w.PassOn(1, 12, [([0, 1], b"x")]),
        w.PassOn(1, 1 << 60, [([0, 1], encode([1], 12))]),
    ],
)
def test_a_dealing_that_makes_no_sense_is_refused(word: w.PassOn) -> None:
    job, _ = replicas(3, 1)
    word = msgspec.structs.replace(word, round=job.sessions[1].passing._round)
    with pytest.raises(msgspec.ValidationError):
        job.sessions[1].hear(word)


def test_what_a_neighbour_tells_is_not_believed_beyond_reason() -> None:
    job, ranks = replicas(3, 1)
    number = ranks.round
    for told in (
        w.Chunks(number, here=[(0, -5), (1, 1 << 40), (99, 5), (2, 5)], failed=[99, -1], taken=[99, -1, 3]),
        w.Chunks(number + 7, here=[(0, 5)]),
    ):
        job.sessions[0].passing.heard(2, told)
    with pytest.raises(msgspec.ValidationError):
        job.sessions[0].head.report(1, w.Wants(number, 12, b"nonsense"))
    ranks.run()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_all_get_what_they_want(seed: int) -> None:
    chance = random.Random(seed)
    num_nodes, per_node = chance.randint(2, 5), chance.randint(1, 2)
    num_chunks = chance.randint(10, 40)
    job = Job(num_nodes, per_node, restore_cache_bytes=chance.choice([8, 10, 1000]) * CHUNK_BYTES)
    wants = {
        rank: sorted(chance.sample(range(num_chunks), chance.randint(num_chunks // 2, num_chunks)))
        for rank in range(job.world_size)
    }
    ranks = Ranks(job, wants, num_chunks)
    ranks.plan()
    ranks.broken = set(chance.sample(range(num_chunks), chance.choice([0, 0, 2])))
    for _ in range(chance.randint(0, 5)):
        for rank in wants:
            ranks.step(rank)
    match chance.choice(["nothing", "cut", "asleep", "lying", "lost"]):
        case "cut" if num_nodes > 2:
            job.cut(1, 2, noticed=False)
        case "asleep":
            node = chance.randrange(num_nodes)  # all of it: who waits beside a stuck rank has a patience of its own
            ranks.asleep |= {rank for rank in wants if rank // per_node == node}
        case "lying":
            ranks.lying.add(chance.choice(list(wants)))
        case "lost":
            job.sessions[0].passing.node_lost(1)
    ranks.run()
    for rank in set(wants) - ranks.asleep:
        assert len(set(ranks.read[rank])) == len(ranks.read[rank])
    num_read = len(ranks.all_read()) - len(set(ranks.all_read()))
    assert num_read == 0, "no chunk is read for all twice"
