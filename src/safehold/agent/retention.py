"""Has the keep rule applied after commits, one time after another.

Invariants: at most one `retire` of a session is under way, so that no two decide about, and delete, the same attempts; commits that come
meanwhile are followed by one more, for all of them. Used from the dispatcher thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safehold.agent.flusher_client import Flusher
from safehold.agent.known import Known
from safehold.config import Config
from safehold.errors import CheckpointError, SupersededError
from safehold.types import CommitId


class Retention:
    """See the module.

    Args:
        keep: Wire form of the retention rules.
        flusher: For tier work.
        config: The run's settings.
        leased: Returns the checkpoints that are copied to a second place, or are about to be.
        maintained: Told the incarnation concerned, what came of it, and what was wrong.
    """

    def __init__(
        self,
        keep: dict[str, Any],
        *,
        flusher: Flusher,
        config: Config,
        maintained: Callable[[int, Any, CheckpointError | None], None],
        leased: Callable[[], list[CommitId]] = list,
    ) -> None:
        self._keep, self._flusher, self._config, self._maintained = keep, flusher, config, maintained
        self._leased = leased
        self._is_busy = False
        self._held_back: tuple[Known, int, int] | None = None
        self._next: tuple[Known, int, int] | None = None

    def released(self) -> None:
        """What was leased may not be any more: have the rule applied again, if something stayed on that account."""
        if self._held_back is not None:
            self.retire(*self._held_back)

    def retire(self, known: Known, step: int, attempt: int) -> None:
        """A save was committed: have the keep rule applied, and attempts swept that do not count."""
        if self._is_busy:
            self._next = (known, step, attempt)
            return
        self._is_busy = True
        given_up, leased = known.given_up(), self._leased()
        self._held_back = (known, step, attempt) if any(commit.step != step for commit in leased) else None
        arguments = {
            "commit": [step, known.incarnation, attempt],
            "keep": self._keep,
            "incarnation": known.incarnation,
            "acknowledged": known.acknowledged(),
            "given_up": given_up,
            "leased": [[commit.step, commit.incarnation, commit.attempt] for commit in leased],
        }

        def retired(value: Any, error: CheckpointError | None) -> None:
            self._is_busy = False
            following, self._next = self._next, None
            if error is None:
                known.retired(given_up, value["uncommitted"])
            self._maintained(known.incarnation, value, error)
            # Beside a process that may still be at it none is begun: the next commit asks again.
            if following is not None and not isinstance(error, SupersededError) and not self._flusher.may_still_run:
                self.retire(*following)

        self._flusher.call("retire", arguments, retired, timeout_s=self._config.flush_timeout_s)
