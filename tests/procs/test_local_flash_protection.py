"""Real agents on nodes with disks of their own that keep redundancy: what fails there costs no save, and what is lost comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import puppets
import pytest
from puppets import Rig, until

from safehold.testing.faults import environment, fail_at

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

SETTINGS = {"keep": 2, "copies": 1, "delete_grace_s": 0.0}


@pytest.fixture(autouse=True)
def as_root() -> None:
    puppets.need()


def shares(rig: Rig, node: str) -> dict[int, set[str]]:
    """What a node holds for others, by step."""
    found: dict[int, set[str]] = {}
    for path in (rig.directory / f"disk-{node}").glob("checkpoints/*/*/redundancy-*"):
        found.setdefault(int(path.parts[-3]), set()).add(path.name)
    return found


def safehold(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "safehold", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=rig.environment())


def test_close_waits_for_it_and_it_goes_with_its_checkpoint(rig: Rig) -> None:
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **SETTINGS)
        for step in (1, 2, 3):
            job.all("train", step)
            job.all("save", step, wait=True)
        before = job.all("digest")
        job.all("close")
        assert "redundancy: copies=1 over 2 nodes" in job[0].output
    assert shares(rig, "a").get(3) == {"redundancy-00000.0", "redundancy-00000.json"}
    assert shares(rig, "b").get(3) == {"redundancy-00001.0", "redundancy-00001.json"}
    for path in (rig.directory / "disk-a").glob("checkpoints/*/*"):
        assert (path / "manifest.json").exists(), "redundancy does not stay without its checkpoint"
    until(lambda: not rig.processes(), "the end of all agents")
    disk = str(rig.directory / "disk-b")
    checked = safehold(rig, "verify", disk)
    assert checked.returncode == 0 and "redundancy" not in checked.stdout, checked.stdout + checked.stderr
    share = max(Path(disk).glob("checkpoints/*/*/redundancy-00001.0"))
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    damaged = safehold(rig, "verify", disk)
    assert damaged.returncode == 6 and "redundancy-00001.0" in damaged.stdout + damaged.stderr
    shutil.rmtree(rig.directory / "disk-b")
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **SETTINGS)
        assert [found["step"] for found in job.all("restore")] == [3, 3]
        assert job.all("digest") == before
        until(lambda: shares(rig, "b").get(3), "the share of the replacement")
        assert "rebuilding step 3 on node b: what node b has saved" in job[0].output
        job.all("close")
    assert safehold(rig, "verify", disk).returncode == 0


def test_a_flusher_that_dies_in_it_costs_no_save_and_is_told(rig: Rig) -> None:
    fault = environment(fail_at(None, 1, "protect", process="flusher", marker=rig.directory / "killed"))
    with rig.job(2, fault, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **SETTINGS)
        job.all("train", 1)
        job.all("save", 1, wait=True)
        until(lambda: "step 1 is not protected against the loss of a node" in job[0].output, "the warning")
        job.all("train", 2)
        job.all("save", 2, wait=True)
        job.all("close")
    assert shares(rig, "a").get(2) and shares(rig, "b").get(2)


def test_the_next_save_does_not_wait_for_a_flusher_that_hangs_in_it(rig: Rig) -> None:
    """The flusher of one node is stopped in the protection of a step by its listener only: the thread hangs, others go on."""
    fault = environment(fail_at(None, 1, "protect", process="flusher", action="hang", marker=rig.directory / "hung"))
    with rig.job(2, fault, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **SETTINGS, flush_timeout_s=4.0, stall_timeout_s=1.0)
        for step in (1, 2, 3):
            job.all("train", step)
            job.all("save", step, wait=True)
        begun = time.monotonic()
        job.all("close")
        assert time.monotonic() - begun < 10
    assert shares(rig, "a").get(3) and shares(rig, "b").get(3), (
        "the newest is protected when two have overtaken the first"
    )


def test_the_agents_of_a_job_that_is_killed_finish_it(rig: Rig) -> None:
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **SETTINGS)
        job.all("train", 1)
        job.all("save", 1, wait=True)
        job.kill()
    until(lambda: shares(rig, "a").get(1) and shares(rig, "b").get(1), "redundancy of what is committed")
    for pid in list(rig.processes()):
        os.kill(pid, signal.SIGKILL)
