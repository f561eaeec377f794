"""Where a rank finds the bytes of what it wants, whatever world size, mesh or placement they were saved with.

Invariants: every element that is wanted comes from exactly one stored piece; where several ranks stored it, that of
the preferred, else the lowest rank. Cost grows with what is wanted and with the pieces of those leaves, not with the
whole plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from safehold.errors import CoverageError, StateMismatchError
from safehold.format.plan import Plan
from safehold.policy import boxes
from safehold.types import Rect

Int64 = npt.NDArray[np.int64]

# Below this, numbers of Python are faster than arrays.
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Transfer:
    """A part of a stored piece that goes into a part of a wanted rectangle.

    Attributes:
        wanted_index: Index into `wanted`.
        rank: The rank that wrote the piece.
        pack: Which of that rank's packs.
        offset: First byte of the piece in its pack.
        piece: What the piece covers, in global coordinates; stored row-major.
        part: What to copy of it, in global coordinates.
    """

    wanted_index: int
    rank: int
    pack: int
    offset: int
    piece: Rect
    part: Rect


class PlanIndex:
    """A plan made ready for many look-ups; make it once for each plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.leaf_of: dict[str, int] = {leaf.name: index for index, leaf in enumerate(plan.leaves)}
        for name, target in plan.aliases:
            if target in self.leaf_of:
                self.leaf_of.setdefault(name, self.leaf_of[target])
        self._first = np.searchsorted(plan.leaf, np.arange(len(plan.leaves) + 1))

    def rows(self, leaf: int) -> slice:
        """Return the rows of a leaf."""
        return slice(int(self._first[leaf]), int(self._first[leaf + 1]))


def transfers(
    plan: Plan | PlanIndex, wanted: Sequence[tuple[str, Rect]], *, prefer: Sequence[int] = ()
) -> list[Transfer]:
    """Find the stored pieces that make up what is wanted, each element once, in the order of `wanted`.

    Args:
        plan: The plan of the checkpoint, or its index if it is used more than once.
        wanted: (leaf name or alias, rectangle in global coordinates); an empty rectangle needs nothing.
        prefer: Ranks whose copies are taken first where several wrote the same, best first. Only for copies known
            to be equal: by default the copy that counts, of the lowest rank, is taken, the same for every reader.

    Raises:
        StateMismatchError: A name is not in the checkpoint, or a rectangle does not fit its shape.
        CoverageError: Some of what is wanted is stored nowhere.
    """
    index = plan if isinstance(plan, PlanIndex) else PlanIndex(plan)
    order = {rank: place - len(prefer) for place, rank in reversed(list(enumerate(prefer)))}
    out: list[Transfer] = []
    for number, (name, rect) in enumerate(wanted):
        leaf = index.leaf_of.get(name)
        if leaf is None:
            raise StateMismatchError(f"leaf {name!r} is not in the checkpoint")
        _check_fits(name, rect, index.plan.leaves[leaf].shape)
        if rect.numel:
            out.extend(_find(index, number, leaf, rect, order))
    return out


def _check_fits(name: str, rect: Rect, shape: tuple[int, ...]) -> None:
    fits = len(rect.offsets) == len(rect.sizes) == len(shape) and all(
        min(offset, size) >= 0 and offset + size <= end
        for offset, size, end in zip(rect.offsets, rect.sizes, shape, strict=True)
    )
    if not fits:
        raise StateMismatchError(
            f"leaf {name!r} has shape {list(shape)} in the checkpoint; {boxes.describe(rect)} is not inside it"
        )


def _find(index: PlanIndex, number: int, leaf: int, rect: Rect, order: dict[int, int]) -> list[Transfer]:
    """Return the transfers for one rectangle that is not empty."""
    plan, ndim = index.plan, len(rect.sizes)
    rows = index.rows(leaf)
    if rows.stop - rows.start <= _FEW_ROWS and (only := _find_only(plan, number, rows, rect)) is not None:
        return [only]
    first = plan.offsets[rows, :ndim]
    sizes = plan.sizes[rows, :ndim]
    want_lo = np.array(rect.offsets, np.int64)
    want_hi = want_lo + np.array(rect.sizes, np.int64)
    lo = np.maximum(first, want_lo)
    hi = np.minimum(first + sizes, want_hi)
    hits = np.flatnonzero((hi > lo).all(axis=1) & (sizes > 0).all(axis=1))
    lo, hi = lo[hits], hi[hits]
    ranks = plan.rank[rows][hits]
    if order:
        key = np.array([order.get(rank, 0) for rank in ranks.tolist()], np.int64)
        by = np.lexsort((ranks, key))
    else:
        by = np.argsort(ranks, kind="stable")
    hits, lo, hi, ranks = hits[by], lo[by], hi[by], ranks[by]
    if len(hits) and bool((lo[0] == want_lo).all() and (hi[0] == want_hi).all()):
        found, hits = [(0, rect)], hits[:1]
    elif _is_exact(lo, hi, rect):
        parts = zip(lo.tolist(), (hi - lo).tolist(), strict=True)
        found = [(place, Rect(tuple(start), tuple(size))) for place, (start, size) in enumerate(parts)]
    else:
        found, left = boxes.resolve(rect, lo, hi)
        if left:
            raise CoverageError(
                f"leaf {plan.leaves[leaf].name!r}: {boxes.describe(left[0])} is stored by no rank",
                hint="the checkpoint's plan has a hole; use another checkpoint",
            )
    columns = (ranks, plan.pack[rows][hits], plan.offset[rows][hits], first[hits], sizes[hits])
    stored = list(zip(*(column[: len(hits)].tolist() for column in columns), strict=True))
    out = []
    for place, part in found:
        rank, pack, offset, piece_lo, piece_sizes = stored[place]
        piece = Rect(tuple(piece_lo), tuple(piece_sizes))
        out.append(Transfer(number, rank, pack, offset, piece, part))
    return out


