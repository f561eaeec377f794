"""Gives a rank a disk of its own under the run directory's path: a mount namespace that it, its agent and flusher share, and nobody else.

Invariants: imports nothing but the standard library; is called before anything of the run directory was opened.
"""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 1 << 14, 1 << 18


def mount(disk: str, at: str) -> None:
    """From now on `at` is the directory `disk`, for this process and those that it starts.

    Raises:
        OSError: Not root, or no such directory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    _check(libc.mount(os.fsencode(disk), os.fsencode(at), None, ctypes.c_ulong(_MS_BIND), None))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
