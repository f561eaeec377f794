"""From a rank's leaves to its part and to what is copied where: everything of a save that does not depend on the values.

Invariants: the arena is laid out as the packs will lie on storage, followed by the area that is staged for comparison only. A layout is
made once for a given set of leaves and settlement and used again as long as both stay the same; then a save costs no planning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from safehold.format import dtypes, pack
from safehold.format import part as parts
from safehold.format.names import piece_key
from safehold.format.plan import digest as digest_of
from safehold.pipeline.staging import StageItem
from safehold.policy import compare, planning
from safehold.policy.settlement import EMPTY, Settlement
from safehold.state.leaves import Leaves, TensorLeaf
from safehold.types import Inventory, Rect, TensorSpec

COMPARE_ALIGN = 64
SAMPLE_BYTES = compare.MAX_SAMPLES * compare.MAX_SAMPLE_BYTES
SAMPLE_PADDING_BYTES = compare.MAX_SAMPLES * COMPARE_ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """How one rank's leaves become its arena.

    Attributes:
        part: The encoded part; `digest` names it.
        packs: (arena offset, size) of each pack.
        headers: (arena offset, bytes) to be written before staging: pack headers and the zeros of the padding.
        items: What is copied, in arena order.
        pack_bytes: Size of all packs.
        place: (leaf name, rectangle) -> arena offset of the piece that has exactly it.
        whole: Leaves that this rank writes whole for want of a settlement, as (leaf index, rectangle).
        inventory: The inventory it was made for.
    """

    part: bytes
    digest: str
    packs: tuple[tuple[int, int], ...]
    headers: tuple[tuple[int, bytes], ...]
    items: tuple[StageItem, ...]
    pack_bytes: int
    place: dict[tuple[int, Rect], int]
    whole: tuple[tuple[int, Rect], ...]
    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared between ranks at one save: (key, arena offset, nbytes), what must be staged for it, and the arena's size.

    `made_for` is the layout's digest and the settlement.
    """

    ranges: list[tuple[str, int, int]]
    items: list[StageItem]
    arena_bytes: int
    made_for: tuple[str, Settlement]


