"""Arenas: host memory that processes share by passing a descriptor.

Invariants: an arena is sealed against shrinking and growing, so no process can make another die of SIGBUS by
truncating it; a mapping is made only after the size and the seals were checked; a mapping is not unmapped while a
view of it lives. Populating never holds the interpreter lock and never changes a byte. What the bytes mean is not
known here.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from safehold.errors import AgentUnavailableError, StorageFullError
from safehold.host import disk_calls, libc

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2 << 20
_POPULATE_CHUNK_BYTES = 8 << 20
_ALIGN_TRIES = 3
_SLOW_COLLAPSE_S = 0.05
_MFD_NOEXEC_SEAL = 0x0008
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(size_bytes: int, name: str, *, alignable: bool = False) -> int:
    """Make an arena of `size_bytes` zeros, none of them in memory yet, and return its descriptor, which the caller
    owns.

    Args:
        size_bytes: Fixed for good by seals.
        name: Shown in `/proc/<pid>/maps`.
        alignable: Add addresses behind it (no memory, as long as nobody touches them), so that it can be mapped for huge pages.

    Raises:
        StorageFullError: The system has no room for it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    label = f"safehold-{name}"[:200]
    try:
        fd = os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # kernels before 6.3 do not know the flag
            raise
        fd = os.memfd_create(label, flags)
    try:
        os.ftruncate(fd, size_bytes + (HUGE_BYTES if alignable and size_bytes >= HUGE_BYTES else 0))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as exc:
        os.close(fd)
        if exc.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise StorageFullError(f"no memory for an arena of {size_bytes} bytes", tier="memory") from exc
        raise
    return fd


def _map_aligned(fd: int, size_bytes: int, end_bytes: int, protection: int) -> mmap.mmap:
    """Map so that huge pages fit, which the system does not do by itself: copies into them are about a fifth faster.

    Mappings are laid out downwards, so one that is longer by its excess over a border begins at that border; the file has room for that
    behind what is used of it (up to `end_bytes`). If another thread maps something in between, the result is as good as any other
    mapping, only without huge pages.
    """
    found = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
    if size_bytes < HUGE_BYTES:
        return found
    for _ in range(_ALIGN_TRIES):
        excess = _address_of(found) % HUGE_BYTES
        longer = len(found) + excess if len(found) + excess <= end_bytes else size_bytes + excess
        if not excess or longer > end_bytes:
            break
        found.close()
        found = mmap.mmap(fd, longer, flags=mmap.MAP_SHARED, prot=protection)
    return found


def _address_of(found: mmap.mmap) -> int:
    return int(np.frombuffer(found, np.uint8).ctypes.data)


