"""Owning every process that a run starts, agents that outlive their trainers included, so that none is left behind.

Linux hands orphans to the nearest "subreaper": with `adopt_orphans`, whatever a descendant leaves running becomes our child, and can
be found, measured and ended by us. Needs the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What /proc says of one process; sizes are resident bytes, `cpu_s` includes the children it waited for."""

    pid: int
    command: str
    anon_bytes: int
    shared_bytes: int
    cpu_s: float


def adopt_orphans() -> None:
    """Make this process the new parent of its descendants' orphans."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, path.read_text().split())


def descendants(pid: int | None = None) -> list[int]:
    """Return all processes below `pid` (ourselves), parents first."""
    found: list[int] = []
    todo = [pid or os.getpid()]
    while todo:
        for child in _children(todo.pop(0)):
            if child not in found:
                found.append(child)
                todo.append(child)
    return found


def facts(pid: int) -> ProcessFacts | None:
    """Return what a process uses, or None if it is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = sum(int(stat[index]) for index in (11, 12, 13, 14)) / _TICKS_PER_S
    except (OSError, ValueError):
        return None

    def size(key: str) -> int:
        return int(status.get(key, "0 kB").split()[0]) * 1024

    return ProcessFacts(
        pid=pid, command=command, anon_bytes=size("RssAnon"), shared_bytes=size("RssShmem"), cpu_s=cpu_s
    )


def reap() -> None:
    """Collect children that have ended; only for a process that does not wait for them in another way at this moment."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def stop_all(*, grace_s: float = 5.0) -> int:
    """End all descendants, politely first; return how many there were. Nothing of ours runs when this returns."""
    stopped: set[int] = set()
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + wait_s
        told: set[int] = set()
        while True:
            reap()
            running = descendants()
            if not running:
                return len(stopped)
            for pid in running:
                if pid not in told:
                    told.add(pid)
                    stopped.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    return len(stopped)


def with_environment(name: str, value: str, *, containing: str) -> list[int]:
    """Return the processes whose environment has `name` = `value` and whose command line contains a text."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if containing in command:
                        found.append(int(entry.name))
    return sorted(found)


def shared_memory_bytes() -> int:
    """Return the machine's shared memory in use, arenas included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0
