"""Torch tensors to pieces: global shape, dtype name, disjoint (rectangle, live view), holders, identity of the memory.

Invariants: nothing here copies, waits for a device, or calls a collective; only the result of a collective that is
still under way is waited for. A tensor whose bytes are not plainly in its own memory (quantized, sparse, nested, meta,
fake, a subclass of an unknown kind) is refused by name and never saved as something else.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch.nn import parameter

from safehold.errors import UnsupportedStateError
from safehold.format import dtypes
from safehold.state.protocols import TensorBinding
from safehold.types import UNDECLARED, Holders, Rect

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}
_ORDINALS = {dtype: ordinal for ordinal, dtype in enumerate(_DTYPES)}
_DEVICES: dict[str, int] = {}


def loaded(module: str, name: str) -> Any:
    """Return a class of a part of torch that is slow to import; None if nobody has, and so no object is of it."""
    return getattr(sys.modules.get(module), name, None)


def is_a(value: Any, module: str, name: str) -> bool:
    """Return True if `value` is an instance of that class of torch, without importing it."""
    cls = loaded(module, name)
    return cls is not None and isinstance(value, cls)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that `TensorSpec` has for `dtype`."""
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ValueError: torch has no such dtype.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"torch {torch.__version__} has no dtype {name}") from None


def refuse(name: str, what: str, hint: str | None = None) -> NoReturn:
    """Raise `UnsupportedStateError` for the leaf `name`."""
    raise UnsupportedStateError(f"{name} cannot be saved: {what}", hint=hint)


def tensor_pieces(tensor: Any, *, name: str) -> TensorBinding:
    """Bind one torch tensor to this rank's memory.

    Args:
        tensor: A dense tensor or parameter with any strides, a DTensor with any mesh and placements, or an FSDP1 flat
            parameter (taken as the one-dim tensor that its ranks hold together).
        name: Only for errors.

    Raises:
        UnsupportedStateError: The tensor is of a kind that cannot be saved; names it and the kind.
    """
    if is_dtensor(tensor):
        from safehold.state import dtensors

        return dtensors.dtensor_pieces(tensor, name=name)
    if is_flat_parameter(tensor):
        from safehold.state import fsdp1

        return fsdp1.flat_pieces(tensor, name=name)
    if getattr(tensor, "_fsdp_flattened", False):
        refuse(name, "it is one rank's share of an FSDP parameter", "save the FSDP module that it belongs to")
    local = plain_tensor(tensor, name)
    guard = None if local is tensor else (lambda: tensor.elem is local)
    return whole_binding(local, owner=tensor, guard=guard)


def is_dtensor(tensor: Any) -> bool:
    """Return True for a DTensor (not for its local tensor)."""
    return is_a(tensor, "torch.distributed.tensor", "DTensor")


def is_flat_parameter(tensor: Any) -> bool:
    """Return True for the flat parameter of an FSDP1 module."""
    return isinstance(tensor, torch.Tensor) and getattr(tensor, "_is_flat_param", False)


def whole_binding(
    local: torch.Tensor, *, owner: Any, holders: Holders = UNDECLARED, guard: Any = None
) -> TensorBinding:
    """Bind a plain tensor that this rank holds whole; `owner` gives the identity of an empty one."""
    shape = tuple(local.shape)
    return TensorBinding(
        shape=shape,
        dtype=_NAMES[local.dtype],
        pieces=((Rect.whole(shape), local.detach()),),
        holders=holders,
        memory=memory_key(local, owner),
        live=local,
        guard=guard,
    )


def memory_key(local: torch.Tensor, owner: Any) -> tuple[int, ...]:
    """Return the identity of a plain tensor's memory; of an empty one that of `owner`."""
    if local.numel() == 0:
        return (-1, id(owner))
    device, shape = local.device, tuple(local.shape)
    strides: tuple[Any, ...] = local.stride()
    if 1 in shape:  # the stride of such a dim says nothing about the memory
        strides = tuple(stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return (
        _DEVICES.setdefault(device.type, len(_DEVICES)),
        -1 if device.index is None else device.index,
        local.untyped_storage().data_ptr(),
        int(local.storage_offset()),
        _ORDINALS[local.dtype],
        *shape,
        *strides,
    )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements share memory (an expanded tensor): it can be saved, but not be filled in place."""
    extent = 0
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if size > 1:
            if stride <= extent:
                return True
            extent += (size - 1) * stride
    return False


def plain_tensor(tensor: Any, name: str) -> torch.Tensor:
    """Return the plain tensor that `tensor` is or, for a collective's result, stands for.

    Raises:
        UnsupportedStateError: Its bytes are not plainly in its own memory.
    """
    if parameter.is_lazy(tensor):
        refuse(name, "it is a lazy parameter that has no shape yet", "run one forward pass before saving or restoring")
    if is_a(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        tensor = tensor.trigger_wait()
    if type(tensor) not in _PLAIN_TYPES:
        _refuse_type(tensor, name)
    _refuse_unusual(tensor, name)
    try:
        freed = tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError) as exc:
        raise UnsupportedStateError(f"{name} cannot be saved: it has no storage of its own ({exc})") from exc
    if freed:
        refuse(name, "its memory is freed at the moment (storage resized to 0)", "save between steps")
    return tensor  # type: ignore[no-any-return]


def _refuse_type(tensor: Any, name: str) -> NoReturn:
    cls = type(tensor)
    kind = f"{cls.__module__}.{cls.__qualname__}"
    if not isinstance(tensor, torch.Tensor):
        refuse(
            name,
            f"{kind} is no torch.Tensor (sharded or wrapped tensor)",
            "use DTensor or declare it with safehold.Sharded",
        )
    if cls.__name__ == "FakeTensor":
        refuse(name, "it is a fake tensor without bytes", "materialise the model first")
    if tensor.is_nested:
        refuse(name, f"nested tensors ({kind}) are not supported", "save its values and offsets")
    if tensor.is_sparse or tensor.layout != torch.strided:
        refuse(name, f"it is a sparse tensor ({tensor.layout})", "save its indices and values")
    refuse(name, f"{kind} is a tensor subclass of an unknown kind", "save the plain tensors that it is made of")


def _refuse_unusual(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_meta:
        refuse(
            name,
            "it is on the meta device and has no bytes",
            "materialise it first (to_empty, then initialise or restore)",
        )
    if tensor.is_quantized:
        refuse(name, f"it is a quantized tensor ({tensor.dtype})", "save int_repr(), scale and zero point")
    if tensor.is_nested:
        refuse(name, "nested tensors are not supported", "save its values and offsets")
    if tensor.layout != torch.strided:
        refuse(name, f"it is a sparse tensor ({tensor.layout})", "save its indices and values")
    if tensor.is_conj() or tensor.is_neg():
        refuse(name, "it is a lazily conjugated or negated view", "use resolve_conj() or resolve_neg()")
    if not dtypes.is_known(_NAMES[tensor.dtype]):
        refuse(name, f"dtype {tensor.dtype} is not supported")
