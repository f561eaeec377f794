"""Redundancy on one node: carries out the lead's `Protect`, and knows whether more of it is to come.

Invariants: used from the dispatcher thread only; nothing here waits. Who waits for the end of it (a trainer that closes, the agent that
leaves) has a deadline, and hears of the end also where the lead is lost or the session ends. Saves never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safehold.agent import words as w
from safehold.agent.flusher_client import Flusher
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError

ANSWER_SLACK_S = 10.0
"""How long after its own deadline, and that of the read it may hang in, the flusher has to answer."""


class Guard:
    """See the module.

    Args:
        config: The run's settings.
        keep: Wire form of the retention rules.
        flusher: For tier work.
        report: Tells the lead.
        clock: Time.

    Attributes:
        step: The last step that is known to be protected.
    """

    def __init__(
        self,
        config: Config,
        keep: dict[str, Any],
        flusher: Flusher,
        report: Callable[[w.ProtectedHere], None],
        clock: Clock,
    ) -> None:
        self._config, self._keep, self._flusher, self._report, self._clock = config, keep, flusher, report, clock
        self._is_on = False
        self._running: dict[tuple[int, int], bool] = {}
        self._expected_until: float | None = None
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self.step: int | None = None

    def placed(self, *, local_flash: bool) -> None:
        """It is known whether checkpoints are on disks of the nodes' own."""
        self._is_on = local_flash and bool(self._config.copies or self._config.parity)

    @property
    def is_busy(self) -> bool:
        """Whether something is being protected, or about to be, that other nodes may need this one for."""
        until = self._expected_until
        return any(self._running.values()) or (until is not None and self._clock.monotonic() < until)

    def committed(self) -> None:
        """A save is durable: its redundancy is what comes next."""
        if self._is_on:
            self._expect()

    def _expect(self) -> None:
        self._expected_until = self._clock.monotonic() + patience_s(self._config) + ANSWER_SLACK_S

    def protect(self, word: w.Protect) -> None:
        """Do this node's part."""
        key = (word.number, word.node)
        if key in self._running:
            return
        self._running[key] = True
        self._expect()
        arguments = {
            "number": word.number,
            "commit": word.commit,
            "node": word.node,
            "set": word.redundancy,
            "at": word.at,
            "deadline_s": word.deadline_s,
            "keep": self._keep,
            "incarnation": word.incarnation,
        }

        def done(value: Any, error: CheckpointError | None) -> None:
            wanted = self._running.pop(key, False)
            if wanted:
                wire = None if error is None else error.to_wire()
                num_bytes, seconds = (value["bytes"], value["seconds"]) if error is None else (0, 0.0)
                self._report(w.ProtectedHere(word.number, word.node, num_bytes, seconds, wire))
            self._maybe_idle()

        timeout_s = word.deadline_s + self._config.stall_timeout_s + ANSWER_SLACK_S
        self._flusher.call("rebuild" if word.rebuild else "protect", arguments, done, timeout_s=timeout_s)

    def over(self, word: w.ProtectionOver) -> None:
        """The work of a number is over on all nodes."""
        self._give_up(word.number)
        if word.done:
            self.step = word.step
        if word.idle:
            self._expected_until = None
        self._maybe_idle()

    def stop(self) -> None:
        """The lead is lost, or the session ends: nothing more is to come."""
        self._give_up(None)
        self._expected_until = None
        self._maybe_idle()

    def _give_up(self, number: int | None) -> None:
        for key in [key for key, wanted in self._running.items() if wanted and number in (None, key[0])]:
            self._running[key] = False
            self._flusher.call("stop_protecting", {"number": key[0]}, lambda *_: None, timeout_s=ANSWER_SLACK_S)

    def when_idle(self, then: Callable[[], None], timeout_s: float) -> None:
        """Call `then` once nothing is being protected, or about to be, at the latest after `timeout_s`."""
        self._waiting.append((self._clock.monotonic() + timeout_s, then))
        self._maybe_idle()

    def tick(self) -> None:
        """Let deadlines pass."""
        self._maybe_idle()

    def _maybe_idle(self) -> None:
        now, idle = self._clock.monotonic(), not self.is_busy
        over = [entry for entry in self._waiting if idle or now >= entry[0]]
        self._waiting = [entry for entry in self._waiting if entry not in over]
        for _, then in over:
            then()


def patience_s(config: Config) -> float:
    """Return how long the lead waits for the nodes' answers: the work's own deadline, and what a read may hang after it."""
    return config.flush_timeout_s + config.stall_timeout_s + 2 * ANSWER_SLACK_S
