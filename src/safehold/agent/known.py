"""What an incarnation has on storage already: steps that are committed, and attempts that failed and left files there.

Invariants: an agent that came in the place of one that died asks storage, once, before it lets anybody save; it waits for the answer, and
not for a storage that gives none. An attempt is called given up only by a name that this agent gave up itself, or found before it let
anybody save: nobody works at it, and nobody will. Used from the dispatcher thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from safehold.agent.flusher_client import Flusher
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError, StorageError

Key = tuple[int, int]
MAX_GIVEN_UP = 1024


class Known:
    """See the module.

    Attributes:
        incarnation: Which.
        steps: What is committed, as far as it is known.
        told: Called when `pending` ends.

    Args:
        incarnation: See above.
        steps: The committed steps; None: storage is asked.
        flusher: For that.
        config: The run's settings.
        failed: Told why storage gave no answer.
        is_lead: Whether this agent decides about attempts that were left behind; on another node it does not know what others work at.
    """

    def __init__(
        self,
        incarnation: int,
        steps: Iterable[int] | None,
        *,
        flusher: Flusher,
        config: Config,
        failed: Callable[[CheckpointError], None],
        is_lead: bool = True,
    ) -> None:
        self.incarnation = incarnation
        self.steps = set(steps or ())
        self.told: Callable[[], None] = lambda: None
        self._flusher, self._config, self._failed = flusher, config, failed
        self._is_lead = is_lead
        self._acknowledged: set[Key] = set()
        self._given_up: dict[Key, None] = {}
        self._complete = steps is not None
        self._asking = False
        self._error: CheckpointError | None = None
        if not self._complete:
            self._ask(config.request_timeout_s)

    @property
    def pending(self) -> bool:
        """Whether the answer is worth waiting for: the first question is still open."""
        return not self._complete and self._error is None

    def refusal(self, step: int, attempt: int) -> CheckpointError | None:
        """Say why a save that is to replace nothing cannot be let in; None if it can."""
        if step in self.steps:
            text = f"step {step} is committed already"
            return ConfigurationError(text, step=step, hint="pass overwrite=True to replace it")
        if self._complete:
            return None
        self._ask(self._config.flush_timeout_s)
        if attempt == 0:
            return None  # this job has not saved the step before
        text = f"cannot tell whether step {step} is committed already: {self._error}"
        return StorageError(text, step=step, hint="save again, or pass overwrite=True")

    def committed(self, step: int, attempt: int) -> None:
        """A save of this incarnation was told to be committed."""
        self.steps.add(step)
        self._acknowledged.add((step, attempt))
        self._given_up.pop((step, attempt), None)

    def give_up(self, step: int, attempt: int) -> None:
        """A save of this incarnation failed, nobody works at it any more, and its files may be there."""
        if (step, attempt) not in self._acknowledged:
            self._given_up[step, attempt] = None
            while len(self._given_up) > MAX_GIVEN_UP:  # the next incarnation sweeps the others
                del self._given_up[next(iter(self._given_up))]

    def acknowledged(self) -> list[list[int]]:
        """Return the commits of this incarnation that are kept, as far as is known."""
        return self._wire(self._acknowledged)

    def given_up(self) -> list[list[int]]:
        """Return the attempts that nobody works at and that may have left files."""
        return self._wire(self._given_up)

    def retired(self, given_up: list[list[int]], uncommitted: list[list[int]]) -> None:
        """Retention has dealt with what was given up, and has un-committed others."""
        for step, _, attempt in given_up:
            self._given_up.pop((step, attempt), None)
        for step, incarnation, attempt in uncommitted:
            if incarnation == self.incarnation:
                self._acknowledged.discard((step, attempt))

    def _wire(self, keys: Iterable[Key]) -> list[list[int]]:
        return [[step, self.incarnation, attempt] for step, attempt in sorted(keys)]

    def _ask(self, timeout_s: float) -> None:
        if not self._asking:
            self._asking = True
            self._flusher.call("known", {"incarnation": self.incarnation}, self._answer, timeout_s=timeout_s)

    def _answer(self, value: Any, error: CheckpointError | None) -> None:
        self._asking = False
        first = self.pending
        if error is not None:
            self._error = error
            self._failed(error)
        else:
            self._complete = True
            self.steps.update(value["steps"])
            self._acknowledged.update((step, attempt) for step, _, attempt in value["commits"])
            if first and self._is_lead:  # else some of them may be saves that were let in meanwhile
                for step, _, attempt in value["left"]:
                    self.give_up(step, attempt)
        if first:
            self.told()
