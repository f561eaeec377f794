"""Makes a node's share of the redundancy of its set, beside a checkpoint that is committed.

    checkpoints/<step>/<attempt>/redundancy-<node>.<row>    parity rows, or copies
    checkpoints/<step>/<attempt>/redundancy-<node>.json     what they are; written last

Invariants: shares are made of blocks that verify against node records which the manifest names, and of nothing else. The record is
written when all shares and their directory entries are durable, and removed before any of them is touched again: without it they are
debris, which goes with the attempt's directory. Memory is bounded, whatever the size of the checkpoint.

Must not live here: who is in which set (`policy.placement`), how other nodes are reached (`Members`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from safehold._version import __version__
from safehold.errors import CheckpointError, IntegrityError, ManifestError, SkippedError, TornFileError
from safehold.format import crc, document, paths, records, redundancy
from safehold.format.records import Manifest, NodeRecord, NodeRef
from safehold.format.redundancy import RedundancyRecord, ShareRecord
from safehold.host import parity
from safehold.pipeline import agreement
from safehold.pipeline.block_work import Effort, Watch, in_threads, written
from safehold.pipeline.symbols import BLOCK, Members, SetView, Symbols, read_document, view_of
from safehold.policy.placement import RedundancySet
from safehold.tiers.base import PackWriter, Tier

__all__ = ["Effort", "Members", "check_against", "coefficients_of", "make_shares", "node_record", "protect", "set_of"]

Create = Callable[[str, int], PackWriter]


def protect(
    tier: Tier, manifest: Manifest, node: int, of: RedundancySet, members: Members, *, effort: Effort | None = None
) -> RedundancyRecord:
    """Make this node's share of its set's redundancy, and its record; what is there already and fits is left as it is.

    Args:
        tier: This node's; the checkpoint is committed there.
        manifest: The checkpoint's, verified.
        node: This node.
        of: Its set; all members are nodes of the manifest.
        members: The other members' bytes. All of them have to answer.
        effort: Threads, memory, deadline.

    Returns:
        What is durable now.

    Raises:
        ValueError: The set is not one of this node, or of this checkpoint.
        IntegrityError: A member's bytes do not verify; nothing counts that was written.
        SkippedError: The checkpoint is not committed here (any more), or the work was cancelled.
        CheckpointError: A member does not answer, the tier failed, or the time was over.
    """
    effort = effort or Effort()
    watch = Watch(effort, f"making the redundancy of step {manifest.commit.step} on node {node}")
    if node not in of.members:
        raise ValueError(f"node {node} is not in the set {of.members}")
    refs = [_ref(manifest, member) for member in of.members]
    directory = paths.checkpoint_dir(manifest.commit)
    _check_committed(tier, manifest)
    record = _existing(tier, manifest, node, of)
    if record is not None:
        tier.sync_tree(directory)
        return record
    _clear(tier, directory, node)
    stored = [_read_record(tier, members, manifest, member, own=member == node, watch=watch) for member in of.members]
    decoded = [node_record(data, manifest, ref.node) for data, ref in zip(stored, refs, strict=True)]
    view = view_of(manifest.commit, of, decoded, stored)
    try:
        shares = make_shares(view, node, members, tier.create_pack, effort=effort, watch=watch)
        tier.sync_tree(directory)
        _check_committed(tier, manifest)
        record = RedundancyRecord(
            run_id=manifest.run_id,
            commit=manifest.commit,
            node=node,
            kind=of.kind,
            num_data=of.num_data,
            num_parity=of.num_parity,
            members=tuple(refs),
            shares=shares,
            created_s=effort.clock.wall(),
            library=__version__,
        )
        tier.put(f"{directory}/{paths.redundancy_record(node)}", redundancy.encode_redundancy(record, stored))
    except CheckpointError:
        _clear_quietly(tier, directory, node)
        raise
    return record


def make_shares(
    view: SetView, node: int, members: Members, create: Create, *, effort: Effort, watch: Watch
) -> tuple[ShareRecord, ...]:
    """Make a node's parity rows from verified blocks of the other members, wherever they are kept.

    Args:
        view: The set.
        node: This node, a member.
        members: The other members' bytes.
        create: (path, size) -> where a row is written.
        effort: Threads, memory and pace.
        watch: The deadline.

    Raises:
        CheckpointError: As for `protect`; the rows that were not finished are aborted.
    """
    maker = _Maker(view, view.of.members.index(node), members, create, effort, watch)
    return tuple(maker.share(row) for row in range(view.of.num_parity))


def set_of(record: RedundancyRecord) -> RedundancySet:
    """Return the set that a record is of."""
    members = tuple(ref.node for ref in record.members)
    return RedundancySet(kind=record.kind, num_data=record.num_data, num_parity=record.num_parity, members=members)


def coefficients_of(of: RedundancySet) -> tuple[tuple[int, ...], ...]:
    """Return the coefficients of a set's parity rows."""
    return parity.coefficients(of.num_data, of.num_parity, ones=of.kind != "rs")


