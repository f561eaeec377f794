"""Ranks on another node, as the lead answers them: replies travel through that node's agent, one for all that have asked together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import CheckpointError


@dataclass(slots=True)
class Asked:
    """Ranks that have asked together, and whether they were answered."""

    ranks: list[int]
    answered: bool = False


class RankAfar:
    """See the module; what a `node_save.Peer` is on the same node.

    Args:
        rank: The rank.
        asked: The ranks that have asked together, of which the first is answered, once.
        node: Where they are.
        tell: Tells a node.
        manifests: Node -> round of the restore whose manifest (and who has it in memory) it was told: once is enough for all its ranks.
    """

    closed = False

    def __init__(
        self, rank: int, asked: Asked, node: int, tell: Callable[[int, w.Word], None], manifests: dict[int, int]
    ) -> None:
        self.rank, self._asked, self._node, self._tell, self._manifests = rank, asked, node, tell, manifests

    @property
    def answered(self) -> bool:
        """Whether there is an answer for all of them."""
        return self._asked.answered

    def reply(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting.

        Raises:
            ValueError: There are descriptors, which cannot leave a node.
        """
        if fds:
            raise ValueError("descriptors cannot be sent to another node")
        if self._asked.answered:
            return
        self._asked.answered = True
        if isinstance(message, m.RestoreOffer) and message.manifest:
            if self._manifests.get(self._node) == message.round:
                message = msgspec.structs.replace(message, manifest=b"", in_memory_of={})
            self._manifests[self._node] = message.round
        self._tell(self._node, w.ToRank(self._asked.ranks[0], m.encode(message)))

    def refuse(self, request: int, error: CheckpointError) -> None:
        """Answer a request with an error."""
        self.reply(m.Refused(request, error.to_wire()))


def afar(ranks: list[int], node: int, tell: Callable[[int, w.Word], None], manifests: dict[int, int]) -> list[RankAfar]:
    """Return ranks that have asked together."""
    asked = Asked(ranks)
    return [RankAfar(rank, asked, node, tell, manifests) for rank in ranks]
