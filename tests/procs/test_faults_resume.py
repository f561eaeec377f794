"""A run of N steps equals one that was broken and resumed, bit for bit; and another number of ranks gets equal values."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from puppets import Job, Rig, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_n_steps_equal_half_of_them_and_a_new_process_and_the_other_half(rig: Rig, kind: str, world_size: int) -> None:
    """Losses, learning rates, samples and the end; ended in good order, and killed three steps after the save."""
    with rig.job(world_size) as job:
        job.all("build", kind)
        job.all("open", str(rig.directory / "unbroken"))
        whole = job.all("train", 20)
        end = job.all("digest")
        job.all("close")
    samples = [ids for step in whole[0] for ids in step[3]]
    assert len(samples[:40]) == 40
    for way in ("closed", "killed"):
        run = rig.directory / way
        with rig.job(world_size) as job:
            job.all("build", kind)
            job.all("open", str(run), every=10)
            assert job.all("train", 10) == [rank[:10] for rank in whole]
            if way == "closed":
                job.all("close")
            else:
                job.all("drain")
                assert job.all("train", 13) == [rank[10:13] for rank in whole]
                job.kill()
        with rig.job(world_size) as job:
            job.all("build", kind)
            job.all(
                "evaluate", "torch.manual_seed(1234); me.training.loader.next()"
            )  # whatever a new process did before
            job.all("open", str(run), every=10)
            assert {found["step"] for found in job.all("restore")} == {10}
            assert job.all("train", 20) == [rank[10:] for rank in whole]
            assert job.all("digest") == end
            job.all("close")
        assert rig.verified_steps(run) == [10, 20]


@pytest.mark.parametrize("source", ["memory", "flash"])
def test_two_ranks_then_one_then_three_then_two(rig: Rig, source: str) -> None:
    def resumed(job: Job, step: int, digest: dict[str, str]) -> None:
        job.all("open", str(rig.run), keep=10)
        for found in job.all("restore"):
            assert (found["step"], found["done"], found["source"]) == (step, step, source)
        assert job.all("digest") == [digest] * len(job.ranks)

    with rig.job(2) as job:
        job.all("open", str(rig.run), keep=10)
        job.all("put", "odd", [7, 5], kind="dtensor")
        job.all("put", "wide", [2, 3], kind="dtensor")
        job.all("train", 4)
        job.all("save", 4, wait=True)
        digest = job.all("digest")[0]
        job.kill()
    step = 4
    for world_size in (1, 3, 2):
        if source == "flash":
            agent = rig.agent_pid()
            os.kill(agent, signal.SIGKILL)
            until(lambda: not rig.processes(), "the end of agent and flusher")
        with rig.job(world_size) as job:
            job.all("build")
            for name, shape in (("odd", [7, 5]), ("wide", [2, 3])):
                job.all("put", name, shape, 0.0, kind="dtensor")
            resumed(job, step, digest)
            assert job.all("value_of", "odd") == [[[5.0 * row + i for i in range(5)] for row in range(7)]] * world_size
            assert job.all("value_of", "wide") == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * world_size
            step += 1
            job.all("evaluate", f"me.training.state['done'] = {step}")
            job.all("save", step, wait=True)
            job.kill()
    assert rig.verified_steps() == [4, 5, 6, 7]


def test_going_back_to_an_older_step_and_on_from_there(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), every=1, keep=10)
        first = job.all("train", 5)
        job.all("drain")
        found: list[Any] = job.all("restore", 2)
        assert [entry["step"] for entry in found] == [2, 2]
        assert [entry["incarnation"] for entry in found] == [2, 2]
        assert rig.verified_steps() == [1, 2]  # the later ones are not of this incarnation any more
        assert job.all("train", 5) == [rank[2:] for rank in first]
        job.all("drain")
        assert rig.verified_steps() == [1, 2, 3, 4, 5]
        for result in job.each("restore", 77):
            assert getattr(result, "name", "") == "StepNotFoundError"
        job.all("train", 6)
        job.all("close")
    assert rig.verified_steps() == [1, 2, 3, 4, 5, 6]
