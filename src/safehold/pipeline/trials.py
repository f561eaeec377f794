"""Tries again what storage fails to do and may do later, waits, paces, and can be cancelled; what long copies have in common.

Invariants: no wait is longer than a nap before it looks whether it was cancelled. Time is waited for storage within a budget, for
each operation anew. What is counted as sent or kept is told in order.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import ConfigurationError, SkippedError, StorageError
from safehold.format import crc
from safehold.pipeline.pacing import Pacer
from safehold.policy.replication import Allowance, backoff_s

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Told (bytes dealt with, bytes in all); called from several threads, never at the same time."""

NAP_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """How to copy.

    Attributes:
        packs_at_once: Packs that are copied at a time.
        threads: Transfers at a time, over all packs.
        chunk_bytes: Size of one transfer; a multiple of the checksum block.
        rate_bytes_s: Upper bound for all threads together, in what is written; 0: none.
        retry_s: Seconds that are spent waiting, for one operation or one pack, for storage that fails and may come back.
        stall_s: Seconds without any transfer after which the copy is given up.
        direct: Read past the page cache where that is possible.
    """

    packs_at_once: int = 2
    threads: int = 4
    chunk_bytes: int = 8 << 20
    rate_bytes_s: int = 0
    retry_s: float = 60.0
    stall_s: float = 300.0
    direct: bool = True

    def __post_init__(self) -> None:
        if self.packs_at_once < 1 or self.threads < 1 or self.rate_bytes_s < 0:
            raise ConfigurationError("packs_at_once and threads must be at least 1, rate_bytes_s at least 0")
        if self.chunk_bytes < crc.BLOCK_BYTES or self.chunk_bytes % crc.BLOCK_BYTES:
            raise ConfigurationError(f"chunk_bytes must be a multiple of {crc.BLOCK_BYTES}")


class Trials:
    """Cancels, waits, tries again, and keeps count: what all threads of a replication share.

    Args:
        settings: See `CopySettings`.
        cancelled: Set by anyone to end it.
        progress: Told how far it is.
        clock: Time.
        rng: Spreads retries.
        pacer: Keeps the work of all threads from taking time of training; None: nothing is trained here.
    """

    def __init__(
        self,
        settings: CopySettings,
        cancelled: threading.Event | None = None,
        progress: Progress | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.settings = settings
        self.cancelled = cancelled or threading.Event()
        self.over = threading.Event()
        self.total_bytes = 0
        self.sent_bytes = 0
        self.kept_bytes = 0
        self._progress = progress
        self._clock = clock
        self._pacer = pacer
        self._rng = rng or random.Random()
        self._allowance = Allowance(settings.rate_bytes_s)
        self._lock = threading.Lock()
        self._moved_s = clock.monotonic()
        self._given_up: list[StorageError] = []

    def check(self) -> None:
        """Raise if it was cancelled, or if what this is a part of has failed elsewhere (`over`).

        Raises:
            SkippedError: So it is.
        """
        if self.cancelled.is_set():
            raise SkippedError(
                "the replication was cancelled", hint="repeat it: what is there already is not sent again"
            )

    def stalled(self) -> bool:
        """Whether nothing has moved for too long."""
        with self._lock:
            return self._clock.monotonic() - self._moved_s > self.settings.stall_s

    def moved(self, sent: int = 0, kept: int = 0) -> None:
        """Note what was sent, or was found there already; with neither: that somebody waits of its own will."""
        with self._lock:
            self._moved_s = self._clock.monotonic()
            self.sent_bytes += sent
            self.kept_bytes += kept
            if self._progress is not None and (sent or kept):
                self._progress(min(self.sent_bytes + self.kept_bytes, self.total_bytes), self.total_bytes)

    def back(self, sent: int) -> None:
        """Take back what was counted as sent of a pack that has to be sent again."""
        with self._lock:
            self.sent_bytes -= sent

    def work(self, action: Callable[[], None]) -> None:
        """Call what takes CPU time when it is this thread's turn beside training."""
        if self._pacer is None:
            action()
            return
        began = self._pacer.wait(self.cancelled, math.inf)
        self.moved()
        try:
            action()
        finally:
            self._pacer.spent(began)

    def pace(self, num_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        with self._lock:
            pause = self._allowance.pause_s(self._clock.monotonic(), num_bytes)
        self.wait(pause)

    def wait(self, seconds: float) -> None:
        """Wait, unless it is cancelled."""
        end = self._clock.monotonic() + seconds
        while (left := end - self._clock.monotonic()) > 0:
            self.check()
            self.moved()
            self._clock.sleep(min(left, NAP_S))
        self.check()

    def again(self, action: Callable[[], T]) -> T:
        """Call something that touches storage, again and again while it fails in a way that may pass, within the budget."""
        waited, attempt = 0.0, 0
        while True:
            self.check()
            try:
                result = action()
            except StorageError as exc:
                attempt += 1
                pause = backoff_s(attempt, self._rng.random())
                # What used up its own budget inside is not given another one outside.
                if not exc.retry or waited + pause > self.settings.retry_s or any(exc is old for old in self._given_up):
                    self._given_up.append(exc)
                    raise
                waited += pause
                self.wait(pause)
            else:
                self.moved()
                return result
