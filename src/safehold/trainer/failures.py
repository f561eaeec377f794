"""Collects the failures of the background, so that none is silent and none kills training by itself.

Invariants: a failure is raised once, at the next call, by policy; with `warn`, and where safehold mends the cause itself (an agent that
died), it is logged, counted, and raised only when too many came in a row. The first cause is what the user sees. What will be raised is
no warning in the log as well, so that nobody reads it twice. Skipped saves are no failures.
"""

from __future__ import annotations

import logging
import threading

from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    SkippedError,
    StateMismatchError,
    SupersededError,
    from_interrupt,
)

log = logging.getLogger("safehold")


def interrupted(exc: BaseException, step: int, rank: int) -> CheckpointError:
    """Return what the other ranks are told of something foreign that ended a save of this one."""
    if not isinstance(exc, Exception):
        return from_interrupt(exc, rank=rank, step=step)
    return StateMismatchError(f"the save was interrupted: {type(exc).__name__}: {exc}", step=step, rank=rank)


class Failures:
    """See the module.

    Attributes:
        num_failed: Failed saves so far.
        num_committed: Saves so far that became durable.
        num_in_row: Failed saves since the last commit.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._pending: CheckpointError | None = None
        self._superseded: SupersededError | None = None
        self.num_failed = 0
        self.num_committed = 0
        self.num_in_row = 0

    def raises(self, error: CheckpointError) -> bool:
        """Whether this failure is for the user at once, rather than a warning."""
        if isinstance(error, SkippedError):
            return False
        too_many = bool(self._config.max_failures) and self.num_in_row >= self._config.max_failures
        if isinstance(error, AgentUnavailableError) or self._config.on_failure == "warn":
            return too_many
        return True

    def add(self, error: CheckpointError, *, raised: bool = False) -> None:
        """A save failed; `raised`: the caller raises what the user has to know of it."""
        if isinstance(error, SkippedError):
            log.warning("safehold: %s", error)
            return
        with self._lock:
            if isinstance(error, SupersededError):
                self._superseded = self._superseded or error
            self.num_failed += 1
            self.num_in_row += 1
            # The first that the user has to know of; what safehold mends itself does not hide what it cannot.
            if not raised and (self._pending is None or (not self.raises(self._pending) and self.raises(error))):
                self._pending = error
            told = raised or error is self._superseded or (error is self._pending and self.raises(error))
        log.log(logging.INFO if told else logging.WARNING, "safehold: a save failed: %s", error)

    def superseded(self, error: SupersededError) -> None:
        """Another incarnation owns the run: every call raises that from here on, whether a save was in flight or not."""
        with self._lock:
            self._superseded = self._superseded or error

    def committed(self) -> None:
        """A save succeeded."""
        with self._lock:
            self.num_committed += 1
            self.num_in_row = 0
            if self._pending is not None and not self.raises(self._pending):
                self._pending = None

    def forget(self, error: CheckpointError | None) -> None:
        """The user has seen this failure at its handle."""
        with self._lock:
            if self._pending is error:
                self._pending = None

    def raise_pending(self, *, always: bool = False) -> None:
        """Raise what the user has to know now.

        Args:
            always: Also with the policy `warn` (at `close`).
        """
        with self._lock:
            error: CheckpointError | None = self._superseded
            if error is None and self._pending is not None and (always or self.raises(self._pending)):
                error, self._pending = self._pending, None
        if error is not None:
            raise error
