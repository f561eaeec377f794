"""Sessions on several nodes: one commits for all, and nothing waits for a node, a lead or a message that is gone."""

from __future__ import annotations

import pytest
from agent_fakes import FakePeer
from several_nodes import Job

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import (
    CommitError,
    RankLostError,
    SkippedError,
    StateMismatchError,
    StorageError,
    from_wire,
)
from safehold.policy import commit as protocol


def test_a_save_of_three_nodes_is_committed_by_the_lead_and_told_to_all() -> None:
    job = Job(num_nodes=3, per_node=2)
    job.save(5)
    assert [job.verdicts(rank) for rank in range(6)] == [[("durable", 5)]] * 6
    assert [len(flusher.done("record")) for flusher in job.flushers] == [1, 1, 1]
    assert [len(flusher.done("publish")) for flusher in job.flushers] == [1, 0, 0]
    assert [ref["node"] for ref in job.flushers[0].done("publish")[0]["nodes"]] == [0, 1, 2]
    assert [len(flusher.done("retire")) for flusher in job.flushers] == [1, 0, 0], "only the lead lets go of others"
    assert all(session.num_open == 0 for session in job.sessions)


def test_parts_travel_once_and_a_known_plan_costs_a_few_hundred_bytes() -> None:
    job = Job(num_nodes=3)
    job.save(5)
    assert len(job.told(w.PartTold, to=0)) == 2 and len(job.flushers[0].done("plan")) == 1
    before = len(job.sent)
    job.flushers[0].answer("retire", {"uncommitted": [], "problem": None})
    job.save(6)
    later = job.sent[before:]
    assert not [message for _, _, message in later if isinstance(message, w.PartTold | w.PartWanted)]
    assert sum(len(w.encode(message)) for _, _, message in later) < 2 * 1000 and len(job.flushers[0].done("plan")) == 1


def test_what_drifted_apart_on_another_node_fails_the_save_by_name() -> None:
    job = Job(per_node=1)
    for rank in (0, 1):
        job.begin(rank, 5)
    for rank, crc in ((0, 7), (1, 8)):
        job.stage_and_flush(rank, 5, compare={"w@0": crc})
    job.deliver()
    for rank in (0, 1):
        error = job.failure(rank)
        assert isinstance(error, StateMismatchError) and "differ" in error.message
    assert not job.flushers[0].done("publish")


def test_a_save_that_one_node_skips_is_dropped_on_all() -> None:
    job = Job(overlap_policy="skip")
    for rank in (0, 1):
        job.begin(rank, 5)
    job.stage_and_flush(0, 5)
    job.record(0)  # node 0 is through with it, node 1 still flushes
    job.sessions[0].saves._saves[5, 0].closed = True
    job.begin(1, 6)
    assert isinstance(job.answer_to(1, job._id), m.Skipped)
    job.begin(0, 6)
    assert ("failed", 6) in job.verdicts(0) and isinstance(job.failure(0), SkippedError)


def test_a_node_that_is_lost_ends_the_save_by_name_and_a_later_one_works() -> None:
    job = Job(num_nodes=3)
    for rank in range(3):
        job.begin(rank, 5)
    job.cut(0, 2)
    for rank in (0, 1):
        error = job.failure(rank)
        assert isinstance(error, RankLostError) and error.node == "n2" and error.step == 5
    error = job.failure(2)
    assert isinstance(error, RankLostError) and error.node == "n0" and "lead" in error.message
    job.mend(0, 2)
    for flusher, rank in zip(job.flushers, range(3), strict=True):
        flusher.answer("flush", None, StorageError("cancelled"), rank=rank)
    job.deliver()
    job.save(6)
    assert [job.verdicts(rank)[-1] for rank in range(3)] == [("durable", 6)] * 3


