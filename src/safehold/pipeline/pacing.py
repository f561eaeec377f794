"""Keeps the flushes of a node from taking time of training: measures, asks the policy, and waits.

Invariants: one `Pacer` for all flushes of a process; a wait is cut into naps, so that it ends soon after a core becomes idle, or after
the flush is abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.host.idle import IdleCores
from safehold.policy.pace import Pace

NAP_S = 0.02
# Several ticks of the kernel's accounting (10 ms each on most machines).
SAMPLE_S = 0.05


class Pacer:
    """Spaces out pieces of work; may be used by many threads.

    Args:
        cores: Tells how many cores are idle.
        busy_share: Share of the node's CPU time that is taken at most while none is; 0 or 1: no limit.
        clock: The time.
        cpu_time: CPU seconds of the calling thread.
    """

    def __init__(
        self,
        cores: IdleCores,
        busy_share: float,
        *,
        clock: Clock = SYSTEM_CLOCK,
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cores, self._clock, self._cpu_time = cores, clock, cpu_time
        self._pace = Pace(cores.num_cores, busy_share)
        self._lock = threading.Lock()
        self._sampled_s = clock.monotonic()

    def wait(self, cancelled: threading.Event, until_s: float) -> float:
        """Wait for this thread's turn, or until `until_s` on the clock, or until cancelled; returns its CPU time, for `spent`."""
        while True:
            with self._lock:
                now_s = self._clock.monotonic()
                if now_s - self._sampled_s >= SAMPLE_S:
                    self._sampled_s = now_s
                    self._pace.observe(self._cores.sample())
                pause_s = min(self._pace.pause_s(now_s), until_s - now_s)
            if pause_s <= 0 or cancelled.wait(min(pause_s, NAP_S)):
                return self._cpu_time()

    def spent(self, began: float) -> None:
        """Note that the work since `wait` is done; `began` is what that returned."""
        with self._lock:
            self._pace.spent(self._clock.monotonic(), self._cpu_time() - began)
