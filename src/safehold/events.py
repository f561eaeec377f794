"""One stream of events that log, traces, metrics and fault injection share.

Invariants: emitting never raises and never blocks on I/O of its own; a listener that raises is dropped with one log line. Events are
plain data. Each process has one `EventStream`; those of the agent and the flusher say so in `process`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from safehold.clock import SYSTEM_CLOCK, Clock

Stage = Literal["started", "done", "failed", "note"]
Listener = Callable[["Event"], None]

log = logging.getLogger("safehold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        phase: What: `save`, `walk`, `plan`, `stage`, `flush`, `objects`, `record`, `manifest`, `commit`, `retention`, `restore`, ...
        stage: `started`, `done`, `failed`, or `note` for a single point.
        time_s: Monotonic time at emission, seconds.
        process: `trainer`, `agent`, `flusher` or `cli`.
        step: Step concerned, if one is.
        rank: Rank concerned, if one is.
        fields: Further plain values (bytes, seconds, names, an error's text).
    """

    phase: str
    stage: Stage
    time_s: float
    process: str = "trainer"
    step: int | None = None
    rank: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class EventStream:
    """Delivers events to listeners, in the emitting thread, in order of subscription."""

    def __init__(self, process: str = "trainer", clock: Clock = SYSTEM_CLOCK) -> None:
        self.process = process
        self._clock = clock
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener; the returned function removes it."""
        with self._lock:
            self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = [entry for entry in self._listeners if entry is not listener]

        return unsubscribe

    def emit(
        self, phase: str, stage: Stage = "note", *, step: int | None = None, rank: int | None = None, **fields: Any
    ) -> None:
        """Tell every listener."""
        if not self._listeners:
            return
        event = Event(
            phase=phase,
            stage=stage,
            time_s=self._clock.monotonic(),
            process=self.process,
            step=step,
            rank=rank,
            fields=fields,
        )
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                log.exception("an event listener failed and is dropped")
                with self._lock:
                    self._listeners = [entry for entry in self._listeners if entry is not listener]

    @contextmanager
    def span(self, phase: str, *, step: int | None = None, rank: int | None = None, **fields: Any) -> Iterator[None]:
        """Emit `started`, then `done` with `seconds`, or `failed` with `error`."""
        begun = self._clock.monotonic()
        self.emit(phase, "started", step=step, rank=rank, **fields)
        try:
            yield
        except BaseException as exc:
            self.emit(phase, "failed", step=step, rank=rank, seconds=self._clock.monotonic() - begun, error=str(exc))
            raise
        self.emit(phase, "done", step=step, rank=rank, seconds=self._clock.monotonic() - begun, **fields)
