"""A user's state to named leaves bound to live memory: what `save` starts with.

How leaves are named: the FQN is `safehold.format.names.join` of the path from the top-level dict; modules and
optimizers add their own components (`model.layers.0.weight`, `optimizer.state.model.layers.0.weight.exp_avg`). What
becomes an object leaf: see
`safehold.state.tree`. Values of `PerRank` are objects, tensors inside included. Random states are objects under a root
of their own.

Tied tensors (equal memory keys, dtype, shape and rectangles) are one leaf; its name is the first of theirs in sorted
order, the others are aliases. Tensors that `state_dict()` of some object gave are tied to the rest of the state, never
the other way round. The classes of objects with `state_dict` are objects under the root of the random states, too.

Invariants: nothing here calls a collective, steps an optimizer, changes the state, or waits for a device, except for
device tensors inside `PerRank`, extra state, and sets. Objects are read now, in the caller's thread.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from safehold.errors import ConfigurationError, StateMismatchError
from safehold.state import param_groups
from safehold.state.cache import BindingCache, ObjectSource, Static, StaticNode
from safehold.state.class_names import classes_in
from safehold.state.declare import Sharded
from safehold.state.leaves import Leaves, ObjectLeaf, TensorLeaf
from safehold.state.protocols import NamedObject, Path, Subtree, TensorBinding, Watch
from safehold.state.random_states import read_random_states
from safehold.state.statefuls import is_stateful, state_dict_of
from safehold.state.tensor_likes import bind_tensor
from safehold.state.tree import PerRankNode, Tree, fqn, walk
from safehold.state.values import to_plain
from safehold.types import ObjectSpec, TensorSpec

__all__ = ["BindingCache", "collect"]


def preload() -> None:
    """Import what a state of a framework that is loaded will need, so that the first walk does not have to."""
    if "torch" in sys.modules:
        importlib.import_module("safehold.state.optimizers")
        importlib.import_module("safehold.state.dtensors")


def collect(
    state: Any, *, rank: int, world_size: int, random_states: bool = True, cache: BindingCache | None = None
) -> Leaves:
    """Return all leaves of `state` on this rank.

    Args:
        state: The dict that the user saves.
        rank: This rank.
        world_size: Number of ranks.
        random_states: Whether the process's random states are part of it.
        cache: Bindings of the previous call for the same state; makes a repeated call cheap. The leaves returned are
            then shared with later results and must not be changed.

    Raises:
        UnsupportedStateError: A leaf has a type that cannot be saved; names it and the type.
        ConfigurationError: The state is no dict, uses the reserved key, or two leaves have one name.
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is none of {world_size} ranks")
    tree = walk(state)
    nodes = _static_nodes(tree)
    static = None if cache is None else cache.lookup(nodes)
    if static is None:
        builder = _StaticBuilder(rank)
        static = builder.build(tree)
        if cache is not None:
            cache.store(nodes, builder.watches, builder.bindings, builder.guards, static)
    leaves = Leaves(
        tensors=list(static.leaves),
        aliases=dict(static.aliases),
        optimizers=list(static.optimizers),
        notes=list(static.notes),
    )
    names = set(static.names)
    _add_fresh_tensors(leaves, names, tree, static, rank)
    leaves.objects = _objects(tree, static, random_states)
    for leaf in leaves.objects:
        _take_name(names, leaf.spec.name)
    return leaves


def tie_key(binding: TensorBinding) -> Any:
    """Return what is equal for two bindings if and only if they are tied; None if the memory is unknown."""
    if not binding.memory:
        return None
    return binding.memory, binding.kind, binding.dtype, binding.shape, tuple([rect for rect, _ in binding.pieces])


def per_rank_value(node: PerRankNode) -> Any:
    """Return the value of a `PerRank` holder as of now, `state_dict()` called where it has one."""
    value = node.holder.value
    if is_stateful(value) and not isinstance(value, type):
        return state_dict_of(value, name=fqn(node.path))
    return value


def _static_nodes(tree: Tree) -> list[StaticNode]:
    """Return what the static part is made from; a `Sharded` made anew for the same tensor is the same."""
    nodes: list[StaticNode] = [
        (node.path, node.value.tensor, node.value.layout)
        if isinstance(node.value, Sharded)
        else (node.path, node.value, None)
        for node in tree.tensors
    ]
    nodes += [(node.path, node.module, None) for node in tree.modules]
    nodes += [(node.path, node.optimizer, None) for node in tree.optimizers]
    return nodes


