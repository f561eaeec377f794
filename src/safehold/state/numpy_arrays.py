"""NumPy arrays as leaves.

Invariants: a view shares the array's memory; nothing here copies elements. Object arrays and subclasses that carry more
than their elements are refused by name.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from safehold.errors import UnsupportedStateError
from safehold.format.dtypes import from_numpy, numpy_dtype
from safehold.state.protocols import TensorBinding
from safehold.types import Rect

_NUMPY_MEMORY: Final = -2
"""First element of the memory key of an array; torch's begin with other numbers."""

_NO_MEMORY: Final = -1


def is_array(value: Any) -> bool:
    """Return whether `value` is an array that becomes a tensor leaf (NumPy scalars are values, not arrays)."""
    return isinstance(value, np.ndarray)


def array_pieces(array: np.ndarray[Any, Any], *, name: str) -> TensorBinding:
    """Bind a whole array; its holders are undeclared.

    Raises:
        UnsupportedStateError: The dtype has no fixed-size elements, or the class carries more than elements (masks,
            units).
    """
    if type(array) not in (np.ndarray, np.memmap):
        cls = type(array)
        raise UnsupportedStateError(
            f"{name}: {cls.__module__}.{cls.__qualname__}, a subclass of numpy.ndarray, cannot be saved",
            hint="save numpy.asarray(...) of it and what else it carries as separate leaves",
        )
    shape = tuple(array.shape)
    empty = array.size == 0
    address = int(array.__array_interface__["data"][0])
    memory = (_NO_MEMORY, id(array)) if empty else (_NUMPY_MEMORY, address, len(shape), *shape, *array.strides)
    view = array.view(np.ndarray)
    return TensorBinding(
        shape=shape,
        dtype=dtype_name(array.dtype, name=name),
        pieces=((Rect.whole(shape), view),),
        memory=memory,
        kind="numpy",
        live=array,
    )


def dtype_name(dtype: np.dtype[Any], *, name: str) -> str:
    """Return the canonical name of an array's dtype.

    Raises:
        UnsupportedStateError: It cannot be saved; `name` is in the message.
    """
    try:
        return from_numpy(dtype)
    except ValueError as exc:
        hint = "convert object arrays to lists, or to an array of numbers" if dtype.hasobject else None
        raise UnsupportedStateError(f"{name}: an array cannot be saved: {exc}", hint=hint) from exc


def array_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a canonical name.

    Raises:
        UnsupportedStateError: NumPy as installed here has no such dtype.
    """
    dtype = numpy_dtype(name)
    if dtype is None:
        added = sys.modules.get("ml_dtypes")
        found = getattr(added, name, None)
        if found is None:
            raise UnsupportedStateError(f"NumPy has no dtype {name} here", hint="import ml_dtypes before the restore")
        dtype = np.dtype(found)
    return dtype
