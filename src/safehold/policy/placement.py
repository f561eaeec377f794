"""Who keeps redundancy for whom: schemes, redundancy sets over failure domains, and what survives the loss of nodes.

A set has N members in a ring and N stripes. Stripe s consists of `num_parity` + `num_data` symbols at consecutive members: parity row
p at position s + p, data symbol c at position s + num_parity + c (modulo N). Every member's data are cut into `num_data` chunks; its
chunk c is data symbol c of one stripe, and it holds every parity row of one stripe each. So each node holds its own data and
num_parity / num_data of parity beside it, no two symbols of a stripe lie on one node, and since any `num_data` symbols of a stripe
give back the others, any `num_parity` nodes of a set may be lost. Copies are the case of one data symbol.

Sources: the rotation is that of SCR's XOR and RS schemes (https://scr.readthedocs.io, "Redundancy schemes"), the algebra J. S. Plank,
"A Tutorial on Reed-Solomon Coding for Fault-Tolerance in RAID-like Systems" (1997, with the correction of 2003).

Invariants: pure, and the same input in any order gives the same layout; every node is in exactly one set, or is named as unprotected.
Must not live here: bytes, files, the algebra itself (`host.parity`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from safehold.errors import ConfigurationError
from safehold.format.names import numbered

SchemeKind = Literal["copies", "xor", "rs"]

MAX_COPIES: Final = 3
MAX_WIDTH: Final = 64
"""Most symbols of a stripe; more would make one rebuild read from too many nodes."""

_XOR = re.compile(r"xor:([0-9]{1,4})")
_RS = re.compile(r"rs:([0-9]{1,4})\+([0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What the user asked for.

    Attributes:
        kind: `copies`: whole copies on other nodes; `xor`: one parity; `rs`: Reed-Solomon.
        num_data: Data symbols of a stripe; 1 for copies.
        num_parity: Parity symbols of a stripe, or copies beside the original: so many nodes of a set may be lost.
    """

    kind: SchemeKind
    num_data: int
    num_parity: int

    @property
    def width(self) -> int:
        """Symbols of a stripe, and the fewest nodes that a full set has."""
        return self.num_data + self.num_parity

    def __str__(self) -> str:
        if self.kind == "copies":
            return f"copies={self.num_parity}"
        return f"xor:{self.width}" if self.kind == "xor" else f"rs:{self.num_data}+{self.num_parity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancySet:
    """A group of nodes that keep redundancy for each other; see the head of this module for where what lies.

    Attributes:
        kind: See `Scheme`.
        num_data: See `Scheme`; smaller than asked for where there are too few nodes.
        num_parity: See `Scheme`.
        members: The nodes in the order of the ring; at least `num_data + num_parity`.
    """

    kind: SchemeKind
    num_data: int
    num_parity: int
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_data < 1 or self.num_parity < 1 or len(set(self.members)) != len(self.members):
            raise ValueError(f"{self!r} is no redundancy set")
        if len(self.members) < self.num_data + self.num_parity:
            raise ValueError(f"{self!r} has more symbols in a stripe than members")
        if (self.kind == "copies" and self.num_data != 1) or (self.kind == "xor" and self.num_parity != 1):
            raise ValueError(f"{self!r} is of another kind than it says")

    def __str__(self) -> str:
        return str(Scheme(kind=self.kind, num_data=self.num_data, num_parity=self.num_parity))

    def data_position(self, stripe: int, chunk: int) -> int:
        """Return the position in the ring of a stripe's data symbol."""
        return (stripe + self.num_parity + chunk) % len(self.members)

    def parity_position(self, stripe: int, row: int) -> int:
        """Return the position in the ring that holds a parity row of a stripe."""
        return (stripe + row) % len(self.members)

    def stripe_of_chunk(self, position: int, chunk: int) -> int:
        """Return the stripe that a member's chunk belongs to."""
        return (position - self.num_parity - chunk) % len(self.members)

    def stripe_of_row(self, position: int, row: int) -> int:
        """Return the stripe whose parity row a member holds."""
        return (position - row) % len(self.members)

    def survives(self, lost: Collection[int]) -> bool:
        """Whether the data of all members can be had after these nodes are lost."""
        gone = [node in lost for node in self.members]
        for stripe in range(len(self.members)):
            data = sum(gone[self.data_position(stripe, chunk)] for chunk in range(self.num_data))
            parity = sum(gone[self.parity_position(stripe, row)] for row in range(self.num_parity))
            if data and data + parity > self.num_parity:
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which nodes keep redundancy for which.

    Attributes:
        scheme: What was asked for.
        sets: The redundancy sets.
        unprotected: Nodes that are in none, since there is no other node.
        domains: Node -> its failure domain, as given.
        warnings: What somebody should know, one sentence each: what could not be as asked, and what that costs.
    """

    scheme: Scheme
    sets: tuple[RedundancySet, ...]
    unprotected: tuple[int, ...]
    domains: Mapping[int, str]
    warnings: tuple[str, ...]

    def set_of(self, node: int) -> RedundancySet | None:
        """Return the set that a node is in; None if nothing protects it."""
        return next((one for one in self.sets if node in one.members), None)


def parse_scheme(*, copies: int | str | None = None, parity: str | None = None) -> Scheme | None:
    """Read the user's words.

    Args:
        copies: How many whole copies other nodes keep: 1, 2 or 3.
        parity: `xor:N`, any 1 lost of sets of N nodes; or `rs:K+M`, any M lost of sets of K + M nodes.

    Returns:
        The scheme; None if neither is given.

    Raises:
        ConfigurationError: The words mean nothing, or both are given.
    """
    if copies is None and parity is None:
        return None
    if copies is not None and parity is not None:
        raise ConfigurationError(
            f"copies={copies} and parity={parity!r} exclude each other",
            hint="copies cost most and are quickest to read back, parity costs a fraction: choose one",
        )
    return _copies(copies) if copies is not None else _parity(str(parity))


def _copies(copies: int | str) -> Scheme:
    text = str(copies).strip()
    if isinstance(copies, bool) or not isinstance(copies, int | str) or text not in ("1", "2", "3"):
        raise ConfigurationError(
            f"copies={copies!r} is no number of copies between 1 and {MAX_COPIES}",
            hint="it counts copies on other nodes, beside the original; leave it out for none",
        )
    return Scheme(kind="copies", num_data=1, num_parity=int(text))


def _parity(words: str) -> Scheme:
    text = words.strip().lower()
    if found := _XOR.fullmatch(text):
        scheme = Scheme(kind="xor", num_data=int(found[1]) - 1, num_parity=1)
    elif found := _RS.fullmatch(text):
        scheme = Scheme(kind="rs", num_data=int(found[1]), num_parity=int(found[2]))
    else:
        hint = "write xor:4 (any 1 lost of 4 nodes) or rs:4+2 (any 2 lost of 6)"
        raise ConfigurationError(f"parity={words!r} is no scheme", hint=hint)
    if scheme.num_parity < 1 or scheme.num_data < 1 or scheme.width > MAX_WIDTH:
        text = (
            f"parity={words!r} needs at least one node's share of data and one of parity, and {MAX_WIDTH} nodes at most"
        )
        raise ConfigurationError(text, hint="xor:4 and rs:4+2 are usual")
    if scheme.num_data == 1:
        many = min(scheme.num_parity, MAX_COPIES)
        text = f"parity={words!r} has one data node for each set, which is as dear as copies and slower"
        raise ConfigurationError(text, hint=f"use copies={many}, or more data nodes")
    return scheme


def place(scheme: Scheme, nodes: Iterable[int], domains: Mapping[int, str] | None = None) -> Layout:
    """Put nodes into redundancy sets.

    The nodes are listed domain by domain and dealt to the sets one by one. So sizes of sets differ by one at most,
    and each set has as few nodes of each domain, at each level of nesting, as any way of dealing them could give.

    Args:
        scheme: What is asked for. Sets have at least `scheme.width` nodes; what is left over is spread over them.
        nodes: All nodes.
        domains: Node -> its failure domain, names from the largest to the smallest joined by `/` (`room-1/rack-7`). A node that has
            none is one by itself, as all are by default.

    Raises:
        ConfigurationError: A domain is no name, or one of a node that is not there.
        ValueError: A node is there twice.
    """
    there = sorted(nodes)
    if len(set(there)) != len(there):
        raise ValueError("a node is there twice")
    named = _check_domains(domains or {}, there)
    if len(there) < 2:
        lone = (
            f"node {there[0]} is the only one: its checkpoints are lost with it, whatever {scheme} says"
            if there
            else ""
        )
        return Layout(scheme=scheme, sets=(), unprotected=tuple(there), domains=named, warnings=(lone,) if lone else ())
    actual, notes = _fit(scheme, len(there))
    tree = {node: tuple(named[node].split("/")) if node in named else () for node in there}
    order = _by_domain(there, tree, 0)
    num_sets = max(1, len(there) // actual.width)
    sets = tuple(
        RedundancySet(
            kind=actual.kind,
            num_data=actual.num_data,
            num_parity=actual.num_parity,
            members=_ring(order[first::num_sets], tree, actual.width),
        )
        for first in range(num_sets)
    )
    return Layout(
        scheme=scheme, sets=sets, unprotected=(), domains=named, warnings=(*notes, *_domain_warnings(sets, named))
    )


def survives(layout: Layout, lost: Collection[int]) -> bool:
    """Whether the data of all nodes, the lost ones included, can still be had after `lost` are gone with all they hold."""
    gone = set(lost)
    return not gone & set(layout.unprotected) and all(one.survives(gone) for one in layout.sets)


def overhead(layout: Layout) -> dict[int, Fraction]:
    """Return for each node the bytes of redundancy it holds, as a share of the largest member's own data of its set.

    Nodes of one set hold redundancy of nearly the same size, whatever their own. It lies where the checkpoints lie: on flash, or in
    host memory. `policy.stripes` counts bytes exactly.
    """
    shares = {node: Fraction(one.num_parity, one.num_data) for one in layout.sets for node in one.members}
    return shares | {node: Fraction(0) for node in layout.unprotected}


def _check_domains(domains: Mapping[int, str], nodes: Collection[int]) -> dict[int, str]:
    for node, name in domains.items():
        if node not in nodes:
            raise ConfigurationError(f"there is a failure domain for node {node}, and no such node", node=str(node))
        if not isinstance(name, str) or not name or any(not part.strip() for part in name.split("/")):
            text = f"{name!r} is no failure domain"
            hint = "names from the largest to the smallest, joined by '/': room-1/rack-7"
            raise ConfigurationError(text, node=str(node), hint=hint)
    return dict(sorted(domains.items()))


def _fit(scheme: Scheme, num_nodes: int) -> tuple[Scheme, list[str]]:
    """Return the scheme that so many nodes can have, and say aloud where it is not the one that was asked for."""
    if num_nodes >= scheme.width:
        return scheme, []
    asked = f"{scheme} needs {scheme.width} nodes and there are {num_nodes}"
    num_parity = min(scheme.num_parity, num_nodes - 1)
    num_data = num_nodes - num_parity
    if num_data > 1:
        actual = Scheme(kind=scheme.kind, num_data=num_data, num_parity=num_parity)
    else:
        actual = Scheme(kind="copies", num_data=1, num_parity=num_parity)
    before, now = _percent(scheme), _percent(actual)
    cost = f"any {actual.num_parity} of them may be lost, at {now} % of redundancy instead of {before} %"
    return actual, [f"{asked}: they get {actual} instead ({cost})"]


def _percent(scheme: Scheme) -> int:
    return round(100 * scheme.num_parity / scheme.num_data)


def _by_domain(nodes: Sequence[int], tree: Mapping[int, tuple[str, ...]], level: int) -> list[int]:
    """List nodes so that those of a domain, at each level, stand together."""
    groups: dict[tuple[str, int], list[int]] = {}
    for node in nodes:
        names = tree[node]
        key = (names[level], -1) if level < len(names) else ("", node)
        groups.setdefault(key, []).append(node)
    order = []
    for (_, lone), members in sorted(groups.items()):
        order += members if lone >= 0 else _by_domain(members, tree, level + 1)
    return order


def _ring(members: Sequence[int], tree: Mapping[int, tuple[str, ...]], width: int) -> tuple[int, ...]:
    """Order a set so that members of one domain do not share a stripe, where that can be: consecutive ones do."""
    left, ring = list(members), list[int]()
    while left:
        near = ring[-(width - 1) :]
        counts = {node: sum(_common(tree[node], tree[other]) for other in left) for node in left}
        best = min(
            left, key=lambda node: (sum(_common(tree[node], tree[other]) for other in near), -counts[node], node)
        )
        left.remove(best)
        ring.append(best)
    return tuple(ring)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many levels of domains two nodes share."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _domain_warnings(sets: Sequence[RedundancySet], domains: Mapping[int, str]) -> list[str]:
    """Name the domains that cannot be lost as a whole, and what that costs."""
    members: dict[str, set[int]] = {}
    for node, name in domains.items():
        parts = name.split("/")
        for level in range(1, len(parts) + 1):
            members.setdefault("/".join(parts[:level]), set()).add(node)
    found = []
    for name, nodes in sorted(members.items()):
        bad = [one for one in sets if len(nodes) > 1 and not one.survives(nodes)]
        if bad:
            most = max(len(nodes.intersection(one.members)) for one in bad)
            lost = sorted(nodes.intersection(node for one in bad for node in one.members))
            found.append(
                f"losing {name} would lose data of {numbered('node', lost, 8)}: it has {most} nodes of one redundancy set, of "
                f"which any {bad[0].num_parity} may be lost; more domains or more parity would protect against it"
            )
    return found
