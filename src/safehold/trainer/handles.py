"""What a save gives back, and what its failures become.

Invariants: a handle moves forward only: staging, staged, then durable, failed or skipped; what it became is never taken back. Waiting
never holds a lock that the receiving thread needs. An error that a wait has raised counts as told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from safehold.errors import CheckpointError, ConfigurationError, DeadlineError, SkippedError

State = Literal["staging", "staged", "durable", "failed", "skipped"]
TIERS = ("memory", "flash", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a save cost; times in seconds, sizes in bytes. Zero until known.

    Attributes:
        pause_s: How long `save` (and, with overlap, the wait before the optimizer's step) kept this rank's training.
        stage_s: From the start of staging until all of this rank was in host memory.
        window_s: From the start of staging to durable.
        bytes: Bytes of all packs of this node.
        rank_bytes: Bytes of this rank's packs.
        num_files: Files written for the checkpoint.
        write_s: Longest time a rank's packs took to be written.
        sync_s: Longest time they took to be made durable after that.
        allocate_s: Longest time their space took to be reserved.
    """

    pause_s: float = 0.0
    stage_s: float = 0.0
    window_s: float = 0.0
    bytes: int = 0
    rank_bytes: int = 0
    num_files: int = 0
    write_s: float = 0.0
    sync_s: float = 0.0
    allocate_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save; see `Checkpointer.save`, and for `announced` `messages.Begin`."""

    final: bool = False
    announced: bool = False
    overwrite: bool = False
    overlap: bool = False
    flush: bool = False


class SaveHandle:
    """One save, as the trainer sees it; made by `Checkpointer.save`.

    Attributes:
        step: The step it saves.
        attempt: Counts repeated saves of one step in one incarnation.
        tier: Where it becomes durable: `flash`, or `memory` for one that is not flushed (`flush_every`).
    """

    def __init__(
        self, step: int, attempt: int, *, flush_timeout_s: float, remote_timeout_s: float = 0.0, tier: str = "flash"
    ) -> None:
        self.step = step
        self.attempt = attempt
        self.tier = tier
        self._flush_timeout_s, self._remote_timeout_s = flush_timeout_s, remote_timeout_s
        self._is_replicated = False
        self._remote_error: CheckpointError | None = None
        self._state: State = "staging"
        self._error: CheckpointError | None = None
        self._figures = Figures()
        self._changed = threading.Condition()
        self._on_raised: Callable[[CheckpointError], None] | None = None
        self._on_durable: Callable[[], None] | None = None
        self._was_staged = False

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} {self._state}>"

    @property
    def state(self) -> State:
        """`staging`, `staged`, `durable`, `failed` or `skipped`."""
        return self._state

    @property
    def staged(self) -> bool:
        """Whether this rank's state is in host memory, so that training may change it; stays True afterwards."""
        return self._was_staged

    @property
    def durable(self) -> bool:
        """Whether the checkpoint is committed on its tier: data, directory entries and manifest are on storage, or all is in the memory of
        the nodes and of their partners.
        """
        return self._state == "durable"

    @property
    def replicated(self) -> bool:
        """Whether the checkpoint is complete at the second place, too."""
        return self._is_replicated

    @property
    def failed(self) -> bool:
        """Whether the save failed (and was not merely skipped by policy): do not count on the checkpoint.

        Where it was being committed when storage failed, it may exist all the same; the message of `error` says so then.
        """
        return self._state == "failed"

    @property
    def error(self) -> CheckpointError | None:
        """Why it failed or was skipped."""
        return self._error

    @property
    def figures(self) -> Figures:
        """What it cost so far."""
        return self._figures

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's state is in host memory; without overlap it is so when `save` returns.

        Args:
            timeout_s: None: the flush deadline.

        Raises:
            DeadlineError: It was not staged in time.
            CheckpointError: The save failed or was skipped.
        """
        limit = self._flush_timeout_s if timeout_s is None else timeout_s
        self._wait(lambda: self._state != "staging", limit, limit, "staged")

    def wait(self, timeout_s: float | None = None, tier: str | None = None) -> None:
        """Wait until the checkpoint is durable.

        Args:
            timeout_s: None: the flush deadline; with `remote` that and `remote_timeout_s`.
            tier: None: the save's own tier. `memory`: until staged, or for a save that stays in memory until committed there; `flash`:
                until committed there; `remote`: until it is complete at the second place.

        Raises:
            DeadlineError: It was not durable in time; it may become so later.
            SkippedError: It was skipped; with `remote` also where a newer one is replicated in its place.
            CheckpointError: The save failed.
            ConfigurationError: There is no such tier, or the save does not come to it.
        """
        tiers = TIERS if self._remote_timeout_s else TIERS[:-1]
        if tier is not None and tier not in tiers:
            raise ConfigurationError(f"this run has no tier {tier!r}", hint=f"tiers: {', '.join(tiers)}")
        if tier in ("flash", "remote") and self.tier == "memory":
            text = f"the save of step {self.step} stays in memory, and never comes to {tier}"
            raise ConfigurationError(text, step=self.step, hint="save with flush=True, or set flush_every lower")
        if tier == "remote":
            self._wait_remote(timeout_s)
            return
        limit = self._flush_timeout_s if timeout_s is None else timeout_s
        if tier == "memory" and self.tier != "memory":
            self.wait_staged(limit)
        else:
            self._wait(lambda: self._state not in ("staging", "staged"), limit, limit, "durable")

    def _wait_remote(self, timeout_s: float | None) -> None:
        limit = self._flush_timeout_s + self._remote_timeout_s if timeout_s is None else timeout_s
        ends = time.monotonic() + limit
        self._wait(lambda: self._state not in ("staging", "staged"), limit, limit, "durable")
        self._wait_over(max(0.0, ends - time.monotonic()), limit, remote=True)
        if self._remote_error is not None:
            raise self._remote_error

    def _wait_over(self, timeout_s: float, told_s: float, *, remote: bool = False) -> None:
        """Wait until it is known what became of it, which is not raised; `told_s` is the limit that the user knows."""
        with self._changed:
            if remote:
                self._await(self._is_copy_over, timeout_s, told_s, "replicated")
                return
            self._await(lambda: self._state not in ("staging", "staged"), timeout_s, told_s, "durable")

    def _wait(self, reached: Callable[[], bool], timeout_s: float, told_s: float, word: str) -> None:
        with self._changed:
            self._await(reached, timeout_s, told_s, word)
            error = self._error
        if error is not None:
            if self._on_raised is not None:
                self._on_raised(error)
            raise error

    def _await(self, reached: Callable[[], bool], timeout_s: float, told_s: float, word: str) -> None:
        if not self._changed.wait_for(reached, timeout_s):
            hint = "it goes on in the background; storage may be slow"
            raise DeadlineError(f"the save was not {word} within {told_s:g} s", step=self.step, hint=hint)

    # -- for the saver ---------------------------------------------------------------------------------------------------

    def _advance(
        self,
        state: State,
        *,
        error: CheckpointError | None = None,
        before: Callable[[], None] = lambda: None,
        **figures: float,
    ) -> bool:
        """Move forward, and call `before` before anybody hears of it; returns False if its fate was decided before."""
        with self._changed:
            if figures:
                self._figures = replace(self._figures, **figures)  # type: ignore[arg-type]
            if self._state in ("durable", "failed", "skipped") or (self._state == "staged" and state == "staging"):
                return False
            if isinstance(error, SkippedError) and state == "failed":
                state = "skipped"
            if state == "durable" and self._on_durable is not None:
                self._on_durable()
            before()
            self._state, self._error = state, error
            self._was_staged = self._was_staged or state in ("staged", "durable")
            self._changed.notify_all()
            return True

    def _copied(self, error: CheckpointError | None) -> None:
        """It is complete at the second place, or why it will not be."""
        with self._changed:
            if not self._is_replicated and self._remote_error is None:
                self._is_replicated, self._remote_error = error is None, error
                self._changed.notify_all()

    def _is_copy_over(self) -> bool:
        gone = self._state in ("failed", "skipped")
        return gone or self._is_replicated or self._remote_error is not None

    def _add_pause(self, seconds: float) -> None:
        """Note that training waited for it once more."""
        with self._changed:
            self._figures = replace(self._figures, pause_s=self._figures.pause_s + seconds)


def wait_all(handles: Iterable[SaveHandle], limit_s: float, *, remote: bool = False) -> DeadlineError | None:
    """Wait until it is known what became of all of them (of their copies, if `remote`); returns the error of the first that was late."""
    deadline = time.monotonic() + limit_s
    late: DeadlineError | None = None
    for handle in handles:
        try:
            handle._wait_over(max(0.0, deadline - time.monotonic()), limit_s, remote=remote)
        except DeadlineError as exc:
            late = late or exc
    return late
