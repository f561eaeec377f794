"""The seam inside the state floor: what is learned about one tensor, module or optimizer, before the collector names
and joins it.

Invariants: nothing here imports a framework. Nothing that implements this seam calls a collective, waits for a device,
steps an optimizer, copies tensor data or changes what it looks at, except where a docstring says so.

Who implements what, with these exact signatures:

`safehold.state.torch_tensors`
    `tensor_pieces(tensor: Any, *, name: str) -> TensorBinding`
        For dense tensors and parameters, DTensor, FSDP1 flat parameters where they are met alone. `name` is only for
        errors: what cannot be saved (quantized, sparse, nested, meta, `Partial` placements, ShardedTensor) raises
        `UnsupportedStateError` that names it and the type.
    `dtype_name(dtype: torch.dtype) -> str` and `dtype_from_name(name: str) -> torch.dtype`
        Between torch's dtypes and the names of `safehold.types.TensorSpec`; the latter raises `ValueError` for an
        unknown name.

`safehold.state.modules`
    `class ParamNames` with `__init__(self)`
        Identity of a parameter (or FSDP1 flat parameter) -> full FQN components and pieces. Filled by `module_leaves`,
        read by the optimizer functions. The first registration of a parameter wins (a tied parameter keeps the name
        first met).
    `module_leaves(module: Any, *, prefix: Path, names: ParamNames) -> Subtree`
        `prefix` is the module's own FQN; paths in the result are relative to it. Registers the parameters in `names`
        under their full FQN, `prefix` included.

`safehold.state.optimizers`
    `optimizer_leaves(optimizer: Any, *, prefix: Path, names: ParamNames) -> Subtree`
        Called after all modules of the state are in `names`. Paths are relative to `prefix`: `("state", *full FQN of
        the parameter, "exp_avg")`; `("groups",)` with policy `groups` is one object.
    `bind_optimizer_for_restore(optimizer: Any, *, prefix: Path, names: ParamNames, saved_tensors: Mapping[Path,
    TensorSpec], saved_objects: Mapping[Path, ObjectSpec]) -> OptimizerRestore`
        The `saved_` mappings hold what the checkpoint has below this optimizer, after renaming, by path relative to
        `prefix`; leaves of parameters that live on other ranks are among them.

`safehold.state.param_groups`
    `merge(values: Sequence[Any]) -> Any`
        Joins the `groups` objects of several ranks or `Parts` into one; the same parameter with different values raises
        `StateMismatchError` that names the parameter. What `write` of a `groups` object is given may hold parameters
        that are not there.
    `rename(value: Any, new_name: Callable[[str], str]) -> Any`
        Renames the parameters in a `groups` object.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from safehold.types import UNDECLARED, Holders, Kind, RankPolicy, Rect

if TYPE_CHECKING:
    from safehold.format.names import Component

Path: TypeAlias = "tuple[Component, ...]"
"""Typed components, as `safehold.format.names.join` takes them; what a module or optimizer gives is made of `str` and
`int`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBinding:
    """One tensor or array bound to this rank's memory, without a name.

    Attributes:
        shape: Global shape.
        dtype: Dtype name as in `TensorSpec`.
        kind: Framework.
        pieces: Disjoint (rectangle, view of exactly that rectangle), in a stable order; views are detached (writing
            through one changes the live tensor and never the graph) and keep the storage alive. No piece is empty,
            unless the whole tensor is: a global shape without elements has the one piece `Rect.whole(shape)`. Empty
            tuple where this rank holds nothing.
        holders: Who else holds the same.
        memory: Identity of the memory: (device type ordinal, device index, storage address, storage offset in elements,
            dtype ordinal, *local shape, *strides) or any other tuple of ints with the same power: equal for two
            bindings if and only if they are tied. Where this rank holds no element: `(-1, id(tensor))`, so that one
            parameter under two names is tied on every rank.
        live: The plain local tensor or array behind the pieces (of a DTensor its local tensor; of a flat parameter the
            flat one); the binding is stale once its address, shape or strides change. None if there is none to look at.
        guard: Further check that the binding still leads to `live` (`lambda: dtensor._local_tensor is local`); under a
            microsecond. None if the identity of the tensor in its container is enough.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[Rect, Any], ...]
    holders: Holders = UNDECLARED
    memory: tuple[int, ...] = ()
    kind: Kind = "torch"
    live: Any = None
    guard: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A dict or list whose members must stay the very same objects for a cached binding to hold.

    Attributes:
        container: The live container (`module._parameters`, `optimizer.state[p]`, `group["params"]`, ...).
        keys: Its keys as they were; None for a list.
        values: Its values as they were.
    """

    container: Any
    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]

    @classmethod
    def of(cls, container: Mapping[Any, Any] | Sequence[Any]) -> Watch:
        """Watch `container` as it is now."""
        if isinstance(container, Mapping):
            return cls(container=container, keys=tuple(container), values=tuple(container.values()))
        return cls(container=container, keys=None, values=tuple(container))

    def holds(self) -> bool:
        """Return True if no member was added, removed, moved or replaced."""
        now = self.container
        if len(now) != len(self.values):
            return False
        if self.keys is None:
            return all(map(operator.is_, now, self.values))
        return all(map(operator.is_, now.values(), self.values)) and all(map(operator.is_, now, self.keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor below a module or optimizer.

    Attributes:
        path: Relative to the module or optimizer.
        binding: Its memory; holders are final (owner 0 for buffers that DDP broadcasts).
        role: `param`, `buffer`, or `state` of an optimizer.
        param: For `param`: the object that an optimizer's groups would hold (the parameter, or the flat parameter that
            it is a part of).
    """

    path: Path
    binding: TensorBinding
    role: Literal["param", "buffer", "state"]
    param: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObject:
    """Something below a module or optimizer that is no tensor (extra state, parameter groups, a step that is a Python
    number).

    Attributes:
        path: Relative to the module or optimizer.
        read: Gives the value as of now; may hold framework values (dtypes, small tensors), the collector converts them.
            Called at every save, in the trainer's thread.
        write: Takes the restored value (framework values again), after all tensors are in place.
        policy: What happens on another world size.
        optional: If it is missing in the checkpoint, nothing is said.
        check: Says what does not fit between the restored value and the template, before anything is overwritten.
        other_class: Says so of the class that the value was saved from, which a user may let pass.
    """

    path: Path
    read: Callable[[], Any]
    write: Callable[[Any], None]
    policy: RankPolicy = "same"
    optional: bool = False
    check: Callable[[Any], list[str]] | None = None
    other_class: Callable[[Any], list[str]] | None = None


@dataclass(slots=True, kw_only=True)
class Subtree:
    """Everything below one module or optimizer.

    Attributes:
        tensors: In any order; tied ones each under their own path.
        objects: In any order.
        watches: Containers whose change makes this stale: every dict that was walked to find the tensors.
        params: `id` of every parameter that this optimizer steps; empty for modules.
        notes: Things that the user should know, once (parameters that were named by group and position, ...).
    """

    tensors: list[NamedTensor] = field(default_factory=list)
    objects: list[NamedObject] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    params: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class OptimizerRestore:
    """What a restore fills in one optimizer; nothing in the optimizer has changed yet.

    Attributes:
        tensors: Paths are keys of `saved_tensors`; memory is the existing state where it has the saved dtype and shape,
            else created with the placement of its parameter and not attached yet.
        objects: Paths are keys of `saved_objects`, or they are missing in the checkpoint and not optional.
        missing: Paths that this optimizer needs and the checkpoint does not have (state of a parameter is never
            missing: absent stays absent).
        foreign: Keys of the `saved_` mappings that belong to parameters this optimizer does not have; reported as
            unexpected.
        mismatched: Sentences about shapes that differ.
        attach: Makes `optimizer.state` hold exactly what was saved; called once, after all tensors are filled and
            before any `write`.
        notes: Things that the user should know.
    """

    tensors: list[NamedTensor] = field(default_factory=list)
    objects: list[NamedObject] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    attach: Callable[[], None] = lambda: None
    notes: list[str] = field(default_factory=list)
