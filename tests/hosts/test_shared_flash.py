"""Jobs over several hosts that share a run directory: hosts, links and agents are lost in every phase, and nothing else is."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from safehold.host.runtime import list_slots
from safehold.testing.hosts import Host, Hosts, Job, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "training.py"
STEPS = 5
FAST = {"peer_timeout_s": 2.0}


def train(hosts: Hosts, run: str, *more: str, ranks: int = 1, on: list[int] | None = None, **settings: object) -> Job:
    args = [run, str(STEPS), *more, "--settings", repr({**FAST, **settings})]
    return run_job(hosts, ranks, SCRIPT, args, on=on, timeout_s=60.0)


def ended(job: Job) -> Job:
    codes = job.wait(60)
    assert codes == [0] * len(codes), job.tail()
    return job


def line(job: Job, what: str, rank: int = 0) -> str:
    found = [text for text in job.output(rank).splitlines() if text.startswith(what)]
    assert found, job.tail()
    return found[-1]


def agent_of(host: Host) -> int:
    """Process id of the agent, as the host sees it."""
    slots = [slot for slot in list_slots(host.runtime) if slot.is_locked()]
    assert len(slots) == 1
    info = slots[0].read_info()
    assert info is not None
    return info.pid


@pytest.fixture(scope="module")
def unbroken(host_zygote, tmp_path_factory) -> str:
    """What all runs of four ranks must come to."""
    with Hosts(4, root=tmp_path_factory.mktemp("unbroken") / "hosts", zygote=host_zygote) as hosts:
        with train(hosts, str(hosts.shared / "run")) as job:
            ended(job)
            finals = {line(job, "final", rank) for rank in range(4)}
        files = sorted(path.name for path in (hosts.shared / "run" / "checkpoints" / f"{STEPS:09d}" / "1-0").iterdir())
        assert len(files) == 4 * 3 + 1, "a pack and two small files for each host, and one manifest"
    assert len(finals) == 1
    return finals.pop()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_dies_in_a_save_is_replaced_and_the_run_ends_alike(
    four_hosts: Hosts, unbroken: str, lost: int
) -> None:
    run = str(four_hosts.shared / "run")
    with train(four_hosts, run, "--pause-at", "3", str(four_hosts.shared / "go")) as job:
        job.until("pausing", rank=0, timeout_s=40)
        (four_hosts.shared / "go").touch()
        job.until("saving 4", timeout_s=20)
        job.kill_host(lost)
        job.kill()
        job.wait(20)
    saved = dict(re.findall(r"saved (\d) (\w+)", job.output(1)))
    four_hosts.replace(lost)
    with train(four_hosts, run) as job:
        ended(job)
        step, found, _ = re.findall(r"restored (\d) (\w+) (\S+)", job.output(1))[0]
        assert int(step) in (3, 4) and saved.get(step, found) == found
        assert {line(job, "final", rank) for rank in range(4)} == {unbroken}


def test_fewer_hosts_and_moved_ranks_restore_the_same_bits(four_hosts: Hosts, unbroken: str) -> None:
    run = str(four_hosts.shared / "run")
    with train(four_hosts, run, "--pause-at", "3", "/never") as job:
        job.until("pausing", rank=0, timeout_s=40)
        job.kill()
        job.wait(20)
    _, wanted = re.findall(r"saved (3) (\w+)", job.output(0))[0]
    four_hosts[3].kill()
    with train(four_hosts, run, "--pause-at", "4", "/never", on=[2, 0, 1]) as job:
        job.until("pausing", rank=0, timeout_s=40)
        assert f"restored 3 {wanted}" in job.output(0)
        job.kill()
        job.wait(20)
    with train(four_hosts, run, ranks=2, on=[1, 0]) as job:
        ended(job)
        assert "restored 4" in job.output(3), "four ranks on two hosts take what three left"


def test_a_storage_network_that_is_cut_costs_saves_and_no_training(four_hosts: Hosts) -> None:
    run, go = str(four_hosts.shared / "run"), four_hosts.shared / "go"
    four_hosts[2].cut("storage")
    with train(four_hosts, run, storage_interface="storage", on_failure="warn", start_timeout_s=8.0) as job:
        assert all(job.wait(40)), job.tail()
    assert "RankLostError" in job.text or "DeadlineError" in job.text, job.tail()
    four_hosts[2].heal("storage")
    settings = {"storage_interface": "storage", "on_failure": "warn"}
    with train(four_hosts, run, "--pause-at", "2", str(go), **settings) as job:
        job.until("pausing", rank=0, timeout_s=40)
        four_hosts[2].cut("storage")
        go.touch()
        job.until("failed 3", timeout_s=30)
        four_hosts[2].heal("storage")
        ended(job)
    assert "host-2" in line(job, "failed 3"), line(job, "failed 3")
    assert re.search(r"saved 5", job.output(0)), "the hosts find each other again"


def test_each_host_copies_its_own_packs_to_the_second_place(two_hosts: Hosts) -> None:
    run, there = str(two_hosts.shared / "run"), two_hosts.shared / "there"
    with train(two_hosts, run, remote=str(there)) as job:
        ended(job)
    deadline = time.monotonic() + 20
    while (there / "checkpoints" / f"{STEPS:09d}" / "1-0" / "manifest.json").exists() is False:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in ("00000-00000.0.safetensors", "00001-00001.0.safetensors"):
        files = [Path(root) / "checkpoints" / f"{STEPS:09d}" / "1-0" / name for root in (run, str(there))]
        assert files[0].read_bytes() == files[1].read_bytes()
    shutil.rmtree(run)
    with train(two_hosts, run, remote=str(there)) as job:
        ended(job)
        assert f"restored {STEPS}" in job.output(0) and line(job, "restored", 1).endswith("remote")


@pytest.mark.parametrize(
    ("mounts", "words"),
    [
        ([["mount", "-t", "tmpfs", "tmpfs", "THERE"]], "sees another directory at the remote than node host-0"),
        ([["mount", "--bind", "THERE", "THERE"], ["mount", "-o", "remount,bind,ro", "THERE"]], "Read-only file system"),
    ],
    ids=["elsewhere", "read-only"],
)
def test_a_host_that_cannot_use_the_second_place_is_named_at_the_start(
    two_hosts: Hosts, mounts: list[list[str]], words: str
) -> None:
    run, there = str(two_hosts.shared / "run"), two_hosts.shared / "there"
    there.mkdir()
    for command in mounts:
        two_hosts[1].run([str(there) if word == "THERE" else word for word in command])
    with train(two_hosts, run, remote=str(there)) as job:
        assert all(job.wait(40)), job.tail()
    assert words in job.text and "node host-1" in job.text, job.tail()
    assert not list(Path(run).glob("checkpoints/*")) and not list(there.iterdir())


@pytest.mark.parametrize("host", [0, 1])
def test_an_agent_that_dies_is_replaced_and_the_next_save_is_whole(two_hosts: Hosts, host: int) -> None:
    run, go = str(two_hosts.shared / "run"), two_hosts.shared / "go"
    with train(two_hosts, run, "--pause-at", "2", str(go), on_failure="warn", max_failures=0) as job:
        job.until("pausing", rank=0, timeout_s=40)
        two_hosts[host].run(["kill", "-9", str(agent_of(two_hosts[host]))])
        go.touch()
        ended(job)
    assert re.search(r"saved 5", job.output(0)) and re.search(r"saved 5", job.output(1)), job.tail()


def test_a_host_that_was_stopped_and_wakes_up_late_commits_nothing(two_hosts: Hosts) -> None:
    run, go = str(two_hosts.shared / "run"), two_hosts.shared / "go"
    with train(two_hosts, run, "--pause-at", "2", str(go)) as older:
        older.until("pausing", rank=0, timeout_s=40)
        two_hosts[0].pause()
        with train(two_hosts, run, on=[1]) as newer:
            ended(newer)
        go.touch()
        two_hosts[0].resume()
        assert any(older.wait(60))
    assert "saved 3" not in older.output(0) + older.output(1)
    assert "SupersededError" in older.text, older.tail()
