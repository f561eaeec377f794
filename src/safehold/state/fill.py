"""Puts verified bytes into live tensors and arrays: the other direction of staging.

Invariants: only `Target` methods write to the user's memory; they write exactly the range they are told, without tracking gradients, and
convert the dtype only where the destination's differs from the saved one (restore with `cast`). Safe to call from several threads for
disjoint ranges.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from safehold.format import dtypes
from safehold.host.direct_io import aligned_buffer


class Target:
    """One live view that a restore fills.

    Attributes:
        raw: The destination's memory as bytes, where that can be filled directly (host memory, contiguous, same dtype); else None.
    """

    def __init__(self, view: Any, saved_dtype: str, dtype: str) -> None:
        self._view = view
        self._dtype = saved_dtype
        self._same = saved_dtype == dtype
        self._is_torch = not isinstance(view, np.ndarray)
        self.raw = _raw_bytes(view) if saved_dtype == dtype else None

    def fill(self, index: tuple[slice, ...], sizes: Sequence[int], data: memoryview) -> None:
        """Write the sub-rectangle `index` (of `sizes`) from its row-major bytes in the saved dtype."""
        view = self._view[index] if index else self._view
        if self._is_torch:
            _fill_torch(view, self._dtype, sizes, data, same=self._same)
        else:
            np.copyto(view, _numpy_source(self._dtype, data).reshape(tuple(sizes)), casting="unsafe")


def _numpy_source(dtype: str, data: memoryview) -> np.ndarray[Any, Any]:
    """Return the items as an array; where NumPy lacks the dtype, of one that holds them exactly."""
    found = dtypes.numpy_dtype(dtype)
    if found is not None:
        return np.frombuffer(data, dtype=found)
    import torch

    wider = torch.complex64 if dtype.startswith("complex") else torch.float32
    values: np.ndarray[Any, Any] = _torch_source(dtype, data).to(wider).numpy()
    return values


def _raw_bytes(view: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if isinstance(view, np.ndarray):
        if not view.flags.c_contiguous or not view.flags.writeable:
            return None
        return view.reshape(-1).view(np.uint8)
    import torch

    if view.device.type != "cpu" or not view.is_contiguous() or view.is_conj() or view.is_neg():
        return None
    # Not `reshape`: the strides of dims of size 1 may be anything, and `view` minds them.
    flat = torch.as_strided(view.detach(), (view.numel(),), (1,))
    found: np.ndarray[Any, np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return found


def _torch_source(dtype: str, data: memoryview) -> Any:
    import torch

    from safehold.state.torch_tensors import dtype_from_name

    source = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
    if source.data_ptr() % max(1, dtypes.itemsize(dtype)):
        source = source.clone()
    return source.view(dtype_from_name(dtype))


def _fill_torch(view: Any, dtype: str, sizes: Sequence[int], data: memoryview, *, same: bool) -> None:
    import torch

    with torch.no_grad():
        target, source = view.detach(), _torch_source(dtype, data).reshape(tuple(sizes))
        # As integers of the same size: torch cannot copy some dtypes, and must not touch the bits of others.
        plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(target.element_size())
        if same and plain is not None and not (target.is_conj() or target.is_neg()):
            target, source = target.view(plain), source.view(plain)
        target.copy_(source)


def host_buffer(size_bytes: int, views: Sequence[Any]) -> memoryview:
    """Return page-aligned host memory to read into; pinned where a destination is on a CUDA device."""
    if "torch" in sys.modules and any(getattr(getattr(view, "device", None), "type", "") == "cuda" for view in views):
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
    return aligned_buffer(size_bytes)
