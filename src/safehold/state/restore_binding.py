"""Binds a template state to a checkpoint: what goes where, decided before anything is overwritten.

Every leaf of the template is looked up under its FQN. Strictness: a template leaf that the checkpoint lacks is
`missing`, a saved leaf that nothing in the template takes is `unexpected` (with pipeline stages or experts a leaf is
unexpected only if it is so on all ranks: whoever joins the ranks' results intersects), another shape or dtype is
`mismatched`. Exceptions: optional extra state; state of an optimizer, which is created or removed as saved; objects
with `state_dict`, which get the saved structure whatever theirs is; `None` and containers of plain values, which take
whatever was saved at or below their name, tensors included (as fresh CPU tensors).

Optimizers and objects with `state_dict` are of the class that was saved, by its name; `partial` lets another one in.

Names that are one tensor in the template need only one of them in the checkpoint; if it has several that are not tied
there (pipeline stages that each saved a copy), one fills it, and the pipelines compare the others with that one before
(`RestoreBinding.apart`).

What is done once all tensors are filled: see `restore_apply`.

Invariants: binding reads the template and allocates; only the destinations (by the pipelines) and `apply` change it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from safehold.errors import StateMismatchError
from safehold.format.names import split
from safehold.state import param_groups
from safehold.state.class_names import class_of
from safehold.state.collect import tie_key
from safehold.state.leaves import Destination, RestoreBinding, RestoreOptions, SavedApart, SavedIndex, TensorLeaf
from safehold.state.protocols import NamedObject, Path, TensorBinding
from safehold.state.rank_values import RankValues
from safehold.state.rebuild import Finish, Rebuild
from safehold.state.restore_apply import Applying
from safehold.state.saved_tree import RenameTable, SavedNode, SavedTree, make_rename
from safehold.state.statefuls import is_stateful, state_dict_of
from safehold.state.tensor_likes import bind_tensor, can_be_filled, fresh_tensor
from safehold.state.tree import ObjectNode, OptimizerNode, PerRankNode, StatefulNode, TensorNode, Tree, fqn, walk
from safehold.state.values import from_plain
from safehold.types import ObjectSpec, TensorSpec

_MAX_LISTED = 20


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
        ConfigurationError: The state or the options are not as they should be, or an entry of `rename` speaks of nothing.
    """
    options = options or RestoreOptions()
    tree = walk(state, ask_statefuls=False)
    rename = make_rename(options.rename)
    saved_tree = SavedTree(saved, rename, [node.path for node in tree.optimizers])
    if isinstance(rename, RenameTable):
        rename.check((*saved.tensors, *saved.objects), state)
    binder = _Binder(tree, saved_tree, saved, rank, world_size, options, rename)
    binder.bind()
    binding = binder.result()
    if random_states:
        binding.object_names += saved_tree.random_names
    elif saved_tree.random_names:
        binding.left_out += [f"{name}: random states are not asked for" for name in saved_tree.random_names]
        binding.apply_random = lambda values: None
    return binding


def mismatch_error(
    missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[str], unused: Sequence[str] = ()
) -> StateMismatchError | None:
    """Return one error that lists everything that does not fit, None if all fits; what is `unused` may be why."""
    if not (missing or unexpected or mismatched):
        return None
    lines = ["checkpoint and state do not fit, nothing was overwritten:"]
    lines += _listed("missing in the checkpoint", missing)
    lines += _listed("in the checkpoint, not in this state", unexpected)
    lines += _listed("different", mismatched)
    lines += _listed("of no use", unused)
    return StateMismatchError(
        "\n  ".join(lines),
        hint="rename= says what is called otherwise, partial= what may be absent or of another class, cast=True allows "
        "other dtypes; shapes have to agree",
    )


