"""Errors in every operation of a save: named, nothing committed, older checkpoints whole, the next attempt succeeds."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest

from safehold.errors import CheckpointError, StorageError, StorageFullError, StorageReadOnlyError
from safehold.testing.disk_faults import Op
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import TEMPORARY_PREFIX
from safehold.tiers.flash import FlashTier


def save(tier: FlashTier, directory: str) -> None:
    writer = tier.create_pack(f"{directory}/pack", 8192)
    try:
        writer.write_at(0, memoryview(b"a" * 4096))
        writer.write_at(4096, memoryview(b"b" * 4096))
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    tier.put(f"{directory}/node.json", b"node")
    tier.sync_tree(directory)
    tier.put(f"{directory}/manifest.json", b"manifest", exclusive=True)


def is_whole(disk: FakeDisk, directory: str) -> bool:
    there = disk.tree()
    return (
        there.get(f"{directory}/manifest.json") == b"manifest"
        and there.get(f"{directory}/node.json") == b"node"
        and there.get(f"{directory}/pack") == b"a" * 4096 + b"b" * 4096
    )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("applied", [False, True], ids=["refused", "done-but-said-to-fail"])
@pytest.mark.parametrize("times", [1, -1], ids=["once", "for-good"])
def test_an_error_anywhere(code: int, applied: bool, times: int) -> None:
    rehearsal = FakeDisk()
    tier = FlashTier(rehearsal.root, rehearsal)
    save(tier, "c/10/1-0")
    begun = rehearsal.num_ops
    save(tier, "c/20/1-0")
    for index in range(begun, rehearsal.num_ops):
        disk = FakeDisk()
        tier = FlashTier(disk.root, disk)
        save(tier, "c/10/1-0")
        disk.fail_at(lambda op, index=index: op.index >= index, code, times=times, applied=applied)
        try:
            save(tier, "c/20/1-0")
        except CheckpointError as exc:
            assert isinstance(exc, StorageError)
            assert exc.tier == "flash" and exc.path
            acknowledged = False
        else:
            acknowledged = True
        disk.heal()
        where = f"{errno.errorcode[code]} in operation {index}: {rehearsal.log[index]}"
        assert is_whole(disk, "c/10/1-0"), where
        if acknowledged or "c/20/1-0/manifest.json" in disk.tree():
            assert is_whole(disk, "c/20/1-0"), where
        if acknowledged:
            assert is_whole(disk.crash(survival="lost"), "c/20/1-0"), where
            continue
        save(tier, "c/20/1-1")
        assert is_whole(disk.crash(survival="lost"), "c/20/1-1"), where


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_before_a_byte_is_copied(code: int) -> None:
    disk = FakeDisk(capacity_bytes=100_000, full_errno=code)
    tier = FlashTier(disk.root, disk)
    with pytest.raises(StorageFullError, match="c/p") as caught:
        tier.create_pack("c/p", 200_000)
    assert caught.value.hint
    assert not [op for op in disk.log if op.kind == "pwrite"]
    assert "c/p" not in disk.tree()
    tier.create_pack("c/p", 90_000).abort()
    assert tier.free_bytes() == 100_000


def test_a_full_disk_is_found_where_space_cannot_be_reserved() -> None:
    disk = FakeDisk(capacity_bytes=100_000, allocates=False)
    tier = FlashTier(disk.root, disk)
    with pytest.raises(StorageFullError, match="200000 bytes"):
        tier.create_pack("c/p", 200_000)
    assert "c/p" not in disk.tree()


def test_a_file_size_limit_is_found_by_name(tmp_path: Path) -> None:
    tier = FlashTier(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageFullError):
            tier.create_pack("c/p", 200_000)
        with pytest.raises(StorageFullError):
            tier.put("c/f", bytes(200_000))
        tier.put("c/small", b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tier.list("c")] == ["small"]
    assert sorted(path.name for path in (tmp_path / "run" / "c").iterdir()) == ["small"]


def test_a_failed_put_leaves_nothing_behind() -> None:
    for kind in ("create", "pwrite", "fsync", "rename"):
        disk = FakeDisk()
        tier = FlashTier(disk.root, disk)
        tier.put("d/a.json", b"old")
        disk.fail_at(lambda op, kind=kind: op.kind == kind, errno.EIO)
        with pytest.raises(StorageError, match="EIO"):
            tier.put("d/a.json", b"new")
        assert disk.tree() == {"d/": b"", "d/a.json": b"old"}, kind


def test_an_ambiguous_link_is_settled_by_the_inode() -> None:
    """A server that did it and lost its reply says EEXIST when asked again, or EIO: the name is ours, and only then."""
    for code in (errno.EEXIST, errno.EIO, errno.EPERM):
        disk = FakeDisk()
        tier = FlashTier(disk.root, disk)
        disk.fail_at(lambda op: op.kind == "link", code, applied=True)
        tier.put("i/1.json", b"mine", exclusive=True)
        assert disk.crash(survival="lost").tree()["i/1.json"] == b"mine"
    for code in (errno.EEXIST, errno.EIO):
        disk = FakeDisk()
        tier = FlashTier(disk.root, disk)
        tier.put("i/1.json", b"theirs", exclusive=True)
        disk.fail_at(lambda op: op.kind == "link", code)
        with pytest.raises((FileExistsError, StorageError)):
            tier.put("i/1.json", b"mine", exclusive=True)
        assert disk.tree()["i/1.json"] == b"theirs"


def test_an_ambiguous_exclusive_rename_is_settled_too() -> None:
    disk = FakeDisk(links=False)
    tier = FlashTier(disk.root, disk)
    disk.fail_at(lambda op: op.kind == "rename_exclusive", errno.EEXIST, applied=True)
    tier.put("i/1.json", b"mine", exclusive=True)
    with pytest.raises(FileExistsError):
        tier.put("i/1.json", b"again", exclusive=True)
    assert disk.tree()["i/1.json"] == b"mine"


def test_a_repeated_put_after_an_unknown_end_reports_no_success() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    tier.make_directory("i")
    disk.fail_at(lambda op: op.kind == "fsync_dir", errno.EIO)
    with pytest.raises(StorageError):
        tier.put("i/1.json", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        tier.put("i/1.json", b"first", exclusive=True)


def test_a_pack_that_failed_once_never_finishes() -> None:
    for kind in ("pwrite", "fsync", "writeback"):
        disk = FakeDisk(direct_align=0)
        tier = FlashTier(disk.root, disk)
        writer = tier.create_pack("p", 8192)
        disk.fail_at(lambda op, kind=kind: op.kind == kind, errno.EIO)
        with pytest.raises(StorageError, match="EIO"):
            writer.write_at(0, memoryview(bytes(4096)))
            writer.finish()
        with pytest.raises(StorageError, match="EIO"):
            writer.finish()
        writer.abort()
        assert disk.tree() == {}


def test_a_read_only_disk_says_who_must_act() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    disk.fail_at(lambda op: op.kind == "create", errno.EROFS, times=-1)
    with pytest.raises(StorageReadOnlyError) as caught:
        tier.put("run.json", b"x")
    assert not caught.value.retry
    with pytest.raises(StorageReadOnlyError):
        tier.probe()
    assert not any(TEMPORARY_PREFIX in path for path in disk.tree())


def test_a_stuck_disk_holds_one_call_and_no_other() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    tier.put("run.json", b"x")
    writer = tier.create_pack("p", 4096)

    def is_write(op: Op) -> bool:
        return op.kind == "pwrite" and op.path == "p"

    hang = disk.hang_at(is_write, code=errno.EIO)
    errors: list[StorageError] = []

    def write() -> None:
        try:
            writer.write_at(0, memoryview(bytes(4096)))
        except StorageError as exc:
            errors.append(exc)

    thread = threading.Thread(target=write)
    thread.start()
    assert hang.reached.wait(10)
    assert tier.get("run.json", limit_bytes=10) == b"x"
    assert not errors
    hang.release()
    thread.join(10)
    assert len(errors) == 1
    writer.abort()
    assert disk.tree().keys() == {"run.json"}


@pytest.mark.root
def test_a_small_disk_for_real(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        assert os.environ.get("CI") != "true", mounted.stderr.decode()
        pytest.skip("cannot mount a small tmpfs")
    try:
        tier = FlashTier(tmp_path / "run")
        save(tier, "c/10/1-0")
        with pytest.raises(StorageFullError):
            tier.create_pack("c/20/1-0/pack", 4 << 20)
        with pytest.raises(StorageFullError):
            tier.put("c/20/1-0/node.json", bytes(4 << 20))
        assert tier.list("c/20/1-0") == [] and not list((tmp_path / "run").rglob(f"{TEMPORARY_PREFIX}*"))
        assert tier.get("c/10/1-0/manifest.json", limit_bytes=100) == b"manifest"
        save(tier, "c/20/1-1")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_create_that_was_answered_twice_is_not_taken_for_the_record() -> None:
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    disk.fail_at(lambda op: op.kind == "create", errno.EEXIST, applied=True)
    with pytest.raises(StorageError):
        tier.put("i/1.json", b"x", exclusive=True)
    assert disk.tree() == {"i/": b""}