class Planner:
    """Makes layouts and keeps the last one.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        pack_size_bytes: Where packs are split.
        split_bytes: From which size replicated tensors are split among their holders.
    """

    def __init__(self, rank: int, world_size: int, *, pack_size_bytes: int, split_bytes: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._pack_size_bytes, self._split_bytes = pack_size_bytes, split_bytes
        self.settlement: Settlement = EMPTY
        self._key: tuple[Any, ...] = ()
        self._held: tuple[Leaves, Settlement] | None = None
        self._layout: SaveLayout | None = None
        self._compared_with: tuple[str, Settlement] | None = None

    def layout(self, leaves: Leaves) -> SaveLayout:
        """Return the layout for these leaves; cheap if they are the very same bindings as last time."""
        key = (
            id(self.settlement),
            tuple(map(id, leaves.tensors)),
            tuple((leaf.spec.name, leaf.spec.policy) for leaf in leaves.objects),
            tuple(leaves.aliases.items()),
        )
        if self._layout is None or key != self._key:
            self._layout = self._make(leaves)
            self._key, self._held = key, (leaves, self.settlement)
        return self._layout

    def undeclared(self, layout: SaveLayout) -> list[TensorSpec]:
        """Return the specs of leaves whose holders nobody declared."""
        return [
            shard.spec
            for shard in layout.inventory.shards
            if shard.holders.ranks is None and shard.holders.owner is None
        ]

    def compared(self, comparison: Comparison) -> None:
        """Note that the save of a comparison is durable: what was compared whole is equal."""
        self._compared_with = comparison.made_for

    def comparison(self, layout: SaveLayout, leaves: Leaves, step: int) -> Comparison:
        """Return what this save stages and checksums to compare undeclared leaves with other ranks'.

        All of them are compared until a save of the layout is durable, then a sample.
        """
        if self._world_size == 1:
            return Comparison(
                ranges=[], items=[], arena_bytes=layout.pack_bytes, made_for=(layout.digest, self.settlement)
            )
        last = self._compared_with
        first = last is None or last[0] != layout.digest or last[1] is not self.settlement
        wanted = [
            (entry.leaf_index, entry.rect, entry.key)
            for entry in compare.compare_pieces(
                layout.inventory, self.settlement, step=step, first=first, split_bytes=self._split_bytes
            )
        ]
        for index, rect in layout.whole:
            spec = layout.inventory.shards[index].spec
            wanted.append((index, rect, piece_key(spec.name, rect, spec.shape)))
        return self._place_comparison(layout, leaves, wanted)

    def _place_comparison(
        self, layout: SaveLayout, leaves: Leaves, wanted: Sequence[tuple[int, Rect, str]]
    ) -> Comparison:
        ranges, items = [], []
        end = layout.pack_bytes
        for index, rect, key in wanted:
            leaf = leaves.tensors[index]
            nbytes = rect.numel * dtypes.itemsize(leaf.spec.dtype)
            if not nbytes:
                continue
            offset = layout.place.get((index, rect))
            if offset is None:
                offset = end
                items.append(
                    StageItem(
                        name=leaf.spec.name, view=view_of(leaf, rect), offset=offset, nbytes=nbytes, hooked=leaf.hooked
                    )
                )
                end += -(-nbytes // COMPARE_ALIGN) * COMPARE_ALIGN
            ranges.append((key, offset, nbytes))
        # A sample is of other rectangles than the whole: an arena that had room for all of these has room for any sample.
        end = max(
            end, layout.pack_bytes + min(sum(nbytes for _, _, nbytes in ranges), SAMPLE_BYTES) + SAMPLE_PADDING_BYTES
        )
        end = end if ranges else layout.pack_bytes
        size, made_for = -(-end // 4096) * 4096, (layout.digest, self.settlement)
        return Comparison(ranges=ranges, items=items, arena_bytes=size, made_for=made_for)

    def _make(self, leaves: Leaves) -> SaveLayout:
        inventory = leaves.inventory(self._rank, self._world_size)
        assigned = planning.pieces_to_write(inventory, self.settlement, split_bytes=self._split_bytes)
        assigned += _empty_leaves(inventory)
        layouts = pack.layout(planning.pieces_in(inventory, assigned), pack_size_bytes=self._pack_size_bytes)
        encoded = parts.encode_part(planning.make_part(inventory, assigned, layouts))
        items, place = [], {}
        for placed in layouts.pieces:
            entry = assigned[placed.index]
            leaf = leaves.tensors[entry.leaf_index]
            place[entry.leaf_index, entry.rect] = placed.arena_offset
            if placed.nbytes:
                items.append(
                    StageItem(
                        name=leaf.spec.name,
                        view=view_of(leaf, entry.rect),
                        offset=placed.arena_offset,
                        nbytes=placed.nbytes,
                        hooked=leaf.hooked,
                    )
                )
        return SaveLayout(
            part=encoded,
            digest=digest_of(encoded),
            packs=tuple((entry.arena_offset, entry.size_bytes) for entry in layouts.packs),
            headers=tuple(_headers(layouts)),
            items=tuple(items),
            pack_bytes=layouts.size_bytes,
            place=place,
            whole=tuple((entry.leaf_index, entry.rect) for entry in assigned if entry.whole),
            inventory=inventory,
        )


def _empty_leaves(inventory: Inventory) -> list[planning.Assignment]:
    """Leaves without elements are stored too, as pieces of no bytes, by the lowest rank that has them."""
    found = []
    for index, shard in enumerate(inventory.shards):
        writers = shard.holders.ranks or (inventory.rank,)
        if shard.spec.shape and 0 in shard.spec.shape and inventory.rank == min(writers):
            found.append(planning.Assignment(index, Rect.whole(shard.spec.shape)))
    return found


def _headers(layouts: pack.PackLayouts) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    ends = [0] * len(layouts.packs)
    for placed in layouts.pieces:
        ends[placed.pack] = max(ends[placed.pack], placed.offset + placed.nbytes)
    for number, entry in enumerate(layouts.packs):
        found.append((entry.arena_offset, entry.header))
        end = max(ends[number], len(entry.header))
        if end < entry.size_bytes:
            found.append((entry.arena_offset + end, bytes(entry.size_bytes - end)))
    return found


def view_of(leaf: TensorLeaf, rect: Rect) -> Any:
    """Return the live view of a rectangle that lies inside one of the leaf's pieces.

    Raises:
        ValueError: It does not.
    """
    for bound, view in leaf.pieces:
        if bound == rect:
            return view
        if rect.numel and bound.intersect(rect) == rect:
            return view[
                tuple(
                    slice(start - base, start - base + size)
                    for start, base, size in zip(rect.offsets, bound.offsets, rect.sizes, strict=True)
                )
            ]
    raise ValueError(f"{leaf.spec.name}: {rect} is not held here")
