"""Boxes of integers as arrays of first and end coordinates: what is left uncovered, and which box covers what.

Invariants: pure; boxes are half open, `lo` and `hi` have shape (n, ndim). The order of rows is their priority, first
wins. What is exact here is exact for any boxes; that it is fast is for the regular ones that meshes make.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from safehold.types import Rect

Int64 = npt.NDArray[np.int64]

MAX_CELLS = 1 << 22
MAX_GRID_DIMS = 10


def describe(rect: Rect) -> str:
    """Return `[4:8, 0:16]`, `[]` for the whole of a 0-dim tensor."""
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(rect.offsets, rect.sizes, strict=True)) + "]"


def subtract(box: Rect, hole: Rect) -> list[Rect]:
    """Return `box` without `hole`, which lies inside it, as at most 2 * ndim disjoint boxes."""
    out = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        lo, hi = hole.offsets[dim], hole.offsets[dim] + hole.sizes[dim]
        end = offsets[dim] + sizes[dim]
        for first, last in ((offsets[dim], lo), (hi, end)):
            if last > first:
                out.append(
                    Rect((*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], last - first, *sizes[dim + 1 :]))
                )
        offsets[dim], sizes[dim] = lo, hi - lo
    return out


def resolve(box: Rect, lo: Int64, hi: Int64) -> tuple[list[tuple[int, Rect]], list[Rect]]:
    """Cover `box` with the rows, the first that has an element giving it.

    Returns:
        (row, part of the box that it gives), ordered by row, and what no row has.
    """
    found: list[tuple[int, Rect]] = []
    left: list[Rect] = []
    todo: list[tuple[Rect, Int64]] = [(box, np.arange(len(lo)))]
    while todo:
        at, rows = todo.pop()
        first = np.array(at.offsets, np.int64)
        end = first + np.array(at.sizes, np.int64)
        rows = rows[((lo[rows] < end) & (hi[rows] > first)).all(axis=1)]
        if not len(rows):
            left.append(at)
            continue
        row = int(rows[0])
        begin = np.maximum(first, lo[row])
        sizes = np.minimum(end, hi[row]) - begin
        part = Rect(tuple(begin.tolist()), tuple(sizes.tolist()))
        found.append((row, part))
        todo.extend((rest, rows[1:]) for rest in subtract(at, part))
    found.sort(key=lambda item: (item[0], item[1].offsets))
    return found, left


def grid(lo: Int64, hi: Int64, end: Int64) -> tuple[list[Int64], Int64, Int64] | None:
    """Compress coordinates: borders along each dim, and boxes counted in cells between; None for too many cells or dims."""
    if lo.shape[1] > MAX_GRID_DIMS:
        return None  # a cell has two to the power of that many corners
    borders, first, last, cells = [], [], [], 1
    for dim in range(lo.shape[1]):
        edges = np.unique(np.concatenate([lo[:, dim], hi[:, dim], np.array([0, end[dim]], np.int64)]))
        cells *= max(1, len(edges) - 1)
        if cells > MAX_CELLS:
            return None
        borders.append(edges)
        first.append(np.searchsorted(edges, lo[:, dim]))
        last.append(np.searchsorted(edges, hi[:, dim]))
    return borders, np.stack(first, axis=1), np.stack(last, axis=1)


def depth(shape: tuple[int, ...], first: Int64, last: Int64) -> Int64:
    """Return how many boxes lie on each cell of a grid: a difference array, summed along each dim."""
    ndim = len(shape)
    counts = np.zeros(tuple(n + 1 for n in shape), np.int64)
    for corner in range(1 << ndim):
        ends = [(corner >> dim) & 1 for dim in range(ndim)]
        at = tuple((last if end else first)[:, dim] for dim, end in enumerate(ends))
        np.add.at(counts, at, -1 if sum(ends) % 2 else 1)
    for dim in range(ndim):
        np.cumsum(counts, axis=dim, out=counts)
    return counts[tuple(slice(0, n) for n in shape)]


def are_disjoint(lo: Int64, hi: Int64) -> bool:
    """Say whether no two boxes share an element; False also where that would be too much work to find out."""
    cells = grid(lo, hi, hi.max(axis=0))
    if cells is None:
        return False
    borders, first, last = cells
    return int(depth(tuple(len(edges) - 1 for edges in borders), first, last).max(initial=0)) <= 1
