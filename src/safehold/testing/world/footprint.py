"""How much an agent keeps: elements of all containers below it, as far as they are the agent's own."""

from __future__ import annotations

from collections import deque
from typing import Any

OURS = ("safehold.agent.", "safehold.policy.", "safehold.testing.world.machine")


def footprint(root: object) -> int:
    """Return the number of elements in containers that `root` holds, directly or through objects of the agent."""
    seen: set[int] = set()
    todo: list[Any] = [root]
    count = 0
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            count += len(found)
            todo.extend(found.values())
        elif isinstance(found, list | set | frozenset | tuple | deque):
            count += len(found)
            todo.extend(found)
        elif type(found).__module__.startswith(OURS):
            todo.extend(vars(found).values() if hasattr(found, "__dict__") else ())
            for kind in type(found).__mro__:
                todo.extend(getattr(found, name, None) for name in getattr(kind, "__slots__", ()))
    return count
