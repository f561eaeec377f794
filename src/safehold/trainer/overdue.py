"""Notices that saves by time have stopped, whatever the reason: an agent that hangs, or that cannot be started again.

Invariants: costs a few loads per step. What is announced and not reached yet, what became durable, and what has failed (and was told so)
all count as heard of. A pause of training is no silence: its agent may have been stopped with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from safehold.agent.client import AgentClient
from safehold.config import Config
from safehold.errors import DeadlineError
from safehold.trainer.failures import Failures

PAUSE_SHARE = 0.5
"""A gap between two steps of more than this share of the limit is a pause of training, or its steps are that long."""


class Overdue:
    """See the module.

    Args:
        every_seconds: Interval of saves by time; None: there are none, and nothing is noticed.
        config: Settings.
        failures: Told of the silence, once for each time that it lasts so long as a save by time may take.
        monotonic: Time.
    """

    def __init__(
        self,
        every_seconds: float | None,
        config: Config,
        failures: Failures,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = None if every_seconds is None else every_seconds + config.flush_timeout_s
        self._failures, self._monotonic = failures, monotonic
        self._since = self._looked = monotonic()
        self._heard: tuple[int, ...] = (0, 0, 0, 0)

    def look(self, client: AgentClient, step: int) -> None:
        """A step is complete: see whether anything was heard of saves by time since the last one."""
        if self._limit_s is None:
            return
        now = self._monotonic()
        paused, self._looked = now - self._looked > PAUSE_SHARE * self._limit_s, now
        if self._hears(client, step) or paused:
            self._since = now
        elif now - self._since > self._limit_s:
            self._since = now
            text = f"no save by time was announced or became durable for {self._limit_s:.0f} s"
            hint = "look at the agent's log (safehold agents shows where), or save by steps; training goes on unsaved"
            self._failures.add(DeadlineError(text, step=step, rank=client.rank, hint=hint))

    def _hears(self, client: AgentClient, step: int) -> bool:
        words = client.node_control  # None while another agent is looked for
        made = words.announcement if words is not None else None
        if made is not None and made.step is not None and step < made.step:
            return True
        before, seq = self._heard, made.seq if made is not None else 0
        outcome = (self._failures.num_committed, self._failures.num_failed)
        self._heard = (client.generation, seq, *outcome) if seq else (*before[:2], *outcome)
        return self._heard != before
