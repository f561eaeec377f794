"""The seam between a user's state and the pipelines: named leaves bound to live memory.

Invariants: a binding holds views, never copies; a view has exactly its rectangle's sizes (any strides, any device). What an object leaf
carries is read when the save is called, in the trainer's thread. No storage, no sockets, no decisions about who writes what.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from safehold.types import Holders, Inventory, ObjectSpec, Rect, Shard, TensorSpec


class View(Protocol):
    """A live torch tensor or NumPy array; the pipelines hand it to `safehold.host.device` and never look inside."""

    @property
    def shape(self) -> Any:
        """Sizes along each dim."""
        ...


@dataclass(slots=True, kw_only=True)
class TensorLeaf:
    """One tensor leaf bound to this rank's memory.

    Attributes:
        spec: Name, dtype, global shape.
        pieces: Disjoint (rectangle, live view of exactly that rectangle); empty where this rank holds nothing of the leaf.
        holders: Which ranks hold the same bytes.
        hooked: True if only the step of an optimizer that can be hooked changes it (parameters and optimizer state), so that it may be
            copied beside forward and backward; False for all else (buffers, counters, loss scales).
        memory: Identity of the memory behind the views, see `safehold.state.collect`; equal keys mean the same bytes (tied tensors), and
            a changed key means that a cached binding is stale.
    """

    spec: TensorSpec
    pieces: tuple[tuple[Rect, Any], ...]
    holders: Holders
    hooked: bool = False
    memory: tuple[int, ...] = ()

    @property
    def shard(self) -> Shard:
        """The same without the live memory."""
        return Shard(spec=self.spec, rects=tuple(rect for rect, _ in self.pieces), holders=self.holders)


@dataclass(slots=True, kw_only=True)
class ObjectLeaf:
    """One leaf that is no tensor, with its value as of now."""

    spec: ObjectSpec
    value: Any


@dataclass(slots=True, kw_only=True)
class Leaves:
    """All leaves of a state on this rank.

    Attributes:
        tensors: Sorted by name, without aliases.
        objects: Sorted by name.
        aliases: Other name of a tied tensor -> name of the leaf that has its bytes.
        optimizers: The optimizers met, for hooks: (name, optimizer object).
        notes: Things the user should know (parameters without a module and how they were named, ...); said once.
    """

    tensors: list[TensorLeaf] = field(default_factory=list)
    objects: list[ObjectLeaf] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizers: list[tuple[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def inventory(self, rank: int, world_size: int) -> Inventory:
        """Return what this rank holds, without memory and values."""
        return Inventory(
            rank=rank,
            world_size=world_size,
            shards=tuple(leaf.shard for leaf in self.tensors),
            objects=tuple(leaf.spec for leaf in self.objects),
            aliases=tuple(sorted(self.aliases.items())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedIndex:
    """What a checkpoint has, as the state floor needs to know it before a restore.

    Attributes:
        tensors: FQN -> spec, aliases included (an alias has its target's dtype and shape under its own name).
        objects: FQN -> spec.
        aliases: Other name of a tied tensor -> name of the leaf that has its bytes.
    """

    tensors: dict[str, TensorSpec]
    objects: dict[str, ObjectSpec]
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How forgiving a restore is.

    Attributes:
        partial: None: strict both ways. True: missing and unexpected leaves are left out and listed, and optimizers and objects with
            `state_dict` may be of another class. A glob pattern over FQNs, or several: only the leaves that match may be so.
        rename: Turns a saved FQN into the template's (a dict of exact names or prefixes at component borders, or a function).
        cast: Allows another dtype in the template than in the checkpoint; values are converted.
    """

    partial: bool | Sequence[str] | None = None
    rename: dict[str, str] | Callable[[str], str] | None = None
    cast: bool = False

    @property
    def patterns(self) -> list[str]:
        """The patterns of `partial`, none where it is no pattern."""
        if self.partial is None or isinstance(self.partial, bool):
            return []
        return [self.partial] if isinstance(self.partial, str) else list(self.partial)

    def may_differ(self, name: str) -> bool:
        """Return whether a leaf of that name may be missing, unexpected, or of another class."""
        return self.partial is True or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(slots=True, kw_only=True)
class Destination:
    """Where one saved tensor leaf goes on this rank.

    Attributes:
        saved: The leaf's spec in the checkpoint (under its saved name).
        leaf: Live memory to fill; `leaf.spec.name` is the template's name. Its dtype differs from `saved` only with `cast`.
    """

    saved: TensorSpec
    leaf: TensorLeaf


@dataclass(slots=True, kw_only=True)
class SavedApart:
    """A leaf of the checkpoint that is tied in the template to the leaf of a destination, and was not when it was saved.

    Attributes:
        names: The template's names of the destination and of this leaf.
        saved: What fills the memory of both, and what has to have the same values.
        leaf: That memory.
    """

    names: tuple[str, str]
    saved: tuple[TensorSpec, TensorSpec]
    leaf: TensorLeaf

    @property
    def misfit(self) -> str:
        """What is wrong where the values differ."""
        return (
            f"{self.names[0]} and {self.names[1]}: one tensor in this state, two in the checkpoint, and their values "
            "differ; untie them before the restore"
        )


@dataclass(slots=True, kw_only=True)
class RestoreBinding:
    """Everything a restore has to fill on this rank, decided before anything is overwritten.

    Attributes:
        destinations: Tensor leaves to read; those that the template lacked (state of an optimizer that has not stepped, tensors inside a
            stateful object) were created and are attached by `apply`.
        apart: Leaves whose values must be those of a destination, to be compared before anything is overwritten.
        object_names: Saved names of the objects to fetch.
        missing: Template leaves that the checkpoint does not have.
        unexpected: Saved leaves that the template does not have.
        mismatched: Sentences about leaves whose shape or dtype differs.
        left_out: With `partial`, what was not restored; for the user.
        unused: Sentences about what `rename` and `partial` say and what is of no use with this state and checkpoint.
        check: Says what does not fit between the objects' values and the template (an optimizer or a schedule of another class), before
            anything is overwritten; argument as for `apply`.
        apply: Puts objects into place and calls `load_state_dict`, after all tensors are in place; argument: saved object name -> decoded
            value. Random states are not touched by it.
        apply_random: Sets the random states; called last; argument as for `apply`.
    """

    destinations: list[Destination]
    apart: list[SavedApart]
    object_names: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    left_out: list[str]
    unused: list[str]
    check: Callable[[dict[str, Any]], list[str]]
    apply: Callable[[dict[str, Any]], None]
    apply_random: Callable[[dict[str, Any]], None]
