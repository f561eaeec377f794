"""A reader beside a run that saves and retires: what it reads stays while it lives, and goes when it has been dead for long."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from puppets import Job, Rank, Rig, until

from safehold.format import paths, records

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

READ = """
import pathlib, safehold
directory = pathlib.Path({directory!r})
def rename(name):
    (directory / "reading").touch()
    deadline = time.monotonic() + 60
    while not (directory / "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return name
state = {{"extra": {{"table": torch.zeros(3, 4)}}}}
safehold.load({run!r}, state, step=1, partial=True, rename=rename)
result = state["extra"]["table"].flatten().tolist()
"""


@contextlib.contextmanager
def reader(rig: Rig, lease_s: float) -> Iterator[tuple[Rank, Path]]:
    """A process that has found step 1 and waits in the middle of loading it, and the directory where it hears `go`."""
    with rig.job(1, {"SAFEHOLD_LEASE_S": str(lease_s)}) as job:
        directory = rig.directory / f"reader-{lease_s:g}"
        directory.mkdir()
        job[0].send("evaluate", READ.format(directory=str(directory), run=str(rig.run)))
        until((directory / "reading").exists, "the reader")
        yield job[0], directory


def train(job: Job, *steps: int) -> None:
    for step in steps:
        job.all("train", step)
        job.all("save", step, wait=True)


def lease(rig: Rig) -> records.Lease | None:
    found = list((rig.run / paths.LEASES).glob("*.json"))
    return records.decode_lease(found[0].read_bytes(), path=str(found[0])) if found else None


def test_a_stopped_reader_finds_everything_and_a_dead_one_is_forgotten(rig: Rig) -> None:
    with rig.job(1) as job:
        job.all("open", str(rig.run), keep=1, delete_grace_s=0)
        train(job, 1)
        with reader(rig, 600) as (stopped, directory):
            stopped.signal(signal.SIGSTOP)
            train(job, 2, 3, 4)
            until(lambda: len(rig.attempts()) == 2, "the end of retention")
            assert rig.verified_steps() == [1, 4], "2 and 3 went, 1 did not"
            stopped.signal(signal.SIGCONT)
            (directory / "go").touch()
            assert stopped.answer() == [i + 1.0 for i in range(12)]
            assert lease(rig) is None
        with reader(rig, 3) as (killed, _):
            first = lease(rig)
            assert first is not None and (first.commit.step, first.lease_s) == (1, 3.0)
            until(lambda: (found := lease(rig)) is not None and found.renewals > first.renewals, "a renewal")
            killed.kill()
            dead = time.monotonic()
            train(job, 5)
            until(lambda: len(rig.attempts()) == 2, "the end of retention")
            assert rig.verified_steps() == [1, 5], "it may be that it still lives"
            step = 5
            while rig.steps()[0] == 1:
                assert time.monotonic() < dead + 30, "the lease of a dead reader holds for ever"
                time.sleep(0.2)
                step += 1
                train(job, step)
            assert time.monotonic() >= dead + 3, "the lease ended too early"
            until(lambda: len(rig.attempts()) == 1 and lease(rig) is None, "the end of retention")
            assert rig.verified_steps() == [step]
        job.all("close")
