"""Values of object leaves as bytes: exact, self-describing, and free of code.

MessagePack, of which only nil, booleans, integers, 64-bit floats, strings, binaries and arrays are used: every
container and every other type is an array whose first item is a tag. Equal values of the same types give equal bytes
(sets are sorted by their bytes), so that ranks can be compared.

Invariants: decoding gives the same types and the same bits, or raises; it runs no code from the data, allocates
nothing that the data has not paid for, and refuses every tag and type that it does not know. What is no plain Python
value (tensors, arrays, dtypes) is turned into `ArrayValue` and `TorchThing` before it comes here. Shared references
are not kept; cycles are refused.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from safehold.errors import ManifestError, UnsupportedStateError
from safehold.format import dtypes
from safehold.format.names import display
from safehold.format.objects_file import MAX_OBJECT_BYTES, ObjectsFile, encode_objects, parse

__all__ = [
    "MAX_DEPTH",
    "ArrayValue",
    "ObjectsFile",
    "TorchThing",
    "decode",
    "encode",
    "encode_objects",
    "parse",
]

MAX_DEPTH: Final = 64
"""Deepest nesting of containers: what was saved can be decoded within half of Python's default limit of recursion."""

ArrayKind = Literal["numpy", "torch", "jax"]
ThingKind = Literal["dtype", "device", "Size"]


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """An array inside an object.

    Attributes:
        kind: The framework that it came from.
        dtype: As in `TensorSpec`.
        shape: Its shape.
        data: Its items, row-major, as stored.
        scalar: True for a NumPy scalar, whose shape is ().
    """

    kind: ArrayKind
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class TorchThing:
    """A small value of torch: `float32` (dtype), `cuda:0` (device), `3,4` (Size)."""

    kind: ThingKind
    text: str


# Tags are part of the format: never renumber, only append.
_INT, _TEXT, _LIST, _TUPLE, _DICT = 0, 1, 2, 3, 4
_SET, _FROZENSET, _BYTEARRAY, _COMPLEX, _ORDERED = 5, 6, 7, 8, 9
_DEFAULT, _DEQUE, _COUNTER, _RANGE, _SLICE = 10, 11, 12, 13, 14
_DATETIME, _DATE, _TIMEDELTA, _PATH, _DECIMAL = 15, 16, 17, 18, 19
_FRACTION, _UUID, _ARRAY, _TORCH = 20, 21, 22, 23

