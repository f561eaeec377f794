"""What a restore does to the template once all tensors are filled: the second half of `restore_binding`.

In this order: optimizer state attached; objects of modules and optimizers (extra state, groups) written; plain values
put into the user's containers; `PerRank` values; `load_state_dict` of other objects in the order of the state.
Containers are filled in place (`state["step"]` is assigned, a dict or list of plain values keeps its identity); tuples
are rebuilt inside the nearest dict or list. A read-only or expanded tensor is replaced there by a new one.

Invariants: nothing is decided here, `restore_binding` has; an error names the leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from safehold.errors import StateMismatchError
from safehold.state.in_place import InPlace
from safehold.state.protocols import NamedObject
from safehold.state.random_states import write_random_states
from safehold.state.rank_values import RankValues
from safehold.state.rebuild import Finish
from safehold.state.statefuls import is_stateful, load_state_dict_into
from safehold.state.tree import (
    BranchNode,
    Node,
    ObjectNode,
    PartsNode,
    PerRankNode,
    TensorNode,
    Tree,
    fqn,
    is_namedtuple,
)
from safehold.state.values import from_plain

Restored = Callable[[str], Any]
"""Gives the restored framework value of a saved object name."""

_PLACED = (BranchNode, ObjectNode, TensorNode)
"""Nodes whose place in the parent may get another value; everything else is filled where it is."""


@dataclass(slots=True, kw_only=True)
class Applying:
    """What was decided for one rank.

    Attributes:
        tree: The walked template.
        rank: This rank.
        world_size: Number of ranks now.
        rename_groups: Renames the parameters inside the groups of an optimizer as the leaves were.
        replaced: `id` of a tensor node -> the tensor that comes in its place.
        planned: `id` of a node -> how its value is made.
        attach: Attach the state of optimizers.
        writes: (object of a module or optimizer, saved name).
        plain: Saved names of objects that are taken as one value, whatever their policy was.
    """

    tree: Tree
    rank: int
    world_size: int
    rename_groups: Callable[[NamedObject, Any], Any]
    replaced: dict[int, Any] = field(default_factory=dict)
    planned: dict[int, Finish] = field(default_factory=dict)
    attach: list[Callable[[], None]] = field(default_factory=list)
    writes: list[tuple[NamedObject, str]] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    _made: dict[int, Any] = field(default_factory=dict)

    def check(self, values: dict[str, Any]) -> list[str]:
        """Say which values cannot be made for this rank, before anything is overwritten; those of functions are kept."""
        said = []
        for name in self.plain:
            value = values.get(name)
            if isinstance(value, RankValues) and not value.equal:
                said.append(_differs(name))
        for holder in self.tree.per_rank:
            finish = self.planned.get(id(holder))
            value = None if finish is None else finish(values.get)
            if isinstance(value, RankValues):
                try:
                    self._made[id(holder)] = self._from_all(holder, value)
                except StateMismatchError as exc:
                    said.append(f"{exc.message}; {exc.hint}" if exc.hint else exc.message)
        return said

    def apply(self, values: dict[str, Any]) -> None:
        """Put everything in its place; see `RestoreBinding.apply`."""

        def restored(name: str) -> Any:
            if name not in values:
                raise StateMismatchError(f"{name}: the restore was given no value for it", rank=self.rank)
            value = values[name]
            if isinstance(value, RankValues):
                return _one_of(name, value, self.rank)
            return from_plain(value)

        for attach in self.attach:
            attach()
        for module in self.tree.modules:
            _after_restore(module.module)
        for entry, name in self.writes:
            entry.write(self.rename_groups(entry, restored(name)))
        in_place = InPlace()
        self._place(self.tree.root, restored, in_place)
        for holder in self.tree.per_rank:
            finish = self.planned.get(id(holder))
            if finish is not None:
                value = self._made[id(holder)] if id(holder) in self._made else finish(values.__getitem__)
                self._apply_per_rank(holder, value, in_place)
        for stateful in self.tree.statefuls:
            finish = self.planned.get(id(stateful))
            if finish is not None:
                load_state_dict_into(stateful.stateful, finish(restored), name=fqn(stateful.path))

    def apply_random(self, values: dict[str, Any]) -> None:
        """Set the random states; see `RestoreBinding.apply_random`."""
        write_random_states(values, rank=self.rank, world_size=self.world_size)

    def _place(self, node: Node, restored: Restored, in_place: InPlace) -> Any:
        """Put restored values at and below `node`; returns what its parent should hold."""
        if isinstance(node, BranchNode):
            return self._place_branch(node, restored, in_place)
        if isinstance(node, PartsNode):
            for part in node.parts:
                self._place(part, restored, in_place)
            return node.declaration
        if isinstance(node, TensorNode):
            return self.replaced.get(id(node), node.value)
        if isinstance(node, ObjectNode):
            finish = self.planned.get(id(node))
            return node.value if finish is None else in_place.put(node.value, finish(restored))
        return None

    def _place_branch(self, node: BranchNode, restored: Restored, in_place: InPlace) -> Any:
        container = node.container
        members = [(key, child, self._place(child, restored, in_place)) for key, child in node.children]
        changed = [(key, new) for key, child, new in members if isinstance(child, _PLACED)]
        if isinstance(container, dict | list):
            for key, new in changed:
                if container[key] is not new:
                    container[key] = new
            return container
        fields = list(container)
        positions = {key: at for at, (key, _, _) in enumerate(members)}
        for key, new in changed:
            fields[positions[key]] = new
        if all(new is old for new, old in zip(fields, container, strict=True)):
            return container
        return type(container)._make(fields) if is_namedtuple(container) else tuple(fields)

    def _apply_per_rank(self, node: PerRankNode, value: Any, in_place: InPlace) -> None:
        holder, name = node.holder, fqn(node.path)
        if id(node) not in self._made:
            value = self._from_all(node, value) if isinstance(value, RankValues) else from_plain(value)
        if is_stateful(holder.value) and not isinstance(holder.value, type):
            load_state_dict_into(holder.value, value, name=name)
        else:
            holder.value = in_place.put(holder.value, value)

    def _from_all(self, node: PerRankNode, value: RankValues) -> Any:
        holder = node.holder
        given = [from_plain(value.values[saved]) for saved in sorted(value.values)]
        return _from_all(
            holder.policy, holder.how, given, name=fqn(node.path), rank=self.rank, world_size=self.world_size
        )


def _after_restore(module: Any) -> None:
    from safehold.state.modules import after_restore

    after_restore(module)


def _one_of(name: str, value: RankValues, rank: int) -> Any:
    if value.equal:
        return from_plain(value.values[min(value.values)])
    raise StateMismatchError(_differs(name), rank=rank)


def _differs(name: str) -> str:
    return (
        f"{name}: was saved as PerRank by another number of ranks and differed between them; declare it with "
        "safehold.PerRank and the same policy in the state that is restored"
    )


def _from_all(
    policy: str, how: Callable[..., Any] | None, given: list[Any], *, name: str, rank: int, world_size: int
) -> Any:
    if how is None:
        raise StateMismatchError(
            f"{name}: was saved as PerRank with a function by another number of ranks; here its policy is {policy}",
            rank=rank,
            hint="declare it with the policy derive or merge and a function `how`",
        )
    try:
        return how(given, rank, world_size) if policy == "derive" else how(given)
    except Exception as exc:
        raise StateMismatchError(f"{name}: the function of PerRank failed: {exc!r}", rank=rank) from exc
