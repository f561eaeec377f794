"""From leaves to arenas: every byte of every pack is defined, packs are valid safetensors, ranks agree without talking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from safehold.format import dtypes
from safehold.format import plan as plans
from safehold.format.names import PAD_PREFIX, piece_key
from safehold.pipeline.layout import Planner, SaveLayout, view_of
from safehold.policy import settlement
from safehold.policy.coverage import check as check_coverage
from safehold.state.leaves import Leaves, ObjectLeaf, TensorLeaf
from safehold.types import UNDECLARED, Holders, ObjectSpec, Rect, TensorSpec


def leaf_of(
    name: str, array: np.ndarray, pieces: list[Rect] | None = None, holders: Holders = UNDECLARED
) -> TensorLeaf:
    spec = TensorSpec(name=name, dtype=dtypes.from_numpy(array.dtype), shape=array.shape, kind="numpy")
    rects = [Rect.whole(array.shape)] if pieces is None else pieces
    return TensorLeaf(spec=spec, pieces=tuple((rect, array[slices(rect)].copy()) for rect in rects), holders=holders)


def slices(rect: Rect) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))


def arena_of(layout: SaveLayout, more: int = 0) -> tuple[bytearray, np.ndarray]:
    """Fill an arena as a save does; also say which bytes were written."""
    arena, written = bytearray(b"\xaa" * (layout.pack_bytes + more)), np.zeros(layout.pack_bytes + more, np.int32)
    for offset, data in layout.headers:
        arena[offset : offset + len(data)] = data
        written[offset : offset + len(data)] += 1
    ends = 0
    for item in layout.items:
        data = item.view.tobytes()
        assert len(data) == item.nbytes > 0 and item.offset >= ends, item.name
        arena[item.offset : item.offset + item.nbytes] = data
        written[item.offset : item.offset + item.nbytes] += 1
        ends = item.offset + item.nbytes
    return arena, written


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, dict[str, np.ndarray], list[Leaves]]:
    """The state of every rank: leaves that are sharded by rows, declared replicas, owned, undeclared, or one rank's."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    world_size = draw(st.integers(1, 4))
    arrays: dict[str, np.ndarray] = {}
    ranks: list[list[TensorLeaf]] = [[] for _ in range(world_size)]
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(rng.integers(0 if rng.random() < 0.15 else 1, 9, size=rng.integers(0, 4)).tolist())
        name = f"leaf{number}"
        array = rng.integers(0, 100, size=shape).astype(rng.choice(["f4", "f8", "i1", "c8", "?"]))
        arrays[name] = array = np.asarray(array)
        how = draw(st.sampled_from(["rows", "replicas", "owned", "undeclared", "one"]))
        for rank in range(world_size):
            if how == "rows" and shape:
                step = -(-shape[0] // world_size)
                start = min(rank * step, shape[0])
                rows = Rect((start, *(0 for _ in shape[1:])), (min(step, shape[0] - start), *shape[1:]))
                ranks[rank].append(leaf_of(name, array, [rows] if rows.numel else [], Holders(ranks=(rank,))))
            elif how == "owned":
                ranks[rank].append(leaf_of(name, array, holders=Holders(owner=world_size - 1)))
            elif how == "undeclared":
                ranks[rank].append(leaf_of(name, array))
            elif how == "one":
                if rank == number % world_size:
                    ranks[rank].append(leaf_of(name, array, holders=Holders(ranks=(rank,))))
            else:
                ranks[rank].append(leaf_of(name, array, holders=Holders(ranks=tuple(range(world_size)))))
    return world_size, arrays, [Leaves(tensors=leaves) for leaves in ranks]


@settings(max_examples=100, deadline=None)
@given(
    world=worlds(),
    pack_size=st.sampled_from([1, 4096, 1 << 40]),
    split=st.sampled_from([1, 64, 1 << 40]),
    settled=st.booleans(),
)
def test_packs_hold_every_leaf_and_no_byte_is_left_to_chance(
    world: tuple[int, dict[str, np.ndarray], list[Leaves]], pack_size: int, split: int, settled: bool
) -> None:
    world_size, arrays, ranks = world
    planners = [Planner(r, world_size, pack_size_bytes=pack_size, split_bytes=split) for r in range(world_size)]
    if settled:
        said = {rank: p.undeclared(p.layout(ranks[rank])) for rank, p in enumerate(planners)}
        for planner in planners:
            planner.settlement = settlement.from_wire(settlement.to_wire(settlement.settle(said)))
    layouts = [planner.layout(leaves) for planner, leaves in zip(planners, ranks, strict=True)]
    plan = plans.merge_parts([layout.part for layout in layouts], [0] * world_size)
    check_coverage(plan)
    assert {leaf.name: leaf.shape for leaf in plan.leaves} == {name: array.shape for name, array in arrays.items()}
    found: dict[str, np.ndarray] = {name: np.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    stored = dict.fromkeys(arrays, 0)
    for layout in layouts:
        arena, written = arena_of(layout)
        assert (written == 1).all(), "a byte is written twice, or by nobody"
        tensors = {}
        for offset, size in layout.packs:
            assert offset % 4096 == size % 4096 == 0
            tensors |= safetensors.numpy.load(bytes(arena[offset : offset + size]))
        for (index, rect), _ in layout.place.items():
            spec = layout.inventory.shards[index].spec
            value = tensors.pop(piece_key(spec.name, rect, spec.shape))
            found[spec.name][slices(rect)] = value.view(found[spec.name].dtype).reshape(rect.sizes)
            stored[spec.name] += rect.numel
        assert all(key.startswith(PAD_PREFIX) for key in tensors)
    for name, array in arrays.items():
        assert found[name].tobytes() == array.tobytes(), name
        if settled or world_size == 1:
            assert stored[name] == array.size, f"{name} is stored more than once"


@settings(max_examples=60, deadline=None)
@given(world=worlds(), step=st.integers(0, 1000))
def test_comparisons_lie_in_the_arena_and_have_the_same_keys_everywhere(
    world: tuple[int, dict[str, np.ndarray], list[Leaves]], step: int
) -> None:
    world_size, _, ranks = world
    planners = [Planner(r, world_size, pack_size_bytes=1 << 40, split_bytes=64) for r in range(world_size)]
    said = {rank: p.undeclared(p.layout(ranks[rank])) for rank, p in enumerate(planners)}
    settled = settlement.settle(said)
    seen: list[dict[str, bytes]] = []
    for planner, leaves in zip(planners, ranks, strict=True):
        planner.settlement = settled
        layout = planner.layout(leaves)
        first = planner.comparison(layout, leaves, step)
        assert first.arena_bytes % 4096 == 0 and first.arena_bytes >= layout.pack_bytes
        arena, _ = arena_of(layout, first.arena_bytes - layout.pack_bytes)
        ends = layout.pack_bytes
        for item in first.items:
            assert item.offset >= ends
            ends = item.offset + item.nbytes
            arena[item.offset : ends] = item.view.tobytes()
        assert ends <= first.arena_bytes
        seen.append({key: bytes(arena[at : at + nbytes]) for key, at, nbytes in first.ranges})
        planner.compared(first)
        later = planner.comparison(layout, leaves, step)
        assert later.arena_bytes <= first.arena_bytes
    if world_size > 1:
        assert all(found == seen[0] for found in seen)
        assert (not seen[0]) == (not any(spec for spec in said[0] if 0 not in spec.shape))


def state(*names: str) -> Leaves:
    return Leaves(tensors=[leaf_of(name, np.arange(6.0).reshape(2, 3)) for name in names])


def test_the_same_bindings_are_planned_once() -> None:
    planner = Planner(0, 1, pack_size_bytes=1 << 40, split_bytes=64)
    leaves = state("a", "b")
    first = planner.layout(leaves)
    assert planner.layout(leaves) is first
    assert planner.layout(Leaves(tensors=list(leaves.tensors))) is first
    again = planner.layout(state("a", "b"))
    assert again is not first and again.digest == first.digest
    more = Leaves(tensors=leaves.tensors, objects=[ObjectLeaf(spec=ObjectSpec(name="step"), value=1)])
    assert planner.layout(more).digest != first.digest
    tied = Leaves(tensors=leaves.tensors, aliases={"c": "a"})
    assert planner.layout(tied).digest not in (first.digest, planner.layout(more).digest)
    planner.settlement = settlement.settle({0: planner.undeclared(first)})
    assert planner.layout(leaves) is not first


def test_leaves_that_come_and_go_are_seen() -> None:
    planner = Planner(0, 1, pack_size_bytes=1 << 40, split_bytes=64)
    digests = {planner.layout(state(*names)).digest for names in (["a"], ["a", "b"], ["b"], [])}
    assert len(digests) == 4


def test_without_a_settlement_everybody_writes_all_and_compares_it() -> None:
    leaves = state("a")
    planner = Planner(1, 3, pack_size_bytes=1 << 40, split_bytes=64)
    layout = planner.layout(leaves)
    assert layout.whole == ((0, Rect.whole((2, 3))),)
    (found,) = planner.comparison(layout, leaves, 1).ranges
    assert found == ("a", layout.place[0, Rect.whole((2, 3))], 48)


def test_all_is_compared_until_a_save_is_durable() -> None:
    leaves = Leaves(tensors=[leaf_of("w", np.zeros((3000, 1000), np.float32))])
    planner = Planner(0, 2, pack_size_bytes=1 << 40, split_bytes=4 << 20)
    said = planner.undeclared(planner.layout(leaves))
    planner.settlement = settlement.settle({0: said, 1: said})
    layout = planner.layout(leaves)

    def compared_bytes(step: int) -> int:
        return sum(nbytes for _, _, nbytes in planner.comparison(layout, leaves, step).ranges)

    lost = planner.comparison(layout, leaves, 1)
    assert compared_bytes(2) == compared_bytes(1) == 12_000_000
    planner.compared(lost)
    assert compared_bytes(3) < 12_000_000


@pytest.mark.parametrize(
    ("rect", "right"),
    [(Rect((1, 0), (1, 3)), [[3.0, 4.0, 5.0]]), (Rect((0, 1), (2, 1)), [[1.0], [4.0]]), (Rect((0, 0), (2, 3)), None)],
)
def test_views_of_rectangles(rect: Rect, right: Any) -> None:
    leaf = state("a").tensors[0]
    found = view_of(leaf, rect)
    assert np.shares_memory(found, leaf.pieces[0][1])
    assert found.tolist() == (right if right is not None else leaf.pieces[0][1].tolist())


def test_a_view_of_what_is_not_held_is_refused() -> None:
    leaf = leaf_of("a", np.arange(6.0).reshape(2, 3), [Rect((0, 0), (1, 3))])
    with pytest.raises(ValueError, match=r"a: .* is not held here"):
        view_of(leaf, Rect((0, 0), (2, 3)))


def test_a_sample_needs_no_larger_arena_than_the_whole_did() -> None:
    """What this rank writes lies in its packs whole; a sample cuts it elsewhere, and stages it once more."""
    leaves = Leaves(
        tensors=[leaf_of("a", np.zeros((8, 8, 8))), leaf_of("b", np.zeros(7, np.int8)), leaf_of("c", np.zeros((3, 5)))]
    )
    for rank in range(2):
        planner = Planner(rank, 2, pack_size_bytes=1 << 40, split_bytes=64)
        said = planner.undeclared(planner.layout(leaves))
        planner.settlement = settlement.settle({0: said, 1: said})
        layout = planner.layout(leaves)
        first = planner.comparison(layout, leaves, 0)
        planner.compared(first)
        assert all(planner.comparison(layout, leaves, step).arena_bytes <= first.arena_bytes for step in range(50))