def check_against(record: RedundancyRecord, manifest: Manifest, node: int, *, path: str) -> None:
    """Check that a redundancy record is of this checkpoint and node, and names the node records that the manifest names.

    Raises:
        ManifestError: It is another one's.
    """
    named = {ref.node: ref for ref in manifest.nodes}
    same = record.run_id == manifest.run_id and record.commit == manifest.commit and record.node == node
    if not same or any(named.get(ref.node) != ref for ref in record.members):
        text = "is the redundancy record of another node, checkpoint or run"
        raise ManifestError(text, path=path, step=manifest.commit.step, node=str(node))


def node_record(data: bytes, manifest: Manifest, node: int) -> NodeRecord:
    """Verify a node record's bytes against the manifest and return it.

    Raises:
        IntegrityError: It is not the one that the manifest names, or contradicts itself.
    """
    path = f"{paths.checkpoint_dir(manifest.commit)}/{paths.node_record(node)}"
    ref = _ref(manifest, node)
    what = f"the record of node {node}"
    agreement.check_bytes(data, ref.size_bytes, ref.blake3, path=path, step=manifest.commit.step, what=what)
    record = records.decode_node_record(data, path=path)
    agreement.check_record(record, manifest, node, path=path)
    return record


class _Maker:
    """Makes the shares of one member."""

    def __init__(
        self, view: SetView, position: int, members: Members, create: Create, effort: Effort, watch: Watch
    ) -> None:
        self._create, self._view, self._position = create, view, position
        self._effort, self._watch = effort, watch
        self._symbols = Symbols(view, members, view.of.members)

    def share(self, row: int) -> ShareRecord:
        """Make one parity row's share and make its data durable."""
        of, geometry = self._view.of, self._view.geometry
        stripe = of.stripe_of_row(self._position, row)
        size = geometry.share_bytes(stripe)
        name = paths.redundancy_share(of.members[self._position], row)
        crcs = np.zeros(crc.num_blocks(size), dtype=np.uint32)
        if size:
            writer = self._create(f"{self._view.directory}/{name}", size)
            with written(writer):
                in_threads(
                    self._jobs(len(crcs)),
                    partial(self._rows, writer, stripe, coefficients_of(of)[row], size, crcs),
                    num_buffers=of.num_data + 1,
                    effort=self._effort,
                    watch=self._watch,
                )
        return ShareRecord(
            file=name,
            row=row,
            size_bytes=size,
            crc32=crc.combine_blocks(crcs, size),
            block_crcs=crc.encode_crcs(crcs),
        )

    def _jobs(self, num_rows: int) -> Iterator[tuple[int, int]]:
        step = self._effort.batch_blocks(self._view.of.num_data + 1)
        return ((row, min(step, num_rows - row)) for row in range(0, num_rows, step))

    def _rows(
        self,
        writer: PackWriter,
        stripe: int,
        factors: tuple[int, ...],
        size: int,
        crcs: npt.NDArray[np.uint32],
        job: tuple[int, int],
        buffers: list[memoryview],
    ) -> int:
        row, count = job
        length = min(count * BLOCK, size - row * BLOCK)
        used, sources = list[int](), list[memoryview]()
        for chunk, factor in enumerate(factors):
            if not self._view.geometry.blocks(stripe, chunk, row, count)[2]:
                continue  # zeros add nothing
            source = buffers[len(sources)]
            if self._symbols.data(stripe, chunk, row, count, source):
                raise self._refusal(self._view.of.members[self._view.of.data_position(stripe, chunk)])
            used.append(factor)
            sources.append(source[:length])
        target = buffers[-1][:length]
        if used == [1]:
            target = sources[0]  # a copy, or a row that one member alone has data in
        else:
            parity.sum_into(used, sources, target)
        crcs[row : row + count] = crc.crc_blocks(target)
        writer.write_at(row * BLOCK, target)
        return length * (len(sources) + 1)

    def _refusal(self, node: int) -> CheckpointError:
        """Return why a member's bytes could not be had."""
        step = self._view.commit.step
        found = next((fault for fault in self._symbols.faults if fault.node == node), None)
        if found is None:
            return TornFileError("a block cannot be had", step=step, node=str(node))
        block = "" if found.block is None else f"block {found.block}: "
        hint = "'safehold verify' on that node says more; the next save is protected anew"
        return type(found.error)(
            f"the checkpoint cannot be protected: {block}{found.error.message}",
            step=step,
            node=str(node),
            path=found.path,
            hint=found.error.hint or hint,
        )


