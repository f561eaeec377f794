"""Reads symbols of a redundancy set from the nodes that have them, and believes none that does not verify.

Invariants: a block counts only if it matches a checksum: data that of the node record, which the manifest names, shares that of the
redundancy record beside them. What cannot be read or does not match is lost there, noted once, and never raised: who reads decides
whether the rest is enough. A node that does not answer is asked no more. Thread-safe.

Must not live here: how other nodes are reached (`Members`), what is done about a loss (`pipeline.rebuild`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from safehold.errors import CheckpointError, ChecksumError, IntegrityError, StorageError, TornFileError
from safehold.format import crc, paths, redundancy
from safehold.format.records import NodeRecord
from safehold.format.redundancy import RedundancyRecord
from safehold.policy.placement import RedundancySet
from safehold.policy.stripes import Geometry, stream_of
from safehold.types import CommitId

BLOCK: Final = crc.BLOCK_BYTES
MAX_STORAGE_ERRORS: Final = 8
"""A node whose storage failed so often is not asked any more."""


class Members(Protocol):
    """Where the bytes of other nodes come from. Used by several threads at once."""

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with bytes of a file on a node's tier; has a deadline of its own.

        Args:
            node: The node.
            path: Inside the run directory.
            offset: First byte.
            buffer: Contiguous and writable.

        Raises:
            FileNotFoundError: The node answers, and has no such file.
            TornFileError: The file ends before.
            StorageError: The node answers, and its storage failed.
            CheckpointError: Anything else: the node is not to be had.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSource:
    """Something that was lost where it was looked for.

    Attributes:
        node: Where.
        path: The file, inside the run directory.
        block: Its block, if it is not the whole file.
        error: Why.
    """

    node: int
    path: str
    block: int | None
    error: CheckpointError

    def __str__(self) -> str:
        block = "" if self.block is None else f", block {self.block}"
        return f"node {self.node}: {self.path}{block}: {self.error.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetView:
    """A redundancy set of one checkpoint: documents that are verified and agree.

    Attributes:
        commit: The checkpoint.
        of: The set.
        records: Node records of its members, in the order of the ring.
        stored: The same as stored.
        geometry: Where their bytes lie.
        held: Position -> what that member says it holds; who did not answer or finish is not there.
    """

    commit: CommitId
    of: RedundancySet
    records: tuple[NodeRecord, ...]
    stored: tuple[bytes, ...]
    geometry: Geometry
    held: Mapping[int, RedundancyRecord] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The checkpoint's directory inside the run directory."""
        return paths.checkpoint_dir(self.commit)


def view_of(
    commit: CommitId,
    of: RedundancySet,
    records: Sequence[NodeRecord],
    stored: Sequence[bytes],
    held: Mapping[int, RedundancyRecord] | None = None,
) -> SetView:
    """Return the view of a set; what a member holds counts only where its sizes are those that the set gives."""
    geometry = Geometry(of, [stream_of(record) for record in records])
    fitting = {
        position: record
        for position, record in (held or {}).items()
        if [share.size_bytes for share in record.shares]
        == [geometry.share_bytes(of.stripe_of_row(position, row)) for row in range(of.num_parity)]
    }
    return SetView(commit=commit, of=of, records=tuple(records), stored=tuple(stored), geometry=geometry, held=fitting)


