"""What an agent asks the second place before the run is opened, and before a restore chooses.

Invariants: used from the dispatcher thread only; nothing here waits. A second place that gives no answer ends in a sentence for the user,
within a deadline, and never in silence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from safehold.agent.flusher_client import Flusher
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError, StorageReadOnlyError
from safehold.types import CommitId

LOOK_SHARE, MIN_LOOK_S = 0.1, 5.0
"""How long the second place has to answer when a run is opened, as a share of the time for a start."""
_numbers = itertools.count(1)


@dataclass(slots=True, kw_only=True)
class Afar:
    """What the second place said.

    Attributes:
        held: Checkpoints of this run that it holds; None: it gave no answer.
        notes: For the user.
        warnings: For the user, and not to be missed.
    """

    held: list[list[int]] | None = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look_afar(
    copier: Flusher | None, config: Config, then: Callable[[Afar], None], refuse: Callable[[CheckpointError], None]
) -> None:
    """Ask the second place, if there is one, what it holds of this run, and whether it can be used.

    Args:
        copier: The process that asks; None: there is no second place.
        config: The run's settings.
        then: Takes the answer.
        refuse: Takes what has to be mended before the run can be opened.
    """
    if copier is None:
        then(Afar())
        return

    def answered(value: Any, error: CheckpointError | None) -> None:
        if error is not None and refuses(error):
            refuse(error)
        elif error is not None:
            text = f"the remote {config.remote} gives no answer, older copies there may not count any more: {error}"
            then(Afar(held=None, warnings=[text]))
        else:
            then(Afar(held=value["held"], notes=value["notes"], warnings=value["warnings"]))

    copier.call("remote_look", {}, answered, timeout_s=look_s(config))


def look_s(config: Config) -> float:
    """Return how long the second place has to answer when a run is opened."""
    return max(config.start_timeout_s * LOOK_SHARE, MIN_LOOK_S)


def refuses(error: CheckpointError | None) -> bool:
    """Whether this has to be mended before a run can be opened."""
    return isinstance(error, ConfigurationError | StorageReadOnlyError)


@dataclass(slots=True, kw_only=True)
class Brought:
    """What came of a look at the second place before a restore chose.

    Attributes:
        commit: What was brought back; None: nothing.
        words: For the user.
        failed: Something is there, or may be, and could not be had.
    """

    commit: CommitId | None = None
    words: list[str] = field(default_factory=list)
    failed: bool = False


class Fetching:
    """Brings back what a restore can use: what the second place has and is newer than anything usable here.

    Args:
        config: The run's settings.
        copier: The process that copies.
    """

    def __init__(self, *, config: Config, copier: Flusher) -> None:
        self._config, self._copier = config, copier
        self._key = ""

    def bring(
        self,
        step: int | None,
        bad: Iterable[CommitId],
        tried: Iterable[CommitId],
        then: Callable[[Brought], None],
    ) -> None:
        """Bring the newest that can be had, and say what came of it.

        Args:
            step: This step and no other.
            bad: Checkpoints here that cannot be used.
            tried: Those that were brought before.
            then: Called once.
        """
        if self._key:  # of a restore that was given up
            self._copier.call("copy_cancel", {"key": self._key}, lambda *_: None, timeout_s=self._look_s)
        self._key = f"fetch/{next(_numbers)}"
        brought = Brought()

        def found(value: Any, error: CheckpointError | None) -> None:
            if error is not None:
                brought.words.append(f"the remote could not be looked at: {error}")
                brought.failed = True
                then(brought)
            else:
                self._next([CommitId(*entry) for entry in value], brought, then)

        arguments = {"step": step, "bad": [_wire(commit) for commit in bad], "tried": [_wire(c) for c in tried]}
        self._copier.call("remote_newer", arguments, found, timeout_s=self._look_s)

    @property
    def _look_s(self) -> float:
        return self._config.request_timeout_s

    def _next(self, left: list[CommitId], brought: Brought, then: Callable[[Brought], None]) -> None:
        if not left:
            then(brought)
            return
        commit, *others = left

        def fetched(value: Any, error: CheckpointError | None) -> None:
            if error is not None:
                brought.words.append(f"step {commit.step} could not be fetched from the remote: {error}")
                brought.failed = True
                self._next(others, brought, then)
                return
            size, took = value["bytes"] / 1e9, value["seconds"]
            brought.words.append(
                f"step {commit.step} was fetched from {self._config.remote}: {size:.3f} GB in {took:.1f} s"
            )
            brought.commit = commit
            then(brought)

        arguments = {"commit": _wire(commit), "key": self._key}
        self._copier.call("fetch", arguments, fetched, timeout_s=self._config.restore_timeout_s)


def _wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]
