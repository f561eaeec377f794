"""What a tier is: a place that can hold checkpoints, seen as a tree of small files and packs below one run directory.

Invariants: paths are relative, made of the safe components that `format.paths` writes; `..`, absolute paths and links
are refused. A failure is an error of `safehold.errors` that names tier and path; only `FileNotFoundError` and
`FileExistsError` pass as they are, where the signature says so. What must not live here: decisions (which checkpoint
counts, what may be deleted).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

# Offsets and lengths of a pack's blocks should be multiples of this; everything else works too, slower.
ALIGNMENT_BYTES = 4096

# How the names of unfinished or half-deleted things begin. No name of `format.paths` begins so, and `Tier.list` does
# not show them.
TEMPORARY_PREFIX = ".tmp-"


def in_object_store(place: str) -> bool:
    """Whether a run directory, in the one spelling that `tiers.open.place` gives it, is in an object store."""
    return "://" in place


def tier_word(place: str) -> str:
    """Return the name of a run directory's tier in messages: `remote` in an object store, else `flash`."""
    return "remote" if in_object_store(place) else "flash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name in a directory.

    Attributes:
        name: The last component of the path.
        is_dir: Whether it is a directory.
        size_bytes: Size of a file, 0 for a directory.
    """

    name: str
    is_dir: bool
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a trial of a tier found out.

    Attributes:
        writable: A file could be made, read back equal, and removed.
        exclusive_create: A second exclusive put of the same name was refused; without it a tier cannot hold a run.
        exclusive_by: How exclusiveness is had: `link`, `rename`, `create` (not atomic in content), or the store's own
            word.
        direct_io: Packs are written past the page cache.
        direct_align_bytes: What direct I/O asks of offsets; 0 without it.
        allocates: Space is reserved before a pack's first byte is copied; else a full quota is met in mid-write.
        fsync_works: fsync of files and of directories was accepted.
        shared: Whether other hosts see the same files: by kind of file system; None if that does not tell.
        kind: The file system or store (`ext4`, `nfs`, ...), or its number in hex.
        free_bytes: Space that this user can still fill, None if unknown.
        notes: What somebody should know, one sentence each.
    """

    writable: bool
    exclusive_create: bool
    exclusive_by: str = ""
    direct_io: bool = False
    direct_align_bytes: int = 0
    allocates: bool = False
    fsync_works: bool = False
    shared: bool | None = None
    kind: str = ""
    free_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())


@runtime_checkable
class PackWriter(Protocol):
    """A pack being written. Nothing is believed of it before `finish` has returned."""

    @property
    def alignment(self) -> int:
        """Offsets, lengths and addresses that are multiples of it are written fastest."""
        ...

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`, in any order, from any thread; the buffer is free again when it returns.

        Raises:
            StorageError: The bytes may be there or not; the writer is spoilt and `finish` will refuse.
            ValueError: The range is not inside the pack, or the writer is closed.
        """
        ...

    def finish(self) -> None:
        """Make the data durable and close. The directory entry is made durable by `Tier.sync_tree`.

        Raises:
            StorageError: It is not known what is durable; the pack must not be used. Never call it again to find out.
        """
        ...

    def abort(self) -> None:
        """Close and remove the pack, as well as that can be done; never raises, may be called at any time and twice."""
        ...


@runtime_checkable
class PackReader(Protocol):
    """A pack open for reading; may be used by many threads at once, except for `close`."""

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""
        ...

    @property
    def alignment(self) -> int:
        """Offsets and addresses that are multiples of it are read fastest."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` (any address, any length) from `offset`.

        Raises:
            TornFileError: The file ends before.
            StorageError: The storage failed.
        """
        ...

    def close(self) -> None:
        """Close; may be called twice."""
        ...


@runtime_checkable
class Tier(Protocol):
    """A place that can hold checkpoints. Thread-safe; calls may block for as long as the storage does."""

    @property
    def name(self) -> str:
        """`flash`, `remote` or `memory`: the word for messages."""
        ...

    @property
    def url(self) -> str:
        """Where the run directory is, as `open_tier` takes it."""
        ...

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """Create a pack of a known size, with its directories, and reserve its space.

        Raises:
            FileExistsError: There is something of that name.
            StorageFullError: The space is not there; nothing was left behind.
            StorageError: Anything else.
        """
        ...

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> PackReader:
        """Open a pack for reading.

        Args:
            path: The pack.
            direct: Read past the page cache where that is possible.
            retry_s: How long to look again for a file that is not (yet) seen; None: as the tier was told.

        Raises:
            FileNotFoundError: It is not there.
            TornFileError: It is no regular file.
        """
        ...

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a whole small file; atomic, and durable with all directory entries above it when this returns.

        Readers see the old file or the new one, never a part. After an error other than `FileExistsError` the file
        may be there or not; a repeated exclusive put then says `FileExistsError`, and reading it back tells whose it
        is.

        Args:
            path: The file; missing directories are made.
            data: Its content.
            exclusive: Refuse if there is something of that name; of several that try at once, one succeeds.

        Raises:
            FileExistsError: Only with `exclusive`.
            StorageError: See above.
        """
        ...

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """Read a whole small file.

        Raises:
            FileNotFoundError: It is not there.
            TornFileError: It is larger than `limit_bytes`, changed its length while it was read, or is no regular file.
        """
        ...

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: It is not there.
            TornFileError: It is no regular file.
        """
        ...

    def list(self, directory: str) -> list[Entry]:
        """Return files and directories in `directory` (`""`: the run directory), sorted by name; empty if it is absent.

        Temporaries, links and special files are left out.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove a file, durably; absent is fine."""
        ...

    def delete_tree(self, directory: str) -> None:
        """Remove a directory and all below it, following no links; absent is fine.

        The tree disappears from `list` and from reads as one, where the tier can do that, before any byte of it goes.
        """
        ...

    def delete_if_empty(self, directory: str) -> None:
        """Remove a directory that has nothing in it; one that has, or is absent, is left alone."""
        ...

    def sync_tree(self, directory: str) -> None:
        """Make all entries durable that lead to `directory` from the run directory, and those in it and below."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it, durably; existing is fine."""
        ...

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """Remove what crashed writers left in `directory` under temporary names; return those names."""
        ...

    def free_bytes(self) -> int | None:
        """Return the space that can still be filled, None if the tier cannot tell."""
        ...

    def probe(self) -> ProbeReport:
        """Try out what the tier can do, with small files under temporary names in the run directory."""
        ...
