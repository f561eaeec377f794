"""Whether all parts together hold every element of every leaf, and which copy counts where several ranks wrote one.

Invariants: exact for any rectangles; of an element that several rows hold, the row of the lowest rank counts. Work
is done on whole columns: leaf by leaf only where pieces overlap or are cut along more than the first dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from safehold.errors import CoverageError
from safehold.format.names import counted
from safehold.format.plan import Plan
from safehold.policy import boxes
from safehold.types import Rect

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MAX_SHOWN = 3
_MAX_LINE = 1 << 62


def check(plan: Plan) -> Bool:
    """Check that every element of every leaf is written by some rank.

    Args:
        plan: The merged parts; rows sorted by leaf, offsets, rank.

    Returns:
        For each row whether it counts: whether it has an element that no row of a lower rank has. Readers resolve
        an overlap by the same rule.

    Raises:
        CoverageError: Elements are written by nobody, or a row lies outside its leaf; names leaves and ranges.
    """
    shapes = _shapes(plan)
    _check_inside(plan, shapes)
    filled: Bool = np.all(plan.sizes > 0, axis=1)
    rows = np.flatnonzero(filled) if not filled.all() else np.arange(len(plan.leaf))
    counts = filled.copy()
    sliced = _sliced_leaves(plan, shapes, rows)
    missing, overlapping = _check_lines(plan, shapes, rows, sliced)
    others = [*np.flatnonzero(~sliced).tolist(), *overlapping]
    first = np.searchsorted(plan.leaf, np.arange(len(plan.leaves) + 1))
    for leaf in others:
        at = np.arange(first[leaf], first[leaf + 1])
        at = at[filled[at]]
        holes = _check_leaf(plan, leaf, at, counts)
        if holes:
            missing[leaf] = holes
    if missing:
        raise _uncovered(plan, missing)
    return counts


def _shapes(plan: Plan) -> Int64:
    """Return the leaves' shapes, padded with ones as the rows' sizes are."""
    ndim = plan.sizes.shape[1]
    shapes = np.ones((len(plan.leaves), ndim), np.int64)
    for index, leaf in enumerate(plan.leaves):
        shapes[index, : len(leaf.shape)] = leaf.shape
    return shapes


def _check_inside(plan: Plan, shapes: Int64) -> None:
    outside = (plan.offsets < 0) | (plan.sizes < 0) | (plan.sizes > shapes[plan.leaf] - plan.offsets)
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        leaf = plan.leaves[int(plan.leaf[row])]
        rect = _rect(plan, row, len(leaf.shape))
        raise CoverageError(
            f"leaf {leaf.name!r} has shape {list(leaf.shape)}, but a part has {boxes.describe(rect)} of it",
            rank=int(plan.rank[row]),
        )


def _rect(plan: Plan, row: int, ndim: int) -> Rect:
    return Rect(tuple(plan.offsets[row, :ndim].tolist()), tuple(plan.sizes[row, :ndim].tolist()))


def _sliced_leaves(plan: Plan, shapes: Int64, rows: Int64) -> Bool:
    """Return for each leaf whether its pieces are cut along the first dim only, and so are intervals on a line."""
    sliced = np.ones(len(plan.leaves), np.bool_)
    if plan.sizes.shape[1] > 1:
        cut = (plan.sizes[:, 1:] != shapes[plan.leaf][:, 1:]).any(axis=1)
        sliced[plan.leaf[rows[cut[rows]]]] = False
    if sum(int(shapes[leaf, 0]) for leaf in range(len(plan.leaves)) if shapes.shape[1]) >= _MAX_LINE:
        sliced[:] = False
    return sliced


def _check_lines(plan: Plan, shapes: Int64, rows: Int64, sliced: Bool) -> tuple[dict[int, list[Rect]], list[int]]:
    """Check all sliced leaves at once, laid one after the other on one line.

    Returns:
        Leaf -> ranges that are missing, and the leaves whose pieces overlap and need a closer look to say which count.
    """
    length = np.where(sliced & (shapes > 0).all(axis=1), shapes[:, 0] if shapes.shape[1] else 1, 0)
    base = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    rows = rows[sliced[plan.leaf[rows]]] if not sliced.all() else rows
    leaf = plan.leaf[rows]
    lo = base[leaf] + (plan.offsets[rows, 0] if shapes.shape[1] else 0)
    hi = lo + (plan.sizes[rows, 0] if shapes.shape[1] else 1)
    reach = np.maximum.accumulate(hi)
    before = np.concatenate([np.zeros(1, np.int64), reach])
    after = np.concatenate([lo, base[-1:]])
    gaps = np.flatnonzero(after > before)
    missing: dict[int, list[Rect]] = {}
    for gap in gaps.tolist():
        _add_gap(plan, missing, base, int(before[gap]), int(after[gap]))
    overlapping = np.unique(leaf[np.flatnonzero(lo < before[:-1])])
    return missing, overlapping.tolist()


def _add_gap(plan: Plan, missing: dict[int, list[Rect]], base: Int64, start: int, stop: int) -> None:
    """Record a gap of the line, which may span several leaves."""
    leaf = int(np.searchsorted(base, start, side="right")) - 1
    while start < stop:
        end = min(stop, int(base[leaf + 1]))
        if end > start:
            shape = plan.leaves[leaf].shape
            rect = Rect((start - int(base[leaf]), *(0 for _ in shape[1:])), (end - start, *shape[1:]))
            missing.setdefault(leaf, []).append(rect if shape else Rect((), ()))
            start = end
        leaf += 1


def _check_leaf(plan: Plan, leaf: int, rows: Int64, counts: Bool) -> list[Rect]:
    """Check one leaf of any kind; clears `counts` for rows that give nothing and returns what is missing."""
    shape = plan.leaves[leaf].shape
    if 0 in shape:
        return []
    if not len(rows):
        return [Rect.whole(shape)]
    ndim = len(shape)
    rows = rows[np.argsort(plan.rank[rows], kind="stable")]
    lo, hi = plan.offsets[rows, :ndim], plan.offsets[rows, :ndim] + plan.sizes[rows, :ndim]
    # Copies of one rectangle are common (leaves that were not settled): only the first can count.
    _, firsts = np.unique(np.concatenate([lo, hi], axis=1), axis=0, return_index=True)
    firsts.sort()
    counts[rows] = False
    rows, lo, hi = rows[firsts], lo[firsts], hi[firsts]
    whole = np.flatnonzero(((lo == 0) & (hi == np.array(shape, np.int64))).all(axis=1))
    if len(whole):
        rows, lo, hi = rows[: whole[0] + 1], lo[: whole[0] + 1], hi[: whole[0] + 1]
    gives, holes = _resolve(shape, lo, hi)
    counts[rows[gives]] = True
    return holes


def _resolve(shape: tuple[int, ...], lo: Int64, hi: Int64) -> tuple[Int64, list[Rect]]:
    """Return which boxes (in order of priority) give an element, and what none has."""
    if not shape:
        return np.zeros(1, np.int64), []
    cells = boxes.grid(lo, hi, np.array(shape, np.int64))
    if cells is None:
        found, left = boxes.resolve(Rect.whole(shape), lo, hi)
        return np.array(sorted({row for row, _ in found}), np.int64), left
    borders, first, last = cells
    layout = tuple(len(edges) - 1 for edges in borders)
    depth = boxes.depth(layout, first, last)
    if depth.min() < 1:
        return np.arange(0), [_hole(borders, depth)]
    if depth.max() == 1:
        return np.arange(len(lo)), []
    owner = np.full(layout, -1, np.int64)
    for row in range(len(lo) - 1, -1, -1):
        owner[tuple(slice(a, b) for a, b in zip(first[row].tolist(), last[row].tolist(), strict=True))] = row
    return np.unique(owner), []


def _hole(borders: list[Int64], depth: Int64) -> Rect:
    """Return the first uncovered cell, grown along the last dim, then the others, while all of it is uncovered."""
    at = [int(index[0]) for index in np.nonzero(depth < 1)]
    end = [place + 1 for place in at]
    for dim in range(len(at) - 1, -1, -1):
        while end[dim] < depth.shape[dim]:
            end[dim] += 1
            if depth[tuple(slice(a, b) for a, b in zip(at, end, strict=True))].max() > 0:
                end[dim] -= 1
                break
    offsets = tuple(int(edges[place]) for edges, place in zip(borders, at, strict=True))
    ends = tuple(int(edges[place]) for edges, place in zip(borders, end, strict=True))
    return Rect(offsets, tuple(b - a for a, b in zip(offsets, ends, strict=True)))


def _uncovered(plan: Plan, missing: dict[int, list[Rect]]) -> CoverageError:
    shown = sorted(missing)[:MAX_SHOWN]
    words = "; ".join(f"{plan.leaves[leaf].name!r} lacks {_ranges(missing[leaf])}" for leaf in shown)
    more = f"; and {len(missing) - len(shown)} more" if len(missing) > len(shown) else ""
    noun = "leaf is" if len(missing) == 1 else "leaves are"
    return CoverageError(
        f"{len(missing)} {noun} not written whole by the {counted(plan.world_size, 'rank')} together: {words}{more}",
        hint="a rank left out a shard that others count on it to write, or a declaration of shards is wrong",
    )


def _ranges(rects: Iterable[Rect]) -> str:
    rects = list(rects)
    more = f" and {len(rects) - MAX_SHOWN} more ranges" if len(rects) > MAX_SHOWN else ""
    if any(math.prod(rect.sizes) and not rect.sizes for rect in rects):
        return "its one element"
    return ", ".join(boxes.describe(rect) for rect in rects[:MAX_SHOWN]) + more
