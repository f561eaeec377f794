"""Packs in an object store: written in parts as blocks come, read in ranges.

Invariants: an object appears only with `finish`, whole or not at all; at most `PARTS_AHEAD` parts wait in memory for
those before them, and `PARTS_UPLOADING` more are on their way. What is read is the very object that was opened (its
entity tag goes with each request). What must not live here: names, small files (`tiers.object_store`).

obstore takes the parts of an upload in order only. So blocks are gathered into parts here, and a part goes out once it
is whole and those before it have gone. A writer that is far ahead of the first missing byte waits; where nobody writes
that byte (blocks that come in reverse, say), what is ahead is kept in an unnamed temporary file meanwhile.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from safehold.clock import Clock
from safehold.errors import CheckpointError, StorageError, TornFileError
from safehold.tiers.base import ALIGNMENT_BYTES
from safehold.tiers.object_requests import Requests, Store, is_foreign

PART_BYTES = 8 << 20
MAX_PART_BYTES = 64 << 20
MAX_PARTS = 10_000
PARTS_AHEAD = 2
PARTS_UPLOADING = 4
SPILL_AFTER_S = 0.5
"""How long nothing moves before blocks that are too far ahead go to a temporary file."""
FORGOTTEN_S = 3600.0
"""How long an upload waits for a next byte before it is given up, as one that nobody will finish."""
ABORT_WAIT_S = 5.0
READ_BYTES = 8 << 20
"""The most that one read asks for at once; so much memory is used beside the caller's."""


