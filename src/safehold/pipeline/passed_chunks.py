"""A rank's part in passing chunks on between nodes: it takes chunks out of its node's cache, and reads into it what the node reads for all.

Invariants: a chunk is shown in the cache only after its blocks were compared with their checksums by who read it; whoever takes it out
verifies it again, wherever it came from. A chunk that will not come, or does not come in time, is a failed source like any other: the next
one is storage. Chunks are taken in the order of their numbers, on which the agents rely.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np

from safehold.errors import CheckpointError, ChecksumError, IntegrityError, StorageError
from safehold.format import crc
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.sources import FlashSource
from safehold.policy.passing_on import CHUNK_BYTES, Group, Numbering
from safehold.tiers.base import Tier

POLL_S: Final = 0.001
GIVEN_UP: Final = 0xFFFFFFFF


class Talk(Protocol):
    """What a rank says to its agent about chunks."""

    @property
    def alive(self) -> bool:
        """Whether the agent is there."""
        ...

    def ask(
        self, read: list[tuple[int, int]], failed: list[int], read_s: float
    ) -> tuple[Sequence[tuple[int, int]], bool]:
        """Say what was read into the cache (number, size) and what failed; returns what to read (number, slot), and whether that was all.

        Raises:
            CheckpointError: The agent is gone, or does not answer.
        """
        ...

    def used(self, number: int, *, wrong: bool) -> None:
        """Say that this rank needs a chunk no more; never raises."""
        ...


class PassedChunks:
    """See the module.

    Args:
        cache: The memory shared with the agent: a table of u4, one for each chunk, and the slots from `slots_at` on.
        slots_at: Where the slots begin.
        groups: Who reads what, as far as it concerns this node.
        node: This node.
        names: Of all nodes.
        tier: Where the checkpoint is.
        checkpoint: Its verified documents.
        talk: The way to the agent.
        patience_s: How long a chunk is waited for at most, whatever the agent thinks.
    """

    def __init__(
        self,
        cache: memoryview,
        slots_at: int,
        *,
        groups: Sequence[Group],
        node: int,
        names: Sequence[str],
        tier: Tier,
        checkpoint: Checkpoint,
        talk: Talk,
        patience_s: float,
    ) -> None:
        self.numbering = Numbering(checkpoint.plan.pack_sizes)
        self._cache, self._slots_at = cache, slots_at
        self._table: Any = np.frombuffer(cache[: 4 * self.numbering.num_chunks], "<u4")
        self._node, self._names, self._tier, self._checkpoint = node, names, tier, checkpoint
        self._talk, self._patience_s = talk, patience_s
        self._reader: dict[int, int] = {}
        for group in groups:
            self._reader.update(zip(group.chunks.tolist(), group.readers().tolist(), strict=True))
        self._packs = checkpoint.packs()
        self._crcs: dict[tuple[int, int], Any] = {}
        self._sources: dict[tuple[int, int], FlashSource] = {}
        self._left: Counter[int] = Counter()
        self._wrong: set[int] = set()
        self._lock = threading.Lock()
        self.storage_bytes = 0

    @property
    def numbers(self) -> Collection[int]:
        """The chunks that are passed on to this node, and from it."""
        return self._reader.keys()

    # -- taking out ------------------------------------------------------------------------------------------------------

    def expect(self, number: int) -> None:
        """One more read of this rank is served from this chunk."""
        self._left[number] += 1

    def expected(self, number: int) -> bool:
        """Whether this rank takes the chunk from here."""
        return number in self._left

    def ready(self, number: int) -> bool:
        """Whether nobody would wait for it."""
        return bool(self._table[number])

    def source(self, number: int, stopped: Callable[[], bool]) -> CachedChunk:
        """Return a chunk as a source of its bytes."""
        return CachedChunk(self, number, stopped)

    def name(self, number: int) -> str:
        """Return where a chunk comes from."""
        return self._tier.name if self._reader[number] == self._node else "peers"

    def label(self, number: int) -> str:
        """Return the same, with the name of the node."""
        return f"{self.name(number)}, node {self._names[self._reader[number]]}"

    def view(self, number: int, start: int, size: int, stopped: Callable[[], bool]) -> memoryview:
        """Return bytes of a chunk, once they are there.

        Raises:
            StorageError: They will not be.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            found = int(self._table[number])
            if found == GIVEN_UP:
                raise StorageError("it did not pass its chunks on", tier="peers")
            if found:
                at = self._slots_at + (found - 1) * CHUNK_BYTES + start
                return self._cache[at : at + size]
            if stopped() or not self._talk.alive:
                raise StorageError("the agent of this node is gone, and with it what was passed on", tier="peers")
            if time.monotonic() > deadline:
                raise StorageError(f"nothing came within {self._patience_s:g} s", tier="peers")
            time.sleep(POLL_S)

    def taken(self, number: int, *, wrong: bool) -> None:
        """A read was served from a chunk, or from elsewhere; `wrong`: the chunk's bytes did not verify."""
        with self._lock:
            self._left[number] -= 1
            if wrong:
                self._wrong.add(number)
            last, bad = not self._left[number], number in self._wrong
        if last:
            self._talk.used(number, wrong=bad)

    # -- reading for all -------------------------------------------------------------------------------------------------

    def read_for_all(
        self, turn: AbstractContextManager[Any], stopped: Callable[[], bool], moved: Callable[[], None]
    ) -> None:
        """Read from storage into the cache until the node's share is done; run by a few threads.

        Args:
            turn: Held while storage is read.
            stopped: Asked between chunks whether to give up.
            moved: Told of each chunk.

        Raises:
            CheckpointError: The agent is gone, or does not answer.
        """
        read: list[tuple[int, int]] = []
        failed: list[int] = []
        slowest_s = 0.0
        while not stopped():
            chunks, over = self._talk.ask(read, failed, slowest_s)
            if over:
                return
            read, failed = [], []
            for number, slot in chunks:
                begun = time.monotonic()
                size = self._read_one(number, slot, turn)
                slowest_s = max(slowest_s, time.monotonic() - begun)
                if size:
                    read.append((number, size))
                else:
                    failed.append(number)
                moved()

    def _read_one(self, number: int, slot: int, turn: AbstractContextManager[Any]) -> int:
        """Read and verify a chunk into a slot; returns its size, or 0 where that failed: who wants it finds out why, from storage."""
        rank, part, offset, size = self.numbering.locate(number)
        at = self._slots_at + slot * CHUNK_BYTES
        try:
            with turn:
                data = self._source(rank, part).read(offset, size, self._cache[at : at + size])
            first = offset // crc.BLOCK_BYTES
            found = crc.crc_blocks(data)
            if not np.array_equal(found, self._expected(rank, part)[first : first + len(found)]):
                raise ChecksumError("a block does not match its checksum")
        except (IntegrityError, StorageError):
            return 0
        with self._lock:
            self.storage_bytes += size
        return size

    def _source(self, rank: int, part: int) -> FlashSource:
        with self._lock:
            found = self._sources.get((rank, part))
            if found is None:
                path = self._checkpoint.pack_path(rank, part)
                found = self._sources[rank, part] = FlashSource(self._tier, path, shared=False)
            return found

    def _expected(self, rank: int, part: int) -> Any:
        found = self._crcs.get((rank, part))
        if found is None:
            found = self._crcs[rank, part] = crc.decode_crcs(self._packs[rank, part].block_crcs)
        return found

    def close(self) -> None:
        """Close the files, and let go of the memory."""
        for source in self._sources.values():
            source.close()
        self._table = np.zeros(0, np.uint32)


class CachedChunk:
    """A chunk in the node's cache, as a `sources.Source`; offsets are those of its pack."""

    verified = False

    def __init__(self, passed: PassedChunks, number: int, stopped: Callable[[], bool]) -> None:
        self.name, self.label = passed.name(number), passed.label(number)
        self._passed, self._number, self._stopped = passed, number, stopped
        self.came = False

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """See `sources.Source`; nothing is copied."""
        found = self._passed.view(self._number, offset % CHUNK_BYTES, size_bytes, self._stopped)
        self.came = True
        return found


def quietly(work: Callable[[], None]) -> None:
    """Do what may end with the agent, of which whoever votes hears."""
    try:
        work()
    except CheckpointError:
        pass
