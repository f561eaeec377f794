from __future__ import annotations

from typing import Any

import pytest
from several_nodes import Job

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.facts import facts_of
from safehold.agent.replicator import MAX_RETRY_S, RETRY_S
from safehold.errors import IntegrityError, StorageError, StorageFullError

CLAIM = b"the claim"
SENT = {"sent_bytes": 40, "kept_bytes": 2}


def job_of(num_nodes: int = 2, **settings: Any) -> Job:
    return Job(num_nodes, **{"remote": "/there", "remote_timeout_s": 100.0, **settings})


def begun(job: Job, step: int, nodes: list[int] | None = None, *, complete: bool = False) -> None:
    value = {"commit": [step, 1, 0], "complete": complete, "created_s": 0.0, "bytes": 100, "claim": CLAIM}
    nodes = list(range(len(job.names))) if nodes is None else nodes
    job.copiers[0].answer("copy_begin", {**value, "nodes": nodes, "sent_bytes": 0, "kept_bytes": 0})
    job.deliver()


def copied(job: Job, node: int, error: Exception | None = None) -> None:
    job.copiers[node].answer("copy_data", SENT, error)
    job.deliver()


def finish(job: Job, problem: str | None = None) -> None:
    job.copiers[0].answer("copy_finish", {"problem": problem})
    job.deliver()


def replicate(job: Job, step: int) -> None:
    begun(job, step)
    for node in range(len(job.names)):
        copied(job, node)
    finish(job)


def remote_news(job: Job, rank: int) -> list[tuple[str, int]]:
    found = []
    for reply in job.peers[rank].replies:
        if isinstance(reply, m.Durable) and reply.tier == "remote":
            found.append(("there", reply.step))
        elif isinstance(reply, m.LeftOut):
            found.append(("left out", reply.step))
    return found


def warnings(job: Job, rank: int = 0) -> list[str]:
    return [reply.text for reply in job.peers[rank].replies if isinstance(reply, m.Note)]


def test_after_the_commit_each_node_copies_its_own_files_and_the_manifest_is_last() -> None:
    job = job_of(3)
    assert not job.copiers[0].log, "nothing before the commit"
    job.save(10)
    (begin,) = job.copiers[0].open("copy_begin")
    assert begin["commit"] == [10, 1, 0]
    begun(job, 10)
    asked = [copier.open("copy_data")[0] for copier in job.copiers]
    assert [(a["node"], a["nodes"], a["claim"]) for a in asked] == [(n, [n], CLAIM) for n in range(3)]
    copied(job, 1)
    copied(job, 0)
    assert not job.copiers[0].open("copy_finish"), "one node has not copied its share"
    copied(job, 2)
    finish(job)
    assert [remote_news(job, rank) for rank in range(3)] == [[("there", 10)]] * 3
    figures = job.peers[2].last(m.Durable).figures
    assert figures["bytes"] == 100 and figures["sent_bytes"] == 120


def test_files_of_nodes_that_are_no_more_are_spread_over_those_that_are() -> None:
    job = job_of(2)
    job.save(10)
    begun(job, 10, nodes=[0, 1, 2, 3, 4])
    assert [copier.open("copy_data")[0]["nodes"] for copier in job.copiers] == [[0, 2, 4], [1, 3]]


def test_the_newest_goes_next_and_what_came_between_is_left_out() -> None:
    job = job_of()
    for step in (10, 20, 30):
        job.save(step)
    assert len(job.copiers[0].log) == 1, "one at a time"
    assert remote_news(job, 1) == [("left out", 20)]
    replicate(job, 10)
    assert job.copiers[0].open("copy_begin")[0]["commit"] == [30, 1, 0]
    replicate(job, 30)
    assert remote_news(job, 1) == [("left out", 20), ("there", 10), ("there", 30)]


def test_only_each_nth_commit_and_the_final_one() -> None:
    job = job_of(remote_every=2)
    job.save(10)
    assert not job.copiers[0].log and remote_news(job, 0) == [("left out", 10)]
    job.save(20)
    replicate(job, 20)
    for rank in range(2):
        job.begin(rank, 30, final=True)
    for rank in range(2):
        job.stage_and_flush(rank, 30)
    for node in range(2):
        job.record(node)
    job.publish()
    assert job.copiers[0].open("copy_begin")[0]["commit"] == [30, 1, 0]


def test_what_is_copied_or_waits_for_it_is_leased_for_a_time() -> None:
    job = job_of(remote_every=2)
    job.flushers[0].at_once["retire"] = {"uncommitted": [], "deleted": [], "problem": None}
    for step in (10, 20, 30, 40, 50):
        job.save(step)
    leased = [call["leased"] for call in job.flushers[0].done("retire")]
    assert leased[-1] == [[20, 1, 0], [40, 1, 0]]
    replicate(job, 20)
    assert job.flushers[0].done("retire")[-1]["leased"] == [[40, 1, 0]], "at once, not at the next commit"
    job.tick(20)
    begun(job, 40)
    copied(job, 0, StorageError("down"))
    copied(job, 1, StorageError("down"))
    job.tick(101)
    job.save(60)
    job.save(70)
    assert [40, 1, 0] not in job.flushers[0].done("retire")[-1]["leased"], "not for ever"


