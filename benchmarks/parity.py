"""What redundancy costs: making a node's share and giving a lost node back, per scheme, beside a plain copy of the same bytes.

    python benchmarks/parity.py --bytes 268435456 --rounds 3 --dir /dev/shm

- copy: one thread copies a node's bytes as one block into populated memory.
- sum: the algebra alone, on blocks in memory, for all parity rows that one node makes; one thread.
- protect, rebuild: the real pipeline, every block read, checked against its checksum, summed and written with its own, through a tier in
  `--dir` (in memory by default, so that neither storage nor network is measured), with `--threads` threads.

GB/s are of a node's own data (protected, given back); "moved" counts all that was read and written. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from safehold.format import crc, document, paths, records
from safehold.host import parity
from safehold.pipeline.block_work import Effort
from safehold.pipeline.lost_node import open_lost
from safehold.pipeline.rebuild import rebuild
from safehold.pipeline.redundancy import coefficients_of, protect
from safehold.policy.placement import RedundancySet, parse_scheme, place
from safehold.tiers.base import PackReader, Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

COMMIT = CommitId(1, 1, 0)
DIRECTORY = paths.checkpoint_dir(COMMIT)
SCHEMES: tuple[dict[str, Any], ...] = (
    {"copies": 1},
    {"copies": 2},
    {"parity": "xor:4"},
    {"parity": "xor:8"},
    {"parity": "rs:4+2"},
    {"parity": "rs:8+2"},
)


class Nodes:
    """Nodes with one pack each, all in one directory; their files are kept open."""

    def __init__(self, root: Path, num_nodes: int, size_bytes: int) -> None:
        self.tier: Tier = FlashTier(root, direct=False)
        self._readers: dict[str, PackReader] = {}
        self.files: dict[int, str] = {}
        refs = []
        data = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)
        for node in range(num_nodes):
            data[: 1 << 20] = node
            view = memoryview(data)
            blocks = crc.crc_blocks(view)
            name = self.files[node] = paths.pack(node, node, 0)
            writer = self.tier.create_pack(f"{DIRECTORY}/{name}", size_bytes)
            writer.write_at(0, view)
            writer.finish()
            entry = records.PackRecord(
                file=name,
                rank=node,
                part=0,
                size_bytes=size_bytes,
                crc32=crc.combine_blocks(blocks, size_bytes),
                block_crcs=crc.encode_crcs(blocks),
            )
            stored = records.encode_node_record(
                records.NodeRecord(run_id="run", node=node, node_name=str(node), commit=COMMIT, packs=(entry,))
            )
            self.tier.put(f"{DIRECTORY}/{paths.node_record(node)}", stored)
            refs.append(records.NodeRef(node=node, size_bytes=len(stored), blake3=document.digest(stored)))
        self.manifest = records.Manifest(
            run_id="run",
            commit=COMMIT,
            world_size=num_nodes,
            nodes=tuple(refs),
            plan_digest="0" * 64,
            plan_size_bytes=0,
            total_bytes=num_nodes * size_bytes,
            crc32=0,
            created_s=1.0,
            library="benchmark",
        )
        self.tier.put(f"{DIRECTORY}/{paths.MANIFEST}", records.encode_manifest(self.manifest))

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        """See `safehold.pipeline.redundancy.Members`."""
        if path.endswith(".json"):
            self.tier.open_pack(path).read_into(offset, buffer)
            return
        if path not in self._readers:
            self._readers[path] = self.tier.open_pack(path)
        self._readers[path].read_into(offset, buffer)

    def forget(self, one: RedundancySet) -> None:
        """Remove all redundancy."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        for node in one.members:
            self.tier.delete(f"{DIRECTORY}/{paths.redundancy_record(node)}")
            for row in range(one.num_parity):
                self.tier.delete(f"{DIRECTORY}/{paths.redundancy_share(node, row)}")


