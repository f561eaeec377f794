"""What a checkpoint has, as a tree of typed paths under the names that the template uses.

Invariants: built once per restore from names only; renaming happens here and nowhere else. A node is an end if a saved
leaf has its path; ends may have nodes below them where ranks saved different things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from safehold.errors import ConfigurationError, ManifestError
from safehold.format.names import Component, display, join, split
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
    """

    __slots__ = ("random_names", "root")

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
        leaves: list[tuple[str, TensorSpec | ObjectSpec]] = [*saved.tensors.items(), *saved.objects.items()]
        for name, leaf in leaves:
            if is_random_name(name):
                self.random_names.append(name)
                continue
            node = self._add(_renamed(_split(name), rename, optimizer_paths))
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

    def _add(self, path: Path) -> SavedNode:
        node = self.root
        for depth, component in enumerate(path):
            below = node.children.get(component)
            if below is None:
                below = node.children[component] = SavedNode(path[: depth + 1])
            node = below
        return node


def make_rename(rename: Mapping[str, str] | Callable[[str], str] | None) -> Rename:
    """Turn the user's `rename` into a function of paths.

    A mapping holds saved names or prefixes of names at component borders; the longest that fits counts, and an empty
    new name takes the prefix away.

    Raises:
        ConfigurationError: A name in the mapping is no name.
    """
    if rename is None:
        return lambda path: path
    if callable(rename):
        return _rename_by_function(rename)
    table = {_checked(old): (_checked(new) if new else ()) for old, new in rename.items()}
    lengths = sorted({len(old) for old in table}, reverse=True)

    def by_table(path: Path) -> Path:
        for length in lengths:
            new = table.get(path[:length]) if length <= len(path) else None
            if new is not None:
                return (*new, *path[length:])
        return path

    return by_table


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
