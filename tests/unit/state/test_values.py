"""Framework values to plain ones and back, through the real encoding of objects."""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import math
import pathlib
import random
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from safehold.errors import UnsupportedStateError
from safehold.format.objects import ArrayValue, decode, encode
from safehold.state.in_place import InPlace
from safehold.state.values import MAX_TENSOR_BYTES, TAG, from_plain, to_plain


def through(value: Any) -> Any:
    return from_plain(decode(encode(to_plain(value, name="x"), name="x")))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(one.equal(other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


VALUES = [
    None,
    True,
    2**100,
    float("nan"),
    -0.0,
    1 + 2j,
    "text \ud800",
    b"bytes",
    bytearray(b"x"),
    range(3),
    slice(1, None),
    datetime.datetime(2024, 2, 3, 4, 5, 6),
    datetime.date(2024, 1, 1),
    datetime.timedelta(1, 2),
    pathlib.PurePosixPath("a/b"),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    [1, [2.5, None], (3,)],
    {"a": 1, 2: "b", (1, "t"): [None]},
    {1, 2},
    frozenset({"a"}),
    OrderedDict(b=1, a=[2]),
    defaultdict(list, a=[1]),
    deque([1, 2], maxlen=3),
    Counter("aab"),
    torch.float8_e4m3fn,
    torch.device("cuda:1"),
    torch.Size([2, 3]),
    torch.Size([]),
    [torch.bfloat16, torch.device("cpu")],
    {"t": torch.arange(6).reshape(2, 3).t()},
    {"t": torch.tensor(1.5, dtype=torch.bfloat16), "e": torch.zeros(0, 3)},
    deque([torch.ones(1), torch.zeros(2, dtype=torch.complex64)]),
    [np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2024-01-01")],
    np.str_("text"),
    [np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2], np.zeros((0, 2)), np.array("a", dtype="U3")],
    np.dtype("float32"),
    [torch.tensor([0.0, 1.0])[::2], torch.ones(1, 4)[:, ::4]],
    {TAG: "user", "x": [torch.int8]},
    {"in": {TAG: None}},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_with_type_and_bits(value: Any) -> None:
    assert same(through(value), value)


def test_generators_and_buffers_come_back_in_the_same_state() -> None:
    rng, legacy, python = np.random.default_rng(3), np.random.RandomState(4), random.Random(5)
    torch_rng = torch.Generator().manual_seed(6)
    python.random(), rng.normal(), legacy.normal(), torch.rand(3, generator=torch_rng)
    found = through(
        {"np": rng, "old": legacy, "py": python, "t": torch_rng, "io": io.BytesIO(b"abc"), "none": io.BytesIO()}
    )
    assert found["np"].random() == rng.random() and found["old"].random() == legacy.random()
    assert found["py"].random() == python.random()
    assert torch.equal(torch.rand(2, generator=found["t"]), torch.rand(2, generator=torch_rng))
    assert found["io"].getvalue() == b"abc" and found["none"].getvalue() == b""


def test_a_parameter_inside_an_object_becomes_a_plain_tensor() -> None:
    found = through([torch.nn.Parameter(torch.ones(2))])
    assert type(found[0]) is torch.Tensor and torch.equal(found[0], torch.ones(2))


class Colour(int):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Colour(3), "Colour.*\n.*int"),
        ([{"k": lambda: 1}], r"x \(inside it: \[0\]\['k'\]\).*function"),
        (np.ma.masked_array([1], [False]), "MaskedArray"),
        (np.array([None]), "object"),
        (torch.zeros(2).to_sparse(), "sparse"),
    ],
)
def test_other_types_are_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedStateError, match=words):
        to_plain(value, name="x")


def test_large_tensors_and_cycles_are_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="too large"):
        to_plain([np.empty(MAX_TENSOR_BYTES + 1, np.uint8)], name="x")
    loop: dict[str, Any] = {}
    loop["a"] = [loop]
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        to_plain(loop, name="x")


@pytest.mark.parametrize(
    "hostile",
    [
        {TAG: "os.system", "value": "true"},
        {TAG: "dict"},
        {TAG: "dict", "value": 3},
        {TAG: "random.Random", "value": (3, (1, 2), None)},
        {TAG: "torch.Generator", "value": {"device": "cpu"}},
        {TAG: "numpy.Generator", "value": {"bit_generator": "default_rng"}},
        ArrayValue(kind="torch", dtype="no_such_dtype", shape=(), data=b"\0"),
    ],
)
def test_unknown_kinds_are_an_error_and_run_nothing(hostile: Any) -> None:
    with pytest.raises(UnsupportedStateError):
        from_plain(hostile)


def test_long_plain_lists_are_converted_quickly_and_copied() -> None:
    numbers = list(range(100_000))
    plain = to_plain({"n": numbers}, name="x")
    assert plain["n"] == numbers and plain["n"] is not numbers


# In place.


def test_containers_keep_their_identity() -> None:
    inner, items = {"x": 1}, [1, 2]
    template = {"inner": inner, "items": items, "gone": 1, "set": {1}, "q": deque([1])}
    kept = template["set"], template["q"]
    found = InPlace().put(template, {"items": [3], "inner": {"y": 2}, "set": {5}, "q": deque([7, 8]), "new": 0})
    assert found is template and list(found) == ["items", "inner", "set", "q", "new"]
    assert found["inner"] is inner == {"y": 2} and found["items"] is items == [3]
    assert (found["set"], found["q"]) == ({5}, deque([7, 8])) and found["set"] is kept[0] and found["q"] is kept[1]


def test_another_type_or_shape_replaces() -> None:
    put = InPlace().put
    assert put([1], (1,)) == (1,) and put(None, {"a": 1}) == {"a": 1} and put(3, "x") == "x"
    small, read_only = np.zeros(2), np.zeros(3)
    read_only.flags.writeable = False
    assert put(small, np.ones(3)) is not small and put(read_only, np.ones(3)) is not read_only
    template = torch.zeros(2)
    assert put(template, torch.ones(2)) is template and template[0] == 1
    assert put(torch.zeros(2), torch.ones(2, dtype=torch.int8)).dtype == torch.int8


def test_one_object_in_two_places_is_filled_once() -> None:
    shared: list[int] = []
    assert InPlace().put({"a": shared, "b": shared}, {"a": [1], "b": [2]}) == {"a": [1], "b": [2]}


def test_generators_are_set_where_they_are() -> None:
    mine, saved = np.random.default_rng(1), np.random.default_rng(2)
    assert InPlace().put({"r": mine}, {"r": saved})["r"] is mine
    assert mine.random() == saved.random()
    torch_mine, torch_saved = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    assert InPlace().put([torch_mine], [torch_saved])[0] is torch_mine
    assert torch.equal(torch.rand(2, generator=torch_mine), torch.rand(2, generator=torch_saved))
    python, python_saved = random.Random(1), random.Random(2)
    assert InPlace().put(python, python_saved) is python and python.random() == python_saved.random()
    legacy, legacy_saved = np.random.RandomState(1), np.random.RandomState(2)
    assert InPlace().put(legacy, legacy_saved) is legacy and legacy.random() == legacy_saved.random()
