"""Arenas: sealed, checked before mapped, populated without a change."""

import fcntl
import mmap
import os
import threading
import time

import numpy as np
import pytest

from safehold.errors import AgentUnavailableError, StorageFullError
from safehold.host import libc, memfd
from safehold.host.memfd import Mapping


@pytest.fixture
def arena():
    fd = memfd.create(20 << 20, "test")
    yield fd
    os.close(fd)


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_an_arena_cannot_change_its_size(arena):
    for size in (0, 4096, 40 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(arena)


def test_two_mappings_share_their_bytes(arena):
    with Mapping(arena) as one, Mapping(arena, writable=False) as other:
        one.view[5:8] = b"abc"
        assert other.view[5:8] == b"abc"
        assert other.view.readonly
        assert one.address % 4096 == 0 and one.address != other.address


def test_what_could_be_truncated_is_not_mapped(tmp_path):
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(AgentUnavailableError, match="sealed"):
        Mapping(fd)
    os.close(fd)
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(4096)
        with pytest.raises(AgentUnavailableError, match="no shared memory"):
            Mapping(file.fileno())


def test_a_size_beyond_the_arena_is_refused(arena):
    with pytest.raises(AgentUnavailableError):
        Mapping(arena, (20 << 20) + 1)


def test_an_empty_arena():
    fd = memfd.create(0, "empty")
    with Mapping(fd) as mapping:
        assert mapping.view.nbytes == 0 and mapping.address == 0
        assert memfd.populate(mapping).size_bytes == 0
    os.close(fd)


def test_an_impossible_size_is_a_full_storage():
    fd = memfd.create(1 << 62, "huge")
    with pytest.raises(StorageFullError):
        Mapping(fd)
    os.close(fd)


def test_closing_while_a_view_lives_cannot_crash(arena):
    mapping = Mapping(arena)
    view = np.frombuffer(mapping.view, np.uint8)
    assert mapping.close() is False
    assert view[100] == 0  # still mapped
    del view
    again = Mapping(arena)
    assert again.close() is True
    assert again.close() is True


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("old_kernel", [False, True])
def test_populating_brings_all_pages_and_changes_none(arena, num_threads, old_kernel, monkeypatch):
    if old_kernel:

        def refuse(*_):
            raise OSError(22, "no such advice")

        monkeypatch.setattr(libc, "madvise", refuse)
    told = []
    with Mapping(arena) as mapping:
        mapping.view[9 << 20 : (9 << 20) + 3] = b"abc"
        done = memfd.populate(mapping, num_threads=num_threads, progress=told.append)
        assert done.size_bytes == 20 << 20 and not done.cancelled
        assert max(told) == 20 << 20 and len(told) == 3
        assert resident_bytes(arena) == 20 << 20
        whole = bytes(mapping.view)
        assert whole[9 << 20 : (9 << 20) + 3] == b"abc" and whole.count(0) == (20 << 20) - 3


def test_populating_can_be_cancelled(arena):
    with Mapping(arena) as mapping:
        done = memfd.populate(mapping, num_threads=1, cancelled=lambda: resident_bytes(arena) > 0)
        assert done.cancelled and 0 < done.size_bytes < 20 << 20


def test_an_error_while_populating_is_raised(arena, monkeypatch):
    def fail(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(libc, "madvise", fail)
    with Mapping(arena) as mapping, pytest.raises(StorageFullError):
        memfd.populate(mapping)


def test_populating_does_not_hold_the_interpreter_lock():
    fd = memfd.create(200 << 20, "test")
    ticks = 0
    with Mapping(fd) as mapping:
        thread = threading.Thread(target=memfd.populate, args=(mapping,), kwargs={"num_threads": 1})
        thread.start()
        while thread.is_alive():
            ticks += 1
            time.sleep(0.0005)
        thread.join()
    os.close(fd)
    assert ticks > 5  # with the lock held this loop would run once or twice


def test_pages_are_as_assumed():
    assert mmap.PAGESIZE == memfd.PAGE_BYTES
