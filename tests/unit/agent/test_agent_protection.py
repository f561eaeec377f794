"""Redundancy between sessions: begun after a commit, delaying nothing, given up when overtaken, told once when it fails."""

from __future__ import annotations

from typing import Any

import pytest
from agent_fakes import FakePeer
from several_nodes import KEEP, Job

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.facts import facts_of
from safehold.agent.guarding import patience_s
from safehold.errors import CheckpointError, StorageError, StorageFullError
from safehold.types import CommitId

DONE = {"bytes": 100, "seconds": 0.5}


def job_of(num_nodes: int = 4, *, local: bool = True, **settings: Any) -> Job:
    job = Job(num_nodes=num_nodes, **({"copies": 1} if not settings else settings))
    for flusher in job.flushers:
        flusher.at_once |= {"retire": {"uncommitted": [], "problem": None}, "stop_protecting": None}
    for session in job.sessions:
        session.placed(local_flash=local)
    return job


def open_calls(job: Job, operation: str = "protect") -> list[int]:
    """The nodes whose flushers are at it."""
    return [node for node, flusher in enumerate(job.flushers) for _ in flusher.open(operation)]


def answer(job: Job, node: int, error: CheckpointError | None = None, operation: str = "protect") -> None:
    job.flushers[node].answer(operation, None if error else DONE, error)
    job.deliver()


def notes(job: Job, rank: int = 0) -> list[str]:
    return [note.text for note in job.peers[rank].of(m.Note)]


def events(job: Job) -> list[tuple[str, int | None]]:
    return [(event.stage, event.step) for event in job.heard if event.phase == "protect"]


def test_all_nodes_protect_what_was_committed_and_only_then() -> None:
    job = job_of()
    for rank in range(4):
        job.begin(rank, 5)
    for rank in range(4):
        job.stage_and_flush(rank, 5)
    for node in range(4):
        job.record(node)
    assert open_calls(job) == []
    job.publish()
    assert all(job.verdicts(rank) == [("durable", 5)] for rank in range(4))
    assert open_calls(job) == [0, 1, 2, 3]
    for node, flusher in enumerate(job.flushers):
        (asked,) = flusher.open("protect")
        members = asked["set"]["members"]
        assert (
            asked["commit"] == [5, 1, 0]
            and asked["node"] == node
            and node in members
            and asked["set"]["kind"] == "copies"
        )
        assert asked["at"] == {member: job.names[member] for member in members} and asked["keep"] == KEEP
    for node in range(4):
        assert job.sessions[node].guard.is_busy
        assert job.sessions[node].num_open == 0, "saves do not wait for it"
        answer(job, node)
    assert not any(session.guard.is_busy for session in job.sessions)
    assert [facts_of(session)["protected_step"] for session in job.sessions] == [5] * 4
    assert all(job.peers[rank].last(m.Protected) == m.Protected(5, True) for rank in range(4))
    assert events(job) == [("started", 5), ("done", 5)]


def test_a_checkpoint_that_two_others_overtake_is_given_up_for_the_newest() -> None:
    job = job_of()
    for step in (5, 6):
        job.save(step)
    assert [call["commit"][0] for call in job.flushers[1].open("protect")] == [5]
    job.save(7)
    assert [call["commit"][0] for call in job.flushers[1].open("protect")] == [5, 7]
    stopped = job.flushers[1].done("stop_protecting")
    assert [call["number"] for call in stopped] == [job.flushers[1].open("protect")[0]["number"]]
    for node in range(4):
        answer(job, node, StorageError("given up"))  # what was given up is of no interest
        assert job.sessions[node].guard.is_busy
    for node in range(4):
        answer(job, node)
    assert [session.guard.step for session in job.sessions] == [7] * 4 and notes(job) == []
    assert events(job) == [("started", 5), ("failed", 5), ("started", 7), ("done", 7)]


def test_the_next_checkpoint_waits_for_the_one_before() -> None:
    job = job_of()
    job.save(5)
    job.save(6)
    for node in range(4):
        answer(job, node)
    assert [call["commit"][0] for flusher in job.flushers for call in flusher.open("protect")] == [6] * 4
    assert all(session.guard.is_busy and session.guard.step == 5 for session in job.sessions)


