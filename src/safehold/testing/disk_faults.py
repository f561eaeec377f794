"""Operations of a fake disk, and which of them fail or hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

_CHANGING = frozenset(
    ("make_root", "mkdir", "create", "pwrite", "allocate", "fsync", "fsync_dir", "link", "rename", "unlink", "rmdir")
)


class PowerLostError(BaseException):
    """The power is gone. No error of storage: code that handles those must not handle this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        index: Number of the operation on this disk, from 0.
        kind: `make_root`, `mkdir`, `create`, `open`, `pwrite`, `pread`, `allocate`, `size`, `writeback`, `fsync`,
            `close`, `link`, `rename`, `rename_exclusive`, `unlink`, `rmdir`, `scan`, `stat`, `fsync_dir`,
            `free_bytes`, `file_system`.
        path: The path concerned; the target of `link` and `rename`.
        offset: Offset of a transfer.
        nbytes: Length of a transfer or size of an allocation.
    """

    index: int
    kind: str
    path: str
    offset: int = 0
    nbytes: int = 0

    @property
    def changes(self) -> bool:
        """Whether it changes what is stored or what is safe: the operations that are worth a power cut."""
        return self.kind in _CHANGING or self.kind == "rename_exclusive"


At = int | Callable[[Op], bool]


@dataclass(slots=True, kw_only=True)
class Failure:
    """How operations fail; see `FakeDisk.fail_at`."""

    at: At
    code: int
    times: int
    applied: bool


class Hang:
    """An operation that does not return until it is released.

    Attributes:
        reached: Set when an operation has come to hang.
    """

    def __init__(self, at: At, code: int | None) -> None:
        self.reached = threading.Event()
        self._at = at
        self._code = code
        self._released = threading.Event()

    def release(self) -> None:
        """Let it go on (or fail, if a code was given), and nothing hang any more."""
        self._released.set()

    def wait(self, op: Op) -> None:
        """Hang if `op` is meant; called by the disk."""
        if self._released.is_set() or not matches(self._at, op):
            return
        self.reached.set()
        self._released.wait()
        if self._code is not None:
            raise OSError(self._code, os.strerror(self._code), op.path)


def matches(at: At, op: Op) -> bool:
    """Return whether `op` is meant."""
    return op.index == at if isinstance(at, int) else at(op)
