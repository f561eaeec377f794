"""Control groups: whose fate a process shares, and what of them a container sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safehold.host import cgroups
from safehold.host.cgroups import Surroundings, memory_directories, paths, surroundings
from safehold.host.memory import available_memory, group_limit_bytes

GIB = 1 << 30
V1_MOUNT = "40 30 0:36 {mounted} {place} rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "41 30 0:37 {mounted} {place} rw - cgroup2 cgroup rw,nsdelegate"


def machine(root: Path, groups: str, mounts: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")
    return root


def put(folder: Path, **files: object) -> None:
    """Write `memory.<name>` files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_a_mount_that_shows_a_part_of_the_hierarchy(tmp_path: Path) -> None:
    """A container without a control group namespace: the path is the host's, and the mount begins in the middle of it."""
    mounts = V1_MOUNT.format(mounted="/docker/abc", place="/sys/fs/cgroup/mem\\040ory")
    root = machine(tmp_path, "5:memory:/docker/abc/job/step\n", mounts)
    for depth, limit in (("", 8), ("job/", 2), ("job/step/", 4)):
        put(root / "sys/fs/cgroup/mem ory" / depth, limit_in_bytes=limit * GIB)
    top = root / "sys/fs/cgroup/mem ory"
    assert memory_directories(root=root) == [top / "job/step", top / "job", top]
    assert available_memory(root).available_bytes == group_limit_bytes(root=root) == 2 * GIB


def test_a_hierarchy_at_an_unusual_place_and_a_foreign_path(tmp_path: Path) -> None:
    mounts = "junk\n" + V2_MOUNT.format(mounted="/", place="/cg")
    root = machine(tmp_path, "0::/../other\n", mounts)
    (root / "cg").mkdir()
    assert memory_directories(root=root) == [root / "cg"]
    assert group_limit_bytes(root=root) is None


def test_where_a_group_is_throttled_counts_as_its_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job\n", V2_MOUNT.format(mounted="/", place="/sys/fs/cgroup"))
    put(root / "sys/fs/cgroup/job", max="max", high=3 * GIB, current=GIB)
    found = available_memory(root)
    assert (found.total_bytes, found.available_bytes) == (3 * GIB, 2 * GIB)
    put(root / "sys/fs/cgroup/job", max=2 * GIB)
    assert available_memory(root).available_bytes == GIB


def test_a_group_above_that_is_killed_together(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/pod/container/inner\n")
    top = root / "sys/fs/cgroup/pod/container"
    (top / "inner").mkdir(parents=True)
    for place, text in ((top / "inner", "0\n"), (top, "1\n"), (top.parent, "0\n")):
        (place / "memory.oom.group").write_text(text)
    assert surroundings(root=root).kill_together == "/sys/fs/cgroup/pod/container"
    (top.parent / "memory.oom.group").write_text("1")
    assert surroundings(root=root).kill_together == "/sys/fs/cgroup/pod", "the highest is what is killed"


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("0::/system.slice/a.service\n", "/system.slice/a.service"),
        ("5:memory:/m\n1:name=systemd:/user.slice\n0::/\n", "/user.slice"),
        ("5:memory,hugetlb:/m\n1:name=systemd:/\n0::/\n", "/m"),
        ("0::/\n", "/"),
        ("", ""),
    ],
)
def test_the_group_that_people_would_name(tmp_path: Path, groups: str, wanted: str) -> None:
    assert surroundings(root=machine(tmp_path, groups)).group == wanted


def test_what_cannot_be_seen_is_unknown(tmp_path: Path) -> None:
    assert surroundings(root=tmp_path) == Surroundings(groups={})
    assert memory_directories(root=tmp_path) == []
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    assert paths(ended) == {} and surroundings(ended).group == "" and group_limit_bytes(ended) is None


def test_a_process_of_another_container_is_in_a_group_that_cannot_be_seen(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    put(root / "sys/fs/cgroup", max=GIB, **{"oom.group": 1})
    (root / "proc/77").mkdir()
    (root / "proc/77/cgroup").write_text("0::/../other\n")
    assert surroundings(root=root).kill_together == "/sys/fs/cgroup"
    assert surroundings(77, root=root).kill_together == "" and group_limit_bytes(77, root=root) is None


def test_this_process() -> None:
    found = surroundings()
    assert found == surroundings(os.getpid()) and found.oom_score_adj is not None
    assert found.in_container == (os.readlink("/proc/self/ns/pid") != cgroups._FIRST_PROCESS_NAMESPACE)
