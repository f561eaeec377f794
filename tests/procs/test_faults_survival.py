"""Where agent and memory survive, and where they do not: the rows of docs/survival.md that one machine can show."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from puppets import Job, RankGoneError, Rig, until

from safehold.policy.survival import OOM_SCORE_ADJ

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from control_groups import ControlGroup, group_or_skip, mount_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]
HERE = Path(__file__).resolve().parent
MIB = 1 << 20
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def container_or_skip() -> None:
    """Go on only where process namespaces can be made."""
    try:
        done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError as exc:
        pytest.skip(f"process namespaces need util-linux: {exc}")
    if done.returncode != 0:
        pytest.skip(f"process namespaces cannot be made here: {done.stderr.strip()}")


@contextlib.contextmanager
def ahead(rig: Rig, *more: str, inside: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """An agent that was started by hand, in the foreground."""
    command = [*inside, sys.executable, "-m", "safehold", "agent", str(rig.run), *more]
    process = subprocess.Popen(command, env=rig.environment(), stderr=subprocess.PIPE, text=True, cwd="/")
    assert process.stderr is not None
    try:
        until(rig.slots, "the agent")
        assert "serves" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def saved(job: Job, rig: Rig) -> Any:
    """Have all ranks train and save step 5; returns the digest of their state."""
    job.all("open", str(rig.run))
    job.all("train", 5)
    job.all("save", 5, wait=True)
    return job.all("digest")[0]


def restored(rig: Rig, digest: Any) -> set[str]:
    """Start the job again; returns where it restored from."""
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        found = job.all("restore")
        assert {entry["step"] for entry in found} == {5}
        assert job.all("digest") == [digest] * 2
        job.all("close")
    return {entry["source"] for entry in found}


def pids(job: Job) -> list[int]:
    return [rank.pid for rank in job.ranks]


@pytest.mark.parametrize("started", ["by a trainer", "ahead"])
def test_what_ends_a_control_group_spares_an_agent_that_was_started_ahead(rig: Rig, started: str) -> None:
    """A Slurm step, a systemd unit or a container that ends: its manager kills the group, and no session or parent helps."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(group_or_skip(mount_of("cgroup2"), mount_of("cgroup", "name=systemd")))
        if started == "ahead":
            stack.enter_context(ahead(rig))
        job = stack.enter_context(rig.job(2))
        group.add(*pids(job))
        digest = saved(job, rig)
        assert len(group.pids()) == (2 if started == "ahead" else 4), "an agent and its flusher"
        group.kill()
        assert [rank.wait() for rank in job.ranks] == [-signal.SIGKILL] * 2
        assert bool(rig.slots()) == (started == "ahead")
        assert restored(rig, digest) == {"memory" if started == "ahead" else "flash"}


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[ControlGroup]:
    with group_or_skip(mount_of("cgroup", "memory"), mount_of("cgroup2")) as group:
        group.limit(limit_bytes)
        yield group


def test_the_budget_is_within_what_control_groups_above_the_agent_allow(rig: Rig) -> None:
    with memory_group(600 * MIB) as group, rig.job(2) as job:
        inner = group.child("inner")
        inner.limit(2000 * MIB)
        inner.add(*pids(job))
        saved(job, rig)
        assert 0 < rig.status()["budget_bytes"] <= 0.6 * 600 * MIB
        listed = subprocess.run(
            [sys.executable, "-m", "safehold", "agents", "--json"],
            env=rig.environment(), capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
        [entry] = json.loads(listed.stdout)
        assert entry["memory_limit_bytes"] == 600 * MIB
        assert entry["control_group"].endswith(f"{group.directory.name}/inner")
        job.all("close")


def oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def may_spare() -> bool:
    """Whether processes of this machine's root may lower the adjustment (containers often take CAP_SYS_RESOURCE away)."""
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> 24 & 1)


