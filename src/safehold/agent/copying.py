"""What one node does of a replication: copies its share to the second place, by the process that does nothing else.

Invariants: used from the dispatcher thread only; nothing here waits. What the lead asks for is answered once, whatever becomes of it: by
the copying process, or by its loss. One share is copied at a time; another one that the lead asks for ends the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safehold.agent import words as w
from safehold.agent.flusher_client import Flusher
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, SkippedError

STOP_SLACK_S = 30.0
"""How long a copy that was cancelled has to end; then its process is given up."""


class Copying:
    """See the module.

    Args:
        node: This node.
        config: The run's settings.
        copier: The process that copies.
        tell_lead: Takes reports.
        clock: Time.
    """

    def __init__(
        self, node: int, *, config: Config, copier: Flusher, tell_lead: Callable[[w.Report], None], clock: Clock
    ) -> None:
        self._node, self._config, self._copier = node, config, copier
        self._tell_lead, self._clock = tell_lead, clock
        self._key: str | None = None
        self._expected = False

    @property
    def active(self) -> bool:
        """Whether something is copied here, or the lead has said that it will be."""
        return self._key is not None or self._expected

    def hear(self, word: w.Copying | w.Copy | w.StopCopying) -> None:
        """Take a word of the lead."""
        match word:
            case w.Copying():
                self._expected = word.active
            case w.Copy():
                self._copy(word)
            case w.StopCopying():
                self._cancel(word.key)

    def stop(self) -> None:
        """Nobody asks for it any more: the lead is lost, or the session has ended."""
        self._expected = False
        if self._key is not None:
            self._cancel(self._key)

    def _copy(self, word: w.Copy) -> None:
        if self._key is not None:
            self._cancel(self._key)
        self._key = word.key

        def done(value: Any, error: CheckpointError | None) -> None:
            if self._key == word.key:
                self._key = None
            if error is not None:
                self._tell_lead(w.Copied(word.key, error=error.to_wire()))
            else:
                self._tell_lead(w.Copied(word.key, value["sent_bytes"], value["kept_bytes"]))

        arguments = {
            "key": word.key,
            "commit": word.commit,
            "claim": word.claim,
            "node": self._node,
            "nodes": word.nodes,
        }
        self._copier.call("copy_data", arguments, done, timeout_s=self._config.remote_timeout_s + STOP_SLACK_S)

    def _cancel(self, key: str) -> None:
        self._copier.call("copy_cancel", {"key": key}, lambda *_: None, timeout_s=self._config.request_timeout_s)


def stopped() -> CheckpointError:
    """What a replication ends with that nobody wants any more."""
    return SkippedError("the replication was stopped", tier="remote")