def median(rounds: int, work: Callable[[], None], between: Callable[[], None] = lambda: None) -> float:
    taken = []
    for _ in range(rounds):
        between()
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def measure_copy(size_bytes: int, rounds: int) -> float:
    source = np.random.default_rng(2).integers(0, 256, size_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    np.copyto(target, source)
    return median(rounds, lambda: np.copyto(target, source))


def measure_sum(one: RedundancySet, size_bytes: int, rounds: int, field: parity.Field) -> float:
    """Sum as many blocks as a node's shares take."""
    block = crc.BLOCK_BYTES
    pool = np.random.default_rng(3).integers(0, 256, 64 * block, dtype=np.uint8)
    blocks = [memoryview(pool[start : start + block]) for start in range(0, len(pool), block)]
    target = memoryview(bytearray(block))
    rows = coefficients_of(one)

    def work() -> None:
        for number in range(-(-size_bytes // block // one.num_data)):
            sources = [blocks[(number * one.num_data + chunk) % len(blocks)] for chunk in range(one.num_data)]
            for row in rows:
                parity.sum_into(row, sources, target, field=field)

    return median(rounds, work)


def measure(words: dict[str, Any], size_bytes: int, rounds: int, threads: int, root: Path) -> dict[str, float]:
    scheme = parse_scheme(**words)
    assert scheme is not None
    effort = Effort(threads=threads)
    with tempfile.TemporaryDirectory(dir=root) as directory:
        nodes = Nodes(Path(directory) / "run", scheme.width, size_bytes)
        (one,) = place(scheme, range(scheme.width)).sets
        found = {"sum": measure_sum(one, size_bytes, rounds, parity.default_field())}
        found["tables"] = measure_sum(one, size_bytes, 1, parity.NumpyField())
        found["protect"] = median(
            rounds,
            lambda: (protect(nodes.tier, nodes.manifest, 0, one, nodes, effort=effort), None)[1],
            lambda: nodes.forget(one),
        )
        for node in one.members:
            protect(nodes.tier, nodes.manifest, node, one, nodes, effort=effort)
        there = [node for node in one.members if node != 0]

        def lose() -> None:
            nodes.tier.delete(f"{DIRECTORY}/{paths.node_record(0)}")
            nodes.tier.delete(f"{DIRECTORY}/{nodes.files[0]}")

        def give_back() -> None:
            rebuild(nodes.tier, open_lost(nodes.manifest, 0, nodes, there), effort=effort)

        found["rebuild"] = median(rounds, give_back, lose)
        nodes.forget(one)
    found["held"] = scheme.num_parity / scheme.num_data
    found["protect_moved"] = scheme.num_parity + found["held"]
    found["rebuild_moved"] = scheme.num_data + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=256 << 20, help="a node's own data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    size = options.bytes
    copy_s = measure_copy(size, options.rounds)
    print(f"{size / 1e6:.0f} MB a node, {options.threads} threads, {parity.default_field().name}, in {options.dir}")
    print(f"copy: {copy_s:.3f} s, {size / copy_s / 1e9:.2f} GB/s\n")
    print("scheme     held   sum GB/s  (NumPy)  protect GB/s   moved  x copy   rebuild GB/s   moved  x copy")
    for words in SCHEMES:
        found = measure(words, size, options.rounds, options.threads, options.dir)
        rate = {key: size / found[key] / 1e9 for key in ("sum", "tables", "protect", "rebuild")}
        name = f"copies={words['copies']}" if "copies" in words else words["parity"]
        print(
            f"{name:9} {found['held']:5.0%}  {rate['sum']:9.2f}  {rate['tables']:7.2f}"
            f"  {rate['protect']:12.2f}  {rate['protect'] * found['protect_moved']:6.2f}  {found['protect'] / copy_s:6.1f}"
            f"  {rate['rebuild']:13.2f}  {rate['rebuild'] * found['rebuild_moved']:6.2f}  {found['rebuild'] / copy_s:6.1f}"
        )


if __name__ == "__main__":
    main()
