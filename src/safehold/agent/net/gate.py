"""Who may speak: token, run, incarnation, node; and the table that keeps refusals from flooding the events.

Invariants: the token is looked at first and in constant time, so a stranger learns nothing but that it is one. A refusal is told once for
each address and reason; the table has an end, and what does not fit in any more is counted only.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from safehold.agent.net import wire
from safehold.agent.net.wire import Refusal
from safehold.events import EventStream

MAX_TOLD = 256


class Gate:
    """What requests have to show.

    Args:
        node: This node's name.
        token: Shared by the agents of the run; at least 16 characters.
        run_id: Of the run.
        incarnation: Returns the current one.
    """

    def __init__(self, *, node: str, token: str, run_id: str, incarnation: Callable[[], int]) -> None:
        self._bearer = f"Bearer {token}".encode()
        self._node, self._run_id, self._incarnation = node, run_id, incarnation
        self._known: frozenset[str] = frozenset()

    def know(self, nodes: Iterable[str]) -> None:
        """From now on these nodes, and no others, may speak."""
        self._known = frozenset(nodes)

    def admit(self, headers: Mapping[str, str]) -> str:
        """Return the name of the node that asks.

        Raises:
            Refusal: It must not, and why.
        """
        self.authenticate(headers)
        if headers.get(wire.RUN) != wire.quote(self._run_id):
            raise Refusal(409, "run", "this agent serves another run")
        theirs, current = wire.number(headers.get(wire.INCARNATION), wire.INCARNATION), self._incarnation()
        if theirs < current:
            text = f"incarnation {current} owns the run now; this request is of {theirs}"
            raise Refusal(409, "incarnation", text, current=current)
        node = wire.node_name(headers.get(wire.NODE))
        if node not in self._known:
            raise Refusal(403, "node", f"node {node!r} is not one of this job's")
        meant = headers.get(wire.TO)
        if meant is not None and wire.node_name(meant) != self._node:
            raise Refusal(421, "to", f"this is node {self._node}", node=self._node)
        return node

    def authenticate(self, headers: Mapping[str, str]) -> None:
        """Refuse whoever does not know the token."""
        given = headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._bearer):
            raise Refusal(401, "token", "the token is missing or wrong")


class Refusals:
    """Tells the event stream of refusals, once for each address and reason; used from one thread."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._told: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    def tell(self, address: str, reason: str, text: str) -> None:
        """Count a refusal, and emit it unless that was done before."""
        self.counts[reason] += 1
        entry = (address, reason)
        if entry in self._told or len(self._told) > MAX_TOLD:
            return
        if len(self._told) == MAX_TOLD:
            self._told.add(entry)  # the last word
            self._events.emit("network", "note", refused="many", text="further addresses are refused without a word")
            return
        self._told.add(entry)
        self._events.emit("network", "note", refused=reason, address=address, text=text)
