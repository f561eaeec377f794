"""Real disks that are full, read-only, limited, or never answer. Most of these mount file systems, so they need root."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import puppets
import pytest
from puppets import Job, RankError, Rig, need, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of so many bytes."""
    need("mount", "umount")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def outcome(job: Job, step: int) -> tuple[str, str, str]:
    """Train to a step and save: state, error and text, the same on all ranks."""
    job.all("train", step)
    job.all("save", step)
    ended = job.all("settle", step)
    assert len({(entry["state"], entry["error"]) for entry in ended}) == 1, ended
    return ended[0]["state"], ended[0]["error"], ended[0]["text"]


PATIENT = {"on_failure": "warn", "max_failures": 0}


@pytest.mark.root
def test_a_full_disk_fails_the_save_and_nothing_else(rig: Rig) -> None:
    with small_disk(rig.directory / "disk", "7m") as disk, rig.job(2) as job:
        run = disk / "run"
        job.all("open", str(run), keep=5, **PATIENT)
        job.all("put", "big", [768, 1024], kind="dtensor")  # 3 MiB
        assert outcome(job, 1)[0] == "durable"
        assert outcome(job, 2)[0] == "durable"
        for step in (3, 4):
            state, error, text = outcome(job, step)
            assert (state, error) == ("failed", "StorageFullError")
            assert f"step {step}" in text
            assert "ENOSPC" in text
            assert str(run) in text
            assert rig.verified_steps(run) == [1, 2]
            until(lambda: len(rig.attempts(run)) == 2, "the sweep of what was written")
        remount(disk, "size=20m")
        assert outcome(job, 5)[0] == "durable"
        assert rig.verified_steps(run) == [1, 2, 5]
        job.all("close")
        until(lambda: not rig.slots(), "the end of the agent")


@pytest.mark.root
def test_old_checkpoints_go_before_a_save_fails_for_want_of_space(rig: Rig) -> None:
    """Two and a half fit; the bytes of un-committed ones would stay for a while, but not if they are in the way."""
    with small_disk(rig.directory / "disk", "8m") as disk, rig.job(2) as job:
        run = disk / "run"
        job.all("open", str(run), keep=1, **PATIENT)
        job.all("put", "big", [768, 1024], kind="dtensor")
        for step in range(1, 6):
            assert outcome(job, step)[0] == "durable", step
            assert max(rig.verified_steps(run)) == step
        until(lambda: rig.verified_steps(run) == [5], "retention")
        job.all("close")
        until(lambda: not rig.slots(), "the end of the agent")


@pytest.mark.root
def test_a_disk_that_becomes_read_only(rig: Rig) -> None:
    with small_disk(rig.directory / "disk", "20m") as disk, rig.job(2) as job:
        run = disk / "run"
        job.all("open", str(run), **PATIENT)
        assert outcome(job, 1)[0] == "durable"
        remount(disk, "ro")
        for step in (2, 3):
            state, error, text = outcome(job, step)
            assert (state, error) == ("failed", "StorageReadOnlyError")
            assert "EROFS" in text
        assert [found["step"] for found in job.all("restore")] == [1, 1]
        remount(disk, "rw")
        assert outcome(job, 4)[0] == "durable"
        assert rig.verified_steps(run) == [1, 4]
        job.all("close")
        until(lambda: not rig.slots(), "the end of the agent")
        remount(disk, "ro")
        with rig.job(1) as other:
            with pytest.raises(RankError, match="StorageReadOnlyError"):
                other.all("open", str(run))
            other.kill()
        os.kill(rig.agent_pid(), signal.SIGTERM)
        until(lambda: not rig.slots(), "the end of the agent")


def test_a_limit_on_the_size_of_files(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), **PATIENT)
        assert outcome(job, 1)[0] == "durable"
        (flusher,) = rig.flusher_pids()
        limits = resource.prlimit(flusher, resource.RLIMIT_FSIZE)
        for step, limit in enumerate((0, 100, 4096, 20_000), 2):
            resource.prlimit(flusher, resource.RLIMIT_FSIZE, (limit, limits[1]))
            state, error, text = outcome(job, step)
            assert (state, error) == ("failed", "StorageFullError"), (limit, text)
            assert rig.verified_steps() == [1]
        resource.prlimit(flusher, resource.RLIMIT_FSIZE, limits)
        assert outcome(job, 9)[0] == "durable"
        assert rig.flusher_pids() == [flusher]
        job.all("close")
    assert rig.verified_steps() == [1, 9]
    assert len(rig.attempts()) == 2


class Bindfs:
    """A file system whose server can be stopped, so that it never answers."""

    def __init__(self, directory: Path) -> None:
        need("bindfs", "fusermount3")
        self.below, self.place = directory / "below", directory / "disk"
        self.below.mkdir()
        self.place.mkdir()
        self._server = subprocess.Popen(["bindfs", "-f", str(self.below), str(self.place)])
        until(lambda: os.path.ismount(self.place), "the mount")

    def stop(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        subprocess.run(["umount", "--lazy", str(self.place)], check=False)
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


@pytest.fixture
def bindfs(rig: Rig) -> Iterator[Bindfs]:
    """Ended before the rig's processes are, so that none of them is left waiting for it."""
    found = Bindfs(rig.directory)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.root
def test_a_disk_that_never_answers_cannot_take_training_with_it(rig: Rig, bindfs: Bindfs) -> None:
    run, below = bindfs.place / "run", bindfs.below / "run"
    with rig.job(2) as job:
        job.all("open", str(run), flush_timeout_s=2.5, request_timeout_s=30, **PATIENT)
        assert outcome(job, 1)[0] == "durable"
        bindfs.stop()
        with puppets.Lasts() as took:
            job.all("train", 2)
            assert all(saved["seconds"] < 1.5 for saved in job.all("save", 2))
            job.all("train", 4)
        assert took.seconds < 5  # the disk is stuck, training is not
        with puppets.Lasts() as took:
            ended = job.all("settle", 2)
        assert took.seconds < 12
        for entry in ended:
            assert (entry["state"], entry["error"]) == ("failed", "DeadlineError")
            assert "storage does not answer" in entry["text"]
        state, error, _ = outcome(job, 5)  # another flusher, and the same disk
        assert (state, error) == ("failed", "DeadlineError")
        assert rig.status()["flushers_replaced"] == 2
        bindfs.go_on()
        assert outcome(job, 6)[0] == "durable"
        assert rig.verified_steps(below) == [1, 6]
        until(lambda: len(rig.flusher_pids()) == 1, "the end of the flushers that were stuck")
        job.all("close")
        until(lambda: not rig.slots(), "the end of the agent")


@pytest.mark.root
def test_a_run_cannot_be_opened_on_a_disk_that_never_answers(rig: Rig, bindfs: Bindfs) -> None:
    run = bindfs.place / "run"
    bindfs.stop()
    with rig.job(2) as job:
        with puppets.Lasts() as took:
            for result in job.each("open", str(run), start_timeout_s=5):
                assert isinstance(result, RankError)
                assert result.name == "DeadlineError"
                assert "storage does not answer" in result.text
        assert took.seconds < 20
        bindfs.go_on()
        job.all("open", str(run))
        job.all("save", 1, wait=True)
        job.all("close")
        until(lambda: not rig.slots(), "the end of the agent")
    assert rig.verified_steps(bindfs.below / "run") == [1]
