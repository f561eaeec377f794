"""Reads every byte of a checkpoint and says all that is wrong with it.

Invariants: nothing here writes. A fault never ends the work as long as something is left that can be checked; each
names the file, and the keys and the block where that can be told. Memory is bounded by one buffer per thread, whatever
the size of the checkpoint.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from safehold.errors import CheckpointError, FormatVersionError, IntegrityError, StorageError, TornFileError
from safehold.format import crc, document, names, objects, objects_file, pack, paths
from safehold.format.plan import Plan
from safehold.format.records import Manifest, NodeRecord, PackRecord
from safehold.pipeline import agreement
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.expected import expected_tensors, rows_of_packs
from safehold.pipeline.findings import MAX_KEYS, Fault, VerifyReport
from safehold.pipeline.joining import not_here
from safehold.pipeline.redundancy_check import RedundancyCheck
from safehold.policy import coverage
from safehold.tiers.base import PackReader, Tier
from safehold.types import CommitId

T = TypeVar("T")

CHUNK_BYTES = 8 << 20
"""Size of one read; a multiple of the checksum block."""

Progress = Callable[[int, int], None]
"""Told (bytes read so far, bytes in all); called from several threads, never at the same time."""


def verify(
    tier: Tier,
    commit: CommitId,
    progress: Progress | None = None,
    *,
    threads: int = 2,
    direct: bool = True,
    patience_s: float = 1.0,
) -> VerifyReport:
    """Read every byte of a checkpoint and check it.

    Checked are: manifest, node records and plan, each alone and against each other; coverage of every leaf; size and
    every block's checksum of every pack; every pack's header against the plan; objects, their checksums, and their
    names against the plan; shares of redundancy that lie here, against their records.

    Args:
        tier: Where the run directory is.
        commit: The checkpoint; it need not be believed.
        progress: Told how far the reading is.
        threads: Threads that read.
        direct: Read past the page cache where that is possible: what counts is what the storage has.
        patience_s: See `Catalog`.

    Raises:
        FormatVersionError: A newer library wrote it.
        StorageError: The tier fails altogether. A read error in one file is a fault.
    """
    return _Verification(Catalog(tier, patience_s=patience_s), commit, progress, threads=threads, direct=direct).run()


@dataclass(slots=True)
class _Tally:
    """Faults and progress, shared by the reading threads."""

    progress: Progress | None
    total_bytes: int = 0
    done_bytes: int = 0
    num_files: int = 0
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, fault: Fault) -> None:
        with self.lock:
            self.faults.append(fault)

    def read(self, num_bytes: int) -> None:
        with self.lock:
            self.done_bytes += num_bytes
            if self.progress is not None:
                self.progress(self.done_bytes, self.total_bytes)


class _Verification:
    """One verification, from the documents down to the blocks."""

    def __init__(
        self, catalog: Catalog, commit: CommitId, progress: Progress | None, *, threads: int, direct: bool
    ) -> None:
        self._tier = catalog.tier
        self._commit = commit
        self._directory = paths.checkpoint_dir(commit)
        self._threads = threads
        self._direct = direct
        self._tally = _Tally(progress)
        self._catalog = catalog
        self._not_here: list[str] = []

    def run(self) -> VerifyReport:
        manifest = self._document(lambda: self._catalog.read_manifest(self._commit)[1], paths.MANIFEST)
        notes: list[str] = []
        if manifest is not None:
            records = self._records(manifest)
            plan = self._document(lambda: self._catalog.read_plan(manifest), paths.plan(manifest.plan_digest), "")
            if plan is not None:
                self._agreement(manifest, records, plan)
            redundancy = RedundancyCheck(self._tier, manifest)
            self._files(records, plan, redundancy.num_bytes)
            self._redundancy(redundancy)
            notes = [*self._notes(records), *redundancy.notes]
        faults = sorted(self._tally.faults, key=lambda f: (f.path, f.offset_bytes or 0, f.message))
        return VerifyReport(
            commit=self._commit,
            faults=tuple(faults),
            notes=tuple(notes),
            num_files=self._tally.num_files,
            num_bytes=self._tally.done_bytes,
            not_read=tuple(self._not_here),
        )

    def _document(self, read: Callable[[], T], name: str, directory: str | None = None) -> T | None:
        place = self._directory if directory is None else directory
        path = f"{place}/{name}" if place else name
        try:
            found = read()
        except FormatVersionError:
            raise
        except IntegrityError as exc:
            self._tally.fault(Fault(path=path, message=exc.message))
            return None
        self._tally.num_files += 1
        return found

    def _records(self, manifest: Manifest) -> dict[int, NodeRecord]:
        found = {}
        self._not_here = not_here(manifest, [entry.name for entry in self._tier.list(self._directory)])
        for ref in manifest.nodes:
            if manifest.own_disks and manifest.own_disks[ref.node] in self._not_here:
                continue
            read = partial(self._catalog.read_record, manifest, ref.node)
            record = self._document(read, paths.node_record(ref.node))
            if record is not None:
                found[ref.node] = record
        return found

    def _agreement(self, manifest: Manifest, records: dict[int, NodeRecord], plan: Plan) -> None:
        path = f"{self._directory}/{paths.MANIFEST}"
        try:
            if len(records) == len(manifest.nodes):
                agreement.cross_check(manifest, records, plan, path=path)
            coverage.check(plan)
        except CheckpointError as exc:
            self._tally.fault(
                Fault(path=exc.path or paths.plan(manifest.plan_digest), message=exc.message, rank=exc.rank)
            )

    def _redundancy(self, check: RedundancyCheck) -> None:
        for damage in check.run(self._tally.read, direct=self._direct):
            self._tally.fault(
                Fault(
                    path=damage.path,
                    message=damage.message,
                    block=damage.block,
                    offset_bytes=damage.offset_bytes,
                    node=damage.node,
                    redundancy=True,
                )
            )
        self._tally.num_files += check.num_files

    def _files(self, records: dict[int, NodeRecord], plan: Plan | None, more_bytes: int) -> None:
        rows = rows_of_packs(plan) if plan is not None else {}
        jobs = [(node, entry) for node, record in sorted(records.items()) for entry in record.packs]
        self._tally.total_bytes = sum(entry.size_bytes for _, entry in jobs)
        self._tally.total_bytes += sum(record.objects_size_bytes for record in records.values()) + more_bytes
        for node, record in sorted(records.items()):
            if record.objects_size_bytes:
                self._objects(node, record, plan)
            elif plan is not None:
                self._no_objects(node, plan)
        with ThreadPoolExecutor(self._threads) as pool:
            buffers = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(self._threads)]
            for node, entry in jobs:
                _PackCheck(self, pool, buffers, node, entry, plan, rows.get((entry.rank, entry.part))).run()

    def _objects(self, node: int, record: NodeRecord, plan: Plan | None) -> None:
        path = f"{self._directory}/{paths.node_objects(node)}"
        try:
            data = self._tier.get(path, limit_bytes=record.objects_size_bytes)
        except FileNotFoundError:
            self._tally.fault(Fault(path=path, message="the file is missing", node=node))
            return
        except CheckpointError as exc:
            self._tally.fault(Fault(path=path, message=exc.message, node=node))
            return
        self._tally.read(len(data))
        self._tally.num_files += 1
        if len(data) != record.objects_size_bytes:
            text = f"has {len(data)} bytes, the node record says {record.objects_size_bytes}"
            self._tally.fault(Fault(path=path, message=text, node=node))
        elif document.digest(data) != record.objects_blake3 or crc.crc(data) != record.objects_crc32:
            self._tally.fault(Fault(path=path, message="does not match its checksum in the node record", node=node))
        try:
            stored = objects_file.parse(data, path=path)
        except IntegrityError as exc:
            self._tally.fault(Fault(path=path, message=exc.message, node=node))
            return
        for rank in _ranks_on(node, plan) if plan is not None else stored.ranks():
            self._objects_of_rank(path, stored, node, rank, plan)

    def _objects_of_rank(
        self, path: str, stored: objects_file.ObjectsFile, node: int, rank: int, plan: Plan | None
    ) -> None:
        there = set(stored.names(rank)) if rank in stored.ranks() else set()
        if plan is not None:
            wanted = {spec.name for spec in plan.objects[rank]}
            odd = {"objects are missing": wanted - there, "objects are not in the plan": there - wanted}
            for text, keys in odd.items():
                if keys:
                    self._tally.fault(_keyed(path, text, sorted(keys), node=node, rank=rank))
        for name in sorted(there):
            try:
                objects.decode(stored.get(rank, name))
            except (CheckpointError, ValueError) as exc:
                text = f"an object cannot be decoded: {getattr(exc, 'message', exc)}"
                self._tally.fault(_keyed(path, text, [name], node=node, rank=rank))

    def _no_objects(self, node: int, plan: Plan) -> None:
        for rank in _ranks_on(node, plan):
            if keys := sorted(spec.name for spec in plan.objects[rank]):
                path = f"{self._directory}/{paths.node_record(node)}"
                text = "the node wrote no objects, the plan has some"
                self._tally.fault(_keyed(path, text, keys, node=node, rank=rank))

    def _notes(self, records: dict[int, NodeRecord]) -> list[str]:
        known = {paths.MANIFEST} | {entry.file for record in records.values() for entry in record.packs}
        notes = [
            f"node {names.display(name)}: what it saved is on its own disk, and was not read" for name in self._not_here
        ]
        for entry in self._tier.list(self._directory):
            ours = paths.parse_node_record(entry.name), paths.parse_node_objects(entry.name)
            if entry.name in known or any(node in records for node in ours if node is not None):
                continue
            if paths.is_redundancy(entry.name):
                continue  # told by its own check
            if paths.parse_tombstone(entry.name) is not None:
                notes.append(f"{self._directory}/{entry.name}: the checkpoint was un-committed")
            else:
                notes.append(f"{self._directory}/{names.display(entry.name)}: the manifest does not know this file")
        return notes


class _PackCheck:
    """Reads one pack: its blocks in parallel, then its header against the plan."""

    def __init__(
        self,
        owner: _Verification,
        pool: ThreadPoolExecutor,
        buffers: list[memoryview],
        node: int,
        entry: PackRecord,
        plan: Plan | None,
        rows: npt.NDArray[np.intp] | None,
    ) -> None:
        self._owner = owner
        self._pool = pool
        self._buffers = buffers
        self._node = node
        self._entry = entry
        self._path = f"{owner._directory}/{paths.pack(node, entry.rank, entry.part)}"
        self._plan = plan
        self._expected = expected_tensors(plan, rows) if plan is not None else None
        self._order = sorted(self._expected.items(), key=lambda item: item[1].start) if self._expected else []
        self._starts = [tensor.start for _, tensor in self._order]
        self._first_bad = self._entry.size_bytes

    def run(self) -> None:
        tally = self._owner._tally
        try:
            reader = self._owner._tier.open_pack(self._path, direct=self._owner._direct)
        except FileNotFoundError:
            self._fault("the file is missing", keys=self._keys(0, self._entry.size_bytes))
            tally.read(self._entry.size_bytes)
            return
        except (IntegrityError, StorageError) as exc:
            self._fault(exc.message, keys=self._keys(0, self._entry.size_bytes))
            tally.read(self._entry.size_bytes)
            return
        try:
            if reader.size_bytes != self._entry.size_bytes:
                text = f"has {reader.size_bytes} bytes, the node record says {self._entry.size_bytes}"
                self._fault(text, keys=self._keys(reader.size_bytes, self._entry.size_bytes))
            self._blocks(reader)
            if self._first_bad >= (self._starts[0] if self._starts else 1):  # else the header's damage was named
                self._header(reader)
        finally:
            reader.close()
        tally.num_files += 1

    def _blocks(self, reader: PackReader) -> None:
        """Check every whole block that is there; what lies behind a cut was named already."""
        size = min(reader.size_bytes, self._entry.size_bytes)
        if size < self._entry.size_bytes:
            size -= size % crc.BLOCK_BYTES
        wanted = crc.decode_crcs(self._entry.block_crcs)
        offsets = range(0, size, CHUNK_BYTES)
        lock, free = threading.Lock(), list(self._buffers)

        def check(offset: int) -> None:
            with lock:
                buffer = free.pop()
            try:
                self._chunk(reader, offset, buffer[: min(CHUNK_BYTES, size - offset)], wanted)
            finally:
                with lock:
                    free.append(buffer)

        for _ in self._pool.map(check, offsets):
            pass
        self._owner._tally.read(self._entry.size_bytes - size)

    def _chunk(self, reader: PackReader, offset: int, buffer: memoryview, wanted: npt.NDArray[np.uint32]) -> None:
        try:
            reader.read_into(offset, buffer)
        except (StorageError, TornFileError):
            # Find out which blocks cannot be read, so that the rest is checked and the keys can be named.
            for start in range(0, len(buffer), crc.BLOCK_BYTES):
                part = buffer[start : start + crc.BLOCK_BYTES]
                try:
                    reader.read_into(offset + start, part)
                except (StorageError, TornFileError) as exc:
                    self._block_fault((offset + start) // crc.BLOCK_BYTES, len(part), exc.message)
                else:
                    self._compare(offset + start, part, wanted)
        else:
            self._compare(offset, buffer, wanted)
        self._owner._tally.read(len(buffer))

    def _compare(self, offset: int, data: memoryview, wanted: npt.NDArray[np.uint32]) -> None:
        first = offset // crc.BLOCK_BYTES
        found = crc.crc_blocks(data)
        for place in np.flatnonzero(found != wanted[first : first + len(found)]).tolist():
            length = min(crc.BLOCK_BYTES, len(data) - place * crc.BLOCK_BYTES)
            text = f"checksum {found[place]:08x} instead of {wanted[first + place]:08x}"
            self._block_fault(first + place, length, text)

    def _block_fault(self, block: int, length: int, text: str) -> None:
        start = block * crc.BLOCK_BYTES
        self._first_bad = min(self._first_bad, start)
        self._fault(
            f"block {block} (bytes {start} to {start + length}): {text}",
            block=block,
            offset_bytes=start,
            keys=self._keys(start, start + length),
        )

    def _header(self, reader: PackReader) -> None:
        """Check the header against the plan, so that other readers of safetensors find the same tensors as we do."""
        size = reader.size_bytes
        try:
            head = bytearray(min(8, size))
            reader.read_into(0, memoryview(head))
            head = bytearray(pack.header_bytes(bytes(head), size, path=self._path))
            reader.read_into(0, memoryview(head))
            header = pack.parse_header(bytes(head), size, path=self._path)
        except (IntegrityError, StorageError) as exc:
            self._fault(exc.message)
            return
        if self._expected is None:
            return
        found = {key: t for key, t in header.tensors.items() if not key.startswith(names.PAD_PREFIX)}
        for text, keys in (
            ("the header lacks pieces of the plan", self._expected.keys() - found.keys()),
            ("the header has pieces that are not in the plan", found.keys() - self._expected.keys()),
            (
                "the header and the plan disagree about dtype, shape or place",
                {key for key in self._expected.keys() & found.keys() if self._expected[key] != found[key]},
            ),
        ):
            if keys:
                self._fault(text, keys=(sorted(keys)[:MAX_KEYS], len(keys)))

    def _keys(self, start: int, end: int) -> tuple[list[str], int]:
        """Keys of the pieces that have bytes in a range of the pack, the first few and their number."""
        low = max(0, bisect_right(self._starts, start) - 1)
        found = []
        for key, tensor in self._order[low:]:
            if tensor.start >= end:
                break
            if tensor.end > start and tensor.end > tensor.start:
                found.append(key)
        return found[:MAX_KEYS], len(found)

    def _fault(
        self,
        message: str,
        *,
        keys: tuple[list[str], int] = ([], 0),
        block: int | None = None,
        offset_bytes: int | None = None,
    ) -> None:
        self._owner._tally.fault(
            Fault(
                path=self._path,
                message=message,
                block=block,
                offset_bytes=offset_bytes,
                keys=tuple(keys[0]),
                num_keys=keys[1],
                node=self._node,
                rank=self._entry.rank,
            )
        )


def _keyed(path: str, text: str, keys: list[str], *, node: int, rank: int) -> Fault:
    return Fault(path=path, message=text, keys=tuple(keys[:MAX_KEYS]), num_keys=len(keys), node=node, rank=rank)


def _ranks_on(node: int, plan: Plan) -> list[int]:
    return [rank for rank, at in enumerate(plan.nodes) if at == node]
