"""Index arithmetic behind shards: which global indices a local dim holds.

Invariants: pure integers, no framework. A dim's `Ranges` are (first global index, length) in the order in which local
memory has them, none of them empty; boxes come in an order that the same input always gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from safehold.types import Rect

Ranges: TypeAlias = tuple[tuple[int, int], ...]


def whole_range(size: int) -> Ranges:
    """Return the ranges of a dim that is not sharded."""
    return ((0, size),) if size else ()


def total(ranges: Ranges) -> int:
    """Return how many indices `ranges` have together."""
    return sum(size for _, size in ranges)


def take(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the indices at local positions `start` to `stop` (exclusive), neighbours joined."""
    taken: list[tuple[int, int]] = []
    position = 0
    for first, size in ranges:
        lo, hi = max(start - position, 0), min(stop - position, size)
        position += size
        if lo >= hi:
            continue
        if taken and sum(taken[-1]) == first + lo:
            taken[-1] = (taken[-1][0], taken[-1][1] + hi - lo)
        else:
            taken.append((first + lo, hi - lo))
    return tuple(taken)


def chunk(ranges: Ranges, num_chunks: int, index: int) -> Ranges:
    """Return chunk `index` of `num_chunks` as `torch.chunk` cuts: sizes rounded up, the last ones smaller or empty."""
    size = total(ranges)
    step = -(-size // num_chunks)
    return take(ranges, min(size, step * index), min(size, step * (index + 1)))


def strided_chunk(ranges: Ranges, num_chunks: int, index: int, *, split_factor: int) -> Ranges:
    """Return what torch's `_StridedShard` leaves at `index`: chunk `index` of each of `split_factor` chunks."""
    parts = (chunk(chunk(ranges, split_factor, part), num_chunks, index) for part in range(split_factor))
    joined = tuple(itertools.chain.from_iterable(parts))
    return take(joined, 0, total(joined))


def boxes(local: Rect, dims: Sequence[Ranges]) -> list[tuple[Rect, Rect]]:
    """Cut a box of local indices into boxes that are boxes globally too.

    Args:
        local: A box inside the local tensor.
        dims: The ranges of each local dim.

    Returns:
        Pairs (local box, global box), row-major by local position; none is empty.
    """
    cuts: list[list[tuple[int, int, int]]] = []
    for offset, size, ranges in zip(local.offsets, local.sizes, dims, strict=True):
        position, dim_cuts = 0, []
        for first, length in ranges:
            lo, hi = max(offset - position, 0), min(offset + size - position, length)
            if lo < hi:
                dim_cuts.append((position + lo, first + lo, hi - lo))
            position += length
        cuts.append(dim_cuts)
    found = []
    for combination in itertools.product(*cuts):
        sizes = tuple(size for _, _, size in combination)
        inner = Rect(tuple(start for start, _, _ in combination), sizes)
        found.append((inner, Rect(tuple(first for _, first, _ in combination), sizes)))
    return found
