"""Restores in a session: beside saves, over incarnations, and what is given of memory."""

from __future__ import annotations

from typing import Any

import pytest
from agent_fakes import FakePeer, Node, hello, world_of

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.agent.session import Session
from safehold.errors import ConfigurationError, DeadlineError, RankLostError, StorageError, SupersededError, from_wire
from safehold.events import EventStream


def found(step: int, newest: int) -> dict[str, Any]:
    return {
        "commit": [step, 1, 0],
        "manifest": b"m",
        "newest": [newest, 1, 0],
        "any_commit": True,
        "bad": [],
        "skipped": [],
    }


def test_a_restore_waits_for_the_save_in_flight_and_moves_to_the_next_incarnation() -> None:
    node = Node()
    node.save(10)
    for rank in (0, 1):
        node.begin(rank, 20)
        node.stage(rank, 20)
        node.send(rank, m.RestoreAsk(50 + rank, 10))
    assert not node.flusher.open("find")
    for rank in (0, 1):
        node.flushed(rank)
    node.record()
    node.publish()
    node.flusher.answer("find", found(10, 20))
    assert node.peers[0].last(m.RestoreOffer).memory == [], "both arenas hold step 20 by now"
    number = node.peers[0].last(m.RestoreOffer).round
    for phase in ("planned", "verified"):
        for rank in (0, 1):
            node.send(rank, m.Vote(60 + rank, number, phase))
    assert len(node.peers[0].of(m.Verdict)) == 1
    node.flusher.answer("open_run", {"run_id": "run", "incarnation": 2, "steps": [10], "notes": []})
    assert node.peers[1].last(m.Verdict).outcome == "go" and node.peers[1].last(m.Verdict).incarnation == 2
    for rank in (0, 1):
        node.send(rank, m.RestoreDone(-1, 10))
    node.save(20)
    assert node.flusher.done("publish")[-1]["commit"] == [20, 2, 0]
    node.begin(0, 10, 3)
    assert "committed already" in str(node.peers[0].refusal())


def go_back(node: Node, step: int = 10, newest: int = 20) -> None:
    """All ranks restore a step behind the newest, up to the next incarnation."""
    for rank in (0, 1):
        node.send(rank, m.RestoreAsk(node.next_id(), step))
    node.flusher.answer("find", found(step, newest))
    number = node.peers[0].last(m.RestoreOffer).round
    for phase in ("planned", "verified"):
        for rank in (0, 1):
            node.send(rank, m.Vote(60 + rank, number, phase))


def lose(node: Node, operation: str, error: Exception) -> None:
    """The flusher is lost with a call, which may have been carried out."""
    node.flusher.lost = True
    node.flusher.answer(operation, None, error)
    node.flusher.lost = False


@pytest.mark.parametrize("error", [StorageError("the flusher is gone"), DeadlineError("storage does not answer")])
def test_a_going_back_whose_answer_is_lost_is_asked_for_again_as_the_same(error: Exception) -> None:
    node = Node()
    node.save(10)
    go_back(node)
    [first] = node.flusher.open("open_run")
    lose(node, "open_run", error)
    [second] = node.flusher.open("open_run")
    assert second == first, "what was done already is found by its token"
    assert not [verdict for verdict in node.peers[0].of(m.Verdict) if verdict.outcome == "stop"]
    node.flusher.answer("open_run", {"run_id": "run", "incarnation": 2, "steps": [10], "notes": []})
    assert node.peers[0].last(m.Verdict).outcome == "go" and node.session.incarnation == 2


def test_a_going_back_that_is_lost_again_or_refused_stops_the_restore() -> None:
    node = Node()
    for number, lost in enumerate((True, False), 1):
        go_back(node)
        if lost:
            lose(node, "open_run", StorageError("gone"))
        node.flusher.answer("open_run", None, StorageError("full"))
        assert not node.flusher.open("open_run")
        stopped = [verdict for verdict in node.peers[0].of(m.Verdict) if verdict.outcome == "stop"]
        assert len(stopped) == number and "full" in str(from_wire(stopped[-1].error))


def test_after_a_going_back_in_doubt_the_next_restore_opens_an_incarnation_all_the_same() -> None:
    node = Node()
    node.save(10)
    go_back(node)
    for _ in range(2):
        lose(node, "open_run", StorageError("gone"))
    assert node.peers[0].last(m.Verdict).outcome == "stop"
    go_back(node, step=10, newest=10)  # what was done made it the newest
    [asked] = node.flusher.open("open_run")
    assert asked["up_to"] == [10, 1, 0]
    node.flusher.answer("open_run", {"run_id": "run", "incarnation": 3, "steps": [10], "notes": []})
    assert node.peers[0].last(m.Verdict).outcome == "go" and node.session.incarnation == 3
    go_back(node, step=10, newest=10)
    assert not node.flusher.open("open_run"), "nothing is in doubt any more"
    node.save(20)


def test_late_news_of_the_old_incarnation_reach_nobody_after_a_going_back() -> None:
    node = Node()
    for rank in (0, 1):
        node.begin(rank, 20)
        node.stage(rank, 20)
        node.flushed(rank)
    node.record()
    node.plan()
    node.work.run_until(lambda: node.flusher.open("publish"))
    node.tick(60.0)  # in doubt
    for rank in (0, 1):
        node.send(rank, m.RestoreAsk(50 + rank, 10))
    node.flusher.answer("find", found(10, 15))
    number = node.peers[0].last(m.RestoreOffer).round
    for phase in ("planned", "verified"):
        for rank in (0, 1):
            node.send(rank, m.Vote(60 + rank, number, phase))
    node.flusher.answer("open_run", {"run_id": "run", "incarnation": 2, "steps": [10], "notes": []})
    node.flusher.answer("publish")
    assert not node.peers[0].of(m.Durable) and 20 not in node.saves.known.steps


def test_memory_of_a_rank_is_given_or_refused() -> None:
    node = Node()
    node.save(10)
    node.send(1, held_messages.MemoryAsk(70, 0))
    assert node.reply_to(1, 70).packs == [(0, 8192)]
    node.send(1, held_messages.MemoryAsk(71, 9))
    assert isinstance(node.peers[1].refusal(), RankLostError)
    node.begin(0, 20)
    node.send(1, held_messages.MemoryAsk(72, 0))
    assert isinstance(node.reply_to(1, 72), m.Refused), "it is being overwritten"


def test_before_the_run_is_open_there_is_nothing_to_restore() -> None:
    node, world = Node(), world_of(1, "other")
    session = Session(
        hello(0, world),
        pool=node.pool,
        flusher=node.flusher,
        post=node.work.post,
        clock=node.clock,
        events=EventStream("agent"),
    )
    peer = FakePeer(0)
    session.attach(peer, hello(0, world))
    for message in (m.RestoreAsk(1, None), m.Prepare(2, 10), m.StageFailed(3, 1, 0, {})):
        with pytest.raises(ConfigurationError, match="not open yet"):
            session.handle(peer, message, None)
    session.close()


def test_whose_arena_was_being_made_when_another_job_came_hears_of_that_job() -> None:
    node = Node()
    node.send(0, m.Prepare(8, 8192))
    node.session.end(2)
    node.work.run_until(lambda: node.reply_to(0, 8))
    assert isinstance(node.peers[0].refusal(), SupersededError)
