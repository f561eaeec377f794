"""The encoded parts that ranks have begun saves with: those of a node's own ranks, and for the lead those of all.

Invariants: bounded, for layouts may change at every save; what a rank used last stays, so that the lead finds what a save in flight needs.
What went is asked for again (`PartWanted`). A part of another node travels only if the lead has to plan with it. Used from the
dispatcher thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from safehold.agent import words as w
from safehold.errors import CheckpointError, ManifestError, RankLostError
from safehold.format import plan as plans

KEPT = 8
KEPT_ALWAYS = 2
KEPT_BYTES = 8 << 20
MAX_PART_BYTES = 1 << 30


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


Key = tuple[int, int]
Then = Callable[[list[bytes] | None, CheckpointError | None], None]


@dataclass(slots=True)
class _Wanted:
    """Parts that a plan waits for."""

    digests: tuple[str, ...]
    then: Then
    missing: set[int] = field(default_factory=set)


class AllParts:
    """The parts of all ranks, as the lead needs them to plan.

    Args:
        store: Those of this node's ranks; takes in those of others, too.
        ask: Asks the node of a rank for its part with a digest.
    """

    def __init__(self, store: PartStore, *, ask: Callable[[int, str], None]) -> None:
        self._store, self._ask = store, ask
        self._wanted: dict[Key, _Wanted] = {}
        self._pieces: dict[tuple[int, str], bytearray] = {}

    def collect(self, step: int, attempt: int, digests: Sequence[str], then: Then) -> None:
        """Call `then` with the parts by rank once all are here, or with what keeps them away."""
        wanted = _Wanted(tuple(digests), then)
        wanted.missing = {rank for rank, digest in enumerate(digests) if self._store.get(rank, digest) is None}
        self._wanted[step, attempt] = wanted
        for rank in sorted(wanted.missing):
            if (rank, digests[rank]) not in self._pieces:
                self._pieces[rank, digests[rank]] = bytearray()
                self._ask(rank, digests[rank])
        self._maybe_over((step, attempt), wanted)

    def told(self, piece: w.PartTold) -> None:
        """A piece of a part came.

        Raises:
            msgspec.ValidationError: It cannot be a piece of a part.
        """
        key = (piece.rank, piece.digest)
        found = self._pieces.get(key)
        if found is None:
            return  # nobody waits for it any more
        if not piece.total:
            del self._pieces[key]
            self._fail({piece.rank}, ManifestError("a rank's part never reached the lead", rank=piece.rank))
            return
        if not 0 <= piece.offset < piece.offset + len(piece.data) <= piece.total <= MAX_PART_BYTES:
            raise msgspec.ValidationError(f"what came of a part of rank {piece.rank} is no piece of it")
        if piece.offset == 0:
            found.clear()
        elif piece.offset != len(found):
            return  # the rest of an answer that was cut off, or that was asked for by a save that is over
        found += piece.data
        if len(found) < piece.total:
            return
        del self._pieces[key]
        if plans.digest(bytes(found)) != piece.digest:
            self._fail({piece.rank}, ManifestError("a rank's part came damaged", rank=piece.rank))
            return
        self._store.use(piece.rank, piece.digest, bytes(found))
        for save, wanted in list(self._wanted.items()):
            if wanted.digests[piece.rank] == piece.digest:
                wanted.missing.discard(piece.rank)
                self._maybe_over(save, wanted)

    def lost(self, ranks: set[int]) -> None:
        """Nothing comes from these ranks any more."""
        for key in [key for key in self._pieces if key[0] in ranks]:
            del self._pieces[key]
        self._fail(ranks, RankLostError("a node was lost before the lead had its parts", rank=min(ranks, default=None)))

    def over(self, step: int, attempt: int) -> None:
        """A save has its verdict: nobody plans for it any more. What it had asked for may be lost: who needs it asks again."""
        self._wanted.pop((step, attempt), None)
        needed = {(rank, wanted.digests[rank]) for wanted in self._wanted.values() for rank in wanted.missing}
        for key in self._pieces.keys() - needed:
            del self._pieces[key]

    def _fail(self, ranks: set[int], error: CheckpointError) -> None:
        for save, wanted in list(self._wanted.items()):
            if wanted.missing & ranks:
                del self._wanted[save]
                wanted.then(None, error)

    def _maybe_over(self, save: Key, wanted: _Wanted) -> None:
        if wanted.missing:
            return
        self._wanted.pop(save, None)
        found = [self._store.get(rank, digest) for rank, digest in enumerate(wanted.digests)]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            wanted.then(None, ManifestError("a rank's part never reached the lead", step=save[0]))
        else:
            wanted.then(parts, None)
