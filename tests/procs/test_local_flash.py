"""Nodes with disks of their own: mount namespaces, an agent for each, and real saves and restores over loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import puppets
import pytest
from puppets import RankError, Rig, until

from safehold.testing.faults import environment, fail_at

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

KEEP = {"keep": 10}


@pytest.fixture(autouse=True)
def as_root() -> None:
    puppets.need()


def disk(rig: Rig, node: str) -> Path:
    return rig.directory / f"disk-{node}"


def save_steps(
    rig: Rig, nodes: list[str], *steps: int, expect: int | None = None, **options: Any
) -> list[dict[str, str]]:
    """One start of the job: restore what is there, train and save these steps; returns the digests of the state at the end."""
    with rig.job(len(nodes), nodes=nodes) as job:
        job.all("open", str(rig.run), **KEEP, **options)
        assert [found["step"] for found in job.all("restore")] == [expect] * len(nodes)
        for step in steps:
            job.all("train", step)
            job.all("save", step, wait=True)
        found = job.all("digest")
        job.all("close")
    return found


def files(rig: Rig, node: str) -> set[str]:
    """What a node has of the newest checkpoint."""
    newest = max((disk(rig, node) / "checkpoints").glob("*/*"))
    return {path.name for path in newest.iterdir()}


def end_agents(rig: Rig) -> None:
    for pid in list(rig.processes()):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not rig.processes(), "the end of all agents")


def test_each_node_writes_to_its_disk_and_restores_from_it(rig: Rig) -> None:
    """All processes are killed; the same nodes come again."""
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **KEEP)
        job.all("train", 2)
        job.all("save", 2, wait=True)
        before = job.all("digest")
        job.kill()
    end_agents(rig)
    common = {"manifest.json"}
    assert files(rig, "a") == common | {"00000-00000.0.safetensors", "node-00000.json", "node-00000.objects"}
    assert files(rig, "b") == common | {"00001-00001.0.safetensors", "node-00001.json", "node-00001.objects"}
    assert not list(rig.run.iterdir())  # the host's directory under the nodes' disks
    with rig.job(2, nodes=["a", "b"]) as job:
        assert [entry["incarnation"] for entry in job.all("open", str(rig.run), **KEEP)] == [2, 2]
        assert [found["step"] for found in job.all("restore")] == [2, 2]
        assert job.all("digest") == before
        job.all("close")
    assert "node-local flash: each of 2 nodes" in job[0].output


def test_ranks_that_moved_between_nodes_read_over_the_network(rig: Rig) -> None:
    before = save_steps(rig, ["a", "b"], 1, 2)
    end_agents(rig)
    assert save_steps(rig, ["b", "a"], expect=2) == before
    end_agents(rig)
    # Another number of ranks, on three nodes, of which one is new: it gets the small files, and the others' bytes.
    grown = save_steps(rig, ["c", "a", "b"], expect=2)
    assert all(digest == before[0] for digest in grown)
    assert files(rig, "c") == {"manifest.json"}


def test_a_lost_node_is_named_and_the_newest_checkpoint_without_it_is_used(rig: Rig) -> None:
    first = save_steps(rig, ["a", "b"], 1)
    save_steps(rig, ["a", "b", "c"], 2, expect=1)
    end_agents(rig)
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **KEEP)
        found = job.all("restore")
        assert [entry["step"] for entry in found] == [1, 1]
        assert found[0]["skipped"] == found[1]["skipped"] and len(found[0]["skipped"]) == 1
        assert "step 2 cannot be used" in found[0]["skipped"][0] and "node c" in found[0]["skipped"][0]
        assert job.all("digest") == first
        job.all("train", 3)
        job.all("save", 3, wait=True)
        job.all("close")
    end_agents(rig)
    shutil.rmtree(disk(rig, "b"))  # replaced by an empty one
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), **KEEP)
        errors = job.each("restore")
        for error in errors:
            assert isinstance(error, RankError) and error.name == "StepNotFoundError"
            assert "node b" in str(error)
        job.kill()


def test_a_process_that_wakes_up_after_a_newer_incarnation_commits_nothing(rig: Rig) -> None:
    """Its flusher is stopped just before it publishes; its agents are stopped, too."""
    stopped = rig.directory / "stopped"
    stop = fail_at(None, 2, "publish", process="flusher", action="stop", marker=stopped)
    with rig.job(2, environment(stop), nodes=["a", "b"]) as old:
        old.all("open", str(rig.run), request_timeout_s=2, on_failure="warn", max_failures=0)
        old.all("train", 1)
        old.all("save", 1, wait=True)
        old.all("save", 2)
        until(stopped.exists, "the flusher's stop")
        before = rig.processes()
        flushers = rig.flusher_pids()
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        with rig.job(2, nodes=["a", "b"]) as new:
            new.all("open", str(rig.run))
            assert [found["step"] for found in new.all("restore")] == [1, 1]
            for pid in before:
                os.kill(pid, signal.SIGCONT)
            for entry in old.all("settle", 2):
                # The old agent of the other node may have gone before its flusher, which was stopped, asks it.
                assert entry["state"] == "failed" and entry["error"] in ("SupersededError", "StorageError"), entry
            assert flushers
            new.all("train", 3)
            new.all("save", 3, wait=True)
            new.all("close")
    for node in "ab":
        assert rig.steps(disk(rig, node)) == [1, 3]


def test_an_agent_that_is_killed_is_replaced_and_knows_the_other_disks(rig: Rig) -> None:
    """On either node; the next save is made, and what is committed is known."""
    with rig.job(2, nodes=["a", "b"]) as job:
        job.all("open", str(rig.run), on_failure="warn", max_failures=0, **KEEP)
        job.all("train", 1)
        job.all("save", 1, wait=True)
        for rank, step in ((1, 2), (0, 3)):
            os.kill(job[rank].call("facts")["agent_pid"], signal.SIGKILL)

            def saved(step: int = step) -> bool:
                said = job.each("save", step, overwrite=True)
                return all(
                    not isinstance(s, Exception) and job[r].call("settle", step)["state"] == "durable"
                    for r, s in enumerate(said)
                )

            job.all("train", step)
            until(saved, "a save after the agent's death")
        found = job.all("restore")
        assert [entry["step"] for entry in found] == [3, 3]
        job.all("close")
    for node in "ab":
        assert rig.steps(disk(rig, node)) == [1, 2, 3]


def test_nodes_of_which_some_see_another_directory_are_refused(rig: Rig) -> None:
    with rig.job(3, nodes=["a", "b", "c"], shared=["a", "b"]) as job:
        for error in job.each("open", str(rig.run)):
            assert isinstance(error, RankError) and error.name == "ConfigurationError"
            assert "b see the run directory of node a, and c do not" in error.text
        assert not [path for path in rig.run.iterdir() if not path.name.startswith(".")]
        job.kill()


def test_two_runs_under_one_path_are_not_joined(rig: Rig) -> None:
    save_steps(rig, ["a"], 1)
    save_steps(rig, ["b"], 1)
    end_agents(rig)
    with rig.job(2, nodes=["a", "b"]) as job:
        for error in job.each("open", str(rig.run)):
            assert isinstance(error, RankError) and error.name == "ConfigurationError"
            assert "nodes a and b hold different runs" in error.text
        job.kill()


def test_nodes_that_share_a_directory_are_found_to(rig: Rig) -> None:
    with rig.job(2, nodes=["a", "b"], shared=["a", "b"]) as job:
        job.all("open", str(rig.run))
        job.all("train", 1)
        job.all("save", 1, wait=True)
        job.all("close")
        assert "shared flash: 2 nodes see one run directory" in job[0].output
    assert rig.verified_steps() == [1]


def test_the_command_line_on_one_node_says_what_is_elsewhere(rig: Rig) -> None:
    save_steps(rig, ["a", "b"], 1)
    end_agents(rig)

    def safehold(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "safehold", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=rig.environment())

    listed = safehold("ls", str(disk(rig, "a")))
    assert listed.returncode == 0 and "partial here: not what node b saved" in listed.stdout
    checked = safehold("verify", str(disk(rig, "b")))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "node a: what it saved is on its own disk, and was not read" in checked.stdout + checked.stderr
    pack = next(disk(rig, "b").glob("checkpoints/*/*/*.safetensors"))
    pack.write_bytes(pack.read_bytes()[:-1])
    assert safehold("verify", str(disk(rig, "b"))).returncode == 6
