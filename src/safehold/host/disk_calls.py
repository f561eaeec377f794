"""System calls on files that Python's `os` has no name for, by ctypes.

Invariants: each function is one system call, releases the interpreter lock while it runs, and raises `OSError` with
the kernel's errno (`ENOSYS` where the C library lacks it). Decisions live in `host.disk` and `host.direct_io`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from dataclasses import dataclass
from typing import Any

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
SYNC_FILE_RANGE_WAIT_BEFORE = 1
SYNC_FILE_RANGE_WRITE = 2
SYNC_FILE_RANGE_WAIT_AFTER = 4
RENAME_NOREPLACE = 1

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
# struct statx of linux/stat.h: 256 bytes, stx_mask first, the two dio alignments at these offsets (Linux 6.1).
_STATX_BYTES = 256
_STATX_MEM_ALIGN_AT = 152
_STATX_OFFSET_ALIGN_AT = 156

# struct statfs starts with f_type, a machine word, on the 64-bit machines that this library runs on.
_STATFS_BYTES = 256

_libc = ctypes.CDLL(None, use_errno=True)


def _function(name: str, *argtypes: Any) -> Any:
    found = getattr(_libc, name, None)
    if found is not None:
        found.argtypes = argtypes
        found.restype = ctypes.c_int
    return found


_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_renameat2 = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_statx = _function("statx", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
_fstatfs = _function("fstatfs", ctypes.c_int, ctypes.c_void_p)


def _check(function: Any, *args: Any) -> None:
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while function(*args) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def fallocate(fd: int, offset: int, nbytes: int, *, mode: int = 0) -> None:
    """Reserve space, or what `mode` says, by the system call, never by the C library's emulation, which writes."""
    _check(_fallocate, fd, mode, offset, nbytes)


def sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
    """Start or await the write-back of a range of dirty pages; makes nothing durable."""
    _check(_sync_file_range, fd, offset, nbytes, flags)


def rename_noreplace(source: str, target: str, *, source_dir_fd: int, target_dir_fd: int) -> None:
    """Rename unless `target` exists (`FileExistsError`); `EINVAL` or `ENOSYS` where the file system cannot."""
    _check(_renameat2, source_dir_fd, os.fsencode(source), target_dir_fd, os.fsencode(target), RENAME_NOREPLACE)


@dataclass(frozen=True, slots=True)
class DioAlign:
    """What the kernel says of direct I/O on a file; both are 0 where it has none. Bytes."""

    memory_align: int
    offset_align: int


def statx_dio_align(fd: int) -> DioAlign | None:
    """Return what statx(2) says of direct I/O on `fd`, or None if kernel or file system has no answer."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        _check(_statx, fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.addressof(buffer))
    except OSError:
        return None
    if not int.from_bytes(buffer.raw[:4], sys.byteorder) & _STATX_DIOALIGN:
        return None
    return DioAlign(
        memory_align=int.from_bytes(buffer.raw[_STATX_MEM_ALIGN_AT : _STATX_MEM_ALIGN_AT + 4], sys.byteorder),
        offset_align=int.from_bytes(buffer.raw[_STATX_OFFSET_ALIGN_AT : _STATX_OFFSET_ALIGN_AT + 4], sys.byteorder),
    )


def file_system_type(fd: int) -> int | None:
    """Return the magic number of the file system that `fd` lies on (`f_type` of statfs(2)), or None."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    try:
        _check(_fstatfs, fd, ctypes.addressof(buffer))
    except OSError:
        return None
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF
