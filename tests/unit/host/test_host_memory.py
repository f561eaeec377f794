"""Readings of memory: the least that machine and control groups allow."""

import pytest

from safehold.errors import ConfigurationError
from safehold.host import memory
from safehold.host.memory import available_memory, budget_bytes

GIB = 1 << 30


def machine(tmp_path, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal:       {64 << 20} kB\nMemFree:         1024 kB\nMemAvailable:   {48 << 20} kB\nHugePages_Total:       0\n"
    )
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return tmp_path


def test_a_machine_without_groups(tmp_path):
    found = available_memory(machine(tmp_path, {}))
    assert (found.total_bytes, found.available_bytes, found.limited_by) == (64 * GIB, 48 * GIB, "machine")


def test_the_tightest_group_above_counts(tmp_path):
    top = "sys/fs/cgroup"
    found = available_memory(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/job/step\n",
                f"{top}/job/step/memory.max": "max\n",
                f"{top}/job/memory.max": 16 * GIB,
                f"{top}/job/memory.current": 10 * GIB,
                f"{top}/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            },
        )
    )
    assert (found.total_bytes, found.available_bytes) == (16 * GIB, 8 * GIB)
    assert found.limited_by == "/sys/fs/cgroup/job"


def test_version_one(tmp_path):
    top = "sys/fs/cgroup/memory"
    found = available_memory(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "3:cpu:/x\n5:memory,hugetlb:/docker/abc\n0::/x\n",
                f"{top}/memory.limit_in_bytes": 9223372036854771712,
                f"{top}/docker/abc/memory.limit_in_bytes": 8 * GIB,
                f"{top}/docker/abc/memory.usage_in_bytes": 7 * GIB,
                f"{top}/docker/abc/memory.stat": f"total_inactive_file {GIB}\n",
            },
        )
    )
    assert (found.total_bytes, found.available_bytes) == (8 * GIB, 2 * GIB)


def test_a_container_that_sees_only_its_own_mount(tmp_path):
    found = available_memory(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/../../host/path\n",
                "sys/fs/cgroup/memory.max": 4 * GIB,
                "sys/fs/cgroup/memory.current": 5 * GIB,
            },
        )
    )
    assert (found.total_bytes, found.available_bytes) == (4 * GIB, 0)


def test_this_machine():
    found = available_memory()
    assert 0 < found.available_bytes <= found.total_bytes


def test_budget():
    reading = memory.MemoryInfo(total_bytes=100, available_bytes=80, limited_by="machine")
    assert budget_bytes(reading) == 48
    assert budget_bytes(reading, share=1) == 80
    assert budget_bytes(reading, limit_bytes=70) == 70
    assert budget_bytes(reading, limit_bytes=90) == 80
    for wrong in ({"share": 0}, {"share": 1.5}, {"limit_bytes": -1}):
        with pytest.raises(ConfigurationError):
            budget_bytes(reading, **wrong)
