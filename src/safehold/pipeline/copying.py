"""Copies the data files of a checkpoint from one tier to another, every byte verified on the way.

Invariants: a block is written only after it was compared with the checksum that the node record has of it. Memory is one
buffer per copying thread, whatever the sizes. A pack is finished, and so durable, before it is told to be so. What fails and
may pass is tried again, with growing pauses, within a budget of waiting; a cancelled copy ends after the transfers under way.
A thread that storage holds is left behind once nothing has moved for `stall_s`.

Must not live here: which files, and in which order (`safehold.policy.replication`); small files that make a checkpoint exist.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt

from safehold.errors import (
    ChecksumError,
    DeadlineError,
    IntegrityError,
    StorageError,
    TornFileError,
)
from safehold.format import crc, document
from safehold.format.records import NodeRecord
from safehold.pipeline.trials import NAP_S, Trials
from safehold.policy.replication import DataFile
from safehold.tiers.base import PackReader, PackWriter, Tier

STUCK_S = 10.0
"""How long a copy that is over waits for transfers that are under way."""


class Copier:
    """Copies data files.

    Args:
        source: Where they are.
        target: Where they go.
        records: Node -> its record, verified.
        trials: Shared by all threads.
        finished: Called when a pack is complete and durable.
        may_abort: Whether the remains of a pack that failed may be removed: not if another replication has taken over.
    """

    def __init__(
        self,
        source: Tier,
        target: Tier,
        records: dict[int, NodeRecord],
        trials: Trials,
        *,
        finished: Callable[[DataFile], None] = lambda _: None,
        may_abort: Callable[[], bool] = lambda: True,
    ) -> None:
        self._source, self._target = source, target
        self._records = records
        self._trials = trials
        self._finished = finished
        self._may_abort = may_abort
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def copy(self, files: Sequence[DataFile]) -> None:
        """Copy all files; when it returns the packs are durable, their directory entries are not.

        Raises:
            IntegrityError: A file of the source does not verify; it is named.
            StorageError: A tier failed, for longer than the retries last.
            SkippedError: It was cancelled.
            DeadlineError: Nothing moved any more; the threads that storage holds are left behind.
        """
        self._run(files, self._copy_file)

    def damaged(self, files: Sequence[DataFile], *, at_source: bool = False) -> list[DataFile]:
        """Read all files at the target (or the source) and return those that are not what was written, missing ones included.

        At the target also those that cannot be read.
        """
        tier = self._source if at_source else self._target
        bad: list[DataFile] = []

        def check(file: DataFile) -> None:
            try:
                self._trials.again(lambda: self._check_file(tier, file))
            except (FileNotFoundError, IntegrityError):
                bad.append(file)
            except StorageError:
                if at_source:
                    raise
                bad.append(file)
            else:
                self._trials.moved(kept=0 if at_source else file.size_bytes)

        self._run(files, check)
        return sorted(bad, key=lambda file: file.path)

    # Threads.

    def _run(self, files: Sequence[DataFile], action: Callable[[DataFile], None]) -> None:
        """Call `action` for all files, several at a time; the first failure ends the rest."""
        if not files:
            return
        settings = self._trials.settings
        todo: queue.SimpleQueue[DataFile] = queue.SimpleQueue()
        for file in files:
            todo.put(file)
        over = self._trials.over
        over.clear()
        failures: list[BaseException] = []

        def stream() -> None:
            try:
                while not over.is_set():
                    try:
                        file = todo.get_nowait()
                    except queue.Empty:
                        return
                    action(file)
            except BaseException as exc:
                failures.append(exc)
                over.set()

        while not self._buffers.empty():
            self._buffers.get_nowait()
        for _ in range(settings.threads):
            self._buffers.put(memoryview(mmap.mmap(-1, settings.chunk_bytes)))
        movers = [_thread(self._move) for _ in range(settings.threads)]
        streams = [_thread(stream) for _ in range(min(settings.packs_at_once, len(files)))]
        try:
            self._await(streams)
        except DeadlineError:
            over.set()
            raise
        except BaseException:
            over.set()
            end_s = time.monotonic() + STUCK_S
            for thread in streams:
                thread.join(max(0.0, end_s - time.monotonic()))
            raise
        finally:
            for _ in movers:
                self._work.put(None)
        if failures:
            raise failures[0]

    def _await(self, streams: Sequence[threading.Thread]) -> None:
        for thread in streams:
            while thread.is_alive():
                thread.join(NAP_S)
                if thread.is_alive() and self._trials.stalled():
                    raise DeadlineError(
                        f"no byte was copied for {self._trials.settings.stall_s:g} s",
                        path=self._target.url,
                        tier=self._target.name,
                        hint="a storage does not answer; what was finished is not sent again when this is repeated",
                    )

    def _move(self) -> None:
        while (job := self._work.get()) is not None:
            job()

    def _chunks(self, size_bytes: int, action: Callable[[int, memoryview], None]) -> None:
        """Call `action` with offset and buffer for all chunks of a file, by the moving threads; returns when all have ended."""
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        failure: BaseException | None = None
        begun = done = 0

        def job(offset: int, buffer: memoryview) -> Callable[[], None]:
            def run() -> None:
                problem: BaseException | None = None
                try:
                    self._trials.check()
                    self._trials.work(lambda: action(offset, buffer[: min(len(buffer), size_bytes - offset)]))
                except BaseException as exc:
                    problem = exc
                finally:
                    self._buffers.put(buffer)
                    ended.put(problem)

            return run

        for offset in range(0, size_bytes, self._trials.settings.chunk_bytes):
            buffer = self._buffer()
            while failure is None and not ended.empty():
                failure = ended.get()
                done += 1
            if failure is not None or buffer is None:
                if buffer is not None:
                    self._buffers.put(buffer)
                break
            self._work.put(job(offset, buffer))
            begun += 1
        while done < begun:
            problem = ended.get()  # a transfer that storage holds is told of by the thread that waits for this one
            failure = failure or problem
            done += 1
        if failure is not None:
            raise failure
        self._trials.check()

    def _buffer(self) -> memoryview | None:
        while not self._trials.cancelled.is_set() and not self._trials.over.is_set():
            try:
                return self._buffers.get(timeout=NAP_S)
            except queue.Empty:
                continue
        return None

    # Files.

    def _check_file(self, tier: Tier, file: DataFile) -> None:
        if file.pack is None:
            self._objects(tier, file)
            return
        with closing(self._open(tier, file)) as reader:
            wanted = crc.decode_crcs(file.pack.block_crcs)

            def check(offset: int, buffer: memoryview) -> None:
                self._read(tier, reader, file, offset, buffer, wanted)

            self._chunks(file.size_bytes, check)

    def _copy_file(self, file: DataFile) -> None:
        if file.pack is None:
            self._copy_objects(file)
            return
        counted = [0]

        def once() -> None:
            self._trials.back(counted[0])
            counted[0] = 0
            self._copy_pack(file, counted)

        self._trials.again(once)
        self._finished(file)

    def _copy_pack(self, file: DataFile, counted: list[int]) -> None:
        assert file.pack is not None
        wanted = crc.decode_crcs(file.pack.block_crcs)
        lock = threading.Lock()
        with closing(self._trials.again(lambda: self._open(self._source, file))) as reader:
            writer = self._trials.again(lambda: self._create(file))

            def move(offset: int, buffer: memoryview) -> None:
                self._trials.again(lambda: self._read(self._source, reader, file, offset, buffer, wanted))
                self._trials.pace(len(buffer))
                writer.write_at(offset, buffer)
                with lock:
                    counted[0] += len(buffer)
                self._trials.moved(sent=len(buffer))

            try:
                self._chunks(file.size_bytes, move)
                writer.finish()
            except BaseException:
                self._abort(writer)
                raise

    def _abort(self, writer: PackWriter) -> None:
        try:
            allowed = self._may_abort()
        except StorageError:
            allowed = True
        if allowed:
            writer.abort()

    def _create(self, file: DataFile) -> PackWriter:
        try:
            return self._target.create_pack(file.path, file.size_bytes)
        except FileExistsError:
            # What an interrupted copy left: allocated, perhaps written, and nothing vouches for it.
            self._target.delete(file.path)
        try:
            return self._target.create_pack(file.path, file.size_bytes)
        except FileExistsError as exc:
            text = "somebody else creates this file again and again"
            raise StorageError(text, path=file.path, tier=self._target.name) from exc

    def _copy_objects(self, file: DataFile) -> None:
        try:
            found = self._trials.again(lambda: self._objects(self._target, file))
        except (FileNotFoundError, IntegrityError):
            pass
        else:
            self._trials.moved(kept=len(found))
            return
        data = self._trials.again(lambda: self._objects(self._source, file))
        self._trials.pace(len(data))
        self._trials.again(lambda: self._target.put(file.path, data))
        self._trials.moved(sent=len(data))

    def _objects(self, tier: Tier, file: DataFile) -> bytes:
        record = self._records[file.node]
        data = tier.get(file.path, limit_bytes=record.objects_size_bytes)
        if len(data) != record.objects_size_bytes:
            text = f"has {len(data)} bytes, the node record says {record.objects_size_bytes}"
            raise TornFileError(text, path=file.path, tier=tier.name)
        if document.digest(data) != record.objects_blake3 or crc.crc(data) != record.objects_crc32:
            text = "the objects do not match their checksum in the node record"
            raise ChecksumError(text, path=file.path, tier=tier.name)
        return data

    def _open(self, tier: Tier, file: DataFile) -> PackReader:
        reader = tier.open_pack(file.path, direct=self._trials.settings.direct)
        if reader.size_bytes != file.size_bytes:
            reader.close()
            text = f"has {reader.size_bytes} bytes, the node record says {file.size_bytes}"
            raise TornFileError(text, path=file.path, tier=tier.name)
        return reader

    def _read(
        self,
        tier: Tier,
        reader: PackReader,
        file: DataFile,
        offset: int,
        buffer: memoryview,
        wanted: npt.NDArray[np.uint32],
    ) -> None:
        """Read a chunk and compare its blocks with their checksums."""
        reader.read_into(offset, buffer)
        first = offset // crc.BLOCK_BYTES
        found = crc.crc_blocks(buffer)
        bad = np.flatnonzero(found != wanted[first : first + len(found)]).tolist()
        if bad:
            start = offset + bad[0] * crc.BLOCK_BYTES
            end = min(start + crc.BLOCK_BYTES, file.size_bytes)
            checksums = f"checksum {int(found[bad[0]]):08x} instead of {int(wanted[first + bad[0]]):08x}"
            raise ChecksumError(
                f"block {first + bad[0]} (bytes {start} to {end}): {checksums}",
                path=file.path,
                rank=file.pack.rank if file.pack is not None else None,
                tier=tier.name,
                hint="'safehold verify RUN STEP' names all that is damaged, and the leaves it concerns",
            )
        self._trials.moved()


def _thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="safehold-copy", daemon=True)
    thread.start()
    return thread
