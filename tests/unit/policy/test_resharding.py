"""Where wanted bytes come from. Round trips between meshes are in tests/property/test_policy_resharding.py."""

from __future__ import annotations

import time

import numpy as np
import pytest
from policy_plans import big_plan, plan_of

from safehold.errors import CoverageError, StateMismatchError
from safehold.policy import resharding
from safehold.policy.resharding import PlanIndex, Transfer, byte_range, flat_to_rects, transfers
from safehold.types import Rect


def test_a_wanted_rectangle_is_put_together_from_what_was_written():
    plan = plan_of({"a": (10, 3)}, [("a", 0, (0, 0), (4, 3)), ("a", 1, (4, 0), (6, 3))])
    found = transfers(plan, [("a", Rect((3, 1), (3, 2)))])
    assert [(item.rank, item.part) for item in found] == [(0, Rect((3, 1), (1, 2))), (1, Rect((4, 1), (2, 2)))]
    assert found[0].piece == Rect((0, 0), (4, 3))
    assert transfers(plan, [("a", Rect((3, 1), (0, 2)))]) == []


def test_the_lowest_rank_counts_unless_another_is_preferred():
    plan = plan_of({"a": (4,)}, [("a", rank, (0,), (4,)) for rank in range(4)])
    wanted = [("a", Rect((1,), (2,)))]
    assert [item.rank for item in transfers(plan, wanted)] == [0]
    assert [item.rank for item in transfers(plan, wanted, prefer=(3, 1))] == [3]
    assert [item.rank for item in transfers(plan, wanted, prefer=(9, 2))] == [2]


def test_overlaps_are_read_once():
    rows = [("a", 0, (0,), (4,)), ("a", 1, (2,), (6,)), ("a", 2, (0,), (8,))]
    plan = plan_of({"a": (8,)}, rows)
    found = transfers(plan, [("a", Rect((0,), (8,)))])
    assert [(item.rank, item.part) for item in found] == [(0, Rect((0,), (4,))), (1, Rect((4,), (4,)))]
    found = transfers(plan, [("a", Rect((0,), (8,)))], prefer=(1,))
    assert [(item.rank, item.part) for item in found] == [(1, Rect((2,), (6,))), (0, Rect((0,), (2,)))]


def test_an_alias_finds_the_bytes_of_its_leaf():
    plan = plan_of({"emb": (4,)}, [("emb", 0, (0,), (4,))])
    object.__setattr__(plan, "aliases", (("head", "emb"), ("lost", "gone")))
    assert transfers(PlanIndex(plan), [("head", Rect((0,), (4,)))])[0].rank == 0
    with pytest.raises(StateMismatchError, match="lost"):
        transfers(plan, [("lost", Rect((0,), (4,)))])


def test_holes_unknown_names_and_bad_rectangles_are_refused_by_name():
    plan = plan_of({"a": (10, 3)}, [("a", 0, (0, 0), (4, 3)), ("a", 1, (5, 0), (5, 3))])
    with pytest.raises(CoverageError, match=r"'a': \[4:5, 0:3\]"):
        transfers(plan, [("a", Rect((0, 0), (10, 3)))])
    with pytest.raises(StateMismatchError, match="'b'"):
        transfers(plan, [("b", Rect((0, 0), (10, 3)))])
    for rect in [Rect((0, 0), (11, 3)), Rect((0,), (4,)), Rect((-1, 0), (2, 3)), Rect((0, 0, 0), (1, 1, 1))]:
        with pytest.raises(StateMismatchError, match="has shape"):
            transfers(plan, [("a", rect)])


def test_byte_ranges_run_from_the_first_needed_byte_to_the_last():
    piece = Rect((2, 0), (4, 8))
    assert byte_range(Transfer(0, 0, 0, 1000, piece, piece), 4) == (1000, 1000 + 4 * 8 * 4)
    assert byte_range(Transfer(0, 0, 0, 1000, piece, Rect((3, 0), (2, 8))), 4) == (1032, 1096)
    assert byte_range(Transfer(0, 0, 0, 1000, piece, Rect((3, 2), (2, 1))), 4) == (1000 + 40, 1000 + 76)
    assert byte_range(Transfer(0, 0, 0, 64, Rect((), ()), Rect((), ())), 8) == (64, 72)


