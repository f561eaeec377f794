"""How much memory this process may still take, and how much of it checkpoints may.

Invariants: the answer is the least that the machine and all control groups above this process allow (v1 and v2); it
is a reading, not a reservation. Deciding what to do with it belongs to the callers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from safehold.errors import ConfigurationError
from safehold.host import cgroups

DEFAULT_SHARE = 0.6
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """A reading of the memory of this host, as this process may use it.

    Attributes:
        total_bytes: The least of the machine's memory and the limits of the control groups.
        available_bytes: What can still be taken without pushing anybody out (page cache counts as available).
        limited_by: `machine`, or the directory of the control group that sets the least available.
    """

    total_bytes: int
    available_bytes: int
    limited_by: str


def available_memory(root: str | Path = "/") -> MemoryInfo:
    """Read how much memory is left.

    Args:
        root: Where `/proc` and `/sys` are looked for; another one is for tests.
    """
    base = Path(root)
    meminfo = _key_values(base / "proc/meminfo", factor=1024)
    total = meminfo.get("MemTotal", 0)
    available, limited_by = meminfo.get("MemAvailable", meminfo.get("MemFree", 0)), "machine"
    for group in cgroups.memory_directories(root=base):
        reading = _read_v2(group) or _read_v1(group)
        if reading is None:
            continue
        limit, left = reading
        total = min(total, limit)
        if left < available:
            available, limited_by = left, f"/{group.relative_to(base)}"
    return MemoryInfo(total_bytes=total, available_bytes=max(0, available), limited_by=limited_by)


def _read_v2(group: Path) -> tuple[int, int] | None:
    # Above `memory.high` a group is not killed, but throttled so much that it hardly moves.
    limits = (_number(group / name) for name in ("memory.max", "memory.high"))
    limit = min((found for found in limits if found is not None), default=_UNLIMITED_BYTES)
    if limit >= _UNLIMITED_BYTES:
        return None
    used = _number(group / "memory.current") or 0
    reclaimable = _key_values(group / "memory.stat").get("inactive_file", 0)
    return limit, limit - used + min(used, reclaimable)


def _read_v1(group: Path) -> tuple[int, int] | None:
    limit = _number(group / "memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    used = _number(group / "memory.usage_in_bytes") or 0
    reclaimable = _key_values(group / "memory.stat").get("total_inactive_file", 0)
    return limit, limit - used + min(used, reclaimable)


def group_limit_bytes(pid: int | None = None, *, root: str | Path = "/") -> int | None:
    """Return the least that control groups let a process and those beside it take; None: no limit, or it cannot be seen."""
    groups = cgroups.memory_directories(pid, root=root)
    return min((found[0] for group in groups if (found := _read_v2(group) or _read_v1(group))), default=None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _key_values(path: Path, *, factor: int = 1) -> dict[str, int]:
    try:
        text = path.read_text()
    except OSError:
        return {}
    found = re.findall(r"^(\w+)(?:\(\w+\))?:?\s+(\d+)", text, flags=re.MULTILINE)
    return {key: int(value) * factor for key, value in found}


def budget_bytes(memory: MemoryInfo, *, share: float = DEFAULT_SHARE, limit_bytes: int | None = None) -> int:
    """Return how much memory arenas may take: a share of what is available, or what the user set, whichever is less.

    Raises:
        ConfigurationError: `share` is not in (0, 1], or the limit is negative.
    """
    if not 0 < share <= 1:
        raise ConfigurationError(f"the share of memory must be above 0 and at most 1, not {share}")
    if limit_bytes is None:
        return int(memory.available_bytes * share)
    if limit_bytes < 0:
        raise ConfigurationError(f"a memory limit of {limit_bytes} bytes is none")
    return min(limit_bytes, memory.available_bytes)
