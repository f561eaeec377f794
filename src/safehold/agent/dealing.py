"""The head's part in passing chunks on: it hears what each node wants, and tells each who reads what for whom.

Invariants: used from the dispatcher thread only. What nodes want is heard before the last of their votes, and told before the verdict, so
that nobody waits for either. Where it makes no sense, nothing is passed on, and everybody reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from safehold.agent import words as w
from safehold.events import EventStream
from safehold.policy import passing_on as policy

Tell = Callable[[int, w.PassOn], None]


class Dealing:
    """See the module.

    Args:
        tell: Tells a node.
        events: Where is told how it was dealt.
    """

    def __init__(self, tell: Tell, events: EventStream) -> None:
        self._tell, self._events = tell, events
        self._round = 0
        self._wants: dict[int, w.Wants] = {}

    def wants(self, node: int, report: w.Wants) -> None:
        """A node told what its ranks want.

        Raises:
            msgspec.DecodeError: It is no set of chunks.
        """
        try:
            policy.decode(report.chunks, report.num_chunks)
        except ValueError as exc:
            raise msgspec.ValidationError(str(exc)) from exc
        if report.round != self._round:
            self._round, self._wants = report.round, {}
        self._wants[node] = report

    def node_lost(self, node: int) -> None:
        """A node takes no part."""
        self._wants.pop(node, None)

    def deal(self, number: int) -> None:
        """All ranks go on with this round: tell each node what concerns it."""
        told, self._wants = self._wants, {}
        if number != self._round or len(told) < 2:
            return
        num_chunks = next(iter(told.values())).num_chunks
        wants = {node: report.chunks for node, report in told.items() if report.num_chunks == num_chunks}
        groups = policy.deal(wants, num_chunks)
        of_node: dict[int, list[tuple[list[int], bytes]]] = {}
        for group in groups:
            wire = (list(group.members), policy.encode(group.chunks, num_chunks))
            for node in group.members:
                of_node.setdefault(node, []).append(wire)
        self._events.emit("dealt", nodes=len(of_node), groups=len(groups), chunks=sum(len(g.chunks) for g in groups))
        for node, own in sorted(of_node.items()):
            self._tell(node, w.PassOn(number, num_chunks, own))
