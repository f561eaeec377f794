"""Framework values to plain values that `safehold.format.objects` encodes, and back.

What a framework gives (dtypes, devices, sizes, small tensors, NumPy arrays and scalars, generators) and what an object
leaf may hold besides (`io.BytesIO`) becomes plain; everything else that is not plain is refused by name.

Invariants: `to_plain` builds new containers, so later changes by the trainer do not reach what was saved. A dict with
the key `TAG` is one of ours; a user's dict that has that key is wrapped itself, so the conversion is exact. Decoding
runs no code that the checkpoint names.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import random
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from safehold.errors import UnsupportedStateError
from safehold.format.objects import MAX_DEPTH, ArrayValue, TorchThing
from safehold.state import numpy_arrays

MAX_TENSOR_BYTES: Final = 64 << 20
"""Largest tensor or array inside an object leaf; larger ones belong into tensor leaves."""

TAG: Final = "__safehold__"

ATOMS: Final = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        datetime.datetime,
        datetime.date,
        datetime.timedelta,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
    )
)
"""Immutable types that are plain as they are."""

_CONTAINERS: Final = frozenset((list, tuple, dict, set, frozenset, OrderedDict, defaultdict, deque, Counter))


def is_atom(value: Any) -> bool:
    """Return whether `value` is plain, immutable and holds nothing."""
    return type(value) in ATOMS


def only_atoms(values: Any) -> bool:
    """Return whether all `values` are atoms; fast for long lists."""
    return ATOMS.issuperset(map(type, values))


def to_plain(value: Any, *, name: str) -> Any:
    """Return `value` in new containers, with framework values replaced by plain ones.

    Copies tensors to the host; for tensors on a device that waits for the device.

    Args:
        value: The value of an object leaf.
        name: Its FQN, for errors.

    Raises:
        UnsupportedStateError: Something inside has a type that cannot be saved, is too large, too deep, or contains
            itself.
    """
    if type(value) in ATOMS:
        return value
    return _Encoder(name).encode(value, "")


def from_plain(value: Any) -> Any:
    """Turn a decoded plain value into the framework values that `to_plain` was given."""
    cls = type(value)
    if cls in ATOMS:
        return value
    if cls is ArrayValue:
        return _array_from(value)
    if cls is TorchThing:
        return _torch_thing_from(value)
    if cls is dict:
        if value.get(TAG) is not None:
            return _tagged_from(value)
        return {from_plain(key): from_plain(item) for key, item in value.items()}
    if cls in (list, tuple, set, frozenset):
        return cls(value) if only_atoms(value) else cls(map(from_plain, value))
    if cls in (OrderedDict, Counter):
        return cls({from_plain(key): from_plain(item) for key, item in value.items()})
    if cls is defaultdict:
        pairs = {from_plain(key): from_plain(item) for key, item in value.items()}
        return defaultdict(value.default_factory, pairs)
    if cls is deque:
        return deque(map(from_plain, value), value.maxlen)
    return value


def _tagged_from(value: dict[Any, Any]) -> Any:
    decoder = _DECODERS.get(str(value[TAG]))
    if decoder is None or "value" not in value:
        raise UnsupportedStateError(
            f"a value of the unknown kind {str(value[TAG])[:80]!r} cannot be restored",
            hint="it was saved by another version of safehold",
        )
    try:
        return decoder(value["value"])
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as exc:
        raise UnsupportedStateError(f"a saved {value[TAG]} is not of the expected form: {exc!r}") from exc


def cannot_be_saved(value: Any, where: str) -> UnsupportedStateError:
    """Return the error that names the type of `value` and where it is."""
    cls = type(value)
    return UnsupportedStateError(f"{where}: {cls.__module__}.{cls.__qualname__} cannot be saved", hint=_hint_for(value))


class _Encoder:
    """One object leaf on its way to plain values."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: set[int] = set()

    def encode(self, value: Any, inside: str) -> Any:
        cls = type(value)
        if cls in ATOMS:
            return value
        if cls in _CONTAINERS:
            return self._container(value, inside)
        if cls in (bytearray, slice):
            return bytearray(value) if cls is bytearray else value
        if isinstance(value, pathlib.PurePath):
            return value
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, inside)
        found = _encode_framework_value(value, self._where(inside))
        if found is None:
            raise cannot_be_saved(value, self._where(inside))
        return found

    def _where(self, inside: str) -> str:
        return f"{self._name} (inside it: {inside})" if inside else self._name

    def _container(self, value: Any, inside: str) -> Any:
        if id(value) in self._open:
            raise UnsupportedStateError(f"{self._where(inside)}: a {type(value).__name__} contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise UnsupportedStateError(f"{self._where(inside)}: nested more than {MAX_DEPTH} levels deep")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, inside)
            if only_atoms(value):
                return value.copy() if hasattr(value, "copy") else value
            items = [self.encode(item, f"{inside}[{index}]") for index, item in enumerate(value)]
            return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
        finally:
            self._open.discard(id(value))

    def _dict(self, value: dict[Any, Any], inside: str) -> Any:
        encode = self.encode
        if only_atoms(value) and only_atoms(value.values()):
            pairs = dict(value)
        else:
            pairs = {encode(key, f"{inside}<key>"): encode(item, f"{inside}[{key!r}]") for key, item in value.items()}
        if type(value) is dict:
            return {TAG: "dict", "value": list(pairs.items())} if TAG in value else pairs
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, pairs)
        return type(value)(pairs)

    def _array(self, value: Any, inside: str) -> ArrayValue:
        where = self._where(inside)
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            raise cannot_be_saved(value, where)
        _check_size(value.nbytes, where)
        return ArrayValue(
            kind="numpy",
            dtype=numpy_arrays.dtype_name(value.dtype, name=where),
            shape=tuple(value.shape),
            data=value.tobytes(),
            scalar=isinstance(value, np.generic),
        )


