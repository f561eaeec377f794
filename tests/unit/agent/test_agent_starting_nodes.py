"""A start of a job on several nodes: who is lost in it ends it at once, and nobody speaks of what was not there yet."""

from __future__ import annotations

from typing import Any

import pytest
from agent_fakes import FakePeer
from several_nodes import Job

from safehold.agent import messages as m
from safehold.agent.opening import Opening
from safehold.agent.session import Session
from safehold.errors import AgentUnavailableError, CheckpointError, RankLostError, from_wire
from safehold.trainer.connection import _Start


def lost_in(peer: FakePeer) -> CheckpointError:
    return from_wire(peer.last(m.NodeLost).error)


def test_a_node_that_loses_the_lead_in_a_start_tells_its_ranks_at_once() -> None:
    job = Job(num_nodes=3, per_node=2, opened=False)
    job.cut(0, 2)
    for rank in (4, 5):
        error = lost_in(job.peers[rank])
        assert (
            isinstance(error, RankLostError)
            and error.node == "n0"
            and "while the run was being opened" in error.message
        )
        assert "start the job again" in str(error.hint)
    assert [lost_in(job.peers[rank]).node for rank in (0, 1)] == ["n2", "n2"], "nor can the lead do without them"
    assert not job.peers[2].of(m.NodeLost)


def test_a_trainer_waits_for_the_others_no_more_once_a_node_or_its_agent_is_lost() -> None:
    class Client:
        alive, rank = True, 3

    taken: list[Any] = []
    start = _Start(taken.append)
    assert start.failure() is None
    start.client = Client()  # type: ignore[assignment]
    assert start.failure() is None
    start.notify(m.Note("x"))
    start.notify(m.NodeLost(RankLostError("node a was lost", node="a").to_wire()))
    assert [type(reply) for reply in taken] == [m.Note]
    error = start.failure()
    assert isinstance(error, RankLostError) and error.node == "a"
    alone = _Start(taken.append)
    alone.client = Client()  # type: ignore[assignment]
    Client.alive = False
    assert isinstance(alone.failure(), AgentUnavailableError)


def test_nothing_is_told_to_nodes_that_have_not_met() -> None:
    job = Job(num_nodes=2, opened=False)
    assert not [event for event in job.heard if event.phase == "tell"]
    session = job.start(1)
    session.attach(FakePeer(1), job.hello(1))  # says that the rank is back, to a lead that nobody has an address of yet
    job.cuts.add(frozenset(job.names))
    session.attach(FakePeer(1), job.hello(1))
    assert not [event for event in job.heard if event.phase == "tell"]
    session.nodes.meet([wire.address for wire in job.wires.values()])  # type: ignore[union-attr]
    session.attach(FakePeer(1), job.hello(1))
    assert [event for event in job.heard if event.phase == "tell"], "from here on it is worth a word"


def test_an_incarnation_that_was_opened_while_a_node_was_lost_is_told_once_it_is_back() -> None:
    job = Job(num_nodes=2)
    job.cut(0, 1)
    job.sessions[0].opened("run", 2, [4])
    job.deliver()
    assert [session.incarnation for session in job.sessions] == [2, 1]
    job.mend(0, 1)
    assert [session.incarnation for session in job.sessions] == [2, 2]
    job.flushers[0].at_once["known"] = job.flushers[1].at_once["known"] = {"steps": [4], "commits": [], "left": []}
    job.save(6)
    assert job.verdicts(1)[-1] == ("durable", 6)


def test_a_node_that_missed_how_the_run_directory_is_used_hears_it_again() -> None:
    job = Job(num_nodes=2, opened=False)
    job.cut(0, 1)
    job.sessions[0].placed(local_flash=True)
    job.sessions[0].opened("run", 1, [])
    job.deliver()
    assert not job.sessions[1].local_flash
    job.mend(0, 1)
    assert job.sessions[1].local_flash and job.sessions[1].incarnation == 1
    configured = len(job.flushers[1].configured)
    job.cut(0, 1)
    job.mend(0, 1)
    assert len(job.flushers[1].configured) == configured, "what it knows already changes nothing"


# -- ranks that leave while their run is being opened ----------------------------------------------------------------------


class Sessions:
    """The agent's sessions: that of a job before, and the new one."""

    def __init__(self, job: Job) -> None:
        self.resumed = 0
        self.job, self.there = job, True
        self.settled: list[Any] = []

    @property
    def current(self) -> Any:
        return self

    def resume(self) -> None:
        self.resumed += 1

    def has(self, session: Session) -> bool:
        return self.there

    def settle_old(self, session: Session, then: Any, deadline_s: float) -> None:
        self.settled.append(then)


@pytest.mark.parametrize("when", ["settled", "placed"])
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_no_incarnation_is_opened_for_ranks_that_have_left(who: str, when: str) -> None:
    job = Job(num_nodes=2, opened=False)
    session, flusher, peer = job.sessions[0], job.flushers[0], job.peers[0]
    peer.pid = 1  # type: ignore[attr-defined]
    sessions = Sessions(job)
    opening = Opening(sessions, session, peer, m.OpenRun(7), flusher=flusher, pool=job.pools[0])  # type: ignore[arg-type]
    opening.begin()
    job.deliver()
    job.flushers[1].answer("place", True, do="wait")
    job.deliver()

    def leave() -> None:
        if who == "all":
            sessions.there = False
        session.detach(0, peer, orderly=False)  # type: ignore[arg-type]

    if when == "settled":
        leave()
    sessions.settled[0]()
    flusher.answer("place", True, do="wait")
    if when == "placed":
        flusher.answer("place", True, do="put")
        job.deliver()
        leave()
        job.flushers[1].answer("place", True, do="see")
        job.deliver()
    else:
        assert not flusher.open("place")
    assert not flusher.open("open_run") and sessions.resumed == 1
    assert isinstance(peer.refusal(), RankLostError)


def test_others_are_waited_for_where_this_node_has_nothing_to_settle() -> None:
    job = Job(num_nodes=2, opened=False, flash="shared")
    sessions = Sessions(job)
    sessions.settle_old = lambda session, then, deadline_s: then()  # type: ignore[method-assign]
    elsewhere: list[Any] = []
    job.settle_old = lambda session, then, deadline_s: elsewhere.append(then)
    peer, flusher = job.peers[0], job.flushers[0]
    Opening(sessions, job.sessions[0], peer, m.OpenRun(7), flusher=flusher, pool=job.pools[0]).begin()  # type: ignore[arg-type]
    job.deliver()
    assert len(elsewhere) == 1 and not flusher.open("open_run")
    elsewhere[0]()
    job.deliver()
    assert len(flusher.open("open_run")) == 1


def test_a_session_that_ends_while_it_waits_for_others_lets_the_job_before_go_on() -> None:
    job = Job(num_nodes=2, opened=False)
    session, flusher, peer = job.sessions[0], job.flushers[0], job.peers[0]
    sessions = Sessions(job)
    opening = Opening(sessions, session, peer, m.OpenRun(7), flusher=flusher, pool=job.pools[0])  # type: ignore[arg-type]
    opening.begin()
    sessions.settled[0]()
    flusher.answer("place", True, do="wait")
    assert not sessions.resumed, "the other node has not settled yet"
    sessions.there = False
    session.detach(0, peer, orderly=False)  # type: ignore[arg-type]
    session.close()
    assert sessions.resumed == 1 and not flusher.open("open_run")
