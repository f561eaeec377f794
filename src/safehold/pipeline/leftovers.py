"""What is left beside checkpoints that went: plans, temporaries, empty directories. For `safehold.pipeline.sweep`.

Invariants: as there. A plan goes only if every manifest that is left could be read.
"""

from __future__ import annotations

from collections.abc import Collection

from safehold.errors import IntegrityError
from safehold.format import paths
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import belief
from safehold.tiers.base import Tier
from safehold.types import CommitId

TEMPORARY_AGE_S = 3600.0
"""Temporary files of ours that are older than this have no living writer."""


def unused_plans(catalog: Catalog, seen: Snapshot, left: Collection[CommitId], in_use: Collection[str]) -> list[str]:
    """Plans that no manifest names. Where a manifest cannot be read, what it names is not known, and none goes."""
    used = set(in_use)
    for commit in left:
        if seen.listing.attempts[commit].has_manifest:
            try:
                _, manifest = catalog.read_manifest(commit, run_id=seen.run.run_id if seen.run is not None else None)
            except IntegrityError:
                return []
            used.add(manifest.plan_digest)
    stored = [paths.parse_plan(entry.name) for entry in catalog.tier.list(paths.PLANS)]
    return [digest for digest in stored if digest is not None and digest not in used]


def sweep_temporaries(tier: Tier, left: Collection[CommitId]) -> list[str]:
    """Remove our own stale temporaries, also in the directories of the attempts that are `left`; returns their paths."""
    directories = ["", paths.INCARNATIONS, paths.PLANS, paths.PINS, paths.LEASES, paths.QUARANTINES, paths.CHECKPOINTS]
    steps = [paths.parse_step_dir(entry.name) for entry in tier.list(paths.CHECKPOINTS) if entry.is_dir]
    directories += [paths.step_dir(step) for step in steps if step is not None]
    directories += [paths.checkpoint_dir(commit) for commit in sorted(left)]
    swept = []
    for directory in directories:
        for name in tier.sweep_temporaries(directory, older_than_s=TEMPORARY_AGE_S):
            swept.append(f"{directory}/{name}" if directory else name)
    return swept


def remove_empty_steps(tier: Tier, seen: Snapshot) -> None:
    """Remove directories of steps that have no attempt left, below all steps that somebody could still write.

    Steps only grow within an incarnation, so nobody makes an attempt below the newest committed step.
    """
    newest = max((commit.step for commit in belief.believed(seen.listing)), default=-1)
    filled = {commit.step for commit in seen.listing.attempts}
    for entry in tier.list(paths.CHECKPOINTS):
        step = paths.parse_step_dir(entry.name)
        if step is not None and entry.is_dir and step < newest and step not in filled:
            tier.delete_if_empty(paths.step_dir(step))


def discard_share(tier: Tier, commit: CommitId, node: int) -> None:
    """Delete what one node has written of an attempt that was given up; other nodes may still be writing theirs.

    Raises:
        IntegrityError: The attempt is committed.
        StorageError: The tier failed.
    """
    directory = paths.checkpoint_dir(commit)
    names = [entry.name for entry in tier.list(directory)]
    if paths.MANIFEST in names:
        raise IntegrityError("the attempt is committed and is not discarded", path=directory, step=commit.step)
    for name in names:
        if paths.node_of(name) == node:
            tier.delete(f"{directory}/{name}")
    tier.delete_if_empty(directory)
    tier.delete_if_empty(paths.step_dir(commit.step))
