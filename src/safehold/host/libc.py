"""The few system calls on memory and processes that Python has no function for, by ctypes; those on files: `disk_calls`.

Invariants: every call releases the interpreter lock, and a failure is an `OSError` with the kernel's errno. Only raw
calls: no policy, no retry, no fallback.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

MADV_DONTFORK = 10
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_SYSCALLS = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "ioprio_set": 251},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "ioprio_set": 30},
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.madvise.restype = ctypes.c_int
    library.syscall.restype = ctypes.c_long
    return library


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def madvise(address: int, size_bytes: int, advice: int) -> None:
    """Call `madvise(2)` on memory of this process."""
    _check(_library().madvise(address, size_bytes, advice), "madvise")


def syscall(name: str, *arguments: int | ctypes.Array[ctypes.c_ulong] | ctypes.Array[ctypes.c_int] | None) -> int:
    """Make a system call that glibc has no wrapper for.

    Args:
        name: One of those that this module knows.
        arguments: Integers (passed as `long`), ctypes arrays (passed as pointers) or None (a null pointer).

    Raises:
        OSError: The kernel refused; `ENOSYS` where this architecture is not known here.
    """
    number = _SYSCALLS.get(platform.machine(), {}).get(name)
    if number is None:
        import errno

        raise OSError(errno.ENOSYS, f"{name}: not known on {platform.machine()}")
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_library().syscall(ctypes.c_long(number), *passed), name)
