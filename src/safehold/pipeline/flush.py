"""Streams one rank's arena into its packs on a tier, while the rank still stages.

Invariants: a byte is read from the arena only below the staged word; its checksum is taken from the same memory that is written, and
what does not begin as a pack does is never written. While a rank waits for its staging nothing but writes is done, for a core that
checksums is one that does not copy; checksums follow once it trains again, and before the flush ends. Space is allocated before the
first copy, so a full disk is found before anything is written. What is told to be written never goes back. When `flush_rank`
returns, the packs' data is durable; directory entries and the commit are not its business.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from safehold.errors import (
    CheckpointError,
    DeadlineError,
    RankLostError,
    SkippedError,
    StorageError,
    StorageFullError,
    TornFileError,
)
from safehold.format import crc, paths
from safehold.format.pack import BLOCK, header_bytes
from safehold.format.records import PackRecord
from safehold.pipeline.pacing import Pacer
from safehold.tiers.base import PackWriter
from safehold.types import CommitId

STUCK_S = 5.0
"""How long a flush that is over, by its deadline or a failure, waits for a write that is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushJob:
    """What one rank writes.

    Attributes:
        commit: The attempt it belongs to.
        node: Index of the node.
        rank: The rank.
        packs: (arena offset, size) of each pack in bytes, ascending; all multiples of 4096.
        compare: (key, arena offset, nbytes) of ranges whose CRC32 is wanted.
        staged_total: Value of the staged word at which the arena is complete.
        block_bytes: Size of one write, a multiple of the checksum block.
        threads: Number of writing threads.
        rate_bytes_s: Upper bound of the write rate; 0: none.
        deadline_s: Seconds until the flush is given up.
        ring_bytes: 0, or the size of the arena where it is smaller than the packs: byte n of them lies at n modulo this.
        beside_training: Whether training goes on while this is staged; else it goes on only after that, and until then nothing is paced.
    """

    commit: CommitId
    node: int
    rank: int
    packs: tuple[tuple[int, int], ...]
    compare: tuple[tuple[str, int, int], ...]
    staged_total: int
    block_bytes: int
    threads: int
    rate_bytes_s: int
    deadline_s: float
    ring_bytes: int = 0
    beside_training: bool = False


@dataclass(slots=True, kw_only=True)
class FlushResult:
    """What was written: one record per pack, CRC32 of the compared ranges, and seconds."""

    packs: list[PackRecord]
    compare: dict[str, int]
    allocate_s: float
    write_s: float
    sync_s: float


class StagedWord:
    """The view of staging progress that the flush needs.

    Args:
        read: Returns the number of arena bytes that are complete.
        wait: Waits for the word to go beyond a value, up to so many seconds.
    """

    def __init__(self, read: Callable[[], int], wait: Callable[[int, float], None]) -> None:
        self.read, self.wait = read, wait


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    pack: int
    offset: int
    nbytes: int