def test_flat_ranges():
    assert flat_to_rects(0, 1, ()) == [Rect((), ())]
    assert flat_to_rects(0, 24, (2, 3, 4)) == [Rect((0, 0, 0), (2, 3, 4))]
    assert flat_to_rects(5, 19, (2, 3, 4)) == [
        Rect((0, 1, 1), (1, 1, 3)),
        Rect((0, 2, 0), (1, 1, 4)),
        Rect((1, 0, 0), (1, 1, 4)),
        Rect((1, 1, 0), (1, 1, 3)),
    ]
    assert flat_to_rects(3, 3, (4,)) == []
    for bad in [(-1, 2), (2, 1), (0, 5)]:
        with pytest.raises(ValueError):
            flat_to_rects(*bad, (4,))


def test_a_rank_that_wants_thousands_of_leaves_of_a_large_plan():
    plan = big_plan(1500, 1024, (1024 * 6, 8), axis=0)
    index = PlanIndex(plan)
    wanted = [(f"l{n}", Rect((6 * 100, 0), (6 * 20, 8))) for n in range(1500)]
    begun = time.process_time()
    found = transfers(index, wanted)
    assert time.process_time() - begun < 5
    assert len(found) == 1500 * 20
    assert sum(item.part.numel for item in found) == 1500 * 6 * 20 * 8


def test_irregular_pieces_without_a_grid(monkeypatch):
    monkeypatch.setattr(resharding.boxes, "MAX_CELLS", 1)
    rows = [("a", 0, (0, 0), (1, 3)), ("a", 1, (1, 0), (2, 2)), ("a", 2, (1, 2), (2, 1))]
    found = transfers(plan_of({"a": (3, 3)}, rows), [("a", Rect((0, 0), (3, 3)))])
    seen = np.zeros((3, 3), int)
    for item in found:
        seen[tuple(slice(a, a + n) for a, n in zip(item.part.offsets, item.part.sizes, strict=True))] += 1
    assert (seen == 1).all()


def test_an_overlap_does_not_hide_a_hole_of_its_size():
    rows = [("a", 0, (0, 0), (2, 2)), ("a", 1, (1, 1), (2, 2)), ("a", 2, (0, 2), (1, 1))]
    assert sum(size[0] * size[1] for _, _, _, size in rows) == 9
    with pytest.raises(CoverageError):
        transfers(plan_of({"a": (3, 3)}, rows), [("a", Rect((0, 0), (3, 3)))])
    rows = [("a", 0, (0,), (2,)), ("a", 1, (1,), (2,))]
    with pytest.raises(CoverageError):
        transfers(plan_of({"a": (4,)}, rows), [("a", Rect((0,), (4,)))])


def test_few_pieces_and_many_are_found_alike(monkeypatch):
    rng = np.random.default_rng(3)
    for _ in range(300):
        rows = []
        for rank in range(int(rng.integers(1, 5))):
            first = rng.integers(0, 4, 2)
            size = [int(rng.integers(0, 5 - at)) for at in first]
            rows.append(("a", rank, tuple(map(int, first)), tuple(size)))
        rows.append(("a", 9, (0, 0), (4, 4)))
        offset = rng.integers(0, 4, 2)
        want = Rect(tuple(map(int, offset)), tuple(int(rng.integers(1, 5 - at)) for at in offset))
        plan = plan_of({"a": (4, 4)}, rows if rng.random() < 0.5 else rows[-1:])
        found = transfers(plan, [("a", want)])
        with monkeypatch.context() as patch:
            patch.setattr(resharding, "_FEW_ROWS", 0)
            assert transfers(plan, [("a", want)]) == found
