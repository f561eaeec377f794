"""Lets other nodes read files of this node's run directory, as bulk bytes.

Invariants: only names that this library writes, below the run directory, through no link; regular files only. Called in the network's
threads, which a dead disk may hold, never in the dispatcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from safehold.agent.net.seam import Provider, Source
from safehold.errors import from_os_error
from safehold.format import paths
from safehold.host.posix_disk import PosixDisk


def provider(root: str, *, allowed: Callable[[str], bool] = paths.is_file) -> Provider:
    """Return what gives the files of a run directory whose names are `allowed`."""
    disk = PosixDisk(root)

    def provide(node: str, name: str) -> Source | None:
        if not allowed(name):
            return None
        try:
            file = disk.open(name, "read")
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise from_os_error(exc, "opening a file for another node", tier="flash", path=name) from exc
        try:
            fd = file.duplicate()
        finally:
            file.close()
        found = os.fstat(fd)
        version = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
        return Source(fd=fd, offset=0, size=found.st_size, version=version)

    return provide
