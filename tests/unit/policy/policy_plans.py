"""Plans made of plain rows, for the tests of coverage and resharding."""

from __future__ import annotations

import numpy as np

from safehold.format.plan import Plan
from safehold.types import TensorSpec


def plan_of(leaves, rows, world_size=4):
    """`leaves`: name -> shape; `rows`: (name, rank, offsets, sizes)."""
    names = sorted(leaves)
    ndim = max((len(shape) for shape in leaves.values()), default=0)
    table = sorted(
        (names.index(name), (*lo, *(0,) * (ndim - len(lo))), rank, (*size, *(1,) * (ndim - len(size))))
        for name, rank, lo, size in rows
    )
    return Plan(
        world_size=world_size,
        nodes=(0,) * world_size,
        leaves=tuple(TensorSpec(name=name, dtype="float32", shape=leaves[name]) for name in names),
        rank=np.array([row[2] for row in table], np.int32),
        leaf=np.array([row[0] for row in table], np.int32),
        offsets=np.array([row[1] for row in table], np.int64).reshape(len(table), ndim),
        sizes=np.array([row[3] for row in table], np.int64).reshape(len(table), ndim),
        pack=np.zeros(len(table), np.int32),
        offset=np.zeros(len(table), np.int64),
        pack_sizes={},
        objects=((),) * world_size,
    )


def big_plan(num_leaves, num_ranks, shape, axis):
    """A plan of `num_leaves` x `num_ranks` rows, sharded along one dim."""
    rows = num_leaves * num_ranks
    each = shape[axis] // num_ranks
    offsets, sizes = np.zeros((rows, 2), np.int64), np.tile(np.array(shape, np.int64), (rows, 1))
    offsets[:, axis] = np.tile(np.arange(num_ranks) * each, num_leaves)
    sizes[:, axis] = each
    return Plan(
        world_size=num_ranks,
        nodes=(0,) * num_ranks,
        leaves=tuple(TensorSpec(name=f"l{n}", dtype="float32", shape=shape) for n in range(num_leaves)),
        rank=np.tile(np.arange(num_ranks, dtype=np.int32), num_leaves),
        leaf=np.repeat(np.arange(num_leaves, dtype=np.int32), num_ranks),
        offsets=offsets,
        sizes=sizes,
        pack=np.zeros(rows, np.int32),
        offset=np.zeros(rows, np.int64),
        pack_sizes={},
        objects=((),) * num_ranks,
    )
