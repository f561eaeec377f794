"""Reads what one rank needs of a checkpoint into its live tensors, verified block by block.

Invariants: no byte reaches a tensor before the checksum of its block was compared, here, or for memory by its agent after the last process
that could write to it had ended; partial reads verify the blocks they touch and no more. A source that fails is replaced by the next
(memory, or what other nodes pass on; then the tiers; then redundancy) for the same bytes. Reads are large and in file order; what several
ranks of a node need goes through the page cache, so that storage is read once. Every read has a stall deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from safehold.errors import (
    CheckpointError,
    ChecksumError,
    CoverageError,
    DeadlineError,
    IntegrityError,
    ManifestError,
    StorageError,
    TornFileError,
)
from safehold.format import crc, dtypes, names, paths
from safehold.format.records import PackRecord
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.copies import Copy, apply, offset_in
from safehold.pipeline.passed_chunks import PassedChunks, quietly
from safehold.pipeline.sources import FlashSource, MemorySource, Source
from safehold.policy import passing_on
from safehold.policy.resharding import PlanIndex, Transfer, byte_range, transfers
from safehold.state.fill import Target, host_buffer
from safehold.state.leaves import Destination
from safehold.tiers.base import Tier
from safehold.types import Rect

CHUNK_BYTES = 4 << 20
MEMORY_CHUNK_BYTES = 1 << 20
GAP_BYTES = 1 << 20
MAX_FAILURES = 3


@dataclass(slots=True)
class _Chunk:
    rank: int
    pack: int
    start: int
    stop: int
    copies: list[Copy] = field(default_factory=list)
    number: int = -1


@dataclass(slots=True, kw_only=True)
class RestoreFigures:
    """What a restore read: bytes by source, those that this rank read from storage (for itself and others), and seconds."""

    bytes_by_source: dict[str, int] = field(default_factory=dict)
    storage_bytes: int = 0
    seconds: float = 0.0
    replaced: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All bytes read."""
        return sum(self.bytes_by_source.values())