@pytest.mark.parametrize("together", [False, True])
def test_where_memory_runs_out_trainers_go_and_the_agent_stays_unless_all_are_killed_together(
    rig: Rig, together: bool
) -> None:
    with memory_group(800 * MIB) as group, rig.job(2) as job:
        if together and not (group.directory / "memory.oom.group").exists():
            pytest.skip("memory.oom.group is not available: the memory controller is not in the v2 hierarchy here")
        if together:
            (group.directory / "memory.oom.group").write_text("1")
        group.add(*pids(job))
        digest = saved(job, rig)
        agent = rig.agent_pid()
        adjustments = {pid: oom_score_adj(pid) for pid in group.pids()}
        spared = oom_score_adj(pids(job)[0])
        if may_spare():
            assert spared != OOM_SCORE_ADJ
            spared = OOM_SCORE_ADJ
        assert {pid for pid, found in adjustments.items() if found == spared} >= set(rig.processes())
        with pytest.raises(RankGoneError):
            job[1].call("evaluate", "len(b'x' * (2 << 30))")
        assert job[1].wait() == -signal.SIGKILL
        if together:
            until(lambda: not group.pids(), "the end of the whole group")
        else:
            assert rig.agent_pid() == agent
        job.kill()
        assert restored(rig, digest) == {"flash" if together else "memory"}


def test_a_restart_by_torchrun_finds_agent_and_memory(rig: Rig) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "1", "--monitor-interval", "0.1", str(HERE / "restarted.py"), str(rig.run)),
    ]
    # Else torch 2.13 keeps one store for all rounds, in which ranks of the second find where gloo listened in the first.
    environment = {**rig.environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=180, cwd=rig.directory
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(line for line in done.stdout.splitlines() if "restored" in line)
    assert found == [f"rank {rank} restored 5 from memory: 7000" for rank in range(2)]


def test_a_sidecar_serves_trainers_of_another_container(rig: Rig) -> None:
    """They do not see each other's process numbers; the agent follows trainers by descriptors that the kernel gives it."""
    container_or_skip()
    with ahead(rig, inside=CONTAINER):
        with rig.job(2) as job:
            digest = saved(job, rig)
            job.kill()
        kernel = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
        if kernel >= (6, 5):
            until(lambda: rig.status()["memory"]["verified"] == [0, 1], "the check of what the dead left")
        assert restored(rig, digest) == {"memory"}


def test_a_container_that_ends_takes_the_agent_along(rig: Rig) -> None:
    container_or_skip()
    with rig.job(2) as job:
        with ahead(rig, inside=CONTAINER):
            digest = saved(job, rig)
        until(lambda: not rig.slots(), "the agent's end")
        job.all("train", 6)  # goes on, and starts an agent of its own
        job.all("save", 6, wait=True)
        assert rig.slots()
        assert job.all("restore", 5)[0]["source"] == "flash"
        assert job.all("digest") == [digest] * 2
        job.all("close")


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "--idle-exit"])
def test_an_agent_that_was_started_ahead_stays_until(rig: Rig, end: str) -> None:
    with ahead(rig, *(["--idle-exit", "1.5"] if end == "--idle-exit" else [])) as agent:
        with rig.job(2) as job:
            digest = saved(job, rig)
            assert (rig.agent_pid(), len(rig.slots())) == (agent.pid, 1)
            job.kill()
        assert restored(rig, digest) == {"memory"}
        until(lambda: rig.status()["arenas_bytes"] == 0, "the job's memory, given back")
        if end != "--idle-exit":
            time.sleep(0.1)
            assert agent.poll() is None
            agent.send_signal(getattr(signal, end))
        assert agent.wait(20) == 0
    assert not rig.slots()


def test_of_two_agents_started_ahead_the_second_says_that_there_is_one(rig: Rig) -> None:
    with ahead(rig):
        command = [sys.executable, "-m", "safehold", "agent", str(rig.run)]
        done = subprocess.run(command, env=rig.environment(), capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 5, done.stderr
    assert "lives here already" in done.stderr and "safehold agents" in done.stderr
