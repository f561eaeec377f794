"""Hosts with flash of their own, which is lost with them: redundancy gives back what it promises, and what is more is named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import hosts_or_skip

from safehold.testing.hosts import Host, Hosts, Job, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "training.py"
STEPS = 4
RUN = "/run/flash/run"
FAST = {"peer_timeout_s": 2.0, "stall_timeout_s": 10.0}


@pytest.fixture
def hosts(host_zygote, tmp_path: Path) -> Iterator[Hosts]:
    with hosts_or_skip(4, host_zygote, tmp_path) as found:
        yield found


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
    def there() -> bool:
        return all(records(host, step) for host in hosts)

    import time

    deadline = time.monotonic() + 20
    while not there():
        assert time.monotonic() < deadline, job.tail()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(host_zygote, tmp_path_factory) -> str:
    """What all runs of four ranks must come to."""
    with hosts_or_skip(4, host_zygote, tmp_path_factory.mktemp("unbroken")) as hosts, train(hosts) as job:
        found = finals(ended(job))
    assert len(found) == 1
    return found.pop()


def stop_after(hosts: Hosts, step: int, lost: Sequence[int], *, in_save: bool = False, **settings: object) -> str:
    """Train until a step is protected, lose hosts, with the job in the middle of the next save or not; return the step's hash."""
    go = hosts.shared / f"go-{step}"
    with train(hosts, "--pause-at", str(step), str(go), **settings) as job:
        job.until("pausing", rank=0, timeout_s=40)
        until_protected(job, list(hosts), step)
        if in_save:
            go.touch()
            job.until(f"saving {step + 1}", timeout_s=20)
        for index in lost:
            job.kill_host(index)
        job.kill()
        job.wait(20)
    return dict(re.findall(r"saved (\d) (\w+)", job.text))[str(step)]


@pytest.mark.parametrize(
    ("scheme", "lost", "source"),
    [({"copies": 1}, [2], "copy"), ({"parity": "xor:4"}, [0], "parity"), ({"parity": "rs:2+2"}, [1, 3], "parity")],
)
def test_lost_hosts_are_replaced_and_the_run_ends_alike(
    hosts: Hosts, unbroken: str, scheme: dict[str, object], lost: list[int], source: str
) -> None:
    wanted = stop_after(hosts, 2, lost, **scheme)
    for index in lost:
        hosts.replace(index)
    with train(hosts, **scheme) as job:
        ended(job)
        assert restored(job, lost[0])[:2] == (2, wanted)
        assert source in restored(job, lost[0])[2] or source in restored(job, 0)[2], job.tail()
        assert finals(job) == {unbroken}
