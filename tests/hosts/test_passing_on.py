"""Replicas on several hosts restore from shared flash: it is read once for all of them, and what fails on the way is read again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from safehold.testing.hosts import Hosts, Job, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "replicas.py"
MIB = 64


def job(hosts: Hosts, *more: str, ranks: int = 1, mib: int = MIB, **settings: object) -> Job:
    settings = {"agent_linger_s": 0.0, **settings}
    args = [str(hosts.shared / "run"), str(mib), *more, "--settings", repr(settings)]
    return run_job(hosts, ranks, SCRIPT, args, timeout_s=60.0)


def ended(found: Job) -> Job:
    codes = found.wait(60)
    assert codes == [0] * len(codes), found.tail()
    return found


def saved(hosts: Hosts, **options: Any) -> str:
    with job(hosts, "--save", **options) as found:
        return hashes(ended(found)).pop()


def hashes(found: Job) -> set[str]:
    return set(re.findall(r"hash (\w+)", found.text))


def facts(found: Job, num_ranks: int) -> list[dict[str, Any]]:
    texts = [re.findall(r"restored (.*)", found.output(rank))[-1] for rank in range(num_ranks)]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_all_hosts_want_is_read_from_storage_once(four_hosts: Hosts, ranks: int) -> None:
    wanted = saved(four_hosts, ranks=ranks)
    with job(four_hosts, ranks=ranks) as found:
        ended(found)
    told = facts(found, 4 * ranks)
    assert hashes(found) == {wanted} and {entry["source"] for entry in told} == {"flash+peers"}, found.tail()
    size = MIB << 20
    assert all(sum(entry["bytes"].values()) >= size for entry in told)
    assert sum(entry["storage"] for entry in told) < 1.2 * size
    nodes = [told[ranks * node]["node"] for node in range(4)]
    assert sum(nodes) == sum(entry["storage"] for entry in told) and max(nodes) < 0.4 * size
    with job(four_hosts, ranks=ranks, restore_pass_on="off") as found:
        ended(found)
    told = facts(found, 4 * ranks)
    assert hashes(found) == {wanted} and {entry["source"] for entry in told} == {"flash"}
    assert sum(entry["storage"] for entry in told) >= 4 * ranks * size
