"""Binds a template state to a checkpoint: what goes where, decided before anything is overwritten.

Every leaf of the template is looked up under its FQN. Strictness: a template leaf that the checkpoint lacks is
`missing`, a saved leaf that nothing in the template takes is `unexpected` (with pipeline stages or experts a leaf is
unexpected only if it is so on all ranks: whoever joins the ranks' results intersects), another shape or dtype is
`mismatched`. Exceptions: optional extra state; state of an optimizer, which is created or removed as saved; objects
with `state_dict`, which get the saved structure whatever theirs is; `None` and containers of plain values, which take
whatever was saved at or below their name, tensors included (as fresh CPU tensors).

Names that are one tensor in the template need only one of them in the checkpoint; if it has several that are not tied
there (pipeline stages that each saved a copy), their values must be equal, which `apply` checks first.

What `apply` does, in this order: optimizer state attached; objects of modules and optimizers (extra state, groups)
written; plain values put into the user's containers; `PerRank` values; `load_state_dict` of other objects in the order
of the state. Containers are filled in place (`state["step"]` is assigned, a dict or list of plain values keeps its
identity); tuples are rebuilt inside the nearest dict or list. A read-only or expanded tensor is replaced there by a new
one.

Invariants: binding reads the template and allocates; only the destinations (by the pipelines) and `apply` change it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from safehold.errors import StateMismatchError
from safehold.format.names import split
from safehold.state import param_groups
from safehold.state.collect import tie_key
from safehold.state.in_place import InPlace
from safehold.state.leaves import Destination, RestoreBinding, RestoreOptions, SavedIndex, TensorLeaf
from safehold.state.protocols import NamedObject, Path, TensorBinding
from safehold.state.random_states import write_random_states
from safehold.state.rank_values import RankValues
from safehold.state.rebuild import Finish, Rebuild
from safehold.state.saved_tree import SavedNode, SavedTree, make_rename
from safehold.state.statefuls import is_stateful, load_state_dict_into, state_dict_of
from safehold.state.tensor_likes import bind_tensor, can_be_filled, fresh_tensor, same_bytes
from safehold.state.tree import (
    BranchNode,
    Node,
    ObjectNode,
    OptimizerNode,
    PartsNode,
    PerRankNode,
    StatefulNode,
    TensorNode,
    Tree,
    fqn,
    is_namedtuple,
    walk,
)
from safehold.state.values import from_plain
from safehold.types import ObjectSpec, TensorSpec

_MAX_LISTED = 20

Restored = Callable[[str], Any]
"""Gives the restored framework value of a saved object name."""


def bind_for_restore(
    state: Any,
    saved: SavedIndex,
    *,
    rank: int,
    world_size: int,
    options: RestoreOptions | None = None,
    random_states: bool = True,
) -> RestoreBinding:
    """Decide what a restore fills on this rank; nothing in `state` changes yet.

    Args:
        state: The template: the dict that the user wants restored.
        saved: What the checkpoint has.
        rank: This rank.
        world_size: Number of ranks now.
        options: How forgiving the restore is; strict if None.
        random_states: Whether saved random states are to be set.

    Raises:
        UnsupportedStateError: Something in the template can be neither saved nor restored.
        ConfigurationError: The state or the options are not as they should be.
    """
    options = options or RestoreOptions()
    tree = walk(state, ask_statefuls=False)
    optimizer_paths = [node.path for node in tree.optimizers]
    saved_tree = SavedTree(saved, make_rename(options.rename), optimizer_paths)
    binder = _Binder(tree, saved_tree, saved, rank, world_size, options)
    binder.bind()
    binding = binder.result()
    if random_states:
        binding.object_names += saved_tree.random_names
    elif saved_tree.random_names:
        binding.left_out += [f"{name}: random states are not asked for" for name in saved_tree.random_names]
        binding.apply_random = lambda values: None
    return binding


def mismatch_error(
    missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[str]
) -> StateMismatchError | None:
    """Return one error that lists everything that does not fit, None if all fits."""
    if not (missing or unexpected or mismatched):
        return None
    lines = ["checkpoint and state do not fit, nothing was overwritten:"]
    lines += _listed("missing in the checkpoint", missing)
    lines += _listed("in the checkpoint, not in this state", unexpected)
    lines += _listed("different", mismatched)
    return StateMismatchError(
        "\n  ".join(lines),
        hint="rename= says what is called otherwise, partial= what may be absent, cast=True allows other dtypes; "
        "shapes have to agree",
    )


def _listed(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    more = [f"  ... and {len(entries) - _MAX_LISTED} more"] if len(entries) > _MAX_LISTED else []
    return [f"{title} ({len(entries)}):", *(f"  {entry}" for entry in entries[:_MAX_LISTED]), *more]


class _Binder:
    def __init__(
        self, tree: Tree, saved: SavedTree, index: SavedIndex, rank: int, world_size: int, options: RestoreOptions
    ) -> None:
        self._tree, self._saved, self._rank, self._options = tree, saved, rank, options
        self._world_size = world_size
        self._aliases = index.aliases
        self._compared: list[tuple[str, str, TensorBinding, TensorBinding]] = []
        self._tensors: list[tuple[Path, TensorBinding, SavedNode | None]] = []
        self._fetched: dict[str, None] = {}
        self._claimed: set[int] = set()
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        self._destinations: list[Destination] = []
        self._replaced: dict[int, Any] = {}
        self._planned: dict[int, Finish] = {}
        self._attach: list[Callable[[], None]] = []
        self._writes: list[tuple[NamedObject, str]] = []
        self._rename = make_rename(options.rename)

    def bind(self) -> None:
        """Look up every leaf of the template."""
        for tensor in self._tree.tensors:
            self._bind_tensor(tensor)
        self._bind_frameworks()
        for node in self._tree.objects:
            self._bind_object(node)
        for holder in self._tree.per_rank:
            found = self._object_end(holder.path, optional=False)
            if found is not None:
                self._planned[id(holder)] = _fetch(found)
        for stateful in self._tree.statefuls:
            self._bind_stateful(stateful)
        self._resolve_tensors()

    def result(self) -> RestoreBinding:
        """Return what was decided, `partial` applied."""
        missing = sorted(set(self._missing))
        unexpected = sorted(
            end.tensor.name if end.tensor else end.object.name  # type: ignore[union-attr]
            for end in self._saved.root.ends()
            if id(end) not in self._claimed
        )
        left_out = [f"{name}: not in the checkpoint" for name in missing if self._may_differ(name)]
        left_out += [f"{name}: not in this state" for name in unexpected if self._may_differ(name)]
        return RestoreBinding(
            destinations=sorted(self._destinations, key=lambda entry: entry.leaf.spec.name),
            object_names=sorted(self._fetched),
            missing=[name for name in missing if not self._may_differ(name)],
            unexpected=[name for name in unexpected if not self._may_differ(name)],
            mismatched=sorted(self._mismatched),
            left_out=left_out,
            check=self._check,
            apply=self._apply,
            apply_random=self._apply_random,
        )

    def _may_differ(self, name: str) -> bool:
        partial = self._options.partial
        if partial is None or isinstance(partial, bool):
            return bool(partial)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in partial)

    # Tensors.

    def _bind_tensor(self, node: TensorNode) -> None:
        name = fqn(node.path)
        binding = bind_tensor(node.value, name=name, rank=self._rank)
        if not can_be_filled(node.value):
            fresh = fresh_tensor(binding.dtype, binding.shape, binding.kind)
            binding = bind_tensor(fresh, name=name, rank=self._rank)
            self._replaced[id(node)] = fresh
        self._tensors.append((node.path, binding, self._saved.find(node.path)))

    def _resolve_tensors(self) -> None:
        """Give every distinct memory one saved leaf; names that are tied in the template need only one of them."""
        tied: dict[Any, list[tuple[str, TensorBinding, SavedNode | None]]] = {}
        for path, binding, node in self._tensors:
            key = tie_key(binding)
            tied.setdefault(id(binding) if key is None else key, []).append((fqn(path), binding, node))
        for members in tied.values():
            members.sort(key=lambda member: member[0])
            present = [(name, binding, node) for name, binding, node in members if node is not None and node.is_end]
            if not present:
                self._missing += [name for name, _, _ in members]
            # Saved leaf -> the first of the tied names that has it.
            sources: dict[str, tuple[str, TensorBinding, TensorSpec]] = {}
            for name, binding, node in present:
                if self._fits(name, binding, node) and node.tensor is not None:
                    saved = node.tensor.name
                    sources.setdefault(self._aliases.get(saved, saved), (name, binding, node.tensor))
            self._fill(list(sources.values()))

    def _fill(self, sources: list[tuple[str, TensorBinding, TensorSpec]]) -> None:
        """Make the destination of one memory; what else was saved for it is read beside it and compared in `apply`."""
        for number, (name, binding, spec) in enumerate(sources):
            if number == 0:
                self._destinations.append(Destination(saved=spec, leaf=_leaf(name, binding)))
                continue
            pieces = tuple((rect, fresh_tensor(binding.dtype, rect.sizes, binding.kind)) for rect, _ in binding.pieces)
            beside = replace(binding, pieces=pieces, memory=())
            self._destinations.append(Destination(saved=spec, leaf=_leaf(name, beside)))
            self._compared.append((sources[0][0], name, binding, beside))

    def _fits(self, name: str, binding: TensorBinding, node: SavedNode) -> bool:
        self._claimed.add(id(node))
        spec = node.tensor
        if spec is None:
            self._mismatched.append(f"{name}: a tensor in this state, no tensor in the checkpoint")
            return False
        if spec.shape != binding.shape:
            self._mismatched.append(f"{name}: shape {binding.shape} in this state, {spec.shape} in the checkpoint")
            return False
        if spec.dtype != binding.dtype and not (self._options.cast and _can_cast(spec.dtype, binding.dtype)):
            self._mismatched.append(f"{name}: dtype {binding.dtype} in this state, {spec.dtype} in the checkpoint")
            return False
        return True

    # Modules and optimizers.

    def _bind_frameworks(self) -> None:
        if not self._tree.modules and not self._tree.optimizers:
            return
        from safehold.state.modules import ParamNames, module_leaves

        names = ParamNames()
        for module in self._tree.modules:
            subtree = module_leaves(module.module, prefix=module.path, names=names)
            for tensor in subtree.tensors:
                path = (*module.path, *tensor.path)
                self._tensors.append((path, tensor.binding, self._saved.find(path)))
            self._bind_writes(module.path, subtree.objects)
        for node in self._tree.optimizers:
            self._bind_optimizer(node, names)

    def _bind_optimizer(self, node: OptimizerNode, names: Any) -> None:
        from safehold.state.optimizers import bind_optimizer_for_restore

        below = self._saved.find(node.path)
        ends = {end.path[len(node.path) :]: end for end in below.ends()} if below else {}
        tensors: dict[Path, TensorSpec] = {path: end.tensor for path, end in ends.items() if end.tensor}
        objects: dict[Path, ObjectSpec] = {path: end.object for path, end in ends.items() if end.object}
        restore = bind_optimizer_for_restore(
            node.optimizer, prefix=node.path, names=names, saved_tensors=tensors, saved_objects=objects
        )
        foreign = set(restore.foreign)
        self._claimed |= {id(end) for path, end in ends.items() if path not in foreign}
        for tensor in restore.tensors:
            path = (*node.path, *tensor.path)
            self._tensors.append((path, tensor.binding, self._saved.find(path)))
        self._bind_writes(node.path, restore.objects)
        self._missing += [fqn((*node.path, *path)) for path in restore.missing]
        self._mismatched += restore.mismatched
        self._attach.append(restore.attach)

    def _bind_writes(self, prefix: Path, entries: Sequence[NamedObject]) -> None:
        for entry in entries:
            spec = self._object_end((*prefix, *entry.path), optional=entry.optional)
            if spec is not None:
                self._writes.append((entry, spec.name))

    # Objects.

    def _object_end(self, path: Path, *, optional: bool) -> ObjectSpec | None:
        """Return the saved object of just this path and mark it as needed; None if there is none, which is noted."""
        node = self._saved.find(path)
        if node is not None and node.object is not None:
            self._claimed.add(id(node))
            self._fetched[node.object.name] = None
            return node.object
        if node is not None and node.tensor is not None:
            self._claimed.add(id(node))
            self._mismatched.append(f"{fqn(path)}: no tensor in this state, a tensor in the checkpoint")
        elif not optional:
            self._missing.append(fqn(path))
        return None

    def _bind_object(self, node: ObjectNode) -> None:
        found = self._saved.find(node.path)
        takes_all = node.value is None or isinstance(node.value, dict | list | tuple)
        if found is None or (found.object is None and not takes_all):
            self._object_end(node.path, optional=False)
        elif found.object is not None:
            self._object_end(node.path, optional=False)
            self._planned[id(node)] = _fetch(found.object)
        else:
            self._rebuild(node, found, node.value)

    def _bind_stateful(self, node: StatefulNode) -> None:
        found = self._saved.find(node.path)
        if found is None:
            self._missing.append(fqn(node.path))
            return
        # Its own tensors say where the restored ones belong. What can be iterated is not asked: a data loader would start
        # its workers to answer.
        asked = any(end.tensor for end in found.ends()) and not hasattr(node.stateful, "__iter__")
        given = state_dict_of(node.stateful, name=fqn(node.path)) if asked else None
        self._rebuild(node, found, given)

    def _rebuild(self, node: ObjectNode | StatefulNode, found: SavedNode, template: Any) -> None:
        rebuild = Rebuild(self._rank)
        self._planned[id(node)] = rebuild.plan(found, template)
        self._claimed |= {id(end) for end in rebuild.ends}
        self._fetched.update(dict.fromkeys(rebuild.objects))
        self._tensors += [(end.path, binding, end) for end, binding in rebuild.tensors]

    # Applying.

    def _apply(self, values: dict[str, Any]) -> None:
        def restored(name: str) -> Any:
            if name not in values:
                raise StateMismatchError(f"{name}: the restore was given no value for it", rank=self._rank)
            value = values[name]
            if isinstance(value, RankValues):
                return _one_of(name, value, self._rank)
            return from_plain(value)

        for first, second, filled, beside in self._compared:
            if not same_bytes(filled, beside):
                raise StateMismatchError(
                    f"{first} and {second}: one tensor in this state, two in the checkpoint, and their values differ",
                    rank=self._rank,
                    hint="untie them before the restore; the state has been partly restored, do not train on it",
                )
        for attach in self._attach:
            attach()
        for module in self._tree.modules:
            _after_restore(module.module)
        for entry, name in self._writes:
            entry.write(self._renamed_groups(entry, restored(name)))
        in_place = InPlace()
        self._place(self._tree.root, restored, in_place)
        for holder in self._tree.per_rank:
            finish = self._planned.get(id(holder))
            if finish is not None:
                self._apply_per_rank(holder, finish(values.__getitem__), in_place)
        for stateful in self._tree.statefuls:
            finish = self._planned.get(id(stateful))
            if finish is not None:
                load_state_dict_into(stateful.stateful, finish(restored), name=fqn(stateful.path))

    def _check(self, values: dict[str, Any]) -> list[str]:
        """Say what does not fit of objects that modules and optimizers take."""
        if self._options.partial is True:
            return []
        found = []
        for entry, name in self._writes:
            if entry.check is not None and name in values and not isinstance(values[name], RankValues):
                said = entry.check(self._renamed_groups(entry, from_plain(values[name])))
                found += [f"{name}: {text}" for text in said if not self._may_differ(name)]
        return sorted(found)

    def _renamed_groups(self, entry: NamedObject, value: Any) -> Any:
        """Rename the parameters inside parameter groups as the leaves were."""
        if entry.policy != "groups" or self._options.rename is None:
            return value
        return param_groups.rename(value, lambda name: fqn(self._rename(split(name))))

    def _place(self, node: Node, restored: Restored, in_place: InPlace) -> Any:
        """Put restored values at and below `node`; returns what its parent should hold."""
        if isinstance(node, BranchNode):
            return self._place_branch(node, restored, in_place)
        if isinstance(node, PartsNode):
            for part in node.parts:
                self._place(part, restored, in_place)
            return node.declaration
        if isinstance(node, TensorNode):
            return self._replaced.get(id(node), node.value)
        if isinstance(node, ObjectNode):
            finish = self._planned.get(id(node))
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
        if isinstance(value, RankValues):
            given = [from_plain(value.values[saved]) for saved in sorted(value.values)]
            value = _from_all(holder.policy, holder.how, given, name=name, rank=self._rank, world_size=self._world_size)
        else:
            value = from_plain(value)
        if is_stateful(holder.value) and not isinstance(holder.value, type):
            load_state_dict_into(holder.value, value, name=name)
        else:
            holder.value = in_place.put(holder.value, value)

    def _apply_random(self, values: dict[str, Any]) -> None:
        write_random_states(values, rank=self._rank, world_size=self._world_size)


_PLACED = (BranchNode, ObjectNode, TensorNode)
"""Nodes whose place in the parent may get another value; everything else is filled where it is."""


def _after_restore(module: Any) -> None:
    from safehold.state.modules import after_restore

    after_restore(module)


def _fetch(spec: ObjectSpec) -> Finish:
    name = spec.name
    return lambda restored: restored(name)


def _leaf(name: str, binding: TensorBinding) -> TensorLeaf:
    return TensorLeaf(
        spec=TensorSpec(name=name, dtype=binding.dtype, shape=binding.shape, kind=binding.kind),
        pieces=binding.pieces,
        holders=binding.holders,
        memory=binding.memory,
    )


def _can_cast(saved: str, wanted: str) -> bool:
    """Return whether values can be converted without dropping more than precision."""
    if saved.startswith("numpy:") or wanted.startswith("numpy:"):
        return False
    return wanted.startswith("complex") or not saved.startswith("complex")


def _one_of(name: str, value: RankValues, rank: int) -> Any:
    if value.equal:
        return from_plain(value.values[min(value.values)])
    raise StateMismatchError(
        f"{name}: was saved as PerRank by another number of ranks and differed between them",
        rank=rank,
        hint="declare it with safehold.PerRank and the same policy in the state that is restored",
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
