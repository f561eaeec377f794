"""Sends a node's share of a memory save to its partners, and takes in what others send.

Names of what travels: `<step>/<incarnation>/<attempt>/<node>/<rank>` for a rank's image, in pieces, and the same with `record` in the place
of the rank for the node's record and objects, which come last: their answer is the partner's word that the copy is whole.

Invariants: what is sent is compared with the checksums that were taken while it was staged, and the partner compares what came with the
record. A node sends its own share and no other. Everything ends by its deadline. Runs in threads; nothing here is the dispatcher's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from safehold.agent.memory_held import MAX_DOCUMENT_BYTES, Held
from safehold.agent.net.seam import Incoming, Landing, Network, Source
from safehold.errors import ChecksumError, DeadlineError, SkippedError, TornFileError
from safehold.format import crc, records
from safehold.format.records import PackRecord
from safehold.host import memfd
from safehold.host.process import lower_priority
from safehold.pipeline.pacing import Pacer
from safehold.types import CommitId

KIND = "held"
RECORD = "record"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a rank's image, inside one pack, and the CRC32 that it must have."""

    rank: int
    offset: int
    size: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What sending may take.

    Attributes:
        threads: Transfers at a time.
        piece_bytes: Of one transfer; a multiple of the checksum block.
        rate_bytes_s: Upper bound; 0: none.
        nice: Niceness of the threads.
        deadline_s: Seconds for all.
        pacer: Spaces out the work beside training.
    """

    threads: int
    piece_bytes: int
    rate_bytes_s: int
    nice: int
    deadline_s: float
    pacer: Pacer | None = None


class Sending:
    """One share on its way; `run` in a thread.

    Args:
        network: The way.
        partners: Names of the nodes that shall have it.
        commit: The save.
        node: Index of this node.
        record: Its record.
        objects: Its objects.
        images: Its ranks' images, mapped; they stay the caller's.
        cancelled: Set by anyone to give it up.
    """

    def __init__(
        self,
        network: Network,
        partners: Sequence[str],
        commit: CommitId,
        node: int,
        record: bytes,
        objects: bytes,
        images: dict[int, memfd.Mapping],
        cancelled: threading.Event,
    ) -> None:
        self._network, self._partners, self._commit, self._node = network, list(partners), commit, node
        self._record, self._objects, self._images = record, objects, images
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._free_at = 0.0

    def run(self, effort: Effort) -> None:
        """Send all of it to all partners.

        Raises:
            CheckpointError: It did not come whole to one of them, or was cancelled.
        """
        deadline = time.monotonic() + effort.deadline_s
        decoded = records.decode_node_record(self._record, path=f"the record of node {self._node}")
        work = [(name, piece) for piece in _pieces(decoded.packs, effort.piece_bytes) for name in self._partners]
        with ThreadPoolExecutor(effort.threads, "copy", initializer=_give_way, initargs=(effort.nice,)) as pool:
            jobs = [pool.submit(self._send, name, piece, effort, deadline) for name, piece in work]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
        for name in self._partners:
            self._send_record(name, deadline)

    def _send(self, name: str, piece: _Piece, effort: Effort, deadline: float) -> None:
        pause_s = self._turn(piece.size, effort.rate_bytes_s)
        if self._cancelled.wait(pause_s):
            raise SkippedError("the save was abandoned", step=self._commit.step)
        began = (
            effort.pacer.wait(self._cancelled, deadline - effort.deadline_s / 2) if effort.pacer is not None else 0.0
        )
        mapping = self._images[piece.rank]
        found = self._network.write_from(
            name,
            KIND,
            _name(self._commit, self._node, str(piece.rank)),
            piece.offset,
            mapping.view[piece.offset : piece.offset + piece.size],
            total=mapping.size_bytes,
            deadline_s=self._left_s(deadline),
        )
        if effort.pacer is not None:
            effort.pacer.spent(began)
        if found != piece.crc32:
            text = f"what rank {piece.rank} staged has changed in memory before it was copied to node {name}"
            hint = "this save is lost, training goes on; something writes to the arena"
            raise ChecksumError(text, step=self._commit.step, rank=piece.rank, tier="memory", hint=hint)

    def _send_record(self, name: str, deadline: float) -> None:
        data = len(self._record).to_bytes(_LENGTH_BYTES, "little") + self._record + self._objects
        place = _name(self._commit, self._node, RECORD)
        view = memoryview(data)
        self._network.write_from(name, KIND, place, 0, view, total=len(data), deadline_s=self._left_s(deadline))

    def _turn(self, size: int, rate_bytes_s: int) -> float:
        if not rate_bytes_s:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / rate_bytes_s
        return start - now

    def _left_s(self, deadline: float) -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the copies at other nodes were not made in time", step=self._commit.step)
        return left_s


def _give_way(nice: int) -> None:
    lower_priority(nice, lower_io=False)


def _pieces(packs: Sequence[PackRecord], piece_bytes: int) -> list[_Piece]:
    """Cut images at the borders of checksum blocks, none across two packs."""
    found: list[_Piece] = []
    ends: dict[int, int] = {}
    for pack in sorted(packs, key=lambda pack: (pack.rank, pack.part)):
        base = ends.get(pack.rank, 0)
        crcs = crc.decode_crcs(pack.block_crcs)
        for start in range(0, pack.size_bytes, piece_bytes):
            size = min(piece_bytes, pack.size_bytes - start)
            first = start // crc.BLOCK_BYTES
            value = crc.combine_blocks(crcs[first : first + crc.num_blocks(size)], size)
            found.append(_Piece(pack.rank, base + start, size, value))
        ends[pack.rank] = base + pack.size_bytes
    return found


def _name(commit: CommitId, node: int, what: str) -> str:
    return f"{commit.step}/{commit.incarnation}/{commit.attempt}/{node}/{what}"


class Receiving:
    """Takes in copies of other nodes; a `seam.Sink`.

    Args:
        held: Where they go.
        index_of: Index of a node by its name.
        wards: Returns the nodes whose copies this one keeps.
        incarnation: Returns the incarnation in force.
    """

    def __init__(
        self,
        held: Held,
        *,
        index_of: Callable[[str], int],
        wards: Callable[[], Sequence[int]],
        incarnation: Callable[[], int],
    ) -> None:
        self._held, self._index_of, self._wards, self._incarnation = held, index_of, wards, incarnation

    def sink(self, incoming: Incoming) -> Landing | None:
        """Say where bytes go that come."""
        fields = incoming.name.split("/")
        numbers = [int(field) for field in fields[:4] if field.isascii() and field.isdigit() and len(field) < 19]
        if len(fields) != 5 or len(numbers) != 4:
            return None
        commit, node, what = CommitId(*numbers[:3]), numbers[3], fields[4]
        if node != self._index_of(incoming.node) or node not in self._wards():
            raise TornFileError(f"node {incoming.node} sends what is not its own, or not for this node")
        if commit.incarnation != self._incarnation():
            raise TornFileError(f"a copy of incarnation {commit.incarnation} came", step=commit.step)
        if what == RECORD:
            return self._record(commit, node, incoming)
        if not (what.isascii() and what.isdigit() and len(what) < 10):
            return None
        return self._piece(commit, node, int(what), incoming)

    def _piece(self, commit: CommitId, node: int, rank: int, incoming: Incoming) -> Landing:
        if incoming.offset + incoming.size > incoming.total:
            raise TornFileError("a piece of a copy lies outside of it", step=commit.step, rank=rank)
        fd, image = self._held.land(commit, node, rank, incoming.total)
        return Landing(
            fd=fd,
            offset=incoming.offset,
            done=lambda value: self._held.landed(fd, image, incoming.offset, incoming.size, value),
            failed=lambda _: self._held.landed(fd, image, incoming.offset, incoming.size, None),
        )

    def _record(self, commit: CommitId, node: int, incoming: Incoming) -> Landing:
        if (
            incoming.offset
            or incoming.size != incoming.total
            or not _LENGTH_BYTES < incoming.total < MAX_DOCUMENT_BYTES
        ):
            raise TornFileError("a record came in pieces", step=commit.step)
        data = bytearray(incoming.total)

        def done(_: int) -> None:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            self._held.finish(commit, node, bytes(data[_LENGTH_BYTES:end]), bytes(data[end:]))

        return Landing(view=memoryview(data), done=done, failed=lambda _: None)


def provider(held: Held) -> Callable[[str, str], Source | None]:
    """Return what lets other nodes read what is held here, by the paths that a tier would have."""

    def provide(node: str, name: str) -> Source | None:
        found = held.find(name)
        if found is None:
            return None
        if found.fd >= 0:
            return Source(fd=found.fd, offset=found.offset, size=found.size_bytes)
        fd = memfd.create(len(found.data), "document")
        write_all(fd, found.data)
        return Source(fd=fd, offset=0, size=len(found.data))

    return provide


def write_all(fd: int, data: bytes) -> None:
    """Put bytes into a memfd of their size."""
    if data:
        with memfd.Mapping(fd, len(data)) as mapping:
            mapping.view[:] = data


def read_held(
    held: Held, network: Network | None, node: str | None, path: str, offset: int, size: int, deadline_s: float
) -> int:
    """Return a memfd with bytes of what a node holds, which the caller closes; `node` None: this one.

    Raises:
        CheckpointError: It does not have them, or cannot be reached.
    """
    if node is None:
        return _read_here(held, path, offset, size)
    if network is None:
        raise TornFileError(f"there is no other node to read {path} from", path=path)
    fd = memfd.create(size, "read")
    try:
        with memfd.Mapping(fd, size) as mapping:
            network.read_into(node, KIND, path, offset, mapping.view, deadline_s=deadline_s)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_here(held: Held, path: str, offset: int, size: int) -> int:
    found = held.find(path)
    if found is None:
        raise TornFileError("it is not in the memory of this node", path=path, tier="memory")
    fd = memfd.create(size, "read")
    try:
        if found.fd < 0:
            data = found.data[offset : offset + size]
        else:
            data = os.pread(found.fd, size, found.offset + offset) if offset + size <= found.size_bytes else b""
        if len(data) != size:
            raise TornFileError("it is shorter in the memory of this node", path=path, tier="memory")
        write_all(fd, data)
    except BaseException:
        os.close(fd)
        raise
    finally:
        if found.fd >= 0:
            os.close(found.fd)
    return fd