def test_a_failure_is_told_once_for_each_cause_and_tried_again_at_the_next_commit() -> None:
    job = job_of()
    for step in (5, 6):
        job.save(step)
        for node in (0, 1, 3):
            answer(job, node)
        answer(job, 2, StorageFullError("no room", tier="flash"))
        assert not any(session.guard.is_busy for session in job.sessions)
        assert [session.guard.step for session in job.sessions] == [None] * 4
    for rank in range(4):
        (text,) = notes(job, rank)
        assert "step 5 is not protected against the loss of a node" in text and "node n2" in text and "no room" in text
    job.save(7)
    for node in range(4):
        answer(job, node)
    job.save(8)
    answer(job, 2, StorageFullError("no room", tier="flash"))
    for node in (0, 1, 3):
        answer(job, node)
    assert len(notes(job)) == 2, "after a success it is news again"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_node_that_is_lost_ends_the_protection_by_name(when: str) -> None:
    job = job_of()
    job.save(5)
    if when == "before":
        for node in range(4):
            answer(job, node)
        job.cut(0, 2)
        job.sessions[0].head.protector.committed(6, 0)
        job.deliver()
    else:
        job.cut(0, 2)
    assert not job.sessions[0].guard.is_busy and "node n2 was lost" in notes(job)[0]
    assert not job.sessions[2].guard.is_busy, "who has lost its lead waits for nothing"
    job.mend(0, 2)
    job.sessions[0].head.protector.committed(7, 0)
    job.deliver()
    assert [call["commit"][0] for call in job.flushers[2].open("protect")][-1:] == [7]


def test_what_takes_too_long_is_named_and_ends() -> None:
    job = job_of(4, copies=1, flush_timeout_s=50.0, stall_timeout_s=10.0)
    job.save(5)
    for node in (0, 1, 2):
        answer(job, node)
    job.tick(patience_s(job.sessions[0].config) - 1)
    assert job.sessions[0].guard.is_busy
    job.tick(2)
    assert not job.sessions[0].guard.is_busy and "node n3 did not protect the checkpoint in time" in notes(job)[0]


def test_who_leaves_waits_for_the_end_of_it_or_its_own_deadline() -> None:
    job = job_of()
    first = job.send(1, m.ProtectionAsk(0, 30.0))
    assert isinstance(job.answer_to(1, first), m.Done), "nothing is to be protected"
    job.save(5)
    waits, patient = job.send(1, m.ProtectionAsk(0, 5.0)), job.send(2, m.ProtectionAsk(0, 100.0))
    assert job.answer_to(1, waits) is None
    job.tick(6.0)
    assert isinstance(job.answer_to(1, waits), m.Done) and job.answer_to(2, patient) is None
    for node in range(4):
        answer(job, node)
    assert isinstance(job.answer_to(2, patient), m.Done)


def test_a_session_that_ends_waits_for_nothing() -> None:
    job = job_of()
    job.save(5)
    asked = job.send(1, m.ProtectionAsk(0, 100.0))
    job.sessions[1].end(2)
    assert isinstance(job.answer_to(1, asked), m.Done) and not job.sessions[1].guard.is_busy
    assert job.flushers[1].done("stop_protecting")


@pytest.mark.parametrize(("nodes", "local", "settings"), [(4, False, {"copies": 1}), (4, True, {"parity": ""})])
def test_where_it_is_not_needed_nothing_is_done(nodes: int, local: bool, settings: dict[str, Any]) -> None:
    job = job_of(nodes, local=local, **settings)
    job.save(5)
    assert open_calls(job) == [] and not any(session.guard.is_busy for session in job.sessions)


def test_the_user_is_told_at_the_start_what_is_protected_and_what_not() -> None:
    def told(nodes: int, local: bool, **settings: Any) -> tuple[list[str], list[str]]:
        return job_of(nodes, local=local, **settings).sessions[0].head.protector.notes(local_flash=local)

    assert told(4, True, parity="") == ([], [])
    assert told(4, True, parity="rs:2+2") == (["redundancy: rs:2+2 over 4 nodes, made after each commit"], [])
    assert "copies=1 is not needed: one directory" in told(4, False, copies=1)[0][0]
    job = job_of(4, local=False, copies=1)
    job.flushers[0].url = "s3://bucket/run"
    notes, warnings = job.sessions[0].head.protector.notes(local_flash=False)
    assert "copies=1 is not needed: the run directory is in an object store" in notes[0] and not warnings
    notes, warnings = told(3, True, parity="rs:4+2")
    assert "copies=2 over 3 nodes" in notes[0] and "rs:4+2 needs 6 nodes and there are 3" in warnings[0]


