"""Which ranks hold a plain tensor that nobody declared: settled once by the lead, from what the ranks say they have.

Invariants: a leaf has one group; the group is exactly the ranks that named the leaf. Equal input gives an equal
settlement, so that all agents can hand out the same one. A rank whose leaf is not in the settlement, or that is not
in the leaf's group, is not settled and writes the leaf whole. No comparison of values here (see `compare`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

from safehold.errors import StateMismatchError
from safehold.policy.spans import describe, to_runs
from safehold.types import Kind, TensorSpec

LeafKey: TypeAlias = TensorSpec

MAX_RANKS = 1 << 20
MAX_LEAVES = 1 << 24
MAX_NDIM = 64
MAX_MEMBERS = 1 << 24
"""Most ranks of all groups together: bounds what reading a settlement allocates."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """Who holds the undeclared leaves.

    Attributes:
        groups: Distinct sets of ranks, each sorted.
        group_of: Leaf -> index into `groups`.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    group_of: dict[LeafKey, int] = field(default_factory=dict)

    def holders(self, leaf: LeafKey, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that hold `leaf`, or None if it is not settled for `rank`."""
        group = self.group_of.get(leaf)
        if group is None or rank not in self.groups[group]:
            return None
        return self.groups[group]


EMPTY = Settlement()


def settle(undeclared: Mapping[int, Iterable[TensorSpec]]) -> Settlement:
    """Decide which ranks hold each undeclared leaf.

    Args:
        undeclared: Rank -> specs of its undeclared leaves; ranks without any may be absent.

    Raises:
        StateMismatchError: Ranks disagree on shape, dtype or kind of a name.
    """
    holders: dict[TensorSpec, list[int]] = defaultdict(list)
    first: dict[str, TensorSpec] = {}
    for rank in sorted(undeclared):
        for spec in undeclared[rank]:
            known = first.setdefault(spec.name, spec)
            if known is not spec and known != spec:
                raise _mismatch(known, spec, holders[known], rank)
            ranks = holders[known]
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    groups: dict[tuple[int, ...], int] = {}
    group_of: dict[TensorSpec, int] = {}
    for name in sorted(first):
        spec = first[name]
        group_of[spec] = groups.setdefault(tuple(holders[spec]), len(groups))
    return Settlement(tuple(groups), group_of)


def _mismatch(known: TensorSpec, other: TensorSpec, ranks: list[int], rank: int) -> StateMismatchError:
    def words(spec: TensorSpec) -> str:
        return f"{spec.dtype} {list(spec.shape)} ({spec.kind})"

    return StateMismatchError(
        f"leaf {known.name!r} is {words(known)} on {describe(ranks)} but {words(other)} on rank {rank}",
        rank=rank,
        hint="declare what differs between ranks: safehold.PerRank(value) or safehold.Sharded(...)",
    )


def to_wire(settlement: Settlement) -> dict[str, Any]:
    """Return plain lists that `from_wire` reads; ranks as runs, each name once."""
    return {
        "groups": [[number for run in to_runs(group) for number in run] for group in settlement.groups],
        "leaves": [
            [leaf.name, leaf.dtype, list(leaf.shape), leaf.kind, group]
            for leaf, group in sorted(settlement.group_of.items(), key=lambda item: item[0].name)
        ],
    }


def from_wire(wire: Any) -> Settlement:
    """Rebuild a settlement.

    Raises:
        ValueError: The data is not what `to_wire` makes.
    """
    if not isinstance(wire, dict) or set(wire) != {"groups", "leaves"}:
        raise ValueError("a settlement has exactly groups and leaves")
    if not isinstance(wire["groups"], list) or not isinstance(wire["leaves"], list) or len(wire["leaves"]) > MAX_LEAVES:
        raise ValueError("groups and leaves of a settlement are lists")
    checked = [_checked_runs(runs) for runs in wire["groups"]]
    if sum(sum(runs[1::2]) for runs in checked) > MAX_MEMBERS:
        raise ValueError(f"the groups of a settlement have more than {MAX_MEMBERS} ranks together")
    groups = tuple(_group(runs) for runs in checked)
    group_of: dict[TensorSpec, int] = {}
    names: set[str] = set()
    for row in wire["leaves"]:
        spec, group = _leaf(row, len(groups))
        if spec.name in names:
            raise ValueError(f"leaf {spec.name!r} is settled twice")
        names.add(spec.name)
        group_of[spec] = group
    return Settlement(groups, group_of)


def _checked_runs(runs: Any) -> list[int]:
    if not isinstance(runs, list | tuple) or len(runs) % 2 or not runs or not all(type(n) is int for n in runs):
        raise ValueError("a group is a list of (first rank, count) pairs")
    end = 0
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        if first < end or count < 1 or first + count > MAX_RANKS:
            raise ValueError(f"bad run of ranks ({first}, {count}) in a group")
        end = first + count
    return list(runs)


def _group(runs: list[int]) -> tuple[int, ...]:
    return tuple(
        rank for first, count in zip(runs[::2], runs[1::2], strict=True) for rank in range(first, first + count)
    )


def _leaf(row: Any, num_groups: int) -> tuple[TensorSpec, int]:
    if not isinstance(row, list | tuple) or len(row) != 5:
        raise ValueError("a settled leaf has name, dtype, shape, kind and group")
    name, dtype, shape, kind, group = row
    if not isinstance(name, str) or not isinstance(dtype, str) or kind not in get_args(Kind):
        raise ValueError("a settled leaf has a name, a dtype and a known kind")
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > MAX_NDIM
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise ValueError(f"the shape of leaf {name!r} is no list of sizes")
    if type(group) is not int or not 0 <= group < num_groups:
        raise ValueError(f"the group of leaf {name!r} does not exist")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape), kind=kind), group


def without_contradictions(undeclared: dict[int, list[TensorSpec]]) -> dict[int, list[TensorSpec]]:
    """Leave out the leaves that ranks have under one name and not alike; they stay unsettled."""
    specs: dict[str, set[TensorSpec]] = {}
    for leaves in undeclared.values():
        for spec in leaves:
            specs.setdefault(spec.name, set()).add(spec)
    return {rank: [spec for spec in leaves if len(specs[spec.name]) == 1] for rank, leaves in undeclared.items()}
