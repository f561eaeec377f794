"""Optimizers to named tensors and objects: state per parameter FQN, parameter groups as one object.

Invariants: `optimizer.state` and `optimizer.param_groups` are read as they are; neither `state_dict` nor `step` is ever
called, and a state that does not exist is not created. What one parameter's state looks like decides alone how it is
named and who holds it, so that every rank comes to the same answer without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch.optim import Optimizer

from safehold.format.names import counted, join
from safehold.state.modules import ParamNames
from safehold.state.optimizer_restore import bind_optimizer_for_restore
from safehold.state.optimizer_state import (
    STATE,
    Member,
    counter_keys,
    entry_access,
    flatten,
    groups_object,
    iter_members,
    state_bindings,
)
from safehold.state.protocols import NamedObject, NamedTensor, Path, Subtree, Watch
from safehold.state.torch_tensors import is_a, refuse

__all__ = ["bind_optimizer_for_restore", "optimizer_leaves", "overrides_state_dict"]


def optimizer_leaves(optimizer: Any, *, prefix: Path, names: ParamNames) -> Subtree:
    """Return the tensors and objects of one optimizer.

    Args:
        optimizer: A `torch.optim.Optimizer` (see `overrides_state_dict` for those that keep more than `state`).
        prefix: Its own FQN; paths in the result are relative to it.
        names: The parameters of all saved modules.

    Raises:
        UnsupportedStateError: Something in its state is of a kind that cannot be saved; names it and the kind.
    """
    _refuse_partitioned(optimizer, prefix)
    members = list(iter_members(optimizer, prefix=prefix, names=names))
    counters = counter_keys(optimizer, members)
    found = Subtree(params=frozenset(id(member.param) for member in members), notes=notes(optimizer, prefix, members))
    _watch(found, optimizer, members)
    for member in members:
        state = optimizer.state.get(member.param)
        if state is None:
            continue
        for rest, value in flatten(state, join((*prefix, STATE, *member.parts[0].fqn))):
            _add_state(found, optimizer, member, rest, value, prefix=prefix, counters=counters)
    found.objects.append(groups_object(optimizer, members))
    return found


def overrides_state_dict(optimizer: Any) -> bool:
    """Return True if the class has its own `state_dict`: `state` and `param_groups` may not be all that it keeps."""
    return type(optimizer).state_dict is not Optimizer.state_dict


def notes(optimizer: Any, prefix: Path, members: list[Member]) -> list[str]:
    """Return what the user should know about how this optimizer is saved."""
    said = []
    name = join(prefix) if prefix else "the optimizer"
    unnamed = [member for member in members if not member.named]
    if unnamed:
        said.append(
            f"{name}: {counted(len(unnamed), 'parameter')} without a saved module; state of such is named by group and "
            "position"
        )
    cls = type(optimizer)
    if overrides_state_dict(optimizer):
        said.append(
            f"{name}: {cls.__qualname__} has its own state_dict, which is not called; state and groups are saved"
        )
    elif cls.load_state_dict is not Optimizer.load_state_dict:
        said.append(
            f"{name}: {cls.__qualname__} has its own load_state_dict, which is not called; state is put in place"
        )
    return said


def _add_state(
    found: Subtree, optimizer: Any, member: Member, rest: Path, value: Any, *, prefix: Path, counters: frozenset[str]
) -> None:
    paths = [(STATE, *part.fqn, *rest) for part in member.parts]
    if isinstance(value, torch.Tensor):
        counter = rest[0] in counters or rest == ("step",)
        bindings = state_bindings(member, value, join((*prefix, *paths[0])), counter=counter)
        for path, binding in zip(paths, bindings, strict=True):
            found.tensors.append(NamedTensor(path=path, binding=binding, role="state"))
        return
    read, write = entry_access(optimizer, member.param, rest)
    found.objects.extend(NamedObject(path=path, read=read, write=write) for path in paths)


def _refuse_partitioned(optimizer: Any, prefix: Path) -> None:
    name = join(prefix) if prefix else "the optimizer"
    for source, cls in (("torch.distributed.optim", "ZeroRedundancyOptimizer"), ("fairscale.optim", "OSS")):
        if is_a(optimizer, source, cls):
            refuse(name, f"{cls} hides the shards of its state", "use FSDP, or declare them with safehold.Sharded")
    if is_a(optimizer, "torch.distributed.optim", "PostLocalSGDOptimizer"):
        refuse(
            name,
            "PostLocalSGDOptimizer lets parameters differ between ranks and keeps a step of its own",
            "save its inner optimizer after averaging, and the averager's step as a value",
        )


class _Containers(Mapping[Any, Any]):
    """The tensors and containers of a state dict; numbers in it change at every step and are read anew anyway."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state

    def _kept(self) -> dict[Any, Any]:
        return {
            key: item for key, item in self._state.items() if isinstance(item, (torch.Tensor, Mapping, list, tuple))
        }

    def __getitem__(self, key: Any) -> Any:
        return self._kept()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept())

    def __len__(self) -> int:
        return len(self._kept())

    def values(self) -> ValuesView[Any]:
        """Return the tensors and containers."""
        return self._kept().values()


def _watch(found: Subtree, optimizer: Any, members: list[Member]) -> None:
    """Watch everything that was walked: the groups, the state and all containers inside it."""
    found.watches += [Watch.of(optimizer.param_groups), Watch.of(optimizer.state)]
    found.watches += [Watch.of(group["params"]) for group in optimizer.param_groups]
    todo = [optimizer.state[member.param] for member in members if member.param in optimizer.state]
    while todo:
        container = todo.pop()
        items = list(container.values() if isinstance(container, Mapping) else container)
        plain = isinstance(container, Mapping) and not all(isinstance(item, torch.Tensor) for item in items)
        if type(container) is not tuple:
            found.watches.append(Watch.of(_Containers(container) if plain else container))
        todo += [item for item in items if isinstance(item, Mapping) or type(item) in (list, tuple)]
