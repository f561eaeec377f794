"""The user's state as a tree of nodes with typed paths; the first step of collecting and of binding for a restore.

Invariants: walking reads and changes nothing, except that it calls `state_dict()` of objects that have one and are
neither module nor optimizer. An object leaf is the largest subtree without anything special (tensor, array,
declaration, module, optimizer, object with
`state_dict`) in it; the top-level dict, the parts of `Parts` and every container with something special in it are split
per key, so the length of a plain list never shows in a name. Namedtuples count as special, since their type could not
be restored from bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from safehold.errors import ConfigurationError, UnsupportedStateError
from safehold.format.names import Component, ListIndex, TupleIndex, display, join
from safehold.format.objects import MAX_DEPTH
from safehold.state import numpy_arrays
from safehold.state.declare import Parts, PerRank, Sharded
from safehold.state.protocols import Path
from safehold.state.statefuls import is_stateful, state_dict_of
from safehold.state.values import ATOMS, only_atoms

RESERVED_ROOT: Final = "__safehold__"
"""First component of what safehold itself puts into a checkpoint (random states); no key of the user's dict."""


_SPLIT: Final = (dict, list, tuple)


@dataclass(slots=True)
class TensorNode:
    """A torch tensor, a NumPy array, or a `Sharded`."""

    path: Path
    value: Any


@dataclass(slots=True)
class ObjectNode:
    """A subtree of plain values."""

    path: Path
    value: Any


@dataclass(slots=True)
class PerRankNode:
    """A `PerRank` holder."""

    path: Path
    holder: PerRank


@dataclass(slots=True)
class ModuleNode:
    """A `torch.nn.Module`."""

    path: Path
    module: Any


@dataclass(slots=True)
class OptimizerNode:
    """A `torch.optim.Optimizer`."""

    path: Path
    optimizer: Any


@dataclass(slots=True)
class StatefulNode:
    """Another object with `state_dict` and `load_state_dict`, and the tree of what `state_dict()` gave (None: not asked)."""

    path: Path
    stateful: Any
    tree: Node | None


@dataclass(slots=True)
class BranchNode:
    """A dict, list, tuple or namedtuple that is split per key; `children` are in the container's order."""

    path: Path
    container: Any
    children: list[tuple[Any, Node]]


@dataclass(slots=True)
class PartsNode:
    """The parts of a `Parts`, all under one path."""

    path: Path
    declaration: Parts
    parts: list[Node]


Node: TypeAlias = (
    TensorNode | ObjectNode | PerRankNode | ModuleNode | OptimizerNode | StatefulNode | BranchNode | PartsNode
)


@dataclass(slots=True)
class Tree:
    """A walked state: the root and all nodes by sort, in the order in which they were met.

    Attributes:
        root: Of the top-level dict.
        tensors: Tensor nodes outside of objects with `state_dict`.
        fresh_tensors: Tensor nodes that `state_dict()` gave; they may be new ones at every walk.
        objects: Object nodes, those that `state_dict()` gave included.
        per_rank: `PerRank` nodes.
        modules: Modules.
        optimizers: Optimizers.
        statefuls: Objects with `state_dict`.
    """

    root: BranchNode
    tensors: list[TensorNode] = field(default_factory=list)
    fresh_tensors: list[TensorNode] = field(default_factory=list)
    objects: list[ObjectNode] = field(default_factory=list)
    per_rank: list[PerRankNode] = field(default_factory=list)
    modules: list[ModuleNode] = field(default_factory=list)
    optimizers: list[OptimizerNode] = field(default_factory=list)
    statefuls: list[StatefulNode] = field(default_factory=list)


def fqn(path: Path) -> str:
    """Return the name of a path.

    Raises:
        UnsupportedStateError: The name would be too long or too deep.
    """
    try:
        return join(path)
    except ValueError as exc:
        text = display(".".join(map(str, path)), 80)
        raise UnsupportedStateError(f"{text}: a leaf cannot have this name: {exc}") from exc


def walk(state: Any, *, ask_statefuls: bool = True) -> Tree:
    """Walk the state of a `save` or `restore` call.

    Args:
        state: The user's dict.
        ask_statefuls: Whether `state_dict()` of objects that have one is called and walked.

    Raises:
        ConfigurationError: `state` is no dict, or uses the reserved key.
        UnsupportedStateError: A container contains itself, or has a key that cannot be part of a name.
    """
    if not isinstance(state, dict):
        cls = type(state)
        raise ConfigurationError(
            f"the state must be a dict, not {cls.__module__}.{cls.__qualname__}",
            hint='for example {"model": model, "optimizer": optimizer, "step": step}',
        )
    if RESERVED_ROOT in state:
        raise ConfigurationError(f"the key {RESERVED_ROOT!r} of the state is reserved", hint="use another key")
    tree = Tree(root=BranchNode((), state, []))
    tree.root = _Walker(tree, ask_statefuls).branch(state, ())
    return tree


