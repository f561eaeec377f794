"""The fake disk is a faithful pessimist: it keeps what was fsynced, and may lose, tear and reorder all else."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest

from safehold.testing.fake_disk import FakeDisk, PowerLostError


def write(disk: FakeDisk, path: str, data: bytes, *, fsync: bool = False) -> None:
    file = disk.open(path, "create")
    file.pwrite(memoryview(data), 0)
    if fsync:
        file.fsync()
    file.close()


def fresh(**options: int) -> FakeDisk:
    disk = FakeDisk(**options)  # type: ignore[arg-type]
    disk.make_root()
    return disk


def outcomes(make: Callable[[FakeDisk], None], path: str) -> set[bytes | None]:
    found = set()
    for seed in range(200):
        disk = fresh(seed=seed)
        make(disk)
        found.add(disk.crash().tree().get(path))
    return found


def test_what_was_fsynced_survives() -> None:
    def make(disk: FakeDisk) -> None:
        write(disk, "f", b"x" * 10_000, fsync=True)
        disk.fsync_dir("")

    assert outcomes(make, "f") == {b"x" * 10_000}


def test_a_name_without_its_directory_may_be_lost() -> None:
    found = outcomes(lambda disk: write(disk, "f", b"x", fsync=True), "f")
    assert found == {None, b"x"}


def test_content_without_fsync_is_lost_torn_or_zeros() -> None:
    def make(disk: FakeDisk) -> None:
        write(disk, "f", b"x" * 8192)
        disk.fsync_dir("")

    found = outcomes(make, "f")
    assert b"" in found and b"x" * 8192 in found and bytes(8192) in found
    assert any(data and 0 < data.count(0) < 4096 for data in found), "a sector was torn"
    assert b"x" * 4096 + bytes(4096) in found and bytes(4096) + b"x" * 4096 in found, "sectors were reordered"


def test_overwriting_without_fsync_gives_any_version() -> None:
    def make(disk: FakeDisk) -> None:
        write(disk, "f", b"1" * 4096, fsync=True)
        disk.fsync_dir("")
        file = disk.open("f", "write")
        file.pwrite(memoryview(b"2" * 4096), 0)
        file.pwrite(memoryview(b"3" * 4096), 0)

    found = outcomes(make, "f")
    assert {b"1" * 4096, b"2" * 4096, b"3" * 4096} <= found
    assert bytes(4096) not in found, "what is durable does not turn to zeros"


def test_a_rename_is_one_change() -> None:
    def make(disk: FakeDisk) -> None:
        write(disk, "old", b"x", fsync=True)
        disk.fsync_dir("")
        disk.rename("old", "new")

    for seed in range(50):
        disk = fresh(seed=seed)
        make(disk)
        assert disk.crash().tree() in ({"old": b"x"}, {"new": b"x"})


def test_a_rename_across_directories_is_one_change() -> None:
    for seed in range(50):
        for synced in ("", "a", "b"):
            disk = fresh(seed=seed)
            disk.mkdir("a")
            disk.mkdir("b")
            write(disk, "a/f", b"x", fsync=True)
            for path in ("", "a", "b"):
                disk.fsync_dir(path)
            disk.rename("a/f", "b/f")
            disk.fsync_dir(synced)
            files = {path for path in disk.crash().tree() if not path.endswith("/")}
            assert files in ({"b/f"},) if synced else ({"a/f"}, {"b/f"})


def test_changes_survive_out_of_order() -> None:
    found = set()
    for seed in range(200):
        disk = fresh(seed=seed)
        for name in "abc":
            write(disk, name, b"", fsync=True)
        found.add("".join(sorted(disk.crash().tree())))
    assert found == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_directory_takes_what_is_in_it_along() -> None:
    disk = fresh()
    disk.mkdir("d")
    write(disk, "d/f", b"x", fsync=True)
    disk.fsync_dir("d")
    assert disk.crash(survival="lost").tree() == {}


def test_two_names_stay_one_file() -> None:
    disk = fresh()
    write(disk, "f", b"x", fsync=True)
    disk.link("f", "g")
    disk.fsync_dir("")
    survivor = disk.crash()
    assert survivor.stat("f").identity == survivor.stat("g").identity


def test_a_shrunk_file_may_come_back() -> None:
    def make(disk: FakeDisk) -> None:
        write(disk, "f", b"x" * 9000, fsync=True)
        disk.fsync_dir("")
        disk.open("f", "write").allocate(100)

    found = outcomes(make, "f")
    assert b"x" * 9000 in found and b"x" * 100 in found


def test_after_the_cut_nothing_works() -> None:
    disk = fresh()
    write(disk, "f", b"x")
    file = disk.open("f", "write")
    disk.crash()
    for call in (lambda: disk.stat("f"), file.fsync, lambda: disk.unlink("f")):
        with pytest.raises(PowerLostError):
            call()


def test_the_cut_operation_is_done_or_not() -> None:
    seen = set()
    for seed in range(20):
        disk = fresh(seed=seed)
        disk.crash_after(1)
        with pytest.raises(PowerLostError, match=f"seed {seed}"):
            disk.mkdir("d")
        seen.add(bool(disk.crash(survival="kept").tree()))
    assert seen == {True, False}


def test_failures_by_number_and_predicate() -> None:
    disk = fresh()
    disk.fail_at(1, errno.EIO)
    with pytest.raises(OSError) as caught:
        disk.mkdir("d")
    assert caught.value.errno == errno.EIO
    disk.mkdir("d")
    disk.fail_at(lambda op: op.kind == "mkdir", errno.EDQUOT, times=2, applied=True)
    for name in ("a", "b"):
        with pytest.raises(OSError):
            disk.mkdir(name)
    disk.mkdir("c")
    assert set(disk.tree()) == {"a/", "b/", "c/", "d/"}


def test_a_full_disk() -> None:
    disk = fresh(capacity_bytes=10_000)
    file = disk.open("f", "create")
    assert file.allocate(8000)
    assert disk.free_bytes() == 2000
    with pytest.raises(OSError):
        write(disk, "g", bytes(3000))
    file.pwrite(memoryview(bytes(8000)), 0)
    disk.unlink("f")
    assert disk.free_bytes() == 10_000


def test_direct_files_are_strict() -> None:
    from safehold.host.direct_io import aligned_buffer

    disk = fresh(direct_align=512)
    disk.open("f", "create").close()
    file = disk.open("f", "write", direct=True)
    block = aligned_buffer(2048)
    assert file.pwrite(block[:512], 512) == 512
    for view, offset in ((block[:100], 0), (block[:512], 1), (block[1:513], 0)):
        with pytest.raises(OSError) as caught:
            file.pwrite(view, offset)
        assert caught.value.errno == errno.EINVAL
    assert file.pread_into(block[:1024], 0) == 1024


def test_a_hang_is_released() -> None:
    disk = fresh()
    hang = disk.hang_at(lambda op: op.kind == "mkdir")
    thread = threading.Thread(target=lambda: disk.mkdir("d"))
    thread.start()
    assert hang.reached.wait(10)
    assert disk.tree() == {}
    disk.heal()
    thread.join(10)
    assert disk.tree() == {"d/": b""}


def test_damage() -> None:
    disk = fresh()
    write(disk, "f", b"\0\0\0")
    disk.corrupt("f", 1, mask=0x80)
    assert disk.tree()["f"] == b"\0\x80\0"
    disk.truncate("f", 1)
    assert disk.tree()["f"] == b"\0"


def test_posix_refusals() -> None:
    disk = fresh()
    disk.mkdir("d")
    write(disk, "d/f", b"")
    for code, call in (
        (errno.EEXIST, lambda: disk.mkdir("d")),
        (errno.ENOENT, lambda: disk.mkdir("x/y")),
        (errno.ENOTDIR, lambda: disk.mkdir("d/f/y")),
        (errno.ENOTEMPTY, lambda: disk.rmdir("d")),
        (errno.EISDIR, lambda: disk.unlink("d")),
        (errno.EISDIR, lambda: disk.rename("d/f", "d")),
        (errno.EEXIST, lambda: disk.rename_exclusive("d/f", "d")),
        (errno.ENOTDIR, lambda: disk.scan("d/f")),
        (errno.ENOENT, lambda: disk.open("d/g", "read")),
        (errno.EBADF, lambda: disk.open("d/f", "read").pwrite(memoryview(b"x"), 0)),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == code
