"""Announces time-based saves to the ranks, by a word in shared memory on each node.

Invariants: decisions are `policy.cadence`'s; this looks at the ranks' steps and has the announcement told. At most one announcement is
pending. A rank tells the step of an announced save only once it has begun the save, so one that is seen behind the announced step
has passed it. Used from the dispatcher thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from safehold.clock import Clock
from safehold.policy.cadence import Announcement, TimeCadence

POLL_S = 0.05
MARGIN_S = 0.5
REPORT_S, NODES_PER_REPORT_S = 1.0, 128


def report_interval_s(num_nodes: int) -> float:
    """Return how often a node tells its ranks' steps: so that the lead hears of a few hundred a second at most."""
    return max(REPORT_S, num_nodes / NODES_PER_REPORT_S)


class Announcer:
    """Drives `TimeCadence` from the control words.

    Args:
        world_size: Ranks of the run.
        every_seconds: Interval between saves; 0: only on request.
        steps: Returns the last step that each rank is known to have reached.
        announce: Tells all nodes the step.
        clock: Time.
        drop: Gives up the saves by which some ranks, and not all, have followed an announcement.
        num_nodes: Nodes of the run; those of others tell their steps now and then, and hear of an announcement a little later.
    """

    def __init__(
        self,
        *,
        world_size: int,
        every_seconds: float,
        steps: Callable[[], Mapping[int, int]],
        announce: Callable[[int], None],
        clock: Clock,
        drop: Callable[[], None],
        num_nodes: int = 1,
    ) -> None:
        margin_s = MARGIN_S if num_nodes == 1 else MARGIN_S + 2 * report_interval_s(num_nodes)
        self._cadence = TimeCadence(world_size=world_size, interval_s=every_seconds or None, margin_s=margin_s)
        self._active = bool(every_seconds)
        self._steps_of, self._announce, self._clock, self._drop = steps, announce, clock, drop
        self._since = clock.monotonic()
        self._pending: Announcement | None = None
        self._begun: set[int] = set()
        self._num_dropped = 0
        self._next = self._since
        self._seen: tuple[float, int] | None = None
        self._step_s: float | None = None

    def restart(self) -> None:
        """A new incarnation has begun: nothing is pending."""
        self._since = self._clock.monotonic()
        self._clear()

    def begun(self, step: int, rank: int) -> None:
        """A rank began to save."""
        if self._pending is not None and step >= self._pending.step:
            self._begun.add(rank)

    def committed(self, step: int) -> None:
        """A save is durable: the interval starts again."""
        self._over(step)

    def abandoned(self, step: int) -> None:
        """A save failed; a time-based one is announced again after the interval."""
        self._over(step)

    def _over(self, step: int) -> None:
        self._since = self._clock.monotonic()
        if self._pending is None or step >= self._pending.step:  # ranks may still follow one that lies ahead
            self._clear()

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return self._next if self._active else None

    def tick(self) -> None:
        """Look at the ranks' steps, judge what is pending, announce what is due."""
        now = self._clock.monotonic()
        if not self._active or now < self._next:
            return
        self._next = now + POLL_S
        steps = self._steps_of()
        self._learn(now, steps)
        if self._pending is not None:
            verdict = self._cadence.judge(self._pending, steps, self._begun, now)
            if verdict == "wait":
                return
            if verdict == "ok":
                self._since = now
                self._clear()
            else:
                num_dropped = self._num_dropped + 1
                self._drop()
                self._clear()
                self._num_dropped = num_dropped
        step = self._cadence.announce(
            now, self._since, steps, self._pending, num_dropped=self._num_dropped, step_s=self._step_s
        )
        if step is not None:
            self._pending = Announcement(step=step, made_s=now, num_dropped=self._num_dropped)
            self._begun = set()
            self._announce(step)

    def _clear(self) -> None:
        self._num_dropped = 0
        self._pending = None
        self._begun = set()

    def _learn(self, now: float, steps: Mapping[int, int]) -> None:
        if not steps:
            return
        furthest = max(steps.values())
        if self._seen is None or furthest < self._seen[1]:
            self._seen = (now, furthest)
        elif furthest > self._seen[1]:
            took = (now - self._seen[0]) / (furthest - self._seen[1])
            self._step_s = took if self._step_s is None else 0.8 * self._step_s + 0.2 * took
            self._seen = (now, furthest)