def test_saves_that_begin_while_the_lead_is_lost_fail_at_once_and_later_ones_work() -> None:
    job = Job(num_nodes=2)
    job.cut(0, 1)
    for step in (5, 6, 7):
        job.begin(1, step)
        refusal = from_wire(job.answer_to(1, job._id).error)
        assert isinstance(refusal, RankLostError) and refusal.node == "n0", "nobody would ever decide about it"
    assert job.sessions[1].num_open == 0
    job.begin(0, 9)
    assert job.verdicts(0)[-1] == ("failed", 9) and job.failure(0).node == "n1"
    job.flushers[0].answer("flush", None, StorageError("cancelled"), rank=0)
    job.mend(0, 1)
    job.save(10)
    assert job.verdicts(1)[-1] == ("durable", 10) == job.verdicts(0)[-1]


def test_a_verdict_that_was_lost_on_the_way_is_told_once_the_node_is_back() -> None:
    job = Job(num_nodes=2)
    for rank in (0, 1):
        job.begin(rank, 5)
    # Only the lead notices, and the other node never does: it still waits for a verdict.
    names = frozenset(job.names)
    job.cuts.add(names)
    job.wires["n0"].listeners.on_lost("n1", StorageError("it does not answer"))
    job.deliver()
    assert job.verdicts(0) == [("failed", 5)] and job.verdicts(1) == []
    job.cuts.discard(names)
    job.wires["n0"].listeners.on_back("n1")
    job.deliver()
    assert job.verdicts(1) == [("failed", 5)]


def test_a_node_that_had_lost_its_lead_alone_tells_that_it_gave_up() -> None:
    job = Job(num_nodes=2)
    for rank in (0, 1):
        job.begin(rank, 5)
    job.wires["n1"].listeners.on_lost("n0", StorageError("it does not answer"))
    job.deliver()
    assert job.verdicts(1) == [("failed", 5)] and job.verdicts(0) == []
    assert not job.flushers[1].done("abandon"), "the lead may commit it: its files stay"
    job.wires["n1"].listeners.on_back("n0")
    job.deliver()
    assert job.verdicts(0) == [("failed", 5)] and "gave the save up" in job.failure(0).message


def test_an_agent_in_the_place_of_a_lead_that_died_ends_what_waits_for_that_one() -> None:
    job = Job(num_nodes=2)
    job.begin(1, 5)
    job.peers[0] = FakePeer(0)
    job.sessions[0] = job.start(0, incarnation=1)
    job.flushers[0].answer("known", {"steps": [3], "commits": [[3, 1, 0]], "left": []})
    job.attach(0, incarnation=1)
    job.deliver()
    error = job.failure(1)
    assert isinstance(error, RankLostError) and "another one came in its place" in error.message
    job.flushers[1].answer("flush", None, StorageError("cancelled"), rank=1)
    job.save(6)
    assert job.verdicts(0) == [("durable", 6)] and job.verdicts(1)[-1] == ("durable", 6)


def test_an_agent_in_the_place_of_another_node_s_ends_the_saves_that_it_took_part_in() -> None:
    job = Job(num_nodes=2)
    for rank in (0, 1):
        job.begin(rank, 5)
    job.flushers[1].calls.clear()
    job.peers[1] = FakePeer(1)
    job.sessions[1] = job.start(1, incarnation=1)
    job.deliver()
    error = job.failure(0)
    assert isinstance(error, RankLostError) and error.node == "n1"


def test_ranks_of_all_nodes_restore_the_same_and_the_manifest_travels_once_to_a_node() -> None:
    job = Job(num_nodes=2, per_node=2)
    asks = [job.send(rank, m.RestoreAsk(0, None)) for rank in range(4)]
    job.flushers[0].answer(
        "find",
        {
            "commit": [20, 1, 0],
            "manifest": b"the manifest",
            "newest": [20, 1, 0],
            "any_commit": True,
            "bad": [],
            "skipped": [],
        },
    )
    job.deliver()
    offers = [job.answer_to(rank, ask) for rank, ask in enumerate(asks)]
    assert [(offer.step, offer.manifest) for offer in offers] == [(20, b"the manifest")] * 4
    assert sum(len(word.reply) > 200 or b"the manifest" in word.reply for word in job.told(w.ToRank)) == 1
    assert not job.flushers[1].done("find")
    for phase in ("planned", "verified"):
        votes = [job.send(rank, m.Vote(0, offers[rank].round, phase)) for rank in range(4)]
        assert [job.answer_to(rank, vote).outcome for rank, vote in enumerate(votes)] == ["go"] * 4


