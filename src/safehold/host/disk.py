"""A disk: the file operations that tiers are made of, as a Protocol. `host.posix_disk` is the real one.

A disk is rooted at one directory; paths are relative to it, `""` is the root itself. Invariants: no operation leaves
the root or follows a symbolic link below it; files and directories get the modes that the disk was told, whatever the
umask; every operation is about one system call, raises `OSError`, and makes nothing durable unless it says so. What
must not live here: retries, atomicity, temporary names, translation of errors (`tiers.flash`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, Protocol

from safehold.host.direct_io import DirectLimits

Access = Literal["read", "write", "create"]
FileKind = Literal["file", "directory", "other"]

MAX_COMPONENT_BYTES = 255


class NotRegularFileError(OSError):
    """There is something of that name, and it is neither a regular file nor (where one is wanted) a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What a name stands for.

    Attributes:
        kind: `other` for links and special files.
        size_bytes: Size of a file.
        identity: Equal for two names of one file: device and inode.
        modified_s: Time of the last change, seconds since the epoch, by the clock of the storage.
    """

    kind: FileKind
    size_bytes: int
    identity: tuple[int, int]
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """What a disk lies on.

    Attributes:
        kind: Its name, or its magic number in hex.
        shared: Whether other hosts see the same files; None if the kind does not tell.
    """

    kind: str
    shared: bool | None


class DiskFile(Protocol):
    """An open regular file. All but `close` may be called from several threads at once."""

    @property
    def direct(self) -> DirectLimits | None:
        """The limits of direct I/O if the file was opened for it and takes it, else None."""
        ...

    def pwrite(self, data: memoryview, offset: int) -> int:
        """Write at `offset`; return the number of bytes written, which may be fewer."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Read at `offset`; return the number of bytes read, which may be fewer; 0 at the end."""
        ...

    def allocate(self, size_bytes: int) -> bool:
        """Set the file's size and reserve space for it.

        Returns:
            False if the file system cannot reserve space; then only the size is set.

        Raises:
            OSError: `ENOSPC` or `EDQUOT`: the space is not there.
        """
        ...

    def size(self) -> int:
        """Return the size in bytes."""
        ...

    def start_writeback(self, offset: int, nbytes: int) -> None:
        """Ask for a range of dirty pages to be written; does not wait, makes nothing durable."""
        ...

    def await_writeback(self, offset: int, nbytes: int) -> None:
        """Wait until a range is written, and drop it from the page cache; makes nothing durable."""
        ...

    def fsync(self) -> None:
        """Make content and size durable; not the directory entry."""
        ...

    def close(self) -> None:
        """Close; may be called twice."""
        ...


class Disk(Protocol):
    """A rooted tree of files. Thread-safe."""

    @property
    def root(self) -> str:
        """The root's absolute path, for messages."""
        ...

    def make_root(self) -> None:
        """Make the root and the directories above it, durably; existing is fine."""
        ...

    def mkdir(self, path: str) -> None:
        """Make one directory; `FileExistsError` if there is something of that name."""
        ...

    def open(self, path: str, access: Access, *, direct: bool = False) -> DiskFile:
        """Open a regular file.

        Args:
            path: The file.
            access: `read`; `write` (an existing file, also readable); `create` (exclusively; `FileExistsError`).
            direct: Past the page cache where the file takes that; see `DiskFile.direct` for what came of it.
        """
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; `FileExistsError` if that is taken."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing a file of that name."""
        ...

    def rename_exclusive(self, source: str, target: str) -> None:
        """Rename; `FileExistsError` if the name is taken; `ENOSYS` or `EINVAL` where the file system cannot."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def scan(self, path: str) -> list[tuple[str, FileStat]]:
        """Return the names in a directory, sorted, and what they are."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return what a name stands for; links are not followed."""
        ...

    def fsync_dir(self, path: str) -> bool:
        """Make the entries of a directory durable (not those above it); False if the file system has no such thing."""
        ...

    def free_bytes(self) -> int:
        """Return the space that this user can still fill."""
        ...

    def file_system(self) -> FileSystem:
        """Return what the root lies on."""
        ...


def components(path: str) -> tuple[str, ...]:
    """Split a relative path into its components; none for `""`.

    Raises:
        ValueError: It is absolute, or has a component that is empty, `.`, `..`, too long, or has a NUL in it.
    """
    if path == "":
        return ()
    parts = tuple(path.split("/"))
    for part in parts:
        if part in ("", ".", "..") or "\0" in part or len(os.fsencode(part)) > MAX_COMPONENT_BYTES:
            raise ValueError(f"unsafe path {path!r}")
    return parts


def join(*parts: str) -> str:
    """Join relative paths; empty ones stand for the root."""
    return "/".join(part for part in parts if part)


def parent_of(path: str) -> str:
    """Return the directory that `path` is in; `""` for the top."""
    return path.rpartition("/")[0]
