"""A rank on another node, as the lead answers it: replies travel through that node's agent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import CheckpointError


class RankAfar:
    """See the module; what a `node_save.Peer` is on the same node.

    Args:
        rank: The rank.
        node: Where it is.
        tell: Tells a node.
        manifests: Node -> round of the restore whose manifest (and holders) it has been told: once is enough for all its ranks.
    """

    closed = False

    def __init__(self, rank: int, node: int, tell: Callable[[int, w.Word], None], manifests: dict[int, int]) -> None:
        self.rank, self._node, self._tell, self._manifests = rank, node, tell, manifests

    def reply(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting.

        Raises:
            ValueError: There are descriptors, which cannot leave a node.
        """
        if fds:
            raise ValueError("descriptors cannot be sent to another node")
        if isinstance(message, m.RestoreOffer) and message.manifest:
            if self._manifests.get(self._node) == message.round:
                message = msgspec.structs.replace(message, manifest=b"", holders={})
            self._manifests[self._node] = message.round
        self._tell(self._node, w.ToRank(self.rank, m.encode(message)))

    def refuse(self, request: int, error: CheckpointError) -> None:
        """Answer a request with an error."""
        self.reply(m.Refused(request, error.to_wire()))
