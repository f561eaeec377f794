"""Hosts with flash of their own: starts on some of them each, which find nothing to go on with, are in nobody's way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safehold.testing.hosts import Hosts, Job, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "training.py"
RUN = "/run/flash/run"
SETTINGS = {"peer_timeout_s": 2.0, "stall_timeout_s": 10.0}


def train(hosts: Hosts, steps: int, on: list[int] | None = None) -> Job:
    return run_job(hosts, 1, SCRIPT, [RUN, str(steps), "--settings", repr(SETTINGS)], on=on, timeout_s=60.0)


def numbers(hosts: Hosts) -> list[set[str]]:
    """The incarnations' files that each host has, with their content."""
    return [{path.name + path.read_text() for path in host.flash.glob("run/incarnations/*.json")} for host in hosts]


def test_failed_starts_on_either_half_of_the_hosts_cost_nothing(four_hosts: Hosts) -> None:
    with train(four_hosts, 2) as job:
        assert job.wait(60) == [0] * 4, job.tail()
        saved = re.findall(r"saved 2 (\w+)", job.text)[0]
    for half in ([0, 1], [2, 3]):
        with train(four_hosts, 3, on=half) as job:
            assert all(job.wait(60)), job.tail()
            assert "StepNotFoundError" in job.text, job.tail()
    found = numbers(four_hosts)
    assert found[0] == found[1] != found[2] == found[3], "they contradict each other"
    with train(four_hosts, 3) as job:
        assert job.wait(60) == [0] * 4, job.tail()
        assert set(re.findall(r"restored (\d+) (\w+)", job.text)) == {("2", saved)}
    found = numbers(four_hosts)
    assert found[0] == found[1] == found[2] == found[3]
