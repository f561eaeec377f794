"""The flash tier: checkpoints in a directory of a file system, node-local, hall-local or shared.

Invariants: a file of `put` is whole under its name from the first moment, and durable with every directory entry
above it when `put` returns; nothing is ever opened for writing under a committed name; no temporary name can be taken
for another. Directory entries are fsynced from the file up to the root each time, never remembered as done: another
process may have made a directory and died before it was durable. What must not live here: which checkpoint counts.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import ConfigurationError, StorageError, StorageFullError, TornFileError, from_os_error
from safehold.host import direct_io
from safehold.host.disk import Disk, DiskFile, NotRegularFileError, components, join, parent_of
from safehold.host.posix_disk import PosixDisk
from safehold.tiers import flash_probe
from safehold.tiers.base import TEMPORARY_PREFIX, Entry, ProbeReport
from safehold.tiers.flash_pack import FlashPackReader, FlashPackWriter

T = TypeVar("T")

STALE_RETRY_S = 5.0
MAX_TREE_DEPTH = 64
MAKE_TRIALS = 4
_CANNOT_LINK = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_CANNOT_RENAME = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class FlashTier:
    """See `tiers.base.Tier`.

    Args:
        root: The run directory; need not exist, is made by the first write.
        disk: A disk rooted there; None: the host's.
        name: The word for messages.
        retry_s: How long reads look again for a file that is not there, for file systems on which another host's file
            takes time to be seen; a handle gone stale is retried for `STALE_RETRY_S` at least.
        file_mode: Mode of new files (not with `disk`).
        dir_mode: Mode of new directories (not with `disk`).
        direct: Whether to go past the page cache where that is possible.
        clock: Time for retries and for the age of temporaries.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        disk: Disk | None = None,
        *,
        name: str = "flash",
        retry_s: float = 0.0,
        file_mode: int = 0o600,
        dir_mode: int = 0o700,
        direct: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.name = name
        self.url = "file://" + urllib.parse.quote(self.root)
        self.disk: Disk = PosixDisk(self.root, file_mode=file_mode, dir_mode=dir_mode) if disk is None else disk
        self._retry_s = retry_s
        self._use_direct = direct
        self._clock = clock
        self._lock = threading.Lock()
        self._root_made = False

    def create_pack(self, path: str, size_bytes: int) -> FlashPackWriter:
        """See `Tier`."""
        if size_bytes < 0:
            raise ValueError(f"size {size_bytes} is negative")
        with self._translated("creating a pack", path, passes=(FileExistsError,)):
            self._make_directories(parent_of(path))
            buffered = self.disk.open(path, "create")
            direct: DiskFile | None = None
            try:
                # Opened while the file is empty, so that a trial of direct I/O, where one is needed, can be made on it.
                direct = self.disk.open(path, "write", direct=True) if self._use_direct else None
                self._allocate(buffered, size_bytes, path)
            except BaseException:
                for file in (buffered, direct):
                    if file is not None:
                        _quietly(file.close)
                _quietly(lambda: self.disk.unlink(path))
                raise
        return FlashPackWriter(
            buffered,
            direct,
            size_bytes=size_bytes,
            path=self._full(path),
            tier=self.name,
            remove=lambda: self.disk.unlink(path),
        )

    def _allocate(self, file: DiskFile, size_bytes: int, path: str) -> None:
        if file.allocate(size_bytes):
            return
        free = self.disk.free_bytes()
        if free < size_bytes:
            raise StorageFullError(
                f"a pack of {size_bytes} bytes does not fit into {free} free bytes",
                tier=self.name,
                path=self._full(path),
                hint="free space; older checkpoints are untouched",
            )

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> FlashPackReader:
        """See `Tier`."""

        def open_both() -> FlashPackReader:
            buffered = self.disk.open(path, "read")
            past: DiskFile | None = None
            try:
                past = self.disk.open(path, "read", direct=True) if direct and self._use_direct else None
                return FlashPackReader(buffered, past, path=self._full(path), tier=self.name)
            except BaseException:
                for file in (buffered, past):
                    if file is not None:
                        _quietly(file.close)
                raise

        return self._read("opening a pack", path, open_both, retry_s)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See `Tier`."""
        directory = parent_of(path)
        temporary = join(directory, _temporary_name())
        with self._translated("writing a file", path, passes=(FileExistsError,) if exclusive else ()):
            self._make_directories(directory)
            try:
                self._write_new(temporary, data)
                if exclusive:
                    self._publish_exclusively(temporary, path, data)
                else:
                    self.disk.rename(temporary, path)
            except BaseException:
                _quietly(lambda: self.disk.unlink(temporary))
                raise
            self._sync_upward(directory)

    def _write_new(self, path: str, data: bytes) -> None:
        try:
            file = self.disk.open(path, "create")
        except (
            FileExistsError
        ) as exc:  # a name that nobody else has; must not be taken for the one that is to be published
            raise OSError(errno.EIO, "a temporary of this very name exists", path) from exc
        try:
            direct_io.write_all(file, memoryview(data).cast("B"), 0)
            file.fsync()
        finally:
            file.close()

    def _publish_exclusively(self, temporary: str, path: str, data: bytes) -> str:
        """Give the finished `temporary` its name, and only that; return how (`link`, `rename`, `create`)."""
        try:
            self.disk.link(temporary, path)
        except OSError as exc:
            # A server may have done it and its reply been lost: then the name is ours. Whose it is tells the inode,
            # nothing else does.
            if self._same_file(temporary, path):
                pass
            elif exc.errno in _CANNOT_LINK and not isinstance(exc, FileExistsError):
                return self._publish_without_link(temporary, path, data)
            else:
                raise
        _quietly(lambda: self.disk.unlink(temporary))
        return "link"

    def _publish_without_link(self, temporary: str, path: str, data: bytes) -> str:
        try:
            self.disk.rename_exclusive(temporary, path)
            return "rename"
        except FileExistsError:
            if self._exists(temporary):
                raise
            return "rename"
        except OSError as exc:
            if exc.errno not in _CANNOT_RENAME:
                raise
        file = self.disk.open(path, "create")
        try:
            try:
                direct_io.write_all(file, memoryview(data).cast("B"), 0)
                file.fsync()
            finally:
                file.close()
        except BaseException:
            _quietly(lambda: self.disk.unlink(path))
            raise
        _quietly(lambda: self.disk.unlink(temporary))
        return "create"

    def _same_file(self, one: str, other: str) -> bool:
        try:
            return self.disk.stat(one).identity == self.disk.stat(other).identity
        except OSError:
            return False

    def _exists(self, path: str) -> bool:
        try:
            self.disk.stat(path)
        except FileNotFoundError:
            return False
        return True

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""

        def read() -> bytes:
            file = self.disk.open(path, "read")
            try:
                size = file.size()
                if size > limit_bytes:
                    raise self._torn(path, f"a file of {size} bytes is larger than the {limit_bytes} that it may have")
                buffer = bytearray(size + 1)  # one more, to see that the file ends where it says
                done = direct_io.read_all(file, memoryview(buffer), 0)
            finally:
                file.close()
            if done != size:
                raise self._torn(
                    path, f"a file of {size} bytes gave {done if done < size else 'more'} when it was read"
                )
            return bytes(memoryview(buffer)[:size])

        return self._read("reading a file", path, read, retry_s)

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """See `Tier`."""

        def measure() -> int:
            found = self.disk.stat(path)
            if found.kind != "file":
                raise NotRegularFileError(errno.EINVAL, "not a regular file", path)
            return found.size_bytes

        return self._read("looking at a file", path, measure, retry_s)

    def list(self, directory: str) -> list[Entry]:
        """See `Tier`."""
        try:
            found = self._read("listing a directory", directory, lambda: self.disk.scan(directory), 0.0)
        except FileNotFoundError:
            return []
        return [
            Entry(
                name=name, is_dir=entry.kind == "directory", size_bytes=entry.size_bytes if entry.kind == "file" else 0
            )
            for name, entry in found
            if entry.kind != "other" and not name.startswith(TEMPORARY_PREFIX)
        ]

    def delete(self, path: str) -> None:
        """See `Tier`."""
        with self._translated("removing a file", path):
            self._unlink_if_there(path)
            try:
                self.disk.fsync_dir(parent_of(path))
            except FileNotFoundError:
                return

    def delete_tree(self, directory: str) -> None:
        """See `Tier`."""
        if not components(directory):
            raise ValueError("the run directory itself is not removed")
        above, _, name = directory.rpartition("/")
        with self._translated("removing a directory", directory):
            # What an earlier call hid and did not finish goes too; else nobody would ask for it by name again.
            hidden = f"{TEMPORARY_PREFIX}gone-{name[:200]}-"
            try:
                if self.disk.stat(directory).kind != "directory":
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
                self.disk.rename(directory, join(above, hidden + secrets.token_hex(8)))
                self.disk.fsync_dir(above)
            except FileNotFoundError:
                pass
            try:
                debris = [entry for entry, _ in self.disk.scan(above) if entry.startswith(hidden)]
            except FileNotFoundError:
                return
            for entry in debris:
                self._remove_tree(join(above, entry), 0)
            if debris:
                self.disk.fsync_dir(above)

    def delete_if_empty(self, directory: str) -> None:
        """See `Tier`."""
        with self._translated("removing an empty directory", directory):
            try:
                self.disk.rmdir(directory)
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                    raise

    def _remove_tree(self, path: str, depth: int) -> None:
        if depth > MAX_TREE_DEPTH:
            raise OSError(errno.ELOOP, f"directories are nested deeper than {MAX_TREE_DEPTH}", path)
        try:
            for name, entry in self.disk.scan(path):
                if entry.kind == "directory":
                    self._remove_tree(join(path, name), depth + 1)
                else:
                    self._unlink_if_there(join(path, name))
            self.disk.rmdir(path)
        except FileNotFoundError:  # another process removes the same tree
            return

    def _unlink_if_there(self, path: str) -> None:
        try:
            self.disk.unlink(path)
        except FileNotFoundError:
            return

    def sync_tree(self, directory: str) -> None:
        """See `Tier`."""
        with self._translated("making directory entries durable", directory):
            self._sync_below(directory, 0)
            self._sync_upward(parent_of(directory) if directory else "")

    def _sync_below(self, path: str, depth: int) -> None:
        if depth > MAX_TREE_DEPTH:
            raise OSError(errno.ELOOP, f"directories are nested deeper than {MAX_TREE_DEPTH}", path)
        for name, entry in self.disk.scan(path):
            if entry.kind == "directory" and not name.startswith(TEMPORARY_PREFIX):
                self._sync_below(join(path, name), depth + 1)
        self.disk.fsync_dir(path)

    def make_directory(self, path: str) -> None:
        """See `Tier`."""
        with self._translated("making a directory", path):
            self._make_directories(path)
            self._sync_upward(path)

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """See `Tier`; age is by the time of change, and looked at only where the name is a temporary's."""
        removed = []
        with self._translated("sweeping temporaries", directory):
            try:
                found = self.disk.scan(directory)
            except FileNotFoundError:
                return ()
            for name, entry in found:
                if not name.startswith(TEMPORARY_PREFIX) or self._clock.wall() - entry.modified_s < older_than_s:
                    continue
                if entry.kind == "directory":
                    self._remove_tree(join(directory, name), 0)
                else:
                    self._unlink_if_there(join(directory, name))
                removed.append(name)
        return tuple(removed)

    def free_bytes(self) -> int | None:
        """See `Tier`."""
        with self._translated("asking for free space", ""):
            return self.disk.free_bytes()

    def probe(self) -> ProbeReport:
        """See `Tier`."""
        with self._translated("writing to the run directory", ""):
            self._make_directories("")
            directory = _temporary_name()
            self.disk.mkdir(directory)
            try:
                return flash_probe.probe(self.disk, directory, self._publish_exclusively, use_direct=self._use_direct)
            finally:
                self._remove_tree(directory, 0)

    def _make_directories(self, directory: str) -> None:
        """Make what is missing; durable is for the caller to make it."""
        with self._lock:
            # What says which run it is comes first and makes the directory again; all else fails where that has gone.
            if not self._root_made or not directory:
                self.disk.make_root()
                self._root_made = True
        parts = components(directory)
        for trial in range(MAKE_TRIALS):
            try:
                self._make_missing(parts)
                return
            except FileNotFoundError:  # one above was empty, and somebody swept it meanwhile
                if trial == MAKE_TRIALS - 1:
                    raise

    def _make_missing(self, parts: Sequence[str]) -> None:
        for count in range(len(parts), -1, -1):  # from below: usually all are there
            if count == 0 or self._is_directory("/".join(parts[:count])):
                break
        for index in range(count, len(parts)):
            path = "/".join(parts[: index + 1])
            try:
                self.disk.mkdir(path)
            except FileExistsError:
                if not self._is_directory(path):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None

    def _is_directory(self, path: str) -> bool:
        try:
            return self.disk.stat(path).kind == "directory"
        except FileNotFoundError:
            return False

    def _sync_upward(self, directory: str) -> None:
        while True:
            self.disk.fsync_dir(directory)
            if not directory:
                return
            directory = parent_of(directory)

    def _read(self, doing: str, path: str, action: Callable[[], T], retry_s: float | None) -> T:
        """Run `action`, again while the file is not seen or its handle is stale and there is time for it."""
        begun = self._clock.monotonic()
        patience = self._retry_s if retry_s is None else retry_s
        pause = 0.01
        last: FileNotFoundError | StorageError
        while True:
            try:
                with self._translated(doing, path, passes=(FileNotFoundError,), reading=True):
                    return action()
            except FileNotFoundError as exc:
                limit, last = patience, exc
            except StorageError as exc:
                if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno != errno.ESTALE:
                    raise
                limit, last = max(patience, STALE_RETRY_S), exc
            if self._clock.monotonic() - begun + pause > limit:
                raise last
            self._clock.sleep(pause)
            pause = min(2 * pause, 0.5)
            # A network file system remembers that a name was absent until it looks at the directory again.
            _quietly(lambda: self.disk.scan(parent_of(path)))

    @contextmanager
    def _translated(
        self, doing: str, path: str, *, passes: tuple[type[OSError], ...] = (), reading: bool = False
    ) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            full = self._full(path)
            if isinstance(exc, passes):
                raise type(exc)(exc.errno, os.strerror(exc.errno or 0), full) from exc
            if isinstance(exc, NotADirectoryError) and os.path.exists(self.root) and not os.path.isdir(self.root):
                hint = "name a directory; it is made where there is none"
                raise ConfigurationError("this is no directory", path=self.root, hint=hint) from exc
            if reading and isinstance(exc, (NotRegularFileError, IsADirectoryError, NotADirectoryError)):
                raise self._torn(path, f"not what should be there: {exc.strerror}") from exc
            raise from_os_error(exc, doing, tier=self.name, path=full) from exc

    def _torn(self, path: str, message: str) -> TornFileError:
        return TornFileError(message, tier=self.name, path=self._full(path))

    def _full(self, path: str) -> str:
        return join(self.root, path) if path else self.root


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _quietly(action: Callable[[], object]) -> None:
    """Run a clean-up beside a failure that is already on its way."""
    try:
        action()
    except OSError:
        pass
