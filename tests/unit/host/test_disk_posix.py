"""The real disk: nothing leaves the root, modes are private, space is reserved, direct I/O is decided by evidence."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safehold.host import direct_io, disk_calls
from safehold.host.direct_io import DirectLimits
from safehold.host.disk import FileStat, NotRegularFileError, components, join, parent_of
from safehold.host.posix_disk import PosixDisk
from safehold.testing.tier_suite import shared_memory_directory


@pytest.fixture
def disk(tmp_path: Path) -> PosixDisk:
    disk = PosixDisk(tmp_path / "run")
    disk.make_root()
    return disk


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    parent = shared_memory_directory()
    if parent is None:
        pytest.skip("no tmpfs that can be written")
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def write(disk: PosixDisk, path: str, data: bytes) -> None:
    file = disk.open(path, "create")
    file.pwrite(memoryview(data), 0)
    file.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize(("file_mode", "dir_mode"), [(0o600, 0o700), (0o640, 0o770)])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int, file_mode: int, dir_mode: int) -> None:
    old = os.umask(umask)
    try:
        disk = PosixDisk(tmp_path / "a" / "b", file_mode=file_mode, dir_mode=dir_mode)
        disk.make_root()
        disk.mkdir("d")
        write(disk, "d/f", b"x")
    finally:
        os.umask(old)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b" / "d") == dir_mode
    assert mode(tmp_path / "a" / "b" / "d" / "f") == file_mode


def test_an_inherited_group_bit_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    if not mode(tmp_path) & stat.S_ISGID:
        pytest.skip("the file system does not keep the bit")
    disk = PosixDisk(tmp_path / "run")
    disk.make_root()
    assert mode(tmp_path / "run") == 0o2700


def test_making_the_root_makes_it_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    PosixDisk(tmp_path / "a" / "b").make_root()
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    PosixDisk(tmp_path / "a" / "b").make_root()  # whoever made it may have been killed before it was durable
    assert synced == [str(tmp_path / "a")]


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        PosixDisk(tmp_path / "f" / "run").make_root()
    with pytest.raises(NotADirectoryError):
        PosixDisk(tmp_path / "f").make_root()


def test_links_below_the_root_are_not_followed(disk: PosixDisk, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    os.symlink(outside, os.path.join(disk.root, "dir"))
    os.symlink(outside / "secret", os.path.join(disk.root, "file"))
    os.symlink(outside / "new", os.path.join(disk.root, "dangling"))
    for path in ("dir/secret", "dir/new"):
        for access in ("read", "write", "create"):
            with pytest.raises(OSError):
                disk.open(path, access)
        with pytest.raises(OSError):
            disk.unlink(path)
        with pytest.raises(OSError):
            disk.mkdir(path)
        with pytest.raises(OSError):
            disk.link("file", path)
    with pytest.raises(OSError):
        disk.scan("dir")
    with pytest.raises(OSError):
        disk.fsync_dir("dir")
    for access in ("read", "write"):
        with pytest.raises(NotRegularFileError):
            disk.open("file", access)
    with pytest.raises(FileExistsError):
        disk.open("dangling", "create")
    assert {name: entry.kind for name, entry in disk.scan("")} == dict.fromkeys(("dir", "file", "dangling"), "other")
    assert disk.stat("file").kind == "other"
    disk.unlink("dir")
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_root_behind_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "alias")
    disk = PosixDisk(tmp_path / "alias")
    disk.make_root()
    write(disk, "f", b"x")
    assert (tmp_path / "real" / "f").read_bytes() == b"x"


def test_special_files_neither_hang_nor_pass(disk: PosixDisk) -> None:
    os.mkfifo(os.path.join(disk.root, "fifo"))
    disk.mkdir("d")
    for path in ("fifo", "d"):
        with pytest.raises(NotRegularFileError):
            disk.open(path, "read")
    with pytest.raises(OSError):
        disk.open("d", "write")


@pytest.mark.parametrize("path", ["..", "a/../b", "/a", "a//b", "a/", ".", "a/./b", "a\0", "ä" * 128])
def test_unsafe_paths(disk: PosixDisk, path: str) -> None:
    with pytest.raises(ValueError, match="unsafe path"):
        components(path)
    for action in (disk.mkdir, disk.unlink, disk.rmdir, disk.scan, disk.stat, disk.fsync_dir):
        with pytest.raises(ValueError):
            action(path)


def test_path_helpers() -> None:
    assert components("") == () and components("a/b") == ("a", "b")
    assert join("", "a", "", "b/c") == "a/b/c" and join("", "") == ""
    assert parent_of("a/b/c") == "a/b" and parent_of("a") == "" and parent_of("") == ""


def test_the_root_is_no_entry(disk: PosixDisk) -> None:
    for action in (disk.unlink, disk.rmdir, disk.mkdir):
        with pytest.raises(ValueError):
            action("")
    assert disk.stat("").kind == "directory"


def test_names(disk: PosixDisk) -> None:
    write(disk, "f", b"content")
    disk.link("f", "g")
    assert disk.stat("f").identity == disk.stat("g").identity
    with pytest.raises(FileExistsError):
        disk.link("f", "g")
    write(disk, "h", b"other")
    with pytest.raises(FileExistsError):
        disk.rename_exclusive("h", "g")
    disk.rename_exclusive("h", "i")
    disk.rename("i", "f")
    assert [(name, entry.size_bytes) for name, entry in disk.scan("")] == [("f", 5), ("g", 7)]
    assert disk.fsync_dir("") is True
    with pytest.raises(FileNotFoundError):
        disk.rename_exclusive("absent", "x")


def test_a_scan_survives_what_vanishes_meanwhile(disk: PosixDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    write(disk, "f", b"x")
    write(disk, "g", b"x")
    from safehold.host import posix_disk

    real = posix_disk._file_stat
    left = [FileNotFoundError()]

    def vanishing(found: os.stat_result) -> FileStat:
        if left:
            raise left.pop()
        return real(found)

    monkeypatch.setattr(posix_disk, "_file_stat", vanishing)
    assert len(disk.scan("")) == 1


def test_allocate_reserves(disk: PosixDisk) -> None:
    file = disk.open("f", "create")
    if not file.allocate(1 << 20):
        pytest.skip("the file system cannot reserve space")
    found = os.stat(os.path.join(disk.root, "f"))
    assert found.st_size == 1 << 20 and found.st_blocks * 512 >= 1 << 20
    assert file.size() == 1 << 20
    file.close()


def test_allocate_says_where_it_cannot(disk: PosixDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, nbytes: int, *, mode: int = 0) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(disk_calls, "fallocate", unsupported)
    file = disk.open("f", "create")
    assert file.allocate(1 << 20) is False
    found = os.stat(os.path.join(disk.root, "f"))
    assert found.st_size == 1 << 20 and found.st_blocks == 0  # nothing was emulated by writing
    file.close()


def test_allocate_finds_a_full_disk(tmpfs: Path) -> None:
    disk = PosixDisk(tmpfs)
    file = disk.open("f", "create")
    with pytest.raises(OSError) as caught:
        file.allocate(disk.free_bytes() + (1 << 40))
    assert caught.value.errno == errno.ENOSPC
    file.close()


def test_memory_is_buffered(tmpfs: Path) -> None:
    disk = PosixDisk(tmpfs)
    write(disk, "f", bytes(4096))
    for access in ("read", "write"):
        file = disk.open("f", access, direct=True)
        assert file.direct is None
        file.close()
    assert disk.file_system().kind == "tmpfs" and disk.file_system().shared is False


def test_direct_files_take_direct_blocks(disk: PosixDisk) -> None:
    disk.open("f", "create").close()
    file = disk.open("f", "write", direct=True)
    if file.direct is None:
        pytest.skip("no direct I/O here")
    assert file.pwrite(direct_io.aligned_buffer(8192), 0) == 8192
    flags = os.O_DIRECT
    with file._using() as fd:
        import fcntl

        assert fcntl.fcntl(fd, fcntl.F_GETFL) & flags
    file.close()


def test_without_an_answer_a_trial_decides(disk: PosixDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(disk, "full", bytes(5000))
    expected = disk.open("full", "read", direct=True).direct is not None
    monkeypatch.setattr(disk_calls, "statx_dio_align", lambda fd: None)
    for first in ("empty", "full"):
        fresh = PosixDisk(disk.root)
        if first == "empty":
            disk.open("empty", "create").close()
        file = fresh.open(first, "write" if first == "empty" else "read", direct=True)
        assert (file.direct is not None) == expected
        if expected:
            assert file.direct == DirectLimits(memory_align=4096, offset_align=4096)
        assert file.size() == (0 if first == "empty" else 5000)
        file.close()
    short = PosixDisk(disk.root)
    write(short, "short", b"x")
    assert short.open("short", "read", direct=True).direct is None  # tells nothing, and is not remembered
    again = short.open("full", "read", direct=True)
    assert (again.direct is not None) == expected


def test_a_trial_that_is_refused_means_buffered(disk: PosixDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_calls, "statx_dio_align", lambda fd: None)

    def refuse(fd: int, flags: int) -> int:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(direct_io, "_open_direct", refuse)
    disk.open("f", "create").close()
    assert disk.open("f", "write", direct=True).direct is None


def test_statx_saying_no_means_buffered(disk: PosixDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    no = disk_calls.DioAlign(memory_align=0, offset_align=0)
    monkeypatch.setattr(disk_calls, "statx_dio_align", lambda fd: no)
    disk.open("f", "create").close()
    assert disk.open("f", "write", direct=True).direct is None


def test_a_closed_file_refuses(disk: PosixDisk) -> None:
    file = disk.open("f", "create")
    file.close()
    file.close()
    for call in (file.size, file.fsync, lambda: file.pwrite(memoryview(b"x"), 0)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_closing_waits_for_the_last_call(disk: PosixDisk) -> None:
    """A descriptor is not given free under a call that still runs: it could become another file's."""
    file = disk.open("f", "create")
    inside, go = threading.Event(), threading.Event()
    fds = []

    def use() -> None:
        with file._using() as fd:
            inside.set()
            go.wait(10)
            os.pwrite(fd, b"late", 0)
            fds.append(fd)

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait(10)
    file.close()
    go.set()
    thread.join(10)
    assert (Path(disk.root) / "f").read_bytes() == b"late"
    with pytest.raises(OSError):
        os.fstat(fds[0])


