"""How many of the cores that this process may use are idle, from the kernel's accounting.

Invariants: an answer is about the time since the question before it; where the kernel has no answer, neither has this.
Waiting for storage counts as idle, as the kernel says: a core that waits could work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

_STAT = "/proc/stat"
_IDLE, _IOWAIT = 3, 4


class IdleCores(Protocol):
    """Tells how many cores were idle lately."""

    @property
    def num_cores(self) -> int:
        """Cores that this process may run on."""
        ...

    def sample(self) -> float | None:
        """Return how many of them were idle since the last call, 0 to `num_cores`; None: not known."""
        ...


class KernelIdleCores:
    """Reads proc(5), `/proc/stat`: time per core since the start, in ticks, by what the core did."""

    def __init__(self, read: Callable[[], str] | None = None) -> None:
        """Take the first sample; `read` returns the text (for tests)."""
        self._read = read or _read_stat
        self._cores = os.sched_getaffinity(0)
        self._last = self._ticks()

    @property
    def num_cores(self) -> int:
        """See `IdleCores`."""
        return len(self._cores)

    def sample(self) -> float | None:
        """See `IdleCores`."""
        now, last = self._ticks(), self._last
        self._last = now
        if now is None or last is None or now[1] <= last[1]:
            return None
        share = (now[0] - last[0]) / (now[1] - last[1])
        return min(1.0, max(0.0, share)) * self.num_cores

    def _ticks(self) -> tuple[int, int] | None:
        """Return the ticks that this process's cores were idle, and all their ticks."""
        try:
            text = self._read()
        except OSError:
            return None
        idle = total = 0
        for line in text.splitlines():
            name, *columns = line.split()
            if not name.startswith("cpu"):
                break
            if not name[3:].isdigit() or int(name[3:]) not in self._cores or len(columns) < 8:
                continue
            ticks = [int(column) for column in columns[:8]]  # guest time, behind them, is part of user time
            idle += ticks[_IDLE] + ticks[_IOWAIT]
            total += sum(ticks)
        return (idle, total) if total else None


def _read_stat() -> str:
    with open(_STAT, encoding="ascii") as file:
        return file.read()
