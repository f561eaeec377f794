"""Copies of verified bytes of a pack to what is restored: a contiguous run on both sides, or a strided box.

Invariant: knows where bytes lie and nothing of where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from safehold.policy.resharding import Transfer
from safehold.state.fill import Target
from safehold.types import Rect


@dataclass(slots=True)
class Copy:
    """A run of bytes of a chunk that goes to a target: all of it contiguous on both sides, or a small strided box."""

    target: Target
    start: int
    stop: int
    raw_offset: int
    transfer: Transfer
    wanted: Rect
    itemsize: int


def is_run(part: Rect, box: Rect) -> bool:
    """Whether `part` is one contiguous run of the row-major bytes of `box`."""
    free = [d for d in range(len(part.sizes)) if part.sizes[d] != box.sizes[d]]
    return not free or all(part.sizes[d] == 1 for d in range(free[-1]))


def offset_in(found: Transfer, wanted: Rect, itemsize: int) -> int:
    """Return the byte offset of the part inside the wanted rectangle, or -1 unless it is one run on both sides."""
    if not is_run(found.part, found.piece) or not is_run(found.part, wanted):
        return -1
    place, stride = 0, 1
    for dim in range(len(wanted.sizes) - 1, -1, -1):
        place += (found.part.offsets[dim] - wanted.offsets[dim]) * stride
        stride *= wanted.sizes[dim]
    return place * itemsize


def apply(copy: Copy, data: memoryview, chunk_start: int) -> None:
    """Copy a run out of `data`, the bytes of a pack from `chunk_start` on, to its target."""
    run = data[copy.start - chunk_start : copy.stop - chunk_start]
    if copy.raw_offset >= 0 and copy.target.raw is not None:
        place = copy.target.raw[copy.raw_offset : copy.raw_offset + len(run)]
        np.copyto(place, np.frombuffer(run, np.uint8))
        return
    part, piece = copy.transfer.part, copy.transfer.piece
    index = tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(part.offsets, copy.wanted.offsets, part.sizes, strict=True)
    )
    copy.target.fill(index, part.sizes, _box(run, part, piece, copy.itemsize))


def _box(run: memoryview, part: Rect, piece: Rect, itemsize: int) -> memoryview:
    """Return the row-major bytes of `part`, given the bytes of `piece` from its first to its last element."""
    if is_run(part, piece):
        return run
    strides: list[int] = []
    stride = itemsize
    for size in reversed(piece.sizes):
        strides.insert(0, stride)
        stride *= size
    raw = np.frombuffer(run, np.uint8)
    shape = (*part.sizes, itemsize)
    view = np.lib.stride_tricks.as_strided(raw, shape=shape, strides=(*strides, 1), writeable=False)
    return np.ascontiguousarray(view).reshape(-1).data
