"""The memory of a node through which a restore passes chunks on: slots for their bytes, and a table that says what is where.

Layout, shared with the node's ranks by a memfd: a table of one little-endian u32 per chunk (`WAITING`, `GIVEN_UP`, or 1 + slot), then, at
the next page, the slots of `CHUNK_BYTES`. Ranks read the table and the slots, and write only the slot of a chunk that they were told to
read.

Invariants: the table names a slot only once the chunk's bytes are in it, and a slot is free again only after its chunk was taken out of the
table. Descriptors that others read from are duplicates, so that closing the cache takes nothing from under them. Everything but `source` is
called from the dispatcher thread.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import numpy as np

from safehold.agent.net.seam import Source
from safehold.host import memfd
from safehold.pipeline.passed_chunks import GIVEN_UP
from safehold.policy.passing_on import CHUNK_BYTES

WAITING: Final = 0


def table_bytes(num_chunks: int) -> int:
    """Return where the slots begin."""
    return -(-4 * num_chunks // memfd.PAGE_BYTES) * memfd.PAGE_BYTES


def size_bytes(num_chunks: int, num_slots: int) -> int:
    """Return the size of the whole."""
    return table_bytes(num_chunks) + num_slots * CHUNK_BYTES


class ChunkCache:
    """See the module.

    Args:
        num_chunks: Chunks of all packs.
        num_slots: How many chunks fit.

    Raises:
        StorageFullError: There is no room for it.
    """

    def __init__(self, num_chunks: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.size_bytes = size_bytes(num_chunks, num_slots)
        self.fd = memfd.create(self.size_bytes, "chunks")
        try:
            self._mapping = memfd.Mapping(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._slots_at = table_bytes(num_chunks)
        self._table: Any = np.frombuffer(self._mapping.view[: 4 * num_chunks], "<u4")
        self._slot_of: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._free = list(range(num_slots))[::-1]
        self._lock = threading.Lock()
        self._closed = False

    @property
    def num_free(self) -> int:
        """Slots without a chunk."""
        return len(self._free)

    def place(self, number: int) -> int:
        """Give a chunk a slot, the one that was freed last, since its pages are in memory; returns which."""
        slot = self._slot_of[number] = self._free.pop()
        return slot

    def view(self, number: int, size: int) -> memoryview:
        """Return the bytes of a chunk that has a slot."""
        start = self._slots_at + self._slot_of[number] * CHUNK_BYTES
        return self._mapping.view[start : start + size]

    def show(self, number: int, size: int) -> None:
        """The bytes of a chunk are there."""
        with self._lock:
            self._sizes[number] = size
            self._table[number] = self._slot_of[number] + 1

    def give_up(self, number: int) -> None:
        """The bytes of a chunk will not come; its slot, if it has one, stays taken until `free`."""
        with self._lock:
            self._table[number] = GIVEN_UP

    def free(self, number: int) -> None:
        """Nobody needs a chunk any more."""
        with self._lock:
            if self._sizes.pop(number, None) is not None:
                self._table[number] = WAITING
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._free.append(slot)

    def source(self, number: int) -> Source | None:
        """Return a chunk for another node to read, if it is there."""
        with self._lock:
            size = self._sizes.get(number)
            if size is None or self._closed:
                return None
            slot = int(self._table[number]) - 1
            return Source(fd=os.dup(self.fd), offset=self._slots_at + slot * CHUNK_BYTES, size=size)

    def close(self) -> None:
        """Give the memory back, once nobody has it mapped any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._table = np.zeros(0, np.uint32)
        self._mapping.close()
        os.close(self.fd)
