"""Memory that an agent fills, and lends to its ranks and to other nodes for reading.

Invariants: what is lent is a duplicate, so that closing it takes nothing from under whoever reads.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

from safehold.agent.net.seam import Source
from safehold.host import memfd


class Memory(Protocol):
    """See the module.

    Attributes:
        fd: Passed to other processes of this node.
        view: The bytes, writable.
    """

    fd: int
    view: memoryview

    def source(self, size_bytes: int) -> Source | None:
        """Return the first bytes for another node to read; None once it is closed. From any thread."""
        ...

    def close(self) -> None:
        """Give it back, once nobody has it mapped any more."""
        ...


class SharedMemory:
    """The real one; see `Memory`.

    Raises:
        StorageFullError: There is no room for it.
    """

    def __init__(self, size_bytes: int, name: str) -> None:
        self.fd = memfd.create(size_bytes, name)
        try:
            self._mapping = memfd.Mapping(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = self._mapping.view
        self._lock = threading.Lock()
        self._closed = False

    def source(self, size_bytes: int) -> Source | None:
        """See `Memory`."""
        with self._lock:
            return None if self._closed else Source(fd=os.dup(self.fd), offset=0, size=size_bytes)

    def close(self) -> None:
        """See `Memory`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._mapping.close()
        os.close(self.fd)
