"""Values of leaves in forms that other tools read: npy, safetensors, JSON.

Invariants: what a form cannot hold exactly is refused with a hint, except that JSON numbers are rounded as JSON numbers
are.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections import OrderedDict, deque
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from safehold.cli.output import clean, strict
from safehold.errors import ConfigurationError
from safehold.format import dtypes, objects
from safehold.pipeline.leaf_reader import typed
from safehold.types import TensorSpec

MAX_JSON_ITEMS = 1 << 20
"""Larger tensors are not written as JSON."""


def check_form(spec: TensorSpec, form: str) -> None:
    """Refuse what a form cannot hold, before anything is read.

    Raises:
        ConfigurationError: It cannot.
    """
    if form == "npy" and dtypes.numpy_dtype(spec.dtype) is None:
        raise ConfigurationError(f"NumPy has no {spec.dtype}", hint="use --format safetensors")
    if form == "json":
        if dtypes.numpy_dtype(spec.dtype) is None and spec.dtype != "bfloat16":
            raise ConfigurationError(f"{spec.dtype} cannot be written as JSON", hint="use --format safetensors")
        if math.prod(spec.shape) > MAX_JSON_ITEMS:
            text = f"the tensor has {math.prod(spec.shape)} items, more than JSON is good for ({MAX_JSON_ITEMS})"
            raise ConfigurationError(text, hint="use --format npy or safetensors")


def tensor_bytes(spec: TensorSpec, name: str, raw: npt.NDArray[np.uint8], form: str) -> bytes:
    """Return a whole file with one tensor.

    Args:
        spec: What it is.
        name: What it is called in the file.
        raw: Its items' bytes, with one more dim.
        form: `npy`, `safetensors` or `json`.
    """
    if form == "npy":
        out = io.BytesIO()
        np.lib.format.write_array(
            out, np.ascontiguousarray(typed(raw, spec.dtype)).reshape(spec.shape), allow_pickle=False
        )
        return out.getvalue()
    if form == "safetensors":
        entry = {
            "dtype": dtypes.safetensors_name(spec.dtype),
            "shape": list(dtypes.safetensors_shape(spec.dtype, spec.shape)),
            "data_offsets": [0, raw.nbytes],
        }
        head = msgspec.json.encode({"__metadata__": {"format": "pt", "dtype": spec.dtype}, name: entry})
        head += b" " * (-len(head) % 8)
        return len(head).to_bytes(8, "little") + head + raw.tobytes()
    array = typed(raw, spec.dtype)
    if spec.dtype == "bfloat16":
        array = (raw.view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)
    value = {"name": name, "dtype": spec.dtype, "shape": list(spec.shape), "values": _items(array)}
    return _dump(value)


def object_json(value: Any) -> bytes:
    """Return an object as JSON; what JSON lacks becomes `{"$type": ..., "value": ...}`, see docs/cli.md."""
    return _dump(_plain(value))


def _items(array: npt.NDArray[Any]) -> Any:
    if array.dtype.kind in "iufb":
        return array.astype(np.float64).tolist() if array.dtype.itemsize > 8 else array.tolist()
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1).tolist()
    return array.astype(str).tolist()


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return strict(value)
        case objects.ArrayValue():
            raw = np.frombuffer(value.data, np.uint8)
            items = typed(raw.reshape((*value.shape, dtypes.itemsize(value.dtype))), value.dtype)
            known = dtypes.numpy_dtype(value.dtype) is not None and items.size <= MAX_JSON_ITEMS
            inside = _items(items) if known else base64.b64encode(value.data).decode()
            return {"$type": "array", "dtype": value.dtype, "shape": list(value.shape), "value": inside}
        case objects.TorchThing():
            return {"$type": f"torch.{value.kind}", "value": value.text}
        case bytes() | bytearray():
            return {"$type": type(value).__name__, "value": base64.b64encode(value).decode()}
        case list():
            return [_plain(item) for item in value]
        case dict():
            return _plain_dict(value)
        case tuple() | set() | frozenset() | deque():
            return {"$type": type(value).__name__, "value": [_plain(item) for item in value]}
        case complex():
            return {"$type": "complex", "value": [strict(value.real), strict(value.imag)]}
        case _:
            return {"$type": type(value).__name__, "value": clean(value)}


def _plain_dict(value: dict[Any, Any]) -> Any:
    names = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if names and type(value) in (dict, OrderedDict):
        return {key: _plain(item) for key, item in value.items()}
    pairs = [[_plain(key), _plain(item)] for key, item in value.items()]
    return {"$type": type(value).__name__, "value": pairs}


def _dump(value: Any) -> bytes:
    # The standard library's: integers of any size, and lone surrogates escaped.
    return (json.dumps(_strict_deep(value), indent=2, allow_nan=False) + "\n").encode("ascii")


def _strict_deep(value: Any) -> Any:
    if isinstance(value, float):
        return strict(value)
    if isinstance(value, list):
        return [_strict_deep(item) for item in value]
    if isinstance(value, dict):
        return {key: _strict_deep(item) for key, item in value.items()}
    return value
