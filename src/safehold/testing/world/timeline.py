"""Virtual time: events in the order of their time, processes that run, stop and die, and a record of what happened.

Invariants: one seed gives one order of events. Events of a process that is stopped wait until it goes on, those of one that is dead never
happen. Everything runs in one thread at a time (`fibers` hand it over).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safehold.clock import SYSTEM_CLOCK

TRACE_KEPT = 400
EPOCH_S = 1_700_000_000.0
Work = Callable[[], None]


class Violation(AssertionError):
    """An invariant does not hold."""


class Process:
    """Something that runs on its own: an agent, a flusher, a trainer.

    Attributes:
        name: For the trace.
        alive: Until it is killed.
        stopped: Whether it is stopped for now.
        on_end: Called once it is dead.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline, self.name = timeline, name
        self.alive, self.stopped = True, False
        self.stopped_s = 0.0
        self._stopped_at = 0.0
        self.deferred: list[Work] = []
        self.on_end: list[Work] = []

    def kill(self) -> None:
        """End it, stopped or not."""
        if not self.alive:
            return
        self.alive = False
        self.deferred.clear()
        if not self._timeline.is_terse:
            self._timeline.note("killed", self.name)
        ending, self.on_end = self.on_end, []
        for work in ending:
            work()

    def stop(self) -> None:
        """Let nothing happen in it."""
        if self.alive and not self.stopped:
            self.stopped, self._stopped_at = True, self._timeline.now
            self._timeline.note("stopped", self.name)

    def resume(self) -> None:
        """Let it go on, with all that has waited meanwhile."""
        if not self.stopped:
            return
        self.stopped = False
        self.stopped_s += self._timeline.now - self._stopped_at
        self._timeline.note("resumed", self.name)
        waiting, self.deferred = self.deferred, []
        for work in waiting:
            self._timeline.at(0.0, self, work)


class Timeline:
    """The clock, the queue of events, and chance. A `Clock`, too.

    Attributes:
        now: Virtual seconds.
        chance: Everything random comes from here.
        num_events: Events so far.
        after_event: Called after each.
        before_event: Called before each with its number.
        is_terse: Leaves what happens everywhere out of the trace.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 1000.0
        self.ahead_s = 0.0
        self.chance = random.Random(seed)
        self.num_events = self.num_scheduled = 0
        self._heap: list[tuple[float, int, Process | None, Work]] = []
        self.trace: deque[tuple[float, str, str]] = deque(maxlen=TRACE_KEPT)
        self.after_event: Work | None = None
        self.before_event: Callable[[int], None] | None = None
        self.is_terse = False
        self.problems: list[BaseException] = []

    # -- Clock ---------------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """See `Clock`."""
        return self.now + self.ahead_s

    def wall(self) -> float:
        """See `Clock`."""
        return EPOCH_S + self.now + self.ahead_s

    def sleep(self, seconds: float) -> None:
        """See `Clock`; what sleeps outside a fiber is only late."""
        self.ahead_s += seconds

    # -- events --------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, process: Process | None, work: Work) -> None:
        """Do something later; `process`: where."""
        self.num_scheduled += 1
        heapq.heappush(self._heap, (self.now + delay_s, self.num_scheduled, process, work))

    def between(self, shortest: float, longest: float) -> float:
        """Return a random time."""
        return shortest + (longest - shortest) * self.chance.random()

    def note(self, what: str, text: str = "") -> None:
        """Record that something happened."""
        self.trace.append((self.now, what, text))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; returns whether `until` came true."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            if until is not None and until():
                return True
            self.step()
        self.now = max(self.now, end)
        return until is not None and until()

    def step(self) -> None:
        """Let the next event happen."""
        when, _, process, work = heapq.heappop(self._heap)
        if process is not None and not process.alive:
            return
        if process is not None and process.stopped:
            process.deferred.append(work)
            return
        self.now = max(self.now, when)
        self.num_events += 1
        if self.before_event is not None:
            self.before_event(self.num_events)
            if process is not None and (not process.alive or process.stopped):
                if process.alive:
                    process.deferred.append(work)
                return
        self.ahead_s = 0.0
        work()
        self.ahead_s = 0.0
        if self.problems:
            raise self.problems[0]
        if self.after_event is not None:
            self.after_event()

    def violation(self, text: str) -> Violation:
        """Return an error that shows seed and trace."""
        lines = [f"{when:10.3f} {what:12s} {about}" for when, what, about in self.trace]
        return Violation(f"{text}\nseed {self.seed}, at {self.now:.3f}, after:\n" + "\n".join(lines))


@contextmanager
def virtual_time(timeline: Timeline, sleep: Callable[[float], None]) -> Iterator[None]:
    """Have all that uses the system's clock by default use this one."""
    clock: Any = SYSTEM_CLOCK
    clock.monotonic, clock.wall, clock.sleep = timeline.monotonic, timeline.wall, sleep
    try:
        yield
    finally:
        del clock.monotonic, clock.wall, clock.sleep
