"""Before a new start of the job opens the run: the other nodes finish what the job before left in flight there.

Invariants: waits for every node that can be reached, until a deadline; a node that is lost is not waited for. What is not finished by then
is decided by the ledger: what an older incarnation commits late is taken in, or not believed. Used from the dispatcher thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from safehold.agent import words as w
from safehold.clock import Clock


class OthersSettled:
    """See the module.

    Args:
        nodes: The other nodes.
        tell: Tells a node.
        clock: Time.
    """

    def __init__(self, nodes: set[int], *, tell: Callable[[int, w.Word], None], clock: Clock) -> None:
        self._nodes, self._tell, self._clock = nodes, tell, clock
        self._number = 0
        self._late: set[int] = set()
        self._lost: set[int] = set()
        self._deadline: float | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def any(self) -> bool:
        """Whether there are other nodes."""
        return bool(self._nodes)

    def ask(self, deadline_s: float) -> None:
        """Have all settle, within `deadline_s`."""
        self._number += 1
        self._late = self._nodes - self._lost
        self._deadline = self._clock.monotonic() + deadline_s
        for node in sorted(self._late):
            self._tell(node, w.SettleOld(self._number, deadline_s))
        self._maybe_over()

    def after(self, then: Callable[[], None]) -> None:
        """Call `then` once all that were asked have settled, or the time is up."""
        self._then.append(then)
        self._maybe_over()

    def settled(self, node: int, number: int) -> None:
        """A node has."""
        self._lost.discard(node)
        if number == self._number:
            self._late.discard(node)
            self._maybe_over()

    def lost(self, node: int) -> None:
        """A node is dead or cannot be reached."""
        self._lost.add(node)
        self._late.discard(node)
        self._maybe_over()

    def back(self, node: int) -> None:
        """It can be reached again."""
        self._lost.discard(node)

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return self._deadline

    def tick(self) -> None:
        """Let the deadline pass."""
        if self._deadline is not None and self._clock.monotonic() >= self._deadline:
            self._late.clear()
            self._maybe_over()

    def stop(self) -> None:
        """Nobody waits any more for anybody to settle; whoever was to be called is."""
        self._late.clear()
        self._maybe_over()

    def _maybe_over(self) -> None:
        if self._late:
            return
        self._deadline = None
        waiting, self._then = self._then, []
        for then in waiting:
            then()