def survey(job: Job, at: dict[int, str], protected: list[int]) -> dict[str, Any]:
    sets = [{"kind": "copies", "num_data": 1, "num_parity": 1, "members": [0, 1]}]
    sets.append({"kind": "copies", "num_data": 1, "num_parity": 1, "members": [2, 3]})
    return {"nodes": [0, 1, 2, 3], "names": ["n0", "n1", "old", "n3"], "at": at, "sets": sets, "protected": protected}


def restore(job: Job, found: dict[str, Any]) -> None:
    job.sessions[0].head.restores._restored(CommitId(5, 1, 0))
    job.flushers[0].answer("survey", found)
    job.deliver()


def test_after_a_restore_a_replacement_gets_its_files_and_then_its_share() -> None:
    job = job_of()
    restore(job, survey(job, {0: "n0", 1: "n1", 3: "n3"}, [0, 1, 3]))
    assert open_calls(job, "rebuild") == [2] and open_calls(job) == []
    (asked,) = job.flushers[2].open("rebuild")
    assert asked["node"] == 2 and asked["commit"] == [5, 1, 0] and asked["at"][3] == "n3"
    assert notes(job) == ["rebuilding step 5 on node n2: what node old has saved"]
    answer(job, 2, operation="rebuild")
    assert notes(job)[1] == "rebuilt step 5 on node n2: 100 bytes in 0.50 s"
    assert open_calls(job) == [2]
    (asked,) = job.flushers[2].open("protect")
    assert asked["set"]["members"] == [2, 3] and asked["at"] == {2: "n2", 3: "n3"}
    answer(job, 2)
    assert [session.guard.step for session in job.sessions] == [5] * 4


def test_after_a_restore_of_what_is_whole_nothing_is_done_but_missing_shares() -> None:
    job = job_of()
    everywhere = dict(enumerate(job.names))
    restore(job, survey(job, everywhere, [0, 1, 2, 3]))
    assert open_calls(job) == [] and not job.sessions[0].guard.is_busy
    restore(job, survey(job, everywhere, [0, 2, 3]))
    assert open_calls(job) == [1]


def test_a_rebuild_that_fails_is_told_and_no_share_is_made_of_it() -> None:
    job = job_of()
    restore(job, survey(job, {0: "n0", 1: "n1", 3: "n3"}, [0, 1, 3]))
    answer(job, 2, StorageError("broken"), operation="rebuild")
    assert open_calls(job) == [] and "broken" in notes(job)[-1]


def test_fewer_nodes_give_nothing_back_and_say_so() -> None:
    job = job_of(3)
    restore(job, survey(job, {0: "n0", 1: "n1", 3: "n2"}, [0, 1, 3]))
    assert open_calls(job, "rebuild") == [] and "stays without the files of node old" in notes(job)[0]
    job.save(6)
    assert open_calls(job) == [0, 1, 2]


def test_a_report_that_nobody_asked_for_changes_nothing() -> None:
    job = job_of()
    job.save(5)
    number = job.flushers[1].open("protect")[0]["number"]
    for report in (
        w.ProtectedHere(number, 1, 1, 1.0),
        w.ProtectedHere(number + 1, 2, 1, 1.0),
        w.ProtectedHere(number, 77, 1, 1.0),
    ):
        job.wires["n2"].send("n0", w.encode(report))
    job.deliver()
    for node in (0, 1, 2):
        answer(job, node)
    assert job.sessions[0].guard.is_busy
    answer(job, 3)
    assert not job.sessions[0].guard.is_busy


def test_work_of_another_lead_is_not_taken_for_ones_own() -> None:
    numbers = set()
    for _ in range(2):
        job = job_of()
        job.save(5)
        numbers.add(job.flushers[1].open("protect")[0]["number"])
    assert len(numbers) == 2


def test_an_agent_in_the_place_of_another_takes_part_again() -> None:
    job = job_of()
    job.save(5)
    job.peers[2] = FakePeer(2)
    job.sessions[2] = job.start(2, incarnation=1)
    job.deliver()
    assert not job.sessions[0].guard.is_busy and "node n2 was lost" in notes(job)[0]
