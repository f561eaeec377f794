"""Declarations are checked when they are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from safehold.errors import ConfigurationError, UnsupportedStateError
from safehold.state.declare import Parts, PerRank, Sharded
from safehold.state.tensor_likes import bind_tensor
from safehold.types import Rect


@pytest.mark.parametrize(
    ("shape", "pieces", "words"),
    [
        ((2, 3), [((0, 0), (2, 3))], "6 elements, the tensor has 4"),
        ((2, 2), [((1, 0), (2, 2))], "not inside"),
        ((2, 2), [((0,), (4,))], "not inside"),
        ((2, 2), [((-1, 0), (2, 2))], "not inside"),
        ((4, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))], "overlap"),
        ((2, 2), slice(0, 5), "no range"),
        ((2, 2), slice(0, 4, 2), "no range"),
        ((2, 2), [(0, 0)], "pairs"),
    ],
)
def test_wrong_pieces_are_refused(shape: Any, pieces: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Sharded(torch.ones(2, 2), shape, pieces)


def test_a_flat_range_is_cut_into_rectangles() -> None:
    declared = Sharded(torch.arange(5), (3, 4), slice(2, 7))
    assert declared.rects == (Rect((0, 2), (1, 2)), Rect((1, 0), (1, 3)))
    assert Sharded(torch.ones(()), (), slice(None)).rects == (Rect((), ()),)
    assert Sharded(torch.ones(0), (0, 4), [((0, 0), (0, 4))]).rects == (Rect((0, 0), (0, 4)),)
    assert Sharded(torch.ones(0), (3, 4), [((1, 0), (0, 4))]).rects == ()


def test_pieces_of_a_strided_tensor() -> None:
    strided = torch.arange(16).reshape(4, 4)[:, ::2]
    pieces = bind_tensor(Sharded(strided, (8, 2), [((0, 0), (2, 2)), ((6, 0), (2, 2))]), name="w", rank=0).pieces
    assert torch.equal(pieces[1][1], strided[2:])
    pieces[0][1].fill_(-1)
    assert strided[0, 0] == -1
    with pytest.raises(UnsupportedStateError, match=r"^w: .*contiguous"):
        bind_tensor(Sharded(strided, (16,), [((0,), (8,))]), name="w", rank=0)
    array = np.arange(16).reshape(4, 4)[:, ::2]
    with pytest.raises(UnsupportedStateError, match="contiguous"):
        bind_tensor(Sharded(array, (16,), [((0,), (8,))]), name="w", rank=0)


def test_replica_groups() -> None:
    assert Sharded(torch.ones(1), (1,), slice(None), replica_group=(3, 1, 3)).replica_group == (1, 3)
    with pytest.raises(ConfigurationError, match="empty"):
        Sharded(torch.ones(1), (1,), slice(None), replica_group=[])
    assert "replica_group=None" in repr(Sharded(torch.ones(1), (1,), slice(None)))


def test_per_rank_policies() -> None:
    assert PerRank(1).policy == "refuse" and "refuse" in repr(PerRank(1))
    for policy, how in (("first", max), ("merge", None), ("derive", None), ("sometimes", None)):
        with pytest.raises(ConfigurationError, match=policy):
            PerRank(1, policy=policy, how=how)  # type: ignore[arg-type]


def test_parts_need_parts() -> None:
    with pytest.raises(ConfigurationError, match="no parts"):
        Parts([])
    assert repr(Parts([{}])) == "Parts of 1"
