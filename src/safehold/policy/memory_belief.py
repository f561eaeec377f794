"""Which checkpoint that lies in the memory of the nodes a new start of the job believes, and who has what of it.

A checkpoint in memory is committed once every node of its save holds its manifest, which is told to them only when every node has its own
share in memory and as many partners as there are hold a copy of it. So one node that holds the manifest is enough to know of the commit.
It is believed if an incarnation has accepted it (or made it) directly before the new one: what a rollback has left behind, and what
another start of the job knew nothing of, is not. It can be restored if each node's share is whole somewhere, or what is left of its
redundancy set gives it back (`policy.memory_parity`).

Invariants: pure; the same told in any order gives the same answer. What is told of a commit under two manifests counts for neither the
other. Nothing here is verified by itself: bytes are, when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safehold.format.names import numbered
from safehold.policy.memory_parity import RedundancyTold, SetHeld, given_back, sets_held
from safehold.types import CommitId

MAX_TOLD = 16
"""Most checkpoints that a node speaks of; it holds two, and what a crash left of a third."""

KNOWERS = -1
"""Whose place on the wire the nodes have that know manifest and plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTold:
    """What one node tells of one checkpoint in its memory.

    Attributes:
        commit: Which.
        run_id: Of the run.
        manifest: Digest of the manifest; empty: this node has none, or not the plan to it.
        manifest_bytes: Its size.
        believed_by: The last incarnation that made or accepted it, as far as this node was told.
        nodes: The nodes of the save (by their index then) that the manifest names.
        shares: Those of them whose share is here whole, own and kept for others.
        redundancy: What is here of the redundancy of its sets.
    """

    commit: CommitId
    run_id: str
    manifest: str = ""
    manifest_bytes: int = 0
    believed_by: int = 0
    nodes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    redundancy: tuple[RedundancyTold, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """A checkpoint in memory that can be restored.

    Attributes:
        commit: Which.
        manifest: Digest of its manifest.
        knowers: Nodes (by their index now) that have manifest and plan.
        holders: Node of the save -> nodes (now) that have its share whole; none: its redundancy set gives it back.
        sets: Who has what of the redundancy.
    """

    commit: CommitId
    manifest: str
    knowers: tuple[int, ...]
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    sets: tuple[SetHeld, ...] = ()

    def to_wire(self) -> dict[int, list[int]]:
        """Return who has what as a restore is told; see `Where`."""
        found = {node: list(nodes) for node, nodes in self.holders.items()}
        found[KNOWERS] = list(self.knowers)
        for number, one in enumerate(self.sets):
            found[KNOWERS - 1 - 2 * number] = list(one.members)
            found[KNOWERS - 2 - 2 * number] = [one.holders.get(member, -1) for member in one.members]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a checkpoint in memory is, as a restore is told.

    On the wire: node of the save -> nodes that have its share; -1 -> `knowers`; then for each set two keys, counting down from -2: its
    members, and for each of them who has its share of the redundancy (-1: nobody).
    """

    knowers: tuple[int, ...] = ()
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    sets: tuple[SetHeld, ...] = ()

    @classmethod
    def from_wire(cls, wire: Mapping[int, Sequence[int]]) -> Where:
        """Read it."""
        sets, key = [], KNOWERS - 1
        while key in wire and key - 1 in wire:
            pairs = zip(wire[key], wire[key - 1], strict=False)
            holders = {member: node for member, node in pairs if node >= 0}
            sets.append(SetHeld(members=tuple(wire[key]), holders=holders))
            key -= 2
        return cls(
            knowers=tuple(wire.get(KNOWERS, ())),
            holders={node: tuple(nodes) for node, nodes in wire.items() if node >= 0},
            sets=tuple(sets),
        )

    def set_of(self, node: int) -> SetHeld | None:
        """Return the set of a node of the save, if any of its redundancy is there."""
        return next((one for one in self.sets if node in one.members and one.holders), None)


def choose(
    told: Mapping[int, Sequence[HeldTold]], *, run_id: str, before: int
) -> tuple[Believed | None, tuple[str, ...]]:
    """Return the newest checkpoint in memory that is believed and whole, and of newer ones why they cannot be had.

    Args:
        told: Node (by its index now) -> what it tells.
        run_id: The run's id.
        before: The newest incarnation before this start of the job.
    """
    knowers: dict[tuple[CommitId, str], dict[int, HeldTold]] = {}
    shares: dict[CommitId, dict[int, set[int]]] = {}
    redundancy: dict[CommitId, list[tuple[int, RedundancyTold]]] = {}
    for node, entries in sorted(told.items()):
        for entry in entries[:MAX_TOLD]:
            if entry.run_id != run_id:
                continue
            for share in entry.shares:
                shares.setdefault(entry.commit, {}).setdefault(share, set()).add(node)
            redundancy.setdefault(entry.commit, []).extend((node, one) for one in entry.redundancy)
            if entry.manifest and entry.believed_by == before:
                knowers.setdefault((entry.commit, entry.manifest), {})[node] = entry
    words: list[str] = []
    for (commit, manifest), known in sorted(knowers.items(), reverse=True):
        wanted = next(iter(known.values())).nodes
        found = shares.get(commit, {})
        sets = sets_held(redundancy.get(commit, ()))
        back = {node for of, blocks, held in sets for node in given_back(of, blocks, found, held.holders)}
        missing = [node for node in wanted if node not in found and node not in back]
        if wanted and not missing:
            believed = Believed(
                commit=commit,
                manifest=manifest,
                knowers=tuple(sorted(known)),
                holders={node: tuple(sorted(found.get(node, ()))) for node in sorted(wanted)},
                sets=tuple(held for *_, held in sets),
            )
            return believed, tuple(words)
        words.append(
            f"step {commit.step} was in memory and cannot be used: what {numbered('node', missing, 8)} of its save had is lost "
            f"with the memory of that node and of {'others of its redundancy set' if sets else 'its partners'}"
        )
    return None, tuple(words)
