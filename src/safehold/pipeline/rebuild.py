"""Restores a lost node's files onto a replacement.

Invariants: files of a rebuilt node have the names and bytes that they had, every one verified against the node record, which the
manifest names; that record is written last, when all else is durable.

Must not live here: where the bytes come from (`pipeline.lost_node`), and who tells that a node is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blake3 import blake3

from safehold.errors import ChecksumError, IntegrityError, StorageError
from safehold.format import crc, paths
from safehold.pipeline.block_work import Effort, Watch, in_threads, make_buffer, written
from safehold.pipeline.lost_node import LostNode
from safehold.pipeline.symbols import BLOCK, BadSource
from safehold.policy.stripes import StreamFile
from safehold.tiers.base import PackReader, Tier

_READ_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What was given back.

    Attributes:
        files: Names of the files that were written.
        num_bytes: Their bytes.
        kept: Files that were there and whole.
        faults: Sources that were found damaged on the way; somebody should repair them.
    """

    files: tuple[str, ...]
    num_bytes: int
    kept: tuple[str, ...]
    faults: tuple[BadSource, ...]


def rebuild(tier: Tier, lost: LostNode, *, effort: Effort | None = None) -> Rebuilt:
    """Restore a lost node's files onto a replacement: same names and bytes, verified, durable, its node record last.

    Where an earlier call has come to its end, only files that do not verify any more are made anew; what one that did not has left is
    replaced. The replacement's own share of the redundancy is then made by `safehold.pipeline.redundancy.protect`, as for any node.

    Args:
        tier: The replacement's.
        lost: The node.
        effort: Threads, memory, deadline.

    Raises:
        IntegrityError: Too much is lost. Nothing of the node is believed on the replacement, as it has no node record there.
        CheckpointError: Members do not answer, the tier failed, or the time was over.
    """
    effort = effort or Effort()
    watch = Watch(effort, f"rebuilding step {lost.record.commit.step} of node {lost.record.node}")
    lost.check()
    path = f"{lost.directory}/{paths.node_record(lost.record.node)}"
    there = {entry.name for entry in tier.list(lost.directory) if not entry.is_dir}
    # Without the node record nothing is known to be durable, however whole it looks in the page cache.
    finished = paths.node_record(lost.record.node) in there and _is_equal(tier, path, lost.record_bytes)
    kept = [file for file in lost.files if finished and file.name in there and _is_whole(tier, lost, file, watch)]
    missing = [file for file in lost.files if file not in kept]
    if missing or not finished:
        tier.delete(path)
    for file in missing:
        if file.name in there:
            tier.delete(f"{lost.directory}/{file.name}")
        _write(tier, lost, file, effort, watch)
    if lost.files:
        tier.sync_tree(lost.directory)
    tier.put(path, lost.record_bytes)
    return Rebuilt(
        files=tuple(file.name for file in missing),
        num_bytes=sum(file.size_bytes for file in missing),
        kept=tuple(file.name for file in kept),
        faults=lost.faults,
    )


def _write(tier: Tier, lost: LostNode, file: StreamFile, effort: Effort, watch: Watch) -> None:
    """Write one file, and make its data durable."""
    digest = blake3() if file.name == paths.node_objects(lost.record.node) else None
    if digest is not None:
        effort = replace(effort, threads=1)  # in order
    number = lost.num_buffers + 1
    writer = tier.create_pack(f"{lost.directory}/{file.name}", file.size_bytes)

    def work(job: tuple[int, int], buffers: list[memoryview]) -> int:
        data = lost.read_blocks(file, *job, buffers[-1], buffers[:-1])
        writer.write_at(job[0] * BLOCK, data)
        if digest is not None:
            digest.update(data)
        return data.nbytes * number

    with written(writer):
        jobs = _jobs(lost, file, effort.batch_blocks(number))
        in_threads(jobs, work, num_buffers=number, effort=effort, watch=watch)
        if digest is not None and digest.hexdigest() != lost.record.objects_blake3:
            text = "what the set gives back of the objects does not match the node record"
            raise ChecksumError(text, node=str(lost.record.node), path=f"{lost.directory}/{file.name}")


def _jobs(lost: LostNode, file: StreamFile, most: int) -> Iterator[tuple[int, int]]:
    block = 0
    while block < file.num_blocks:
        count = min(most, lost.straight(file, block))
        yield block, count
        block += count


def _is_equal(tier: Tier, path: str, data: bytes) -> bool:
    try:
        return tier.get(path, limit_bytes=len(data)) == data
    except (FileNotFoundError, IntegrityError):
        return False


def _is_whole(tier: Tier, lost: LostNode, file: StreamFile, watch: Watch) -> bool:
    """Whether a file of the node is there with the bytes it must have; read in full, since its space may be there without them."""
    try:
        reader = tier.open_pack(f"{lost.directory}/{file.name}")
    except (FileNotFoundError, IntegrityError):
        return False
    try:
        return reader.size_bytes == file.size_bytes and _matches(reader, lost, file, watch)
    except (IntegrityError, StorageError):
        return False
    finally:
        reader.close()


def _matches(reader: PackReader, lost: LostNode, file: StreamFile, watch: Watch) -> bool:
    pack = next((pack for pack in lost.record.packs if pack.file == file.name), None)
    buffer, total = make_buffer(_READ_BLOCKS), 0
    digest = blake3()
    for offset in range(0, file.size_bytes, buffer.nbytes):
        watch.check()
        part = buffer[: min(buffer.nbytes, file.size_bytes - offset)]
        reader.read_into(offset, part)
        total = crc.crc(part, total)
        if pack is None:
            digest.update(part)
    if pack is not None:
        return total == pack.crc32
    return total == lost.record.objects_crc32 and digest.hexdigest() == lost.record.objects_blake3
