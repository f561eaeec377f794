"""Replicas on several hosts restore from shared flash: it is read once for all of them, and what fails on the way is read again."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from safehold.host.runtime import list_slots
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
        wanted = hashes(ended(found)).pop()
    without_memory(hosts)
    return wanted


def without_memory(hosts: Hosts) -> None:
    """Wait until the agents of the last job, and what they hold in memory, have gone."""
    until = time.monotonic() + 20.0
    while any(slot.is_locked() for host in hosts for slot in list_slots(host.runtime)):
        assert time.monotonic() < until
        time.sleep(0.02)


def hashes(found: Job) -> set[str]:
    return set(re.findall(r"hash (\w+)", found.text))


def facts(found: Job, num_ranks: int) -> list[dict[str, Any]]:
    texts = [re.findall(r"restored (.*)", found.output(rank))[-1] for rank in range(num_ranks)]
    return [json.loads(text) for text in texts]


def sources(hosts: Hosts) -> list[str]:
    """Where each host's agent had the documents from, as its log tells; the log is emptied."""
    found = []
    for host in hosts:
        for log in host.runtime.rglob("agent.log"):
            found += re.findall(r"documents note:.* source (node host-\d|storage)", log.read_text())
            log.write_text("")
    return sorted(found)


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
    assert {entry["documents"] for entry in told} == {"agent"}, found.tail()
    assert sources(four_hosts) == ["node host-0"] * 3 + ["storage"]
    nodes = [told[ranks * node]["node"] for node in range(4)]
    assert sum(nodes) == sum(entry["storage"] for entry in told) and max(nodes) < 0.4 * size
    without_memory(four_hosts)
    with job(four_hosts, ranks=ranks, restore_pass_on="off") as found:
        ended(found)
    told = facts(found, 4 * ranks)
    assert hashes(found) == {wanted} and {entry["source"] for entry in told} == {"flash"}
    assert sum(entry["storage"] for entry in told) >= 4 * ranks * size
    assert {entry["documents"] for entry in told} == {"storage"} and not sources(four_hosts)


def slow(hosts: Hosts, mib_s: float) -> list[str]:
    return ["--slow", str(hosts.shared / "rate"), str(mib_s * (1 << 20))]


def test_a_host_that_is_cut_off_while_it_serves_is_replaced_by_storage(four_hosts: Hosts) -> None:
    wanted = saved(four_hosts, mib=2 * MIB)
    settings = {"storage_interface": "storage", "peer_timeout_s": 9.0}
    with job(four_hosts, *slow(four_hosts, 32), mib=2 * MIB, **settings) as found:
        for rank in range(4):
            found.until("restoring", rank=rank, timeout_s=40)
        time.sleep(1.0)
        four_hosts[3].cut("storage")
        time.sleep(6.5)
        four_hosts[3].heal("storage")
        ended(found)
    assert hashes(found) == {wanted}
    told = facts(found, 4)
    for rank in range(3):
        assert "peers, node host-3" in found.output(rank), found.output(rank)
        assert told[rank]["source"] == "flash+peers"
    assert re.search(r"peers, node host-[012]", found.output(3)), found.output(3)
    assert sum(entry["storage"] for entry in told) < 6 * (MIB << 20), "the others still pass on to each other"


def test_a_host_that_dies_while_it_serves_ends_the_restore_by_name_and_the_next_is_whole(four_hosts: Hosts) -> None:
    wanted = saved(four_hosts)
    with job(four_hosts, *slow(four_hosts, 16), peer_timeout_s=4.0) as found:
        for rank in range(4):
            found.until("restoring", rank=rank, timeout_s=40)
        time.sleep(1.0)
        found.kill_host(2)
        found.until("failed RankLostError", rank=0, timeout_s=30)
        found.until("failed RankLostError", rank=3, timeout_s=30)
        found.kill()
        found.wait(20)
    four_hosts.replace(2)
    with job(four_hosts) as found:
        ended(found)
    assert hashes(found) == {wanted}
