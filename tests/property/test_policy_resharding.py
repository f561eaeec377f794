"""Any mesh and placement to any other, byte for byte, against NumPy."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safehold.errors import CoverageError
from safehold.format import pack, plan
from safehold.policy import boxes, coverage, planning, resharding
from safehold.policy.settlement import EMPTY, settle
from safehold.types import UNDECLARED, Holders, Inventory, Rect, Shard, TensorSpec

DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8, "int64": np.uint64}


@dataclass(frozen=True)
class Layout:
    """A mesh and, for each leaf, the dim that each mesh axis shards (None: replicated), `flat` or `plain`."""

    mesh: tuple[int, ...]
    placements: tuple[object, ...]

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)


def chunk(lo: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """A share as `torch.chunk` deals it: later ones may be short or empty."""
    each = -(-size // parts) if size else 0
    start = min(index * each, size)
    return lo + start, min(each, size - start)


def shard_of(spec: TensorSpec, layout: Layout, placement: object, rank: int) -> Shard:
    shape = spec.shape
    if placement == "plain":
        return Shard(spec=spec, rects=(Rect.whole(shape),), holders=UNDECLARED)
    if placement == "flat":
        start, count = chunk(0, math.prod(shape), layout.world_size, rank)
        return Shard(
            spec=spec,
            rects=tuple(resharding.flat_to_rects(start, start + count, shape)),
            holders=Holders(ranks=(rank,)),
        )
    coordinates = np.unravel_index(rank, layout.mesh)
    offsets, sizes = [0] * len(shape), list(shape)
    axes: list[range | list[int]] = []
    for axis, dim in enumerate(placement):
        if dim is None or dim >= len(shape):
            axes.append(range(layout.mesh[axis]))
            continue
        axes.append([int(coordinates[axis])])
        offsets[dim], sizes[dim] = chunk(offsets[dim], sizes[dim], layout.mesh[axis], int(coordinates[axis]))
    holders = sorted(int(np.ravel_multi_index(at, layout.mesh)) for at in itertools.product(*axes))
    rect = Rect(tuple(offsets), tuple(sizes))
    return Shard(spec=spec, rects=(rect,) if rect.numel else (), holders=Holders(ranks=tuple(holders)))


def cut(array: np.ndarray, rect: Rect, origin: Rect | None = None) -> np.ndarray:
    base = origin.offsets if origin is not None else (0,) * len(rect.offsets)
    box = (slice(a - b, a - b + n) for a, b, n in zip(rect.offsets, base, rect.sizes, strict=True))
    return array[(*box, ...)]  # the ellipsis keeps 0-dim arrays arrays


def save(specs, arrays, layout, *, settled=True, split_bytes=64):
    """Plan and write on every rank; returns the plan after a trip through bytes, and the packs."""
    inventories = [
        Inventory(
            rank=rank,
            world_size=layout.world_size,
            shards=tuple(
                shard_of(spec, layout, place, rank) for spec, place in zip(specs, layout.placements, strict=True)
            ),
        )
        for rank in range(layout.world_size)
    ]
    undeclared = {
        held.rank: [shard.spec for shard in held.shards if shard.holders.ranks is None] for held in inventories
    }
    settlement = settle(undeclared) if settled else EMPTY
    packs: dict[tuple[int, int], bytearray] = {}
    parts = []
    for held in inventories:
        assignments = planning.pieces_to_write(held, settlement, split_bytes=split_bytes)
        layouts = pack.layout(planning.pieces_in(held, assignments), pack_size_bytes=4096)
        for index, one in enumerate(layouts.packs):
            packs[held.rank, index] = bytearray(one.header) + bytearray(one.size_bytes - len(one.header))
        for placed in layouts.pieces:
            item = assignments[placed.index]
            data = cut(arrays[held.shards[item.leaf_index].spec.name], item.rect).tobytes()
            assert len(data) == placed.nbytes
            packs[held.rank, placed.pack][placed.offset : placed.offset + placed.nbytes] = data
        parts.append(plan.encode_part(planning.make_part(held, assignments, layouts)))
    merged = plan.merge_parts(parts, [rank // 2 for rank in range(layout.world_size)])
    return plan.decode_plan(plan.encode_plan(merged)), packs


def load(saved, packs, wanted, arrays, *, prefer=()):
    """Read what is wanted out of the packs and return it as arrays; nothing is filled twice."""
    specs = {leaf.name: leaf for leaf in saved.leaves}
    out = [np.zeros(rect.sizes, arrays[name].dtype) for name, rect in wanted]
    filled = [np.zeros(rect.sizes, np.int8) for _, rect in wanted]
    for item in resharding.transfers(saved, wanted, prefer=prefer):
        name, rect = wanted[item.wanted_index]
        assert specs[name].shape == arrays[name].shape
        start, stop = resharding.byte_range(item, arrays[name].itemsize)
        assert start < stop
        # Rebuild the piece from the needed bytes only: what lies outside of them is poisoned.
        piece = np.full(item.piece.sizes, 0xEE, arrays[name].dtype)
        raw = bytearray(piece.tobytes())
        raw[start - item.offset : stop - item.offset] = packs[item.rank, item.pack][start:stop]
        piece = np.frombuffer(bytes(raw), arrays[name].dtype).reshape(item.piece.sizes)
        cut(out[item.wanted_index], item.part, rect)[...] = cut(piece, item.part, item.piece)
        cut(filled[item.wanted_index], item.part, rect)[...] += 1
    assert all((one == 1).all() for one in filled)
    return out


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 7), st.integers(0, 7)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.just((41, 13)),
)
meshes = st.sampled_from([(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (4, 2), (2, 2, 2)])


@st.composite
def layouts(draw, num_leaves):
    mesh = draw(meshes)
    placement = st.one_of(
        st.just("plain"), st.just("flat"), st.tuples(*(st.sampled_from([None, 0, 1, 2]) for _ in mesh))
    )
    return Layout(mesh, tuple(draw(placement) for _ in range(num_leaves)))


@st.composite
def states(draw):
    count = draw(st.integers(1, 4))
    specs = [
        TensorSpec(name=f"leaf{i}", dtype=draw(st.sampled_from(sorted(DTYPES))), shape=draw(shapes))
        for i in range(count)
    ]
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    arrays = {
        spec.name: rng.integers(0, 256, (math.prod(spec.shape), np.dtype(DTYPES[spec.dtype]).itemsize), np.uint8)
        .view(DTYPES[spec.dtype])
        .reshape(spec.shape)
        for spec in specs
    }
    return specs, arrays, draw(layouts(count)), draw(layouts(count))


@settings(max_examples=150, deadline=None)
@given(states(), st.booleans(), st.sampled_from([1, 16, 64, 4 << 20]), st.lists(st.integers(0, 7), max_size=3))
def test_any_mesh_to_any_mesh(state, settled, split_bytes, prefer):
    specs, arrays, saving, loading = state
    saved, packs = save(specs, arrays, saving, settled=settled, split_bytes=split_bytes)
    counts = coverage.check(saved)
    if settled:
        # Every byte is written once.
        assert counts.sum() == (saved.sizes > 0).all(axis=1).sum()
        assert int(saved.sizes.prod(axis=1).sum()) == sum(array.size for array in arrays.values())
    for rank in range(loading.world_size):
        wanted = [
            (spec.name, rect)
            for spec, place in zip(specs, loading.placements, strict=True)
            for rect in shard_of(spec, loading, place, rank).rects
        ]
        for (name, rect), got in zip(wanted, load(saved, packs, wanted, arrays, prefer=prefer), strict=True):
            np.testing.assert_array_equal(got, cut(arrays[name], rect))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=4), st.data())
def test_flat_ranges_become_few_rectangles(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    rects = resharding.flat_to_rects(start, stop, shape)
    order = np.arange(numel).reshape(shape)
    flat = [int(i) for rect in rects for i in cut(order, rect).reshape(-1)]
    assert flat == list(range(start, stop))
    assert len(rects) <= max(1, 2 * len(shape) - 1)


# ---- coverage and overlap, against painting every element ----


@st.composite
def pieces(draw):
    shape = draw(st.sampled_from([(), (1,), (7,), (4, 5), (6, 1), (3, 3, 2), (0, 3)]))
    rows = []
    for _ in range(draw(st.integers(0, 7))):
        lo = [draw(st.integers(0, n)) for n in shape]
        size = [draw(st.integers(0, n - a)) for a, n in zip(lo, shape, strict=True)]
        rows.append((draw(st.integers(0, 5)), tuple(lo), tuple(size)))
    if draw(st.booleans()):
        rows.append((draw(st.integers(0, 5)), (0,) * len(shape), shape))
    return shape, rows


def plan_of(leaves):
    """A plan straight from rows (rank, offsets, sizes) per leaf."""
    ndim = max((len(shape) for shape, _ in leaves), default=0)
    rows = sorted(
        (leaf, (*lo, *(0,) * (ndim - len(lo))), rank, (*size, *(1,) * (ndim - len(size))))
        for leaf, (_, pieces) in enumerate(leaves)
        for rank, lo, size in pieces
    )
    count = len(rows)
    return plan.Plan(
        world_size=6,
        nodes=(0,) * 6,
        leaves=tuple(TensorSpec(name=f"l{i}", dtype="uint8", shape=shape) for i, (shape, _) in enumerate(leaves)),
        rank=np.array([row[2] for row in rows], np.int32),
        leaf=np.array([row[0] for row in rows], np.int32),
        offsets=np.array([row[1] for row in rows], np.int64).reshape(count, ndim),
        sizes=np.array([row[3] for row in rows], np.int64).reshape(count, ndim),
        pack=np.zeros(count, np.int32),
        offset=np.arange(count, dtype=np.int64) * 4096,
        pack_sizes=dict.fromkeys(range(6), (1 << 30,)),
        objects=((),) * 6,
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces(), min_size=1, max_size=4), st.booleans())
def test_coverage_is_what_painting_gives(leaves, no_grid):
    merged = plan_of(leaves)
    whole, gives = True, set()
    for leaf, (shape, _) in enumerate(leaves):
        owner = np.full(shape, -1)
        rows = [row for row in range(merged.num_rows) if merged.leaf[row] == leaf]
        for row in sorted(rows, key=lambda row: (merged.rank[row], row)):
            rect = Rect(tuple(merged.offsets[row, : len(shape)]), tuple(merged.sizes[row, : len(shape)]))
            view = cut(owner, rect)
            view[...] = np.where(view < 0, row, view)
        whole &= bool((owner >= 0).all())
        gives |= set(owner.reshape(-1).tolist()) - {-1}
    with pytest.MonkeyPatch.context() as patch:
        if no_grid:
            patch.setattr(boxes, "MAX_CELLS", 0)
        if not whole:
            with pytest.raises(CoverageError):
                coverage.check(merged)
            return
        counts = coverage.check(merged)
        ranks = {int(merged.rank[row]) for row in np.flatnonzero(counts)}
        assert ranks == {int(merged.rank[row]) for row in gives}
        # Of rows of one rank that overlap, either may be said to count; across ranks it is exact.
        if len({int(rank) for rank in merged.rank}) == merged.num_rows:
            assert set(np.flatnonzero(counts).tolist()) == gives
        # A reader takes every element once, whatever overlaps.
        wanted = [(f"l{leaf}", Rect.whole(shape)) for leaf, (shape, _) in enumerate(leaves)]
        for leaf, (shape, _) in enumerate(leaves):
            seen = np.zeros(shape, int)
            for item in resharding.transfers(merged, [wanted[leaf]]):
                cut(seen, item.part)[...] += 1
            assert (seen == 1).all()
