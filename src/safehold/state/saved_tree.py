"""What a checkpoint has, as a tree of typed paths under the names that the template uses.

Invariants: built once per restore from names only; renaming happens here and nowhere else. A node is an end if a saved
leaf has its path; ends may have nodes below them where ranks saved different things. A table of names of which an
entry speaks of nothing is refused, since that is a slip of the pen and would lose what it meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from safehold.errors import ConfigurationError, ManifestError
from safehold.format.names import Component, display, join, split
from safehold.state.class_names import owner_of
from safehold.state.leaves import SavedIndex
from safehold.state.protocols import Path
from safehold.state.random_states import is_random_name
from safehold.types import ObjectSpec, TensorSpec

Rename = Callable[[Path], Path]


@dataclass(slots=True)
class SavedNode:
    """One path of the checkpoint.

    Attributes:
        path: Under the template's names.
        children: Next component -> node.
        tensor: Spec of the tensor leaf with this path, under its saved name.
        object: Spec of the object leaf with this path, under its saved name.
    """

    path: Path
    children: dict[Component, SavedNode] = field(default_factory=dict)
    tensor: TensorSpec | None = None
    object: ObjectSpec | None = None

    @property
    def is_end(self) -> bool:
        """Whether a leaf has just this path."""
        return self.tensor is not None or self.object is not None

    def ends(self) -> Iterator[SavedNode]:
        """Give every end at or below this node."""
        todo = [self]
        while todo:
            node = todo.pop()
            if node.is_end:
                yield node
            todo.extend(reversed(node.children.values()))


class SavedTree:
    """The index of a checkpoint, renamed.

    Attributes:
        root: Node of the empty path.
        random_names: Names of saved random states, which are never renamed.
        class_names: Path of an object with `state_dict` under the template's name -> name of the leaf that has its class.
    """

    __slots__ = ("class_names", "random_names", "root")

    def __init__(self, saved: SavedIndex, rename: Rename, optimizer_paths: Sequence[Path] = ()) -> None:
        """Build the tree.

        Args:
            saved: The index.
            rename: Applied to the path of every leaf, and below an optimizer's `state` to the parameter's path too.
            optimizer_paths: Where the template has optimizers.

        Raises:
            ManifestError: A saved name is not one that safehold writes.
            ConfigurationError: Renaming gives two leaves one name.
        """
        self.root = SavedNode(())
        self.random_names: list[str] = []
        self.class_names: dict[Path, str] = {}
        leaves: list[tuple[str, TensorSpec | ObjectSpec]] = [*saved.tensors.items(), *saved.objects.items()]
        classes = {owner: name for name in saved.objects if (owner := owner_of(_split(name))) is not None}
        lengths = sorted({len(owner) for owner in classes})
        for name, leaf in leaves:
            path = _split(name)
            if is_random_name(name):
                self.random_names.append(name)
                continue
            if owner_of(path) is not None:
                continue
            node = self._add(_renamed(path, rename, optimizer_paths))
            for length in lengths:
                if (found := classes.get(path[:length])) is not None:
                    self._add_class(found, path[length:], node.path)
            if node.is_end:
                taken = node.tensor or node.object
                assert taken is not None
                raise ConfigurationError(
                    f"renaming turns both {taken.name} and {name} of the checkpoint into {join(node.path)}"
                )
            if isinstance(leaf, TensorSpec):
                node.tensor = TensorSpec(name=name, dtype=leaf.dtype, shape=leaf.shape, kind=leaf.kind)
            else:
                node.object = ObjectSpec(name=name, policy=leaf.policy)

    def find(self, path: Path) -> SavedNode | None:
        """Return the node of a path of the template, None if nothing was saved at or below it."""
        node = self.root
        for component in path:
            below = node.children.get(component)
            if below is None:
                return None
            node = below
        return node

    def _add_class(self, name: str, below: Path, renamed: Path) -> None:
        """Note a class under the name that its object has now, which what was saved below it tells."""
        border = len(renamed) - len(below)
        if border > 0 and renamed[border:] == below:
            self.class_names[renamed[:border]] = name

    def _add(self, path: Path) -> SavedNode:
        node = self.root
        for depth, component in enumerate(path):
            below = node.children.get(component)
            if below is None:
                below = node.children[component] = SavedNode(path[: depth + 1])
            node = below
        return node


class RenameTable:
    """The user's dict of names as a function of paths.

    It holds saved names or prefixes of names at component borders; the longest that fits counts, and an empty new name
    takes the prefix away.

    Attributes:
        done: After `check`: saved names that the checkpoint does not have, since it has the new ones already.

    Raises:
        ConfigurationError: A name in it is no name.
    """

    def __init__(self, rename: Mapping[str, str]) -> None:
        self._table = {_checked(old): (_checked(new) if new else ()) for old, new in rename.items()}
        self._lengths = sorted({len(old) for old in self._table}, reverse=True)
        self._seen: set[Path] = set()
        self.done: list[str] = []
        self._all_lengths = sorted({len(path) for path in (*self._table, *self._table.values())} | {1})

    def __call__(self, path: Path) -> Path:
        """Return the name that a saved leaf (or a parameter in the state of an optimizer) has in the template."""
        self._seen.update(path[:length] for length in self._all_lengths if 0 < length <= len(path))
        for length in self._lengths:
            new = self._table.get(path[:length]) if length <= len(path) else None
            if new is not None:
                return (*new, *path[length:])
        return path

    def check(self, saved: Iterable[str], tops: Iterable[str]) -> None:
        """Refuse entries that speak of nothing, once all leaves were renamed.

        A checkpoint that was saved after an earlier restore has the new names already: an entry whose new name it has
        is not refused, so that the same program can restore both.

        Args:
            saved: All names in the checkpoint, for the hint.
            tops: The keys of the template, which is what an empty new name leaves.

        Raises:
            ConfigurationError: Neither the old nor the new name of an entry is in the checkpoint; names all such.
        """
        left = {(key,) for key in tops}
        unused: list[str] = []
        for old, new in self._table.items():
            if old in self._seen:
                continue
            is_done = new in self._seen if new else left <= self._seen
            (self.done if is_done else unused).append(join(old))
        if not unused:
            return
        known = {join(split(name)[:length]) for name in saved for length in self._lengths}
        close = [match for name in unused for match in difflib.get_close_matches(name, sorted(known), 1)]
        words = ", ".join(display(name, 80) for name in unused)
        raise ConfigurationError(
            f"rename= speaks of what is not in the checkpoint, neither under the old nor under the new name: {words}",
            hint=f"did you mean {', '.join(close)}?" if close else "'safehold show RUN STEP --leaves' lists the names",
        )


def make_rename(rename: Mapping[str, str] | Callable[[str], str] | None) -> Rename:
    """Turn the user's `rename` into a function of paths; a dict becomes a `RenameTable`.

    Raises:
        ConfigurationError: A name in the mapping is no name.
    """
    if rename is None:
        return lambda path: path
    return _rename_by_function(rename) if callable(rename) else RenameTable(rename)


def _rename_by_function(rename: Callable[[str], str]) -> Rename:
    def by_function(path: Path) -> Path:
        new = rename(join(path))
        if not isinstance(new, str):
            raise ConfigurationError(f"rename returned {type(new).__name__}, not a name, for {join(path)}")
        return _checked(new)

    return by_function


def _renamed(path: Path, rename: Rename, optimizer_paths: Sequence[Path]) -> Path:
    path = rename(path)
    if not path:
        raise ConfigurationError("renaming leaves a saved leaf without a name")
    for prefix in optimizer_paths:
        start = len(prefix) + 1
        if path[: start - 1] == prefix and path[start - 1 : start] == ("state",) and len(path) > start + 1:
            return (*path[:start], *rename(path[start:-1]), path[-1])
    return path


def _split(name: str) -> Path:
    try:
        return split(name)
    except ValueError as exc:
        raise ManifestError(f"the checkpoint has a leaf with the impossible name {display(name, 80)}") from exc


def _checked(name: str) -> Path:
    try:
        return split(name)
    except ValueError as exc:
        raise ConfigurationError(f"rename: {display(str(name), 80)} is not the name of a leaf") from exc
