"""What one parameter's optimizer state is: names, pieces and holders of its tensors, and the groups as an object.

Invariants: what the state of one parameter looks like decides alone how it is named and who holds it, so that every
rank comes to the same answer without asking. Nothing here changes an optimizer, except the `write` functions.

A state that is a DTensor speaks for itself. Of the others:

- one that has the shape of the local parameter is sharded like it (and not where the same entry of a larger parameter
  has a single element: then it is a counter);
- one that has a single element is the same on all ranks that hold any of the parameter;
- any other is a plain tensor that nobody has declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from safehold.errors import StateMismatchError, UnsupportedStateError
from safehold.format.names import ListIndex, TupleIndex, join
from safehold.state import param_groups, torch_tensors
from safehold.state.modules import KnownPart, ParamNames
from safehold.state.protocols import NamedObject, Path, TensorBinding
from safehold.state.torch_tensors import refuse
from safehold.types import Holders

STATE = "state"
GROUPS: Path = ("groups",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter of an optimizer.

    Attributes:
        param: What the group holds.
        group: Its group.
        parts: The original parameters that it is; several for an FSDP1 flat parameter.
        named: Whether a saved module holds it; else its one part is named by group and position.
    """

    param: Any
    group: dict[str, Any]
    parts: tuple[KnownPart, ...]
    named: bool


def iter_members(optimizer: Any, *, prefix: Path, names: ParamNames) -> Iterator[Member]:
    """Yield every parameter of the optimizer once, in order."""
    seen: set[int] = set()
    for group_index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) in seen:
                continue
            seen.add(id(param))
            known = names.find(param)
            if known is not None:
                yield Member(param=param, group=group, parts=tuple(known.parts), named=True)
                continue
            fqn: Path = (group_index, position)
            binding = torch_tensors.tensor_pieces(param, name=join((*prefix, STATE, *fqn)))
            yield Member(param=param, group=group, parts=(KnownPart(fqn=fqn, binding=binding),), named=False)


def counter_keys(optimizer: Any, members: list[Member]) -> frozenset[str]:
    """Return the top-level state entries that have one element although the local parameter has not: counters."""
    found: set[str] = set()
    for member in members:
        local = local_numel(member.param)
        for key, value in (optimizer.state.get(member.param) or {}).items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and local != 1:
                found.add(key)
    return frozenset(found)


def local_numel(param: Any) -> int:
    """Return how many elements of `param` are in this rank's memory."""
    return int((param._local_tensor if torch_tensors.is_dtensor(param) else param).numel())


def state_bindings(member: Member, value: Any, name: str, *, counter: bool) -> list[TensorBinding]:
    """Bind one tensor of a parameter's state, once per part of the parameter.

    Args:
        member: The parameter.
        value: The tensor.
        name: Only for errors.
        counter: Whether this entry is known to be a counter.

    Raises:
        UnsupportedStateError: It cannot be told what other ranks hold of it.
    """
    param = member.param
    if member.parts[0].slice is not None:
        return _flat_state_bindings(member, value, name, counter=counter)
    if torch_tensors.is_dtensor(value) or not torch_tensors.is_dtensor(param):
        return [torch_tensors.tensor_pieces(value, name=name)]
    from safehold.state import dtensors

    local = torch_tensors.plain_tensor(value, name)
    if local.dim() and not counter and local.shape == param._local_tensor.shape:
        return [dtensors.spec_pieces(param._spec, local, owner=value, name=name)]
    if local.numel() == 1:
        holders = Holders(ranks=dtensors.mesh_ranks(param.device_mesh))
        return [torch_tensors.whole_binding(local, owner=value, holders=holders)]
    return [torch_tensors.whole_binding(local, owner=value)]


