"""Hosts with flash of their own, which is lost with them: redundancy gives back what it promises, and what is more is named."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from safehold.policy.placement import parse_scheme, place
from safehold.testing.hosts import Host, Hosts, Job, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "training.py"
STEPS = 4
RUN = "/run/flash/run"
FAST = {"peer_timeout_s": 2.0, "stall_timeout_s": 10.0}


@pytest.fixture
def hosts(four_hosts: Hosts) -> Hosts:
    return four_hosts


def train(hosts: Hosts, *more: str, ranks: int = 1, on: list[int] | None = None, **settings: object) -> Job:
    args = [RUN, str(STEPS), *more, "--settings", repr({**FAST, **settings})]
    return run_job(hosts, ranks, SCRIPT, args, on=on, timeout_s=60.0)


def ended(job: Job) -> Job:
    codes = job.wait(60)
    assert codes == [0] * len(codes), job.tail()
    return job


def finals(job: Job) -> set[str]:
    return set(re.findall(r"final (\w+)", job.text))


def restored(job: Job, rank: int = 0) -> tuple[int, str, str]:
    found = re.findall(r"restored (\d+) (\w+) (\S+)", job.output(rank))
    assert found, job.tail()
    return int(found[-1][0]), found[-1][1], found[-1][2]


def records(host: Host, step: int) -> list[str]:
    """The redundancy records that a host has of a step."""
    return sorted(path.name for path in host.flash.glob(f"run/checkpoints/{step:09d}/*/redundancy-*.json"))


def until_protected(job: Job, hosts: Sequence[Host], step: int) -> None:
    deadline = time.monotonic() + 30
    while not all(records(host, step) for host in hosts):
        assert time.monotonic() < deadline, job.tail()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(host_zygote, tmp_path_factory) -> str:
    """What all runs of four ranks must come to."""
    with Hosts(4, root=tmp_path_factory.mktemp("unbroken") / "hosts", zygote=host_zygote) as hosts, train(hosts) as job:
        found = finals(ended(job))
    assert len(found) == 1
    return found.pop()


def stop_after(
    hosts: Hosts,
    step: int,
    lost: Sequence[int],
    *,
    in_save: bool = False,
    on: list[int] | None = None,
    **settings: object,
) -> dict[int, str]:
    """Train until a step is protected, then lose hosts, in the middle of the next save or not; return the hash of each step."""
    go = hosts.shared / f"go-{step}"
    with train(hosts, "--pause-at", str(step), str(go), on=on, **settings) as job:
        job.until("pausing", rank=0, timeout_s=40)
        until_protected(job, [hosts[index] for index in on or range(len(hosts))], step)
        if in_save:
            go.touch()
            job.until(f"saving {step + 1}", timeout_s=20)
        for index in lost:
            job.kill_host(index)
        job.kill()
        job.wait(20)
    return {int(number): found for number, found in re.findall(r"(?:saved|restored) (\d) (\w+)", job.text)}


@pytest.mark.parametrize(
    ("scheme", "lost", "in_save", "source"),
    [
        ({"copies": 1}, [2], True, "copy"),
        ({"parity": "xor:4"}, [0], True, "parity"),
        ({"parity": "rs:2+2"}, [1, 3], False, "parity"),
    ],
)
def test_lost_hosts_are_replaced_and_the_run_ends_alike(
    hosts: Hosts, unbroken: str, scheme: dict[str, object], lost: list[int], in_save: bool, source: str
) -> None:
    saved = stop_after(hosts, 2, lost, in_save=in_save, **scheme)
    for index in lost:
        hosts.replace(index)
    with train(hosts, **scheme) as job:
        ended(job)
        step, found, sources = restored(job, lost[0])
        assert step in ((2, 3) if in_save else (2,)) and saved.get(step, found) == found
        assert source in sources.split("+") and "rebuilding step" in job.text, job.tail()
        assert finals(job) == {unbroken}
    for host in hosts:
        assert records(host, STEPS), "what was saved last is protected when the job has ended"


def test_what_was_given_back_survives_the_next_loss(hosts: Hosts, unbroken: str) -> None:
    """First a host is lost, then the one that had its copy; both have replacements. In between nothing is saved."""
    stop_after(hosts, 2, [2], copies=1)
    hosts.replace(2)
    go = hosts.shared / "go"
    with train(hosts, "--pause-at", "2", str(go), copies=1) as job:
        job.until("rebuilt step 2", rank=0, timeout_s=40)
        until_protected(job, list(hosts), 2)
        partner = partner_of(hosts, 2)
        job.kill_host(partner)
        job.kill()
        job.wait(20)
    hosts.replace(partner)
    with train(hosts, copies=1) as job:
        ended(job)
        assert restored(job)[0] == 2 and finals(job) == {unbroken}


def partner_of(hosts: Hosts, index: int) -> int:
    """Which host holds the copy of another's files: the layout of `copies=1` over four nodes without domains."""
    scheme = parse_scheme(copies=1)
    assert scheme is not None
    of = place(scheme, range(len(hosts))).set_of(index)
    assert of is not None
    return next(node for node in of.members if node != index)


def test_one_more_loss_than_promised_is_named(hosts: Hosts) -> None:
    stop_after(hosts, 2, [1, 2], parity="xor:4")
    for index in (1, 2):
        hosts.replace(index)
    with train(hosts, parity="xor:4") as job:
        assert all(job.wait(60)), job.tail()
    assert "StepNotFoundError" in job.text and "xor:4 survives the loss of 1" in job.text, job.tail()
    assert re.search(r"the files of nodes host-1/\w+, host-2/\w+ are lost", job.text), job.tail()


def test_fewer_hosts_restore_from_parity_and_are_protected_anew(hosts: Hosts) -> None:
    saved = stop_after(hosts, 2, [3], parity="xor:4")
    with train(hosts, "--pause-at", "3", "/never", on=[0, 1, 2], parity="xor:4") as job:
        job.until("pausing", rank=0, timeout_s=40)
        assert restored(job)[:2] == (2, saved[2]) and "parity" in restored(job)[2]
        assert "stays without the files of node host-3" in job.text
        until_protected(job, [hosts[index] for index in (0, 1, 2)], 3)
        wanted = re.findall(r"saved 3 (\w+)", job.text)[0]
        job.kill_host(1)
        job.kill()
        job.wait(20)
    hosts.replace(1)
    with train(hosts, on=[0, 1, 2], parity="xor:4") as job:
        ended(job)
        assert restored(job)[:2] == (3, wanted)


def test_a_flushed_save_that_is_lost_with_its_node_falls_back_to_the_one_in_memory(hosts: Hosts) -> None:
    """Own disks without redundancy: step 3 goes with a host, step 2 has two copies in memory; then all goes on, step 3 too."""
    settings = {"flush_every": 2, "memory_copies": 2}
    with train(hosts, "--pause-at", "3", "/never", **settings) as job:
        job.until("pausing", rank=0, timeout_s=40)
        assert "set copies or parity" in job.text, "it was said at the start"
        job.kill_host(1)
        job.kill()
        job.wait(20)
    hosts.replace(1)
    with train(hosts, **settings) as job:
        ended(job)
        assert restored(job)[0] == 2 and "saved 3" in job.output(0), job.tail()
        assert "failed" not in job.text and "not given back" not in job.text, job.tail()