def test_a_failure_is_told_once_tried_again_after_a_growing_while_and_told_to_be_over() -> None:
    job = job_of()
    job.save(10)
    down = StorageError("no route", tier="remote")
    for trial in range(3):
        job.copiers[0].answer("copy_begin", None, down)
        job.deliver()
        assert len([text for text in warnings(job) if "no route" in text]) == 1
        assert not job.copiers[0].open("copy_begin")
        job.tick(RETRY_S * 2**trial - 1)
        assert not job.copiers[0].open("copy_begin"), "backoff"
        job.tick(1.5)
        assert job.copiers[0].open("copy_begin")[0]["commit"] == [10, 1, 0]
    assert not job.copiers[0].open("copy_begin")[0]["full"]
    job.copiers[0].answer("copy_begin", None, StorageFullError("full", tier="remote"))
    job.deliver()
    assert "full" in warnings(job)[-1], "another cause"
    job.save(20)
    (again,) = job.copiers[0].open("copy_begin")
    assert again["commit"] == [20, 1, 0], "the next commit does not wait for the backoff"
    assert again["full"], "a quota does not show in what is free"
    replicate(job, 20)
    assert "works again" in warnings(job, 1)[-1]
    assert job.verdicts(0) and MAX_RETRY_S >= 60


def test_what_is_damaged_here_is_not_tried_again() -> None:
    job = job_of()
    job.save(10)
    begun(job, 10)
    copied(job, 0, IntegrityError("block 3"))
    assert [call["key"] for call in job.copiers[1].done("copy_cancel")], "the other node is told to stop"
    copied(job, 1)
    assert job.copiers[0].done("copy_leave") and not job.copiers[0].done("copy_finish")
    assert remote_news(job, 1) == [("left out", 10)]
    job.tick(MAX_RETRY_S)
    assert not job.copiers[0].open("copy_begin")


def test_a_node_that_is_lost_ends_it_and_the_next_trial_goes_on() -> None:
    job = job_of()
    job.save(10)
    begun(job, 10)
    copied(job, 0)
    job.cut(0, 1)
    assert job.copiers[0].done("copy_leave") and "was lost" in warnings(job)[-1]
    assert job.copiers[1].done("copy_cancel"), "a node that has lost its lead copies no more"
    job.mend(0, 1)
    job.copiers[1].calls.clear()
    job.tick(RETRY_S + 1)
    replicate(job, 10)
    assert remote_news(job, 0) == [("there", 10)]


def test_none_begins_while_the_trainers_wait_in_a_restore() -> None:
    job = job_of()
    job.copiers[0].at_once["remote_newer"] = []
    job.sessions[0].opened("run", 2, [10])
    ask = job.send(0, m.RestoreAsk(0, None))
    job.tick(10)
    job.tick(10)
    assert not job.copiers[0].open("copy_begin")
    job.send(1, m.RestoreAsk(0, None))
    found = {"commit": None, "manifest": b"", "newest": None, "any_commit": False, "bad": [], "skipped": []}
    job.flushers[0].answer("find", found)
    job.deliver()
    assert job.answer_to(0, ask).step is None
    job.tick(2)
    assert job.copiers[0].open("copy_begin")[0]["commit"] is None, "the newest that is there"


def test_a_replication_that_takes_too_long_is_stopped_and_can_be_gone_on_with() -> None:
    job = job_of(remote_timeout_s=50.0)
    job.save(10)
    begun(job, 10)
    assert job.sessions[0].next_deadline() is not None
    job.tick(51)
    assert all(copier.done("copy_cancel") for copier in job.copiers)
    copied(job, 0, StorageError("cancelled"))
    job.tick(31)  # the other node does not even say that it has stopped
    assert job.copiers[0].done("copy_leave")
    assert "did not end within 50 s" in warnings(job)[-1]


def test_the_agents_stay_for_it_within_bounds_and_stop_when_told() -> None:
    job = job_of(agent_linger_s=20.0)
    lead, other = job.sessions
    assert not lead.is_copying(0.0) and not other.is_copying(0.0)
    job.save(10)
    assert lead.is_copying(99.0) and other.is_copying(99.0), "also where nothing is to be copied yet"
    assert not lead.is_copying(101.0) and not other.is_copying(101.0)
    begun(job, 10)
    lead.stop_copying(now=False)
    assert lead.is_copying(0.0)
    lead.stop_copying()
    job.deliver()
    for node in range(2):
        assert job.copiers[node].done("copy_cancel")
        copied(job, node, StorageError("cancelled"))
    assert not lead.is_copying(0.0) and not other.is_copying(0.0) and not warnings(job)
    job.save(20)
    assert not job.copiers[0].open("copy_begin") and remote_news(job, 0)[-1] == ("left out", 20)


def test_facts_show_the_lag_and_the_last_error() -> None:
    job = job_of()
    job.save(10)
    replicate(job, 10)
    job.clock.now += 30
    job.save(30)
    begun(job, 30)
    facts = facts_of(job.sessions[0])["remote"]
    assert (facts["newest_step"], facts["copying_step"], facts["copying_bytes"]) == (10, 30, 100)
    assert (facts["lag_steps"], facts["lag_seconds"], facts["lag_checkpoints"]) == (20, 30.0, 1)
    copied(job, 0, StorageError("no route"))
    copied(job, 1)
    assert "no route" in facts_of(job.sessions[0])["remote"]["last_error"]
    assert [event.stage for event in job.heard if event.phase == "replicate"] == [
        "started",
        "done",
        "started",
        "failed",
    ]


@pytest.mark.parametrize("key", ["", "token/0"])
def test_what_a_node_says_of_another_replication_counts_for_nothing(key: str) -> None:
    job = job_of()
    job.save(10)
    begun(job, 10)
    job.sessions[0].head.report(1, w.Copied(key))
    copied(job, 0)
    assert not job.copiers[0].open("copy_finish")


def test_a_run_without_a_second_place_does_none_of_it() -> None:
    job = job_of(remote="")
    job.save(10)
    assert not job.copiers[0].log and facts_of(job.sessions[0])["remote"] is None
    assert not job.sessions[0].is_copying(0.0)