class Mapping:
    """An arena (or a control block) mapped into this process.

    Attributes:
        size_bytes: How much is mapped.
        view: The bytes; writable if the mapping is.
        huge: Whether huge pages are still tried for when it is populated.
        address: Where they begin; 0 for an empty mapping.
    """

    def __init__(self, fd: int, size_bytes: int | None = None, *, writable: bool = True) -> None:
        """Map the first `size_bytes` (None: all) of a sealed memfd; the descriptor stays the caller's and may be
        closed.

        Raises:
            AgentUnavailableError: The descriptor is no arena of that size, or it could be truncated by another process.
            StorageFullError: There are no addresses left.
        """
        actual = os.fstat(fd).st_size
        size_bytes = actual if size_bytes is None else size_bytes
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise AgentUnavailableError("what was passed is no shared memory") from exc
        if actual < size_bytes or not seals & fcntl.F_SEAL_SHRINK:
            raise AgentUnavailableError(
                f"the shared memory passed has {actual} bytes, seals {seals:#x}; {size_bytes} sealed bytes are needed"
            )
        self.size_bytes = size_bytes
        self.writable = writable
        self.huge = True
        self.address = 0
        self._map: mmap.mmap | None = None
        if size_bytes == 0:
            self.view = memoryview(bytearray() if writable else b"")
            return
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = _map_aligned(fd, size_bytes, actual, protection)
        except OSError as exc:
            raise StorageFullError(f"mapping {size_bytes} bytes failed: {exc.strerror}", tier="memory") from exc
        self.view = memoryview(self._map)[:size_bytes]
        self.address = _address_of(self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def keep_from_children(self) -> None:
        """Leave the mapping out of processes forked from now on: none of them shall be able to write to it, or keep its memory."""
        if self._map is not None:
            libc.madvise(self.address, self.size_bytes, libc.MADV_DONTFORK)

    def close(self) -> bool:
        """Unmap; return False if views of it still live: then the memory goes with the last of them, and nothing can
        crash.
        """
        try:
            self.view.release()
            if self._map is not None:
                self._map.close()
        except BufferError:
            return False
        finally:
            self._map = None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Populated:
    """What `populate` did.

    Attributes:
        size_bytes: Bytes that are in memory and mapped now.
        seconds: How long it took.
        cancelled: Whether it stopped early.
    """

    size_bytes: int
    seconds: float
    cancelled: bool


def populate(
    mapping: Mapping,
    *,
    num_threads: int = 2,
    cancelled: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Populated:
    """Bring all pages of a writable mapping into memory and into this process's page table, without changing a byte.

    Each process that will write to the arena does it for itself: the first pays for the pages (about 1.5 GB/s per
    thread), the others only for their page tables (12 GB/s). Works in chunks of 8 MiB, so that other threads
    can map memory in between.

    Args:
        mapping: What to populate.
        num_threads: Threads to use; more than the cores that are idle do not help.
        cancelled: Asked before every chunk.
        progress: Told the bytes done so far, from any of the threads.

    Raises:
        StorageFullError: The memory is not there (a limit of a control group, or of the machine).
    """
    begun = time.monotonic()
    starts = range(0, mapping.size_bytes, _POPULATE_CHUNK_BYTES)
    pending = iter(starts)
    lock = threading.Lock()
    done = 0
    stop = False

    def work() -> None:
        nonlocal done, stop
        while True:
            with lock:
                start = None if stop else next(pending, None)
            if start is None:
                return
            if cancelled is not None and cancelled():
                stop = True
                return
            size = min(_POPULATE_CHUNK_BYTES, mapping.size_bytes - start)
            try:
                _populate_range(mapping, start, size)
            except BaseException:
                stop = True
                raise
            with lock:
                done += size
                total = done
            if progress is not None:
                progress(total)

    workers = max(1, min(num_threads, len(starts)))
    if workers == 1:
        work()
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="safehold-populate") as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
    return Populated(size_bytes=done, seconds=time.monotonic() - begun, cancelled=done < mapping.size_bytes)


def _populate_range(mapping: Mapping, start: int, size_bytes: int) -> None:
    stop = start + size_bytes
    while mapping.huge and start + HUGE_BYTES <= stop and (mapping.address + start) % HUGE_BYTES == 0:
        _populate_pages(mapping, start, PAGE_BYTES)
        mapping.huge = _collapse(mapping.address + start)
        if mapping.huge:
            start += HUGE_BYTES
    if start < stop:
        _populate_pages(mapping, start, stop - start)


def _collapse(address: int) -> bool:
    """Make the 2 MiB at `address`, of which one page is there, one huge page; False if the system cannot, or takes too long for it.

    `MADV_COLLAPSE` (since Linux 6.1) also gives huge pages to shared memory where they are not given by themselves. It brings in
    the pages that are missing, faster than one by one.
    """
    begun = time.thread_time()  # not the time that passes: this thread gives way to others
    try:
        libc.madvise(address, HUGE_BYTES, libc.MADV_COLLAPSE)
    except OSError:
        return False
    return time.thread_time() - begun < _SLOW_COLLAPSE_S


def _populate_pages(mapping: Mapping, start: int, size_bytes: int) -> None:
    try:
        libc.madvise(mapping.address + start, size_bytes, libc.MADV_POPULATE_WRITE)
    except OSError as exc:
        if exc.errno == errno.EINVAL:  # kernels before 5.14
            _touch(mapping, start, size_bytes)
        elif exc.errno in (errno.ENOMEM, errno.EFAULT):
            raise StorageFullError(
                f"no memory for an arena of {mapping.size_bytes} bytes", tier="memory", hint="lower the memory budget"
            ) from exc
        else:
            raise


def _touch(mapping: Mapping, start: int, size_bytes: int) -> None:
    """Read a byte of every page: a read fault on shared memory allocates the page and maps it writable."""
    page_bytes = np.frombuffer(mapping.view, np.uint8, count=size_bytes, offset=start)[::PAGE_BYTES]
    np.bitwise_or.reduce(page_bytes)


@contextmanager
def read_only(fd: int) -> Iterator[int]:
    """Yield a descriptor of the same memory that cannot be mapped for writing; where proc(5) is not mounted, `fd` itself."""
    try:
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield fd
        return
    try:
        yield opened
    finally:
        os.close(opened)


def punch_hole(fd: int, start: int, size_bytes: int) -> None:
    """Give the pages of a range back to the system; it reads as zeros afterwards. Best effort: errors of the system
    are ignored.
    """
    try:
        mode = disk_calls.FALLOC_FL_PUNCH_HOLE | disk_calls.FALLOC_FL_KEEP_SIZE
        disk_calls.fallocate(fd, start, size_bytes, mode=mode)
    except OSError:
        pass  # the memory stays taken until the arena goes
