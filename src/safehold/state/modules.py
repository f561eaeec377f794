"""Modules to named tensors and objects, and parameters back to their names.

A name is the path of attributes from the module that was saved to the tensor, without the attributes of wrappers
(`module` of DDP, `_orig_mod` of a compiled module, ...). What is a wrapper is decided by its type and never by text, so
that a user's own child called `module` keeps its name.

Invariants: the module is read as `state_dict` reads it (parameters, persistent buffers, extra state; shared ones under
each of their names), but `state_dict` is never called: no hook runs, nothing is gathered, cast or copied, and FSDP2
modules that are unsharded at the moment stay so. Nothing here changes a module, except `after_restore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from safehold.format.names import join
from safehold.state import torch_tensors
from safehold.state.protocols import NamedObject, NamedTensor, Path, Subtree, TensorBinding, Watch
from safehold.state.torch_tensors import is_a, loaded, refuse
from safehold.types import Holders

_LAZY_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
_OVERRIDES = ("state_dict", "load_state_dict", "_save_to_state_dict")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPart:
    """An original parameter behind what an optimizer holds.

    Attributes:
        fqn: Its full FQN.
        binding: Its memory on this rank.
        slice: Its `FlatSlice` where FSDP1 keeps it in a flat parameter.
        others: Further FQNs of the same parameter (tied); a checkpoint of a model that ties them in another order has
            its state under one of these.
    """

    fqn: Path
    binding: TensorBinding
    slice: Any = None
    others: list[Path] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class KnownParam:
    """A parameter (or FSDP1 flat parameter) that a saved module holds."""

    param: Any
    parts: list[KnownPart] = field(default_factory=list)


class ParamNames:
    """Identity of a parameter (or FSDP1 flat parameter) -> the original parameters that it is.

    One object serves one walk over the whole state; it keeps the parameters alive, so identities stay theirs.
    """

    def __init__(self) -> None:
        self._known: dict[int, KnownParam] = {}

    def register(self, param: Any, part: KnownPart) -> None:
        """Give `param` a name; of an ordinary parameter the first one stays, a flat parameter has one per part."""
        known = self._known.setdefault(id(param), KnownParam(param=param))
        for present in known.parts:
            if part.slice is None or present.slice is None or present.slice.index == part.slice.index:
                present.others.append(part.fqn)
                return
        known.parts.append(part)

    def find(self, param: Any) -> KnownParam | None:
        """Return what is known of `param`, None if no saved module holds it."""
        return self._known.get(id(param))


def module_leaves(module: Any, *, prefix: Path, names: ParamNames) -> Subtree:
    """Return the tensors and objects of one module.

    Args:
        module: A `torch.nn.Module`, wrapped in any way.
        prefix: Its own FQN; paths in the result are relative to it.
        names: Gets its parameters under their full FQN.

    Raises:
        UnsupportedStateError: A tensor is of a kind that cannot be saved; names it and the kind.
    """
    walk = _Walk(prefix=prefix, names=names)
    walk.visit(module, (), ())
    return walk.found


def after_restore(module: Any) -> None:
    """Drop copies of parameters that a restore has made stale: what FSDP keeps unsharded between steps.

    Frees device memory at most; no communication. The next forward pass gathers the restored shards.
    """
    fsdp2 = loaded("torch.distributed.fsdp", "FSDPModule")
    for child in module.modules():
        if fsdp2 is not None and isinstance(child, fsdp2):
            child.reshard()
        elif is_a(child, "torch.distributed.fsdp", "FullyShardedDataParallel") and child._handle is not None:
            handle = child._handle
            gathered = handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded")
            if gathered and not handle.needs_unshard():
                handle.reshard(True)
                handle.post_reshard()


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One pass over a module tree; paths are relative to the root."""

    prefix: Path
    names: ParamNames
    found: Subtree = field(default_factory=Subtree)
    flat: dict[int, dict[str, Any]] = field(default_factory=dict)
    sharded: dict[tuple[int, str], Any] = field(default_factory=dict)
    broadcast: dict[int, Holders] = field(default_factory=dict)

    def visit(self, module: Module, path: Path, above: tuple[int, ...]) -> None:
        """Read `module` at `path`; `above` are the identities of the modules around it."""
        if id(module) in above:
            refuse(self._name(path), "the module contains itself")
        self._learn(module, path)
        self._note_overrides(module, path)
        self._parameters(module, path)
        self._buffers(module, path)
        self._extra_state(module, path)
        wrapped = wrapped_attribute(module)
        self._watch(module._modules)
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, path if name == wrapped else (*path, name), (*above, id(module)))

    def _learn(self, module: Module, path: Path) -> None:
        """Remember what a wrapper knows about the modules below it."""
        if isinstance(module, DistributedDataParallel):
            self.broadcast.update(_broadcast_buffers(module))
        elif is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            from safehold.state import fsdp1

            for entry in fsdp1.entries(module, self._name(path)):
                for owner, name in ((entry.module, entry.param_name), *entry.shared):
                    self.flat.setdefault(id(owner), {})[name] = entry
        elif is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            self.sharded.update(_sharded_parameters(module))

    def _parameters(self, module: Module, path: Path) -> None:
        self._watch(module._parameters)
        flat = self.flat.get(id(module), {})
        for name, param in module._parameters.items():
            if param is None or torch_tensors.is_flat_parameter(param) or name in flat:
                continue
            held = self.sharded.get((id(module), name), param)
            full = (*path, name)
            binding = torch_tensors.tensor_pieces(held, name=self._name(full))
            self._add_parameter(full, held, KnownPart(fqn=(*self.prefix, *full), binding=binding))
        for name, entry in flat.items():
            full = (*path, name)
            binding = entry.binding(self._name(full))
            part = KnownPart(fqn=(*self.prefix, *full), binding=binding, slice=entry.slice)
            self._add_parameter(full, entry.param, part)

    def _add_parameter(self, path: Path, param: Any, part: KnownPart) -> None:
        self.names.register(param, part)
        self.found.tensors.append(NamedTensor(path=path, binding=part.binding, role="param", param=param))

    def _buffers(self, module: Module, path: Path) -> None:
        self._watch(module._buffers)
        transient = getattr(module, "_non_persistent_buffers_set", ())
        for name, buffer in module._buffers.items():
            if buffer is None or name in transient:
                continue
            binding = torch_tensors.tensor_pieces(buffer, name=self._name((*path, name)))
            holders = self.broadcast.get(id(buffer))
            if holders is not None and binding.holders.ranks is None:
                binding = replace(binding, holders=holders)
            self.found.tensors.append(NamedTensor(path=(*path, name), binding=binding, role="buffer"))

    def _extra_state(self, module: Module, path: Path) -> None:
        if type(module).get_extra_state is Module.get_extra_state:
            return
        self.found.objects.append(
            NamedObject(
                path=(*path, _EXTRA_STATE),
                read=module.get_extra_state,
                write=module.set_extra_state,
                optional=True,
            )
        )

    def _note_overrides(self, module: Module, path: Path) -> None:
        cls = type(module)
        foreign = [name for name in _OVERRIDES if not _is_torchs(getattr(cls, name))]
        if cls.__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
            foreign.append("_save_to_state_dict")
        foreign += sorted({hook for hook, function in _hooks(module) if not _is_torchs(function)})
        if foreign:
            self.found.notes.append(
                f"{self._name(path)}: {cls.__qualname__} has its own {', '.join(foreign)}; what is saved and restored "
                "is what it registers (parameters, persistent buffers, extra state), its own code is not called"
            )

    def _watch(self, container: Any) -> None:
        if isinstance(container, Mapping):
            self.found.watches.append(Watch.of(container))

    def _name(self, path: Path) -> str:
        full = (*self.prefix, *path)
        return join(full) if full else "the module"


