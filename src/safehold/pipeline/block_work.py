"""Works off ranges of blocks with a few threads, within bounded memory, time and pace.

Invariants: no more buffers exist than threads times what one job needs; the first failure stops the others and is raised; when a call
ends, none of its threads works any more, but for one that a dead disk or network holds: that one ends with the call it hangs in.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import CheckpointError, DeadlineError, SkippedError, StorageError
from safehold.format.crc import BLOCK_BYTES
from safehold.tiers.base import PackWriter

J = TypeVar("J")

MAX_BATCH_BLOCKS: Final = 4
"""More is no faster, since what was read falls out of the cache before it is summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a piece of work may take.

    Attributes:
        threads: Threads that read, sum and write.
        memory_bytes: For all buffers together; exceeded only where one block of each symbol does not fit.
        deadline_s: Seconds until the work is given up; what one read takes is bounded by whoever reads.
        cancelled: Asked between batches whether to give up.
        patience_s: How long a thread that has to stop is waited for.
        pace: Told the bytes that were read or written after each batch; may wait, to leave training alone.
        clock: Time.
    """

    threads: int = 2
    memory_bytes: int = 32 << 20
    deadline_s: float = 3600.0
    patience_s: float = 5.0
    cancelled: Callable[[], bool] = lambda: False
    pace: Callable[[int], None] = lambda num_bytes: None
    clock: Clock = SYSTEM_CLOCK

    def batch_blocks(self, num_buffers: int) -> int:
        """Return how many blocks a job may have that needs so many buffers of its length."""
        blocks = self.memory_bytes // (max(1, self.threads) * num_buffers * BLOCK_BYTES)
        return max(1, min(MAX_BATCH_BLOCKS, blocks))


class Watch:
    """The deadline of a piece of work that has begun."""

    def __init__(self, effort: Effort, doing: str) -> None:
        self._effort, self._doing = effort, doing
        self._end = effort.clock.monotonic() + effort.deadline_s

    def check(self) -> None:
        """Look whether to go on.

        Raises:
            DeadlineError: The time is over.
            SkippedError: It was cancelled.
        """
        if (verdict := self.verdict()) is not None:
            raise verdict

    def verdict(self) -> CheckpointError | None:
        """Return what `check` would raise."""
        if self._effort.cancelled():
            return SkippedError(f"{self._doing} was given up")
        if self._effort.clock.monotonic() >= self._end:
            hint = "the other nodes or the storage are slow; allow more time, or look which"
            return DeadlineError(f"{self._doing} did not end within {self._effort.deadline_s:g} s", hint=hint)
        return None


class StuckError(Exception):
    """A thread hangs in storage or network, and still has the files and buffers of its job.

    Attributes:
        failure: Why the work was given up.
    """

    def __init__(self, failure: BaseException) -> None:
        super().__init__(str(failure))
        self.failure = failure


def make_buffer(num_blocks: int) -> memoryview:
    """Return memory for so many blocks, aligned to pages as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, num_blocks * BLOCK_BYTES))


def in_threads(
    jobs: Iterator[J], work: Callable[[J, list[memoryview]], int], *, num_buffers: int, effort: Effort, watch: Watch
) -> None:
    """Work off all jobs.

    Args:
        jobs: Drawn one at a time; of at most `effort.batch_blocks(num_buffers)` blocks each.
        work: Does one, in buffers of that many blocks which are its own; returns the bytes that it moved.
        num_buffers: How many buffers it needs.
        effort: Threads, memory and pace.
        watch: The deadline.

    Raises:
        CheckpointError: The first failure.
        StuckError: There was one, and a thread does not stop.
    """
    lock, failures = threading.Lock(), list[BaseException]()
    size = effort.batch_blocks(num_buffers)

    def draw() -> J | None:
        with lock:
            return None if failures else next(jobs, None)

    def fail(exc: BaseException) -> None:
        with lock:
            failures.append(exc)

    def run() -> None:
        try:
            buffers = [make_buffer(size) for _ in range(num_buffers)]
            while (job := draw()) is not None:
                watch.check()
                effort.pace(work(job, buffers))
        except BaseException as exc:  # carried to the caller's thread
            fail(exc)

    threads = [threading.Thread(target=run, name=f"redundancy-{n}", daemon=True) for n in range(max(1, effort.threads))]
    try:
        _start(threads)
        while not failures and (alive := [thread for thread in threads if thread.is_alive()]):
            alive[0].join(0.1)
            if alive[0].is_alive() and (late := watch.verdict()) is not None:
                fail(late)
    except BaseException as exc:  # interrupted, or no thread to be had
        fail(exc)
    _await(threads, effort.patience_s, failures)
    if failures:
        raise failures[0]


def _start(threads: list[threading.Thread]) -> None:
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as exc:
        hint = "raise the limit of threads (ulimit -u)"
        raise StorageError(f"no thread to work with: {exc}", hint=hint) from exc


def _await(threads: list[threading.Thread], patience_s: float, failures: list[BaseException]) -> None:
    """Wait for threads that have to stop; one that hangs in storage or network is left behind."""
    end = time.monotonic() + patience_s
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
    if failures and any(thread.is_alive() for thread in threads):
        raise StuckError(failures[0])


@contextmanager
def written(writer: PackWriter) -> Iterator[None]:
    """Finish a pack when the block ends, and remove it when it fails; one that a thread still writes is left alone."""
    try:
        yield
        writer.finish()
    except StuckError as exc:
        raise exc.failure from None
    except BaseException:
        writer.abort()
        raise
