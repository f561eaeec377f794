"""Anything that becomes a tensor leaf, bound to this rank's memory: torch tensors, NumPy arrays, `Sharded`
declarations.

Invariants: views only, nothing is copied; torch is imported only where a torch tensor is met.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from safehold.errors import UnsupportedStateError
from safehold.state import numpy_arrays
from safehold.state.declare import Sharded
from safehold.state.protocols import TensorBinding
from safehold.state.values import torch_dtype
from safehold.types import Holders, Rect

Pieces = tuple[tuple[Rect, Any], ...]


def bind_tensor(value: Any, *, name: str, rank: int) -> TensorBinding:
    """Bind a torch tensor, a NumPy array or a `Sharded` to this rank's memory.

    Raises:
        UnsupportedStateError: It cannot be saved; names `name` and the type.
    """
    if isinstance(value, Sharded):
        return _sharded_pieces(value, name=name, rank=rank)
    if numpy_arrays.is_array(value):
        return numpy_arrays.array_pieces(value, name=name)
    from safehold.state.torch_tensors import tensor_pieces

    return tensor_pieces(value, name=name)


def can_be_filled(value: Any) -> bool:
    """Return whether a restore can write into the memory of `value`: not read-only, no two elements in one place."""
    if isinstance(value, Sharded):
        return can_be_filled(value.tensor)
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable) and not (0 in value.strides and value.size > 1)
    from safehold.state.torch_tensors import overlaps_itself

    local = getattr(value, "_local_tensor", value)
    return not overlaps_itself(local)


def fresh_tensor(dtype: str, shape: tuple[int, ...], kind: str) -> Any:
    """Return an uninitialised tensor on the CPU or array, for a saved leaf that has no place in the template.

    An array whose dtype NumPy lacks here becomes a torch tensor.

    Raises:
        UnsupportedStateError: Neither torch nor NumPy as installed has the dtype.
    """
    if kind == "numpy":
        try:
            return np.empty(shape, numpy_arrays.array_dtype(dtype))
        except UnsupportedStateError:
            if dtype.startswith("numpy:"):
                raise
    import torch

    return torch.empty(shape, dtype=torch_dtype(dtype))


def same_bytes(one: Pieces, other: Pieces) -> bool:
    """Return whether pieces of the same rectangles hold the same bytes; copies device tensors to the host."""
    return all(_bytes(a) == _bytes(b) for (_, a), (_, b) in zip(one, other, strict=True))


def _bytes(view: Any) -> bytes:
    if isinstance(view, np.ndarray):
        return view.tobytes()
    import torch

    host = view.cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(host.view(torch.uint8).numpy().data) if host.numel() else b""


def _sharded_pieces(declared: Sharded, *, name: str, rank: int) -> TensorBinding:
    local = bind_tensor(declared.tensor, name=name, rank=rank)
    if local.holders.ranks is not None or len(local.pieces) != 1 or local.shape != tuple(declared.tensor.shape):
        raise UnsupportedStateError(f"{name}: safehold.Sharded takes a dense local tensor, not a sharded one")
    holders = Holders(ranks=tuple(sorted({rank, *declared.replica_group})) if declared.replica_group else (rank,))
    pieces = tuple(_cut(local.pieces[0][1], declared.rects, name))
    return replace(local, shape=declared.global_shape, pieces=pieces, holders=holders)


def _cut(view: Any, rects: tuple[Rect, ...], name: str) -> Iterator[tuple[Rect, Any]]:
    """Give every rectangle its share of `view`, whose elements are those of the rectangles one after the other."""
    if len(rects) == 1 and tuple(view.shape) == rects[0].sizes:
        yield rects[0], view
        return
    rows = all(rect.sizes[1:] == tuple(view.shape)[1:] for rect in rects) if len(view.shape) else False
    if rects and rows and all(len(rect.sizes) == len(view.shape) for rect in rects):
        start = 0
        for rect in rects:
            yield rect, view[start : start + rect.sizes[0]]
            start += rect.sizes[0]
        return
    if rects and not _is_contiguous(view):
        raise UnsupportedStateError(
            f"{name}: the tensor of safehold.Sharded is not contiguous, so its elements cannot be cut into the pieces"
        )
    flat = view.reshape(-1)
    start = 0
    for rect in rects:
        yield rect, flat[start : start + rect.numel].reshape(rect.sizes)
        start += rect.numel


def _is_contiguous(view: Any) -> bool:
    return bool(view.flags.c_contiguous) if isinstance(view, np.ndarray) else bool(view.is_contiguous())
