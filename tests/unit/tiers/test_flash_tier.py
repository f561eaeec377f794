"""What is particular to the flash tier: retried reads, hostile directories, temporaries, dirty memory, real files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from safehold.errors import ConfigurationError, StorageError, TornFileError
from safehold.host.direct_io import DirectLimits
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers import flash_pack
from safehold.tiers.base import TEMPORARY_PREFIX
from safehold.tiers.flash import FlashTier
from safehold.tiers.open import local_path, open_tier


class ManualClock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def on_fake_disk(**options: float) -> tuple[FlashTier, FakeDisk, ManualClock]:
    clock = ManualClock()
    disk = FakeDisk(clock=clock)
    return FlashTier(disk.root, disk, clock=clock, **options), disk, clock  # type: ignore[arg-type]


def test_a_file_in_the_place_of_the_run_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"mine")
    tier = FlashTier(str(tmp_path / "run"))
    for use in (
        lambda: tier.put("run.json", b"{}"),
        lambda: tier.get("run.json", limit_bytes=10),
        lambda: tier.list("checkpoints"),
        lambda: tier.make_directory("plans"),
    ):
        with pytest.raises(ConfigurationError, match="this is no directory"):
            use()
    assert (tmp_path / "run").read_bytes() == b"mine"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_reads_retry_what_is_not_seen_yet(code: int) -> None:
    for read in (
        lambda tier: tier.get("d/f", limit_bytes=10),
        lambda tier: tier.size("d/f"),
        lambda tier: tier.open_pack("d/f").close(),
    ):
        tier, disk, clock = on_fake_disk(retry_s=3.0)
        tier.put("d/f", b"x")
        disk.fail_at(lambda op: op.kind in ("open", "stat") and op.path == "d/f", code, times=2)
        read(tier)
        assert 0 < clock.now - 1000.0 < 1.0
        disk.fail_at(lambda op: op.kind in ("open", "stat") and op.path == "d/f", code, times=-1)
        begun = clock.now
        with pytest.raises((FileNotFoundError, StorageError)):
            read(tier)
        assert 2.0 <= clock.now - begun <= (3.0 if code == errno.ENOENT else 5.0)


def test_absence_is_not_waited_for_unless_asked() -> None:
    tier, disk, clock = on_fake_disk()
    disk.make_root()
    with pytest.raises(FileNotFoundError):
        tier.get("f", limit_bytes=10)
    assert clock.now == 1000.0
    with pytest.raises(FileNotFoundError, match="/fake/run/f"):
        tier.get("f", limit_bytes=10, retry_s=1.0)
    assert clock.now > 1000.4
    assert [op for op in disk.log if op.kind == "scan"]  # which makes a network file system look again


def test_other_errors_are_not_retried() -> None:
    tier, disk, clock = on_fake_disk(retry_s=10.0)
    tier.put("f", b"x")
    disk.fail_at(lambda op: op.kind == "open", errno.EIO)
    with pytest.raises(StorageError, match=r"EIO.*tier flash, path /fake/run/f") as caught:
        tier.get("f", limit_bytes=10)
    assert isinstance(caught.value.__cause__, OSError)
    assert clock.now == 1000.0


def test_what_is_no_file_is_torn(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path)
    (tmp_path / "real").write_bytes(b"x")
    os.symlink("real", tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    tier.make_directory("d")
    for path in ("link", "fifo", "d", "real/x"):
        with pytest.raises(TornFileError, match=path):
            tier.get(path, limit_bytes=10)
        with pytest.raises(TornFileError):
            tier.size(path)
        with pytest.raises(TornFileError):
            tier.open_pack(path)
    with pytest.raises(TornFileError):
        tier.list("real")
    assert [entry.name for entry in tier.list("")] == ["d", "real"]


def test_a_file_that_changes_while_it_is_read_is_torn() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    tier.put("f", b"x" * 100)
    real = disk._operate

    def cutting(kind, path, action, offset=0, nbytes=0):  # type: ignore[no-untyped-def]
        if kind == "pread":
            disk.truncate("f", 50)
        return real(kind, path, action, offset, nbytes)

    disk._operate = cutting  # type: ignore[method-assign]
    with pytest.raises(TornFileError, match="100 bytes gave 50"):
        tier.get("f", limit_bytes=1000)


def test_a_pack_that_shrinks_under_its_reader_is_torn(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path)
    writer = tier.create_pack("p", 100_000)
    writer.finish()
    for direct in (True, False):
        os.truncate(tmp_path / "p", 100_000)
        reader = tier.open_pack("p", direct=direct)
        os.truncate(tmp_path / "p", 50_000)
        with pytest.raises(TornFileError):
            reader.read_into(0, memoryview(bytearray(100_000)))
        reader.close()


class FailsToClose:
    """An open file of 10 bytes that is closed with an error."""

    direct = DirectLimits()

    def __init__(self) -> None:
        self.closed = 0

    def size(self) -> int:
        return 10

    def close(self) -> None:
        self.closed += 1
        raise OSError(errno.EIO, "Input/output error")


def test_all_of_a_reader_is_closed_before_its_error_is_told() -> None:
    files = FailsToClose(), FailsToClose()
    reader = flash_pack.FlashPackReader(*files, path="p", tier="flash")  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="closing a pack failed"):
        reader.close()
    reader.close()
    assert [file.closed for file in files] == [1, 1]


def test_delete_tree_follows_no_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "d").mkdir(parents=True)
    (outside / "d" / "precious").write_bytes(b"x")
    tier = FlashTier(tmp_path / "run")
    tier.put("c/1/f", b"x")
    os.symlink(outside, tmp_path / "run" / "c" / "1" / "dir")
    os.symlink(outside / "d" / "precious", tmp_path / "run" / "c" / "1" / "file")
    os.symlink(outside, tmp_path / "run" / "link")
    tier.delete_tree("c/1")
    assert not (tmp_path / "run" / "c" / "1").exists()
    for path in ("link", "link/d"):
        with pytest.raises(StorageError):
            tier.delete_tree(path)
    assert (outside / "d" / "precious").read_bytes() == b"x"


def test_delete_tree_of_a_file_is_refused() -> None:
    tier, disk, _ = on_fake_disk()
    tier.put("c/f", b"x")
    with pytest.raises(StorageError):
        tier.delete_tree("c/f")
    assert disk.tree()["c/f"] == b"x"


def test_delete_tree_goes_on_where_it_failed() -> None:
    tier, disk, _ = on_fake_disk()
    for name in ("a", "b", "c"):
        tier.put(f"c/1-0/{name}", b"x")
    disk.fail_at(lambda op: op.kind == "unlink" and op.path.endswith("/b"), errno.EIO)
    with pytest.raises(StorageError):
        tier.delete_tree("c/1-0")
    assert tier.list("c") == []  # gone for all readers, and some bytes are still there
    assert any("/b" in path for path in disk.tree())
    tier.delete_tree("c/1-0")
    assert disk.tree() == {"c/": b""}


def test_sweeping_takes_only_old_temporaries() -> None:
    tier, disk, clock = on_fake_disk()
    tier.put("d/f.json", b"x")
    disk.open(f"d/{TEMPORARY_PREFIX}1-a", "create").close()
    disk.mkdir(f"d/{TEMPORARY_PREFIX}gone-1-0-a")
    disk.open(f"d/{TEMPORARY_PREFIX}gone-1-0-a/pack", "create").close()
    clock.now += 4000
    disk.open(f"d/{TEMPORARY_PREFIX}2-b", "create").close()
    disk.open("d/tmp-of-somebody", "create").close()
    assert [entry.name for entry in tier.list("d")] == ["f.json", "tmp-of-somebody"]
    assert set(tier.sweep_temporaries("d")) == {f"{TEMPORARY_PREFIX}1-a", f"{TEMPORARY_PREFIX}gone-1-0-a"}
    assert {name for name, _ in disk.scan("d")} == {"f.json", "tmp-of-somebody", f"{TEMPORARY_PREFIX}2-b"}
    assert tier.sweep_temporaries("absent") == ()


def test_a_temporary_that_is_swept_under_a_writer_fails_the_put() -> None:
    tier, disk, _ = on_fake_disk()
    for kind in ("link", "rename"):
        disk.fail_at(lambda op, kind=kind: op.kind == kind, errno.ENOENT)
        with pytest.raises(StorageError):
            tier.put("f", b"x", exclusive=kind == "link")
    assert disk.tree() == {}


def test_buffered_writing_keeps_little_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_pack, "MAX_DIRTY_BYTES", 100_000)
    disk = FakeDisk(direct_align=0)
    tier = FlashTier(disk.root, disk)
    writer = tier.create_pack("p", 1_000_000)
    for at in range(0, 1_000_000, 50_000):
        writer.write_at(at, memoryview(bytes(50_000)))
        started = [op for op in disk.log if op.kind == "writeback"]
        assert len(started) >= at // 50_000 + 1
    # 20 blocks begun, all but the last two awaited and dropped.
    assert len([op for op in disk.log if op.kind == "writeback"]) == 20 + 18
    writer.finish()


def test_direct_blocks_skip_the_page_cache_and_tails_do_not() -> None:
    disk = FakeDisk(direct_align=4096)
    tier = FlashTier(disk.root, disk)
    writer = tier.create_pack("p", 10_000)
    assert writer.direct and writer.alignment == 4096
    writer.write_at(0, memoryview(bytes(10_000)))
    writer.finish()
    assert [(op.offset, op.nbytes) for op in disk.log if op.kind == "pwrite"] == [(0, 8192), (8192, 1808)]


def test_a_file_system_that_refuses_direct_blocks_after_all() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    data = os.urandom(20_000)
    writer = tier.create_pack("p", 20_000)
    disk.fail_at(lambda op: op.kind == "pwrite" and op.nbytes >= 4096, errno.EINVAL)
    writer.write_at(0, memoryview(data)[:10_000])
    assert not writer.direct
    writer.write_at(10_000, memoryview(data)[10_000:])
    writer.finish()
    reader = tier.open_pack("p")
    disk.fail_at(lambda op: op.kind == "pread", errno.EINVAL)
    back = bytearray(20_000)
    reader.read_into(0, memoryview(back))
    assert back == data


def test_files_are_private(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path / "run")
    tier.put("d/f", b"x")
    tier.create_pack("c/p", 10).finish()
    for path in (tmp_path / "run").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    shared = open_tier(tmp_path / "shared", file_mode=0o640, dir_mode=0o750)
    shared.put("d/f", b"x")
    assert stat.S_IMODE((tmp_path / "shared" / "d" / "f").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "shared" / "d").stat().st_mode) == 0o750


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path)
    tier.put("a", b"x")
    for action in (lambda: tier.put("a/b", b"x"), lambda: tier.make_directory("a"), lambda: tier.create_pack("a/b", 1)):
        with pytest.raises(StorageError, match="ENOTDIR"):
            action()
    tier.make_directory("d")
    with pytest.raises(StorageError):
        tier.put("d", b"x")
    with pytest.raises(FileExistsError):
        tier.put("d", b"x", exclusive=True)


@pytest.mark.parametrize("num_swept", [1, 3, 100])
def test_an_empty_directory_that_is_swept_while_one_is_made_in_it_is_made_again(num_swept: int) -> None:
    class Swept(FakeDisk):
        left = num_swept

        def mkdir(self, path: str) -> None:
            if path == "a/b/c" and self.left:
                self.left -= 1
                self.rmdir("a/b")
            super().mkdir(path)

    disk = Swept()
    tier = FlashTier(disk.root, disk)
    if num_swept == 100:  # that is no sweep
        with pytest.raises(StorageError, match="ENOENT"):
            tier.create_pack("a/b/c/p", 10)
    else:
        tier.create_pack("a/b/c/p", 10).finish()
        assert tier.size("a/b/c/p") == 10


def test_probe_reports_what_it_found() -> None:
    disk = FakeDisk(links=False, exclusive_renames=False, allocates=False, fsyncs_directories=False, direct_align=0)
    report = FlashTier(disk.root, disk).probe()
    assert report.exclusive_create and report.exclusive_by == "create"
    assert not (report.direct_io or report.allocates or report.fsync_works)
    assert len(report.notes) == 3
    good = FakeDisk(shared=True)
    report = FlashTier(good.root, good).probe()
    assert report.notes == () and report.direct_io and report.shared is True and report.exclusive_by == "link"


def test_probe_finds_a_store_that_overwrites() -> None:
    class Overwriting(FakeDisk):
        def link(self, source: str, target: str) -> None:
            self.rename(source, target)

    disk = Overwriting()
    report = FlashTier(disk.root, disk).probe()
    assert not report.exclusive_create and "unfit" in report.notes[0]


def test_reading_makes_nothing(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path / "run")
    assert tier.list("") == []
    with pytest.raises(FileNotFoundError):
        tier.get("run.json", limit_bytes=1)
    tier.delete_tree("c")
    tier.delete("f")
    assert not (tmp_path / "run").exists()


def test_sync_tree_of_what_is_absent_is_an_error() -> None:
    tier, disk, _ = on_fake_disk()
    disk.make_root()
    with pytest.raises(StorageError):
        tier.sync_tree("c/absent")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("/a/../b/", "/b"),
        (Path("/x"), "/x"),
    ],
)
def test_places(given: str, path: str) -> None:
    assert local_path(given) == path
    tier = open_tier(given, name="remote")
    assert isinstance(tier, FlashTier) and tier.name == "remote"
    assert local_path(tier.url) == path


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tier = open_tier("runs/a")
    monkeypatch.chdir("/")
    tier.put("f", b"x")
    assert (tmp_path / "runs" / "a" / "f").read_bytes() == b"x"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "s3://",
        "gs://b?x",
        "az://c/../d",
        "https://x",
        "ftp://x",
        "file://host/a",
        "file://",
        "file://[a",
        "a\0b",
    ],
)
def test_places_that_cannot_be(given: str) -> None:
    with pytest.raises(ConfigurationError):
        open_tier(given)