def part_size(size_bytes: int) -> int:
    """Return the size of the parts of a pack: a multiple of 1 MiB, so that `MAX_PARTS` are enough.

    Raises:
        ValueError: No parts are large enough.
    """
    needed = -(-size_bytes // MAX_PARTS)
    size = max(PART_BYTES, -(-needed // (1 << 20)) << 20)
    if size > MAX_PART_BYTES:
        raise ValueError(f"a pack of {size_bytes} bytes is larger than {MAX_PARTS} parts of {MAX_PART_BYTES} bytes")
    return size


class _GivenUpError(Exception):
    """Ends an upload from inside."""


@dataclass(slots=True)
class _Part:
    """A part that is not on its way yet: its bytes (None: in the temporary file) and which of them are there."""

    begin: int
    nbytes: int
    buffer: bytearray | None
    copying: int = 0
    written: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.copying and self.written == [(0, self.nbytes)]

    def note(self, begin: int, end: int) -> None:
        """Note that a range is written; ranges that touch become one."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.written, (begin, end)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self.written = merged


class _Buffers:
    """Memory of parts, used again once the upload has let go of it: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._idle: list[bytearray] = []

    def take(self, nbytes: int) -> bytearray:
        """Return `nbytes` bytes of memory with anything in it."""
        try:
            found = self._idle.pop()
        except IndexError:
            return bytearray(nbytes)
        return found if len(found) == nbytes else bytearray(nbytes)

    def lend(self, buffer: bytearray | bytes) -> memoryview:
        """Return a view of a buffer, which is idle again when nobody holds the view any more."""
        view = memoryview(buffer)
        if isinstance(buffer, bytearray):
            weakref.finalize(view, self._idle.append, buffer).atexit = False
        return view


class ObjectPackWriter:
    """See `tiers.base.PackWriter`.

    Bytes must all be written before `finish`, and none again once its part has gone.

    Args:
        store: Where to.
        requests: Translates what goes wrong.
        path: The object.
        size_bytes: The size of the pack.
        url: The URL of the object, for messages.
        tier: The tier's name, for messages.
        clock: Time.
        part_bytes: Size of a part; None: as the size asks for.
    """

    alignment = ALIGNMENT_BYTES

    def __init__(
        self,
        store: Store,
        requests: Requests,
        path: str,
        size_bytes: int,
        *,
        url: str,
        tier: str,
        clock: Clock,
        part_bytes: int | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self._store, self._requests, self._clock = store, requests, clock
        self._path, self._url, self._tier = path, url, tier
        self._part_bytes = part_bytes or part_size(size_bytes)
        self._num_parts = max(1, -(-size_bytes // self._part_bytes))
        self._changed = threading.Condition()
        self._parts: dict[int, _Part] = {}
        self._buffers = _Buffers()
        self._next = 0  # the part that goes out next
        self._wanting = False  # the upload waits for that part
        self._moved_at = clock.monotonic()
        self._spill: IO[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._stopped = self._closed = self._finishing = self._finished = False

    # Writing.

    def write_at(self, offset: int, data: memoryview) -> None:
        """See `PackWriter`."""
        view = memoryview(data).cast("B")
        if offset < 0 or offset + view.nbytes > self.size_bytes:
            end = offset + view.nbytes
            raise ValueError(f"bytes {offset}..{end} are outside of pack {self._url} of {self.size_bytes}")
        done = 0
        while done < view.nbytes:
            index, at = divmod(offset + done, self._part_bytes)
            nbytes = min(view.nbytes - done, self._part_bytes - at)
            self._write_part(index, at, view[done : done + nbytes])
            done += nbytes
        if not view.nbytes:
            with self._changed:
                self._check_open()

    def _write_part(self, index: int, at: int, view: memoryview) -> None:
        part = self._admit(index)
        try:
            if part.buffer is not None:
                memoryview(part.buffer)[at : at + view.nbytes] = view
            else:
                self._write_spilled(part.begin + at, view)
        except OSError as exc:
            text = f"no room for blocks that came out of order: {exc.strerror}"
            hint = "free space where temporary files go (TMPDIR)"
            failure = StorageError(text, tier=self._tier, path=self._url, hint=hint)
            self._fail(failure)
            raise failure from exc
        finally:
            with self._changed:
                part.copying -= 1
        with self._changed:
            part.note(at, at + view.nbytes)
            if part.buffer is not None:
                self._moved_at = self._clock.monotonic()
            self._changed.notify_all()

    def _admit(self, index: int) -> _Part:
        """Return the part to copy into, marked as being copied into; wait while it is too far ahead."""
        with self._changed:
            self._start()
            while True:
                self._check_open()
                part = self._parts.get(index)
                if part is None and index < self._next:
                    raise ValueError(f"a part of pack {self._url} is written again after it has gone")
                if part is None:
                    part = self._make_part(index)
                if part is not None:
                    part.copying += 1
                    return part
                self._await_progress()

    def _make_part(self, index: int) -> _Part | None:
        begin = index * self._part_bytes
        nbytes = min(self._part_bytes, self.size_bytes - begin)
        if index < self._next + PARTS_AHEAD:
            part = _Part(begin, nbytes, self._buffers.take(nbytes))
        elif self._is_starved():
            if self._spill is None:
                self._spill = tempfile.TemporaryFile()  # noqa: SIM115
            part = _Part(begin, nbytes, None)
        else:
            return None
        self._parts[index] = part
        return part

    def _is_starved(self) -> bool:
        """Whether the upload waits for bytes that nobody is writing, so that waiting for it would never end."""
        awaited = self._parts.get(self._next)
        idle = awaited is None or not awaited.copying
        return self._wanting and idle and self._clock.monotonic() - self._moved_at >= SPILL_AFTER_S

    def _await_progress(self) -> None:
        """Wait a moment; fail if the upload has not moved for longer than its requests can take."""
        limit_s = 2 * self._requests.patience.longest_s
        if not self._wanting and self._clock.monotonic() - self._moved_at > limit_s:
            self._failure = self._failure or self._stalled(limit_s)
            self._changed.notify_all()
            raise self._failure
        self._changed.wait(0.05 if self._wanting else 1.0)

    def _stalled(self, waited_s: float) -> StorageError:
        hint = "check the network and the store, then try again"
        text = f"the upload of a pack has not moved for {waited_s:.0f} s"
        return StorageError(text, tier=self._tier, path=self._url, hint=hint)

    def _write_spilled(self, offset: int, view: memoryview) -> None:
        assert self._spill is not None
        with self._changed:
            self._spill.seek(offset)
            self._spill.write(view)

    def _check_open(self) -> None:
        if self._closed or self._stopped:
            raise ValueError(f"pack {self._url} is closed")
        if self._failure is not None:
            raise self._earlier()

    def _earlier(self) -> CheckpointError:
        """Return the failure as a new error: several threads raise it, each with a traceback of its own."""
        assert self._failure is not None
        error = type(self._failure)(
            self._failure.message, tier=self._tier, path=self._failure.path, hint=self._failure.hint
        )
        error.__cause__ = self._failure.__cause__
        return error

    def _fail(self, failure: CheckpointError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    # The upload, in a thread of its own.

    def _start(self) -> None:
        if self._thread is None and self._num_parts > 1 and not self._closed:
            self._thread = threading.Thread(target=self._upload, name="safehold-upload", daemon=True)
            self._thread.start()

    def _upload(self) -> None:
        try:
            self._store.put(
                self._path,
                self._in_order(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=PARTS_UPLOADING,
            )
        except _GivenUpError:
            return
        except Exception as exc:
            failure = self._failure_of(exc)
        except BaseException as exc:  # a panic of the library; must not vanish with the thread
            failure = StorageError(f"uploading a pack failed: {type(exc).__name__}", tier=self._tier, path=self._url)
        else:
            return
        if self._next == self._num_parts and self._is_there():
            return  # it was completed, and the answer to that was lost
        self._fail(failure)

    def _in_order(self) -> Iterator[memoryview]:
        for index in range(self._num_parts):
            with self._changed:
                self._wanting = True
                self._moved_at = self._clock.monotonic()
                while (part := self._parts.get(index)) is None or not part.is_whole:
                    self._check_upload()
                    self._changed.wait(1.0)
                self._wanting = False
                buffer = part.buffer if part.buffer is not None else self._read_spilled(part)
                del self._parts[index]
                self._next = index + 1
                self._moved_at = self._clock.monotonic()
                self._changed.notify_all()
            part.buffer = None
            yield self._buffers.lend(buffer)
        with self._changed:  # at the end the upload is completed, and the object appears
            while not self._finishing:
                self._check_upload()
                self._changed.wait(1.0)

    def _check_upload(self) -> None:
        if self._clock.monotonic() - self._moved_at > FORGOTTEN_S:
            self._failure = self._failure or self._stalled(FORGOTTEN_S)
        if self._stopped or self._failure is not None:
            raise _GivenUpError

    def _read_spilled(self, part: _Part) -> bytes:
        assert self._spill is not None
        self._spill.seek(part.begin)
        return self._spill.read(part.nbytes)

    def _failure_of(self, exc: Exception) -> CheckpointError:
        error = self._requests.translate(exc, "uploading a pack", self._url)
        if isinstance(error, CheckpointError):
            return error
        text = "uploading a pack failed: the store has forgotten the upload"
        return StorageError(
            text, tier=self._tier, path=self._url, hint="try again; was it aborted by a lifecycle rule?"
        )

    # Ending.

    def finish(self) -> None:
        """See `PackWriter`."""
        with self._changed:
            self._check_open()
            if self._num_parts > 1:
                self._start()
            self._closed = True
            missing = self._next_missing()
        if missing is not None:
            text = f"a pack cannot be finished: its bytes from {missing} on were not all written"
            self._fail(StorageError(text, tier=self._tier, path=self._url))
            raise self._earlier()
        with self._changed:
            self._finishing = True
            self._moved_at = self._clock.monotonic()
            self._changed.notify_all()
        if self._thread is None:
            self._put_whole()
        else:
            self._await_upload(self._thread)
        if self._failure is not None:
            raise self._earlier()
        if not self._is_there():
            text = "a pack that was uploaded is not there, or has another size"
            self._fail(
                StorageError(text, tier=self._tier, path=self._url, hint="try again; does another job write here?")
            )
            raise self._earlier()
        self._finished = True
        self._release()

    def _next_missing(self) -> int | None:
        for index in range(self._next, self._num_parts):
            part = self._parts.get(index)
            if part is None:
                return index * self._part_bytes if self.size_bytes else None
            if not part.is_whole:
                return part.begin
        return None

    def _put_whole(self) -> None:
        part = self._parts.get(0)
        data = memoryview(part.buffer) if part is not None and part.buffer is not None else memoryview(b"")
        try:
            self._requests.run(
                "uploading a pack", self._url, lambda: self._store.put(self._path, data, use_multipart=False)
            )
        except CheckpointError as exc:
            self._fail(exc)

    def _await_upload(self, thread: threading.Thread) -> None:
        limit_s = 2 * self._requests.patience.longest_s
        while True:
            thread.join(1.0)
            if not thread.is_alive() or self._failure is not None:
                return
            if self._clock.monotonic() - self._moved_at > limit_s:
                self._fail(self._stalled(limit_s))

    def _is_there(self) -> bool:
        try:
            return int(self._store.head(self._path)["size"]) == self.size_bytes
        except Exception as exc:
            if not is_foreign(exc):
                raise
            return False

    def abort(self) -> None:
        """See `PackWriter`."""
        with self._changed:
            if self._finished or self._stopped:
                return
            self._stopped = True
            sent = self._finishing
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(ABORT_WAIT_S)
        if sent:  # the last request may have done it, whatever was said of it
            try:
                self._store.delete([self._path])
            except Exception:  # the caller is dealing with a failure already; what stays is debris of this attempt
                pass
        self._release()

    def _release(self) -> None:
        with self._changed:
            self._closed = True
            self._parts.clear()
            if self._spill is not None:
                self._spill.close()
                self._spill = None


class ObjectPackReader:
    """See `tiers.base.PackReader`.

    Args:
        store: Where from.
        requests: Repeats what can be, and translates what goes wrong.
        path: The object.
        size_bytes: Its size.
        e_tag: Its entity tag, if the store has such a thing.
        url: The URL of the object, for messages.
        tier: The tier's name, for messages.
    """

    alignment = ALIGNMENT_BYTES

    def __init__(
        self, store: Store, requests: Requests, path: str, *, size_bytes: int, e_tag: str | None, url: str, tier: str
    ) -> None:
        self.size_bytes = size_bytes
        self._store, self._requests = store, requests
        self._path, self._e_tag, self._url, self._tier = path, e_tag, url, tier
        self._closed = False

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `PackReader`."""
        view = memoryview(buffer).cast("B")
        if self._closed:
            raise ValueError(f"pack {self._url} is closed")
        if view.readonly:
            raise ValueError("the buffer is read-only")
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if offset + view.nbytes > self.size_bytes:
            raise self._torn(offset, view.nbytes, self.size_bytes)
        for at in range(0, view.nbytes, READ_BYTES):
            self._read(offset + at, view[at : at + READ_BYTES])

    def _read(self, offset: int, view: memoryview) -> None:
        options: dict[str, object] = {"range": (offset, offset + view.nbytes)}
        if self._e_tag is not None:
            options["if_match"] = self._e_tag
        try:
            found = self._requests.run(
                "reading a pack", self._url, lambda: self._store.get(self._path, options=options).bytes()
            )
        except FileNotFoundError as exc:
            text = "a pack has gone since it was opened"
            raise TornFileError(text, tier=self._tier, path=self._url) from exc
        nbytes = len(found)
        if nbytes != view.nbytes:
            raise self._torn(offset, view.nbytes, offset + nbytes)
        view[:] = memoryview(found)

    def _torn(self, offset: int, nbytes: int, found: int) -> TornFileError:
        text = f"bytes {offset} to {offset + nbytes} were wanted of a pack that ends at {found}"
        return TornFileError(text, tier=self._tier, path=self._url)

    def close(self) -> None:
        """See `PackReader`."""
        self._closed = True
