"""The real disk: a directory of the host's file systems.

Invariants: those of `host.disk`. Paths are walked component by component from the root with `O_NOFOLLOW`; file
descriptors are never kept beyond a call, so that a mount can come and go.
"""

from __future__ import annotations

import errno
import os
import stat as stat_modes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from safehold.host import direct_io, disk_calls
from safehold.host.direct_io import DirectLimits
from safehold.host.disk import Access, FileKind, FileStat, FileSystem, NotRegularFileError, components

_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_DIR_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

# f_type of statfs(2): magic numbers of linux/magic.h and of the file systems' own sources; True where other hosts see
# the same.
_FILE_SYSTEMS: dict[int, tuple[str, bool | None]] = {
    0xEF53: ("ext4", False),
    0x58465342: ("xfs", False),
    0x9123683E: ("btrfs", False),
    0xF2F52010: ("f2fs", False),
    0x2FC12FC1: ("zfs", False),
    0x794C7630: ("overlay", False),
    0x01021994: ("tmpfs", False),
    0x858458F6: ("ramfs", False),
    0x4D44: ("vfat", False),
    0x6969: ("nfs", True),
    0x0BD00BD0: ("lustre", True),
    0x47504653: ("gpfs", True),
    0x00C36400: ("ceph", True),
    0x19830326: ("beegfs", True),
    0xFF534D42: ("cifs", True),
    0xFE534D42: ("smb2", True),
    0x01021997: ("9p", None),
    0x65735546: ("fuse", None),
}


