"""Dtypes as they are stored: sizes, safetensors' names, NumPy's equivalents.

A dtype is a string: torch's name without `torch.`, or `numpy:` and NumPy's own spelling where torch has no such dtype
(`numpy:<M8[ns]`, `numpy:|S7`, `numpy:[["a","<i4"],["b","<f8",[2]]]` for records).

Invariants: sizes count bytes as stored, whole bytes for packed sub-byte dtypes. Nothing here imports a framework. A
dtype whose items hold references (objects, NumPy's variable strings) is never known.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Final

import numpy as np

_NUMPY_PREFIX: Final = "numpy:"
_MAX_LENGTH: Final = 4096
_MAX_DEPTH: Final = 16
_MAX_ITEMSIZE: Final = 2**31 - 1

_SAFETENSORS: Final[dict[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

_SAFETENSORS_ITEMSIZE: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

_NUMPY_TOO: Final[tuple[str, ...]] = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

_TORCH_ITEMSIZE: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}

# Dtypes that libraries add to NumPy (ml_dtypes) and that mean the same as torch's of that name.
_ADDED_TO_NUMPY: Final = frozenset(name for name in _TORCH_ITEMSIZE if name == "bfloat16" or name.startswith("float8_"))

_SIMPLE = re.compile(r"[<>|](?:[biufc][0-9]{1,2}|[SUV][0-9]{1,9}|[mM]8(?:\[(?:[1-9][0-9]{0,8})?[a-zA-Z]{1,2}\])?)")


def is_known(dtype: str) -> bool:
    """Whether `dtype` is one that this version can store."""
    try:
        itemsize(dtype)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=512)
def itemsize(dtype: str) -> int:
    """Return the bytes of one item as stored.

    Raises:
        ValueError: The dtype is unknown.
    """
    size = _TORCH_ITEMSIZE.get(dtype)
    if size is not None:
        return size
    if not dtype.startswith(_NUMPY_PREFIX):
        raise ValueError(f"unknown dtype {dtype[:80]!r}")
    return int(_parse_numpy(dtype).itemsize)


@lru_cache(maxsize=512)
def alignment(dtype: str) -> int:
    """Return the natural alignment of an item: the largest power of two that divides its size, at most 64."""
    size = itemsize(dtype)
    return min(64, size & -size) if size else 64


@lru_cache(maxsize=512)
def safetensors_name(dtype: str) -> str:
    """Return the dtype that a pack's header gives; `U8` for those that safetensors lacks, see `safetensors_shape`.

    Raises:
        ValueError: The dtype is unknown.
    """
    itemsize(dtype)
    return _SAFETENSORS.get(dtype, "U8")


def safetensors_itemsize(name: str) -> int:
    """Return the bytes of one item of a dtype as safetensors names it.

    Raises:
        ValueError: The name is unknown, or its items are smaller than a byte.
    """
    try:
        return _SAFETENSORS_ITEMSIZE[name]
    except (KeyError, TypeError):
        raise ValueError("an unknown dtype") from None


def safetensors_shape(dtype: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a pack's header: `sizes`, the last dim counted in bytes where the dtype is stored as U8."""
    if dtype in _SAFETENSORS:
        return sizes
    size = itemsize(dtype)
    return (*sizes[:-1], sizes[-1] * size) if sizes else (size,)


@lru_cache(maxsize=512)
def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """Return NumPy's dtype; None where it has none and the items are bytes only (bfloat16, float8, packed dtypes).

    Raises:
        ValueError: The dtype is unknown.
    """
    if dtype in _NUMPY_TOO:
        return np.dtype(dtype)
    if dtype in _TORCH_ITEMSIZE:
        return None
    if not dtype.startswith(_NUMPY_PREFIX):
        raise ValueError(f"unknown dtype {dtype[:80]!r}")
    return _parse_numpy(dtype)


def from_numpy(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy dtype.

    Raises:
        ValueError: Its items have no fixed size, hold references, or cannot be described exactly.
    """
    if dtype.isbuiltin == 2:
        if dtype.name in _ADDED_TO_NUMPY:
            return dtype.name
        raise ValueError(f"the NumPy dtype {dtype} cannot be saved")
    if dtype.hasobject or dtype.subdtype is not None or dtype.kind not in "biufcmMSUV":
        raise ValueError(f"the NumPy dtype {dtype} cannot be saved: its items are not of one fixed size")
    if dtype.name in _NUMPY_TOO and dtype.isnative:
        return dtype.name
    name = _NUMPY_PREFIX + (dtype.str if dtype.names is None else _write_record(dtype))
    if len(name) > _MAX_LENGTH or _parse_numpy(name) != dtype:
        raise ValueError(f"the NumPy dtype {str(dtype)[:200]} cannot be saved: its layout cannot be described exactly")
    return name


def _write_record(dtype: np.dtype[Any]) -> str:
    return json.dumps(np.lib.format.dtype_to_descr(dtype), separators=(",", ":"))


@lru_cache(maxsize=512)
def _parse_numpy(dtype: str) -> np.dtype[Any]:
    """Read a dtype that starts with `numpy:`; only the exact spelling that `from_numpy` gives is accepted."""
    text = dtype[len(_NUMPY_PREFIX) :]
    bad = ValueError(f"unknown dtype {dtype[:80]!r}")
    if len(dtype) > _MAX_LENGTH:
        raise bad
    try:
        if _SIMPLE.fullmatch(text):
            parsed = np.dtype(text)
            again = parsed.str
        else:
            parsed = np.lib.format.descr_to_dtype(_check_record(json.loads(text), _MAX_DEPTH))
            again = _write_record(parsed)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError, SyntaxError):
        raise bad from None
    native = parsed.names is None and parsed.name in _NUMPY_TOO and parsed.isnative
    if again != text or parsed.hasobject or native or parsed.itemsize > _MAX_ITEMSIZE:
        raise bad
    return parsed


def _check_record(descr: Any, depth: int) -> list[Any]:
    """Check a record's description and turn its lists into the tuples that NumPy wants."""
    if not isinstance(descr, list) or not descr or depth == 0:
        raise ValueError
    fields: list[Any] = []
    for field in descr:
        if not isinstance(field, list) or not 2 <= len(field) <= 3:
            raise ValueError
        name, kind = field[0], field[1]
        if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
            name = tuple(name)
        elif not isinstance(name, str):
            raise ValueError
        if isinstance(kind, list):
            kind = _check_record(kind, depth - 1)
        elif not isinstance(kind, str) or not _SIMPLE.fullmatch(kind):
            raise ValueError
        if len(field) == 3:
            sizes = field[2]
            if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
                raise ValueError
            fields.append((name, kind, tuple(sizes)))
        else:
            fields.append((name, kind))
    return fields