class Reading:
    """One rank's reading of one checkpoint.

    Args:
        tier: Where the checkpoint is.
        checkpoint: Its verified documents.
        destinations: What to fill.
        rank: This rank, whose own pieces are preferred where copies are equal.
        memory: (rank) -> the rank's packs in an arena of this node by part, or None.
        num_threads: Threads that read.
        stall_s: Seconds without progress after which the read is given up.
        shared: Whether other ranks of this node read the same bytes.
        in_memory: Whether arenas of this node hold the checkpoint: then a block is copied while it is in the cache from being
            verified, by no more threads than the rank has cores.
        verified: Ranks whose packs in memory were compared with their checksums already, and cannot have changed since.
        more_tiers: Where else the same checkpoint is, nearest first; asked where `tier` fails.
        passing: Whether some of it may be passed on between nodes: then no read crosses the border of a chunk.
        elsewhere: (rank, part) -> where a pack can be had, beside the memory of this node; None: on the tier.
        redundancy: (node of the checkpoint, pack file) -> where the pack can be had if it is lost, or None.
    """

    def __init__(
        self,
        tier: Tier,
        checkpoint: Checkpoint,
        destinations: Sequence[Destination],
        *,
        rank: int,
        memory: Callable[[int], list[memoryview] | None],
        num_threads: int,
        stall_s: float,
        shared: bool = False,
        in_memory: bool = False,
        verified: Collection[int] = (),
        more_tiers: Sequence[Tier] = (),
        passing: bool = False,
        redundancy: Callable[[int, str], Source | None] = lambda node, file: None,
        progress: Callable[[int, int], None] | None = None,
        elsewhere: Callable[[int, int], Sequence[Source]] | None = None,
    ) -> None:
        self._tier, self._tiers, self._checkpoint = tier, (tier, *more_tiers), checkpoint
        self._elsewhere = elsewhere
        self._rank, self._memory, self._redundancy = rank, memory, redundancy
        self._num_threads, self._stall_s, self._progress = num_threads, stall_s, progress
        self._shared, self._verified = shared, frozenset(verified)
        self._packs = checkpoint.packs()
        self._crcs: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self._sources: dict[tuple[int, int], list[Any]] = {}
        self._views = [view for entry in destinations for _, view in entry.leaf.pieces]
        self._chunk_bytes = MEMORY_CHUNK_BYTES if in_memory and not self._verified else CHUNK_BYTES
        self._numbering = passing_on.Numbering(checkpoint.plan.pack_sizes) if passing else None
        self._chunks = self._plan(destinations)
        self._passed: PassedChunks | None = None
        self._from_cache: deque[_Chunk] = deque()
        self._replaced: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._opening = threading.Lock()
        # While one thread verifies and copies, the others read; more reads at a time make storage slower, not faster.
        self._storage_turns = threading.Semaphore(max(1, num_threads - 1))
        self._num_applying = 0
        self._todo = deque(self._chunks)
        self._failure: BaseException | None = None
        self._moved_at = 0.0
        self._done_bytes = 0
        self.figures = RestoreFigures()

    @property
    def total_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(chunk.stop - chunk.start for chunk in self._chunks)

    @property
    def wants(self) -> tuple[int, list[int]]:
        """How many chunks the checkpoint has, and which of them are worth passing on to this rank."""
        if self._numbering is None:
            return 0, []
        covered: Counter[int] = Counter()
        for chunk in self._chunks:
            chunk.number = self._numbering.of(chunk.rank, chunk.pack, chunk.start, chunk.stop)
            covered[chunk.number] += chunk.stop - chunk.start
        del covered[-1]
        return self._numbering.num_chunks, passing_on.worth_passing(covered, self._numbering)

    def take_from(self, passed: PassedChunks) -> None:
        """Take from the node's cache what others read, and read into it what they shall have; `wants` was asked for before."""
        worth = set(self.wants[1]).intersection(passed.numbers)
        ours = sorted((chunk for chunk in self._chunks if chunk.number in worth), key=lambda chunk: chunk.number)
        self._passed, self._from_cache = passed, deque(ours)
        self._todo = deque(chunk for chunk in self._todo if chunk.number not in worth)
        for chunk in ours:
            passed.expect(chunk.number)

    def run(self) -> RestoreFigures:
        """Fill the destinations.

        Raises:
            IntegrityError: Bytes did not verify in any source; `path` names the file.
            StorageError: A source failed and there is no other.
            DeadlineError: Storage stalled; its threads are abandoned.
        """
        started = self._moved_at = time.monotonic()
        threads = [
            threading.Thread(target=self._work, name=f"restore-{number}", daemon=True)
            for number in range(min(self._num_threads, len(self._chunks)))
        ]
        if self._passed is not None:
            threads += [
                threading.Thread(target=self._read_for_all, name=f"restore-for-all-{number}", daemon=True)
                for number in range(max(1, self._num_threads - 1))
            ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                self._wait_for(thread)
        except BaseException as exc:
            self._raise_idle(exc)
        for source in [source for sources in self._sources.values() for source in sources]:
            if isinstance(source, FlashSource):
                source.close()
        if self._failure is not None:
            raise self._failure
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes)
        self.figures.replaced = [text if n == 1 else f"{text} ({n} reads)" for text, n in self._replaced.items()]
        self.figures.storage_bytes += self._passed.storage_bytes if self._passed is not None else 0
        self.figures.seconds = time.monotonic() - started
        return self.figures

    def _wait_for(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            thread.join(min(0.5, max(0.01, self._stall_s / 4)))
            if self._progress is not None:
                self._progress(self._done_bytes, self.total_bytes)
            if thread.is_alive() and time.monotonic() - self._moved_at > self._stall_s:
                text = f"no byte arrived for {self._stall_s:g} s"
                raise DeadlineError(text, path=self._tier.url, tier=self._tier.name)

    def _fail(self, exc: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or exc

    def _raise_idle(self, exc: BaseException) -> NoReturn:
        """Give up (stalled, or Ctrl-C), once no thread writes to the user's memory any more; none will begin to."""
        self._fail(exc)
        with self._lock:
            if not self._idle.wait_for(lambda: not self._num_applying, self._stall_s):
                exc.add_note("safehold: a thread may still write to the state; it did not come to an end")
        if not isinstance(exc, Exception):
            raise exc
        assert self._failure is not None
        raise self._failure

    # -- planning ----------------------------------------------------------------------------------------------------------

    def _plan(self, destinations: Sequence[Destination]) -> list[_Chunk]:
        wanted: list[tuple[str, Rect]] = []
        targets: list[Target] = []
        for entry in destinations:
            for rect, view in entry.leaf.pieces:
                wanted.append((entry.saved.name, rect))
                targets.append(Target(view, entry.saved.dtype, entry.leaf.spec.dtype))
        sizes = [dtypes.itemsize(entry.saved.dtype) for entry in destinations for _ in entry.leaf.pieces]
        copies: list[tuple[int, int, Copy]] = []
        for found in self._transfers(wanted):
            itemsize, target = sizes[found.wanted_index], targets[found.wanted_index]
            whole = wanted[found.wanted_index][1]
            for part in _bands(found, whole, itemsize, raw=target.raw is not None):
                start, stop = byte_range(part, itemsize)
                raw = offset_in(part, whole, itemsize) if target.raw is not None else -1
                copy = Copy(target, start, stop, raw, part, whole, itemsize)
                copies.extend((found.rank, found.pack, piece) for piece in _cut(copy, self._chunk_bytes))
        copies.sort(key=lambda item: (item[0], item[1], item[2].start))
        border = passing_on.CHUNK_BYTES if self._numbering is not None else 0
        return self._rotate(_chunks(copies, self._checkpoint.plan.pack_sizes, self._chunk_bytes, border))

    def _transfers(self, wanted: Sequence[tuple[str, Rect]]) -> list[Transfer]:
        try:
            return transfers(PlanIndex(self._checkpoint.plan), wanted)
        except CoverageError as exc:
            path, step = paths.plan(self._checkpoint.manifest.plan_digest), self._checkpoint.commit.step
            raise ManifestError(exc.message, path=path, step=step) from exc

    def _rotate(self, chunks: list[_Chunk]) -> list[_Chunk]:
        """Ranks that read the same start at different places, so that each byte is fetched by one and found cached by the others."""
        if not self._shared or not chunks:
            return chunks
        world = max(1, self._checkpoint.plan.world_size)
        at = (self._rank * len(chunks) // world) % len(chunks)
        return chunks[at:] + chunks[:at]

    # -- reading -----------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            buffer = host_buffer(CHUNK_BYTES + 2 * crc.BLOCK_BYTES, self._views[:1])
            while True:
                chunk = self._draw()
                if chunk is None:
                    return
                need = chunk.stop - chunk.start
                if need > len(buffer):
                    buffer = host_buffer(need, self._views[:1])
                self._one(chunk, buffer)
                self._moved_at = time.monotonic()
                with self._lock:
                    self._done_bytes += need
        except BaseException as exc:
            self._fail(exc)

    def _draw(self) -> _Chunk | None:
        """Return what to read next: what others have passed on if it is there, else what this rank reads itself, while that lasts."""
        with self._lock:
            if self._failure is not None:
                return None
            cached = self._from_cache
            if cached and self._passed is not None and (not self._todo or self._passed.ready(cached[0].number)):
                return cached.popleft()
            return self._todo.popleft() if self._todo else None

    def _read_for_all(self) -> None:
        passed = self._passed
        assert passed is not None

        def moved() -> None:
            self._moved_at = time.monotonic()

        try:
            quietly(lambda: passed.read_for_all(self._storage_turns, self._stopped, moved))
        except BaseException as exc:
            self._fail(exc)

    def _stopped(self) -> bool:
        return self._failure is not None

    def _one(self, chunk: _Chunk, buffer: memoryview) -> None:
        passed = self._passed
        if passed is None or not passed.expected(chunk.number):
            self._from_first(chunk, buffer, self._sources_of(chunk.rank, chunk.pack))
            return
        cached = passed.source(chunk.number, self._stopped)
        used: Any = None
        try:
            used = self._from_first(chunk, buffer, [cached, *self._sources_of(chunk.rank, chunk.pack)])
        finally:
            passed.taken(chunk.number, wrong=used is not cached and cached.came)

    def _from_first(self, chunk: _Chunk, buffer: memoryview, sources: Sequence[Any]) -> Any:
        """Read from the first source that has the bytes as they should be, those that keep failing last; returns it."""
        last: CheckpointError | None = None
        for source in sorted(sources, key=lambda source: self._failures[source.label] >= MAX_FAILURES):
            try:
                with self._storage_turns if isinstance(source, FlashSource) else nullcontext():
                    data = source.read(chunk.start, chunk.stop - chunk.start, buffer)
                if not source.verified:
                    self._verify(chunk, data)
            except (IntegrityError, StorageError) as exc:
                last = exc
                with self._lock:
                    self._replaced[f"{source.label}: {exc}"] += 1
                    self._failures[source.label] += 1
                continue
            self._apply(chunk, data)
            with self._lock:
                self._failures[source.label] = 0
                by = self.figures.bytes_by_source
                by[source.name] = by.get(source.name, 0) + chunk.stop - chunk.start
                if isinstance(source, FlashSource):
                    self.figures.storage_bytes += chunk.stop - chunk.start
            return source
        if last is None:
            raise TornFileError("there is no source for the pack", path=self._path(chunk))
        last.step, last.path = self._checkpoint.commit.step, self._path(chunk)
        raise last

    def _apply(self, chunk: _Chunk, data: memoryview) -> None:
        """Copy what was verified to its targets, unless the reading was given up: then the memory is no longer ours."""
        with self._lock:
            if self._failure is not None:
                return
            self._num_applying += 1
        try:
            for copy in chunk.copies:
                apply(copy, data, chunk.start)
        finally:
            with self._lock:
                self._num_applying -= 1
                self._idle.notify_all()

    def _path(self, chunk: _Chunk) -> str:
        return self._checkpoint.pack_path(chunk.rank, chunk.pack)

    def _sources_of(self, rank: int, pack: int) -> list[Any]:
        with self._opening:  # the agent may be long in answering, and who gives up takes the other lock
            found = self._sources.get((rank, pack))
            if found is None:
                found = []
                held = self._memory(rank)
                if held is not None and pack < len(held):
                    found.append(MemorySource(held[pack], verified=rank in self._verified))
                if self._elsewhere is not None:
                    found.extend(self._elsewhere(rank, pack))
                else:
                    path = self._checkpoint.pack_path(rank, pack)
                    found.extend(FlashSource(tier, path, shared=self._shared) for tier in self._tiers)
                    given = self._redundancy(self._checkpoint.plan.nodes[rank], path.rpartition("/")[2])
                    if given is not None:
                        found.append(given)
                self._sources[rank, pack] = found
            return found

    def _record(self, rank: int, pack: int) -> PackRecord:
        return self._packs[rank, pack]

    def _verify(self, chunk: _Chunk, data: memoryview) -> None:
        key = (chunk.rank, chunk.pack)
        with self._lock:
            expected = self._crcs.get(key)
            if expected is None:
                expected = self._crcs[key] = crc.decode_crcs(self._record(*key).block_crcs)
        first = chunk.start // crc.BLOCK_BYTES
        found = crc.crc_blocks(data)
        wrong = np.flatnonzero(found != expected[first : first + len(found)])
        if len(wrong):
            block = first + int(wrong[0])
            leaf = self._leaf_in(chunk, block)
            raise ChecksumError(
                f"block {block} does not match its checksum{leaf}",
                path=self._path(chunk),
                step=self._checkpoint.commit.step,
                tier=self._tier.name,
            )

    def _leaf_in(self, chunk: _Chunk, block: int) -> str:
        lo, hi = block * crc.BLOCK_BYTES, (block + 1) * crc.BLOCK_BYTES
        plan = self._checkpoint.plan
        rows = np.flatnonzero((plan.rank == chunk.rank) & (plan.pack == chunk.pack) & (plan.offset < hi))
        rows = rows[np.argsort(plan.offset[rows])]
        for row in rows[::-1]:
            spec = plan.leaves[int(plan.leaf[row])]
            ndim = len(spec.shape)
            nbytes = math.prod(plan.sizes[row][:ndim].tolist()) * dtypes.itemsize(spec.dtype)
            if nbytes and int(plan.offset[row]) + nbytes > lo:
                return f"; it has bytes of {names.display(spec.name)}"
        return ""


def _chunks(copies: Sequence[tuple[int, int, Copy]], pack_sizes: Any, chunk_bytes: int, border: int) -> list[_Chunk]:
    """Gather copies, sorted by where they are in which pack, into reads of whole checksum blocks, which do not grow over a `border`."""
    chunks: list[_Chunk] = []
    current: _Chunk | None = None
    for rank, pack, copy in copies:
        lo = copy.start // crc.BLOCK_BYTES * crc.BLOCK_BYTES
        hi = min(-(-copy.stop // crc.BLOCK_BYTES) * crc.BLOCK_BYTES, pack_sizes[rank][pack])
        fits = (
            current is not None
            and (current.rank, current.pack) == (rank, pack)
            and lo <= current.stop + GAP_BYTES
            and max(hi, current.stop) - current.start <= chunk_bytes
            and (not border or (max(hi, current.stop) - 1) // border == current.start // border)
        )
        if current is None or not fits:
            current = _Chunk(rank, pack, lo, hi)
            chunks.append(current)
        current.stop = max(current.stop, hi)
        current.copies.append(copy)
    return chunks


def _cut(copy: Copy, chunk_bytes: int) -> list[Copy]:
    """Split a copy that is contiguous on both sides at the borders of chunks; a strided one is small already."""
    if copy.raw_offset < 0:
        return [copy]
    out = []
    start = copy.start
    while start < copy.stop:
        stop = min(copy.stop, (start // chunk_bytes + 1) * chunk_bytes)
        raw = copy.raw_offset + start - copy.start
        out.append(Copy(copy.target, start, stop, raw, copy.transfer, copy.wanted, copy.itemsize))
        start = stop
    return out


def _bands(found: Transfer, wanted: Rect, itemsize: int, *, raw: bool) -> list[Transfer]:
    """Split a transfer that is not contiguous on both sides into bands of rows that are small enough to buffer."""
    if raw and offset_in(found, wanted, itemsize) >= 0:
        return [found]
    start, stop = byte_range(found, itemsize)
    part = found.part
    dim = next((d for d, size in enumerate(part.sizes) if size > 1), None)
    if stop - start <= CHUNK_BYTES or dim is None:
        return [found]
    rows = part.sizes[dim]
    per_row = max(1, (stop - start) // rows)
    step = max(1, min(rows - 1, CHUNK_BYTES // per_row))
    out: list[Transfer] = []
    for lo in range(0, rows, step):
        band = Rect(
            (*part.offsets[:dim], part.offsets[dim] + lo, *part.offsets[dim + 1 :]),
            (*part.sizes[:dim], min(step, rows - lo), *part.sizes[dim + 1 :]),
        )
        smaller = Transfer(found.wanted_index, found.rank, found.pack, found.offset, found.piece, band)
        out.extend(_bands(smaller, wanted, itemsize, raw=raw))
    return out