class _Progress:
    """Hands out blocks in order, each no sooner than it is staged; shared by the writing threads."""

    def __init__(
        self, job: FlushJob, word: StagedWord, cancelled: threading.Event, flushed: Callable[[int], None]
    ) -> None:
        self._job, self._word, self._cancelled, self._flushed = job, word, cancelled, flushed
        self._changed = threading.Condition()
        self._blocks = _blocks(job)
        self._next = 0
        self._written = bytearray(len(self._blocks))
        self._prefix = 0
        self._staged = 0
        self._failure: BaseException | None = None
        self._rate_free_at = 0.0

    def fail(self, exc: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or exc
            self._changed.notify_all()

    def goes_on(self) -> bool:
        """Whether nobody failed; a flush that was cancelled fails here."""
        if self._cancelled.is_set():
            self.fail(self._abandoned())
        return self._failure is None

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def beside_training(self) -> bool:
        return self._job.beside_training or self._staged >= self._job.staged_total

    @property
    def writes_only(self) -> bool:
        """Whether a rank waits for its staging, and what is written now will lie in the arena until the end."""
        return not self.beside_training and not self._job.ring_bytes

    def watch(self, deadline: float) -> None:
        """Follow the staged word until all is staged or somebody failed; runs in the flush's own thread."""
        while True:
            staged = self._word.read()
            with self._changed:
                if staged != self._staged:
                    self._staged = staged
                    self._changed.notify_all()
                if self._failure is not None or staged >= self._job.staged_total:
                    return
            if self._cancelled.is_set():
                self.fail(self._abandoned())
                return
            if time.monotonic() > deadline:
                text = f"rank {self._job.rank} staged {staged} of {self._job.staged_total} bytes before the deadline"
                self.fail(RankLostError(text, step=self._job.commit.step, rank=self._job.rank))
                return
            self._word.wait(staged, 0.05)

    def take(self) -> _Block | None:
        """Return the next block once it is staged, or None at the end or on failure."""
        with self._changed:
            if self._next >= len(self._blocks):
                return None
            number, (pack, offset, nbytes) = self._next, self._blocks[self._next]
            self._next += 1
            end = self._job.packs[pack][0] + offset + nbytes
            while self._staged < end and self._failure is None:
                self._changed.wait(1.0)
            if self._failure is None and self._cancelled.is_set():
                self._failure = self._abandoned()
            if self._failure is not None:
                return None
            pause = self._rate_pause(nbytes)
        if pause > 0:
            self._cancelled.wait(pause)
        return _Block(number, pack, offset, nbytes)

    def done(self, block: _Block) -> None:
        """Note a written block, and tell how many arena bytes from the start are written without a gap."""
        with self._changed:
            self._written[block.number] = 1
            end = self._written.find(0, self._prefix)
            self._prefix = len(self._written) if end < 0 else end
            total = self._job.staged_total
            if self._prefix < len(self._blocks):
                pack, offset, _ = self._blocks[self._prefix]
                total = self._job.packs[pack][0] + offset
            # Under the lock: a thread that is held up here must not tell less after others have told more.
            self._flushed(total)

    def _abandoned(self) -> SkippedError:
        return SkippedError("the save was abandoned", step=self._job.commit.step, rank=self._job.rank)

    def _rate_pause(self, nbytes: int) -> float:
        if not self._job.rate_bytes_s:
            return 0.0
        now = time.monotonic()
        start = max(now, self._rate_free_at)
        self._rate_free_at = start + nbytes / self._job.rate_bytes_s
        return start - now


def _blocks(job: FlushJob) -> list[tuple[int, int, int]]:
    return [
        (pack, offset, min(job.block_bytes, size - offset))
        for pack, (_, size) in enumerate(job.packs)
        for offset in range(0, size, job.block_bytes)
    ]


class PackPlace(Protocol):
    """What a flush needs of a tier."""

    @property
    def name(self) -> str:
        """The word for messages."""
        ...

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """See `Tier`."""
        ...

    def delete(self, path: str) -> None:
        """See `Tier`."""
        ...


def flush_rank(
    tier: PackPlace,
    job: FlushJob,
    arena: memoryview,
    word: StagedWord,
    cancelled: threading.Event,
    *,
    make_room: Callable[[StorageFullError], bool] = lambda _: False,
    flushed: Callable[[int], None] = lambda _: None,
    pacer: Pacer | None = None,
) -> FlushResult:
    """Write the packs of one rank; returns when their data is durable.

    Args:
        tier: Where to.
        job: What.
        arena: The rank's arena, read only below the staged word.
        word: Staging progress.
        cancelled: Set by anyone to abandon the flush.
        flushed: Told how many bytes from the start of the packs are written, so that a ring's place can be used again.
        make_room: Asked when the packs cannot be allocated; True means that space was freed and they are tried once more.
        pacer: Spaces out the work beside training; it is not asked any more once half the time to the deadline is gone.

    Raises:
        SkippedError: It was cancelled.
        RankLostError: The rank did not stage in time.
        DeadlineError: The tier did not take the bytes in time; threads that a write holds are left behind.
        StorageError: The tier failed; what was created is left for the sweep of the attempt.
    """
    started = time.monotonic()
    deadline = started + job.deadline_s
    directory = paths.checkpoint_dir(job.commit)
    names = [paths.pack(job.node, job.rank, part) for part in range(len(job.packs))]
    sums = _Checksums(job, arena)
    writers: list[PackWriter] = []
    finished = stuck = False
    try:
        for name, (_, size) in zip(names, job.packs, strict=True):
            writers.append(_create(tier, f"{directory}/{name}", size, make_room))
        allocated = time.monotonic()
        progress = _Progress(job, word, cancelled, flushed)
        _write_all(job, arena, writers, sums, progress, deadline, _paced(job, progress, cancelled, pacer))
        written = time.monotonic()
        for writer in writers:
            writer.finish()
        finished = True
    except _StuckError as exc:
        stuck = True  # its files are still in use by threads that may come back
        raise exc.error from None
    finally:
        if not finished and not stuck:
            for writer in writers:
                writer.abort()
    synced = time.monotonic()
    return FlushResult(
        packs=_records(job, names, sums.of_packs),
        compare={key: crc.crc(arena[start : start + n]) for key, start, n in job.compare},
        allocate_s=allocated - started,
        write_s=written - allocated,
        sync_s=synced - written,
    )


class _Checksums:
    """The CRC32 of the blocks of each pack: taken at once, or noted and taken later; used by all writing threads."""

    def __init__(self, job: FlushJob, arena: memoryview) -> None:
        self._job, self._arena = job, arena
        self._left: deque[_Block] = deque()
        self.of_packs = [np.zeros(crc.num_blocks(size), dtype=np.uint32) for _, size in job.packs]

    def take(self, block: _Block, data: memoryview) -> None:
        first = block.offset // crc.BLOCK_BYTES
        found = crc.crc_blocks(data)
        self.of_packs[block.pack][first : first + len(found)] = found

    @property
    def is_left(self) -> bool:
        return bool(self._left)

    def leave(self, block: _Block) -> None:
        self._left.append(block)

    def take_left(self) -> bool:
        """Take those of one block that was left; False if there is none."""
        try:
            block = self._left.popleft()
        except IndexError:
            return False
        self.take(block, _slice(self._job, self._arena, block))
        return True


class _StuckError(Exception):
    """Carries the error of a flush whose threads did not come back."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error


def _records(job: FlushJob, names: Sequence[str], crcs: Sequence[np.ndarray]) -> list[PackRecord]:
    return [
        PackRecord(
            file=name,
            rank=job.rank,
            part=part,
            size_bytes=size,
            crc32=crc.combine_blocks(blocks, size),
            block_crcs=crc.encode_crcs(blocks),
        )
        for part, (name, (_, size), blocks) in enumerate(zip(names, job.packs, crcs, strict=True))
    ]


def _create(tier: PackPlace, path: str, size: int, make_room: Callable[[StorageFullError], bool]) -> PackWriter:
    try:
        try:
            return tier.create_pack(path, size)
        except StorageFullError as exc:
            if not make_room(exc):
                raise
        tier.delete(path)  # a create that was said to fail may have been done
        return tier.create_pack(path, size)
    except FileExistsError as exc:
        text = "something else has the name of a pack of this very attempt"
        raise StorageError(text, path=path, tier=tier.name) from exc


def _write_all(
    job: FlushJob,
    arena: memoryview,
    writers: Sequence[PackWriter],
    sums: _Checksums,
    progress: _Progress,
    deadline: float,
    paced: Callable[[], AbstractContextManager[None]],
) -> None:
    def write(block: _Block) -> None:
        with paced():
            data = _slice(job, arena, block)
            if not block.offset:
                _check_head(job, block.pack, data)
            if progress.writes_only:
                sums.leave(block)
            else:
                sums.take(block, data)
            writers[block.pack].write_at(block.offset, data)
        progress.done(block)

    def take_left() -> bool:
        if not sums.is_left:
            return False  # and no turn is waited for
        with paced():
            return sums.take_left()

    def work() -> None:
        try:
            while (block := progress.take()) is not None:
                write(block)
                if not progress.writes_only:
                    take_left()  # one for one, so that they are done when the last block is written
                check_time()
            while progress.goes_on() and take_left():
                check_time()
        except BaseException as exc:
            progress.fail(exc)

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise DeadlineError("the flush did not end in time", step=job.commit.step, rank=job.rank)

    threads: list[threading.Thread] = []
    try:
        for number in range(job.threads):
            thread = threading.Thread(target=work, name=f"flush-{job.rank}-{number}", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as exc:
        text = f"no thread to write with: {exc}"
        progress.fail(
            StorageError(text, step=job.commit.step, rank=job.rank, hint="raise the limit of threads (ulimit -u)")
        )
    progress.watch(deadline)
    # After a failure elsewhere a write that is under way gets a moment to end, so that its files can be removed.
    give_up_at = deadline + STUCK_S
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            if progress.failure is not None:
                give_up_at = min(give_up_at, time.monotonic() + STUCK_S)
            if thread.is_alive() and time.monotonic() > give_up_at:
                late = DeadlineError("the storage did not take the bytes in time", step=job.commit.step, rank=job.rank)
                progress.fail(late)
                failure = progress.failure
                raise _StuckError(failure if isinstance(failure, CheckpointError) else late)
    if (failure := progress.failure) is not None:
        raise failure


def _check_head(job: FlushJob, part: int, head: memoryview) -> None:
    """Refuse what cannot be a pack: the rank has staged into another memory than this."""
    path = f"{paths.checkpoint_dir(job.commit)}/{paths.pack(job.node, job.rank, part)}"
    try:
        if header_bytes(head[:8], job.packs[part][1], path=path) % BLOCK or head[8] != ord("{"):
            raise TornFileError("its first bytes are no header of a pack", path=path)
    except TornFileError as exc:
        text = f"what is in the arena is not what was staged: {exc.message}"
        hint = "this save is lost, training goes on; if it happens again, restart the job"
        raise TornFileError(text, step=job.commit.step, rank=job.rank, path=path, hint=hint) from exc


def _paced(
    job: FlushJob, progress: _Progress, cancelled: threading.Event, pacer: Pacer | None
) -> Callable[[], AbstractContextManager[None]]:
    until_s = time.monotonic() + job.deadline_s / 2

    @contextmanager
    def turn(pacer: Pacer) -> Iterator[None]:
        began = pacer.wait(cancelled, until_s)
        yield
        pacer.spent(began)

    return lambda: turn(pacer) if pacer is not None and progress.beside_training else nullcontext()


def _slice(job: FlushJob, arena: memoryview, block: _Block) -> memoryview:
    """Return a block's bytes in the arena; where a ring's end cuts them, in memory of their own (aligned for direct writes)."""
    start, nbytes = job.packs[block.pack][0] + block.offset, block.nbytes
    if not job.ring_bytes:
        return arena[start : start + nbytes]
    start %= job.ring_bytes
    if start + nbytes <= job.ring_bytes:
        return arena[start : start + nbytes]
    joined = memoryview(mmap.mmap(-1, nbytes))
    head = job.ring_bytes - start
    joined[:head] = arena[start : job.ring_bytes]
    joined[head:] = arena[: nbytes - head]
    return joined