class _Walker:
    def __init__(self, tree: Tree, ask_statefuls: bool) -> None:
        self._tree = tree
        self._ask_statefuls = ask_statefuls
        self._open: set[int] = set()
        self._inside: list[str] = []
        torch = sys.modules.get("torch")
        self._tensor_types = () if torch is None else (torch.Tensor,)
        self._module_types = () if torch is None else (torch.nn.Module,)
        self._optimizer_types = () if torch is None else (torch.optim.Optimizer,)

    def node(self, value: Any, path: Path, *, split: bool = False) -> Node | None:
        """Return the node of `value`; None if there is nothing special in it. `split`: split a dict in any case."""
        cls = type(value)
        if cls in ATOMS:
            return None
        if isinstance(value, self._tensor_types) or numpy_arrays.is_array(value) or cls is Sharded:
            return self._tensor(value, path)
        if isinstance(value, _SPLIT) and not self._is_size(value):
            return self._container(value, path, split)
        if isinstance(value, type) or not (is_stateful(value) or cls in (PerRank, Parts)):
            return None
        if self._inside:
            raise UnsupportedStateError(
                f"{fqn(path)}: {cls.__module__}.{cls.__qualname__} cannot be saved inside of what state_dict() of "
                f"{self._inside[-1]} gives",
                hint="put it into the state under a key of its own",
            )
        return self._special(value, path)

    def branch(self, container: Any, path: Path) -> BranchNode:
        """Return the node of a container that is split per key in any case."""
        node = self._container(container, path, split=True)
        assert isinstance(node, BranchNode)
        return node

    def _tensor(self, value: Any, path: Path) -> TensorNode:
        node = TensorNode(path, value)
        (self._tree.fresh_tensors if self._inside else self._tree.tensors).append(node)
        return node

    def _object(self, value: Any, path: Path) -> ObjectNode:
        node = ObjectNode(path, value)
        self._tree.objects.append(node)
        return node

    def _container(self, value: Any, path: Path, split: bool) -> BranchNode | None:
        if not split and only_atoms(value.values() if isinstance(value, dict) else value) and not is_namedtuple(value):
            return None
        if id(value) in self._open:
            raise UnsupportedStateError(f"{fqn(path)}: a {type(value).__name__} contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise UnsupportedStateError(f"{_start(path)}: nested more than {MAX_DEPTH} levels deep")
        self._open.add(id(value))
        children: list[tuple[Any, Node | None]] = [
            (key, self.node(item, (*path, component))) for key, component, item in _items(value)
        ]
        self._open.discard(id(value))
        if not split and not is_namedtuple(value) and all(node is None for _, node in children):
            return None
        named: list[tuple[Any, Node]] = []
        for (key, component, item), (_, node) in zip(_items(value), children, strict=True):
            _check_key(component, path)
            named.append((key, self._object(item, (*path, component)) if node is None else node))
        return BranchNode(path, value, named)

    def _special(self, value: Any, path: Path) -> Node:
        node: Node
        if isinstance(value, self._module_types):
            node = ModuleNode(path, value)
            self._tree.modules.append(node)
        elif isinstance(value, self._optimizer_types):
            node = OptimizerNode(path, value)
            self._tree.optimizers.append(node)
        elif isinstance(value, PerRank):
            node = PerRankNode(path, value)
            self._tree.per_rank.append(node)
        elif isinstance(value, Parts):
            node = PartsNode(path, value, [self._part(part, path) for part in value.parts])
        else:
            node = self._stateful(value, path)
        return node

    def _stateful(self, value: Any, path: Path) -> StatefulNode:
        node = StatefulNode(path, value, None)
        if self._ask_statefuls:
            self._inside.append(fqn(path))
            given = state_dict_of(value, name=self._inside[-1])
            node.tree = self.node(given, path) or self._object(given, path)
            self._inside.pop()
        self._tree.statefuls.append(node)
        return node

    def _part(self, part: Any, path: Path) -> Node:
        node = self.node(part, path, split=isinstance(part, dict))
        if isinstance(node, ModuleNode | OptimizerNode | StatefulNode | BranchNode) and not isinstance(
            part, list | tuple
        ):
            return node
        raise UnsupportedStateError(
            f"{fqn(path)}: a {type(part).__name__} cannot be one of safehold.Parts",
            hint="parts are modules, optimizers, dicts, or objects with state_dict and load_state_dict",
        )

    def _is_size(self, value: Any) -> bool:
        return isinstance(value, tuple) and type(value).__name__ == "Size" and type(value).__module__ == "torch"


def is_namedtuple(value: Any) -> bool:
    """Return whether `value` is a tuple with named fields."""
    return (
        isinstance(value, tuple) and type(value) is not tuple and hasattr(value, "_fields") and hasattr(value, "_make")
    )


def _items(container: Any) -> Iterator[tuple[Any, Component, Any]]:
    """Give (key, component of the name, member) of a container, in its order."""
    if isinstance(container, dict):
        for key, item in container.items():
            yield key, key, item
    elif is_namedtuple(container):
        for key, item in zip(container._fields, container, strict=True):
            yield key, key, item
    else:
        index_type = ListIndex if isinstance(container, list) else TupleIndex
        for index, item in enumerate(container):
            yield index, index_type(index), item


def _check_key(component: Any, path: Path) -> None:
    if type(component) not in (str, int, ListIndex, TupleIndex):
        where = fqn(path) if path else "the state"
        raise UnsupportedStateError(
            f"{where}: the key {component!r} of type {type(component).__name__} cannot be part of a name",
            hint="use str or int keys in dicts that hold tensors, modules, optimizers or other objects",
        )


def _start(path: Path) -> str:
    return fqn(path[:8]) + "..."
