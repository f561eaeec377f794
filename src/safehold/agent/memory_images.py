"""What one node has of a checkpoint in memory: images of ranks, shares made of them, and redundancy for others of its set.

Invariants: under the lock of `memory_held.Held`. A share of redundancy is kept as any other, under the number that `redundancy_key` gives,
with an image for each parity row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from safehold.errors import ChecksumError, TornFileError
from safehold.format import crc, document, paths, records
from safehold.format.records import NodeRecord
from safehold.policy.memory_parity import RedundancyTold
from safehold.types import CommitId


@dataclass(slots=True)
class Image:
    """The packs of one rank, end to end, from `offset` of `fd`, which is this image's own.

    Attributes:
        arena_id: Of the arena that it is; -1 for a copy.
        writers: How many transfers into it are under way.
        pieces: Offset -> (size, CRC32) of what came of a copy.
        packs: (offset, size) of each pack inside the image.
    """

    fd: int
    size_bytes: int
    arena_id: int = -1
    writers: int = 0
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)
    packs: list[tuple[int, int]] = field(default_factory=list)

    def crc_of_all(self) -> int | None:
        """Return the CRC32 of all bytes, if they came without gap or overlap."""
        end, found = 0, []
        for offset, (size, value) in sorted(self.pieces.items()):
            if offset != end:
                return None
            end += size
            found.append((value, size))
        if end != self.size_bytes:
            return None
        return crc.combine([value for value, _ in found], [size for _, size in found])


@dataclass(slots=True)
class Share:
    """What one node has of a save; see the module.

    Attributes:
        images: By rank, or by parity row.
        record: The node record; of redundancy its record.
        objects: Encoded objects.
        whole: It counts.
        files: Name of a pack -> (rank, offset, size) in the rank's image; of redundancy, of a row's file -> (row, offset, size).
        told: Of redundancy: what is told of it.
        run_id: Of redundancy: the run.
    """

    images: dict[int, Image] = field(default_factory=dict)
    record: bytes = b""
    objects: bytes = b""
    whole: bool = False
    files: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    told: RedundancyTold | None = None
    run_id: str = ""

    def document(self, node: int, name: str) -> bytes | None:
        """Return a document of that name, of the share that is kept under `node`."""
        if node < 0:
            return self.record if name == paths.redundancy_record(redundancy_key(node)) else None
        if name == paths.node_record(node):
            return self.record
        return self.objects if name == paths.node_objects(node) else None

    def seal(self, decoded: NodeRecord) -> None:
        """It is whole: learn where its packs are."""
        self.files.clear()
        for image in self.images.values():
            image.packs.clear()
        ends = dict.fromkeys(self.images, 0)
        for pack in sorted(decoded.packs, key=lambda pack: (pack.rank, pack.part)):
            start = ends[pack.rank]
            self.files[pack.file] = (pack.rank, start, pack.size_bytes)
            self.images[pack.rank].packs.append((start, pack.size_bytes))
            ends[pack.rank] = start + pack.size_bytes
        self.whole = True


def redundancy_key(node: int) -> int:
    """Return the number under which a node's share of redundancy is kept; twice is the node again."""
    return ~node


def decoded_record(record: bytes, commit: CommitId, node: int) -> NodeRecord:
    """Return the record of a node that is kept here."""
    return records.decode_node_record(record, path=f"{paths.checkpoint_dir(commit)}/{paths.node_record(node)}")


def check_copy(share: Share, decoded: NodeRecord, commit: CommitId, node: int, objects: bytes) -> None:
    """Compare what came with the record that came with it."""
    step = commit.step
    if decoded.commit != commit or decoded.node != node:
        raise TornFileError("the record of another save came", step=step)
    if len(objects) != decoded.objects_size_bytes or document.digest(objects) != decoded.objects_blake3:
        raise ChecksumError(f"the objects of node {node} did not come as they are", step=step)
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for pack in sorted(decoded.packs, key=lambda pack: (pack.rank, pack.part)):
        by_rank.setdefault(pack.rank, []).append((pack.crc32, pack.size_bytes))
    if set(by_rank) != set(share.images):
        raise TornFileError(f"the copy of node {node} lacks packs of a rank", step=step)
    for rank, packs in by_rank.items():
        image = share.images[rank]
        wanted = crc.combine([value for value, _ in packs], [size for _, size in packs])
        if sum(size for _, size in packs) != image.size_bytes or image.crc_of_all() != wanted:
            text = f"the copy of rank {rank} does not match its checksums"
            raise ChecksumError(text, step=step, rank=rank, tier="memory")