class Symbols:
    """Reads data and parity symbols of a set."""

    def __init__(self, view: SetView, members: Members, answering: Collection[int]) -> None:
        """Read from the nodes that answer and from no others."""
        self.view = view
        self._members = members
        self._silent = {node for node in view.of.members if node not in answering}
        self._gone: set[tuple[int, str]] = set()
        self._storage_errors: dict[int, int] = {}
        self._found: list[BadSource] = []
        self._told: set[tuple[int, str, int | None]] = set()
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._objects: dict[int, npt.NDArray[np.uint32] | None] = {}
        self._packs = [_crcs_of_packs(record) for record in view.records]
        self._shares = {
            position: [crc.decode_crcs(share.block_crcs) for share in record.shares]
            for position, record in view.held.items()
        }

    @property
    def faults(self) -> tuple[BadSource, ...]:
        """What was found lost so far."""
        with self._lock:
            return tuple(self._found)

    def answers(self, position: int) -> bool:
        """Whether a member is still asked."""
        return self.view.of.members[position] not in self._silent

    def holds(self, position: int) -> bool:
        """Whether a member has finished the shares that it holds, and is still asked."""
        return position in self._shares and self.answers(position)

    def pack_crcs(self, position: int, name: str) -> npt.NDArray[np.uint32] | None:
        """Return the checksums of a member's pack; None for its objects, which the node record has only one of."""
        return self._packs[position].get(name)

    def data(self, stripe: int, chunk: int, row: int, count: int, buffer: memoryview) -> set[int]:
        """Read rows of a data symbol into `buffer`, zeros behind the end; return the rows (from 0) that are lost."""
        position, block, there = self.view.geometry.blocks(stripe, chunk, row, count)
        bad, filled = set[int](), 0
        stream = self.view.geometry.streams[position]
        for run in stream.runs(block, there):
            start = (run.block - block) * BLOCK
            _zero(buffer[filled:start])
            filled = start + run.nbytes
            name = stream.files[run.file].name
            wanted = self._wanted(position, name)
            if wanted is None:
                bad.update(range(run.block - block, run.block - block + run.count))
                continue
            first = run.offset // BLOCK
            lost = self.read(position, name, run.offset, buffer[start:filled], wanted[first : first + run.count])
            bad.update(run.block - block + number for number in lost)
        _zero(buffer[filled : count * BLOCK])
        return bad

    def parity(self, stripe: int, parity: int, row: int, count: int, buffer: memoryview) -> set[int]:
        """Read rows of a parity symbol into `buffer`, zeros behind the end; return the rows (from 0) that are lost."""
        position = self.view.of.parity_position(stripe, parity)
        if position not in self._shares:
            return set(range(count))
        share = self.view.held[position].shares[parity]
        start = min(row * BLOCK, share.size_bytes)
        end = min((row + count) * BLOCK, share.size_bytes)
        _zero(buffer[end - start : count * BLOCK])
        if end <= start:
            return set()
        wanted = self._shares[position][parity][row : row + crc.num_blocks(end - start)]
        return self.read(position, share.file, start, buffer[: end - start], wanted)

    def read(
        self, position: int, name: str, offset: int, buffer: memoryview, wanted: npt.NDArray[np.uint32]
    ) -> set[int]:
        """Read whole blocks of a file and compare them; return those (from 0) that are lost."""
        node = self.view.of.members[position]
        every = set(range(len(wanted)))
        if node in self._silent or (node, name) in self._gone:
            return every
        error = self._fetch(node, name, offset, buffer)
        if error is not None:
            if len(wanted) == 1 or node in self._silent or (node, name) in self._gone:
                self._note(
                    node, name, offset // BLOCK if isinstance(error, IntegrityError | StorageError) else None, error
                )
                return every
            bad = set()
            for number in range(len(wanted)):
                part = buffer[number * BLOCK : (number + 1) * BLOCK]
                if self.read(position, name, offset + number * BLOCK, part, wanted[number : number + 1]):
                    bad.add(number)
            return bad
        found = crc.crc_blocks(buffer)
        bad = set(np.flatnonzero(found != wanted).tolist())
        for number in sorted(bad):
            text = f"checksum {found[number]:08x} instead of {wanted[number]:08x}"
            self._note(node, name, offset // BLOCK + number, ChecksumError(text))
        return bad

    def _fetch(self, node: int, name: str, offset: int, buffer: memoryview) -> CheckpointError | None:
        """Read, and say what went wrong; learn which files and nodes need not be asked again."""
        path = f"{self.view.directory}/{name}"
        try:
            self._members.read_into(node, path, offset, buffer)
        except FileNotFoundError:
            self._gone.add((node, name))
            return TornFileError("the file is missing", path=path)
        except IntegrityError as exc:
            return exc
        except StorageError as exc:
            with self._lock:
                self._storage_errors[node] = self._storage_errors.get(node, 0) + 1
                if self._storage_errors[node] >= MAX_STORAGE_ERRORS:
                    self._silent.add(node)
            return exc
        except CheckpointError as exc:
            self._note(node, name, None, exc)  # before anybody finds it silent, and looks for the reason
            self._silent.add(node)
            return exc
        return None

    def _wanted(self, position: int, name: str) -> npt.NDArray[np.uint32] | None:
        """Return the checksums of a file of a member; objects are read once for them."""
        if (known := self._packs[position].get(name)) is not None:
            return known
        with self._scanning:
            if position not in self._objects:
                self._objects[position] = self._scan(position, name)
            return self._objects[position]

    def _scan(self, position: int, name: str) -> npt.NDArray[np.uint32] | None:
        """Take the checksums of an objects file's blocks; None where they are not those that the node record vouches for."""
        record, node = self.view.records[position], self.view.of.members[position]
        if node in self._silent:
            return None
        size, found = record.objects_size_bytes, []
        buffer = memoryview(bytearray(min(size, BLOCK)))
        for offset in range(0, size, BLOCK):
            part = buffer[: min(BLOCK, size - offset)]
            error = self._fetch(node, name, offset, part)
            if error is not None:
                self._note(node, name, None, error)
                return None
            found.append(crc.crc(part))
        crcs = np.array(found, dtype=np.uint32)
        if crc.combine_blocks(crcs, size) != record.objects_crc32:
            self._note(node, name, None, ChecksumError("does not match its checksum in the node record"))
            return None
        return crcs

    def _note(self, node: int, name: str, block: int | None, error: CheckpointError) -> None:
        with self._lock:
            if (node, name, block) not in self._told:
                self._told.add((node, name, block))
                self._found.append(BadSource(node=node, path=f"{self.view.directory}/{name}", block=block, error=error))


def read_document(members: Members, node: int, path: str, size_bytes: int) -> bytes:
    """Read a whole small file of another node, of a size that is known; errors as for `Members.read_into`."""
    data = bytearray(size_bytes)
    if data:
        members.read_into(node, path, 0, memoryview(data))
    return bytes(data)


def read_redundancy(members: Members, node: int, directory: str) -> tuple[RedundancyRecord, tuple[bytes, ...]]:
    """Read another node's redundancy record, whose size is learned on the way; verified by itself only.

    Raises:
        FileNotFoundError: It has none.
        CheckpointError: It cannot be read, or does not verify.
    """
    path = f"{directory}/{paths.redundancy_record(node)}"
    head = read_document(members, node, path, redundancy.ALIGNMENT_BYTES)
    need = redundancy.head_bytes(head, path=path)
    if need > len(head):
        head = read_document(members, node, path, need)
    record, end = redundancy.decode_head(head[:need], path=path)
    data = bytearray(redundancy.file_bytes(record, end))
    data[: len(head)] = head
    if len(data) > len(head):
        members.read_into(node, path, len(head), memoryview(data)[len(head) :])
    return redundancy.decode_redundancy(memoryview(data), path=path)


def _crcs_of_packs(record: NodeRecord) -> dict[str, npt.NDArray[np.uint32]]:
    return {pack.file: crc.decode_crcs(pack.block_crcs) for pack in record.packs}


def _zero(view: memoryview) -> None:
    if view.nbytes:
        np.frombuffer(view, dtype=np.uint8)[:] = 0
