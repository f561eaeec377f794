"""Checks that the documents of a checkpoint agree with each other and with the names they were found under.

Invariants: pure; every refusal names the file and both sides of the contradiction. A document that got here has
verified on its own (`safehold.format.document`); what is found here is a swapped, stale or foreign file, or a bug of a
writer.

Must not live here: I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from safehold.errors import ChecksumError, ManifestError, TornFileError
from safehold.format import crc, document, paths
from safehold.format.plan import Plan
from safehold.format.records import Incarnation, Manifest, NodeRecord
from safehold.types import CommitId


def check_incarnation(record: Incarnation, number: int, *, path: str) -> None:
    """Check that an incarnation file says the number of its name.

    Raises:
        ManifestError: It is another one's.
    """
    if record.number != number:
        raise ManifestError(f"says incarnation {record.number}; it was swapped or copied", path=path)


def check_manifest(manifest: Manifest, *, commit: CommitId, run_id: str, path: str) -> None:
    """Check that a manifest belongs to the run and directory it was found in.

    Raises:
        ManifestError: It is another one's, or names a node twice.
    """
    if manifest.run_id != run_id:
        raise ManifestError(
            f"belongs to run {manifest.run_id}, not to this one ({run_id})",
            path=path,
            step=commit.step,
            hint="it was copied here from another run directory",
        )
    if manifest.commit != commit:
        found = manifest.commit
        raise ManifestError(
            f"is the manifest of step {found.step}, incarnation {found.incarnation}, attempt {found.attempt}",
            path=path,
            step=commit.step,
            hint="it was swapped or copied from another checkpoint",
        )
    nodes = [ref.node for ref in manifest.nodes]
    if len(set(nodes)) != len(nodes) or not nodes:
        raise ManifestError("names no node, or one twice", path=path, step=commit.step)


def missing_record(manifest: Manifest, node: int, *, path: str, tier: str) -> TornFileError:
    """Return the error for a node record that is not there: damage, or the disk of that node is away."""
    step = manifest.commit.step
    if not manifest.own_disks:
        return TornFileError("the file is missing", path=path, step=step, tier=tier)
    name = manifest.own_disks[node]
    text = f"the record of node {name}, which keeps what it saves on a disk of its own, is not here"
    return TornFileError(text, path=path, step=step, node=name, tier=tier, hint="start the job with that node as well")


def check_bytes(data: bytes, size_bytes: int, digest: str, *, path: str, step: int, what: str) -> None:
    """Check a document's bytes against the size and blake3 that the manifest has of it.

    Raises:
        TornFileError: It has another size.
        ChecksumError: It has other bytes.
    """
    if len(data) != size_bytes:
        raise TornFileError(f"{what} has {len(data)} bytes, the manifest says {size_bytes}", path=path, step=step)
    if document.digest(data) != digest:
        raise ChecksumError(
            f"{what} is not the one that the manifest names (blake3 differs)",
            path=path,
            step=step,
            hint="it was damaged, swapped, or replaced after the commit",
        )


def check_record(record: NodeRecord, manifest: Manifest, node: int, *, path: str) -> None:
    """Check a node record against the manifest, and its checksums against each other.

    Raises:
        ManifestError: It is another one's, or its packs are named wrongly.
        ChecksumError: A pack's checksum is not that of its blocks.
    """
    commit = manifest.commit
    if record.run_id != manifest.run_id or record.commit != commit or record.node != node:
        raise ManifestError("is the record of another node, checkpoint or run", path=path, step=commit.step)
    for pack in record.packs:
        if pack.file != paths.pack(node, pack.rank, pack.part):
            raise ManifestError(
                f"calls part {pack.part} of rank {pack.rank} {pack.file!r}", path=path, step=commit.step, rank=pack.rank
            )
        try:
            blocks = crc.decode_crcs(pack.block_crcs)
            combined = crc.combine_blocks(blocks, pack.size_bytes)
        except ValueError as exc:
            raise ManifestError(f"{pack.file}: {exc}", path=path, step=commit.step, rank=pack.rank) from exc
        if combined != pack.crc32:
            text = f"the checksum of {pack.file} is not that of its blocks"
            raise ChecksumError(text, path=path, step=commit.step, rank=pack.rank)


def totals(records: Sequence[NodeRecord]) -> tuple[int, int]:
    """Return a checkpoint's total bytes (packs and objects) and the checksum of its packs in rank and part order."""
    packs = sorted((pack for record in records for pack in record.packs), key=lambda pack: (pack.rank, pack.part))
    total = sum(pack.size_bytes for pack in packs) + sum(record.objects_size_bytes for record in records)
    if not packs:
        return total, 0
    return total, crc.combine([pack.crc32 for pack in packs], [pack.size_bytes for pack in packs])


def check_placement(record: NodeRecord, plan: Plan, *, path: str) -> None:
    """Check that a node wrote the packs that the plan expects of it, with their sizes.

    Args:
        record: The node's record, checked by `check_record`.
        plan: The plan that the manifest names.
        path: The record's file.

    Raises:
        ManifestError: It did not.
    """
    step = record.commit.step
    ranks = [rank for rank, node in enumerate(plan.nodes) if node == record.node]
    wanted = {(rank, part): size for rank in ranks for part, size in enumerate(plan.pack_sizes.get(rank, ()))}
    for pack in record.packs:
        size = wanted.pop((pack.rank, pack.part), None)
        where = f"part {pack.part} of rank {pack.rank}"
        if size is None:
            text = f"{where} is in the record of node {record.node}, and not there in the plan, or recorded twice"
            raise ManifestError(text, path=path, step=step, rank=pack.rank)
        if size != pack.size_bytes:
            text = f"{where} has {pack.size_bytes} bytes by its record and {size} by the plan"
            raise ManifestError(text, path=path, step=step, rank=pack.rank)
    for rank, part in wanted:
        text = f"the record of node {record.node} lacks part {part} of rank {rank}"
        raise ManifestError(text, path=path, step=step, rank=rank)


def check_nodes(manifest: Manifest, plan: Plan, *, path: str) -> None:
    """Check that manifest and plan are of the same world and nodes.

    Raises:
        ManifestError: They are not.
    """
    step, nodes = manifest.commit.step, [ref.node for ref in manifest.nodes]
    if plan.world_size != manifest.world_size:
        text = f"the plan is for {plan.world_size} ranks, the manifest says {manifest.world_size}"
        raise ManifestError(text, path=path, step=step)
    if set(plan.nodes) != set(nodes):
        text = f"the plan is for the nodes {sorted(set(plan.nodes))[:8]}, the manifest for {nodes[:8]}"
        raise ManifestError(text, path=path, step=step)


def cross_check(manifest: Manifest, records: Mapping[int, NodeRecord], plan: Plan, *, path: str) -> None:
    """Check manifest, all node records and the plan against each other.

    Args:
        manifest: The commit record.
        records: Node -> record, each checked by `check_record`.
        plan: The plan that the manifest names.
        path: The checkpoint's directory, for the words.

    Raises:
        ManifestError: They contradict each other.
    """
    check_nodes(manifest, plan, path=path)
    for node, record in records.items():
        check_placement(record, plan, path=f"{path}/{paths.node_record(node)}")
    total, checksum = totals(list(records.values()))
    if total != manifest.total_bytes or checksum != manifest.crc32:
        text = "the manifest's total size and checksum are not those of the node records"
        raise ManifestError(text, path=f"{path}/{paths.MANIFEST}", step=manifest.commit.step)
