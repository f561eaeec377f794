"""What of a checkpoint in memory the parity of redundancy sets gives back, and who holds which share of it.

Nodes that make a checkpoint redundant by parity hold, beside their own share, parity rows of the stripes of their set (`policy.placement`,
`policy.stripes`). After a loss nodes may have other numbers, so each tells with what it holds for which set, by the numbers of the save.

Invariants: pure. A member whose share nobody has whole is to be had if in each stripe that has blocks of its data no more symbols are lost
than there are parity rows. Symbols behind the end of a member's data are zeros, and lost nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from safehold.format.crc import BLOCK_BYTES, num_blocks
from safehold.policy.placement import RedundancySet, SchemeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyTold:
    """The share of a set's redundancy that is in the memory of one node.

    Attributes:
        node: The node of the save that made it; all numbers here are those of the save.
        kind: Of the set; see `placement.RedundancySet`.
        num_data: See there.
        num_parity: See there.
        members: See there.
        blocks: Blocks of the data of each member, in the order of the ring.
    """

    node: int
    kind: SchemeKind
    num_data: int
    num_parity: int
    members: tuple[int, ...]
    blocks: tuple[int, ...]

    def set(self) -> RedundancySet | None:
        """Return the set; None if it is none."""
        if len(self.blocks) != len(self.members) or self.node not in self.members:
            return None
        try:
            return RedundancySet(
                kind=self.kind, num_data=self.num_data, num_parity=self.num_parity, members=self.members
            )
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetHeld:
    """Who has the redundancy of a set.

    Attributes:
        members: Nodes of the save, in the order of the ring.
        holders: Member -> the node (by its index now) that has its share of the redundancy.
    """

    members: tuple[int, ...]
    holders: Mapping[int, int] = field(default_factory=dict)


def sets_held(told: Iterable[tuple[int, RedundancyTold]]) -> list[tuple[RedundancySet, tuple[int, ...], SetHeld]]:
    """Put together what nodes tell of one checkpoint: each set, blocks of its members, and who holds what of it.

    Args:
        told: (node by its index now, what it holds).
    """
    groups: dict[tuple[object, ...], tuple[RedundancySet, tuple[int, ...], dict[int, int]]] = {}
    for node, entry in sorted(told, key=lambda pair: (pair[0], pair[1].node)):
        of = entry.set()
        if of is not None:
            key = (of.kind, of.num_data, of.num_parity, of.members, entry.blocks)
            groups.setdefault(key, (of, entry.blocks, {}))[2].setdefault(entry.node, node)
    return [
        (of, blocks, SetHeld(members=of.members, holders=dict(sorted(holders.items()))))
        for _, (of, blocks, holders) in sorted(groups.items(), key=lambda item: str(item[0]))
    ]


def given_back(of: RedundancySet, blocks: Sequence[int], whole: Collection[int], held: Collection[int]) -> set[int]:
    """Return the members that nobody has whole and that the rest of the set gives back.

    Args:
        of: The set.
        blocks: Blocks of the data of each member.
        whole: Members whose share somebody has.
        held: Members whose share of the redundancy somebody has.
    """
    rows = -(-max(blocks) // of.num_data)
    found = {member for member in of.members if member not in whole}
    for stripe in range(len(of.members)):
        lost = []
        for chunk in range(of.num_data):
            position = of.data_position(stripe, chunk)
            if of.members[position] not in whole and blocks[position] > chunk * rows:
                lost.append(of.members[position])
        num_rows = sum(of.members[of.parity_position(stripe, row)] in held for row in range(of.num_parity))
        if len(lost) > num_rows:
            found.difference_update(lost)
    return found


def padded_bytes(sizes: Iterable[int], num_files: int = 1) -> int:
    """Return what a member's data take of a set's stripes at most: whole blocks for each rank's arena, and the objects' last one.

    Args:
        sizes: Bytes of each rank's arena.
        num_files: Packs that each is cut into.
    """
    return sum((num_blocks(size) + num_files - 1) * BLOCK_BYTES for size in sizes) + BLOCK_BYTES


def redundancy_bytes(of: RedundancySet, longest_bytes: int) -> int:
    """Return the most that a member holds of redundancy, from the data of the largest member (`padded_bytes`)."""
    return of.num_parity * -(-num_blocks(longest_bytes) // of.num_data) * BLOCK_BYTES
