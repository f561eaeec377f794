"""What `collect` keeps between saves: bindings of everything that is not made anew at every walk.

Invariants: a cached binding is used only while every container that led to it has the same members (by identity) and
the live tensor behind it the same address, shape and strides. Whatever does not hold makes all of it stale; nothing is
patched. Cached leaves are shared between the results of several `collect` calls and are read-only for whoever gets
them.

The cache keeps the tensors that it knows alive until the next `collect` or `clear`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from safehold.state.leaves import TensorLeaf
from safehold.state.protocols import NamedObject, Path, TensorBinding, Watch

StaticNode: TypeAlias = tuple[Path, Any, Any]
"""Path, tensor or module or optimizer (compared by identity), layout of a `Sharded` (compared by value)."""


@dataclass(slots=True, kw_only=True)
class ObjectSource:
    """An object below a module or optimizer: its name and the functions that read it (several under `Parts`)."""

    name: str
    entries: list[NamedObject]


@dataclass(slots=True, kw_only=True)
class Static:
    """Everything of a state that stays while its watches hold.

    Attributes:
        leaves: Tensor leaves, sorted by name, aliases taken out.
        aliases: Other name -> name.
        by_memory: Memory key -> name, for tensors that are met later.
        names: All names taken by tensors, aliases included.
        objects: Objects below modules and optimizers.
        optimizers: (name, optimizer).
        notes: For the user.
    """

    leaves: list[TensorLeaf] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    by_memory: dict[Any, str] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    objects: list[ObjectSource] = field(default_factory=list)
    optimizers: list[tuple[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class BindingCache:
    """Keeps the static part of one state; give the same one to every `collect` of that state. Not thread-safe."""

    __slots__ = ("_checks", "_nodes", "_static", "_watches", "hits", "misses")

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything, so that the tensors known can be freed."""
        self._static: Static | None = None
        self._nodes: tuple[StaticNode, ...] = ()
        self._watches = _Watches(())
        self._checks = _Checks((), ())

    def lookup(self, nodes: Sequence[StaticNode]) -> Static | None:
        """Return what is known if the state has the same nodes and everything behind them is as it was, else None."""
        static = self._static
        same = static is not None and self._same_nodes(nodes) and self._watches.hold()
        if same and self._checks.hold():
            self.hits += 1
            return static
        self.misses += 1
        self.clear()
        return None

    def store(
        self,
        nodes: Iterable[StaticNode],
        watches: Iterable[Watch],
        bindings: Iterable[TensorBinding],
        guards: Iterable[Callable[[], bool]],
        static: Static,
    ) -> None:
        """Keep `static`, which was made from these nodes, containers and bindings and is good while the guards hold."""
        self._nodes = tuple(nodes)
        self._watches = _Watches(watches)
        self._checks = _Checks(bindings, guards)
        self._static = static

    def _same_nodes(self, nodes: Sequence[StaticNode]) -> bool:
        if len(nodes) != len(self._nodes):
            return False
        return all(
            new is old and path == old_path and layout == old_layout
            for (path, new, layout), (old_path, old, old_layout) in zip(nodes, self._nodes, strict=True)
        )


class _Watches:
    """Many watches checked in one pass: all sizes, then all members and keys in a row; same answer as `Watch.holds`."""

    __slots__ = ("_dicts", "_keys", "_members", "_others", "_sizes")

    def __init__(self, watches: Iterable[Watch]) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        self._keys: list[Any] = []
        self._members: list[Any] = []
        self._others: list[Watch] = []
        for watch in watches:
            if isinstance(watch.container, dict) and watch.keys is not None:
                self._dicts.append(watch.container)
                self._sizes.append(len(watch.values))
                self._keys += watch.keys
                self._members += watch.values
            else:
                self._others.append(watch)

    def hold(self) -> bool:
        dicts = self._dicts
        if list(map(len, dicts)) != self._sizes:
            return False
        members = chain.from_iterable([entry.values() for entry in dicts])
        return (
            all(map(operator.is_, members, self._members))
            and all(map(operator.is_, chain.from_iterable(dicts), self._keys))
            and all(watch.holds() for watch in self._others)
        )


class _Checks:
    """Addresses, shapes and strides of live torch tensors, and the guards of bindings."""

    __slots__ = ("_addresses", "_guards", "_shapes", "_strides", "_tensors")

    def __init__(self, bindings: Iterable[TensorBinding], guards: Iterable[Callable[[], bool]]) -> None:
        tensors: dict[int, Any] = {}
        self._guards = list(guards)
        for binding in bindings:
            # The views of a NumPy array keep it from being resized, so its identity is enough.
            if binding.live is not None and not isinstance(binding.live, np.ndarray):
                tensors[id(binding.live)] = binding.live
            if binding.guard is not None:
                self._guards.append(binding.guard)
        self._tensors = list(tensors.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._strides = [tensor.stride() for tensor in self._tensors]

    def hold(self) -> bool:
        tensors = self._tensors
        return (
            [tensor.data_ptr() for tensor in tensors] == self._addresses
            and [tensor.shape for tensor in tensors] == self._shapes
            and [tensor.stride() for tensor in tensors] == self._strides
            and all(map(operator.call, self._guards))
        )