class PosixFile:
    """See `DiskFile`.

    The descriptor is closed when the last call that uses it has returned: a late call can never meet another file of
    that number.
    """

    def __init__(self, fd: int, direct: DirectLimits | None) -> None:
        self.direct = direct
        self._fd = fd
        self._lock = threading.Lock()
        self._num_users = 0
        self._closed = False

    @contextmanager
    def _using(self) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the file is closed")
            self._num_users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._num_users -= 1
                last = self._closed and self._num_users == 0
            if last:
                os.close(self._fd)

    def pwrite(self, data: memoryview, offset: int) -> int:
        """See `DiskFile`."""
        with self._using() as fd:
            return os.pwrite(fd, data, offset)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """See `DiskFile`."""
        with self._using() as fd:
            return os.preadv(fd, [buffer], offset)

    def allocate(self, size_bytes: int) -> bool:
        """See `DiskFile`."""
        with self._using() as fd:
            reserved = size_bytes == 0
            if size_bytes > 0:
                try:
                    disk_calls.fallocate(fd, 0, size_bytes)
                    reserved = True
                except OSError as exc:
                    if exc.errno not in _UNSUPPORTED:
                        raise
            os.ftruncate(fd, size_bytes)
            return reserved

    def size(self) -> int:
        """See `DiskFile`."""
        with self._using() as fd:
            return os.fstat(fd).st_size

    def duplicate(self) -> int:
        """Return a descriptor of the file that is the caller's, and shares nothing with others but the position."""
        with self._using() as fd:
            return os.dup(fd)

    def start_writeback(self, offset: int, nbytes: int) -> None:
        """See `DiskFile`."""
        with self._using() as fd:
            _sync_range(fd, offset, nbytes, disk_calls.SYNC_FILE_RANGE_WRITE)

    def await_writeback(self, offset: int, nbytes: int) -> None:
        """See `DiskFile`."""
        wait = disk_calls.SYNC_FILE_RANGE_WAIT_BEFORE | disk_calls.SYNC_FILE_RANGE_WAIT_AFTER
        with self._using() as fd:
            if not _sync_range(fd, offset, nbytes, wait | disk_calls.SYNC_FILE_RANGE_WRITE):
                os.fdatasync(fd)
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def fsync(self) -> None:
        """See `DiskFile`."""
        with self._using() as fd:
            os.fsync(fd)

    def close(self) -> None:
        """See `DiskFile`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._num_users:
                return
        os.close(self._fd)


def _sync_range(fd: int, offset: int, nbytes: int, flags: int) -> bool:
    try:
        disk_calls.sync_file_range(fd, offset, nbytes, flags)
    except OSError as exc:
        if exc.errno not in (*_UNSUPPORTED, errno.EINVAL, errno.ESPIPE):
            raise
        return False
    return True


class PosixDisk:
    """A directory of the host's file systems.

    Args:
        root: The root; made absolute, links above and at it are allowed.
        file_mode: Mode of new files, whatever the umask.
        dir_mode: Mode of new directories, whatever the umask; a set-group-id bit that they inherit is kept.
    """

    def __init__(self, root: str | os.PathLike[str], *, file_mode: int = 0o600, dir_mode: int = 0o700) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self._file_mode = file_mode
        self._dir_mode = dir_mode
        self._lock = threading.Lock()
        self._tried_limits: dict[int, DirectLimits | None] = {}

    def make_root(self) -> None:
        """See `Disk`."""
        missing = []
        at = self.root
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for path in reversed(missing):
            try:
                os.mkdir(path, self._dir_mode)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            self._set_dir_mode(path, None)
            _fsync_directory(os.path.dirname(path), None)
        if (
            not missing
        ):  # a crashed process may have made it and not come this far; the parent may be one that we cannot read
            try:
                _fsync_directory(os.path.dirname(self.root), None)
            except PermissionError:
                pass

    def mkdir(self, path: str) -> None:
        """See `Disk`."""
        with self._parent(path) as (dir_fd, name):
            os.mkdir(name, self._dir_mode, dir_fd=dir_fd)
            self._set_dir_mode(name, dir_fd)

    def open(self, path: str, access: Access, *, direct: bool = False) -> PosixFile:
        """See `Disk`."""
        flags = {"read": os.O_RDONLY | os.O_NONBLOCK, "write": os.O_RDWR, "create": os.O_RDWR | os.O_CREAT | os.O_EXCL}
        with self._parent(path) as (dir_fd, name):
            try:
                fd = os.open(name, flags[access] | os.O_NOFOLLOW | os.O_CLOEXEC, self._file_mode, dir_fd=dir_fd)
            except OSError as exc:
                if exc.errno in (errno.ELOOP, errno.ENXIO):
                    raise NotRegularFileError(errno.EINVAL, "not a regular file", path) from exc
                raise
        try:
            mode = os.fstat(fd).st_mode
            if not stat_modes.S_ISREG(mode):
                raise NotRegularFileError(errno.EINVAL, "not a regular file", path)
            if access == "create" and stat_modes.S_IMODE(mode) != self._file_mode:
                _try_chmod(fd, self._file_mode)
            limits = self._limits(fd, may_write=access != "read") if direct else None
            if limits is not None:
                reading = os.O_RDONLY if access == "read" else os.O_RDWR
                buffered, fd = fd, os.open(f"/proc/self/fd/{fd}", reading | os.O_DIRECT | os.O_CLOEXEC)
                os.close(buffered)
        except BaseException:
            os.close(fd)
            raise
        return PosixFile(fd, limits)

    def _limits(self, fd: int, *, may_write: bool) -> DirectLimits | None:
        known, limits = direct_io.ask_limits(fd)
        if known:
            return limits
        device = os.fstat(fd).st_dev
        with self._lock:
            if device in self._tried_limits:
                return self._tried_limits[device]
        known, limits = direct_io.try_limits(fd, may_write=may_write)
        if known:
            with self._lock:
                self._tried_limits[device] = limits
        return limits

    def link(self, source: str, target: str) -> None:
        """See `Disk`."""
        with self._parent(source) as (from_fd, from_name), self._parent(target) as (to_fd, to_name):
            os.link(from_name, to_name, src_dir_fd=from_fd, dst_dir_fd=to_fd, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """See `Disk`."""
        with self._parent(source) as (from_fd, from_name), self._parent(target) as (to_fd, to_name):
            os.rename(from_name, to_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    def rename_exclusive(self, source: str, target: str) -> None:
        """See `Disk`."""
        with self._parent(source) as (from_fd, from_name), self._parent(target) as (to_fd, to_name):
            disk_calls.rename_noreplace(from_name, to_name, source_dir_fd=from_fd, target_dir_fd=to_fd)

    def unlink(self, path: str) -> None:
        """See `Disk`."""
        with self._parent(path) as (dir_fd, name):
            os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, path: str) -> None:
        """See `Disk`."""
        with self._parent(path) as (dir_fd, name):
            os.rmdir(name, dir_fd=dir_fd)

    def scan(self, path: str) -> list[tuple[str, FileStat]]:
        """See `Disk`."""
        found = []
        with self._directory(path, readable=True) as fd, os.scandir(fd) as entries:
            for entry in entries:
                try:
                    found.append((entry.name, _file_stat(entry.stat(follow_symlinks=False))))
                except FileNotFoundError:  # removed since the directory was read
                    continue
        return sorted(found)

    def stat(self, path: str) -> FileStat:
        """See `Disk`."""
        if path == "":
            return _file_stat(os.stat(self.root))
        with self._parent(path) as (dir_fd, name):
            return _file_stat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False))

    def fsync_dir(self, path: str) -> bool:
        """See `Disk`."""
        with self._directory(path, readable=True) as fd:
            return _fsync_directory_fd(fd)

    def free_bytes(self) -> int:
        """See `Disk`."""
        at = self.root
        while True:
            try:
                found = os.statvfs(at)
            except FileNotFoundError:
                if at == os.path.dirname(at):
                    raise
                at = os.path.dirname(at)
                continue
            return found.f_bavail * found.f_frsize

    def file_system(self) -> FileSystem:
        """See `Disk`."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            magic = disk_calls.file_system_type(fd)
        finally:
            os.close(fd)
        if magic is None:
            return FileSystem(kind="unknown", shared=None)
        kind, shared = _FILE_SYSTEMS.get(magic, (f"{magic:#x}", None))
        return FileSystem(kind=kind, shared=shared)

    @contextmanager
    def _directory(self, path: str, *, readable: bool = False) -> Iterator[int]:
        """Open a directory, following no link below the root; by default only as a place to start from."""
        parts = components(path)
        last_flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC if readable else _DIR_FLAGS
        fd = os.open(self.root, _DIR_FLAGS if parts else last_flags)
        try:
            for index, part in enumerate(parts):
                flags = last_flags if index == len(parts) - 1 else _DIR_FLAGS
                above = fd
                fd = os.open(part, flags | os.O_NOFOLLOW, dir_fd=above)
                os.close(above)
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        parts = components(path)
        if not parts:
            raise ValueError("the root is no entry of the disk")
        with self._directory("/".join(parts[:-1])) as fd:
            yield fd, parts[-1]

    def _set_dir_mode(self, name: str, dir_fd: int | None) -> None:
        fd = os.open(name, _DIR_FLAGS | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            mode = stat_modes.S_IMODE(os.fstat(fd).st_mode)
            wanted = self._dir_mode | (mode & stat_modes.S_ISGID)
            if mode != wanted:
                _try_chmod(fd, wanted)
        finally:
            os.close(fd)


def _try_chmod(fd: int, mode: int) -> None:
    """Set the mode of what `fd` (O_PATH too) stands for; file systems without modes may refuse."""
    try:
        os.chmod(f"/proc/self/fd/{fd}", mode)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.ENOENT, *_UNSUPPORTED):
            raise


def _file_stat(found: os.stat_result) -> FileStat:
    kind: FileKind = "other"
    if stat_modes.S_ISREG(found.st_mode):
        kind = "file"
    elif stat_modes.S_ISDIR(found.st_mode):
        kind = "directory"
    return FileStat(
        kind=kind,
        size_bytes=found.st_size,
        identity=(found.st_dev, found.st_ino),
        modified_s=found.st_mtime,
    )


def _fsync_directory(path: str, dir_fd: int | None) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return _fsync_directory_fd(fd)
    finally:
        os.close(fd)


def _fsync_directory_fd(fd: int) -> bool:
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, *_UNSUPPORTED):
            raise
        return False
    return True
