"""Packs on a disk: writing and reading large files past the page cache, or through it with bounded dirty memory.

Invariants: a writer that failed once never finishes; a writer that did not finish leaves no file (as well as that can
be done). What must not live here: names, directories, small files (`tiers.flash`).
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from safehold.errors import CheckpointError, StorageError, TornFileError, from_os_error
from safehold.host import direct_io
from safehold.host.disk import DiskFile
from safehold.tiers.base import ALIGNMENT_BYTES

# Buffered writing keeps at most this much waiting for the disk; what is written is dropped from the page cache.
MAX_DIRTY_BYTES = 64 << 20


class FlashPackWriter:
    """See `tiers.base.PackWriter`.

    Args:
        buffered: The file, opened for writing, of its final size; owned from here on.
        direct: The same file opened for direct I/O, or None; owned from here on.
        size_bytes: The size of the pack.
        path: Its path, for messages.
        tier: The tier's name, for messages.
        remove: Removes the file; called by `abort`.
    """

    def __init__(
        self,
        buffered: DiskFile,
        direct: DiskFile | None,
        *,
        size_bytes: int,
        path: str,
        tier: str,
        remove: Callable[[], None],
    ) -> None:
        limits = direct.direct if direct is not None else None
        self.alignment = max(ALIGNMENT_BYTES, limits.offset_align if limits else 0)
        self.size_bytes = size_bytes
        self._buffered = buffered
        self._direct = direct if limits is not None else None
        self._files = [file for file in (buffered, direct) if file is not None]
        self._path = path
        self._tier = tier
        self._remove = remove
        self._lock = threading.Lock()
        self._dirty: deque[tuple[int, int]] = deque()
        self._dirty_bytes = 0
        self._failure: OSError | None = None
        self._closed = False
        self._aborted = False

    @property
    def direct(self) -> bool:
        """Whether blocks go past the page cache."""
        return self._direct is not None

    def write_at(self, offset: int, data: memoryview) -> None:
        """See `PackWriter`."""
        view = memoryview(data).cast("B")
        if self._closed:
            raise ValueError(f"pack {self._path} is closed")
        if offset < 0 or offset + view.nbytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset}..{offset + view.nbytes} are outside of pack {self._path} of {self.size_bytes}"
            )
        with self._noting_failure("writing a pack"):
            direct = self._direct
            if direct is None:
                self._write_buffered(view, offset)
            elif not direct_io.write_direct(direct, self._buffered, view, offset):
                self._direct = None

    def _write_buffered(self, view: memoryview, offset: int) -> None:
        direct_io.write_all(self._buffered, view, offset)
        self._buffered.start_writeback(offset, view.nbytes)
        with self._lock:
            self._dirty.append((offset, view.nbytes))
            self._dirty_bytes += view.nbytes
            due = []
            while self._dirty_bytes > MAX_DIRTY_BYTES:
                due.append(self._dirty.popleft())
                self._dirty_bytes -= due[-1][1]
        for begin, nbytes in due:
            self._buffered.await_writeback(begin, nbytes)

    def finish(self) -> None:
        """See `PackWriter`."""
        if self._closed:
            raise ValueError(f"pack {self._path} is closed")
        if self._failure is not None:
            raise from_os_error(
                self._failure, "an earlier write of this pack", tier=self._tier, path=self._path
            ) from self._failure
        with self._noting_failure("making a pack durable"):
            # The buffered descriptor is as old as the file: write-back errors of all its pages are reported here or
            # were before.
            self._buffered.fsync()
            found = self._buffered.size()
            if found != self.size_bytes:
                raise OSError(errno.EIO, f"the file has {found} bytes instead of {self.size_bytes}")
            self._close()

    def abort(self) -> None:
        """See `PackWriter`."""
        if self._aborted or (self._closed and self._failure is None):
            return
        self._aborted = True
        try:
            self._close()
        except OSError:
            pass
        try:
            self._remove()
        except (
            OSError,
            CheckpointError,
        ):  # the caller is dealing with a failure already; what stays is debris of this attempt
            pass

    def _close(self) -> None:
        self._closed = True
        _close_all(self._files)

    @contextmanager
    def _noting_failure(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self._failure = self._failure or exc
            raise from_os_error(exc, doing, tier=self._tier, path=self._path) from exc


class FlashPackReader:
    """See `tiers.base.PackReader`.

    Args:
        buffered: The file, opened for reading; owned from here on.
        direct: The same file opened for direct I/O, or None; owned from here on.
        path: Its path, for messages.
        tier: The tier's name, for messages.
    """

    def __init__(self, buffered: DiskFile, direct: DiskFile | None, *, path: str, tier: str) -> None:
        limits = direct.direct if direct is not None else None
        self.alignment = max(ALIGNMENT_BYTES, limits.offset_align if limits else 0)
        self.size_bytes = buffered.size()
        self._buffered = buffered
        self._direct = direct if limits is not None else None
        self._files = [file for file in (buffered, direct) if file is not None]
        self._path = path
        self._tier = tier
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether blocks come past the page cache."""
        return self._direct is not None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `PackReader`."""
        view = memoryview(buffer).cast("B")
        if self._closed:
            raise ValueError(f"pack {self._path} is closed")
        if view.readonly:
            raise ValueError("the buffer is read-only")
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if offset + view.nbytes > self.size_bytes:
            raise self._torn(offset, view.nbytes, self.size_bytes)
        try:
            if self._direct is None:
                done = direct_io.read_all(self._buffered, view, offset)
            else:
                done = direct_io.read_direct(self._direct, self._buffered, view, offset)
        except OSError as exc:
            raise from_os_error(exc, "reading a pack", tier=self._tier, path=self._path) from exc
        if done != view.nbytes:
            raise self._torn(offset, view.nbytes, offset + done)

    def _torn(self, offset: int, nbytes: int, found: int) -> TornFileError:
        return TornFileError(
            f"bytes {offset} to {offset + nbytes} were wanted of a pack that ends at {found}",
            tier=self._tier,
            path=self._path,
        )

    def close(self) -> None:
        """See `PackReader`."""
        if self._closed:
            return
        self._closed = True
        try:
            _close_all(self._files)
        except OSError as exc:
            raise StorageError(f"closing a pack failed: {exc}", tier=self._tier, path=self._path) from exc


def _close_all(files: Sequence[DiskFile]) -> None:
    """Close all, and only then raise the first failure."""
    first: OSError | None = None
    for file in files:
        try:
            file.close()
        except OSError as exc:
            first = first or exc
    if first is not None:
        raise first
