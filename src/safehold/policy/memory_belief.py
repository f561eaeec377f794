"""Which checkpoint that lies in the memory of the nodes a new start of the job believes, and who has what of it.

A checkpoint in memory is committed once every node of its save holds its manifest, which is told to them only when every node has its own
share in memory and as many partners as there are hold a copy of it. So one node that holds the manifest is enough to know of the commit.
It is believed if an incarnation has accepted it (or made it) directly before the new one: what a rollback has left behind, and what
another start of the job knew nothing of, is not. It can be restored if each node's share is whole somewhere.

Invariants: pure; the same told in any order gives the same answer. What is told of a commit under two manifests counts for neither the
other. Nothing here is verified by itself: bytes are, when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safehold.format.names import numbered
from safehold.types import CommitId

MAX_TOLD = 16
"""Most checkpoints that a node speaks of; it holds two, and what a crash left of a third."""


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
    """

    commit: CommitId
    run_id: str
    manifest: str = ""
    manifest_bytes: int = 0
    believed_by: int = 0
    nodes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """A checkpoint in memory that can be restored.

    Attributes:
        commit: Which.
        manifest: Digest of its manifest.
        knowers: Nodes (by their index now) that have manifest and plan.
        holders: Node of the save -> nodes (now) that have its share whole.
    """

    commit: CommitId
    manifest: str
    knowers: tuple[int, ...]
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


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
    for node, entries in sorted(told.items()):
        for entry in entries[:MAX_TOLD]:
            if entry.run_id != run_id:
                continue
            for share in entry.shares:
                shares.setdefault(entry.commit, {}).setdefault(share, set()).add(node)
            if entry.manifest and entry.believed_by == before:
                knowers.setdefault((entry.commit, entry.manifest), {})[node] = entry
    words: list[str] = []
    for (commit, manifest), known in sorted(knowers.items(), reverse=True):
        wanted = next(iter(known.values())).nodes
        found = shares.get(commit, {})
        missing = [node for node in wanted if node not in found]
        if wanted and not missing:
            holders = {node: tuple(sorted(found[node])) for node in sorted(wanted)}
            believed = Believed(commit=commit, manifest=manifest, knowers=tuple(sorted(known)), holders=holders)
            return believed, tuple(words)
        words.append(
            f"step {commit.step} was in memory and cannot be used: what {numbered('node', missing, 8)} of its save had is lost "
            "with the memory of that node and of its partners"
        )
    return None, tuple(words)
