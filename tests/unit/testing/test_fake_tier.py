"""The fake tier does what its rules say, and otherwise nothing."""

from __future__ import annotations

import errno
import threading

import pytest

from safehold.errors import StorageError, StorageFullError
from safehold.testing.fake_tier import FakeTier


class CountingClock:
    def __init__(self) -> None:
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.slept

    def wall(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


def test_the_nth_of_a_kind_fails() -> None:
    tier = FakeTier()
    tier.fail("put", at=1)
    tier.put("a", b"")
    with pytest.raises(StorageError, match=r"put 1 .*path b"):
        tier.put("b", b"")
    tier.put("c", b"")
    assert [entry.name for entry in tier.list("")] == ["a", "c"]
    assert tier.count("put") == 3


def test_failures_by_path_and_error() -> None:
    tier = FakeTier()
    tier.fail("put", path="*/manifest.json", error=OSError(errno.ENOSPC, "full"), times=-1)
    tier.put("c/node.json", b"")
    for _ in range(2):
        with pytest.raises(StorageFullError):
            tier.put("c/manifest.json", b"")
    tier.heal()
    tier.put("c/manifest.json", b"")
    tier.fail("put", error=FileExistsError("x"))
    with pytest.raises(FileExistsError):
        tier.put("c/manifest.json", b"")


def test_done_but_said_to_fail() -> None:
    tier = FakeTier()
    tier.fail("put", applied=True)
    with pytest.raises(StorageError):
        tier.put("a", b"x")
    assert tier.get("a", limit_bytes=1) == b"x"


def test_any_operation_by_number() -> None:
    tier = FakeTier()
    tier.put("a", b"x")
    tier.fail("*", at=2)
    tier.size("a")
    with pytest.raises(StorageError):
        tier.list("")


def test_lies_twice() -> None:
    tier = FakeTier()
    tier.put("a", b"x")
    tier.lie("get")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            tier.get("a", limit_bytes=1)
    assert tier.get("a", limit_bytes=1) == b"x"


def test_packs_fail_too_and_are_spoilt() -> None:
    tier = FakeTier()
    tier.fail("write_at", at=1, path="c/*")
    writer = tier.create_pack("c/p", 8192)
    writer.write_at(0, memoryview(bytes(4096)))
    with pytest.raises(StorageError):
        writer.write_at(4096, memoryview(bytes(4096)))
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    assert tier.list("c") == []
    assert [(op.kind, op.nth, op.offset) for op in tier.log if op.kind == "write_at"] == [
        ("write_at", 0, 0),
        ("write_at", 1, 4096),
    ]


def test_flipped_bits_are_read_and_not_stored() -> None:
    tier = FakeTier()
    tier.put("c/a", b"\0" * 10)
    writer = tier.create_pack("c/p", 10_000)
    writer.finish()
    tier.flip("c/*", 5, mask=2)
    assert tier.get("c/a", limit_bytes=10) == b"\0" * 5 + b"\2" + b"\0" * 4
    reader = tier.open_pack("c/p")
    buffer = bytearray(4)
    reader.read_into(4, memoryview(buffer))
    assert buffer == b"\0\2\0\0"
    reader.read_into(6, memoryview(buffer))
    assert buffer == bytes(4)
    tier.heal()
    assert tier.get("c/a", limit_bytes=10) == bytes(10)


def test_slow_and_hanging() -> None:
    clock = CountingClock()
    tier = FakeTier(clock=clock)
    tier.slow("put", 7.0)
    tier.put("a", b"")
    tier.put("b", b"")
    assert clock.slept == 14.0
    gate = tier.hang("get")
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(tier.get("a", limit_bytes=1)))
    thread.start()
    assert gate.reached.wait(10)
    assert found == []
    assert tier.get("b", limit_bytes=1) == b""  # only one was to hang
    gate.release()
    thread.join(10)
    assert found == [b""]
