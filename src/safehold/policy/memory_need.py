"""Who keeps copies or parity of whose memory saves, and what host memory all of it takes.

Partners are those of `policy.placement` under the scheme of whole copies: nodes of other failure domains as far as there are any. With
parity they are the redundancy sets of that page, and no node has a whole copy of another's share.

Invariants: pure; every node finds the same partners by itself. What is needed is counted before the first save, in full: a save never finds
out half way that the memory is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safehold.policy.memory_parity import redundancy_bytes
from safehold.policy.placement import MAX_COPIES, RedundancySet, Scheme, parse_scheme, place

GENERATIONS = 2
"""Arenas of a rank, and copies held for a node, where memory is a tier: the last good one, and the one that is being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """Who keeps redundancy for whom.

    Attributes:
        of: Node -> the nodes that keep copies of its share.
        sets: With parity: the redundancy sets.
        warnings: What somebody should know, one sentence each.
    """

    of: Mapping[int, tuple[int, ...]]
    warnings: tuple[str, ...] = ()
    sets: tuple[RedundancySet, ...] = ()

    def set_of(self, node: int) -> RedundancySet | None:
        """Return the redundancy set of a node; None with copies, or where nothing protects it."""
        return next((one for one in self.sets if node in one.members), None)

    def listeners(self, node: int) -> tuple[int, ...]:
        """Return the nodes whose memory depends on how much a node saves."""
        of = self.set_of(node)
        return self.of.get(node, ()) if of is None else tuple(other for other in of.members if other != node)

    def speakers(self, node: int) -> tuple[int, ...]:
        """Return the nodes that tell a node how much they save: the same, seen from the other side."""
        return self.wards(node) if self.set_of(node) is None else self.listeners(node)

    def wards(self, node: int) -> tuple[int, ...]:
        """Return the nodes whose copies a node keeps."""
        return tuple(sorted(ward for ward, keepers in self.of.items() if node in keepers))


def partners(num_nodes: int, domains: Sequence[str], copies: int, parity: str = "") -> Partners:
    """Choose the partners, or the redundancy sets, of all nodes.

    Args:
        num_nodes: How many nodes there are.
        domains: The failure domain of each, empty where it was not told; may be shorter.
        copies: How many whole copies other nodes keep; 0: none.
        parity: In the place of copies, such as `xor:4`; empty: copies.

    Raises:
        ConfigurationError: A domain is no name, or `parity` no scheme.
    """
    scheme = parse_scheme(parity=parity) if parity else None
    if scheme is not None:
        named = {node: domain for node, domain in enumerate(domains[:num_nodes]) if domain}
        layout = place(scheme, range(num_nodes), named)
        return Partners(of=dict.fromkeys(range(num_nodes), ()), warnings=layout.warnings, sets=layout.sets)
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
        wards: Name of each node whose copies are kept -> bytes of one copy; with `of`, of each other member -> bytes of its data.
        of: With parity: the redundancy set.
        padded_bytes: With parity: bytes of this node's data in the stripes.
    """

    own_bytes: int
    num_ranks: int
    wards: Mapping[str, int] = field(default_factory=dict)
    of: RedundancySet | None = None
    padded_bytes: int = 0

    @property
    def parity_bytes(self) -> int:
        """Parity that this node holds, of one generation."""
        if self.of is None:
            return 0
        return redundancy_bytes(self.of, max([self.padded_bytes, *self.wards.values()]))

    @property
    def total_bytes(self) -> int:
        """All of it, all generations."""
        beside = self.parity_bytes if self.of is not None else sum(self.wards.values())
        return GENERATIONS * (self.own_bytes + beside)

    def words(self) -> str:
        """Return the sums, for people."""
        text = f"{GENERATIONS} x {self.own_bytes:,} bytes for {self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        if self.of is not None:
            names = ", ".join(sorted(self.wards))
            text += f" + {GENERATIONS} x {self.parity_bytes:,} of parity for a redundancy set with {names}"
            return f"{text} = {self.total_bytes:,} bytes"
        for name, nbytes in sorted(self.wards.items()):
            text += f" + {GENERATIONS} x {nbytes:,} for copies of node {name}"
        return f"{text} = {self.total_bytes:,} bytes"
