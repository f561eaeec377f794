"""The classes of objects with `state_dict`, kept beside their state, so that another class is not given it silently.

Each is one object under the reserved root, named after the object that it is of (`__safehold__.class.schedule`); its
value is the class's own name, without module, so that code may move: `StepLR`, and for schedulers that are made of
others `SequentialLR(LinearLR, CosineAnnealingLR)`. Checkpoints without them load as ever.

Invariants: no framework is imported; nothing is asked of the objects but their class and the schedulers inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from safehold.state.protocols import Path
from safehold.state.statefuls import is_stateful
from safehold.state.tree import RESERVED_ROOT, Tree, fqn

_ROOT: Final = (RESERVED_ROOT, "class")
_MAX_NESTED: Final = 8


def class_of(value: Any, depth: int = 0) -> str:
    """Return what is compared: the class's name, with those of the schedulers that a scheduler is made of."""
    name = type(value).__name__
    inner = getattr(value, "_schedulers", None)
    if type(inner) is not list or not inner or depth >= _MAX_NESTED or not all(map(is_stateful, inner)):
        return name
    return f"{name}({', '.join(class_of(part, depth + 1) for part in inner)})"


def classes_in(tree: Tree) -> dict[str, str]:
    """Return name of the object leaf -> class, for every object with `state_dict` in a walked state."""
    found: dict[Path, set[str]] = {}
    for path, value in stateful_values(tree):
        found.setdefault(path, set()).add(class_of(value))
    # Parts of one name that are of several classes have none that could be compared.
    return {fqn((*_ROOT, *path)): min(classes) for path, classes in found.items() if len(classes) == 1}


def stateful_values(tree: Tree) -> Iterable[tuple[Path, Any]]:
    """Give (path, object) of everything that has its own `state_dict` and is neither module nor optimizer."""
    for node in tree.statefuls:
        yield node.path, node.stateful
    for holder in tree.per_rank:
        value = holder.holder.value
        if is_stateful(value) and not isinstance(value, type):
            yield holder.path, value


def owner_of(path: Path) -> Path | None:
    """Return the path of the object whose class the leaf at a path holds; None if it holds no class."""
    return path[2:] if path[:2] == _ROOT and len(path) > 2 else None
