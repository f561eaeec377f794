"""What the agent does without its trainers: it finishes what was staged, and keeps the memory for a restart."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import puppets
import pytest
from puppets import Job, RankError, Rig, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

# Each rank has three blocks of 1 MiB to write, one per second and rank, the first at once.
SLOW: dict[str, Any] = {"flush_block_bytes": 1 << 20, "flush_rate_bytes_s": 2 << 20, "direct_io": False}


def open_slow(job: Job, rig: Rig, **options: Any) -> None:
    job.all("open", str(rig.run), **SLOW, **options)
    job.all("put", "big", [512, 2048], kind="dtensor")


def test_a_restart_restores_from_memory_on_any_number_of_ranks(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        job.all("train", 5)
        job.all("save", 5, wait=True)
        digest = job.all("digest")[0]
        job.kill()
    agent = rig.agent_pid()
    for world_size in (2, 3, 1):
        with rig.job(world_size) as job:
            job.all("open", str(rig.run))
            for found in job.all("restore"):
                assert found["step"] == found["done"] == 5
                assert found["source"] == "memory"
            assert job.all("digest") == [digest] * world_size
            job.kill()
    assert rig.agent_pid() == agent
    with rig.job(2) as job:  # the arenas are used again afterwards
        job.all("open", str(rig.run))
        job.all("restore")
        job.all("train", 6)
        job.all("save", 6, wait=True)
        assert [found["source"] for found in job.all("restore")] == ["memory"] * 2
        assert [found["source"] for found in job.all("restore", 5)] == ["flash"] * 2
        assert job.all("digest") == [digest] * 2
        job.all("close")
    assert rig.verified_steps() == [5]


def spoil_arena(agent: int, rank: int) -> None:
    """Change the middle of a rank's arena behind everybody's back."""
    for entry in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(OSError):
            if f"arena-{rank} " in f"{entry.readlink()} ":
                with entry.open("r+b") as file:
                    file.seek(os.fstat(file.fileno()).st_size // 2)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 64]))
                return
    raise AssertionError(f"agent {agent} has no arena of rank {rank}")


@pytest.mark.parametrize("spoiled", [False, True])
def test_memory_is_verified_once_the_trainers_are_dead(rig: Rig, spoiled: bool) -> None:
    """What a trainer wrote to its arena after the save (a stray pointer) is found, and read from storage instead."""
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        job.all("put", "big", [512, 2048], kind="dtensor")
        job.all("save", 5, wait=True)
        digest = job.all("digest")
        if spoiled:
            spoil_arena(rig.agent_pid(), 1)
        job.kill()
    wanted = [0] if spoiled else [0, 1]
    until(lambda: rig.status()["memory"]["verified"] == wanted, "the check of the memory")
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        job.all("put", "big", [512, 2048], 0.0, kind="dtensor")
        assert [found["source"] for found in job.all("restore")] == ["memory", "flash+memory" if spoiled else "memory"]
        assert job.all("digest") == digest
        assert job.all("value_of", "big")[0][-1][-1] == 512 * 2048 - 1
        job.all("prepare")  # from here on the trainers can write to it
        assert rig.status()["memory"]["verified"] == []
        job.all("close")


def test_what_was_staged_when_all_trainers_died_is_committed_and_adopted(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("train", 3)
        assert {saved["state"] for saved in job.all("save", 3)} == {"staged"}
        digest = job.all("digest")
        job.kill()
    assert rig.steps() == []
    until(lambda: rig.verified_steps() == [3], "the commit by the agent alone")
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("put", "big", [512, 2048], 0.0, kind="dtensor")
        assert [found["step"] for found in job.all("restore")] == [3, 3]
        assert job.all("digest") == digest
        assert job.all("value_of", "big")[0][-1][-1] == 512 * 2048 - 1
        job.all("close")


def test_a_new_job_waits_for_what_the_dead_one_had_staged(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("train", 3)
        job.all("save", 3)
        digest = job.all("digest")
        job.kill()
        with rig.job(2) as other:
            open_slow(other, rig)
            assert [found["step"] for found in other.all("restore")] == [3, 3]
            assert other.all("digest") == digest
            other.all("close")


def test_what_only_some_ranks_had_staged_is_abandoned(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("save", 1, wait=True)
        assert job[0].call("save", 2)["state"] == "staged"
        job.kill()
    until(lambda: not rig.status()["session"]["saves_in_flight"], "the end of the save")
    with rig.job(2) as job:
        open_slow(job, rig)
        assert [found["step"] for found in job.all("restore")] == [1, 1]
        job.all("close")
    assert rig.verified_steps() == [1]
    until(lambda: len(rig.attempts()) == 1, "the sweep")


@pytest.mark.parametrize("policy", ["wait", "skip", "replace"])
def test_overlap_policies(rig: Rig, policy: str) -> None:
    """A second save while the first flushes: the same outcome on all ranks."""
    with rig.job(2) as job:
        open_slow(job, rig, overlap_policy=policy)
        job.all("prepare")
        first = job.all("save", 1)
        assert all(saved["state"] == "staged" and saved["seconds"] < 1.5 for saved in first)
        second = job.all("save", 2)
        ends = [[entry["state"] for entry in job.all("settle", step)] for step in (1, 2)]
        if policy == "wait":
            assert all(saved["seconds"] > 0.7 for saved in second)
            assert ends == [["durable"] * 2] * 2
        elif policy == "skip":
            assert all(saved["state"] == "skipped" and saved["seconds"] < 1.5 for saved in second)
            assert all("step 1" in saved["text"] and saved["error"] == "SkippedError" for saved in second)
            assert ends == [["durable"] * 2, ["skipped"] * 2]
        else:
            assert all(saved["seconds"] < 3 for saved in second)
            assert ends == [["skipped"] * 2, ["durable"] * 2]
            assert "step 2" in job[1].call("handle_of", 1)["text"]
        steps = {"wait": [1, 2], "skip": [1], "replace": [2]}[policy]
        assert rig.verified_steps() == steps
        for step in steps:
            for figures in (entry["figures"] for entry in job.all("handle_of", step)):
                assert figures["bytes"] > 4 << 20
                assert figures["bytes"] == sum(e["figures"]["rank_bytes"] for e in job.all("handle_of", step))
                assert figures["window_s"] > 1.0 > figures["pause_s"] > 0 or policy == "wait"
                assert figures["num_files"] == 5
                assert figures["window_s"] >= figures["write_s"] > 0
        job.all("save", 3, wait=True)  # and it goes on
        job.all("close")  # what was skipped is no failure
    assert len(rig.attempts()) == len(steps) + 1


def test_a_final_save_is_never_skipped(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig, overlap_policy="skip", keep=1)
        job.all("save", 1)
        job.all("save", 2, final=True)
        job.all("close")
    assert rig.verified_steps()[-1] == 2


def test_a_program_that_ends_without_close_drains(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("train", 1)
        assert {saved["state"] for saved in job.all("save", 1)} == {"staged"}
        assert job.end() == [0, 0]
    assert rig.verified_steps() == [1]


def test_a_program_that_ends_without_close_is_loud_if_the_last_save_fails(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig, on_failure="warn")
        job.all("save", 1, wait=True)
        (flusher,) = rig.flusher_pids()
        resource.prlimit(flusher, resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        job.all("save", 2)
        assert job.end() == [8, 8]  # the exit code of a full storage
        assert "step 2" in job[0].output
        assert "not all durable" in job[0].output
    assert rig.verified_steps() == [1]


def test_an_exception_in_the_loop_drains_and_leaves_the_memory_for_a_restart(rig: Rig) -> None:
    leave = "me.ckpt.__exit__(ValueError, ValueError('bad batch'), None)"
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("save", 1)
        job.all("evaluate", leave)
        assert rig.verified_steps() == [1]
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        job.all("put", "big", [512, 2048], 0.0, kind="dtensor")
        assert [found["source"] for found in job.all("restore")] == ["memory"] * 2
        job.all("close")


def test_close_drains_and_tells_what_nobody_was_told(rig: Rig) -> None:
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("save", 1)
        job.all("close")
        assert {state for states in job.all("handles") for state in states.values()} == {"durable"}
    with rig.job(2) as job:
        open_slow(job, rig)
        job.all("save", 2)
        with puppets.Lasts() as took:
            for result in job.each("close", 0.2):
                assert isinstance(result, RankError)
                assert result.name == "DeadlineError"
        assert took.seconds < 5
    until(lambda: rig.verified_steps() == [1, 2], "the commit, though nobody waits")


def test_objects_larger_than_a_message(rig: Rig) -> None:
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        job.all("evaluate", "me.training.extra['blob'] = b'\\x07' * (70 << 20)")
        job.all("save", 1, wait=True)
        job.all("evaluate", "me.training.extra['blob'] = b''")
        job.all("restore")
        assert job[0].call("evaluate", "blob = me.training.extra['blob']; result = (len(blob), blob[-1])") == [
            70 << 20,
            7,
        ]
        job.all("close")


def test_what_works_beside_training_gives_way_to_it(rig: Rig) -> None:
    """The flusher is nice; the agent, for which a trainer waits at the start of a save, is as it was started."""
    with rig.job(1) as job:
        job.all("open", str(rig.run), flush_nice=7)
        job.all("save", 1, wait=True)
        (flusher,) = rig.flusher_pids()
        threads = [int(entry.name) for entry in Path(f"/proc/{flusher}/task").iterdir()]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {
            max(7, os.getpriority(os.PRIO_PROCESS, 0))
        }
        assert os.getpriority(os.PRIO_PROCESS, rig.agent_pid()) == os.getpriority(os.PRIO_PROCESS, 0)
        job.all("close")


def test_arenas_that_come_with_a_save_are_made_ready_for_the_next(rig: Rig) -> None:
    """The state grew, or the agent is another: what was prepared for is gone."""
    ready = "result = me.ckpt._saver._arena.is_ready(next(iter(me.ckpt._run.arenas.values())))"

    def made_ready(job: Job) -> bool:
        return bool(job[0].call("evaluate", ready))

    with rig.job(1) as job:
        job.all("open", str(rig.run))
        job.all("prepare")
        job.all("save", 1, wait=True)
        assert made_ready(job)
        job.all("put", "big", [512, 2048])
        job.all("save", 2, wait=True)
        until(lambda: made_ready(job), "the larger arena")
        os.kill(rig.agent_pid(), signal.SIGKILL)
        until(lambda: rig.try_status() is not None, "another agent")
        job.all("save", 3, wait=True)
        until(lambda: made_ready(job), "the new agent's arena")
        job.all("close")
