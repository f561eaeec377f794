"""A job that replicates itself: killed in the middle of it, with a second place that is gone, full or slow, and on an empty machine."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from puppets import Job, RankError, Rig, need, until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

FAST: dict[str, Any] = {"agent_linger_s": 5.0, "delete_grace_s": 0, "keep": 2}


def there(rig: Rig) -> Path:
    return rig.directory / "there"


def start(rig: Rig, job: Job, *, rows: int = 1000, **options: Any) -> Any:
    job.all("open", str(rig.run), **{"remote": str(there(rig)), **FAST, **options})
    job.all("put", "table", [rows, 1000], kind="plain")  # 4 KB each
    return job.all("restore")


def save(job: Job, step: int) -> None:
    job.all("train", step)
    job.all("save", step, wait=True)


def wait_remote(job: Job, step: int) -> None:
    job.all("evaluate", f"me.handles[{step}].wait(30.0, tier='remote'); result = None")


def crash(rig: Rig, job: Job) -> None:
    """The machine is lost: ranks, agents and all that they started."""
    job.kill()
    rig.close()


def test_killed_at_any_moment_the_second_place_is_whole(rig: Rig) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, step = random.Random(seed), 0
    for _ in range(5):
        with rig.job(1) as job:
            found = start(rig, job, rows=2000, remote_rate_bytes_s=16 << 20)[0]["step"] or 0
            assert found == step
            for _ in range(2):
                step += 1
                save(job, step)
            time.sleep(rng.uniform(0.0, 1.5))
            crash(rig, job)
        if (there(rig) / "run.json").exists():
            assert set(rig.verified_steps(there(rig))) <= set(range(1, step + 1))
    with rig.job(1) as job:
        assert start(rig, job, rows=2000)[0]["step"] == step
        until(lambda: step in rig.steps(there(rig)), "what was interrupted, without a further save")
        job.end()
    assert step in rig.verified_steps(there(rig))


def test_an_empty_machine_goes_on_from_the_second_place(rig: Rig) -> None:
    with rig.job(2) as job:
        start(rig, job, remote_keep=10)
        for step in (1, 2, 3, 4):
            save(job, step)
            wait_remote(job, step)
        digests = job.all("digest")
        crash(rig, job)
    shutil.rmtree(rig.run)
    with rig.job(2) as job:
        found = start(rig, job, remote_keep=10)
        assert [(entry["step"], entry["source"]) for entry in found] == [(4, "remote")] * 2
        assert job.all("digest") == digests
        save(job, 5)
        wait_remote(job, 5)
        job.end()
    assert rig.steps(there(rig)) == [1, 2, 3, 4, 5], "what it keeps longer than the run goes on to count"


def test_a_checkpoint_that_is_damaged_here_is_mended_from_the_second_place(rig: Rig) -> None:
    with rig.job(1) as job:
        start(rig, job)
        for step in (1, 2):
            save(job, step)
            wait_remote(job, step)
        crash(rig, job)
    (pack,) = (rig.run / "checkpoints" / "000000002").rglob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(bytes(data))
    with rig.job(1) as job:
        found = start(rig, job)[0]
        assert (found["step"], found["source"]) == (2, "remote"), job[0].output
        job.end()
    assert 2 in rig.verified_steps()


def test_a_second_place_that_is_gone_for_a_while_costs_no_save(rig: Rig) -> None:
    aside = rig.directory / "aside"
    with rig.job(1) as job:
        start(rig, job)
        save(job, 1)
        wait_remote(job, 1)
        there(rig).rename(aside)
        there(rig).write_text("not a directory")
        for step in (2, 3):
            save(job, step)
        until(lambda: rig.status()["session"]["remote"]["last_error"], "a failure", 90.0)
        there(rig).unlink()
        aside.rename(there(rig))
        save(job, 4)
        wait_remote(job, 4)
        job.end()
        text = job[0].output
    assert rig.verified_steps(there(rig))[-1] == 4 and rig.verified_steps() == [3, 4]
    assert "is not replicated yet" in text and "replication works again" in text


def test_a_full_second_place_costs_no_save(rig: Rig) -> None:
    need("mount", "umount")
    there(rig).mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(there(rig))], check=False).returncode:
        pytest.skip("cannot mount")
    try:
        with rig.job(1) as job:
            start(rig, job, rows=2000)
            save(job, 1)
            until(lambda: "are free" in rig.status()["session"]["remote"]["last_error"], "a failure")
            subprocess.run(["mount", "-o", "remount,size=100m", str(there(rig))], check=True)
            save(job, 2)
            wait_remote(job, 2)
            job.end()
        assert rig.verified_steps(there(rig)) == [2] and rig.verified_steps() == [1, 2]
        until(lambda: not rig.slots(), "the end of the agent")
    finally:
        subprocess.run(["umount", "-l", str(there(rig))], check=False)


def test_a_slow_copy_outlives_its_job_and_stops_when_told(rig: Rig) -> None:
    with rig.job(1) as job:
        start(rig, job, remote_rate_bytes_s=8 << 20)
        save(job, 1)
        job.all("close")
        job.end()
    until(lambda: rig.steps(there(rig)) == [1], "the copy, after the job")
    until(lambda: not rig.slots(), "the end of the agent")
    with rig.job(1) as job:
        start(rig, job, remote_rate_bytes_s=200_000)
        save(job, 2)
        until(lambda: rig.status()["session"]["remote"]["copying_bytes"], "a copy under way")
        agent = rig.agent_pid()
        job.all("close")
        job.end()
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(agent)], check=True)
    until(lambda: not rig.slots(), "the end of the agent", 30.0)
    assert rig.verified_steps(there(rig)) == [1]
    with rig.job(1) as job:
        assert start(rig, job)[0]["step"] == 2
        until(lambda: rig.steps(there(rig)) == [1, 2], "what was stopped")
        job.end()
    assert rig.verified_steps(there(rig)) == [1, 2]


def test_close_waits_for_the_copy_if_asked(rig: Rig) -> None:
    with rig.job(1) as job:
        start(rig, job, remote_rate_bytes_s=8 << 20)
        save(job, 1)
        job.all("evaluate", "me.ckpt.close(remote=True); result = None")
        assert rig.steps(there(rig)) == [1]
        job.end()


def test_a_place_that_cannot_be_is_refused_by_name(rig: Rig) -> None:
    other = rig.directory / "other"
    with rig.job(1) as job:
        start(rig, job)
        save(job, 1)
        wait_remote(job, 1)
        job.all("close")
        job.all("open", str(other))  # else it would become that of the run at the second place
        job.all("close")
        for remote, words in (
            (there(rig), "directory of another run"),
            (other, "run directory itself"),
            (other / "in", "inside the run directory"),
            (rig.directory, "around the run directory"),
        ):
            with pytest.raises(RankError, match=words):
                job[0].call("open", str(other), remote=str(remote))
                pytest.fail(str(remote))
        job.end()
