"""The small tables of parts and plans: leaves, objects, aliases. JSON by column, under `safehold.format.columns`.

Invariants: what is read is what could have been written: every name is a name, every dtype known, names unique.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from safehold.errors import ManifestError
from safehold.format import dtypes, names
from safehold.types import ObjectSpec, RankPolicy, TensorSpec

MAX_LEAVES: Final = 2**24
MAX_DIMS: Final = 64
MAX_BYTES: Final = 2**60
MAX_CELLS: Final = 2**24
"""Most leaves times dims: bounds what checking the rows of a table allocates."""

_Size = Annotated[int, Meta(ge=0, lt=MAX_BYTES)]
_Index = Annotated[int, Meta(ge=0, lt=2**31)]
_POLICIES: Final[tuple[RankPolicy, ...]] = get_args(RankPolicy)


class _Leaves(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    dtypes: list[str]
    dtype: list[_Index]
    kinds: list[Literal["torch", "numpy"]]
    kind: list[_Index]
    shapes: list[Annotated[tuple[_Size, ...], Meta(max_length=MAX_DIMS)]]


class _Objects(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    policies: list[RankPolicy]
    policy: list[_Index]


_LEAVES = msgspec.json.Decoder(_Leaves)
_OBJECTS = msgspec.json.Decoder(_Objects)
_ALIASES = msgspec.json.Decoder(list[tuple[str, str]])
_ENCODER = msgspec.json.Encoder()


def encode_leaves(leaves: tuple[TensorSpec, ...]) -> bytes:
    """Write the specs of tensor leaves, in their order.

    Raises:
        ValueError: A name or dtype is bad, or a name occurs twice.
    """
    types: dict[str, int] = {}
    kinds: dict[Literal["torch", "numpy"], int] = {}
    dtype = [types.setdefault(leaf.dtype, len(types)) for leaf in leaves]
    kind = [kinds.setdefault(leaf.kind, len(kinds)) for leaf in leaves]
    table = _Leaves(
        [leaf.name for leaf in leaves], list(types), dtype, list(kinds), kind, [leaf.shape for leaf in leaves]
    )
    _check_leaves(table)
    return _ENCODER.encode(table)


def decode_leaves(data: bytes, *, path: str) -> tuple[TensorSpec, ...]:
    """Read the specs of tensor leaves; raises `ManifestError`."""
    try:
        table = _LEAVES.decode(data)
        _check_leaves(table)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ManifestError(f"the table of leaves is bad: {names.display(str(exc))}", path=path) from None
    types, kinds = table.dtypes, table.kinds
    return tuple(
        TensorSpec(name=name, dtype=types[dtype], shape=shape, kind=kinds[kind])
        for name, dtype, shape, kind in zip(table.names, table.dtype, table.shapes, table.kind, strict=True)
    )


def encode_objects(objects: tuple[ObjectSpec, ...]) -> bytes:
    """Write the specs of object leaves, in their order; errors as `encode_leaves`."""
    policies: dict[RankPolicy, int] = {}
    policy = [policies.setdefault(spec.policy, len(policies)) for spec in objects]
    table = _Objects([spec.name for spec in objects], list(policies), policy)
    _check_objects(table)
    return _ENCODER.encode(table)


def decode_objects(data: bytes, *, path: str) -> tuple[ObjectSpec, ...]:
    """Read the specs of object leaves; raises `ManifestError`."""
    try:
        table = _OBJECTS.decode(data)
        _check_objects(table)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ManifestError(f"the table of objects is bad: {names.display(str(exc))}", path=path) from None
    policies = table.policies
    return tuple(
        ObjectSpec(name=name, policy=policies[policy]) for name, policy in zip(table.names, table.policy, strict=True)
    )


def encode_aliases(aliases: tuple[tuple[str, str], ...]) -> bytes:
    """Write pairs (other name, leaf); errors as `encode_leaves`."""
    _check_aliases(list(aliases))
    return _ENCODER.encode(aliases)


def decode_aliases(data: bytes, *, path: str) -> tuple[tuple[str, str], ...]:
    """Read pairs (other name, leaf); raises `ManifestError`."""
    try:
        aliases = _ALIASES.decode(data)
        _check_aliases(aliases)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ManifestError(f"the table of aliases is bad: {names.display(str(exc))}", path=path) from None
    return tuple(aliases)


def _check_leaves(table: _Leaves) -> None:
    count = len(table.names)
    if count > MAX_LEAVES:
        raise ValueError(f"more than {MAX_LEAVES} leaves")
    if not count == len(table.dtype) == len(table.kind) == len(table.shapes):
        raise ValueError("columns of different lengths")
    if count * max(map(len, table.shapes), default=0) > MAX_CELLS:
        raise ValueError(f"more than {MAX_CELLS} leaves times dims")
    _check_names(table.names)
    _check_indices(table.dtype, len(table.dtypes))
    _check_indices(table.kind, len(table.kinds))
    sizes = [dtypes.itemsize(dtype) for dtype in table.dtypes]
    for shape, dtype in zip(table.shapes, table.dtype, strict=True):
        if len(shape) > MAX_DIMS or max(math.prod(shape) * max(1, sizes[dtype]), *shape, 0) >= MAX_BYTES:
            raise ValueError("a tensor is too large")


def _check_objects(table: _Objects) -> None:
    if len(table.names) > MAX_LEAVES or len(table.names) != len(table.policy):
        raise ValueError("columns of different lengths")
    if any(policy not in _POLICIES for policy in table.policies):
        raise ValueError("an unknown policy")
    _check_names(table.names)
    _check_indices(table.policy, len(table.policies))


def _check_aliases(aliases: list[tuple[str, str]]) -> None:
    _check_names([alias for alias, _ in aliases])
    for _, target in aliases:
        names.check_name(target)


def _check_names(given: list[str]) -> None:
    if len(set(given)) != len(given):
        raise ValueError("a name occurs twice")
    check = names.check_name
    for name in given:
        check(name)


def _check_indices(indices: list[int], length: int) -> None:
    if indices and max(indices) >= length:
        raise ValueError("an index is out of bounds")
