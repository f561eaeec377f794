"""Who a node says it is, in every request."""

from __future__ import annotations

from safehold.agent.net import wire


class Identity:
    """What every request of a node shows.

    Attributes:
        node: Its name.
        incarnation: The current one; a plain number that any thread may set.
    """

    def __init__(self, *, node: str, token: str, run_id: str, incarnation: int) -> None:
        self.node, self.incarnation = node, incarnation
        self._fixed = {
            "Authorization": f"Bearer {token}",
            wire.RUN: wire.quote(run_id),
            wire.NODE: wire.quote(node),
        }

    def headers(self, to: str) -> dict[str, str]:
        """Return the headers of a request to a node."""
        return {**self._fixed, wire.INCARNATION: str(self.incarnation), wire.TO: wire.quote(to)}
