"""What a second place has of a checkpoint already: the same documents, or others, or none.

Invariants: nothing here writes. Another manifest of the same name is refused, and never taken for a damaged one.

Must not live here: what is copied (`safehold.pipeline.replicate`, `safehold.pipeline.replication_halves`).
"""

from __future__ import annotations

from safehold.errors import FormatVersionError, IntegrityError, ManifestError
from safehold.format import document, paths, records
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import replication
from safehold.tiers.base import Tier
from safehold.types import CommitId


def is_complete(target: Tier, commit: CommitId, seen: Snapshot, manifest: bytes) -> bool:
    """Whether a place has a checkpoint as the source has it: the same manifest, documents that verify, all files with their sizes.

    Args:
        target: The place.
        commit: The checkpoint.
        seen: What was seen there.
        manifest: The manifest's bytes at the source.

    Raises:
        ManifestError: It has another manifest that verifies.
    """
    view = seen.listing.attempts.get(commit)
    if view is None or not view.has_manifest or replication.holding(seen.listing, commit):
        return False
    catalog = Catalog(target, patience_s=0.0)
    run_id = seen.run.run_id if seen.run else None
    if not same_manifest(target, commit, manifest):
        return False
    try:
        catalog.check_files(catalog.load(commit, manifest_bytes=manifest, run_id=run_id))
    except FormatVersionError:
        raise
    except IntegrityError:
        return False
    return True


def same_manifest(target: Tier, commit: CommitId, manifest: bytes) -> bool:
    """Whether a place has this manifest; False also where it has none, or a damaged one, which makes no checkpoint.

    Raises:
        ManifestError: It has another one that verifies.
        FormatVersionError: It has one that a newer library wrote.
    """
    path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
    try:
        found = target.get(path, limit_bytes=document.max_file_bytes("manifest"))
        if found == manifest:
            return True
        records.decode_manifest(found, path=path)
    except FormatVersionError:
        raise
    except (FileNotFoundError, IntegrityError):
        return False
    raise ManifestError(
        "another manifest of this checkpoint is there already and is never replaced",
        path=path,
        step=commit.step,
        tier=target.name,
        hint="the two places hold different checkpoints of one name; use another directory",
    )
