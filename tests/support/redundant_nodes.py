"""Nodes with a tier each and a checkpoint of random files, for tests of redundancy.

nodes = Nodes(tmp_path, [[5000, 0], [3 << 20], []])     # sizes of the packs of each node
nodes.protect(layout)
nodes.lose(1)
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from safehold.errors import AgentUnavailableError
from safehold.format import crc, document, paths, records
from safehold.format.redundancy import RedundancyRecord
from safehold.pipeline.lost_node import LostNode, open_lost
from safehold.pipeline.redundancy import Effort, protect
from safehold.policy.placement import Layout
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

COMMIT = CommitId(7, 1, 0)
DIRECTORY = paths.checkpoint_dir(COMMIT)


class Nodes:
    """The nodes, and what one reads of another.

    Attributes:
        tiers: Node -> its tier.
        silent: Nodes that do not answer.
        reads: (node, path, offset, length) of every read.
        manifest: The checkpoint's.
        wanted: Node -> name -> content of what it wrote, node record included.
    """

    def __init__(
        self,
        root: Path | None,
        packs: Sequence[Sequence[int]],
        *,
        objects: Mapping[int, int] | None = None,
        seed: int = 0,
        run_id: str = "run",
        objects_blake3: str | None = None,
    ) -> None:
        """Write a checkpoint; without a root the tiers are on fake disks. `objects_blake3`: what node records say, true or not."""
        self.silent: set[int] = set()
        self.reads: list[tuple[int, str, int, int]] = []
        self.root = root
        self.disks: dict[int, FakeDisk] = {}
        self.tiers: dict[int, Tier] = {node: self.new_tier(node) for node in range(len(packs))}
        self.wanted: dict[int, dict[str, bytes]] = {}
        rng, refs, written = random.Random(seed), [], []
        for node, sizes in enumerate(packs):
            size = (objects or {}).get(node, 0)
            record, files = _files(node, sizes, size, rng, run_id)
            if objects_blake3 is not None and size:
                record = msgspec.structs.replace(record, objects_blake3=objects_blake3)
            files[paths.node_record(node)] = data = records.encode_node_record(record)
            self.wanted[node] = files
            refs.append(records.NodeRef(node=node, size_bytes=len(data), blake3=document.digest(data)))
            written.append(record)
        self.manifest = records.Manifest(
            run_id=run_id,
            commit=COMMIT,
            world_size=max(1, len(packs)),
            nodes=tuple(refs),
            plan_digest="0" * 64,
            plan_size_bytes=0,
            total_bytes=0,
            crc32=0,
            created_s=1.0,
            library="test",
        )
        for node in self.tiers:
            self.write(node)

    def new_tier(self, node: int) -> Tier:
        """Return an empty tier for a node, as a replacement has."""
        if self.root is None:
            disk = self.disks[node] = FakeDisk(f"/fake/{node}")
            return FlashTier(disk.root, disk)
        number = len(list(self.root.glob(f"{node}-*")))
        (self.root / f"{node}-{number}").mkdir(parents=True)
        return FlashTier(self.root / f"{node}-{number}", direct=False)

    def write(self, node: int) -> None:
        """Write a node's files and the manifest."""
        for name, data in self.wanted[node].items():
            self.tiers[node].put(f"{DIRECTORY}/{name}", data)
        self.tiers[node].put(f"{DIRECTORY}/{paths.MANIFEST}", records.encode_manifest(self.manifest))

    def protect(
        self, layout: Layout, *, nodes: Collection[int] | None = None, effort: Effort | None = None
    ) -> dict[int, RedundancyRecord]:
        """Make the redundancy of all nodes, or of some."""
        return {
            node: protect(self.tiers[node], self.manifest, node, of, self, effort=effort)
            for of in layout.sets
            for node in of.members
            if nodes is None or node in nodes
        }

    def lose(self, *nodes: int) -> None:
        """Let nodes answer no more."""
        self.silent.update(nodes)

    def replace(self, node: int) -> Tier:
        """Give a node an empty tier, which has the manifest."""
        tier = self.tiers[node] = self.new_tier(node)
        tier.put(f"{DIRECTORY}/{paths.MANIFEST}", records.encode_manifest(self.manifest))
        return tier

    def lost(self, node: int) -> LostNode:
        """Open a lost node."""
        return open_lost(self.manifest, node, self, [other for other in self.tiers if other not in self.silent])

    def files(self, node: int) -> dict[str, bytes]:
        """Return what lies on a node's tier in the checkpoint's directory, the manifest apart."""
        tier = self.tiers[node]
        return {
            entry.name: tier.get(f"{DIRECTORY}/{entry.name}", limit_bytes=1 << 30)
            for entry in tier.list(DIRECTORY)
            if entry.name != paths.MANIFEST
        }

    def own_files(self, node: int) -> dict[str, bytes]:
        """Return the same without redundancy."""
        return {name: data for name, data in self.files(node).items() if not name.startswith("redundancy-")}

    def flip(self, node: int, name: str, offset: int) -> None:
        """Flip a bit of a stored file."""
        path = f"{DIRECTORY}/{name}"
        data = bytearray(self.tiers[node].get(path, limit_bytes=1 << 30))
        data[offset] ^= 0x10
        self.tiers[node].put(path, bytes(data))

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        """See `Members`."""
        self.reads.append((node, path, offset, buffer.nbytes))
        if node in self.silent:
            raise AgentUnavailableError(f"node {node} does not answer", node=str(node))
        reader = self.tiers[node].open_pack(path)
        try:
            reader.read_into(offset, buffer)
        finally:
            reader.close()


def _files(
    node: int, sizes: Sequence[int], objects: int, rng: random.Random, run_id: str
) -> tuple[records.NodeRecord, dict[str, bytes]]:
    files, packs = {}, []
    for part, size in enumerate(sizes):
        name, data = paths.pack(node, node, part), rng.randbytes(size)
        files[name] = data
        packs.append(
            records.PackRecord(
                file=name,
                rank=node,
                part=part,
                size_bytes=size,
                crc32=crc.crc(data),
                block_crcs=crc.encode_crcs(crc.crc_blocks(data)),
            )
        )
    blob = rng.randbytes(objects)
    if blob:
        files[paths.node_objects(node)] = blob
    record = records.NodeRecord(
        run_id=run_id,
        node=node,
        node_name=f"host{node}",
        commit=COMMIT,
        packs=tuple(packs),
        objects_size_bytes=len(blob),
        objects_crc32=crc.crc(blob) if blob else 0,
        objects_blake3=document.digest(blob) if blob else "",
    )
    return record, files