_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes})
_FACTORIES: Final[dict[str, Any]] = {
    "": None,
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "str": str,
    "set": set,
}
_FACTORY_NAMES: Final = {factory: name for name, factory in _FACTORIES.items()}
_PATHS: Final[dict[str, Any]] = {
    "PosixPath": PosixPath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
_ARRAY_KINDS: Final = ("numpy", "torch", "jax")
_THING_KINDS: Final = ("dtype", "device", "Size")
_MAX_DIMS: Final = 64

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(strict=True)
_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**64 - 1


def encode(value: Any, *, name: str) -> bytes:
    """Write a value.

    Args:
        value: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, OrderedDict,
            defaultdict, deque, Counter, range, slice, datetime (naive or UTC), date, timedelta, paths, Decimal,
            Fraction, UUID, ArrayValue, TorchThing, and containers of these; exact types, no subclasses.
        name: The FQN, for errors.

    Raises:
        UnsupportedStateError: A value inside has another type, a cycle, or nests too deep; the message says where. Or
            all of it is too large.
    """
    try:
        data = _encode(value, name)
    except RecursionError:
        raise UnsupportedStateError(f"{display(name)} nests too deep to be saved") from None
    if len(data) > MAX_OBJECT_BYTES:
        raise UnsupportedStateError(
            f"{display(name)} has {len(data)} bytes; an object has at most {MAX_OBJECT_BYTES}",
            hint="save large values as tensors or arrays, which are leaves of their own",
        )
    return data


def _encode(value: Any, name: str) -> bytes:
    try:
        return _ENCODER.encode(value if type(value) in _ATOMS else _Lowering(name, exact=False).lower(value, 0))
    except (OverflowError, UnicodeEncodeError):
        # An integer of more than 64 bits or a lone surrogate somewhere: rare, so that nobody looks for them before.
        return _ENCODER.encode(_Lowering(name, exact=True).lower(value, 0))


class _Lowering:
    """Turns a value into what MessagePack has; `exact` also looks for integers and strings that it has not."""

    def __init__(self, name: str, *, exact: bool) -> None:
        self.name = name
        self.exact = exact
        self._path: list[Any] = []
        self._open: set[int] = set()

    def lower(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return self._atom(value) if self.exact else value
        lower = _LOWER.get(kind)
        if lower is None:
            raise self._unsupported(value)
        if depth >= MAX_DEPTH:
            raise UnsupportedStateError(f"{self._where()} nests deeper than {MAX_DEPTH} and cannot be saved")
        if kind not in _CONTAINERS:
            return lower(self, value, depth + 1)
        if id(value) in self._open:
            raise UnsupportedStateError(f"{self._where()} contains itself and cannot be saved")
        self._open.add(id(value))
        lowered = lower(self, value, depth + 1)
        self._open.discard(id(value))
        return lowered

    def items(self, tag: int, values: Iterable[Any], depth: int) -> list[Any]:
        values = list(values)
        if not self.exact and _ATOMS.issuperset(map(type, values)):
            return [tag, *values]
        lowered: list[Any] = [tag]
        for index, item in enumerate(values):
            self._path.append(index)
            lowered.append(self.lower(item, depth))
            self._path.pop()
        return lowered

    def pairs(self, head: list[Any], value: dict[Any, Any], depth: int) -> list[Any]:
        if not self.exact and _ATOMS.issuperset(map(type, value)) and _ATOMS.issuperset(map(type, value.values())):
            for pair in value.items():
                head.extend(pair)
            return head
        for key, item in value.items():
            self._path.append(key)
            head.append(self.lower(key, depth))
            head.append(self.lower(item, depth))
            self._path.pop()
        return head

    def sorted_items(self, tag: int, values: Iterable[Any], depth: int) -> list[Any]:
        lowered = self.items(tag, values, depth)[1:]
        try:
            lowered.sort(key=_ENCODER.encode)
        except (OverflowError, UnicodeEncodeError):
            if self.exact:
                raise
            # Anything may be in the set; only the exact way can order it.
            raise OverflowError from None
        return [tag, *lowered]

    def _atom(self, value: Any) -> Any:
        if type(value) is int and not _MIN_INT <= value <= _MAX_INT:
            length = value.bit_length() // 8 + 1
            return [_INT, value.to_bytes(length, "little", signed=True)]
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return [_TEXT, value.encode("utf-8", "surrogatepass")]
        return value

    def fail(self, reason: str, hint: str) -> UnsupportedStateError:
        return UnsupportedStateError(f"{self._where()} {reason}", hint=hint)

    def _where(self) -> str:
        steps = [f"[{repr(step)[:40]}]" if type(step) in _ATOMS else "[a key]" for step in self._path]
        return display(self.name + "".join(steps))

    def _unsupported(self, value: Any) -> UnsupportedStateError:
        cls = type(value)
        full = f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            hint = "save its _asdict() or a plain tuple, or give its owner state_dict and load_state_dict"
        elif callable(value):
            hint = "code cannot be saved; leave it out of the state"
        else:
            hint = "save it as plain values, or give its owner state_dict and load_state_dict"
        return self.fail(f"has the type {display(full)}, which cannot be saved", hint)


def _lower_default(low: _Lowering, value: Any, depth: int) -> list[Any]:
    try:
        factory = _FACTORY_NAMES[value.default_factory]
    except (KeyError, TypeError):
        raise low.fail(
            f"is a defaultdict of {display(repr(value.default_factory), 80)}, which cannot be saved",
            "make it a plain dict, or use list, dict, set, int, float or str as its factory",
        ) from None
    return low.pairs([_DEFAULT, factory], value, depth)


def _lower_datetime(low: _Lowering, value: Any, depth: int) -> list[Any]:
    if value.tzinfo is not None and value.tzinfo is not UTC:
        raise low.fail("is a datetime of another time zone than UTC, which cannot be saved", "convert it to UTC")
    return [
        _DATETIME,
        value.year,
        value.month,
        value.day,
        value.hour,
        value.minute,
        value.second,
        value.microsecond,
        value.fold,
        value.tzinfo is not None,
    ]


def _lower_array(low: _Lowering, value: ArrayValue, depth: int) -> list[Any]:
    try:
        _check_array(value.kind, value.dtype, value.shape, value.data, value.scalar)
    except (ValueError, TypeError) as exc:
        raise low.fail(f"holds an array that cannot be saved: {exc}", "save it as a leaf of its own") from None
    return [_ARRAY, value.kind, value.dtype, list(value.shape), bytes(value.data), value.scalar]


_Lower = Callable[[_Lowering, Any, int], list[Any]]

_CONTAINERS: Final = frozenset({list, tuple, dict, set, frozenset, OrderedDict, defaultdict, deque, Counter})

_LOWER: Final[dict[type, _Lower]] = {
    list: lambda low, value, depth: low.items(_LIST, value, depth),
    tuple: lambda low, value, depth: low.items(_TUPLE, value, depth),
    dict: lambda low, value, depth: low.pairs([_DICT], value, depth),
    set: lambda low, value, depth: low.sorted_items(_SET, value, depth),
    frozenset: lambda low, value, depth: low.sorted_items(_FROZENSET, value, depth),
    bytearray: lambda low, value, depth: [_BYTEARRAY, bytes(value)],
    complex: lambda low, value, depth: [_COMPLEX, value.real, value.imag],
    OrderedDict: lambda low, value, depth: low.pairs([_ORDERED], value, depth),
    defaultdict: _lower_default,
    deque: lambda low, value, depth: [_DEQUE, value.maxlen, *low.items(_LIST, value, depth)[1:]],
    Counter: lambda low, value, depth: low.pairs([_COUNTER], value, depth),
    range: lambda low, value, depth: low.items(_RANGE, (value.start, value.stop, value.step), depth),
    slice: lambda low, value, depth: low.items(_SLICE, (value.start, value.stop, value.step), depth),
    datetime: _lower_datetime,
    date: lambda low, value, depth: [_DATE, value.year, value.month, value.day],
    timedelta: lambda low, value, depth: [_TIMEDELTA, value.days, value.seconds, value.microseconds],
    PosixPath: lambda low, value, depth: low.items(_PATH, ("PosixPath", str(value)), depth),
    PurePosixPath: lambda low, value, depth: low.items(_PATH, ("PurePosixPath", str(value)), depth),
    PureWindowsPath: lambda low, value, depth: low.items(_PATH, ("PureWindowsPath", str(value)), depth),
    Decimal: lambda low, value, depth: [_DECIMAL, str(value)],
    Fraction: lambda low, value, depth: low.items(_FRACTION, (value.numerator, value.denominator), depth),
    UUID: lambda low, value, depth: [_UUID, value.bytes],
    ArrayValue: _lower_array,
    TorchThing: lambda low, value, depth: [_TORCH, value.kind, value.text],
}


def decode(data: bytes | memoryview, *, path: str = "object") -> Any:
    """Read what `encode` wrote.

    Args:
        data: The bytes.
        path: File or leaf, for errors.

    Raises:
        ManifestError: The bytes are nothing that `encode` writes.
    """
    if len(data) > MAX_OBJECT_BYTES:
        raise ManifestError(f"an object has at most {MAX_OBJECT_BYTES} bytes, not {len(data)}", path=path)
    try:
        return _lift(_DECODER.decode(data), 0)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ManifestError("the object cannot be read: it is damaged or nests too deep", path=path) from None
    except (ValueError, TypeError, OverflowError, ArithmeticError) as exc:
        raise ManifestError(f"the object cannot be read: {display(str(exc))}", path=path) from None


def _lift(lowered: Any, depth: int) -> Any:
    kind = type(lowered)
    if kind in _ATOMS:
        return lowered
    if kind is not list or not lowered or type(lowered[0]) is not int:
        raise ValueError(f"a {kind.__name__} without a tag")
    tag = lowered[0]
    if depth >= MAX_DEPTH and tag not in (_INT, _TEXT):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    lift = _LIFT.get(tag)
    if lift is None:
        raise ValueError(f"an unknown tag {tag}; a newer version of safehold may have written it")
    return lift(lowered, depth + 1)


def _items(lowered: list[Any], depth: int, start: int = 1) -> list[Any]:
    values = lowered[start:]
    if _ATOMS.issuperset(map(type, values)):
        return values
    return [_lift(item, depth) for item in values]


def _pairs(lowered: list[Any], depth: int, start: int = 1) -> list[tuple[Any, Any]]:
    values = _items(lowered, depth, start)
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2], strict=True))


