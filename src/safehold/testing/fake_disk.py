"""A disk in memory that loses, tears and reorders what was not fsynced, and fails, fills up or hangs on demand.

Implements `host.disk.Disk`. Every call is one numbered operation; faults are set by number or by a predicate, and a
power cut leaves what `testing.crash_model` allows. Invariant: the same seed and the same calls from one thread give
the same result.

    disk = FakeDisk(seed=7)
    disk.crash_after(12)
    with pytest.raises(PowerLostError):
        FlashTier(disk.root, disk).put("run.json", b"{}")
    survivor = disk.crash()
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.host.direct_io import DirectLimits, address_of
from safehold.host.disk import Access, FileStat, FileSystem, NotRegularFileError, components
from safehold.testing.crash_model import DirNode, FileNode, Node, Survival, Survivors, apply, stat_of
from safehold.testing.disk_faults import At, Failure, Hang, Op, PowerLostError, matches

T = TypeVar("T")


class FakeFile:
    """See `host.disk.DiskFile`."""

    def __init__(
        self, disk: FakeDisk, node: FileNode, path: str, direct: DirectLimits | None, *, writable: bool
    ) -> None:
        self.direct = direct
        self._disk = disk
        self._node = node
        self._path = path
        self._writable = writable
        self._closed = False

    def _operate(self, kind: str, action: Callable[[], T], offset: int = 0, nbytes: int = 0) -> T:
        def checked() -> T:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
            return action()

        return self._disk._operate(kind, self._path, checked, offset, nbytes)

    def _check_direct(self, view: memoryview, offset: int) -> None:
        if self.direct is None:
            return
        ragged = offset % self.direct.offset_align or view.nbytes % self.direct.offset_align
        if ragged or address_of(view) % self.direct.memory_align:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._path)

    def pwrite(self, data: memoryview, offset: int) -> int:
        """See `DiskFile`."""

        def write() -> int:
            if not self._writable:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
            self._check_direct(data, offset)
            piece = data[: self._disk._transfer(data.nbytes)]
            self._disk._reserve(self._node, offset + piece.nbytes)
            self._node.write(piece, offset)
            self._node.modified_s = self._disk._now()
            return piece.nbytes

        return self._operate("pwrite", write, offset, data.nbytes)

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """See `DiskFile`."""

        def read() -> int:
            self._check_direct(buffer, offset)
            there = max(0, min(buffer.nbytes, len(self._node.content) - offset))
            count = self._disk._transfer(there)
            buffer[:count] = memoryview(self._node.content)[offset : offset + count]
            return count

        return self._operate("pread", read, offset, buffer.nbytes)

    def allocate(self, size_bytes: int) -> bool:
        """See `DiskFile`."""

        def allocate() -> bool:
            if self._disk.allocates:
                self._disk._reserve(self._node, size_bytes)
            self._node.resize(size_bytes)
            return self._disk.allocates

        return self._operate("allocate", allocate, 0, size_bytes)

    def size(self) -> int:
        """See `DiskFile`."""
        return self._operate("size", lambda: len(self._node.content))

    def start_writeback(self, offset: int, nbytes: int) -> None:
        """See `DiskFile`; makes nothing safe."""
        self._operate("writeback", lambda: None, offset, nbytes)

    def await_writeback(self, offset: int, nbytes: int) -> None:
        """See `DiskFile`; makes nothing safe."""
        self._operate("writeback", lambda: None, offset, nbytes)

    def fsync(self) -> None:
        """See `DiskFile`."""
        self._operate("fsync", self._node.fsync)

    def close(self) -> None:
        """See `DiskFile`."""
        if not self._closed:
            self._closed = True
            self._disk._operate("close", self._path, lambda: None)


class FakeDisk:
    """See the head of this module and `host.disk.Disk`.

    Args:
        root: The root's path, for messages.
        seed: Decides what survives, what is short, and whether the operation that meets the power cut is done.
        capacity_bytes: Space for the content of files, None for no limit.
        full_errno: What a full disk says: `ENOSPC` or `EDQUOT`.
        direct_align: What direct I/O asks for; 0 for a disk without.
        links: Whether files can have a second name; if not, `EPERM`.
        exclusive_renames: Whether `rename_exclusive` works; if not, `EINVAL`.
        allocates: Whether space can be reserved.
        fsyncs_directories: Whether `fsync_dir` is a thing; if not, it makes nothing safe and says so.
        short_transfers: Whether reads and writes often move fewer bytes than asked.
        shared: What `file_system` says.
        clock: Gives times of change.
    """

    def __init__(
        self,
        root: str = "/fake/run",
        *,
        seed: int = 0,
        capacity_bytes: int | None = None,
        full_errno: int = errno.ENOSPC,
        direct_align: int = 512,
        links: bool = True,
        exclusive_renames: bool = True,
        allocates: bool = True,
        fsyncs_directories: bool = True,
        short_transfers: bool = False,
        shared: bool | None = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.root = root
        self.seed = seed
        self.capacity_bytes = capacity_bytes
        self.full_errno = full_errno
        self.direct_align = direct_align
        self.links = links
        self.exclusive_renames = exclusive_renames
        self.allocates = allocates
        self.fsyncs_directories = fsyncs_directories
        self.short_transfers = short_transfers
        self.shared = shared
        self.log: list[Op] = []
        self._clock = clock
        self._lock = threading.RLock()
        self._rng = random.Random(seed)
        self._top: DirNode | None = None
        self._cut_at: int | None = None
        self._power = True
        self._failures: list[Failure] = []
        self._hangs: list[Hang] = []

    # Faults.

    def crash_after(self, num_ops: int) -> None:
        """Cut the power in the operation with this index: done or not, by the seed, it raises `PowerLostError`."""
        self._cut_at = num_ops

    def crash(self, seed: int | None = None, survival: Survival = "random") -> FakeDisk:
        """Cut the power, if it is not gone yet; return a disk with what may have survived, all of that durable.

        Args:
            seed: Decides what survives; None: this disk's.
            survival: `lost`: nothing that was not fsynced; `kept`: all of it; `random`: anything in between, torn and
                reordered.
        """
        with self._lock:
            self._power = False
            survivor = FakeDisk(
                self.root,
                seed=self.seed if seed is None else seed,
                capacity_bytes=self.capacity_bytes,
                full_errno=self.full_errno,
                direct_align=self.direct_align,
                links=self.links,
                exclusive_renames=self.exclusive_renames,
                allocates=self.allocates,
                fsyncs_directories=self.fsyncs_directories,
                short_transfers=self.short_transfers,
                shared=self.shared,
                clock=self._clock,
            )
            if self._top is not None:
                left = Survivors(random.Random(survivor.seed), survival).of(self._top)
                assert isinstance(left, DirNode)
                survivor._top = left
            return survivor

    def fail_at(self, at: At, code: int, *, times: int = 1, applied: bool = False) -> None:
        """Let operations fail.

        Args:
            at: Index of the operation, or a predicate of it.
            code: The errno.
            times: How many that match fail; -1: all.
            applied: Whether the operation is done nevertheless, as when a server's reply is lost.
        """
        self._failures.append(Failure(at=at, code=code, times=times, applied=applied))

    def hang_at(self, at: At, *, code: int | None = None) -> Hang:
        """Let operations hang until they are released; then they fail with `code`, if that is given."""
        hang = Hang(at, code)
        self._hangs.append(hang)
        return hang

    def heal(self) -> None:
        """Forget all failures, release all that hangs."""
        self._failures.clear()
        for hang in self._hangs:
            hang.release()
        self._hangs.clear()

    # What tests look at; none of this is an operation.

    @property
    def num_ops(self) -> int:
        """Number of operations so far."""
        return len(self.log)

    def tree(self) -> dict[str, bytes]:
        """Return path and content of all files; directories have a trailing slash and no content."""
        found: dict[str, bytes] = {}

        def walk(node: Node, path: str) -> None:
            if isinstance(node, FileNode):
                found[path] = bytes(node.content)
                return
            if path:
                found[path + "/"] = b""
            for name, entry in sorted(node.entries.items()):
                walk(entry, f"{path}/{name}" if path else name)

        with self._lock:
            if self._top is not None:
                walk(self._top, "")
        return found

    def corrupt(self, path: str, offset: int, *, mask: int = 1) -> None:
        """Flip bits of a stored byte."""
        with self._lock:
            node = self._file(path)
            node.content[offset] ^= mask

    def truncate(self, path: str, size: int) -> None:
        """Cut a stored file short, durably."""
        with self._lock:
            node = self._file(path)
            node.resize(size)
            node.fsync()

    # The operations of `Disk`.

    def make_root(self) -> None:
        """See `Disk`."""

        def make() -> None:
            if self._top is None:
                self._top = DirNode(modified_s=self._now())

        self._operate("make_root", "", make)

    def mkdir(self, path: str) -> None:
        """See `Disk`."""
        self._operate("mkdir", path, lambda: self._add(path, DirNode(modified_s=self._now())))

    def open(self, path: str, access: Access, *, direct: bool = False) -> FakeFile:
        """See `Disk`."""

        def open_it() -> FakeFile:
            if access == "create":
                self._add(path, FileNode(modified_s=self._now()))
            node = self._node(path)
            if not isinstance(node, FileNode):
                raise NotRegularFileError(errno.EINVAL, "not a regular file", path)
            limits = None
            if direct and self.direct_align:
                limits = DirectLimits(memory_align=self.direct_align, offset_align=self.direct_align)
            return FakeFile(self, node, path, limits, writable=access != "read")

        return self._operate("create" if access == "create" else "open", path, open_it)

    def link(self, source: str, target: str) -> None:
        """See `Disk`."""

        def link() -> None:
            if not self.links:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)
            self._add(target, self._file(source))

        self._operate("link", target, link)

    def rename(self, source: str, target: str) -> None:
        """See `Disk`."""
        self._operate("rename", target, lambda: self._rename(source, target))

    def rename_exclusive(self, source: str, target: str) -> None:
        """See `Disk`."""

        def rename() -> None:
            if not self.exclusive_renames:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), target)
            directory, name = self._parent(target)
            if name in directory.entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            self._rename(source, target)

        self._operate("rename_exclusive", target, rename)

    def unlink(self, path: str) -> None:
        """See `Disk`."""

        def unlink() -> None:
            node = self._node(path)
            directory, name = self._parent(path)
            if isinstance(node, DirNode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            apply((directory, name, None))

        self._operate("unlink", path, unlink)

    def rmdir(self, path: str) -> None:
        """See `Disk`."""

        def rmdir() -> None:
            directory, name = self._parent(path)
            if self._directory(path).entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            apply((directory, name, None))

        self._operate("rmdir", path, rmdir)

    def scan(self, path: str) -> list[tuple[str, FileStat]]:
        """See `Disk`."""

        def scan() -> list[tuple[str, FileStat]]:
            return [(name, stat_of(node)) for name, node in sorted(self._directory(path).entries.items())]

        return self._operate("scan", path, scan)

    def stat(self, path: str) -> FileStat:
        """See `Disk`."""
        return self._operate("stat", path, lambda: stat_of(self._node(path)))

    def fsync_dir(self, path: str) -> bool:
        """See `Disk`."""

        def fsync() -> bool:
            directory = self._directory(path)
            if self.fsyncs_directories:
                directory.fsync()
            return self.fsyncs_directories

        return self._operate("fsync_dir", path, fsync)

    def free_bytes(self) -> int:
        """See `Disk`."""
        return self._operate("free_bytes", "", self._free_bytes)

    def file_system(self) -> FileSystem:
        """See `Disk`."""
        return self._operate("file_system", "", lambda: FileSystem(kind="fake", shared=self.shared))

    # Inside.

    def _operate(self, kind: str, path: str, action: Callable[[], T], offset: int = 0, nbytes: int = 0) -> T:
        with self._lock:
            self._check_power()
            op = Op(index=len(self.log), kind=kind, path=path, offset=offset, nbytes=nbytes)
            self.log.append(op)
            hangs = list(self._hangs)
        for hang in hangs:
            hang.wait(op)
        with self._lock:
            self._check_power()
            if self._cut_at is not None and op.index >= self._cut_at:
                self._power = False
                if random.Random(f"{self.seed} {op.index}").random() < 0.5:
                    try:
                        action()
                    except OSError:
                        pass
                raise PowerLostError(f"in operation {op.index} ({op.kind} {op.path}), seed {self.seed}")
            failure = self._failure_for(op)
            if failure is not None and not failure.applied:
                raise OSError(failure.code, os.strerror(failure.code), path)
            result = action()
            if failure is not None:
                raise OSError(failure.code, os.strerror(failure.code), path)
            return result

    def _check_power(self) -> None:
        if not self._power:
            raise PowerLostError(f"the disk has no power, seed {self.seed}")

    def _failure_for(self, op: Op) -> Failure | None:
        for failure in self._failures:
            if failure.times != 0 and matches(failure.at, op):
                failure.times -= failure.times > 0
                return failure
        return None

    def _now(self) -> float:
        return self._clock.wall()

    def _transfer(self, nbytes: int) -> int:
        if not self.short_transfers or nbytes < 2 or self._rng.random() < 0.5:
            return nbytes
        return self._rng.randrange(1, nbytes)

    def _free_bytes(self) -> int:
        return (1 << 50) if self.capacity_bytes is None else max(0, self.capacity_bytes - self._used_bytes())

    def _used_bytes(self) -> int:
        files: dict[int, FileNode] = {}
        todo: list[Node] = [] if self._top is None else [self._top]
        while todo:
            node = todo.pop()
            if isinstance(node, FileNode):
                files[id(node)] = node
            else:
                todo.extend(node.entries.values())
        return sum(node.reserved_bytes for node in files.values())

    def _reserve(self, node: FileNode, size: int) -> None:
        more = size - node.reserved_bytes
        if more > 0:
            if self.capacity_bytes is not None and self._used_bytes() + more > self.capacity_bytes:
                raise OSError(self.full_errno, os.strerror(self.full_errno))
            node.reserved_bytes = size

    def _node(self, path: str) -> Node:
        node: Node | None = self._top
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        for part in components(path):
            if isinstance(node, FileNode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            found = node.entries.get(part)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = found
        return node

    def _directory(self, path: str) -> DirNode:
        node = self._node(path)
        if not isinstance(node, DirNode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _file(self, path: str) -> FileNode:
        node = self._node(path)
        if not isinstance(node, FileNode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return node

    def _parent(self, path: str) -> tuple[DirNode, str]:
        parts = components(path)
        if not parts:
            raise ValueError("the root is no entry of the disk")
        return self._directory("/".join(parts[:-1])), parts[-1]

    def _add(self, path: str, node: Node) -> None:
        directory, name = self._parent(path)
        if name in directory.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        apply((directory, name, node))

    def _rename(self, source: str, target: str) -> None:
        node = self._node(source)
        from_directory, from_name = self._parent(source)
        to_directory, to_name = self._parent(target)
        there = to_directory.entries.get(to_name)
        if isinstance(there, DirNode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if there is node:  # two names of one file: POSIX does nothing
            return
        apply((to_directory, to_name, node), (from_directory, from_name, None))
