"""Where the bytes of a pack can be had when a restore reads: an arena of this node, a tier.

Invariant: a source hands out bytes as it found them, and verifies nothing; who reads does.
"""

from __future__ import annotations

import threading
from typing import Protocol

from safehold.errors import TornFileError
from safehold.tiers.base import PackReader, Tier


class Source(Protocol):
    """Where a pack's bytes can be had."""

    name: str
    label: str
    verified: bool

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """Return `size_bytes` bytes from `offset` of the pack, in `buffer` or in memory of the source's own."""
        ...


class MemorySource:
    """A pack in an arena of this node; `verified` if its agent has compared it with its checksums."""

    name = label = "memory"

    def __init__(self, view: memoryview, *, verified: bool = False) -> None:
        self._view = view
        self.verified = verified

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """See `Source`; nothing is copied."""
        found = self._view[offset : offset + size_bytes]
        if len(found) != size_bytes:
            raise TornFileError("the arena is shorter than the pack", tier="memory")
        return found


class FlashSource:
    """A pack on a tier, opened at first use."""

    def __init__(self, tier: Tier, path: str, *, shared: bool) -> None:
        self.name = self.label = tier.name
        self.verified = False
        self._tier, self._path, self._shared = tier, path, shared
        self._reader: PackReader | None = None
        self._missing: FileNotFoundError | None = None
        self._lock = threading.Lock()

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """See `Source`."""
        with self._lock:
            if self._reader is None and self._missing is None:
                try:
                    self._reader = self._tier.open_pack(self._path, direct=not self._shared)
                except FileNotFoundError as exc:
                    self._missing = exc
            if self._reader is None:
                raise TornFileError("the pack is missing", path=self._path, tier=self.name) from self._missing
        target = buffer[:size_bytes]
        self._reader.read_into(offset, target)
        return target

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()