def _ref(manifest: Manifest, node: int) -> NodeRef:
    ref = next((ref for ref in manifest.nodes if ref.node == node), None)
    if ref is None:
        raise ValueError(f"node {node} has no part in step {manifest.commit.step}")
    return ref


def _read_record(tier: Tier, members: Members, manifest: Manifest, node: int, *, own: bool, watch: Watch) -> bytes:
    watch.check()
    ref = _ref(manifest, node)
    path = f"{paths.checkpoint_dir(manifest.commit)}/{paths.node_record(node)}"
    try:
        if own:
            return tier.get(path, limit_bytes=ref.size_bytes)
        return read_document(members, node, path, ref.size_bytes)
    except FileNotFoundError as exc:
        text = "the node record is missing"
        raise TornFileError(text, path=path, step=manifest.commit.step, node=str(node)) from exc


def _check_committed(tier: Tier, manifest: Manifest) -> None:
    path = f"{paths.checkpoint_dir(manifest.commit)}/{paths.MANIFEST}"
    try:
        tier.size(path)
    except FileNotFoundError as exc:
        raise SkippedError("the checkpoint is not committed here, or not any more", path=path) from exc


def _existing(tier: Tier, manifest: Manifest, node: int, of: RedundancySet) -> RedundancyRecord | None:
    """Return what an earlier call has made, if it is of this set and its files have their sizes."""
    directory = paths.checkpoint_dir(manifest.commit)
    path = f"{directory}/{paths.redundancy_record(node)}"
    try:
        data = tier.get(path, limit_bytes=document.max_file_bytes(redundancy.KIND), retry_s=0.0)
        record, _ = redundancy.decode_redundancy(data, path=path)
        check_against(record, manifest, node, path=path)
        whole = all(
            tier.size(f"{directory}/{share.file}", retry_s=0.0) == share.size_bytes
            for share in record.shares
            if share.size_bytes
        )
    except (FileNotFoundError, IntegrityError):
        return None
    return record if whole and set_of(record) == of else None


def _clear(tier: Tier, directory: str, node: int) -> None:
    """Remove what an earlier call has left, the record first."""
    tier.delete(f"{directory}/{paths.redundancy_record(node)}")
    for entry in tier.list(directory):
        share = paths.parse_redundancy_share(entry.name)
        if share is not None and share[0] == node:
            tier.delete(f"{directory}/{entry.name}")


def _clear_quietly(tier: Tier, directory: str, node: int) -> None:
    try:
        _clear(tier, directory, node)
        tier.delete_if_empty(directory)
    except CheckpointError:  # the caller is dealing with a failure already; what stays is debris without a record
        pass
