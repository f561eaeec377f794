"""Direct I/O: whether a file takes it, and how to get any range of bytes through its alignment rules.

Invariants: a decision for direct I/O comes from statx(2) or from a trial whose bytes were compared, never from `open`
having accepted the flag (tmpfs accepts it and means nothing by it). The loops here end with every byte moved or an
error: short transfers are continued, a return of 0 is an error. What must not live here: paths, durability.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Protocol

from safehold.host import disk_calls
from safehold.host.memfd import HUGE_BYTES

PAGE_BYTES = 4096
BOUNCE_BYTES = 2 << 20

# File systems that live in memory: direct I/O has no meaning there (magic numbers of linux/magic.h).
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLimits:
    """What direct I/O asks of a transfer, in bytes.

    Attributes:
        memory_align: The buffer's address is a multiple of it.
        offset_align: Offset in the file and length are multiples of it.
    """

    memory_align: int = PAGE_BYTES
    offset_align: int = PAGE_BYTES


class RawFile(Protocol):
    """The two calls that the loops here need; either may move fewer bytes than asked."""

    @property
    def direct(self) -> DirectLimits | None:
        """The limits of a file opened for direct I/O, else None."""
        ...

    def pwrite(self, data: memoryview, offset: int) -> int:
        """Write at `offset`; return the number of bytes written."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Read at `offset`; return the number of bytes read, 0 at the end of the file."""
        ...


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a contiguous buffer, writable or not."""
    import numpy as np

    if view.nbytes == 0:
        return 0
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def aligned_buffer(nbytes: int) -> memoryview:
    """Return fresh page-aligned private memory that lives as long as the view; of huge pages where it is large and the system has them.

    A direct transfer is cut at every border between pages that do not lie side by side: with huge pages it took half the time (measured).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < HUGE_BYTES:
        return memoryview(mmap.mmap(-1, nbytes, flags=flags))
    found = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=flags)
    try:
        found.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # the kernel has none
    view = memoryview(found)
    skip = -address_of(view) % HUGE_BYTES
    return view[skip : skip + nbytes]


class _Bounce(threading.local):
    view: memoryview | None = None


_bounce = _Bounce()


def bounce_buffer() -> memoryview:
    """Return this thread's page-aligned buffer of `BOUNCE_BYTES`; valid until the thread asks again."""
    if _bounce.view is None:
        _bounce.view = aligned_buffer(BOUNCE_BYTES)
    return _bounce.view


def ask_limits(fd: int) -> tuple[bool, DirectLimits | None]:
    """Ask kernel and file system whether the file `fd` takes direct I/O.

    Returns:
        Whether there is an answer, and the limits (None: it does not).
    """
    if disk_calls.file_system_type(fd) in _IN_MEMORY:
        return True, None
    answer = disk_calls.statx_dio_align(fd)
    if answer is None:
        return False, None
    if answer.offset_align <= 0 or answer.memory_align <= 0 or answer.offset_align > BOUNCE_BYTES:
        return True, None
    return True, DirectLimits(memory_align=answer.memory_align, offset_align=answer.offset_align)


def try_limits(fd: int, *, may_write: bool) -> tuple[bool, DirectLimits | None]:
    """Find out by a trial whether the regular file `fd` takes direct I/O, where `ask_limits` has no answer.

    An empty file that may be written gets a block that is read back both ways and taken away again; of another one
    the first block is read both ways and compared. A file too short for that tells nothing.

    Args:
        fd: A buffered descriptor, readable.
        may_write: Whether `fd` is writable.

    Returns:
        Whether there is an answer, and the limits (None: it does not).
    """
    try:
        if may_write and os.fstat(fd).st_size == 0:
            works = _try_writing(fd)
        elif os.fstat(fd).st_size >= PAGE_BYTES:
            works = _try_reading(fd)
        else:
            return False, None
    except OSError as exc:
        if exc.errno in _REFUSALS:
            return True, None
        raise
    return True, DirectLimits() if works else None


def _open_direct(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)


def _try_writing(fd: int) -> bool:
    block = aligned_buffer(PAGE_BYTES)
    block[:] = os.urandom(PAGE_BYTES)
    direct = _open_direct(fd, os.O_RDWR)
    try:
        if os.pwrite(direct, block, 0) != PAGE_BYTES:
            return False
        back = aligned_buffer(PAGE_BYTES)
        return os.preadv(direct, [back], 0) == PAGE_BYTES and back == block == os.pread(fd, PAGE_BYTES, 0)
    finally:
        os.close(direct)
        os.ftruncate(fd, 0)


def _try_reading(fd: int) -> bool:
    expected = os.pread(fd, PAGE_BYTES, 0)
    direct = _open_direct(fd, os.O_RDONLY)
    try:
        block = aligned_buffer(PAGE_BYTES)
        return os.preadv(direct, [block], 0) == PAGE_BYTES and block == expected
    finally:
        os.close(direct)


def write_all(file: RawFile, data: memoryview, offset: int) -> None:
    """Write all of `data` by as many calls as it takes."""
    while data.nbytes:
        try:
            done = file.pwrite(data, offset)
        except InterruptedError:
            continue
        if done <= 0:
            raise OSError(errno.EIO, "a write moved no bytes")
        data, offset = data[done:], offset + done