def test_going_back_moves_all_nodes_to_the_new_incarnation_before_they_hear_the_verdict() -> None:
    job = Job(num_nodes=2)
    asks = [job.send(rank, m.RestoreAsk(0, 10)) for rank in (0, 1)]
    found = {"commit": [10, 1, 0], "manifest": b"x", "newest": [20, 1, 0], "any_commit": True, "bad": [], "skipped": []}
    job.flushers[0].answer("find", found)
    job.deliver()
    number = job.answer_to(1, asks[1]).round
    for phase in ("planned", "verified"):
        votes = [job.send(rank, m.Vote(0, number, phase)) for rank in (0, 1)]
    job.flushers[0].answer("open_run", {"run_id": "run", "incarnation": 2, "steps": [10], "notes": []})
    job.deliver()
    assert [job.answer_to(rank, vote).incarnation for rank, vote in enumerate(votes)] == [2, 2]
    assert [session.incarnation for session in job.sessions] == [2, 2]
    assert job.sessions[1].saves.known.steps == {10} and not job.flushers[1].done("known")


def test_a_restore_ends_for_all_when_a_node_is_lost() -> None:
    job = Job(num_nodes=3)
    asks = [job.send(rank, m.RestoreAsk(0, None)) for rank in (0, 1)]
    third = job.send(2, m.RestoreAsk(0, None))
    job.cut(0, 2)
    for rank, ask in ((0, asks[0]), (1, asks[1]), (2, third)):
        refusal = job.answer_to(rank, ask)
        assert isinstance(refusal, m.Refused) and refusal.error["class"] == "RankLostError"


def test_saves_by_time_are_announced_beyond_the_ranks_of_all_nodes() -> None:
    job = Job(num_nodes=2, every_seconds=60.0)
    job.controls[0].set_progress(step=10)
    job.controls[1].set_progress(step=25)
    for _ in range(62):
        job.tick(1.0)
    step = job.sessions[0].node_control.announcement.step
    assert step is not None and step > 25
    assert job.sessions[1].node_control.announcement.step == step
    for rank in (0, 1):
        job.begin(rank, step, announced=True)
    job.tick(1.0)
    assert job.verdicts(0) == [] and job.sessions[0].head.announcer._pending is None


def test_an_announcement_that_a_rank_elsewhere_has_passed_is_dropped_at_once() -> None:
    job = Job(num_nodes=2, every_seconds=60.0)
    for control in job.controls:
        control.set_progress(step=10)
    for _ in range(62):
        job.tick(1.0)
    step = job.sessions[0].node_control.announcement.step
    assert step is not None
    job.begin(0, step, announced=True)
    job.controls[1].set_progress(step=step + 1)
    for _ in range(3):
        job.tick(0.1)
    assert job.verdicts(0) == [("failed", step)] and isinstance(job.failure(0), SkippedError)


def test_who_holds_undeclared_leaves_is_settled_over_all_nodes() -> None:
    job = Job(num_nodes=2, per_node=2)
    leaves = [("w", "float32", [4], "torch")]
    for rank in range(4):
        job.send(rank, m.Register(0, leaves if rank else [*leaves, ("b", "float32", [2], "torch")]))
    for peer in job.peers:
        settled = peer.last(m.Settled).settlement
        assert settled["groups"] == [[0, 1], [0, 4]] and [leaf[0] for leaf in settled["leaves"]] == ["b", "w"]
    assert len(job.told(w.Undeclared)) == 1


def test_a_rank_joins_once_the_lead_s_word_has_come() -> None:
    job = Job(num_nodes=2)
    assert isinstance(job.answer_to(1, job.send(1, m.JoinRun(0, "run", 1))), m.Done)
    fresh = Job(num_nodes=2)
    fresh.sessions[1] = fresh.start(1)
    fresh.attach(1)
    request = fresh.send(1, m.JoinRun(0, "run", 1))
    assert fresh.answer_to(1, request) is None
    fresh.sessions[0].head.tell_opened([4])
    fresh.deliver()
    assert isinstance(fresh.answer_to(1, request), m.Done) and fresh.sessions[1].saves.known.steps == {4}


