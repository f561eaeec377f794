"""Who keeps copies of whose memory saves, and what host memory all of it takes.

Partners are those of `policy.placement` under the scheme of whole copies: nodes of other failure domains as far as there are any.

Invariants: pure; every node finds the same partners by itself. What is needed is counted before the first save, in full: a save never finds
out half way that the memory is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safehold.policy.placement import MAX_COPIES, Scheme, place

GENERATIONS = 2
"""Arenas of a rank, and copies held for a node, where memory is a tier: the last good one, and the one that is being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """Who keeps whose copies.

    Attributes:
        of: Node -> the nodes that keep copies of its share.
        warnings: What somebody should know, one sentence each.
    """

    of: Mapping[int, tuple[int, ...]]
    warnings: tuple[str, ...] = ()

    def wards(self, node: int) -> tuple[int, ...]:
        """Return the nodes whose copies a node keeps."""
        return tuple(sorted(ward for ward, keepers in self.of.items() if node in keepers))


def partners(num_nodes: int, domains: Sequence[str], copies: int) -> Partners:
    """Choose the partners of all nodes.

    Args:
        num_nodes: How many nodes there are.
        domains: The failure domain of each, empty where it was not told; may be shorter.
        copies: How many whole copies other nodes keep; 0: none.

    Raises:
        ConfigurationError: A domain is no name.
    """
    if num_nodes < 2 or copies < 1:
        return Partners(of=dict.fromkeys(range(num_nodes), ()))
    named = {node: domain for node, domain in enumerate(domains[:num_nodes]) if domain}
    layout = place(Scheme(kind="copies", num_data=1, num_parity=min(copies, MAX_COPIES)), range(num_nodes), named)
    found: dict[int, tuple[int, ...]] = {}
    for group in layout.sets:
        for position, node in enumerate(group.members):
            stripe = group.stripe_of_chunk(position, 0)
            rows = range(group.num_parity)
            found[node] = tuple(group.members[group.parity_position(stripe, row)] for row in rows)
    return Partners(of=found, warnings=layout.warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The host memory of one node that memory saves take.

    Attributes:
        own_bytes: Arenas of its ranks, one generation.
        num_ranks: How many ranks those are.
        wards: Name of each node whose copies are kept -> bytes of one copy.
    """

    own_bytes: int
    num_ranks: int
    wards: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """All of it, all generations."""
        return GENERATIONS * (self.own_bytes + sum(self.wards.values()))

    def words(self) -> str:
        """Return the sums, for people."""
        text = f"{GENERATIONS} x {self.own_bytes:,} bytes for {self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        for name, nbytes in sorted(self.wards.items()):
            text += f" + {GENERATIONS} x {nbytes:,} for copies of node {name}"
        return f"{text} = {self.total_bytes:,} bytes"
