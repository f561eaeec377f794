"""SIGKILL of a trainer, of the agent and of the flusher, at every phase of saves and restores.

What must hold each time: the last durable checkpoint verifies, nothing hangs, and the run that goes on equals the unbroken one bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import puppets
import pytest
from puppets import Job, RankError, RankGoneError, Rig, until

from safehold.testing.faults import environment, fail_at

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

LAST = 16
SAVES = [("walk", "started"), ("walk", "done"), ("layout", "done"), ("begin", "started"), ("begin", "done")]
SAVES += [("stage", "started"), ("stage", "done"), ("save_call", "done"), ("save", "done"), ("prepare", "done")]
RESTORES = [("open", "started"), ("open", "done"), ("restore", "started"), ("documents", "done"), ("bind", "done")]
RESTORES += [("read", "started"), ("read", "done"), ("restore", "done")]


@pytest.fixture(scope="module")
def unbroken(zygote: puppets.Zygote) -> Iterator[tuple[list[Any], list[Any]]]:
    """What every step of an unbroken run did, by rank, and the hashes after every step."""
    with puppets.temporary_directory() as directory, puppets.rig_of(zygote, Path(directory)) as rig:
        with rig.job(2) as job:
            job.all("open", str(rig.run), every=2)
            job.all("restore")
            steps: list[list[Any]] = [[], []]
            digests = [job.all("digest")]
            for step in range(1, LAST + 1):
                for rank, did in enumerate(job.all("train", step)):
                    steps[rank] += did
                digests.append(job.all("digest"))
            job.all("close")
        yield steps, digests


def go_on(job: Job, run: Path, last: int) -> list[Any]:
    """Open, restore, train; what each rank did, or how it ended."""
    done: list[Any] = [[], []]
    for action, args, options in (
        ("open", (str(run),), {"every": 2, "agent_linger_s": 60, "on_failure": "warn", "start_timeout_s": 8}),
        ("restore", (), {}),
        ("train", (last,), {}),
    ):
        results = job.each(action, *args, **options)
        if any(isinstance(result, Exception) for result in results):
            return results
        done = results
    return done


@pytest.mark.parametrize("phases", [SAVES, RESTORES], ids=["in saves", "in restores"])
def test_a_trainer_is_killed_at_every_phase(
    rig: Rig, unbroken: tuple[list[Any], list[Any]], phases: list[tuple[str, str]]
) -> None:
    steps, digests = unbroken
    with rig.job(2) as job:  # so that there is something to lose
        go_on(job, rig.run, 3)
        job.all("drain")
    have = rig.verified_steps()
    assert have == [2]
    for number, (phase, edge) in enumerate(phases):
        victim = number % 2
        with rig.job(2, environment(fail_at(victim, None, phase, edge=edge))) as job:
            ended = go_on(job, rig.run, LAST)
            assert isinstance(ended[victim], RankGoneError), (phase, edge, ended)
            assert job[victim].wait() == -signal.SIGKILL
            job.kill()
        until(lambda: not rig.status()["session"]["saves_in_flight"], "the end of saves")
        now = rig.verified_steps()
        assert max(now) >= max(have), f"{phase} {edge}: had {have}, have {now}"
        have = now
    with rig.job(2) as job:
        job.all("open", str(rig.run), every=2)
        restored = job.all("restore")
        assert restored[0]["step"] == max(have)
        assert job.all("train", LAST) == [rank[restored[0]["step"] :] for rank in steps]
        assert job.all("digest") == digests[LAST]
        job.all("close")
    assert rig.verified_steps()[-1] == LAST


def test_the_agent_is_killed_at_every_phase_of_a_save(rig: Rig, unbroken: tuple[list[Any], list[Any]]) -> None:
    steps, digests = unbroken
    kills = [["walk", "done"], ["begin", "started"], ["begin", "done"], ["stage", "done"], ["save_call", "done"]]
    kills.append(["save", "done"])
    env = {
        "SAFEHOLD_LISTENER": "puppet_faults:listen",
        "PUPPET_MARKERS": str(rig.directory),
        "PUPPET_KILLS_AGENT": json.dumps([[n % 2, *kill, 2 + n] for n, kill in enumerate(kills)]),
    }
    with rig.job(2, env) as job:
        job.all("open", str(rig.run), on_failure="warn", max_failures=0, begin_timeout_s=20)
        did: list[list[Any]] = [[], []]
        for step in range(1, 10):
            for rank, done in enumerate(job.all("train", step)):
                did[rank] += done
            with puppets.Lasts() as took:
                job.all("save", step)
                ended = job.all("settle", step)
            assert took.seconds < 15, (step, ended)
            states = {entry["state"] for entry in ended}
            killed = 2 <= step < 2 + len(kills)
            assert states <= ({"failed", "durable"} if killed else {"durable"}), (step, ended)
            for entry in ended:
                assert entry["error"] in (None, "AgentUnavailableError", "RankLostError"), entry
        assert len(list(rig.directory.glob("agent-*"))) == len(kills)
        assert did == [rank[:9] for rank in steps]
        assert job.all("digest") == digests[9]
        assert max(rig.verified_steps()) == 9
        job.all("close")


@pytest.mark.parametrize(("phase", "edge"), [("plan", "started"), ("plan", "done"), ("commit", "done")])
def test_the_agent_dies_by_itself_and_another_is_there_within_seconds(rig: Rig, phase: str, edge: str) -> None:
    """Nobody calls `save`, and yet there is an agent again, so that saves by time go on."""
    fault = fail_at(None, 1, phase, process="agent", edge=edge, marker=rig.directory / "once")
    with rig.job(2, environment(fault)) as job:
        job.all("open", str(rig.run), on_failure="warn")
        job.all("train", 1)
        job.all("save", 1)
        job.all("settle", 1)
        with puppets.Lasts() as took:
            until(lambda: all(fact["alive"] for fact in job.all("facts")), "another agent")
        assert took.seconds < 10
        assert (rig.directory / "once").exists()
        committed = phase == "commit"
        assert rig.verified_steps() == ([1] if committed else [])
        job.all("train", 2)
        job.all("save", 2, wait=True)
        assert rig.verified_steps() == ([1, 2] if committed else [2])
        job.all("close")


@pytest.mark.parametrize("edge", ["started", "done"])
def test_the_flusher_is_killed_at_every_phase(rig: Rig, edge: str) -> None:
    """The save fails by name, the next one works."""
    phases = ["plan", "flush", "record", "publish"]
    faults = [
        fail_at(
            None, None if phase == "plan" else 10 * n, phase, process="flusher", edge=edge, marker=rig.directory / phase
        )
        for n, phase in enumerate(phases, 1)
    ]
    faults.append(fail_at(None, 50, "retire", process="flusher", edge=edge, marker=rig.directory / "retire"))
    with rig.job(2, environment(*faults)) as job:
        job.all("open", str(rig.run), on_failure="warn", max_failures=0, keep=20)
        job.all("build")
        for n, phase in enumerate(phases, 1):
            first = job.all("save", 10 * n) and job.all("settle", 10 * n)
            assert (rig.directory / phase).exists(), phase
            assert first[0]["state"] == first[1]["state"]
            if (phase, edge) != ("publish", "done"):
                assert first[0]["state"] == "failed", (phase, first)
                assert first[0]["error"] == "StorageError"
                assert "flusher" in first[0]["text"]
                assert 10 * n not in rig.verified_steps()
            job.all("save", 10 * n + 1, wait=True)
            assert 10 * n + 1 in rig.verified_steps()
        job.all("save", 50, wait=True)
        until(lambda: rig.status()["flushers_replaced"] == 5, "the end of the flusher in retention")
        job.all("save", 51, wait=True)
        assert set(rig.verified_steps()) >= {11, 21, 31, 41, 50, 51}
        job.all("close")


def test_the_flusher_is_killed_while_a_run_is_opened_and_while_a_checkpoint_is_looked_for(rig: Rig) -> None:
    faults = [
        fail_at(None, None, phase, process="flusher", edge="started", marker=rig.directory / phase)
        for phase in ("open_run", "find")
    ]
    with rig.job(2, environment(*faults)) as job:
        for result in job.each("open", str(rig.run)):
            assert isinstance(result, RankError)
            assert result.name == "StorageError"
            assert "flusher" in result.text
        job.all("open", str(rig.run))
        for result in job.each("restore"):
            assert isinstance(result, RankError)
            assert result.name == "StorageError"
        assert [found["step"] for found in job.all("restore")] == [None, None]
        job.all("save", 1, wait=True)
        job.all("close")
    assert rig.verified_steps() == [1]


def test_the_agent_is_killed_at_every_phase_of_a_restore(rig: Rig) -> None:
    """Another one is asked; or the restore fails by name, and the next one works."""
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        job.all("train", 3)
        job.all("save", 3, wait=True)
        digest = job.all("digest")
        job.all("close")
    kills = [["restore", "started"], ["documents", "started"], ["bind", "done"], ["read", "started"], ["read", "done"]]
    env = {
        "SAFEHOLD_LISTENER": "puppet_faults:listen",
        "PUPPET_MARKERS": str(rig.directory),
        "PUPPET_KILLS_AGENT": json.dumps([[n % 2, *kill, None] for n, kill in enumerate(kills)]),
    }
    restored = 0
    with rig.job(2, env) as job:
        job.all("open", str(rig.run))
        while restored < 2:
            with puppets.Lasts() as took:
                found = job.each("restore")
            assert took.seconds < 15, found
            if any(isinstance(entry, RankError) for entry in found):
                for entry in found:
                    assert entry.name in ("AgentUnavailableError", "RankLostError", "DeadlineError"), entry
                continue
            assert [entry["step"] for entry in found] == [3, 3]
            assert job.all("digest") == digest
            restored += 1
        assert len(list(rig.directory.glob("agent-*"))) == len(kills)
        job.all("train", 4)
        job.all("save", 4, wait=True)
        job.all("close")


def test_saves_by_time_go_on_after_the_agent_died(rig: Rig) -> None:
    """The new agent counts its announcements from the start; the ranks do not take the first for one that they know."""
    with rig.job(2) as job:
        job.all("build", "none")
        job.all("open", str(rig.run), every="0.3s", keep=50)

        def until_saved(step: int) -> int:
            have = len(rig.steps())
            while len(rig.steps()) < have + 2:
                step += 25
                assert step < 2000, "no more saves"
                job.all("train", step, sleep_s=0.01)
            return step

        step = until_saved(0)
        os.kill(rig.agent_pid(), signal.SIGKILL)
        until_saved(step)
        job.all("close")


def test_the_flusher_is_killed_while_it_sweeps(rig: Rig) -> None:
    """What it could not delete is deleted later, and nothing else is."""
    faults = [
        fail_at(None, step, phase, process="flusher", edge="started", marker=rig.directory / phase)
        for phase, step in (("abandon", 2), ("sweep", None))
    ]
    with rig.job(2, environment(*faults)) as job:
        job.all("open", str(rig.run), on_failure="warn", max_failures=0)
        until(lambda: rig.status()["flushers_replaced"] == 1, "the end of the flusher in the first sweep")
        job.all("save", 1, wait=True)
        job[1].call("evaluate", "me.training.extra['bad'] = object()")
        assert job[0].call("save", 2)["state"] == "staged"  # so that there is something to sweep
        with pytest.raises(RankError):
            job[1].call("save", 2)
        until(lambda: rig.status()["flushers_replaced"] == 2, "the end of the flusher that swept the attempt")
        job[1].call("drop", "bad")
        job.all("save", 3, wait=True)
        job.kill()
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        assert [found["step"] for found in job.all("restore")] == [3, 3]
        until(lambda: len(rig.attempts()) == 2, "the sweep of the attempt that failed")
        job.all("close")
    assert rig.verified_steps() == [1, 3]
