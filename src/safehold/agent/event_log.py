"""Writes what went wrong in an agent or flusher to its log, for whoever looks there afterwards.

Invariants: what is said again and again is written once a minute, and memory for it is bounded; a log that cannot be written harms nothing.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from typing import TextIO

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.events import Event

AGAIN_S = 60.0
MAX_TEXTS = 256
MAX_CHARS = 1000


class EventLog:
    """A listener of an event stream.

    Args:
        stream: Where lines go; None: standard error, which is the slot's log.
        clock: Time.
    """

    def __init__(self, stream: TextIO | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._said: OrderedDict[str, float] = OrderedDict()

    def __call__(self, event: Event) -> None:
        """Write a line if the event is a failure or a note."""
        if event.stage not in ("failed", "note"):
            return
        facts = {"step": event.step, "rank": event.rank, **event.fields}
        words = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None and name != "seconds")
        text = f"{event.process}: {event.phase} {event.stage}: {words}".replace("\n", " ")[:MAX_CHARS]
        now = self._clock.monotonic()
        if now - self._said.get(text, float("-inf")) < AGAIN_S:
            return
        self._said[text] = now
        self._said.move_to_end(text)
        while len(self._said) > MAX_TEXTS:
            self._said.popitem(last=False)
        try:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock.wall()))
            print(f"{when} {text}", file=self._stream, flush=True)
        except OSError:
            pass