def test_a_new_start_waits_for_what_the_one_before_has_in_flight_elsewhere() -> None:
    job = Job(num_nodes=3)
    waiting, settled = [], []
    job.settle_old = lambda session, then, seconds: waiting.append((session.node, then))
    others = job.sessions[0].head.others
    others.ask(20.0)
    others.after(lambda: settled.append(1))
    job.deliver()
    assert [node for node, _ in waiting] == [1, 2] and not settled
    waiting[0][1]()
    job.deliver()
    assert not settled
    waiting[1][1]()
    job.deliver()
    assert settled == [1]
    others.ask(20.0)
    others.after(lambda: settled.append(2))
    job.cut(0, 1)
    job.tick(21.0)
    assert settled == [1, 2], "neither a lost node nor one that does not answer is waited for without an end"


@pytest.mark.parametrize(
    "report",
    [
        w.event_told(protocol.Begun(5, 0, 0, "x"), 1),
        w.event_told(protocol.NodeRecorded(5, 0, 0, 1, "y", {0: "x"}), 1),
        w.event_told(protocol.Begun(-5, 0, 1, "x"), 1),
        w.EventTold(1, "Published", w.event_told(protocol.Begun(5, 0, 1, "x"), 1).fields),
        w.RanksAsk([0], m.encode(m.RestoreAsk(1, None))),
        w.RanksAsk([1], m.encode(m.OpenRun(1))),
        w.RanksAsk([1, 0], m.encode(m.RestoreAsk(1, None))),
        w.RanksAsk([1], b"nonsense"),
        w.Compared(1, 5, 0, {0: {"w@0": 1}}),
        w.StepsSeen({0: 10**6}),
        w.Undeclared([([0, 1], [])]),
        w.Committed(1, 5, 0),
    ],
)
def test_a_node_that_speaks_of_others_or_nonsense_changes_nothing(report: object) -> None:
    job = Job(num_nodes=2)
    job.wires["n0"].listeners.on_message("n1", w.encode(report))  # type: ignore[arg-type]
    job.wires["n0"].listeners.on_message("n1", b"\xc1")
    job.deliver()
    assert sum(event.phase == "heard" for event in job.heard) == 2
    assert not job.sessions[0].restores._round
    assert job.sessions[0].num_open == 0
    job.save(5)
    assert job.verdicts(0) == [("durable", 5)]


def test_parts_that_come_in_pieces_are_checked() -> None:
    job = Job(num_nodes=2)
    for rank in (0, 1):
        job.begin(rank, 5)
    assert job.told(w.PartWanted), "asked for as soon as all have begun"
    other = Job(num_nodes=2)
    other.sessions[1].parts.get = lambda rank, digest: b"something else"  # type: ignore[method-assign]
    for rank in (0, 1):
        other.begin(rank, 5)
    other.deliver()
    assert "came damaged" in other.failure(0).message and other.verdicts(1) == [("failed", 5)]
    gone = Job(num_nodes=2)
    gone.sessions[1].parts.get = lambda rank, digest: None  # type: ignore[method-assign]
    for rank in (0, 1):
        gone.begin(rank, 5)
    gone.deliver()
    assert "never reached the lead" in gone.failure(0).message


def test_a_rank_that_dies_after_all_have_staged_does_not_stop_the_commit() -> None:
    job = Job(num_nodes=2)
    for rank in (0, 1):
        job.begin(rank, 5)
    for rank in (0, 1):
        job.stage_and_flush(rank, 5)
    job.sessions[1].detach(1, job.peers[1], orderly=False)
    job.record(0)
    job.record(1)
    job.publish()
    assert job.verdicts(0) == [("durable", 5)]


def test_a_rank_elsewhere_that_goes_on_without_a_save_fails_it_at_once() -> None:
    job = Job(num_nodes=2)
    job.begin(0, 5)
    job.begin(1, 6)
    error = job.failure(0)
    assert isinstance(error, CommitError) and error.step == 5 and error.rank == 1 and "without this one" in str(error)