def read_all(file: RawFile, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` by as many calls as it takes; return how much there was before the end of the file."""
    total = 0
    while total < buffer.nbytes:
        try:
            done = file.pread_into(buffer[total:], offset + total)
        except InterruptedError:
            continue
        if done <= 0:
            break
        total += done
    return total


def write_direct(file: RawFile, buffered: RawFile, data: memoryview, offset: int) -> bool:
    """Write `data` past the page cache where alignment allows, the rest through `buffered`.

    Pages are never shared between the two ways: what goes direct covers whole pages of the file. Memory that is not
    aligned is copied through this thread's bounce buffer.

    Args:
        file: The file, opened for direct I/O.
        buffered: The same file without.
        data: Any bytes.
        offset: Any offset.

    Returns:
        False if the file refused an aligned direct write after all; then everything went through `buffered`.
    """
    limits = file.direct
    assert limits is not None
    align = max(PAGE_BYTES, limits.offset_align)
    begin = min(-(-offset // align) * align - offset, data.nbytes)
    end = max((offset + data.nbytes) // align * align - offset, begin)
    if begin:
        write_all(buffered, data[:begin], offset)
    middle = data[begin:end]
    accepted = True
    if middle.nbytes:
        at = offset + begin
        if address_of(middle) % limits.memory_align == 0:
            accepted = _write_aligned(file, buffered, middle, at, align)
        else:
            accepted = _write_bounced(file, buffered, middle, at, align)
    if end < data.nbytes:
        write_all(buffered, data[end:], offset + end)
    return accepted


def _write_bounced(file: RawFile, buffered: RawFile, data: memoryview, offset: int, align: int) -> bool:
    bounce = bounce_buffer()
    accepted = True
    for at in range(0, data.nbytes, bounce.nbytes):
        piece = data[at : at + bounce.nbytes]
        bounce[: piece.nbytes] = piece
        accepted = _write_aligned(file, buffered, bounce[: piece.nbytes], offset + at, align) and accepted
    return accepted


def _write_aligned(file: RawFile, buffered: RawFile, data: memoryview, offset: int, align: int) -> bool:
    while data.nbytes:
        try:
            done = file.pwrite(data, offset)
        except InterruptedError:
            continue
        except OSError as exc:
            if exc.errno not in _REFUSALS:
                raise
            write_all(buffered, data, offset)
            return False
        if done <= 0:
            raise OSError(errno.EIO, "a write moved no bytes")
        data, offset = data[done:], offset + done
        if done % align and data.nbytes:  # a short write that left the grid; the rest of the block cannot go direct
            ragged = min(align - offset % align, data.nbytes)
            write_all(buffered, data[:ragged], offset)
            data, offset = data[ragged:], offset + ragged
            if data.nbytes and address_of(data) % PAGE_BYTES:
                return _write_bounced(file, buffered, data, offset, align)
    return True


def read_direct(file: RawFile, buffered: RawFile, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` past the page cache; return how much there was before the end of the file.

    Blocks that fit the alignment are read in place; ragged ends, and all of it where buffer and file do not line up,
    go through this thread's bounce buffer. A file that refuses after all is read through `buffered`.
    """
    limits = file.direct
    assert limits is not None
    try:
        return _read_direct(file, buffered, buffer, offset, limits)
    except OSError as exc:
        if exc.errno not in _REFUSALS:
            raise
    return read_all(buffered, buffer, offset)


def _read_direct(file: RawFile, buffered: RawFile, buffer: memoryview, offset: int, limits: DirectLimits) -> int:
    align = limits.offset_align
    nbytes = buffer.nbytes
    begin = min(-(-offset // align) * align - offset, nbytes)
    end = max((offset + nbytes) // align * align - offset, begin)
    if end > begin and address_of(buffer[begin:end]) % limits.memory_align:
        return _read_bounced(file, buffered, buffer, offset, align)
    total = _read_bounced(file, buffered, buffer[:begin], offset, align)
    if total < begin:
        return total
    while total < end:
        try:
            done = file.pread_into(buffer[total:end], offset + total)
        except InterruptedError:
            continue
        if done <= 0:
            return total
        total += done
        if done % align:  # the end of the file, or a short read that left the grid
            return total + _read_bounced(file, buffered, buffer[total:], offset + total, align)
    return total + _read_bounced(file, buffered, buffer[total:], offset + total, align)


def _read_bounced(file: RawFile, buffered: RawFile, buffer: memoryview, offset: int, align: int) -> int:
    bounce = bounce_buffer()
    total = 0
    while total < buffer.nbytes:
        base = (offset + total) // align * align
        skip = offset + total - base
        want = min(skip + buffer.nbytes - total, bounce.nbytes)
        try:
            done = file.pread_into(bounce[: -(-want // align) * align], base)
        except InterruptedError:
            continue
        if done <= 0:
            break
        useful = min(done - skip, buffer.nbytes - total)
        if useful <= 0:  # a short read, or the end of the file: without alignment that can be told apart
            return total + read_all(buffered, buffer[total:], offset + total)
        buffer[total : total + useful] = bounce[skip : skip + useful]
        total += useful
    return total
