"""Who writes what."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from safehold.errors import StateMismatchError
from safehold.format import pack, plan
from safehold.policy.planning import MIN_PIECE_BYTES, SPLIT_BYTES, make_part, pieces_in, pieces_to_write, split
from safehold.policy.settlement import EMPTY, settle
from safehold.types import UNDECLARED, Holders, Inventory, Rect, Shard, TensorSpec

MIB = 1 << 20


def spec(name="w", shape=(8, 4), dtype="float32"):
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def inventory(rank, world_size, *shards):
    return Inventory(rank=rank, world_size=world_size, shards=shards)


def held(leaf, holders=UNDECLARED, rects=None):
    return Shard(spec=leaf, rects=(Rect.whole(leaf.shape),) if rects is None else rects, holders=holders)


def written(world_size, make_shard, settlement=EMPTY):
    """Return rank -> assignments."""
    return {r: pieces_to_write(inventory(r, world_size, make_shard(r)), settlement) for r in range(world_size)}


def test_a_shard_of_its_own_is_written_by_its_rank():
    rects = (Rect((0, 0), (2, 4)), Rect((6, 0), (2, 4)))
    found = pieces_to_write(inventory(1, 4, held(spec(), Holders(ranks=(1,)), rects)))
    assert [item.rect for item in found] == list(rects)
    assert not any(item.whole for item in found)


def test_small_replicas_are_written_once_and_spread_over_ranks():
    everybody = Holders(ranks=tuple(range(8)))
    writers = Counter()
    for number in range(400):
        by_rank = written(8, lambda r, n=number: held(spec(f"layers.{n}.step", ()), everybody))
        (writer,) = [rank for rank, found in by_rank.items() if found]
        assert [item.rect for item in by_rank[writer]] == [Rect((), ())]
        writers[writer] += 1
    assert set(writers) == set(range(8))
    assert max(writers.values()) < 2 * min(writers.values())


def test_large_replicas_are_cut_into_rows_for_all_holders():
    leaf = spec(shape=(4099, 1024))
    by_rank = written(8, lambda r: held(leaf, Holders(ranks=tuple(range(8)))))
    assert all(len(found) == 1 for found in by_rank.values())
    pieces = sorted((found[0].rect for found in by_rank.values()), key=lambda rect: rect.offsets)
    assert pieces[0].offsets == (0, 0)
    ends = [(rect.offsets[0], rect.offsets[0] + rect.sizes[0]) for rect in pieces]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends)) and ends[-1][1] == 4099
    assert max(rect.sizes[0] for rect in pieces) - min(rect.sizes[0] for rect in pieces) <= 1


def test_many_holders_do_not_make_tiny_pieces():
    leaf, holders = spec(shape=(1 << 20,)), tuple(range(1024))
    pieces = split(held(leaf, Holders(ranks=holders)), Rect.whole(leaf.shape), holders)
    assert len(pieces) == SPLIT_BYTES // MIN_PIECE_BYTES
    assert len({writer for _, writer in pieces}) == len(pieces)
    writers = sorted(writer for _, writer in pieces)
    assert min(b - a for a, b in itertools.pairwise(writers)) >= 1024 // len(pieces) - 1


@pytest.mark.parametrize("shape", [(1, 4 * MIB), (2, 1, 3 * MIB), (3, 2 * MIB), (1, 1, 2, MIB)])
def test_a_first_dim_with_too_few_rows_is_not_what_is_cut(shape):
    leaf, holders = spec(shape=shape), (0, 1, 2, 3)
    pieces = split(held(leaf, Holders(ranks=holders)), Rect.whole(shape), holders)
    assert sorted(writer for _, writer in pieces) == [0, 1, 2, 3]
    assert sum(rect.numel for rect, _ in pieces) == Rect.whole(shape).numel


def test_anything_may_be_shared_among_its_holders():
    everybody = Holders(ranks=(0, 1, 2))
    shard = held(spec(shape=(4,)), everybody)
    found = {r: pieces_to_write(inventory(r, 3, shard), split_bytes=0) for r in range(3)}
    assert sorted(item.rect.offsets for items in found.values() for item in items) == [(0,), (1,), (2,)]
    assert all(len(items) == 1 for items in found.values())


def test_the_owner_alone_writes():
    shard = held(spec(shape=(4096, 4096)), Holders(ranks=(0, 1, 2), owner=1))
    by_rank = written(3, lambda r: shard)
    assert [len(by_rank[rank]) for rank in range(3)] == [0, 1, 0]
    assert by_rank[1][0].rect == Rect.whole((4096, 4096))
    undeclared_owner = held(spec(), Holders(owner=0))
    assert [len(found) for found in written(2, lambda r: undeclared_owner).values()] == [1, 0]


def test_a_plain_tensor_alone_settled_and_unsettled():
    leaf = spec()
    alone = pieces_to_write(inventory(0, 1, held(leaf)))
    assert [item.whole for item in alone] == [False]
    unsettled = written(3, lambda r: held(leaf))
    assert all([item.whole for item in found] == [True] for found in unsettled.values())
    settlement = settle({rank: [leaf] for rank in range(3)})
    settled = written(3, lambda r: held(leaf), settlement)
    assert sum(len(found) for found in settled.values()) == 1
    assert not any(item.whole for found in settled.values() for item in found)


def test_a_rank_outside_the_settled_group_writes_all_it_has():
    leaf = spec()
    settlement = settle({0: [leaf], 1: [leaf]})
    found = pieces_to_write(inventory(2, 3, held(leaf)), settlement)
    assert [item.whole for item in found] == [True]
    changed = spec(shape=(9, 4))
    assert [item.whole for item in pieces_to_write(inventory(0, 3, held(changed)), settlement)] == [True]


def test_empty_rectangles_and_ranks_that_hold_nothing_write_nothing():
    empty = held(spec(shape=(0, 4)), Holders(ranks=(0, 1)))
    nothing = held(spec("v"), Holders(ranks=(0,)), rects=())
    assert pieces_to_write(inventory(0, 2, nothing, empty)) == []


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        (Holders(ranks=(0, 2)), "do not include this rank"),
        (Holders(ranks=(1, 7)), "are not ranks of a world of 3"),
        (Holders(ranks=(1, 0)), "not sorted"),
        (Holders(ranks=(0, 1, 1)), "there twice"),
        (Holders(ranks=(0, 1), owner=2), "its owner, rank 2"),
        (Holders(owner=9), "its owner, rank 9"),
    ],
)
def test_wrong_declarations_are_refused_by_name(holders, words):
    with pytest.raises(StateMismatchError, match=words) as caught:
        pieces_to_write(inventory(1, 3, held(spec("model.w"), holders)))
    assert "model.w" in str(caught.value) and caught.value.rank == 1


def test_the_choice_does_not_depend_on_python_hashing():
    """Frozen: ranks with other versions or hash seeds must choose alike."""
    everybody = tuple(range(16))
    chosen = [split(held(spec(f"layers.{n}.norm.weight", (64,))), Rect((0,), (64,)), everybody)[0][1] for n in range(8)]
    assert chosen == [2, 4, 8, 8, 2, 4, 12, 1]


def test_the_part_says_where_each_piece_lies():
    leaves = [spec("a", (3, 5)), spec("b", ()), spec("c", (2, 3, 4), "bfloat16"), spec("d", (4,))]
    mine = Holders(ranks=(1,))
    shards = [
        held(leaves[0], mine, (Rect((1, 0), (2, 5)),)),
        held(leaves[1], mine),
        held(leaves[2], mine),
        held(leaves[3], mine, ()),
    ]
    what = inventory(1, 2, *shards)
    assignments = pieces_to_write(what)
    layouts = pack.layout(pieces_in(what, assignments))
    part = make_part(what, assignments, layouts)
    again = plan.decode_part(plan.encode_part(part))
    assert again.leaves == tuple(leaves) and again.rank == 1 and again.world_size == 2
    assert again.leaf.tolist() == [0, 1, 2]
    assert again.offsets.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert again.sizes.tolist() == [[2, 5, 1], [1, 1, 1], [2, 3, 4]]
    by_index = {piece.index: piece.offset for piece in layouts.pieces}
    assert again.offset.tolist() == [by_index[i] for i in range(3)]


def test_a_rank_without_any_tensor_has_a_part():
    what = inventory(0, 2)
    part = make_part(what, [], pack.layout([]))
    assert plan.decode_part(plan.encode_part(part)).leaf.tolist() == []


@pytest.mark.parametrize("shape", [(2, 2), (1,), (3, 1), (2, 1, 3), ()])
def test_no_piece_is_empty_however_many_holders(shape):
    leaf, holders = spec(shape=shape), tuple(range(16))
    pieces = split(held(leaf, Holders(ranks=holders)), Rect.whole(shape), holders, split_bytes=1)
    assert all(rect.numel for rect, _ in pieces)
    assert sum(rect.numel for rect, _ in pieces) == Rect.whole(shape).numel
