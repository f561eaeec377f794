"""What the headers of a checkpoint's packs must say, by its plan.

Invariant: pure; follows from the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from safehold.format import dtypes, names, pack
from safehold.format.plan import Plan
from safehold.types import Rect


def rows_of_packs(plan: Plan) -> dict[tuple[int, int], npt.NDArray[np.intp]]:
    """Return (rank, part) -> the plan's rows in that pack."""
    if not plan.num_rows:
        return {}
    order = np.lexsort((plan.pack, plan.rank))
    rank, part = plan.rank[order], plan.pack[order]
    borders = np.flatnonzero((np.diff(rank) != 0) | (np.diff(part) != 0)) + 1
    groups = np.split(order, borders)
    return {(int(plan.rank[rows[0]]), int(plan.pack[rows[0]])): rows for rows in groups}


def expected_tensors(plan: Plan, rows: Iterable[int] | None) -> dict[str, pack.StoredTensor]:
    """Return what the header of a pack must say of its pieces."""
    expected = {}
    for row in rows if rows is not None else ():
        spec = plan.leaves[int(plan.leaf[row])]
        ndim = len(spec.shape)
        rect = Rect(tuple(plan.offsets[row, :ndim].tolist()), tuple(plan.sizes[row, :ndim].tolist()))
        start = int(plan.offset[row])
        expected[names.piece_key(spec.name, rect, spec.shape)] = pack.StoredTensor(
            dtype=dtypes.safetensors_name(spec.dtype),
            shape=tuple(dtypes.safetensors_shape(spec.dtype, rect.sizes)),
            start=start,
            end=start + rect.numel * dtypes.itemsize(spec.dtype),
        )
    return expected