def _dict(lowered: list[Any], depth: int, start: int = 1, make: Callable[[], Any] = dict) -> Any:
    pairs = _pairs(lowered, depth, start)
    found = make()
    # Not update(): a Counter would add.
    for key, value in pairs:
        found[key] = value
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _set(lowered: list[Any], depth: int, make: type) -> Any:
    values = _items(lowered, depth)
    found = make(values)
    if len(found) != len(values):
        raise ValueError("an item of a set occurs twice")
    return found


def _fields(lowered: list[Any], *types: Any) -> list[Any]:
    """Return the fields behind the tag, if they have exactly these types."""
    fields = lowered[1:]
    if len(fields) != len(types) or any(type(field) is not kind for field, kind in zip(fields, types, strict=True)):
        raise ValueError("fields of the wrong types")
    return fields


def _lift_int(lowered: list[Any], depth: int) -> int:
    (raw,) = _fields(lowered, bytes)
    value = int.from_bytes(raw, "little", signed=True)
    if _MIN_INT <= value <= _MAX_INT or len(raw) != value.bit_length() // 8 + 1:
        raise ValueError("an integer written longer than it needs")
    return value


def _lift_default(lowered: list[Any], depth: int) -> Any:
    if len(lowered) < 2 or type(lowered[1]) is not str or lowered[1] not in _FACTORIES:
        raise ValueError("an unknown factory")
    factory = _FACTORIES[lowered[1]]
    return _dict(lowered, depth, 2, lambda: defaultdict(factory))


