"""Jobs over several hosts whose saves stay in memory: hosts are lost with their memory, and the newest step comes back from partners."""

# ruff: noqa: F811 - a fixture is imported

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_shared_flash import FAST, SCRIPT, ended, line, train, unbroken  # noqa: F401 - a fixture

from safehold.testing.hosts import Hosts, Job, run_job

pytestmark = pytest.mark.root
MEMORY = {"flush_every": 10}


def train_and_die(hosts: Hosts, run: str, *lost: int, step: int = 3) -> str:
    """Train to a step that is in memory only, lose hosts, and have the others' trainers die; returns the state's hash."""
    with train(hosts, run, "--pause-at", str(step), "/never", **MEMORY) as job:
        for rank in range(len(hosts)):
            job.until("pausing", rank=rank, timeout_s=40)
        for host in lost:
            job.kill_host(host)
        job.kill()
        job.wait(20)
    assert steps_on_storage(run) == [1], "only the first save of a start is flushed here"
    return dict(re.findall(r"saved (\d) (\w+)", job.output(min(set(range(len(hosts))) - set(lost)))))[str(step)]


def steps_on_storage(run: str) -> list[int]:
    return sorted(int(path.parent.parent.name) for path in Path(run).glob("checkpoints/*/*/manifest.json"))


def restored(job: Job, rank: int = 0) -> tuple[int, str, str]:
    step, found, source = re.findall(r"restored (\d+) (\w+) (\S+)", job.output(rank))[0]
    return int(step), found, source


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_is_lost_with_its_memory_costs_no_step(four_hosts: Hosts, unbroken: str, lost: int) -> None:
    run = str(four_hosts.shared / "run")
    wanted = train_and_die(four_hosts, run, lost)
    four_hosts.replace(lost)
    with train(four_hosts, run, **MEMORY) as job:
        ended(job)
        for rank in range(4):
            step, found, source = restored(job, rank)
            assert (step, found) == (3, wanted)
            assert source == "partner" if rank == lost else source.startswith("memory"), f"rank {rank}: {source}"
        assert {line(job, "final", rank) for rank in range(4)} == {unbroken}
    assert steps_on_storage(run) == [1, 4], "the first save after a restore is flushed"


def test_a_host_and_its_partner_are_lost_and_flash_is_used_aloud(four_hosts: Hosts) -> None:
    run = str(four_hosts.shared / "run")
    train_and_die(four_hosts, run, 1, 3)
    for lost in (1, 3):
        four_hosts.replace(lost)
    with train(four_hosts, run, "--pause-at", "2", "/never", **MEMORY) as job:
        job.until("pausing", rank=0, timeout_s=40)
        step, _, source = restored(job)
        assert step == 1 and set(source.split("+")) <= {"flash", "peers"}, source
        assert "step 3 was in memory and cannot be used" in job.text, job.tail()
        job.kill()


def test_fewer_hosts_and_another_world_size_restore_what_is_in_memory(four_hosts: Hosts) -> None:
    run = str(four_hosts.shared / "run")
    wanted = train_and_die(four_hosts, run, 3)
    for ranks, hosts in ((1, [2, 0, 1]), (2, [1, 0])):  # the second start without any save since the first
        args = [run, "3", "--settings", repr({**FAST, **MEMORY})]
        with run_job(four_hosts, ranks, SCRIPT, args, on=hosts, timeout_s=60.0) as job:
            ended(job)
            for rank in range(ranks * len(hosts)):
                assert restored(job, rank)[:2] == (3, wanted)
    assert steps_on_storage(run) == [1]
