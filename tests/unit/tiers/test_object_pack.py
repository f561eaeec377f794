"""Packs in an object store: parts in any order, bounded memory, and what fails on the way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from object_stores import LOST, PART, Wrapped, failing, small_parts, tier_on
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore

from safehold.errors import (
    ConfigurationError,
    StorageError,
    StorageReadOnlyError,
    TornFileError,
)
from safehold.testing.tier_suite import MIB, pattern
from safehold.tiers import object_pack
from safehold.tiers.object_pack import MAX_PARTS, part_size
from safehold.tiers.object_requests import Patience


@pytest.mark.parametrize("change", ["replaced", "truncated", "gone"])
def test_a_pack_that_changes_under_its_reader(change: str) -> None:
    store = MemoryStore()
    tier = tier_on(store)
    store.put("p", pattern(1000))
    reader = tier.open_pack("p")
    if change == "gone":
        store.delete(["p"])
    else:
        store.put("p", pattern(1000, 1) if change == "replaced" else b"short")
    with pytest.raises(TornFileError):
        reader.read_into(0, memoryview(bytearray(1000)))


def test_a_long_read_is_made_of_bounded_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_pack, "READ_BYTES", 100)
    store = Wrapped()
    store.inner.put("p", pattern(950))
    reader = tier_on(store).open_pack("p")
    buffer = bytearray(940)
    reader.read_into(5, memoryview(buffer))
    assert buffer == pattern(950)[5:945]
    assert [kind for kind, _ in store.calls].count("get") == 10


@pytest.mark.parametrize("size", [0, 1, 8 << 20, 80_000 << 20, 640_000 << 20, (640_000 << 20) - 1])
def test_parts_suffice(size: int) -> None:
    part = part_size(size)
    assert 8 << 20 <= part <= 64 << 20 and part % (1 << 20) == 0
    assert -(-size // part) <= MAX_PARTS


def test_a_pack_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="parts"):
        tier_on(MemoryStore()).create_pack("p", 64 * 10_000 * MIB + 1)


def test_a_pack_written_backwards_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_pack, "SPILL_AFTER_S", 0.05)
    data = pattern(20 * PART + 5)
    tier = small_parts(MemoryStore())
    writer = tier.create_pack("p", len(data))
    for at in reversed(range(0, len(data), 10_000)):
        writer.write_at(at, memoryview(data)[at : at + 10_000])
        assert sum(part.buffer is not None for part in writer._parts.values()) <= object_pack.PARTS_AHEAD
    writer.finish()
    assert tier.get("p", limit_bytes=len(data)) == data


def test_memory_is_bounded_while_the_store_is_slow() -> None:
    """Writers wait for a store that is slower than they are; few parts are held, and no temporary file is made."""
    gate = threading.Event()

    class Slow(Wrapped):
        def put(self, path: str, file: Any, **options: Any) -> None:
            taken = []
            for chunk in file:
                taken.append(bytes(chunk))
                gate.wait(10.0)
            self.inner.put(path, b"".join(taken))

    tier = small_parts(Slow())
    data = pattern(30 * PART)
    writer = tier.create_pack("p", len(data))
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(writer.write_at, at, memoryview(data)[at : at + PART]) for at in range(0, len(data), PART)
        ]
        time.sleep(0.3)
        assert sum(future.done() for future in futures) <= object_pack.PARTS_AHEAD + 1
        gate.set()
        for future in futures:
            future.result(10.0)
    assert writer._spill is None
    writer.finish()
    assert tier.get("p", limit_bytes=len(data)) == data


def test_an_object_appears_only_with_finish() -> None:
    tier = small_parts(MemoryStore())
    writer = tier.create_pack("c/p", 3 * PART)
    writer.write_at(0, memoryview(bytes(3 * PART)))
    time.sleep(0.2)
    assert tier.list("c") == []
    writer_two = tier.create_pack("c/q", 3 * PART)
    writer_two.write_at(0, memoryview(bytes(2 * PART)))
    writer_two.abort()
    assert not writer_two._thread or not writer_two._thread.is_alive()
    writer.finish()
    assert [entry.name for entry in tier.list("c")] == ["p"]


def test_a_pack_that_is_not_whole_is_not_finished() -> None:
    for size in (100, 3 * PART):
        tier = small_parts(MemoryStore())
        writer = tier.create_pack("p", size)
        writer.write_at(0, memoryview(bytes(size - 10)))
        with pytest.raises(StorageError, match="not all written"):
            writer.finish()
        writer.abort()
        assert tier.list("") == []


def test_a_part_is_not_written_again_after_it_has_gone() -> None:
    writer = small_parts(MemoryStore()).create_pack("p", 3 * PART)
    writer.write_at(0, memoryview(bytes(PART)))
    deadline = time.monotonic() + 5.0
    while writer._next == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="again"):
        writer.write_at(0, memoryview(b"x"))
    writer.abort()


@pytest.mark.parametrize("size", [PART, 30 * PART])
def test_a_failed_upload_is_told_by_the_next_call(size: int) -> None:
    """All threads that write are told, with the first cause, and `finish` refuses."""
    store = Wrapped()
    store.before = failing(PermissionDeniedError("403 Forbidden"), kind="put", times=-1)
    tier = small_parts(store)
    writer = tier.create_pack("p", size)
    with pytest.raises(StorageReadOnlyError, match="refused"):
        for at in range(0, size, PART):
            writer.write_at(at, memoryview(bytes(PART)))
        writer.finish()
    with pytest.raises((StorageReadOnlyError, ValueError)):
        writer.finish()
    writer.abort()
    store.before = lambda kind, path: None
    assert tier.list("") == []


def test_a_completion_whose_answer_is_lost() -> None:
    """Repeated, it is told that there is no such upload; the object that is there is the pack."""
    store = Wrapped()
    store.after = failing(FileNotFoundError("404 Not Found: <Code>NoSuchUpload</Code>"), kind="put")
    tier = small_parts(store)
    data = pattern(3 * PART)
    writer = tier.create_pack("p", len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()
    assert tier.get("p", limit_bytes=len(data)) == data


def test_a_completion_that_is_in_doubt_is_removed_by_abort() -> None:
    store = Wrapped()
    store.after = failing(GenericError(LOST), kind="put")
    tier = small_parts(store)
    writer = tier.create_pack("p", 3 * PART)
    writer.write_at(0, memoryview(bytes(3 * PART)))
    store.before = failing(GenericError(LOST), kind="head")
    with pytest.raises(StorageError, match="connection broke"):
        writer.finish()
    writer.abort()
    assert tier.list("") == []


def test_an_upload_that_does_not_move_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes nothing and says nothing holds nobody for longer than its requests may take."""
    gate = threading.Event()

    class Stuck(Wrapped):
        def put(self, path: str, file: Any, **options: Any) -> None:
            gate.wait(20.0)

    tier = small_parts(Stuck(), patience=Patience(request_timeout_s=0.2, request_retry_s=0.2))
    monkeypatch.setattr(object_pack, "ABORT_WAIT_S", 0.2)
    for writing in (True, False):
        writer = tier.create_pack("p", 30 * PART if writing else 2 * PART)
        begun = time.monotonic()
        with pytest.raises(StorageError, match="has not moved"):
            for at in range(0, writer.size_bytes, PART):
                writer.write_at(at, memoryview(bytes(PART)))
            writer.finish()
        writer.abort()
        assert time.monotonic() - begun < 6.0
    gate.set()


def test_no_room_for_what_comes_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def seek(self, offset: int) -> None: ...

        def write(self, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(object_pack, "SPILL_AFTER_S", 0.0)
    monkeypatch.setattr(object_pack.tempfile, "TemporaryFile", Full)
    writer = small_parts(MemoryStore()).create_pack("p", 30 * PART)
    with pytest.raises(StorageError, match="out of order"):
        for at in reversed(range(0, 30 * PART, PART)):
            writer.write_at(at, memoryview(bytes(PART)))
    with pytest.raises(StorageError, match="out of order"):
        writer.finish()
    writer.abort()
