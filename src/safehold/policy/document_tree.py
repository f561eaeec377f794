"""How the documents of a checkpoint go from the lead's node to all others in a restore: down a tree of nodes. Decisions only.

Invariants: the root is the lead's node; a node has at most `DEGREE` children, so none gives away more than `DEGREE` times what there is;
all nodes see the same tree, without a word. Where each step waits for the one before, 4 is as fast as 2, and the last of 1,024 nodes is
5 steps away, not 10.
"""

from __future__ import annotations

from typing import Final

DEGREE: Final = 4


def _place(node: int, root: int) -> int:
    return 0 if node == root else node + 1 if node < root else node


def _node(place: int, root: int) -> int:
    return root if place == 0 else place - 1 if place <= root else place


def above(node: int, root: int) -> list[int]:
    """Return the nodes between a node and the root, the nearest first, the root last; none for the root."""
    place, found = _place(node, root), list[int]()
    while place:
        place = (place - 1) // DEGREE
        found.append(_node(place, root))
    return found


def below(node: int, root: int, num_nodes: int) -> list[int]:
    """Return the nodes that take from this one."""
    first = DEGREE * _place(node, root) + 1
    return [_node(place, root) for place in range(first, min(first + DEGREE, num_nodes))]