class _StaticBuilder:
    """Binds modules, optimizers and the tensors that the user's own containers hold."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: list[tuple[str, TensorBinding, Any]] = []
        self._objects: dict[str, ObjectSource] = {}
        self._stepped: set[int] = set()
        self.watches: list[Watch] = []
        self.guards: list[Callable[[], bool]] = []

    @property
    def bindings(self) -> list[TensorBinding]:
        """All bindings made, tied ones included."""
        return [binding for _, binding, _ in self._found]

    def build(self, tree: Tree) -> Static:
        for node in tree.tensors:
            name = fqn(node.path)
            self._found.append((name, bind_tensor(node.value, name=name, rank=self._rank), None))
        static = Static()
        self._add_frameworks(tree, static)
        self._tie(static)
        static.objects = list(self._objects.values())
        return static

    def _add_frameworks(self, tree: Tree, static: Static) -> None:
        if not tree.modules and not tree.optimizers:
            return
        from safehold.state.modules import ParamNames, module_leaves
        from safehold.state.optimizers import optimizer_leaves

        names = ParamNames()
        for module in tree.modules:
            self._add(module.path, module_leaves(module.module, prefix=module.path, names=names), static)
        for node in tree.optimizers:
            self._add(node.path, optimizer_leaves(node.optimizer, prefix=node.path, names=names), static)
            static.optimizers.append((fqn(node.path), node.optimizer))
            self.guards.append(_same_containers(node.optimizer))

    def _add(self, prefix: Path, subtree: Subtree, static: Static) -> None:
        for tensor in subtree.tensors:
            # State of an optimizer changes with its step whatever parameter it belongs to.
            owner = True if tensor.role == "state" else tensor.param
            self._found.append((fqn((*prefix, *tensor.path)), tensor.binding, owner))
        for entry in subtree.objects:
            name = fqn((*prefix, *entry.path))
            source = self._objects.setdefault(name, ObjectSource(name=name, entries=[]))
            source.entries.append(entry)
            if len(source.entries) > 1 and any(other.policy != "groups" for other in source.entries):
                raise _taken(name)
        self.watches += subtree.watches
        self._stepped |= subtree.params
        static.notes += subtree.notes

    def _tie(self, static: Static) -> None:
        by_name: dict[str, TensorLeaf] = {}
        names: set[str] = set()
        for name, binding, owner in sorted(self._found, key=lambda entry: entry[0]):
            _take_name(names, name)
            hooked = owner is True or (owner is not None and id(owner) in self._stepped)
            key = tie_key(binding)
            first = None if key is None else static.by_memory.setdefault(key, name)
            if first is not None and first != name:
                static.aliases[name] = first
                by_name[first].hooked |= hooked
                continue
            by_name[name] = _leaf(name, binding, hooked)
        static.leaves = list(by_name.values())
        static.names = frozenset(names)


def _same_containers(optimizer: Any) -> Callable[[], bool]:
    """Return whether the optimizer has the containers that it has now; `load_state_dict` gives it new ones."""
    state, groups = optimizer.state, optimizer.param_groups
    return lambda: optimizer.state is state and optimizer.param_groups is groups


def _leaf(name: str, binding: TensorBinding, hooked: bool) -> TensorLeaf:
    return TensorLeaf(
        spec=TensorSpec(name=name, dtype=binding.dtype, shape=binding.shape, kind=binding.kind),
        pieces=binding.pieces,
        holders=binding.holders,
        hooked=hooked,
        memory=binding.memory,
    )


def _add_fresh_tensors(leaves: Leaves, names: set[str], tree: Tree, static: Static, rank: int) -> None:
    """Add the tensors that `state_dict()` gave; they are bound at every call, since they may be new each time."""
    if not tree.fresh_tensors:
        return
    found = sorted(((fqn(node.path), node.value) for node in tree.fresh_tensors), key=lambda entry: entry[0])
    met: dict[Any, str] = {}
    for name, value in found:
        _take_name(names, name)
        binding = bind_tensor(value, name=name, rank=rank)
        key = tie_key(binding)
        first = None if key is None else static.by_memory.get(key) or met.setdefault(key, name)
        if first is not None and first != name:
            leaves.aliases[name] = first
        else:
            leaves.tensors.append(_leaf(name, binding, hooked=False))
    leaves.tensors.sort(key=lambda leaf: leaf.spec.name)


def _objects(tree: Tree, static: Static, random_states: bool) -> list[ObjectLeaf]:
    found: list[ObjectLeaf] = []
    for node in tree.objects:
        name = fqn(node.path)
        found.append(ObjectLeaf(spec=ObjectSpec(name=name), value=to_plain(node.value, name=name)))
    for holder in tree.per_rank:
        name = fqn(holder.path)
        spec = ObjectSpec(name=name, policy=holder.holder.policy)
        found.append(ObjectLeaf(spec=spec, value=to_plain(per_rank_value(holder), name=name)))
    for source in static.objects:
        spec = ObjectSpec(name=source.name, policy=source.entries[0].policy)
        found.append(ObjectLeaf(spec=spec, value=to_plain(_read(source.entries, source.name), name=source.name)))
    for name, kind in classes_in(tree).items():
        # Only says what the object was; where ranks have different ones, the lowest's is as good as any.
        found.append(ObjectLeaf(spec=ObjectSpec(name=name, policy="first"), value=kind))
    for name, value in (read_random_states() if random_states else {}).items():
        spec = ObjectSpec(name=name, policy="derive")
        found.append(ObjectLeaf(spec=spec, value=to_plain(value, name=name)))
    found.sort(key=lambda leaf: leaf.spec.name)
    return found


def _read(entries: Iterable[NamedObject], name: str) -> Any:
    values = [entry.read() for entry in entries]
    if len(values) == 1:
        return values[0]
    try:
        return param_groups.merge(values)
    except StateMismatchError as exc:
        raise StateMismatchError(f"{name}: {exc.message}", hint=exc.hint) from exc


def _take_name(names: set[str], name: str) -> None:
    if name in names:
        raise _taken(name)
    names.add(name)


def _taken(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"two leaves of the state have the name {name}",
        hint="parts that are joined by safehold.Parts must not have leaves of the same name; a dict keeps them apart",
    )
