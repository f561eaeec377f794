"""Whether replicas are equal."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from safehold.errors import StateMismatchError
from safehold.format.dtypes import itemsize
from safehold.policy import compare
from safehold.policy.compare import MAX_SAMPLE_BYTES, MAX_SAMPLES, compare_pieces, disagreements, mismatch
from safehold.policy.planning import pieces_to_write
from safehold.policy.settlement import settle
from safehold.types import UNDECLARED, Holders, Inventory, Rect, Shard, TensorSpec


def spec(name, shape=(8, 4), dtype="float32"):
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def inventory(rank, world_size, leaves, holders=UNDECLARED):
    shards = tuple(Shard(spec=leaf, rects=(Rect.whole(leaf.shape),), holders=holders) for leaf in leaves)
    return Inventory(rank=rank, world_size=world_size, shards=shards)


def test_the_first_time_all_is_compared_in_the_rectangles_that_are_written():
    leaves = [spec("big", (4096, 1024)), spec("empty", (0, 3)), spec("scalar", ())]
    settlement = settle(dict.fromkeys(range(4), leaves))
    found = [compare_pieces(inventory(r, 4, leaves), settlement, step=1, first=True) for r in range(4)]
    assert all(one == found[0] for one in found)
    written = {
        (item.leaf_index, item.rect)
        for rank in range(4)
        for item in pieces_to_write(inventory(rank, 4, leaves), settlement)
    }
    assert {(one.leaf_index, one.rect) for one in found[0]} == written
    assert len({one.key for one in found[0]}) == len(found[0])


def test_later_a_sample_that_moves():
    leaves = [spec(f"layer{n}", (512, 1024)) for n in range(20)] + [spec(f"tiny{n}", (3,)) for n in range(20)]
    settlement = settle(dict.fromkeys(range(4), leaves))
    seen = Counter()
    for step in range(100):
        found = [compare_pieces(inventory(r, 4, leaves), settlement, step=step, first=False) for r in range(4)]
        assert all(one == found[0] for one in found)
        assert 0 < len(found[0]) <= MAX_SAMPLES
        for one in found[0]:
            leaf = leaves[one.leaf_index]
            assert one.rect.numel * itemsize(leaf.dtype) <= MAX_SAMPLE_BYTES
            assert Rect.whole(leaf.shape).intersect(one.rect) == one.rect
            seen[leaf.name] += 1
    assert len(seen) == len(leaves)


def test_members_of_a_group_choose_alike_whatever_else_they_hold():
    """Rank 0 is in many groups, rank 1 in one; what they share they must compare at the same steps."""
    shared = spec("shared", (600, 600))
    alone = {rank: spec(f"with{rank}", (64,)) for rank in range(1, 60)}
    held = {0: [shared, *alone.values()], **{rank: [shared, leaf] for rank, leaf in alone.items()}}
    settlement = settle(held)
    compared = 0
    for step in range(200):
        keys = {}
        for rank in (0, 1, 59):
            found = compare_pieces(inventory(rank, 60, held[rank]), settlement, step=step, first=False)
            assert len(found) <= MAX_SAMPLES
            keys[rank] = {one.key for one in found if one.key.startswith("shared")}
        assert keys[0] == keys[1] == keys[59]
        compared += bool(keys[0])
    assert compared > 20


def test_what_is_declared_owned_alone_or_not_settled_is_not_compared():
    leaf = spec("w")
    both = settle({0: [leaf], 1: [leaf]})
    for first in (True, False):
        assert compare_pieces(inventory(0, 2, [leaf], Holders(ranks=(0, 1))), both, step=1, first=first) == []
        assert compare_pieces(inventory(0, 2, [leaf], Holders(owner=0)), both, step=1, first=first) == []
        assert compare_pieces(inventory(0, 2, [leaf]), settle({0: [leaf]}), step=1, first=first) == []
        assert compare_pieces(inventory(0, 2, [leaf]), settle({}), step=1, first=first) == []


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (100_000,), (3, 50_000), (50_000, 3), (40, 30, 20, 10), (2, 3, 1), (1, 1, 70_000)]
)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128"])
def test_blocks_tile_a_leaf(shape, dtype):
    leaf = spec("w", shape, dtype)
    blocks = [compare.block(leaf, number) for number in range(compare.num_blocks(leaf))]
    assert sum(rect.numel for rect in blocks) == math.prod(shape)
    assert all(rect.numel * itemsize(dtype) <= MAX_SAMPLE_BYTES for rect in blocks)
    starts = [rect.offsets for rect in blocks]
    assert starts == sorted(set(starts))


def test_disagreements_name_who_differs_from_most():
    crcs = {
        0: {"a": 1, "b@0,0": 5, "b@4,0": 6, "c": 1},
        1: {"a": 1, "b@0,0": 5, "b@4,0": 7, "c": 2},
        2: {"a": 9, "b@0,0": 5, "b@4,0": 6},
    }
    found = disagreements(crcs)
    # Of equally common values the lowest rank's is taken to be right.
    assert found == [("a", [2]), ("b", [1]), ("c", [1])]
    error = mismatch(found, step=7)
    assert isinstance(error, StateMismatchError) and error.step == 7 and error.rank == 2
    assert "'a' on rank 2" in str(error)


def test_no_disagreement():
    assert disagreements({}) == []
    assert disagreements({0: {"a": 1}, 1: {}}) == []
    assert disagreements({0: {"a": 1}, 1: {"a": 1}, 2: {"b": 3}}) == []
    assert mismatch([], step=1) is None
