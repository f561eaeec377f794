"""The end of an agent: told to leave, of a constructor that failed, and killed, with another one in its place."""

from __future__ import annotations

import os
import signal
from typing import Any

import puppets
import pytest
from puppets import Job, RankError, Rig, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

SLOW: dict[str, Any] = {"flush_block_bytes": 1 << 20, "flush_rate_bytes_s": 2 << 20, "direct_io": False}


def open_slow(job: Job, rig: Rig, **options: Any) -> None:
    """Each rank has three blocks to write, one per second, the first at once."""
    job.all("open", str(rig.run), **{**SLOW, **options})
    job.all("put", "big", [512, 2048], kind="dtensor")


# -- told to leave ---------------------------------------------------------------------------------------------------------


def test_preemption_of_agent_and_trainers_alike_leaves_time_for_a_last_save(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig, agent_linger_s=1000, flush_rate_bytes_s=8 << 20)
        job.all("save", 1)
        agent = rig.agent_pid()
        os.kill(agent, signal.SIGTERM)
        job.all("save", 2, final=True)  # what a trainer does that is told as well
        job.all("close")
        assert [entry["state"] for entry in job.all("handle_of", 2)] == ["durable"] * 2
        with puppets.Lasts() as took:
            until(lambda: not rig.processes(), "the end of agent and flusher")
        assert took.seconds < 4
    assert rig.verified_steps() == [1, 2]


def test_sigterm_finishes_what_is_staged_and_abandons_the_rest(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig, on_failure="warn", agent_linger_s=1000)
        job.all("save", 1)
        job.kill()
        with puppets.Lasts() as took:
            os.kill(rig.agent_pid(), signal.SIGTERM)
            until(lambda: not rig.processes(), "the end of agent and flusher")
        assert took.seconds < 12 and rig.verified_steps() == [1]
    with rig.job(2) as job:  # with trainers that train on, and a save that one of them has not begun
        open_slow(job, rig, on_failure="warn")
        job[0].call("save", 3)
        agent = rig.agent_pid()
        with puppets.Lasts() as took:
            os.kill(agent, signal.SIGTERM)
            ended = job[0].call("settle", 3)
            until(lambda: agent not in rig.processes(), "the end of the agent")
        assert ended["state"] == "failed"
        assert 5 < took.seconds < 15
        job[1].call("save", 3)
        job.all("save", 4, wait=True)  # by another one
        assert rig.agent_pid() != agent
        job.all("close")
    assert rig.verified_steps() == [1, 4]


def test_sigterm_without_anything_to_do(rig: Rig) -> None:
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        job.all("prepare")
        job.kill()
    with puppets.Lasts() as took:
        os.kill(rig.agent_pid(), signal.SIGTERM)
        until(lambda: not rig.processes(), "the end of agent and flusher")
    assert took.seconds < 8


# -- of a constructor that failed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["opening", "later"])
def test_the_agent_of_a_constructor_that_failed_leaves_at_once(rig: Rig, when: str) -> None:
    with rig.job(2) as job:
        job.all("build")
        if when == "opening":
            rig.run.mkdir()
            (rig.run / "thesis.tex").write_text("precious")
        else:
            job.all("evaluate", "from safehold.checkpointer import Checkpointer; Checkpointer._set_up = None")
        found = job.each("open", str(rig.run), agent_linger_s=1000)
        assert all(isinstance(error, RankError) for error in found), found
        with puppets.Lasts() as took:
            until(lambda: not rig.processes(), "the end of agent and flusher")
        assert took.seconds < 6
        assert job.all("ping") == ["pong"] * 2


# -- killed ----------------------------------------------------------------------------------------------------------------


def kill_agent(rig: Rig, job: Job) -> None:
    """SIGKILL, and wait until all ranks have another one."""
    agent = rig.agent_pid()
    os.kill(agent, signal.SIGKILL)
    until(
        lambda: all(facts["alive"] and facts["agent_pid"] != agent for facts in job.all("facts")),
        "another agent on all ranks",
    )


def test_an_agent_in_the_place_of_one_that_died_knows_what_is_there(rig: Rig) -> None:
    """What is committed is not saved again by mistake, and what the dead one left half done goes with the retention."""
    with rig.job(2) as job:
        open_slow(job, rig, max_failures=0, keep=10, delete_grace_s=0.0, flush_rate_bytes_s=8 << 20)
        job.all("save", 1, wait=True)
        kill_agent(rig, job)
        for error in job.each("save", 1):
            assert isinstance(error, RankError) and error.name == "ConfigurationError", error
            assert "step 1 is committed already" in error.text and "overwrite=True" in error.text
        job.each("drain")  # a rank may have heard of the other's refusal first
        job.all("save", 2)
        until(lambda: len(rig.attempts()) == 2, "the flush")
        kill_agent(rig, job)
        assert [entry["state"] for entry in job.all("settle", 2)] == ["failed"] * 2
        assert rig.attempts() == ["000000001/1-0", "000000002/1-0"]
        job.all("save", 1, overwrite=True, wait=True)
        job.all("save", 3, wait=True)
        wanted = ["000000001/1-2", "000000003/1-0"]
        until(lambda: rig.attempts() == wanted, "the end of what was replaced, and of what was left")
        root = rig.run / "checkpoints"
        until(lambda: sorted(path.name for path in root.iterdir()) == ["000000001", "000000003"], "the empty directory")
        job.all("close")
    assert rig.verified_steps() == [1, 3]
