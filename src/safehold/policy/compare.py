"""Whether what is taken to be the same on all ranks is: which bytes each rank checksums, and what the checksums say.

An undeclared tensor is taken to be equal on all ranks that have it. The first save compares all of it, later ones a
sample that moves with the step, so that replicas that drift apart are found.

Invariants: all holders of a leaf compare the same rectangles under the same keys, without asking each other: the
choice depends on the settlement and the step only, never on what else a rank holds. What an owner decides is not
compared.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from safehold.errors import StateMismatchError
from safehold.format.dtypes import itemsize
from safehold.format.names import parse_piece_key, piece_key
from safehold.policy.planning import SPLIT_BYTES, split
from safehold.policy.settlement import Settlement
from safehold.policy.spans import describe
from safehold.types import Inventory, Rect, TensorSpec

MAX_SAMPLES = 32
MAX_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CompareRange:
    """A rectangle whose bytes (row-major, contiguous) a rank checksums to have them compared.

    Attributes:
        leaf_index: Index into the inventory's shards.
        rect: The rectangle.
        key: Name of the range, the same on all ranks: see `safehold.format.names.piece_key`.
    """

    leaf_index: int
    rect: Rect
    key: str


def compare_pieces(
    inventory: Inventory, settlement: Settlement, *, step: int, first: bool, split_bytes: int = SPLIT_BYTES
) -> list[CompareRange]:
    """Return what a rank checksums for comparison at this save.

    Args:
        inventory: What the rank holds.
        settlement: Who holds the undeclared leaves; leaves of one holder, or not settled, are not compared.
        step: Moves the sample.
        first: True: all of every such leaf, in the rectangles that planning writes. False: at most `MAX_SAMPLES`
            rectangles of at most `MAX_SAMPLE_BYTES` (or one element).
        split_bytes: As given to planning.
    """
    indices = {
        shard.spec: index
        for index, shard in enumerate(inventory.shards)
        if shard.holders.ranks is None and shard.holders.owner is None and len(shard.rects) == 1
    }
    out: list[CompareRange] = []
    if first:
        for spec, index in indices.items():
            holders = settlement.holders(spec, inventory.rank)
            if holders is not None and len(holders) > 1:
                shard = inventory.shards[index]
                pieces = split(shard, shard.rects[0], holders, split_bytes)
                out.extend(_range(index, spec, rect) for rect, _ in pieces)
        return out
    for spec, rect in _sample(settlement, inventory.rank, step):
        if spec in indices:
            out.append(_range(indices[spec], spec, rect))
    return out


def _range(index: int, spec: TensorSpec, rect: Rect) -> CompareRange:
    return CompareRange(index, rect, piece_key(spec.name, rect, spec.shape))


def _sample(settlement: Settlement, rank: int, step: int) -> list[tuple[TensorSpec, Rect]]:
    """Choose what to compare at `step` of the leaves of the rank's groups; every member of a group chooses alike."""
    members = Counter(rank for group in settlement.groups if len(group) > 1 for rank in group)
    most = max(members.values(), default=0)
    if not most:
        return []
    shared = [index for index, group in enumerate(settlement.groups) if len(group) > 1]
    if most > MAX_SAMPLES:
        # More groups than samples: the step picks which groups have their turn, for all ranks alike.
        shared = sorted(shared, key=lambda index: _hash(step, index, "group"))[:MAX_SAMPLES]
    num_samples = max(1, MAX_SAMPLES // min(most, MAX_SAMPLES))
    mine = [index for index in shared if rank in settlement.groups[index]]
    leaves: dict[int, list[TensorSpec]] = {index: [] for index in mine}
    for spec, index in settlement.group_of.items():
        if index in leaves and 0 not in spec.shape:
            leaves[index].append(spec)
    out: dict[tuple[TensorSpec, Rect], None] = {}
    for index in mine:
        specs = sorted(leaves[index], key=lambda spec: spec.name)
        for number in range(num_samples if specs else 0):
            out[_pick(specs, step, index, number)] = None
    return list(out)


def _pick(specs: list[TensorSpec], step: int, group: int, number: int) -> tuple[TensorSpec, Rect]:
    """Pick a block: by turns any leaf alike, for the small ones, and any byte alike, for the large ones."""
    if number % 2 == 0:
        spec = specs[_hash(step, group, f"leaf {number}") % len(specs)]
        return spec, block(spec, _hash(step, group, f"block {number}") % num_blocks(spec))
    place = _hash(step, group, f"byte {number}") % sum(map(num_blocks, specs))
    for spec in specs:
        if place < num_blocks(spec):
            return spec, block(spec, place)
        place -= num_blocks(spec)
    raise AssertionError("a place among all blocks lies in one of the leaves")


def _rows_per_block(spec: TensorSpec) -> tuple[int, int]:
    """Return the dim along which blocks are cut and its rows in a block; later dims are whole, earlier ones single."""
    limit = max(1, MAX_SAMPLE_BYTES // max(1, itemsize(spec.dtype)))
    inner = 1
    for dim in range(len(spec.shape) - 1, -1, -1):
        if inner * spec.shape[dim] > limit or dim == 0:
            return dim, max(1, min(spec.shape[dim], limit // inner))
        inner *= spec.shape[dim]
    return 0, 1


def num_blocks(spec: TensorSpec) -> int:
    """Return how many blocks of at most `MAX_SAMPLE_BYTES` a leaf with elements has."""
    if not spec.shape:
        return 1
    dim, rows = _rows_per_block(spec)
    return math.prod(spec.shape[:dim]) * -(-spec.shape[dim] // rows)


def block(spec: TensorSpec, number: int) -> Rect:
    """Return a block of a leaf, counted row-major."""
    if not spec.shape:
        return Rect((), ())
    dim, rows = _rows_per_block(spec)
    number, place = divmod(number, -(-spec.shape[dim] // rows))
    outer: list[int] = []
    for size in reversed(spec.shape[:dim]):
        number, at = divmod(number, size)
        outer.insert(0, at)
    tail = spec.shape[dim + 1 :]
    start = place * rows
    return Rect((*outer, start, *(0 for _ in tail)), (*(1 for _ in outer), min(rows, spec.shape[dim] - start), *tail))


def _hash(step: int, group: int, what: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{step} {group} {what}".encode(), digest_size=8).digest(), "little")


def disagreements(crcs: Mapping[int, Mapping[str, int]]) -> list[tuple[str, list[int]]]:
    """Find leaves that ranks hold different bytes of.

    Args:
        crcs: Rank -> key of a range -> its checksum. A range that a rank did not report is no disagreement.

    Returns:
        (leaf name, ranks that differ from the value that most ranks have; of equally common values from the lowest
        rank's), by name.
    """
    values: dict[str, dict[int, int]] = defaultdict(dict)
    for rank in sorted(crcs):
        for key, crc in crcs[rank].items():
            values[key][rank] = crc
    differ: dict[str, set[int]] = defaultdict(set)
    for key, of_rank in values.items():
        if len(set(of_rank.values())) > 1:
            # Ranks ascend, and of equal counts the first met is given: the lowest rank's.
            usual = Counter(of_rank.values()).most_common(1)[0][0]
            differ[parse_piece_key(key)[0]].update(rank for rank, crc in of_rank.items() if crc != usual)
    return [(name, sorted(differ[name])) for name in sorted(differ)]


def mismatch(found: list[tuple[str, list[int]]], *, step: int) -> StateMismatchError | None:
    """Put disagreements into the error that the save fails with; None if there are none."""
    if not found:
        return None
    shown = "; ".join(f"{name!r} on {describe(ranks)}" for name, ranks in found[:4])
    more = f"; and {len(found) - 4} more leaves" if len(found) > 4 else ""
    return StateMismatchError(
        f"tensors that are taken to be the same on all ranks differ: {shown}{more}",
        step=step,
        rank=found[0][1][0],
        hint="declare what differs between ranks: safehold.PerRank(value) or safehold.Sharded(...); "
        "what should not differ has drifted apart, and an older checkpoint may be better",
    )
