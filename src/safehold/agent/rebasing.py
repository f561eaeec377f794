"""Opens an incarnation that accepts commits up to one, for a restore that goes back or leaves something out.

Invariants: used from the dispatcher thread only; nothing here waits. If the flusher was lost while it worked, the incarnation may be there:
then the second place is looked at anew, and one more is opened, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safehold.agent.fetching import Afar, look_afar
from safehold.agent.flusher_client import Flusher
from safehold.agent.here import Here
from safehold.agent.memory_lead import MemoryLead
from safehold.clock import new_token
from safehold.config import Config
from safehold.errors import CheckpointError
from safehold.types import CommitId


class Rebasing:
    """See the module.

    Args:
        here: The session of the lead.
        flusher: For tier work.
        copier: The process that copies to the second place; None: there is none.
        memory: What is in memory of the nodes.

    Attributes:
        lost: Whether the last one may have been carried out although it failed.
    """

    def __init__(
        self, here: Here, *, config: Config, flusher: Flusher, copier: Flusher | None, memory: MemoryLead
    ) -> None:
        self._here, self._config, self._flusher, self._copier, self._memory = here, config, flusher, copier, memory
        self.lost = False

    def rebase(
        self, commit: CommitId, bad: list[CommitId], done: Callable[[int, CheckpointError | None], None]
    ) -> None:
        """Open it; calls back with the incarnation, or 0 and why not."""
        here = self._here
        arguments = {
            "token": new_token(),
            "up_to": [commit.step, commit.incarnation, commit.attempt],
            "exclude": [[entry.step, entry.incarnation, entry.attempt] for entry in bad],
            "reason": f"restored step {commit.step}",
            "in_memory": self._memory.is_believed(commit),
        }

        def look(*, again: bool) -> None:
            look_afar(self._copier, self._config, lambda afar: ask(afar, again=again), lambda error: done(0, error))

        def ask(afar: Afar, *, again: bool) -> None:
            def opened(value: Any, error: CheckpointError | None) -> None:
                self.lost = error is not None and self._flusher.lost
                if error is None:
                    here.opened(value["run_id"], value["incarnation"], value["steps"], self._memory.rebased(commit))
                    done(here.incarnation, None)
                elif self.lost and not again and not here.ended_by:
                    look(again=True)  # else this very session may be superseded by what was done
                else:
                    done(0, error)

            given = {**arguments, "held": afar.held}
            self._flusher.call("open_run", given, opened, timeout_s=self._config.start_timeout_s)

        look(again=False)
