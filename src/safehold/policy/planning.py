"""What a rank writes of what it holds: a pure function of one leaf and its holders, the same on every rank.

Invariants: of the ranks that hold the same bytes, each element is assigned to exactly one, and each of them knows
which without asking: nothing but the leaf's name, dtype, rectangles and holders enters. Bytes are balanced: large
rectangles are cut into rows and dealt to their holders, small ones go to a holder picked by a hash. A leaf whose
holders are unknown is written whole by whoever has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from safehold.errors import StateMismatchError
from safehold.format.dtypes import itemsize
from safehold.format.pack import PackLayouts, PieceIn
from safehold.format.plan import Part
from safehold.policy.settlement import EMPTY, Settlement
from safehold.policy.spans import describe
from safehold.types import Inventory, Rect, Shard

SPLIT_BYTES = 4 << 20
MIN_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rectangle that this rank writes.

    Attributes:
        leaf_index: Index into the inventory's shards.
        rect: The rectangle, in global coordinates; lies inside one of the rank's own.
        whole: True if the leaf was not settled, so that other ranks may write the same.
    """

    leaf_index: int
    rect: Rect
    whole: bool = False


def pieces_to_write(
    inventory: Inventory, settlement: Settlement = EMPTY, *, split_bytes: int = SPLIT_BYTES
) -> list[Assignment]:
    """Return what this rank writes, in the order of its leaves; empty rectangles are left out.

    Args:
        inventory: What the rank holds.
        settlement: Who holds the undeclared leaves, as far as it is known.
        split_bytes: From this size on a rectangle is shared among its holders.

    Raises:
        StateMismatchError: Declared holders do not include the rank, or an owner is not among them.
    """
    out: list[Assignment] = []
    checked: set[int] = set()
    for index, shard in enumerate(inventory.shards):
        # Thousands of shards share a few tuples of thousands of ranks.
        if id(shard.holders.ranks) not in checked or shard.holders.owner is not None:
            _check_holders(shard, inventory.rank, inventory.world_size)
            checked.add(id(shard.holders.ranks))
        rects, whole = _share(shard, inventory.rank, inventory.world_size, settlement, split_bytes)
        out.extend(Assignment(index, rect, whole) for rect in rects if rect.numel)
    return out


def pieces_in(inventory: Inventory, assignments: Sequence[Assignment]) -> list[PieceIn]:
    """Return the assignments as `safehold.format.pack.layout` takes them, in the same order."""
    specs = [shard.spec for shard in inventory.shards]
    return [
        PieceIn(spec.name, spec.dtype, spec.shape, item.rect)
        for item in assignments
        for spec in (specs[item.leaf_index],)
    ]


def make_part(inventory: Inventory, assignments: Sequence[Assignment], layouts: PackLayouts) -> Part:
    """Return the rank's part of the plan.

    Args:
        inventory: What the rank holds; all its leaves are named in the part, also those of which it writes nothing.
        assignments: What it writes.
        layouts: Where, from `safehold.format.pack.layout(pieces_in(inventory, assignments))`.
    """
    leaves = tuple(shard.spec for shard in inventory.shards)
    num_dims = max((len(leaf.shape) for leaf in leaves), default=0)
    padding = [(0,) * n for n in range(num_dims + 1)], [(1,) * n for n in range(num_dims + 1)]
    places = {piece.index: piece for piece in layouts.pieces}
    placed = [places[index] for index in range(len(assignments))]
    offsets = [item.rect.offsets + padding[0][num_dims - len(item.rect.offsets)] for item in assignments]
    sizes = [item.rect.sizes + padding[1][num_dims - len(item.rect.sizes)] for item in assignments]
    return Part(
        rank=inventory.rank,
        world_size=inventory.world_size,
        leaves=leaves,
        leaf=np.array([item.leaf_index for item in assignments], np.int32),
        offsets=np.array(offsets, np.int64).reshape(len(assignments), num_dims),
        sizes=np.array(sizes, np.int64).reshape(len(assignments), num_dims),
        pack=np.array([piece.pack for piece in placed], np.int32),
        offset=np.array([piece.offset for piece in placed], np.int64),
        pack_sizes=tuple(pack.size_bytes for pack in layouts.packs),
        objects=inventory.objects,
        aliases=inventory.aliases,
    )


