"""Saves that stay in memory, on one node: trainers are killed, and the newest step in memory comes back."""

from __future__ import annotations

from typing import Any

import pytest
from puppets import RankError, Rig

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
