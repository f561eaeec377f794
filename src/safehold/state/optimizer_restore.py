"""Optimizer state from a checkpoint: existing tensors where they fit, else new ones that are attached at the end.

Invariants: until `attach` nothing in the optimizer changes, so that a restore can still be refused. What the checkpoint
has decides what the state is: a state that it does not have is absent afterwards. Dtypes are those that were saved,
whatever the parameter's is. No step is run to make state.

New tensors are placed as the optimizer itself would: one with the parameter's shape like the parameter (DTensor, FSDP1
range, device, memory format); a counter on the CPU, unless the group is `capturable` or `fused`; others on the
parameter's device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from safehold.format.names import ListIndex, TupleIndex, join
from safehold.state import torch_tensors
from safehold.state.modules import KnownPart, ParamNames
from safehold.state.optimizer_state import (
    GROUPS,
    STATE,
    Member,
    counter_keys,
    entry_access,
    groups_object,
    iter_members,
    key_of,
    local_numel,
    state_bindings,
)
from safehold.state.protocols import NamedObject, NamedTensor, OptimizerRestore, Path, TensorBinding
from safehold.types import ObjectSpec, TensorSpec

_HOST_COUNTERS = frozenset({"step", "mu_product"})
_ALWAYS_ON_DEVICE = ("ASGD",)
_OBJECT = object()


@dataclass(slots=True, kw_only=True)
class _Saved:
    """What the checkpoint has for one original parameter: path inside its state -> spec."""

    tensors: dict[Path, TensorSpec] = field(default_factory=dict)
    objects: dict[Path, ObjectSpec] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Plan:
    """The state of one member after the restore: path inside it -> tensor or `_OBJECT`."""

    member: Member
    entries: dict[Path, Any] = field(default_factory=dict)


def bind_optimizer_for_restore(
    optimizer: Any,
    *,
    prefix: Path,
    names: ParamNames,
    saved_tensors: Mapping[Path, TensorSpec],
    saved_objects: Mapping[Path, ObjectSpec],
) -> OptimizerRestore:
    """Decide what a restore fills in one optimizer; see `OptimizerRestore`.

    Args:
        optimizer: The optimizer.
        prefix: Its own FQN; only for messages.
        names: The parameters of all modules of the template.
        saved_tensors: Tensors that the checkpoint has below it, by path relative to it, after renaming.
        saved_objects: Objects likewise.
    """
    binder = _Binder(optimizer=optimizer, prefix=prefix, names=names)
    binder.sort(saved_tensors, saved_objects)
    if not saved_tensors and not saved_objects:
        binder.found.missing.append(GROUPS)
        return binder.found
    for member in binder.members:
        binder.bind(member)
    binder.bind_groups(saved_objects)
    binder.found.attach = binder.attach
    return binder.found


@dataclass(slots=True, kw_only=True)
class _Binder:
    """One pass over the parameters of an optimizer."""

    optimizer: Any
    prefix: Path
    names: ParamNames
    found: OptimizerRestore = field(default_factory=OptimizerRestore)
    members: list[Member] = field(default_factory=list)
    counters: frozenset[str] = frozenset()
    saved: dict[Path, _Saved] = field(default_factory=dict)
    plans: list[_Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = list(iter_members(self.optimizer, prefix=self.prefix, names=self.names))
        self.counters = counter_keys(self.optimizer, self.members)
        parts = [part for member in self.members for part in member.parts]
        self.saved = {fqn: _Saved() for part in parts for fqn in (part.fqn, *part.others)}

    def sort(self, tensors: Mapping[Path, TensorSpec], objects: Mapping[Path, ObjectSpec]) -> None:
        """Sort what the checkpoint has by parameter; what belongs to none of ours is foreign."""
        for path, spec in tensors.items():
            fqn = self._owner(path)
            if fqn is None:
                self.found.foreign.append(path)
            else:
                self.saved[fqn].tensors[path[1 + len(fqn) :]] = spec
        for path, kept in objects.items():
            fqn = self._owner(path)
            if fqn is not None:
                self.saved[fqn].objects[path[1 + len(fqn) :]] = kept
            elif path != GROUPS:
                self.found.foreign.append(path)
        self.members = [
            replace(member, parts=tuple(self._under_saved_name(part) for part in member.parts))
            for member in self.members
        ]

    def _under_saved_name(self, part: KnownPart) -> KnownPart:
        """Return the part under that of its names under which its state was saved; what others have is foreign."""
        names = [fqn for fqn in (part.fqn, *part.others) if self.saved[fqn].tensors or self.saved[fqn].objects]
        for fqn in names[1:]:
            leaves = (*self.saved[fqn].tensors, *self.saved[fqn].objects)
            self.found.foreign += [(STATE, *fqn, *rest) for rest in leaves]
        return replace(part, fqn=names[0]) if names else part

    def _owner(self, path: Path) -> Path | None:
        if not path or path[0] != STATE:
            return None
        return next((path[1:end] for end in range(len(path) - 1, 1, -1) if path[1:end] in self.saved), None)

    def bind_groups(self, objects: Mapping[Path, ObjectSpec]) -> None:
        """Bind the parameter groups."""
        if GROUPS in objects:
            self.found.objects.append(groups_object(self.optimizer, self.members))
        else:
            self.found.missing.append(GROUPS)

    def bind(self, member: Member) -> None:
        """Bind the state of one parameter."""
        plan = _Plan(member=member)
        self.plans.append(plan)
        if member.parts[0].slice is not None and local_numel(member.param) == 0:
            return  # FSDP1 gives a rank without elements no gradient, hence no state.
        if len(member.parts) > 1:
            self._bind_joined(plan)
            return
        part = member.parts[0]
        for rest, spec in self.saved[part.fqn].tensors.items():
            tensor, binding = self._existing(plan, rest, spec) or self._created(member, part, rest, spec)
            plan.entries[rest] = tensor
            self.found.tensors.append(NamedTensor(path=(STATE, *part.fqn, *rest), binding=binding, role="state"))
        self._bind_objects(plan, part)

    def _bind_objects(self, plan: _Plan, part: KnownPart) -> None:
        for rest in self.saved[part.fqn].objects:
            plan.entries[rest] = _OBJECT
            read, write = entry_access(self.optimizer, plan.member.param, rest)
            self.found.objects.append(NamedObject(path=(STATE, *part.fqn, *rest), read=read, write=write))

    def _existing(self, plan: _Plan, rest: Path, spec: TensorSpec) -> tuple[torch.Tensor, TensorBinding] | None:
        """Return the tensor that is there already, if it has the saved dtype and shape and can be filled."""
        value: Any = self.optimizer.state.get(plan.member.param)
        for key in rest:
            try:
                value = value[key_of(key)]
            except (KeyError, IndexError, TypeError):
                return None
        if not isinstance(value, torch.Tensor) or value.dtype != torch_tensors.dtype_from_name(spec.dtype):
            return None
        counter = rest[0] in self.counters or rest == ("step",)
        binding = state_bindings(plan.member, value, spec.name, counter=counter)[0]
        if binding.shape != spec.shape:
            self._mismatched(plan.member.parts[0], rest, spec, binding.shape)
        elif torch_tensors.overlaps_itself(binding.live):
            return None
        return value, binding

    def _mismatched(self, part: KnownPart, rest: Path, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        name = join((*self.prefix, STATE, *part.fqn, *rest))
        self.found.mismatched.append(f"{name} has shape {shape} here and {spec.shape} in the checkpoint")

    def _created(
        self, member: Member, part: KnownPart, rest: Path, spec: TensorSpec
    ) -> tuple[torch.Tensor, TensorBinding]:
        dtype = torch_tensors.dtype_from_name(spec.dtype)
        counter = math.prod(spec.shape) == 1 and (rest[-1] in _HOST_COUNTERS or spec.shape != part.binding.shape)
        tensor: torch.Tensor
        if not counter and spec.shape == part.binding.shape:
            tensor = _like_parameter(member.param, part, dtype)
        else:
            if part.slice is not None and not counter:
                self._mismatched(part, rest, spec, part.binding.shape)
            device = self._device(member, rest) if counter else member.param.device
            tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        name = join((*self.prefix, STATE, *part.fqn, *rest))
        if part.slice is not None and tensor.shape == spec.shape and not counter:
            return tensor, torch_tensors.whole_binding(tensor, owner=tensor)
        return tensor, state_bindings(member, tensor, name, counter=counter)[0]

    def _device(self, member: Member, rest: Path) -> torch.device:
        """Return where the optimizer expects a counter."""
        on_device = member.group.get("capturable") or member.group.get("fused")
        always = type(self.optimizer).__name__ in _ALWAYS_ON_DEVICE or rest[-1] not in _HOST_COUNTERS
        device: torch.device = member.param.device if on_device or always else torch.device("cpu")
        return device

    def _bind_joined(self, plan: _Plan) -> None:
        """Bind the state of an FSDP1 flat parameter: one tensor for all original parameters that it joins."""
        member = plan.member
        for part in member.parts:
            self._bind_objects(plan, part)
        rests = dict.fromkeys(rest for part in member.parts for rest in self.saved[part.fqn].tensors)
        for rest in rests:
            specs = {part.fqn: self.saved[part.fqn].tensors.get(rest) for part in member.parts}
            self._bind_joined_entry(plan, rest, specs)

    def _bind_joined_entry(self, plan: _Plan, rest: Path, specs: Mapping[Path, TensorSpec | None]) -> None:
        from safehold.state import fsdp1

        member = plan.member
        present = [spec for spec in specs.values() if spec is not None]
        dtype = torch_tensors.dtype_from_name(present[0].dtype)
        counter = rest[-1] in _HOST_COUNTERS or all(
            math.prod(spec.shape) == 1 and spec.shape != part.binding.shape
            for part in member.parts
            if (spec := specs[part.fqn]) is not None
        )
        existing = self._existing_joined(member, rest, dtype, present[0].shape if counter else None)
        if existing is not None and (counter or len(present) == len(specs)):
            tensor = existing
        elif counter:
            tensor = torch.empty(present[0].shape, dtype=dtype, device=self._device(member, rest))
        else:
            shard = fsdp1.local_shard(member.param)
            tensor = torch.zeros(shard.numel(), dtype=dtype, device=shard.device)
        plan.entries[rest] = tensor
        bindings = state_bindings(member, tensor, join((*self.prefix, STATE)), counter=counter)
        for part, binding in zip(member.parts, bindings, strict=True):
            path = (STATE, *part.fqn, *rest)
            spec = specs[part.fqn]
            if counter and self.found.tensors and self.found.tensors[-1].binding.live is tensor:
                continue  # One counter for all parts: the first one's value fills it.
            if spec is None:
                if not counter:
                    self.found.notes.append(
                        f"{join((*self.prefix, *path))} was not saved; FSDP keeps it, so it becomes 0"
                    )
            elif spec.dtype != present[0].dtype:
                name = join((*self.prefix, *path))
                self.found.mismatched.append(f"{name} is {spec.dtype}, others in its flat parameter {present[0].dtype}")
            elif spec.shape != binding.shape:
                self._mismatched(part, rest, spec, binding.shape)
            else:
                self.found.tensors.append(NamedTensor(path=path, binding=binding, role="state"))

    def _existing_joined(
        self, member: Member, rest: Path, dtype: torch.dtype, shape: tuple[int, ...] | None
    ) -> torch.Tensor | None:
        from safehold.state import fsdp1

        value: Any = self.optimizer.state.get(member.param, {}).get(rest[0]) if len(rest) == 1 else None
        expected = tuple(fsdp1.local_shard(member.param).shape) if shape is None else shape
        if isinstance(value, torch.Tensor) and value.dtype == dtype and tuple(value.shape) == expected:
            return value
        return None

    def attach(self) -> None:
        """Make `optimizer.state` hold exactly what was saved; see `OptimizerRestore.attach`."""
        for plan in self.plans:
            param = plan.member.param
            if not plan.entries:
                self.optimizer.state.pop(param, None)
                continue
            rebuilt = _rebuild(plan.entries)
            state = self.optimizer.state.get(param)
            if isinstance(state, dict):
                state.clear()
                state.update(rebuilt)
            else:
                self.optimizer.state[param] = rebuilt


def _like_parameter(param: Any, part: KnownPart, dtype: torch.dtype) -> Any:
    """Return a new tensor with the placement of `param`; its values are arbitrary."""
    if part.slice is not None and not part.slice.whole:
        return torch.empty(part.slice.numel, dtype=dtype, device=param.device)
    return torch.empty_like(param.detach(), dtype=dtype, memory_format=torch.preserve_format)


def _rebuild(entries: Mapping[Path, Any]) -> Any:
    """Return the nested dicts, lists and tuples that have these entries; objects are None until they are written."""
    grouped: dict[Any, dict[Path, Any]] = {}
    for path, value in entries.items():
        grouped.setdefault(path[0], {})[path[1:]] = value
    members = {
        key: (None if inner[()] is _OBJECT else inner[()]) if () in inner else _rebuild(inner)
        for key, inner in grouped.items()
    }
    first = next(iter(members))
    if isinstance(first, (ListIndex, TupleIndex)):
        ordered = [members[key] for key in sorted(members, key=lambda key: key.index)]
        return ordered if isinstance(first, ListIndex) else tuple(ordered)
    return members