def _share(
    shard: Shard, rank: int, world_size: int, settlement: Settlement, split_bytes: int
) -> tuple[Sequence[Rect], bool]:
    """Return what `rank` writes of `shard`, and whether others may write the same for want of a settlement."""
    ranks, owner = shard.holders.ranks, shard.holders.owner
    if owner is not None:
        return (shard.rects if owner == rank else ()), False
    if ranks is None:
        ranks = (rank,) if world_size == 1 else settlement.holders(shard.spec, rank)
        if ranks is None:
            return shard.rects, True
    if len(ranks) == 1:
        return shard.rects, False
    pieces = [piece for rect in shard.rects for piece in split(shard, rect, ranks, split_bytes)]
    return [rect for rect, writer in pieces if writer == rank], False


def _check_holders(shard: Shard, rank: int, world_size: int) -> None:
    ranks, owner = shard.holders.ranks, shard.holders.owner
    why = None
    if ranks is not None and rank not in ranks:
        why = f"its holders ({describe(ranks)}) do not include this rank"
    elif ranks is not None and not 0 <= min(ranks) <= max(ranks) < world_size:
        why = f"its holders ({describe(ranks)}) are not ranks of a world of {world_size}"
    elif ranks is not None and list(ranks) != sorted(set(ranks)):
        why = "its holders are not sorted, or one is there twice"
    elif owner is not None and (not 0 <= owner < world_size or (ranks is not None and owner not in ranks)):
        why = f"its owner, rank {owner}, does not hold it"
    if why is not None:
        raise StateMismatchError(f"leaf {shard.spec.name!r} is declared wrongly: {why}", rank=rank)


def split(shard: Shard, rect: Rect, holders: tuple[int, ...], split_bytes: int = SPLIT_BYTES) -> list[tuple[Rect, int]]:
    """Return the pieces of one rectangle with the rank that writes each; together they are the rectangle.

    Cut along the first dim that has a row for everybody (else the longest), into at most as many pieces as keeps
    each at a useful size, dealt to holders spread evenly over the group from a start that a hash picks.
    """
    if not rect.numel:
        return []
    nbytes = rect.numel * itemsize(shard.spec.dtype)
    start = _hash(shard.spec.name, rect.offsets) % len(holders)
    if nbytes < split_bytes or len(holders) == 1 or not rect.sizes:
        return [(rect, holders[start])]
    num_pieces = min(len(holders), max(1, nbytes // max(1, min(MIN_PIECE_BYTES, split_bytes))))
    dim = next(
        (d for d, size in enumerate(rect.sizes) if size >= num_pieces),
        max(range(len(rect.sizes)), key=lambda d: rect.sizes[d]),
    )
    num_pieces = min(num_pieces, rect.sizes[dim])
    out = []
    for i in range(num_pieces):
        lo, hi = (rect.sizes[dim] * j // num_pieces for j in (i, i + 1))
        writer = holders[(start + i * len(holders) // num_pieces) % len(holders)]
        out.append((_slice(rect, dim, lo, hi), writer))
    return out


def _slice(rect: Rect, dim: int, lo: int, hi: int) -> Rect:
    offsets = (*rect.offsets[:dim], rect.offsets[dim] + lo, *rect.offsets[dim + 1 :])
    return Rect(offsets, (*rect.sizes[:dim], hi - lo, *rect.sizes[dim + 1 :]))


def _hash(name: str, offsets: tuple[int, ...]) -> int:
    text = f"{name}\0{','.join(map(str, offsets))}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
