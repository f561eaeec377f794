"""Saves that stay in memory, on one node: trainers are killed, and the newest step in memory comes back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from puppets import RankError, Rig, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]
MEMORY: dict[str, Any] = {"flush_every": 3}


def save_until(job: Any, last: int, first: int = 1) -> list[Any]:
    for step in range(first, last + 1):
        job.all("train", step)
        job.all("save", step, wait=True)
    return job.all("digest")


def test_a_step_that_was_in_memory_only_survives_its_trainers(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        digest = save_until(job, 6)
        job.kill()
    assert rig.verified_steps() == [1, 4], "every third save is on storage, the first one included"
    for world_size in (2, 3, 1):
        with rig.job(world_size) as job:
            job.all("open", str(rig.run), **MEMORY)
            for found in job.all("restore"):
                assert (found["step"], found["done"], found["source"]) == (6, 6, "memory")
            assert job.all("digest") == [digest[0]] * world_size
            job.kill()
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        assert [found["step"] for found in job.all("restore")] == [6, 6]
        after = save_until(job, 8, first=7)
        job.kill()
    assert rig.verified_steps() == [1, 4, 7], "the first save after a restore is flushed"
    with rig.job(2) as job:
        job.all("open", str(rig.run))  # a job that keeps nothing in memory finds it all the same
        assert [found["step"] for found in job.all("restore")] == [8, 8]
        assert job.all("digest") == after
        job.all("save", 9, wait=True)
        job.all("close")
    assert rig.verified_steps()[-1] == 9


def test_going_back_sets_what_is_in_memory_aside(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        save_until(job, 3)
        assert [found["step"] for found in job.all("restore", 1)] == [1, 1]
        job.kill()
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        assert [found["step"] for found in job.all("restore")] == [1, 1]
        job.all("close")


def test_a_step_in_memory_can_be_asked_for_by_name_and_the_last_is_kept_with_final(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        digest = save_until(job, 2)
        job.all("train", 3)
        assert [found["step"] for found in job.all("restore", 2)] == [2, 2]
        assert job.all("digest") == digest
        with pytest.raises(RankError, match="no such checkpoint"):
            job.all("restore", 3)
        job.all("train", 3)
        job.all("save", 3, wait=True, final=True)
        job.all("close")
    assert rig.verified_steps() == [1, 3]


def spoil_arenas(agent: int, rank: int) -> None:
    """Change the middle of all arenas of a rank behind everybody's back."""
    done: set[int] = set()
    for entry in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(OSError):
            number = entry.stat().st_ino
            if f"arena-{rank} " in f"{entry.readlink()} " and number not in done:
                done.add(number)
                with entry.open("r+b") as file:
                    file.seek(os.fstat(file.fileno()).st_size // 2)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 64]))
    assert done


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_is_in_memory_only_is_verified_as_well_and_given_up_aloud_if_it_is_spoiled(
    rig: Rig, spoiled: bool
) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        job.all("put", "big", [512, 2048], kind="dtensor")
        save_until(job, 2)
        if spoiled:
            spoil_arenas(rig.agent_pid(), 1)
        job.kill()
    until(lambda: rig.status()["memory"]["verified"] == ([0] if spoiled else [0, 1]), "the check of the memory")
    with rig.job(2) as job:
        job.all("open", str(rig.run), **MEMORY)
        job.all("put", "big", [512, 2048], 0.0, kind="dtensor")
        for found in job.all("restore"):
            assert found["step"] == (1 if spoiled else 2)
            assert not spoiled or any("step 2 cannot be used" in text for text in found["skipped"])
        assert job.all("value_of", "big")[0][-1][-1] == 512 * 2048 - 1
        job.all("close")
    assert not list((rig.run / "quarantine").glob("*")), "there is nothing on storage to leave word against"


def test_an_agent_that_dies_takes_what_is_in_memory_along_and_training_goes_on(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), on_failure="warn", **MEMORY)
        save_until(job, 2)
        os.kill(rig.agent_pid(), 9)
        job.all("train", 3)
        job.all("save", 3)  # what becomes of it depends on when the agent was missed
        job.all("train", 4)
        job.all("save", 4, wait=True, flush=True)
        job.all("close")
    assert rig.verified_steps()[-1] == 4