def _find_only(plan: Plan, number: int, rows: slice, rect: Rect) -> Transfer | None:
    """Return the transfer where one piece alone has all of what is wanted and no other has any of it, as in most restores."""
    ndim, found = len(rect.sizes), -1
    offsets, sizes = plan.offsets[rows, :ndim].tolist(), plan.sizes[rows, :ndim].tolist()
    for row, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        if all(map(_overlap, first, size, rect.offsets, rect.sizes)):
            if found >= 0:
                return None
            found = row
    if found < 0:
        return None
    first, size, row = offsets[found], sizes[found], rows.start + found
    if not all(map(_covers, first, size, rect.offsets, rect.sizes)):
        return None
    piece = Rect(tuple(first), tuple(size))
    return Transfer(number, int(plan.rank[row]), int(plan.pack[row]), int(plan.offset[row]), piece, rect)


def _overlap(first: int, size: int, wanted: int, wanted_size: int) -> bool:
    return size > 0 and first < wanted + wanted_size and wanted < first + size


def _covers(first: int, size: int, wanted: int, wanted_size: int) -> bool:
    return first <= wanted and wanted + wanted_size <= first + size


def _is_exact(lo: Int64, hi: Int64, rect: Rect) -> bool:
    """Say whether the boxes tile the rectangle without overlap: certain only where they are slices along one dim."""
    numel = int((hi - lo).prod(axis=1).sum()) if len(lo) else 0
    if numel != rect.numel:
        return False
    full = (hi - lo == np.array(rect.sizes, np.int64)).all(axis=0)
    open_dims = np.flatnonzero(~full)
    if len(open_dims) > 1:
        return boxes.are_disjoint(lo, hi)
    dim = int(open_dims[0]) if len(open_dims) else 0
    if not len(rect.sizes):
        return len(lo) == 1
    by = np.argsort(lo[:, dim], kind="stable")
    return bool((lo[by][1:, dim] == hi[by][:-1, dim]).all())


def byte_range(transfer: Transfer, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the pack from the first that is needed to just after the last."""
    first = last = 0
    stride = 1
    piece, part = transfer.piece, transfer.part
    for dim in range(len(piece.sizes) - 1, -1, -1):
        start = part.offsets[dim] - piece.offsets[dim]
        first += start * stride
        last += (start + part.sizes[dim] - 1) * stride
        stride *= piece.sizes[dim]
    return transfer.offset + first * itemsize, transfer.offset + (last + 1) * itemsize


def flat_to_rects(start: int, stop: int, shape: Sequence[int]) -> list[Rect]:
    """Decompose a range of a tensor's row-major flattening into at most 2 * ndim - 1 rectangles, in flat order.

    Args:
        start: First element.
        stop: Element after the last.
        shape: The tensor's shape.

    Raises:
        ValueError: The range is not inside the tensor.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"elements {start} to {stop} are no range of a tensor of shape {list(shape)}")
    if start == stop:
        return []
    out: list[Rect] = []
    while start < stop:
        # Whole rows of the outermost dim of which one begins at `start` and ends in range.
        dim, stride = len(shape) - 1, 1
        while dim > 0 and start % (stride * shape[dim]) == 0 and start + stride * shape[dim] <= stop:
            stride *= shape[dim]
            dim -= 1
        if dim < 0:
            return [Rect((), ())]
        at, inside = divmod(start, stride * shape[dim])
        first = inside // stride
        num_rows = min(shape[dim] - first, (stop - start) // stride)
        offsets: list[int] = []
        for size in reversed(shape[:dim]):
            at, place = divmod(at, size)
            offsets.insert(0, place)
        tail = shape[dim + 1 :]
        out.append(Rect((*offsets, first, *(0 for _ in tail)), (*(1 for _ in shape[:dim]), num_rows, *tail)))
        start += num_rows * stride
    return out