def _lift_deque(lowered: list[Any], depth: int) -> Any:
    maxlen = lowered[1] if len(lowered) > 1 else -1
    if maxlen is not None and (type(maxlen) is not int or not len(lowered) - 2 <= maxlen < 2**63):
        raise ValueError("a deque longer than it may be")
    return deque(_items(lowered, depth, 2), maxlen)


def _lift_range(lowered: list[Any], depth: int) -> range:
    start, stop, step = _items(lowered, depth)
    return range(start, stop, step)


def _lift_slice(lowered: list[Any], depth: int) -> slice:
    start, stop, step = _items(lowered, depth)
    return slice(start, stop, step)


def _lift_datetime(lowered: list[Any], depth: int) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, utc = _fields(lowered, *(int,) * 8, bool)
    zone = UTC if utc else None
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _lift_path(lowered: list[Any], depth: int) -> Any:
    cls, text = _items(lowered, depth)
    if type(cls) is not str or cls not in _PATHS or type(text) is not str:
        raise ValueError("an unknown kind of path")
    return _PATHS[cls](text)


def _lift_decimal(lowered: list[Any], depth: int) -> Decimal:
    (text,) = _fields(lowered, str)
    value = Decimal(text)
    if str(value) != text:
        raise ValueError("a decimal spelled otherwise than it would be")
    return value


def _lift_fraction(lowered: list[Any], depth: int) -> Fraction:
    numerator, denominator = _items(lowered, depth)
    if type(numerator) is not int or type(denominator) is not int or denominator <= 0:
        raise ValueError("a fraction of other things than integers")
    return Fraction(numerator, denominator)


def _lift_array(lowered: list[Any], depth: int) -> ArrayValue:
    kind, dtype, shape, data, scalar = _fields(lowered, str, str, list, bytes, bool)
    _check_array(kind, dtype, shape, data, scalar)
    return ArrayValue(kind, dtype, tuple(shape), data, scalar)


def _lift_torch(lowered: list[Any], depth: int) -> TorchThing:
    kind, text = _fields(lowered, str, str)
    if kind not in _THING_KINDS:
        raise ValueError("an unknown thing of torch")
    return TorchThing(kind, text)


def _check_array(kind: Any, dtype: str, shape: Iterable[Any], data: Any, scalar: Any) -> None:
    sizes = tuple(shape)
    if kind not in _ARRAY_KINDS or type(scalar) is not bool:
        raise ValueError("an unknown kind of array")
    if len(sizes) > _MAX_DIMS or not all(type(size) is int and 0 <= size < 2**60 for size in sizes):
        raise ValueError("a shape out of bounds")
    if scalar and (sizes or kind != "numpy"):
        raise ValueError("a scalar with dims")
    expected = math.prod(sizes) * dtypes.itemsize(dtype)
    if expected != len(data):
        raise ValueError(f"{len(data)} bytes where dtype and shape say {expected}")


_LIFT: Final[dict[int, Callable[[list[Any], int], Any]]] = {
    _INT: _lift_int,
    _TEXT: lambda lowered, depth: _fields(lowered, bytes)[0].decode("utf-8", "surrogatepass"),
    _LIST: _items,
    _TUPLE: lambda lowered, depth: tuple(_items(lowered, depth)),
    _DICT: _dict,
    _SET: lambda lowered, depth: _set(lowered, depth, set),
    _FROZENSET: lambda lowered, depth: _set(lowered, depth, frozenset),
    _BYTEARRAY: lambda lowered, depth: bytearray(_fields(lowered, bytes)[0]),
    _COMPLEX: lambda lowered, depth: complex(*_fields(lowered, float, float)),
    _ORDERED: lambda lowered, depth: _dict(lowered, depth, 1, OrderedDict),
    _DEFAULT: _lift_default,
    _DEQUE: _lift_deque,
    _COUNTER: lambda lowered, depth: _dict(lowered, depth, 1, Counter),
    _RANGE: _lift_range,
    _SLICE: _lift_slice,
    _DATETIME: _lift_datetime,
    _DATE: lambda lowered, depth: date(*_fields(lowered, int, int, int)),
    _TIMEDELTA: lambda lowered, depth: timedelta(*_fields(lowered, int, int, int)),
    _PATH: _lift_path,
    _DECIMAL: _lift_decimal,
    _FRACTION: _lift_fraction,
    _UUID: lambda lowered, depth: UUID(bytes=_fields(lowered, bytes)[0]),
    _ARRAY: _lift_array,
    _TORCH: _lift_torch,
}