def test_writeback_calls(disk: PosixDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    file = disk.open("f", "create")
    file.pwrite(memoryview(bytes(100_000)), 0)
    file.start_writeback(0, 100_000)
    file.await_writeback(0, 100_000)

    def unsupported(fd: int, offset: int, nbytes: int, flags: int) -> None:
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(disk_calls, "sync_file_range", unsupported)
    file.start_writeback(0, 100_000)
    file.await_writeback(0, 100_000)
    file.close()


def test_free_space_before_the_root_exists(tmp_path: Path) -> None:
    assert PosixDisk(tmp_path / "not" / "yet").free_bytes() > 0


def test_no_descriptor_leaks(disk: PosixDisk) -> None:
    write(disk, "f", bytes(5000))
    disk.mkdir("d")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        disk.scan("")
        disk.stat("f")
        disk.fsync_dir("d")
        disk.open("f", "read", direct=True).close()
        for bad in ("absent", "d", "f/x"):
            with pytest.raises(OSError):
                disk.open(bad, "read", direct=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_raw_calls_say_what_the_kernel_says(tmp_path: Path) -> None:
    for call in (
        lambda: disk_calls.fallocate(-1, 0, 1),
        lambda: disk_calls.sync_file_range(-1, 0, 1, 2),
        lambda: disk_calls.rename_noreplace("a", "b", source_dir_fd=-1, target_dir_fd=-1),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF
    assert disk_calls.statx_dio_align(-1) is None
    assert disk_calls.file_system_type(-1) is None