def _check_size(nbytes: int, where: str) -> None:
    if nbytes > MAX_TENSOR_BYTES:
        raise UnsupportedStateError(
            f"{where}: a tensor of {nbytes} bytes is too large to be kept inside an object",
            hint="declare it with safehold.Sharded, the rank as a leading dim, if it differs between ranks",
        )


def _encode_framework_value(value: Any, where: str) -> Any:
    """Return the plain form of a framework value; None if it is not one that is known."""
    if type(value) is io.BytesIO:
        return {TAG: "BytesIO", "value": value.getvalue()}
    if type(value) is random.Random:
        return {TAG: "random.Random", "value": value.getstate()}
    if type(value) is np.random.Generator:
        state = _Encoder(where).encode(value.bit_generator.state, "bit_generator.state")
        return {TAG: "numpy.Generator", "value": state}
    if type(value) is np.random.RandomState:
        state = _Encoder(where).encode(value.get_state(legacy=False), "get_state()")
        return {TAG: "numpy.RandomState", "value": state}
    if isinstance(value, np.dtype):
        return {TAG: "numpy.dtype", "value": numpy_arrays.dtype_name(value, name=where)}
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.Tensor):
        return tensor_value(value, name=where)
    if isinstance(value, torch.Size):
        return TorchThing(kind="Size", text=",".join(map(str, value)))
    if isinstance(value, torch.dtype):
        return TorchThing(kind="dtype", text=str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return TorchThing(kind="device", text=str(value))
    if isinstance(value, torch.Generator):
        generator = {"device": str(value.device), "state": tensor_value(value.get_state(), name=where)}
        return {TAG: "torch.Generator", "value": generator}
    return None


def tensor_value(tensor: Any, *, name: str) -> ArrayValue:
    """Return a small dense torch tensor with its bytes; copies to the host.

    Raises:
        UnsupportedStateError: It is larger than `MAX_TENSOR_BYTES`, or no dense whole tensor.
    """
    import torch

    from safehold.state.torch_tensors import tensor_pieces

    binding = tensor_pieces(tensor, name=name)
    whole = len(binding.pieces) == 1 and tuple(binding.pieces[0][0].sizes) == tuple(binding.shape)
    if not whole or (hasattr(tensor, "placements") and hasattr(tensor, "to_local")):
        raise UnsupportedStateError(
            f"{name}: a sharded tensor cannot be kept inside an object",
            hint="put it into the state as a leaf of its own",
        )
    view = binding.pieces[0][1]
    _check_size(view.numel() * view.element_size(), name)
    # contiguous() leaves the stride of a dim of size 1 as it is, which a view as bytes does not take.
    host = view.cpu().clone(memory_format=torch.contiguous_format)
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return ArrayValue(kind="torch", dtype=binding.dtype, shape=tuple(binding.shape), data=data, scalar=False)


def torch_dtype(name: str) -> Any:
    """Return torch's dtype of that name.

    Raises:
        UnsupportedStateError: torch as installed here has no such dtype.
    """
    from safehold.state.torch_tensors import dtype_from_name

    try:
        return dtype_from_name(name)
    except ValueError as exc:
        raise UnsupportedStateError(str(exc), hint="install the version of torch that saved it") from exc


def _array_from(value: ArrayValue) -> Any:
    if value.kind == "torch":
        import torch

        flat = torch.frombuffer(bytearray(value.data), dtype=torch.uint8) if value.data else torch.empty(0).byte()
        return flat.view(torch_dtype(value.dtype)).reshape(tuple(value.shape))
    dtype = numpy_arrays.array_dtype(value.dtype)
    array = np.frombuffer(bytearray(value.data), dtype=dtype) if value.data else np.empty(0, dtype)
    array = array.reshape(tuple(value.shape))
    return array[()] if value.scalar else array


def _torch_thing_from(value: TorchThing) -> Any:
    import torch

    if value.kind == "dtype":
        return torch_dtype(value.text)
    if value.kind == "device":
        return torch.device(value.text)
    return torch.Size(int(size) for size in value.text.split(",") if size)


def _numpy_generator_from(state: Any) -> Any:
    state = from_plain(state)
    name = state["bit_generator"]
    if name not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        raise UnsupportedStateError(f"a NumPy generator of the unknown kind {str(name)[:80]!r}")
    generator = np.random.Generator(getattr(np.random, name)())
    generator.bit_generator.state = state
    return generator


def _numpy_random_state_from(state: Any) -> Any:
    generator = np.random.RandomState()
    generator.set_state(from_plain(state))
    return generator


def _python_random_from(state: Any) -> Any:
    generator = random.Random()
    generator.setstate(state)
    return generator


def _torch_generator_from(value: Any) -> Any:
    import torch

    try:
        generator = torch.Generator(device=value["device"])
    except RuntimeError as exc:
        raise UnsupportedStateError(
            f"a torch.Generator on {value['device']} cannot be made in this process",
            hint="give the restore a state that has a generator in that place",
        ) from exc
    generator.set_state(from_plain(value["state"]))
    return generator


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": lambda pairs: {from_plain(key): from_plain(item) for key, item in pairs},
    "BytesIO": io.BytesIO,
    "random.Random": _python_random_from,
    "numpy.Generator": _numpy_generator_from,
    "numpy.RandomState": _numpy_random_state_from,
    "numpy.dtype": numpy_arrays.array_dtype,
    "torch.Generator": _torch_generator_from,
}


def _hint_for(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "a namedtuple is kept only as a member of dicts, lists and tuples; save value._asdict() here"
    if isinstance(value, dict | list | tuple | set | str | int | float):
        base = next(cls for cls in (dict, list, tuple, set, str, int, float) if isinstance(value, cls))
        return f"it is a subclass of {base.__name__}; save {base.__name__}(...) of it"
    if callable(value):
        return "functions and classes are code and no state; leave it out"
    return "save what it is made of (plain values, tensors, arrays), or give its class state_dict and load_state_dict"