def _flat_state_bindings(member: Member, value: Any, name: str, *, counter: bool) -> list[TensorBinding]:
    from safehold.state import fsdp1

    local = torch_tensors.plain_tensor(value, name)
    flat = torch_tensors.is_flat_parameter(member.param)
    first = member.parts[0].slice
    if not flat and first.whole and local.shape == first.shape and not (counter and local.numel() == 1):
        return [torch_tensors.whole_binding(local, owner=value, holders=Holders(ranks=first.holders))]
    expected = fsdp1.local_shard(member.param).numel() if flat else first.numel
    if local.dim() == 1 and local.numel() == expected and not counter:
        return [
            fsdp1.slice_binding(part.slice, local, offset=part.slice.offset if flat else 0, owner=value)
            for part in member.parts
        ]
    if local.numel() == 1:
        return [
            torch_tensors.whole_binding(
                local, owner=value, holders=Holders(ranks=part.slice.group if flat else part.slice.owners)
            )
            for part in member.parts
        ]
    return refuse(name, f"its shape {tuple(local.shape)} says nothing about the shape that FSDP has flattened")


def flatten(value: Any, name: str) -> Iterator[tuple[Path, Any]]:
    """Yield (path, tensor or plain value) of everything inside a parameter's state; empty containers are values.

    Raises:
        UnsupportedStateError: A key is neither string nor integer.
    """
    members: Any
    if isinstance(value, Mapping):
        members = value.items()
    elif type(value) is list:
        members = ((ListIndex(index), item) for index, item in enumerate(value))
    else:
        members = ((TupleIndex(index), item) for index, item in enumerate(value))
    for key, item in members:
        if not isinstance(key, (str, int, ListIndex, TupleIndex)) or isinstance(key, bool):
            raise UnsupportedStateError(
                f"{name} has the key {key!r} of type {type(key).__name__}; only str and int can be saved"
            )
        if (isinstance(item, Mapping) or type(item) in (list, tuple)) and len(item):
            for rest, leaf in flatten(item, name):
                yield (key, *rest), leaf
        else:
            yield (key,), item


def entry_access(optimizer: Any, param: Any, rest: Path) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return functions that read and replace one entry of a parameter's state as it is when they are called."""

    def read() -> Any:
        value = optimizer.state[param]
        for key in rest:
            value = value[key_of(key)]
        return value

    def write(value: Any) -> None:
        container = optimizer.state[param]
        for key in rest[:-1]:
            container = container[key_of(key)]
        container[key_of(rest[-1])] = value

    return read, write


def key_of(component: Any) -> Any:
    """Return the dict key or index that a path component stands for."""
    return component.index if isinstance(component, (ListIndex, TupleIndex)) else component


def groups_object(optimizer: Any, members: list[Member]) -> NamedObject:
    """Return the parameter groups as one object, see `safehold.state.param_groups`."""
    every = {id(member.param): member for member in members}
    labels = [
        [join(part.fqn) for param in group["params"] for part in every[id(param)].parts]
        for group in optimizer.param_groups
    ]

    def read() -> dict[str, Any]:
        groups = [
            {"params": list(names), "values": {key: value for key, value in group.items() if key != "params"}}
            for names, group in zip(labels, optimizer.param_groups, strict=True)
        ]
        return {"class": type(optimizer).__name__, "groups": groups}

    def other_class(saved: Any) -> list[str]:
        here = type(optimizer).__name__
        kind = saved.get("class", here)
        return [] if kind == here else [f"saved from the optimizer {kind}, the state has {here}"]

    def check(saved: Any) -> list[str]:
        try:
            param_groups.match(labels, saved)
        except StateMismatchError as exc:
            return [exc.message]
        return []

    def write(saved: Any) -> None:
        matched = param_groups.match(labels, saved)
        for group, values in zip(optimizer.param_groups, matched, strict=True):
            for key, value in (values or {}).items():
                if key not in param_groups.TEMPLATE_KEYS:
                    _set_value(group, key, value)

    return NamedObject(path=GROUPS, read=read, write=write, policy="groups", check=check, other_class=other_class)


def _set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one hyperparameter; a tensor that is there stays the same object, since captured graphs read it."""
    present = group.get(key)
    if isinstance(present, torch.Tensor) and not isinstance(value, (dict, list, tuple, str, type(None))):
        with torch.no_grad():
            present.fill_(value) if not isinstance(value, torch.Tensor) else present.copy_(value)
    elif isinstance(value, torch.Tensor) and (group.get("capturable") or group.get("fused")) and group["params"]:
        group[key] = value.to(group["params"][0].device)
    else:
        group[key] = value
