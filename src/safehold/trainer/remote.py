"""The trainer's side of the second place: where it is, and which saves have come there.

Invariants: what is known of a save and the second place moves forward only, beside what became of the save itself. No more handles are
remembered than `MAX_WAITING`; those that go say that nobody knows.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import ConfigurationError, DeadlineError, SkippedError
from safehold.events import EventStream
from safehold.tiers.open import place
from safehold.trainer.handles import SaveHandle, wait_all

log = logging.getLogger("safehold")
MAX_WAITING = 256


def resolve(config: Config, run: str) -> Config:
    """Return the settings with the one spelling of the second place.

    Args:
        config: The settings.
        run: The run directory, in its one spelling.

    Raises:
        ConfigurationError: The second place is the run directory, inside it or around it, or no place at all.
    """
    if not config.remote:
        return config
    remote = place(config.remote)
    one, other = _real(run), _real(remote)
    if one == other:
        raise ConfigurationError("remote is the run directory itself", path=remote, hint="give another place, or none")
    if f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"):
        where = "inside the run directory" if other.startswith(f"{one}/") else "around the run directory"
        raise ConfigurationError(f"remote lies {where}", path=remote, hint="give a place of its own, or none")
    return replace(config, remote=remote)


def _left_out(step: int, reason: str) -> SkippedError:
    hint = "a newer one is, or will be; 'safehold replicate' copies a step by name"
    return SkippedError(f"step {step} is not replicated: {reason}", step=step, tier="remote", hint=hint)


def new_handle(step: int, attempt: int, config: Config, tier: str) -> SaveHandle:
    """Return the handle of a save that begins, and will be durable on `tier`."""
    remote_timeout_s = config.remote_timeout_s if config.remote else 0.0
    return SaveHandle(
        step, attempt, flush_timeout_s=config.flush_timeout_s, remote_timeout_s=remote_timeout_s, tier=tier
    )


def _real(where: str) -> str:
    return os.path.realpath(where) if where.startswith("/") else where


class RemoteWaits:
    """The saves of one rank that may come to the second place; used from the receiving thread and the trainer's.

    Args:
        config: The run's settings.
        rank: This rank.
        events: The event stream.
    """

    def __init__(self, config: Config, *, rank: int, events: EventStream) -> None:
        self._config, self._rank, self._events = config, rank, events
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], SaveHandle] = {}

    def follow(self, handle: SaveHandle) -> SaveHandle:
        """A save has begun; news of its copy may come before those of the save itself. Returns the handle.

        One that stays in memory has no copy.
        """
        if not self._config.remote or handle.tier == "memory":
            return handle
        gone = None
        with self._lock:
            self._waiting[handle.step, handle.attempt] = handle
            if len(self._waiting) > MAX_WAITING:
                gone = self._waiting.pop(next(iter(self._waiting)))
        if gone is not None:
            gone._copied(SkippedError("too many saves wait for their replication to follow them all", step=gone.step))
        return handle

    def failed(self, handle: SaveHandle) -> None:
        """There is nothing to replicate."""
        with self._lock:
            self._waiting.pop((handle.step, handle.attempt), None)

    def take(self, told: m.Durable | m.LeftOut) -> None:
        """The agent says what became of a save's copy."""
        is_left_out = isinstance(told, m.LeftOut)
        with self._lock:
            handle = self._waiting.pop((told.step, told.attempt), None)
            # The newest goes first: what is older now was left out, perhaps by an agent that died before it said so.
            older = [] if is_left_out else [key for key in self._waiting if key < (told.step, told.attempt)]
            passed = [self._waiting.pop(key) for key in older]
        for other in passed:
            other._copied(_left_out(other.step, f"step {told.step} is"))
        if isinstance(told, m.LeftOut):
            if handle is not None:
                handle._copied(_left_out(told.step, told.reason))
            return
        figures = told.figures
        fields: dict[str, object] = {"tier": "remote", **figures}
        self._events.emit("replicate", "done", step=told.step, rank=self._rank, **fields)
        if self._rank == 0:
            size, took = figures.get("bytes", 0.0) / 1e9, max(figures.get("seconds", 0.0), 1e-9)
            rate = size / took
            log.info("safehold: step %d durable on remote: %.3f GB, %.3f s, %.2f GB/s", told.step, size, took, rate)
        if handle is not None:
            handle._copied(None)

    def wait(self, limit_s: float) -> DeadlineError | None:
        """Wait until it is known what became of the copies of all saves; returns the error of the first that was late.

        Raises:
            ConfigurationError: There is no second place.
        """
        if not self._config.remote:
            raise ConfigurationError("this run has no second place to wait for", hint="set 'remote'")
        with self._lock:
            waiting = list(self._waiting.values())
        return wait_all(waiting, limit_s, remote=True)
