"""Host memory with torch tensors (and NumPy arrays) in it.

Invariants: as in `device`. Contiguous tensors are copied by `memmove`, everything else by `copy_` into a typed view
of the arena, in pieces below the size at which torch would use its own threads: their barrier at every tensor makes a
copy of hundreds of tensors five times as long where another process keeps a core busy (measured: 2.8 s instead of 0.5
s for 589 tensors of 1.5 GB). Whoever wants several cores calls `copy` from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from safehold.errors import UnsupportedStateError
from safehold.host.device import (
    Copier,
    NumpyCopier,
    NumpyDevice,
    Piece,
    Sample,
    Taken,
    check_place,
    move,
    run_at,
    split_rows,
)
from safehold.host.memfd import Mapping

# torch does not use its threads for fewer elements (at::internal::GRAIN_SIZE).
_GRAIN_ELEMENTS = 32768
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchCopier(NumpyCopier):
    """Copies tensors of host memory, and of devices that torch copies from in order, and NumPy arrays, at once."""

    def __init__(self, mapping: Mapping) -> None:
        """Copy into a writable mapping."""
        super().__init__(mapping)
        self._bases: dict[torch.dtype, torch.Tensor] = {}

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `Copier`."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            super().copy(pieces)

    def copy_one(self, view: Any, offset: int, nbytes: int) -> None:
        """Copy one tensor or array; within what `copy` sets up."""
        if isinstance(view, torch.Tensor):
            self._copy_tensor(view, offset, nbytes)
        else:
            super().copy_one(view, offset, nbytes)

    def _copy_tensor(self, view: torch.Tensor, offset: int, nbytes: int) -> None:
        check_place(view.nbytes, offset, nbytes, self._mapping)
        if nbytes == 0:
            return
        if view.is_cpu and is_plain(view):
            move(self._mapping.address + offset, view.data_ptr(), nbytes)
            return
        source = copyable(view)
        if offset % source.itemsize:
            source = source.contiguous().cpu()
            move(self._mapping.address + offset, source.data_ptr(), nbytes)
        elif source.numel() < _GRAIN_ELEMENTS or not source.is_cpu:
            self.target(offset, source.dtype, source.shape).copy_(source)
        else:
            for piece, place, _ in split_rows(source, offset, nbytes, (_GRAIN_ELEMENTS - 1) * source.itemsize):
                self.target(place, piece.dtype, piece.shape).copy_(piece)

    def target(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return a contiguous view of the arena; cheap, for it is cut from one that is kept."""
        base = self._bases.get(dtype)
        if base is None:
            # From the memoryview: a tensor made from the mmap itself would not keep it from being unmapped.
            count = self._mapping.size_bytes // dtype.itemsize
            base = self._bases[dtype] = torch.frombuffer(self._mapping.view, dtype=dtype, count=count)
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return base.as_strided(shape, strides[::-1], offset // dtype.itemsize)

    def split(self, view: Any, offset: int, nbytes: int, limit_bytes: int) -> Iterable[Piece]:
        """See `Copier`."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().split(view, offset, nbytes, limit_bytes)

    def flat(self, view: Any) -> Any:
        """Return a contiguous view as one row, others as they are."""
        if not isinstance(view, torch.Tensor):
            return super().flat(view)
        source = view.detach()
        return source.view(-1) if source.is_contiguous() else source

    def sample(self, views: Sequence[Any]) -> Sample:
        """See `Copier`."""
        return Taken.of(views, exact_bytes)

    def block(self, view: Any, at_byte: int, limit_bytes: int) -> tuple[Any, int, int] | None:
        """See `Copier`."""
        if not isinstance(view, torch.Tensor):
            return super().block(view, at_byte, limit_bytes)
        with torch._C.DisableTorchFunctionSubclass():
            return run_at(view.detach(), view.shape, at_byte, view.itemsize, limit_bytes)

    def close(self) -> None:
        """See `Copier`."""
        self._bases.clear()


class TorchDevice(NumpyDevice):
    """Host memory, for torch tensors and NumPy arrays."""

    def copier(self, mapping: Mapping) -> Copier:
        """See `Device`."""
        return TorchCopier(mapping)


def is_plain(view: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its value, row-major."""
    return view.layout is torch.strided and view.is_contiguous() and not view.is_conj() and not view.is_neg()


def copyable(view: torch.Tensor) -> torch.Tensor:
    """Return a view that `copy_` copies exactly: of integers, since torch stores dtypes that it cannot copy, or not bit
    by bit. A complex tensor gets one more dim.

    Raises:
        UnsupportedStateError: The tensor is not strided (sparse, quantized, nested, ...).
    """
    if view.layout is not torch.strided or view.is_quantized or view.is_nested:
        raise UnsupportedStateError(f"a tensor with layout {view.layout} cannot be copied as it is")
    source = view.detach()
    if source.is_conj() or source.is_neg():
        return source
    if source.is_complex():
        source = torch.view_as_real(source)
    integer = _INTEGER_OF_SIZE.get(source.itemsize)
    return source if integer is None else source.view(integer)


def exact_bytes(view: Any) -> bytes:
    """Return the bytes of a small view, row-major, conjugated and negated as its flags say."""
    if isinstance(view, np.ndarray):
        return view.tobytes()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        source = resolved(view).contiguous().cpu()
        return flat_bytes(source).numpy().tobytes()


def resolved(view: torch.Tensor) -> torch.Tensor:
    """Return `view` as `copyable` does, with its lazy conjugation and negation carried out."""
    return copyable(view).resolve_conj().resolve_neg()


def flat_bytes(view: torch.Tensor) -> torch.Tensor:
    """Return a byte view of a contiguous tensor; its stride may be anything where a dim has one element."""
    return view.detach().as_strided((view.numel(),), (1,)).view(torch.uint8)
