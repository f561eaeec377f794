"""Which ranks hold a plain tensor."""

from __future__ import annotations

import json

import pytest

from safehold.errors import StateMismatchError
from safehold.policy.settlement import Settlement, from_wire, settle, to_wire
from safehold.types import TensorSpec


def spec(name, shape=(2,), dtype="float32", kind="torch"):
    return TensorSpec(name=name, dtype=dtype, shape=shape, kind=kind)


def test_groups_are_the_ranks_that_named_the_leaf():
    a, b, c = spec("a"), spec("b"), spec("c")
    settlement = settle({0: [a, b], 1: [a], 2: [a, c], 3: [c, a]})
    assert settlement.holders(a, 0) == (0, 1, 2, 3)
    assert settlement.holders(b, 0) == (0,)
    assert settlement.holders(c, 3) == (2, 3)
    assert settlement.holders(b, 1) is None
    assert settlement.holders(spec("a", (3,)), 0) is None
    assert len(set(settlement.groups)) == len(settlement.groups) == 3


def test_the_order_of_asking_does_not_matter():
    a, b = spec("a"), spec("b")
    assert settle({1: [b, a], 0: [a, b]}) == settle({0: [b, a], 1: [a, b]})


@pytest.mark.parametrize("other", [spec("w", (3,)), spec("w", dtype="bfloat16"), spec("w", kind="numpy")])
def test_a_mismatch_names_leaf_and_ranks(other):
    with pytest.raises(StateMismatchError) as caught:
        settle({0: [spec("w")], 1: [spec("w")], 2: [other]})
    assert "'w'" in str(caught.value) and "ranks 0-1" in str(caught.value) and "rank 2" in str(caught.value)
    assert "PerRank" in str(caught.value)


def test_wire_form():
    world = range(1856)
    settlement = settle({rank: [spec("everywhere"), spec(f"stage{rank % 8}", (2, 3))] for rank in world})
    text = json.dumps(to_wire(settlement))
    assert from_wire(json.loads(text)) == settlement
    assert text.count("everywhere") == 1
    assert from_wire(to_wire(Settlement())) == Settlement()
    one_group = settle({rank: [spec("everywhere")] for rank in world})
    assert to_wire(one_group)["groups"] == [[0, 1856]]


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [],
        {"groups": []},
        {"groups": [[0]], "leaves": []},
        {"groups": [[]], "leaves": []},
        {"groups": [[0, 0]], "leaves": []},
        {"groups": [[-1, 2]], "leaves": []},
        {"groups": [[0, 1 << 40]], "leaves": []},
        {"groups": [[3, 2, 0, 1]], "leaves": []},
        {"groups": [[0, True]], "leaves": []},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [2], "torch", 1]]},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [-2], "torch", 0]]},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [2], "other", 0]]},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [2], ["torch"], 0]]},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [2], "torch", True]]},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [2], "torch", 0]] * 2},
        {"groups": [[0, 2]], "leaves": [["a", "float32", [2], "torch"]]},
        {"groups": 5, "leaves": 5},
        {"groups": [[0, 1 << 20]] * 17, "leaves": []},
    ],
)
def test_other_data_is_refused(wire):
    with pytest.raises(ValueError):
        from_wire(wire)
