"""What works over several hosts with a run directory that they share: jobs that move, jobs that collide, and saves without an agent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safehold.testing.hosts import Hosts, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "jobs.py"


def test_a_save_without_an_agent_spans_hosts(two_hosts: Hosts) -> None:
    run = str(two_hosts.shared / "run")
    with run_job(two_hosts, 1, SCRIPT, ["save", run]) as job:
        assert job.wait(30) == [0, 0], job.tail()
    with run_job(two_hosts, 1, SCRIPT, ["load", run]) as job:
        assert job.wait(30) == [0, 0], job.tail()
    assert [job.output(rank).splitlines()[-1] for rank in range(2)] == ["loaded 499500 0 3"] * 2
    with run_job(two_hosts, 1, SCRIPT, ["load", run], on=[1]) as job:
        assert job.wait(30) == [0], job.tail()
    assert job.output(0).splitlines()[-1] == "loaded 499500 0 3"


def test_a_job_whose_node_is_lost_resumes_on_another(two_hosts: Hosts) -> None:
    run = str(two_hosts.shared / "run")
    with run_job(two_hosts, 2, SCRIPT, ["train", run, "3", "/never"], on=[0]) as job:
        job.until("saved 3", timeout_s=30)
        job.kill_host(0)
        assert job.wait(10) == [-9, -9]
    with run_job(two_hosts, 1, SCRIPT, ["train", run, "1"], on=[1]) as job:
        assert job.wait(30) == [0], job.tail()
    assert "restored 3 6000" in job.output(0) and "saved 4" in job.output(0)
    drawn = two_hosts.timeline.render().splitlines()
    assert re.fullmatch(r"host-0 -*R+[-RC]*C[-RC]*X", drawn[0]) and re.search(r"-R-*C", drawn[1])


def test_of_two_jobs_on_two_hosts_the_older_is_told(two_hosts: Hosts) -> None:
    run, go = str(two_hosts.shared / "run"), two_hosts.shared / "go"
    with run_job(two_hosts, 1, SCRIPT, ["train", run, "1", str(go)], on=[0]) as older:
        older.until("saved 1", timeout_s=30)
        with run_job(two_hosts, 1, SCRIPT, ["train", run, "1"], on=[1]) as newer:
            assert newer.wait(30) == [0], newer.tail()
        assert "restored 1 1000" in newer.output(0)
        go.touch()
        assert older.wait(30) == [1]
    assert "saved once more" not in older.output(0)
    assert "SupersededError" in older.output(0)
