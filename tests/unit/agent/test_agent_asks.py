"""Questions of a node's ranks in a restore: those that are alike go to the lead as one, and each rank gets its answer."""

from __future__ import annotations

from typing import Any

from several_nodes import Job

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.asks import GATHER_S

FOUND = {
    "commit": [10, 1, 0],
    "manifest": b"the manifest",
    "newest": [10, 1, 0],
    "any_commit": True,
    "bad": [],
    "skipped": [],
}
NO = {"class": "StorageError", "message": "rank 5 cannot read"}


def offered(job: Job) -> int:
    for rank in range(job.world_size):
        job.send(rank, m.RestoreAsk(0, None))
    job.flushers[0].answer("find", FOUND)
    job.deliver()
    return job.peers[0].last(m.RestoreOffer).round


def test_a_node_has_one_message_each_way_for_all_its_ranks() -> None:
    job = Job(num_nodes=3, per_node=8)
    number = offered(job)
    for phase in ("planned", "verified"):
        asked = [job.send(rank, m.Vote(0, number, phase)) for rank in range(job.world_size)]
        answers = [job.answer_to(rank, ask) for rank, ask in enumerate(asked)]
        assert [answer.outcome for answer in answers] == ["go"] * job.world_size
    assert len(job.told(w.RanksAsk)) == len(job.told(w.ToRank)) == 2 * 3
    assert {job.peers[rank].last(m.RestoreOffer).manifest for rank in range(24)} == {b"the manifest"}


def test_what_does_not_fit_is_joined_as_the_lead_would_join_it() -> None:
    job = Job(num_nodes=2, per_node=2)
    number = offered(job)
    votes: list[dict[str, Any]] = [
        {"unexpected": ["a", "b"]},
        {"unexpected": ["a", "c"]},
        {"unexpected": ["a", "b", "c"], "missing": ["m2"], "mismatched": ["x"]},
        {"unexpected": ["a", "b"], "missing": ["m1", "m2"]},
    ]
    for rank, fields in enumerate(votes):
        job.send(rank, m.Vote(0, number, "planned", **fields))
    for rank in range(4):
        assert job.peers[rank].last(m.Verdict).misfit == (["m1", "m2"], ["a"], ["x"])
    [joined] = [m.decode_request(told.request) for told in job.told(w.RanksAsk)[-1:]]
    assert joined.unexpected == ["a", "b"] and joined.missing == ["m1", "m2"]


def test_a_vote_against_is_told_as_it_is() -> None:
    job = Job(num_nodes=2, per_node=4)
    number = offered(job)
    for rank in range(8):
        job.send(rank, m.Vote(0, number, "planned", NO if rank == 5 else None))
    assert all(job.peers[rank].last(m.Verdict).error["message"] == NO["message"] for rank in range(8))
    assert sorted(told.ranks for told in job.told(w.RanksAsk)[-2:]) == [[4, 6, 7], [5]]


def test_a_rank_that_is_late_is_named_and_no_other_of_its_node() -> None:
    job = Job(num_nodes=2, per_node=3, restore_timeout_s=5.0)
    for rank in (0, 1, 2, 3, 5):
        job.send(rank, m.RestoreAsk(0, None))
    assert not job.told(w.RanksAsk)
    job.tick(GATHER_S)
    assert [told.ranks for told in job.told(w.RanksAsk)] == [[3, 5]]
    job.tick(5.0)
    for rank in (0, 3, 5):
        assert "rank 4 did not take part" in str(job.peers[rank].refusal())


def test_ranks_that_ask_for_different_steps_hear_of_it() -> None:
    job = Job(num_nodes=2, per_node=2)
    for rank, step in ((0, 10), (1, 10), (2, 20), (3, 10)):
        job.send(rank, m.RestoreAsk(0, step))
    job.tick(GATHER_S)
    assert all("restores step" in str(job.peers[rank].refusal()) for rank in (0, 1, 2))


def test_what_is_gathered_is_refused_when_the_lead_is_lost_and_forgotten_with_its_rank() -> None:
    job = Job(num_nodes=2, per_node=2)
    job.send(2, m.RestoreAsk(0, None))
    job.cut(0, 1)
    assert "lead agent" in str(job.peers[2].refusal())
    job.mend(0, 1)
    job.send(3, m.RestoreAsk(0, None))
    job.sessions[1].detach(3, job.peers[3], orderly=False)
    job.tick(GATHER_S)
    assert not job.told(w.RanksAsk)


def test_a_rank_that_asks_twice_is_heard_twice() -> None:
    job = Job(num_nodes=2, per_node=2)
    job.send(2, m.RestoreAsk(0, None))
    job.send(2, m.RestoreAsk(0, None))
    job.tick(GATHER_S)
    assert [told.ranks for told in job.told(w.RanksAsk)] == [[2], [2]]
    assert "began to restore anew" in str(job.peers[2].refusal())
