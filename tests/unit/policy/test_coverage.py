"""Whether the parts cover every leaf. The exhaustive comparison is in tests/property/test_policy_resharding.py."""

from __future__ import annotations

import time

import numpy as np
import pytest
from policy_plans import big_plan, plan_of

from safehold.errors import CoverageError
from safehold.policy import boxes, coverage
from safehold.types import Rect


def test_slices_that_meet_cover():
    plan = plan_of(
        {"a": (10, 3), "b": (), "c": (0, 5)}, [("a", 0, (0, 0), (4, 3)), ("a", 1, (4, 0), (6, 3)), ("b", 3, (), ())]
    )
    assert coverage.check(plan).tolist() == [True, True, True]


def test_an_empty_state_is_covered():
    assert coverage.check(plan_of({}, [])).tolist() == []
    assert coverage.check(plan_of({"e": (0,), "f": (2, 0)}, [])).tolist() == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "'a' lacks [0:10, 0:3]; 'b' lacks its one element"),
        ([("b", 0, (), ()), ("a", 0, (1, 0), (9, 3))], "'a' lacks [0:1, 0:3]"),
        ([("b", 0, (), ()), ("a", 0, (0, 0), (9, 3))], "'a' lacks [9:10, 0:3]"),
        ([("b", 0, (), ()), ("a", 0, (0, 0), (4, 3)), ("a", 1, (5, 0), (5, 3))], "'a' lacks [4:5, 0:3]"),
        ([("b", 0, (), ()), ("a", 0, (0, 0), (10, 2))], "'a' lacks [0:10, 2:3]"),
        ([("b", 0, (), ()), ("a", 0, (0, 0), (10, 2)), ("a", 1, (0, 2), (7, 1))], "'a' lacks [7:10, 2:3]"),
        ([("b", 0, (), ()), ("a", 0, (0, 0), (0, 3))], "'a' lacks [0:10, 0:3]"),
    ],
)
def test_holes_are_named(rows, words):
    with pytest.raises(CoverageError) as caught:
        coverage.check(plan_of({"a": (10, 3), "b": ()}, rows))
    assert words in str(caught.value)


def test_only_the_first_few_are_named():
    with pytest.raises(CoverageError) as caught:
        coverage.check(plan_of({f"l{n}": (4,) for n in range(9)}, [("l5", 0, (0,), (4,))]))
    assert "8 leaves" in str(caught.value) and "and 5 more" in str(caught.value) and "'l5'" not in str(caught.value)


def test_of_copies_the_lowest_rank_counts():
    rows = [("a", rank, (0, 0), (10, 3)) for rank in (2, 0, 3)]
    plan = plan_of({"a": (10, 3)}, rows)
    assert plan.rank[coverage.check(plan)].tolist() == [0]


def test_a_whole_copy_beside_shares_that_are_settled():
    """Rank 0 had no settlement yet and wrote all; the others wrote their shares."""
    rows = [("a", 0, (0, 0), (10, 3)), ("a", 1, (0, 0), (5, 3)), ("a", 2, (5, 0), (5, 3))]
    plan = plan_of({"a": (10, 3)}, rows)
    assert plan.rank[coverage.check(plan)].tolist() == [0]
    rows[0] = ("a", 3, (0, 0), (10, 3))
    plan = plan_of({"a": (10, 3)}, rows)
    assert sorted(plan.rank[coverage.check(plan)].tolist()) == [1, 2]


def test_a_piece_outside_its_leaf_is_refused():
    for row in [("a", 1, (8, 0), (3, 3)), ("a", 1, (0, 0), (10, 4)), ("a", 1, (-1, 0), (3, 3))]:
        with pytest.raises(CoverageError, match="has shape") as caught:
            coverage.check(plan_of({"a": (10, 3)}, [("a", 0, (0, 0), (10, 3)), row]))
        assert caught.value.rank == 1


def mesh_rows(name, shape, mesh):
    rows, rank = [], 0
    for i in range(mesh[0]):
        for j in range(mesh[1]):
            a, b = (shape[0] * k // mesh[0] for k in (i, i + 1))
            c, d = (shape[1] * k // mesh[1] for k in (j, j + 1))
            rows.append((name, rank, (a, c), (b - a, d - c)))
            rank += 1
    return rows


def test_tiles_of_a_mesh_with_and_without_a_hole():
    rows = mesh_rows("a", (97, 41), (8, 5))
    assert coverage.check(plan_of({"a": (97, 41)}, rows, 40)).all()
    for missing in range(len(rows)):
        left = rows[:missing] + rows[missing + 1 :]
        with pytest.raises(CoverageError) as caught:
            coverage.check(plan_of({"a": (97, 41)}, left, 40))
        hole = Rect(rows[missing][2], rows[missing][3])
        assert boxes.describe(hole) in str(caught.value)


def test_irregular_tiles_do_not_need_a_grid(monkeypatch):
    monkeypatch.setattr(boxes, "MAX_CELLS", 10)
    rows = mesh_rows("a", (97, 41), (8, 5))
    assert coverage.check(plan_of({"a": (97, 41)}, rows, 40)).all()
    with pytest.raises(CoverageError):
        coverage.check(plan_of({"a": (97, 41)}, rows[:-1], 40))


def test_tensors_of_many_dims_take_no_longer():
    ones = (1,) * 24
    rows = [("a", 2 * x + y, (x, y, *(0,) * 24), (1, 1, *ones)) for x in (0, 1) for y in (0, 1)]
    begun = time.process_time()
    assert coverage.check(plan_of({"a": (2, 2, *ones)}, rows)).all()
    with pytest.raises(CoverageError, match=r"lacks \[1:2, 1:2, 0:1"):
        coverage.check(plan_of({"a": (2, 2, *ones)}, rows[:-1]))
    assert not boxes.are_disjoint(np.zeros((2, 26), np.int64), np.ones((2, 26), np.int64))
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("axis", [0, 1])
def test_a_million_rows_take_seconds(axis):
    plan = big_plan(600, 1856, (1856 * 4, 1856 * 4), axis)
    begun = time.process_time()
    assert coverage.check(plan).all()
    assert time.process_time() - begun < 5
