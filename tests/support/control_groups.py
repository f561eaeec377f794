"""Control groups for tests: made where this machine lets root make them, removed afterwards with whatever is in them.

Whether they may be made is up to the machine (containers mostly see them read-only), so a test that cannot have one is skipped, on a build
server too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

END_S = 10.0


class ControlGroup:
    """One control group, v1 or v2."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, *pids: int) -> None:
        """Move processes into it, with what they start from now on."""
        for pid in pids:
            (self.directory / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        """Numbers of its processes."""
        return [int(line) for line in (self.directory / "cgroup.procs").read_text().split()]

    def kill(self) -> None:
        """End all its processes, as what manages such groups does (v2: in one step)."""
        deadline = time.monotonic() + END_S
        while pids := self.pids():
            assert time.monotonic() < deadline, f"{pids} do not end"
            if (self.directory / "cgroup.kill").exists():
                (self.directory / "cgroup.kill").write_text("1")
            else:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def child(self, name: str) -> ControlGroup:
        """Make a group inside it."""
        (self.directory / name).mkdir()
        return ControlGroup(self.directory / name)

    def limit(self, num_bytes: int) -> None:
        """Set how much memory it may take; skips the test where nobody may say."""
        limits = {"memory.max": num_bytes, "memory.swap.max": 0}
        if not (self.directory / "memory.max").exists():
            limits = {"memory.limit_in_bytes": num_bytes, "memory.memsw.limit_in_bytes": num_bytes}
        set_now = [name for name in limits if (self.directory / name).exists()]
        for name in set_now:
            (self.directory / name).write_text(str(limits[name]))
        if set_now:
            return
        pytest.skip("the memory controller is not available in control groups here")

    def close(self) -> None:
        """Remove it, and all inside it."""
        for directory in sorted(self.directory.rglob("*"), key=lambda path: -len(path.parts)):
            if directory.is_dir():
                ControlGroup(directory).close()
        self.kill()
        deadline = time.monotonic() + END_S
        while True:
            try:
                self.directory.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def mount_of(kind: str, controller: str = "") -> Path | None:
    """Return where a hierarchy is mounted: `cgroup2`, or `cgroup` with a controller."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        found, _, options = rest.split(" ")[:3]
        if found == kind and (not controller or controller in options.split(",")):
            return Path(fields.split(" ")[4])
    return None


@contextlib.contextmanager
def group_or_skip(*mounts: Path | None) -> Iterator[ControlGroup]:
    """Make a group in the first of these hierarchies that there is."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    mount = next(filter(None, mounts), None)
    if mount is None:
        pytest.skip("the control groups that this needs are not mounted here")
    directory = mount / f"safehold-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        directory.mkdir()
    except OSError as exc:
        pytest.skip(f"control groups cannot be made here: {exc}")
    group = ControlGroup(directory)
    try:
        yield group
    finally:
        group.close()
