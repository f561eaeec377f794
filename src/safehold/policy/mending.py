"""What is to be done about a restored checkpoint that has lost nodes or redundancy: who gives back whose files, who makes which share.

Invariants: pure. Nothing is given back unless every lost node has a node that takes its place: one that has nothing of the checkpoint.
Sets that have redundancy stay as they are; only nodes that are in none get new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from safehold.policy.placement import RedundancySet, Scheme, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """What is to be done.

    Attributes:
        rebuilds: Lost node of the checkpoint -> index of the node that takes its place.
        shares: (node of the checkpoint, its set) for each that lacks its share, the lost ones included.
        at: Node of the checkpoint -> index of the node where its files are, or will be.
        left: Lost nodes that nobody takes the place of; then nothing else is done.
    """

    rebuilds: dict[int, int]
    shares: tuple[tuple[int, RedundancySet], ...]
    at: dict[int, int]
    left: tuple[int, ...] = ()


def mend(
    scheme: Scheme,
    nodes: Sequence[int],
    saved_names: Sequence[str],
    at: Mapping[int, str],
    sets: Sequence[RedundancySet],
    protected: Sequence[int],
    names: Sequence[str],
    domains: Mapping[int, str],
) -> Mending:
    """Decide.

    Args:
        scheme: What the job asks for.
        nodes: The nodes of the checkpoint.
        saved_names: Their names, by node.
        at: Node of the checkpoint -> name of the node where its files are; who is not in it is lost.
        sets: The sets that have redundancy.
        protected: The nodes of the checkpoint that have made their share.
        names: The names of the job's nodes.
        domains: Index of a node of the job -> its failure domain.
    """
    index = {name: number for number, name in enumerate(names)}
    there = {node: index[at[node]] for node in nodes if at.get(node) in index}
    lost = [node for node in nodes if node not in there]
    free = [number for number in range(len(names)) if number not in set(there.values())]
    if len(free) < len(lost):
        return Mending(rebuilds={}, shares=(), at=there, left=tuple(lost))
    rebuilds: dict[int, int] = {}
    same_name = {node: index.get(saved_names[node], -1) for node in lost if node < len(saved_names)}
    for wanted in (same_name, {node: node for node in lost}):  # the one of the same name, or in the same place
        for node in lost:
            if node not in rebuilds and wanted.get(node) in free:
                rebuilds[node] = wanted[node]
                free.remove(wanted[node])
    rebuilds |= dict(zip([node for node in lost if node not in rebuilds], free, strict=False))
    where = there | rebuilds
    return Mending(rebuilds=rebuilds, shares=_shares(scheme, sets, protected, where, domains), at=where)


def _shares(
    scheme: Scheme,
    sets: Sequence[RedundancySet],
    protected: Sequence[int],
    where: Mapping[int, int],
    domains: Mapping[int, str],
) -> tuple[tuple[int, RedundancySet], ...]:
    set_of = {node: one for one in sets for node in one.members}
    bare = [node for node in where if node not in set_of]
    if bare:
        layout = place(scheme, bare, {node: domains[where[node]] for node in bare if where[node] in domains})
        set_of |= {node: one for one in layout.sets for node in one.members}
    return tuple((node, set_of[node]) for node in sorted(where) if node in set_of and node not in protected)