def wrapped_attribute(module: Any) -> str | None:
    """Return the attribute that is left out of names because `module` only wraps it; None if `module` is no wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    for source, name, attribute in _LAZY_WRAPPERS:
        if is_a(module, source, name):
            return attribute
    return None


def _broadcast_buffers(module: DistributedDataParallel) -> dict[int, Holders]:
    """Return the buffers whose value DDP takes from the lowest rank of its group before every forward pass."""
    if not getattr(module, "broadcast_buffers", True):
        return {}
    ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
    holders = Holders(ranks=ranks, owner=ranks[0])
    ignored = getattr(module, "parameters_to_ignore", ())
    return {id(buffer): holders for name, buffer in module.module.named_buffers() if name not in ignored}


def _sharded_parameters(module: Any) -> dict[tuple[int, str], Any]:
    """Return FSDP2's sharded parameters by the place where they are registered, or will be again once resharded."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    found: dict[tuple[int, str], Any] = {}
    for group in groups:
        for param in group.fsdp_params:
            place = param._module_info
            found[id(place.module), place.param_name] = param.sharded_param
            for owner, name in zip(place.shared_modules, place.shared_param_names, strict=True):
                found[id(owner), name] = param.sharded_param
    return found


def _hooks(module: Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _HOOKS:
        for hook in getattr(module, name, {}).values():
            yield name.strip("_"), hook


def _is_torchs(function: Any) -> bool:
    """Return True for a function (or hook) that is defined in torch itself."""
    function = getattr(function, "hook", function)
    while hasattr(function, "func"):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return home == "torch" or home.startswith("torch.")


__all__ = ["KnownParam", "KnownPart", "ParamNames", "after_restore", "module_leaves", "wrapped_attribute"]
