"""Who takes part in a start of the job."""

from __future__ import annotations

import msgspec


class World(msgspec.Struct, frozen=True):
    """Who takes part: filled from the exchange at start-up, the same on all ranks.

    Attributes:
        token: 128 random bits that name this start of the job.
        world_size: Number of ranks.
        node_of: Index of the node of each rank; nodes count from 0 in order of their lowest rank.
        node_names: Host name of each node.
        domains: Failure domain of each node; empty where none is named.
    """

    token: str
    world_size: int
    node_of: list[int]
    node_names: list[str]
    domains: list[str] = []

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks on a node."""
        return [rank for rank, at in enumerate(self.node_of) if at == node]

    def ranks_by_node(self) -> list[list[int]]:
        """Return the ranks on each node; one look at all ranks, where there are thousands."""
        found: list[list[int]] = [[] for _ in self.node_names]
        for rank, node in enumerate(self.node_of):
            found[node].append(rank)
        return found
