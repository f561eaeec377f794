"""Objects: same types, same bits; what cannot be saved is named with its place; bytes run nothing and cost little."""

from __future__ import annotations

import enum
import math
import struct
import time
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest

from safehold.errors import ManifestError, UnsupportedStateError
from safehold.format import objects
from safehold.format.objects import ArrayValue, TorchThing


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same types and bits all through."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        factories = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return factories and same(list(a.items()), list(b.items()))
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, datetime):
        return a == b and a.fold == b.fold and a.tzinfo is b.tzinfo
    if isinstance(a, Decimal):
        return str(a) == str(b)
    return bool(a == b)


def nan_with(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**10_000, 1.5, -0.0, math.inf, 5e-324,
    nan_with(0x7FF8000000000123), nan_with(0xFFF0000000000001), 1 + 2j, complex(-0.0, math.nan), "", "é", "\0",
    "\ud800x", "a" * 70_000,
    b"", b"\xff\0", bytearray(b"ab"), [], (), {}, set(), frozenset(), [None, [[]]], ((1,), [2], {3}),
    {"a": {"b": (1, 2)}},
    {0: "int", "0": "str", (1, "x"): "tuple", 1.5: "float", None: "none", b"b": "bytes", True: "bool"},
    {"z": 1, "a": 2},
    OrderedDict([("z", 1), ("a", 2)]), defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(float),
    Counter("abca"),
    deque([1, 2], maxlen=2), deque([[1]]), deque(maxlen=0), range(5), range(1, 2**70, 3), slice(None, 2**70, "x"),
    datetime(2024, 2, 29, 1, 2, 3, 4), datetime(2024, 2, 29, fold=1), datetime(2024, 1, 1, tzinfo=UTC), date(1, 1, 1),
    timedelta(-1, 5, 7),
    Path("a/b"), Path("/é"), PurePosixPath("."), PureWindowsPath("C:\\x\\y"), PurePosixPath("\udcff"), Decimal("1.50"),
    Decimal("-0"),
    Decimal("NaN123"), Decimal("sNaN"), Decimal("-Infinity"), Decimal("1E+999999"), Fraction(-3, 2**80), UUID(int=7),
    ArrayValue("numpy", "float32", (2, 3), bytes(24)), ArrayValue("torch", "bfloat16", (), b"ab"),
    ArrayValue("numpy", "numpy:<M8[ns]", (), bytes(8), True), ArrayValue("jax", "int8", (0, 5), b""),
    TorchThing("device", "cuda:0"),
    TorchThing("dtype", "bfloat16"), {frozenset({1, "a"}): {2**70, "x"}}, [{1: [{2: ({3: [2**99]},)}]}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_exactly(value: Any) -> None:
    for wrapped in (value, [value], {"k": (value,)}):
        data = objects.encode(wrapped, name="o")
        assert same(objects.decode(data), wrapped)
        assert objects.encode(wrapped, name="o") == data


def test_sets_do_not_depend_on_the_order_of_insertion() -> None:
    for items in ([f"w{index}" for index in range(100)], [2**70, "a", (1, 2), None, 1.5], [0, 8, 16, 2**40]):
        backwards = items[::-1]
        assert objects.encode(set(items), name="o") == objects.encode(set(backwards), name="o")


class Colour(enum.IntEnum):
    RED = 1


class Sub(dict[str, int]):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"), (Colour.RED, "Colour"), (Sub(), "Sub"), (np.float32(1), "numpy.float32"),
        (np.float64(1), "float64"),
        (np.zeros(2), "numpy.ndarray"), (len, "builtin_function_or_method"), (int, "builtins.type"),
        (ValueError("x"), "ValueError"),
        (memoryview(b""), "memoryview"), (iter([]), "list_iterator"), (np.str_("x"), "numpy.str_"), (..., "ellipsis"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_types_are_refused_by_name_and_place(value: Any, kind: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        objects.encode({"a": [1, (value,)]}, name="trainer.extra")
    assert "trainer.extra['a'][1][0]" in str(caught.value)
    assert kind in str(caught.value) and caught.value.hint


def test_refusals_say_why() -> None:
    with pytest.raises(UnsupportedStateError, match="_asdict"):
        objects.encode(Point(1, 2), name="o")
    with pytest.raises(UnsupportedStateError, match=r"defaultdict of .*lambda"):
        objects.encode(defaultdict(lambda: 1), name="o")
    with pytest.raises(UnsupportedStateError, match="time zone"):
        objects.encode(datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1))), name="o")
    with pytest.raises(UnsupportedStateError, match=r"o\[0\] holds an array"):
        objects.encode([ArrayValue("numpy", "float32", (2,), b"abc")], name="o")
    with pytest.raises(UnsupportedStateError, match=r"o\[a key\]"):
        objects.encode({(1, object()): 1}, name="o")
    with pytest.raises(UnsupportedStateError, match=r"builtins\.type|EnumType"):
        objects.encode({1, 2**80, Colour}, name="o")


def test_cycles_and_depths_are_refused() -> None:
    cycle: list[Any] = [1]
    cycle.append({"self": cycle})
    with pytest.raises(UnsupportedStateError, match=r"o\[1\]\['self'\] contains itself"):
        objects.encode(cycle, name="o")
    shared = [1]
    assert objects.decode(objects.encode([shared, shared], name="o")) == [[1], [1]]
    deep: Any = 1
    for _ in range(objects.MAX_DEPTH):
        deep = [deep]
    assert objects.decode(objects.encode(deep, name="o")) == deep
    with pytest.raises(UnsupportedStateError, match="deeper"):
        objects.encode([deep], name="o")
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="deeper"):
        objects.encode(deep, name="o")
    while deep != 1:
        deep = deep[0]


