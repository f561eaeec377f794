"""Gives back the bytes of a lost node, block by block, from what the other members of its redundancy set hold.

Invariants: every byte comes from blocks that verify, and what comes out is compared with the node record, which the manifest names. A
bad block is lost where it was found and nowhere else. Thread-safe.

Must not live here: where the bytes go (`pipeline.rebuild`), and who tells that a node is lost.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from safehold.errors import CheckpointError, ChecksumError, StorageError, TornFileError
from safehold.format import crc, paths
from safehold.format.records import Manifest, NodeRecord
from safehold.format.redundancy import RedundancyRecord
from safehold.host import parity
from safehold.pipeline.block_work import make_buffer
from safehold.pipeline.redundancy import check_against, coefficients_of, node_record, set_of
from safehold.pipeline.symbols import BLOCK, BadSource, Members, Symbols, read_redundancy, view_of
from safehold.policy.placement import RedundancySet
from safehold.policy.stripes import StreamFile

MAX_TRIALS = 256
"""So many combinations of symbols are tried where verified ones give a block that does not verify."""

_RANGE_BLOCKS = 4


def open_lost(manifest: Manifest, node: int, members: Members, answering: Iterable[int]) -> LostNode:
    """Find out who can give back a lost node's files.

    Args:
        manifest: The checkpoint's, verified.
        node: The lost node.
        members: The other nodes' bytes.
        answering: Nodes that may be asked, likely ones first.

    Raises:
        TornFileError: No node that answers holds redundancy for it.
        StorageError: Nobody does among those that could be read, and others could not: it may pass.
    """
    asked = [other for other in dict.fromkeys(answering) if other != node]
    finder = _Finder(manifest, members)
    found = next((record for other in asked if (record := finder.record(other)) and _has(record, node)), None)
    if found is None:
        raise finder.nobody(node, asked)
    for ref in found.members:
        if ref.node in asked:
            finder.record(ref.node)
    return finder.view(node, asked)


class _Finder:
    """Reads redundancy records, each once."""

    def __init__(self, manifest: Manifest, members: Members) -> None:
        self._manifest, self._members = manifest, members
        self._read: dict[int, tuple[RedundancyRecord, tuple[bytes, ...]] | None] = {}
        self._failures: list[CheckpointError] = []

    def record(self, node: int) -> RedundancyRecord | None:
        if node not in self._read:
            self._read[node] = self._try(node)
        found = self._read[node]
        return found[0] if found is not None else None

    def _try(self, node: int) -> tuple[RedundancyRecord, tuple[bytes, ...]] | None:
        directory = paths.checkpoint_dir(self._manifest.commit)
        try:
            found = read_redundancy(self._members, node, directory)
            check_against(found[0], self._manifest, node, path=f"{directory}/{paths.redundancy_record(node)}")
        except FileNotFoundError:
            return None
        except CheckpointError as exc:
            self._failures.append(exc)
            return None
        return found

    def nobody(self, node: int, asked: Sequence[int]) -> CheckpointError:
        commit = self._manifest.commit
        text = f"none of the {len(asked)} nodes that answer holds redundancy for node {node}"
        hint = "; ".join(failure.message for failure in self._failures[:3]) or "use an older step, or another tier"
        passes = any(failure.retry for failure in self._failures)
        cls = StorageError if passes else TornFileError
        return cls(text, step=commit.step, node=str(node), path=paths.checkpoint_dir(commit), hint=hint)

    def view(self, node: int, asked: Sequence[int]) -> LostNode:
        """Return the lost node as the set sees it that most of its members agree on."""
        groups: dict[object, list[int]] = {}
        for other, found in self._read.items():
            if found is not None and _has(found[0], node):
                key = (found[0].kind, found[0].num_data, found[0].num_parity, found[0].members)
                groups.setdefault(key, []).append(other)
        agreed = max(groups.values(), key=len)
        first = self._read[agreed[0]]
        assert first is not None
        of, stored = set_of(first[0]), first[1]
        decoded = [node_record(data, self._manifest, other) for data, other in zip(stored, of.members, strict=True)]
        held = {of.members.index(other): found[0] for other in agreed if (found := self._read[other]) is not None}
        view = view_of(self._manifest.commit, of, decoded, stored, held)
        return LostNode(Symbols(view, self._members, asked), of.members.index(node))


def _has(record: RedundancyRecord, node: int) -> bool:
    return any(ref.node == node for ref in record.members)


class LostNode:
    """The files of a lost node, as the other members of its set give them back.

    Attributes:
        record: Its node record, verified.
        record_bytes: The same as stored.
    """

    def __init__(self, symbols: Symbols, position: int) -> None:
        self._symbols, self._position = symbols, position
        self._view = symbols.view
        self._rows = coefficients_of(self._view.of)
        self._files = {file.name: file for file in self._view.geometry.streams[position].files}
        self.record: NodeRecord = self._view.records[position]
        self.record_bytes: bytes = self._view.stored[position]
        self._objects: npt.NDArray[np.uint32] | None = None
        self._lock = threading.Lock()
        self._is_copy = self._view.of.num_data == 1  # then a symbol is the block itself

    @property
    def directory(self) -> str:
        """The checkpoint's directory inside the run directory."""
        return self._view.directory

    @property
    def of(self) -> RedundancySet:
        """The redundancy set that it is in."""
        return self._view.of

    @property
    def files(self) -> tuple[StreamFile, ...]:
        """The node's objects and packs."""
        return self._view.geometry.streams[self._position].files

    @property
    def faults(self) -> tuple[BadSource, ...]:
        """Sources that were found damaged so far."""
        return self._symbols.faults

    @property
    def num_buffers(self) -> int:
        """How many buffers besides the result a block takes."""
        return self._view.of.num_data

    def check(self) -> None:
        """See, without reading, whether enough members answer and hold what is needed.

        Raises:
            IntegrityError: They do not.
            StorageError: They do not, and some may answer later.
        """
        blocks, rows = self._view.geometry.streams[self._position].num_blocks, self._view.geometry.rows_per_chunk
        for first in range(0, blocks, rows or 1):
            if self._enough(first, rows):
                continue
            for block in range(first, min(first + rows, blocks)):  # where other members' data end, less is needed
                if not self._enough(block, 1):
                    raise self._cannot(block)

    def read_range(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `offset` of one of the node's files.

        Raises:
            TornFileError: There is no such file or range, or too much is lost to give it back.
            StorageError: Too much is lost, and some of it may come back.
        """
        view = memoryview(buffer).cast("B")
        file = self._files.get(name)
        if file is None or offset < 0 or offset + view.nbytes > file.size_bytes:
            text = f"the node wrote no bytes {offset} to {offset + view.nbytes} of {name!r}"
            raise TornFileError(text, path=self.directory, node=str(self.record.node))
        if name == paths.node_objects(self.record.node):
            self._scan_objects(file)
        done, end = 0, offset + view.nbytes
        most = min(_RANGE_BLOCKS, crc.num_blocks(end) - offset // BLOCK)
        spare = [make_buffer(most) for _ in range(self.num_buffers + 1 if view.nbytes else 0)]
        while done < view.nbytes:
            block, inside = divmod(offset + done, BLOCK)
            count = min(most, crc.num_blocks(end) - block, self.straight(file, block))
            length = min(count * BLOCK - inside, view.nbytes - done)
            self.read_blocks(file, block, count, spare[-1], spare[:-1])
            view[done : done + length] = spare[-1][inside : inside + length]
            done += length

    def straight(self, file: StreamFile, block: int) -> int:
        """Return how many blocks of a file from `block` on lie in one chunk."""
        rows = self._view.geometry.rows_per_chunk
        return min(rows - (file.first_block + block) % rows, file.num_blocks - block)

    def read_blocks(
        self, file: StreamFile, block: int, count: int, target: memoryview, spare: list[memoryview]
    ) -> memoryview:
        """Give back `count` blocks of a file, all in one chunk, verified where the node record has their checksums.

        Args:
            file: One of `files`.
            block: First block in the file.
            count: How many; `target` and each of `spare` have room for them.
            target: Where they go.
            spare: `num_buffers` buffers.

        Returns:
            The bytes that the file has there, in `target`.

        Raises:
            CheckpointError: As for `read_range`.
        """
        crcs = self._objects if self._is_objects(file) else self._symbols.pack_crcs(self._position, file.name)
        wanted = None if crcs is None else crcs[block : block + count]
        length = min(count * BLOCK, file.size_bytes - block * BLOCK)
        if count > 1 and self._batch(file.first_block + block, count, length, target, spare, wanted):
            return target[:length]
        for number in range(count):
            at = number * BLOCK
            part = target[at : at + BLOCK]
            one = None if wanted is None else int(wanted[number])
            self._single(file.first_block + block + number, min(BLOCK, length - at), part, spare, one)
        return target[:length]

    def _enough(self, block: int, count: int) -> bool:
        stripe, chunk, row = self._view.geometry.locate(self._position, block)
        return len(self._candidates(stripe, chunk, row, count)) >= self._view.of.num_data

    def _is_objects(self, file: StreamFile) -> bool:
        return file.name == paths.node_objects(self.record.node)

    def _batch(
        self,
        block: int,
        count: int,
        length: int,
        target: memoryview,
        spare: list[memoryview],
        wanted: npt.NDArray[np.uint32] | None,
    ) -> bool:
        """Give back several blocks at once; False where anything is amiss, and they have to be looked at one by one."""
        stripe, chunk, row = self._view.geometry.locate(self._position, block)
        known: list[int] = []
        for symbol in self._candidates(stripe, chunk, row, count):
            bad = self._read(symbol, stripe, row, count, target if self._is_copy else spare[len(known)])
            if len(bad) == count:
                continue
            if bad:
                return False
            known.append(symbol)
            if len(known) == self._view.of.num_data:
                if not self._is_copy:
                    self._sum(known, chunk, spare, target[: count * BLOCK])
                return wanted is None or bool((crc.crc_blocks(target[:length]) == wanted).all())
        return False

    def _single(self, block: int, length: int, target: memoryview, spare: list[memoryview], wanted: int | None) -> None:
        stripe, chunk, row = self._view.geometry.locate(self._position, block)
        known: list[int] = []
        for symbol in self._candidates(stripe, chunk, row, 1):
            if not self._read(symbol, stripe, row, 1, target if self._is_copy else spare[len(known)]):
                known.append(symbol)
                if len(known) == self._view.of.num_data:
                    break
        else:
            raise self._cannot(block)
        if not self._is_copy:
            self._sum(known, chunk, spare, target[:BLOCK])
        if wanted is not None and crc.crc(target[:length]) != wanted:
            self._search(block, length, target, wanted)

    def _search(self, block: int, length: int, target: memoryview, wanted: int) -> None:
        """Try other symbols where verified ones give a block that does not verify: one of them was made of something else."""
        stripe, chunk, row = self._view.geometry.locate(self._position, block)
        known, buffers = [], []
        for symbol in self._candidates(stripe, chunk, row, 1):
            buffer = make_buffer(1)
            if not self._read(symbol, stripe, row, 1, buffer):
                known.append(symbol)
                buffers.append(buffer)
        ways = itertools.combinations(range(len(known)), self._view.of.num_data)
        for chosen in itertools.islice(ways, MAX_TRIALS):
            self._sum([known[i] for i in chosen], chunk, [buffers[i] for i in chosen], target[:BLOCK])
            if crc.crc(target[:length]) == wanted:
                return
        raise ChecksumError(
            f"what the set gives back of {self._name_of(block)} does not match the node record",
            step=self.record.commit.step,
            node=str(self.record.node),
            path=self.directory,
            hint="its redundancy is damaged in a way that its checksums do not show; use an older step",
        )

    def _candidates(self, stripe: int, chunk: int, row: int, count: int) -> list[int]:
        """Return the symbols of a stripe that may be had, those first that cost nothing, then data, then parity."""
        of, geometry = self._view.of, self._view.geometry
        zeros, data = [], []
        for other in range(of.num_data):
            if other == chunk:
                continue
            if not geometry.blocks(stripe, other, row, count)[2]:
                zeros.append(other)
            elif self._symbols.answers(of.data_position(stripe, other)):
                data.append(other)
        rows = [row for row in range(of.num_parity) if self._symbols.holds(of.parity_position(stripe, row))]
        return [*zeros, *data, *(of.num_data + row for row in rows)]

    def _read(self, symbol: int, stripe: int, row: int, count: int, buffer: memoryview) -> set[int]:
        if symbol < self._view.of.num_data:
            return self._symbols.data(stripe, symbol, row, count, buffer)
        return self._symbols.parity(stripe, symbol - self._view.of.num_data, row, count, buffer)

    def _sum(self, known: Sequence[int], chunk: int, sources: Sequence[memoryview], target: memoryview) -> None:
        factors = parity.solve(self._rows, tuple(known), chunk)
        parity.sum_into(factors, [source[: target.nbytes] for source in sources[: len(known)]], target)

    def _scan_objects(self, file: StreamFile) -> None:
        """Give back the objects once to take checksums of their blocks, which the node record has only one of."""
        with self._lock:
            if self._objects is not None:
                return
            spare = [make_buffer(1) for _ in range(self.num_buffers + 1)]
            found = [
                crc.crc(self.read_blocks(file, block, 1, spare[-1], spare[:-1])) for block in range(file.num_blocks)
            ]
            crcs = np.array(found, dtype=np.uint32)
            if crc.combine_blocks(crcs, file.size_bytes) != self.record.objects_crc32:
                text = "what the set gives back of the objects does not match the node record"
                raise ChecksumError(text, node=str(self.record.node), path=self.directory)
            self._objects = crcs

    def _name_of(self, block: int) -> str:
        run = self._view.geometry.streams[self._position].runs(block, 1)[0]
        return f"block {run.offset // BLOCK} of {self.files[run.file].name}"

    def _cannot(self, block: int) -> CheckpointError:
        of = self._view.of
        silent = [of.members[p] for p in range(len(of.members)) if p != self._position and not self._symbols.answers(p)]
        unfinished = [
            of.members[p]
            for p in range(len(of.members))
            if p != self._position and self._symbols.answers(p) and not self._symbols.holds(p)
        ]
        why = [f"node {node} does not answer" for node in silent]
        why += [f"node {node} has made no redundancy" for node in unfinished]
        why += [str(fault) for fault in self.faults]
        text = f"{self._name_of(block)} of node {self.record.node} cannot be given back: too much of its stripe is lost"
        passes = bool(silent) or any(fault.error.retry for fault in self.faults)
        cls = StorageError if passes else TornFileError
        hint = "; ".join(why[:6]) + ("; ..." if len(why) > 6 else "")
        step = self.record.commit.step
        return cls(text, step=step, node=str(self.record.node), path=self.directory, hint=hint or None)
