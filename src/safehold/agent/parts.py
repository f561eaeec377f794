"""The encoded parts that ranks have begun saves with.

Invariants: bounded, for layouts may change at every save; what a rank used last stays, so that the lead finds what a save in flight needs.
What went is asked for again (`PartWanted`). Used from the dispatcher thread only.
"""

from __future__ import annotations

from collections import OrderedDict

KEPT = 8
KEPT_ALWAYS = 2
KEPT_BYTES = 8 << 20


class PartStore:
    """Parts by digest, those that each rank used last."""

    def __init__(self) -> None:
        self._by_rank: dict[int, OrderedDict[str, bytes]] = {}

    def use(self, rank: int, digest: str, part: bytes) -> bool:
        """A rank begins a save by a part, given or (empty) known; returns False if it has to be given."""
        parts = self._by_rank.setdefault(rank, OrderedDict())
        if part:
            parts[digest] = part
        elif digest not in parts:
            return False
        parts.move_to_end(digest)
        total = sum(map(len, parts.values()))
        while len(parts) > KEPT or (len(parts) > KEPT_ALWAYS and total > KEPT_BYTES):
            total -= len(parts.popitem(last=False)[1])
        return True

    def get(self, rank: int, digest: str) -> bytes | None:
        """Return a part of a rank, if it is still here."""
        parts = self._by_rank.get(rank)
        return parts.get(digest) if parts is not None else None