MAKERS: list[Any] = [
    lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}, lambda inner: OrderedDict(k=inner),
    lambda inner: defaultdict(list, {"k": inner}), lambda inner: deque([inner]), lambda inner: frozenset([inner]),
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
@pytest.mark.parametrize("innermost", [1, 2**70])
def test_what_nests_as_deep_as_may_be_saved_can_be_read_far_down_a_stack(make: Any, innermost: int) -> None:
    deep: Any = innermost
    for _ in range(objects.MAX_DEPTH):
        deep = make(deep)
    data = objects.encode(deep, name="o")

    def read_below(frames: int) -> Any:
        return read_below(frames - 1) if frames else objects.decode(data)

    assert same(read_below(400), deep)


def test_objects_that_are_too_large_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_OBJECT_BYTES", 100)
    assert objects.encode(b"x" * 98, name="o")
    for value in (b"x" * 99, ["x" * 99], {1: 2**1000}):
        with pytest.raises(UnsupportedStateError, match=r"loader\.index has \d+ bytes"):
            objects.encode(value, name="loader.index")


pack = msgspec.msgpack.encode
HOSTILE: list[bytes] = [
    b"", b"\xc1", b"\x93\x02\x01", pack(1) + b"\0", pack([]), pack(["x"]), pack([True]), pack([99]), pack([-1]),
    pack({"a": 1}),
    pack(msgspec.msgpack.Ext(5, b"x")), pack(datetime(2024, 1, 1, tzinfo=UTC)), pack([2, {"a": 1}]),
    b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffabc", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\x92\x02" * 300 + b"\xc0",
    b"\x92\x02" * 50_000 + b"\xc0",
    pack([0, b"\x01"]), pack([0, bytes(20)]), pack([0, 5]), pack([1, b"\xff"]), pack([4, 1]), pack([4, 1, 2, 1, 3]),
    pack([4, [2], 1]),
    pack([5, 1, 1]), pack([5, [2]]), pack([7, "x"]), pack([8, 1, 2]), pack([10]), pack([10, "eval"]),
    pack([10, ["list"]]), pack([11]),
    pack([11, 1, 5, 5]), pack([11, -1]), pack([11, True]), pack([11, 2**64 - 1]), pack([13, 1, 2]),
    pack([13, 1, 2, 0]), pack([13, 1.5, 2, 1]),
    pack([14, 1]), pack([15, 2024, 13, 1, 0, 0, 0, 0, 0, False]), pack([15, 2024]),
    pack([15, 2024, 1, 1, 0, 0, 0, 0, 2, False]),
    pack([16, 0, 1, 1]), pack([17, 10**10, 0, 0]), pack([18, "os", "x"]), pack([18, "PosixPath", 5]),
    pack([19, "1_0"]), pack([19, "x"]),
    pack([20, 1, 0]), pack([20, 1.5, 2]), pack([21, b"x"]), pack([22, "numpy", "float32", [2], b"abc", False]),
    pack([22, "numpy", "|O", [1], bytes(8), False]), pack([22, "numpy", "numpy:|O", [1], bytes(8), False]),
    pack([22, "numpy", "int8", [-1], b"", False]), pack([22, "numpy", "int8", [2**59, 2**59], b"", False]),
    pack([22, "numpy", "int8", [1] * 65, b"x", False]), pack([22, "pickle", "int8", [], b"x", False]),
    pack([22, "torch", "int8", [], b"x", True]), pack([22, "numpy", "int8", [1.0], b"x", False]),
    pack([23, "module", "os"]), pack([23, "dtype"]),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_refused_without_large_allocations(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError) as caught:
            objects.decode(data, path="p")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == "p" and len(str(caught.value)) < 600
    assert peak < 4 << 20


def test_every_cut_is_refused() -> None:
    data = objects.encode({"a": (1, 2.5), 3: [b"x", {4}]}, name="o")
    for at in range(len(data)):
        with pytest.raises(ManifestError):
            objects.decode(data[:at])


def test_small_values_are_encoded_in_microseconds() -> None:
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "foreach": None, "fused": True}
    for value, limit_s in ((0.1, 5e-6), (17, 5e-6), (group, 50e-6)):
        best = math.inf
        for _ in range(5):
            start = time.process_time()
            for _ in range(2000):
                objects.encode(value, name="o")
            best = min(best, (time.process_time() - start) / 2000)
        assert best < limit_s
