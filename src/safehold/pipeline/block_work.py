"""Works off ranges of blocks with a few threads, within bounded memory, time and pace.

Invariants: no more buffers exist than threads times what one job needs; the first failure stops the others and is raised; when a call
returns, none of its threads works any more.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import DeadlineError, SkippedError
from safehold.format.crc import BLOCK_BYTES

J = TypeVar("J")

MAX_BATCH_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a piece of work may take.

    Attributes:
        threads: Threads that read, sum and write.
        memory_bytes: For all buffers together; exceeded only where one block of each symbol does not fit.
        deadline_s: Seconds until the work is given up; what one read takes is bounded by whoever reads.
        cancelled: Asked between batches whether to give up.
        pace: Told the bytes that were read or written after each batch; may wait, to leave training alone.
        clock: Time.
    """

    threads: int = 2
    memory_bytes: int = 64 << 20
    deadline_s: float = 3600.0
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
        if self._effort.cancelled():
            raise SkippedError(f"{self._doing} was given up")
        if self._effort.clock.monotonic() >= self._end:
            hint = "the other nodes or the storage are slow; allow more time, or look which"
            raise DeadlineError(f"{self._doing} did not end within {self._effort.deadline_s:g} s", hint=hint)


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
    """
    lock, failures = threading.Lock(), list[BaseException]()
    size = effort.batch_blocks(num_buffers)

    def draw() -> J | None:
        with lock:
            return None if failures else next(jobs, None)

    def run() -> None:
        try:
            buffers = [make_buffer(size) for _ in range(num_buffers)]
            while (job := draw()) is not None:
                watch.check()
                effort.pace(work(job, buffers))
        except BaseException as exc:  # carried to the caller's thread
            with lock:
                failures.append(exc)

    threads = [threading.Thread(target=run, name=f"redundancy-{n}") for n in range(max(1, effort.threads))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as exc:  # interrupted: nobody may write any more once this returns
        with lock:
            failures.append(exc)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if failures:
        raise failures[0]
