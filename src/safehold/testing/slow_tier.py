"""Storage that many processes share and that has a bound: a tier whose reads of packs together are no faster than a rate.

The bound is kept in a file that all processes open; so it holds over hosts that are namespaces of one machine, as a link to storage would.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Any

from safehold.tiers.base import PackReader, Tier

_TIMES = struct.Struct("<dQ")


class SharedRate:
    """Bytes per second for all who open the same file.

    Args:
        path: The file; made if it is not there.
        bytes_s: The rate.
    """

    def __init__(self, path: str | os.PathLike[str], bytes_s: float) -> None:
        self._path, self._bytes_s = Path(path), bytes_s

    def take(self, num_bytes: int) -> None:
        """Wait for one's turn, and as long as so many bytes take."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            free_at, total = self._read(fd)
            end = max(free_at, time.monotonic()) + num_bytes / self._bytes_s
            os.pwrite(fd, _TIMES.pack(end, total + num_bytes), 0)
        finally:
            os.close(fd)
        time.sleep(max(0.0, end - time.monotonic()))

    def total_bytes(self) -> int:
        """Return what all have taken."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return self._read(fd)[1]
        finally:
            os.close(fd)

    @staticmethod
    def _read(fd: int) -> tuple[float, int]:
        data = os.pread(fd, _TIMES.size, 0)
        return _TIMES.unpack(data) if len(data) == _TIMES.size else (0.0, 0)


class SlowTier:
    """A tier around another one whose packs are read at a rate; else it is the other one.

    Args:
        inner: Does the work.
        rate: The bound.
    """

    def __init__(self, inner: Tier, rate: SharedRate) -> None:
        self._inner, self._rate = inner, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_pack(self, path: str, *, direct: bool = True) -> PackReader:
        """Open a pack whose reads wait for their turn."""
        return _SlowReader(self._inner.open_pack(path, direct=direct), self._rate)


class _SlowReader:
    def __init__(self, inner: PackReader, rate: SharedRate) -> None:
        self._inner, self._rate = inner, rate

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    @property
    def alignment(self) -> int:
        return self._inner.alignment

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._rate.take(len(buffer))
        self._inner.read_into(offset, buffer)

    def close(self) -> None:
        self._inner.close()
