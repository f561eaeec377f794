"""SIGSTOP: processes that neither live nor die; and two jobs in one run directory."""

from __future__ import annotations

import os
import signal

import puppets
import pytest
from puppets import RankError, Rig, until

from safehold.testing.faults import environment, fail_at

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]


def test_a_stopped_trainer_fails_the_save_by_name_and_can_go_on(rig: Rig) -> None:
    """Before it begins, and while it stages."""
    with rig.job(2, environment(fail_at(1, 3, "stage", action="stop"))) as job:
        job.all("open", str(rig.run), begin_timeout_s=1.5, stage_timeout_s=1.5, on_failure="warn", max_failures=0)
        job.all("train", 1)
        job.all("save", 1, wait=True)
        job[1].signal(signal.SIGSTOP)
        job[0].call("save", 2)
        with puppets.Lasts() as took:
            ended = job[0].call("settle", 2)
        assert took.seconds < 6
        assert (ended["state"], ended["error"], ended["rank"]) == ("failed", "DeadlineError", 1)
        assert "rank 1 had not begun the save" in ended["text"]
        job[1].signal(signal.SIGCONT)
        job[1].call("save", 2)
        assert job[1].call("settle", 2)["state"] == "failed"
        # Now it stops itself in the middle of staging.
        job[1].send("save", 3)
        job[0].call("save", 3)
        with puppets.Lasts() as took:
            ended = job[0].call("settle", 3)
        assert took.seconds < 8
        assert (ended["state"], ended["error"], ended["rank"]) == ("failed", "DeadlineError", 1)
        assert "rank 1 had not staged its share" in ended["text"]
        job[1].signal(signal.SIGCONT)
        job[1].answer()
        assert job[1].call("settle", 3)["state"] == "failed"
        job.all("train", 2)
        job.all("save", 4, wait=True)
        job.all("close")
    assert rig.verified_steps() == [1, 4]
    assert len(rig.attempts()) == 2


def test_a_stopped_agent_is_noticed_and_a_new_job_does_without_it(rig: Rig) -> None:
    """The old job's commit is not believed once it goes on, and it is told; nothing of the new one is harmed."""
    options = {"request_timeout_s": 2, "on_failure": "warn", "max_failures": 0, "keep": 10}
    with rig.job(2) as old:
        old.all("open", str(rig.run), **options)
        old.all("train", 1)
        old.all("save", 1, wait=True)
        agent = rig.agent_pid()
        slot = rig.slots()[0]
        os.kill(agent, signal.SIGSTOP)
        with puppets.Lasts() as took:
            saved = old.all("save", 2)
        assert took.seconds < 10
        for entry in saved:
            assert (entry["state"], entry["error"]) == ("failed", "DeadlineError")
            assert "no sign of life" in entry["text"]
        old.all("train", 2)  # training goes on
        with rig.job(2) as new:
            with puppets.Lasts() as took:
                opened = new.all("open", str(rig.run), **options)
            assert took.seconds < 20
            assert [entry["incarnation"] for entry in opened] == [2, 2]
            assert len(rig.slots()) == 2
            assert [found["step"] for found in new.all("restore")] == [1, 1]
            new.all("train", 4)
            new.all("save", 4, wait=True)
            # The old job wakes up.
            os.kill(agent, signal.SIGCONT)
            until(lambda: rig.status(slot), "the old agent")
            # It is told at this save, or before it where the agent found out first.
            for rank, said in zip(old, old.each("save", 3), strict=True):
                if not isinstance(said, RankError):
                    entry = rank.call("settle", 3)
                    assert (entry["state"], entry["error"]) == ("failed", "SupersededError"), entry
                else:
                    assert said.name == "SupersededError"
            for error in old.each("save", 5):
                assert isinstance(error, RankError)
                assert error.name == "SupersededError"
            assert rig.verified_steps() == [1, 4]
            new.all("save", 5, wait=True)
            new.all("close")
        assert rig.verified_steps() == [1, 4, 5]
        old.kill()
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        assert [found["step"] for found in job.all("restore")] == [5, 5]
        job.all("close")


def test_an_agent_that_is_stopped_before_its_commit_and_continued_after_commits_nothing(rig: Rig) -> None:
    stopped = rig.directory / "stopped"
    stop = fail_at(None, 2, "publish", process="flusher", action="stop", marker=stopped)
    with rig.job(2, environment(stop)) as old:
        old.all("open", str(rig.run), request_timeout_s=2, on_failure="warn", max_failures=0)
        old.all("train", 1)
        old.all("save", 1, wait=True)
        old.all("save", 2)
        until(stopped.exists, "the flusher's stop")
        agent = rig.agent_pid()
        (flusher,) = rig.flusher_pids()
        os.kill(agent, signal.SIGSTOP)
        with rig.job(2) as new:
            new.all("open", str(rig.run))
            assert [found["step"] for found in new.all("restore")] == [1, 1]
            os.kill(agent, signal.SIGCONT)
            os.kill(flusher, signal.SIGCONT)
            for entry in old.all("settle", 2):
                assert (entry["state"], entry["error"]) == ("failed", "SupersededError"), entry
            assert rig.verified_steps() == [1]
            new.all("train", 3)
            new.all("save", 3, wait=True)
            new.all("close")
        assert rig.verified_steps() == [1, 3]


def test_a_stopped_flusher_is_replaced_at_its_deadline(rig: Rig) -> None:
    with rig.job(2, environment(fail_at(None, 2, "flush", process="flusher", action="stop"))) as job:
        job.all("open", str(rig.run), flush_timeout_s=2, on_failure="warn", max_failures=0)
        job.all("save", 1, wait=True)
        job.all("save", 2)
        job.all("train", 3)
        with puppets.Lasts() as took:
            ended = job.all("settle", 2)
        assert took.seconds < 12
        assert [entry["state"] for entry in ended] == ["failed"] * 2
        assert ended[0]["error"] == ended[1]["error"] == "DeadlineError"
        job.all("save", 3, wait=True)
        assert rig.status()["flushers_replaced"] == 1
        job.all("close")
    assert rig.verified_steps() == [1, 3]


def test_two_jobs_at_once_in_one_run_directory(rig: Rig) -> None:
    """On one node they meet at one agent: the newer one wins at once, and the older one is told."""
    options = {"keep": 10, "on_failure": "warn"}
    with rig.job(2) as old:
        old.all("open", str(rig.run), **options)
        old.all("train", 2)
        old.all("save", 2, wait=True)
        with rig.job(2) as new:
            assert [entry["incarnation"] for entry in new.all("open", str(rig.run), **options)] == [2, 2]
            assert [found["step"] for found in new.all("restore")] == [2, 2]
            new.all("train", 3)
            new.all("save", 3, wait=True)
            for error in old.each("train", 3) and old.each("save", 3):
                assert isinstance(error, RankError)
                assert error.name == "SupersededError"
                assert "incarnation 2" in error.text
            # What the old trainers still have mapped is not what the new ones stage into.
            old.all(
                "evaluate", "[a.view.__setitem__(slice(0, 4096), bytes(4096)) for a in me.ckpt._run.arenas.values()]"
            )
            new.all("save", 4, wait=True)
            assert rig.verified_steps() == [2, 3, 4]
            old.kill()
            new.all("save", 5, wait=True)
            new.all("close")
    assert rig.verified_steps() == [2, 3, 4, 5]
    assert len(rig.slots()) <= 1
