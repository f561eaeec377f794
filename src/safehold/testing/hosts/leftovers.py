"""What hosts leave when their owner is killed: no processes and no networks (the kernel sees to that), but directories.

Invariants: only directories that carry the mark of an owner that has ended are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from safehold.host.process import find, start_ticks

MARK = "owner.json"
_OWN = ("hosts", "shared", "names", "lookup", MARK)


def own_directory() -> Path:
    """Where hosts without a `root` keep their directories: this user's, one for each owner."""
    return Path(tempfile.gettempdir()) / f"safehold-hosts-{os.getuid()}"


def take(root: str | Path | None, stack: contextlib.ExitStack) -> Path:
    """Make, mark and return the directory of some hosts, after sweeping what dead owners left.

    Args:
        root: Where; None: one of its own, which `stack` removes.
        stack: Gets what is to be undone.

    Raises:
        FileExistsError: Other hosts, whose owner lives, are there.
    """
    if root is None:
        base = own_directory()
        base.mkdir(mode=0o700, exist_ok=True)
        for path in base.iterdir():
            if owner_is_gone(path):
                shutil.rmtree(path, ignore_errors=True)
        found = Path(tempfile.mkdtemp(dir=base))
        stack.callback(shutil.rmtree, found, ignore_errors=True)
    else:
        found = Path(root).resolve()
        found.mkdir(parents=True, exist_ok=True)
        if (found / MARK).exists() and not owner_is_gone(found):
            raise FileExistsError(f"the hosts of a process that still runs are in {found}; choose another root")
        if owner_is_gone(found):
            for name in _OWN:
                _remove(found / name)
        if taken := [name for name in _OWN if (found / name).exists()]:
            raise FileExistsError(f"{found} has {', '.join(taken)} already; choose another root")
    owner = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    (found / MARK).write_text(json.dumps(owner))
    stack.callback((found / MARK).unlink, missing_ok=True)
    return found


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def owner_is_gone(path: Path) -> bool:
    """Return whether a directory carries a mark, and its owner has ended."""
    try:
        owner = json.loads((path / MARK).read_text())
        process = find(int(owner["pid"]), int(owner["start_ticks"]))
    except (OSError, ValueError, KeyError):
        return False
    if process is None:
        return True
    process.close()
    return False


def members(first: int) -> list[int]:
    """Numbers of all processes in the process namespace of `first`, but it itself."""
    try:
        wanted = os.readlink(f"/proc/{first}/ns/pid")
    except OSError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdecimal() and int(entry) != first and os.readlink(f"/proc/{entry}/ns/pid") == wanted:
                found.append(int(entry))
    return sorted(found)