def _listed(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    more = [f"  ... and {len(entries) - _MAX_LISTED} more"] if len(entries) > _MAX_LISTED else []
    return [f"{title} ({len(entries)}):", *(f"  {entry}" for entry in entries[:_MAX_LISTED]), *more]


class _Binder:
    def __init__(
        self,
        tree: Tree,
        saved: SavedTree,
        index: SavedIndex,
        rank: int,
        world_size: int,
        options: RestoreOptions,
        rename: Callable[[Path], Path],
    ) -> None:
        self._tree, self._saved, self._rank, self._options = tree, saved, rank, options
        self._index, self._rename = index, rename
        self._tensors: list[tuple[Path, TensorBinding, SavedNode | None]] = []
        self._fetched: dict[str, None] = {}
        self._claimed: set[int] = set()
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        self._destinations: list[Destination] = []
        self._apart: list[SavedApart] = []
        self._classes: list[tuple[str, str, str]] = []
        self._owners: dict[str, str] = {}
        self._applying = Applying(tree=tree, rank=rank, world_size=world_size, rename_groups=self._renamed_groups)

    def bind(self) -> None:
        """Look up every leaf of the template."""
        for tensor in self._tree.tensors:
            self._bind_tensor(tensor)
        self._bind_frameworks()
        for node in self._tree.objects:
            self._bind_object(node)
        for holder in self._tree.per_rank:
            self._bind_per_rank(holder)
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
        may_differ = self._options.may_differ
        left_out = [f"{name}: not in the checkpoint" for name in missing if may_differ(name)]
        left_out += [f"{name}: not in this state" for name in unexpected if may_differ(name)]
        return RestoreBinding(
            destinations=sorted(self._destinations, key=lambda entry: entry.leaf.spec.name),
            apart=self._apart,
            object_names=sorted(self._fetched),
            missing=[name for name in missing if not may_differ(name)],
            unexpected=[name for name in unexpected if not may_differ(name)],
            mismatched=sorted(self._mismatched),
            left_out=left_out,
            unused=[*self._done_renames(), *self._unmatched(missing)],
            check=self._check,
            apply=self._applying.apply,
            apply_random=self._applying.apply_random,
        )

    def _unmatched(self, missing: Sequence[str]) -> list[str]:
        patterns = self._options.patterns
        if not patterns:
            return []
        tree = self._tree
        paths = [path for path, _, _ in self._tensors]
        paths += [node.path for node in tree.objects]
        paths += [node.path for node in tree.per_rank]
        paths += [node.path for node in tree.statefuls]
        paths += [node.path for node in tree.optimizers]
        names = {*self._index.tensors, *self._index.objects, *missing, *map(fqn, paths)}
        useless = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        return [
            f"partial= {pattern!r}: matches no leaf of this state, and none of the checkpoint" for pattern in useless
        ]

    def _done_renames(self) -> list[str]:
        if not isinstance(self._rename, RenameTable):
            return []
        return [f"rename= {old!r}: not in the checkpoint, which has its new name already" for old in self._rename.done]

    # Tensors.

    def _bind_tensor(self, node: TensorNode) -> None:
        name = fqn(node.path)
        binding = bind_tensor(node.value, name=name, rank=self._rank)
        if not can_be_filled(node.value):
            fresh = fresh_tensor(binding.dtype, binding.shape, binding.kind)
            binding = bind_tensor(fresh, name=name, rank=self._rank)
            self._applying.replaced[id(node)] = fresh
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
                    sources.setdefault(self._index.aliases.get(saved, saved), (name, binding, node.tensor))
            self._fill(list(sources.values()))

    def _fill(self, sources: list[tuple[str, TensorBinding, TensorSpec]]) -> None:
        """Make the destination of one memory; what else was saved for it is compared with what fills it."""
        for name, binding, spec in sources[:1]:
            self._destinations.append(Destination(saved=spec, leaf=_leaf(name, binding)))
        for name, binding, spec in sources[1:]:
            first, _, filling = sources[0]
            self._apart.append(SavedApart(names=(first, name), saved=(filling, spec), leaf=_leaf(first, binding)))

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
        self._applying.attach.append(restore.attach)

    def _bind_writes(self, prefix: Path, entries: Sequence[NamedObject]) -> None:
        for entry in entries:
            spec = self._object_end((*prefix, *entry.path), optional=entry.optional)
            if spec is not None:
                self._applying.writes.append((entry, spec.name))
                self._applying.plain.append(spec.name)
                self._owners[spec.name] = fqn(prefix)

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
            self._applying.planned[id(node)] = _fetch(found.object)
            self._applying.plain.append(found.object.name)
        else:
            self._rebuild(node, found, node.value)

    def _bind_per_rank(self, node: PerRankNode) -> None:
        found = self._object_end(node.path, optional=False)
        if found is None:
            return
        self._applying.planned[id(node)] = _fetch(found)
        value = node.holder.value
        if is_stateful(value) and not isinstance(value, type):
            self._compare_class(node.path, value)

    def _compare_class(self, path: Path, value: Any) -> None:
        """Have the class of an object with `state_dict` compared with the saved one, where that was saved."""
        saved = self._saved.class_names.get(path)
        if saved is not None:
            self._fetched[saved] = None
            self._classes.append((fqn(path), saved, class_of(value)))

    def _bind_stateful(self, node: StatefulNode) -> None:
        found = self._saved.find(node.path)
        if found is None:
            self._missing.append(fqn(node.path))
            return
        # Its own tensors say where the restored ones belong. What can be iterated is not asked: a data loader would start
        # its workers to answer.
        asked = any(end.tensor for end in found.ends()) and not hasattr(node.stateful, "__iter__")
        given = state_dict_of(node.stateful, name=fqn(node.path)) if asked else None
        self._compare_class(node.path, node.stateful)
        self._rebuild(node, found, given)

    def _rebuild(self, node: ObjectNode | StatefulNode, found: SavedNode, template: Any) -> None:
        rebuild = Rebuild(self._rank)
        self._applying.planned[id(node)] = rebuild.plan(found, template)
        self._applying.plain += rebuild.objects
        self._claimed |= {id(end) for end in rebuild.ends}
        self._fetched.update(dict.fromkeys(rebuild.objects))
        self._tensors += [(end.path, binding, end) for end, binding in rebuild.tensors]

    def _check(self, values: dict[str, Any]) -> list[str]:
        """Say what does not fit between values and template: classes, parameter groups, what no value can be made of."""
        found = self._applying.check(values)
        for entry, name in self._applying.writes:
            if name not in values or isinstance(values[name], RankValues):
                continue
            value = self._renamed_groups(entry, from_plain(values[name]))
            if entry.check is not None:
                found += [f"{name}: {text}" for text in entry.check(value)]
            if entry.other_class is not None and not self._may_be_another(name, self._owners[name]):
                found += [f"{name}: {text}" for text in entry.other_class(value)]
        for name, saved, here in self._classes:
            if values.get(saved, here) != here and not self._may_be_another(name):
                found.append(f"{name}: saved from the class {values[saved]}, the state has the class {here}")
        return sorted(found)

    def _may_be_another(self, *names: str) -> bool:
        return any(map(self._options.may_differ, names))

    def _renamed_groups(self, entry: NamedObject, value: Any) -> Any:
        """Rename the parameters inside parameter groups as the leaves were."""
        if entry.policy != "groups" or self._options.rename is None:
            return value
        return param_groups.rename(value, lambda name: fqn(self._rename(split(name))))


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
