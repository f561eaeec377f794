"""The system calls that make a host of a process: namespaces, mounts, a host name. Only raw calls, by ctypes.

Invariants: a failure is an `OSError` with the kernel's errno and the call's name.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

NEW_MOUNTS = 0x00020000
NEW_HOST_NAME = 0x04000000
NEW_IPC = 0x08000000
NEW_PROCESSES = 0x20000000
NEW_NETWORK = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
    library.sethostname.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.prctl.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
    return library


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (for `NEW_PROCESSES`: its children to come) into namespaces of its own."""
    _check(_library().unshare(ctypes.c_int(flags)), "unshare")


def set_host_name(name: str) -> None:
    """Name this host."""
    _check(_library().sethostname(name.encode(), len(name.encode())), "sethostname")


def name_process(name: str) -> None:
    """Set what `ps` shows of this process, 15 bytes at most."""
    _check(_library().prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _check(_library().prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_void_p(1), 0, 0, 0), "prctl")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _library().mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode())
    _check(result, f"mount {target}")


def detach_mounts() -> None:
    """Let mounts made here stay here."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)


def mount_processes() -> None:
    """Have `/proc` show the processes of this process namespace."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def mount_memory(target: str | Path, mode: str = "0755") -> None:
    """Put an empty file system in memory in the place of a directory."""
    _mount("tmpfs", str(target), "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode}")


def bind(source: str | Path, target: str | Path) -> None:
    """Have a file or directory appear in the place of another."""
    _mount(str(source), str(target), "", _MS_BIND)
