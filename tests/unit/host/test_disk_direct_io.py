"""Any range of bytes goes through direct I/O's alignment rules, whatever the file does on the way."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field

import pytest

from safehold.host import direct_io
from safehold.host.direct_io import DirectLimits


@dataclass
class Memory:
    """A file in memory with the manners of a kernel: short, interrupted, strict about alignment, or refusing."""

    content: bytearray
    rng: random.Random
    direct: DirectLimits | None = None
    shortens: float = 0.0
    ragged: bool = False
    interrupts: float = 0.0
    refuses: bool = False
    calls: list[tuple[int, int]] = field(default_factory=list)

    def _admit(self, view: memoryview, offset: int) -> int:
        if self.refuses:
            raise OSError(errno.EINVAL, "refused")
        if self.rng.random() < self.interrupts:
            raise InterruptedError
        self.calls.append((offset, view.nbytes))
        unit = 1
        if self.direct is not None:
            unit = self.direct.offset_align
            if offset % unit or view.nbytes % unit or direct_io.address_of(view) % self.direct.memory_align:
                raise AssertionError(f"unaligned: {offset}, {view.nbytes}")
        if view.nbytes > unit and self.rng.random() < self.shortens:
            step = 1 if self.ragged else unit
            return self.rng.randrange(step, view.nbytes, step)
        return view.nbytes

    def pwrite(self, data: memoryview, offset: int) -> int:
        done = self._admit(data, offset)
        self.content[offset : offset + done] = data[:done]
        return done

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        wanted = self._admit(buffer, offset)
        done = max(0, min(wanted, len(self.content) - offset))
        buffer[:done] = memoryview(self.content)[offset : offset + done]
        return done


def pair(rng: random.Random, size: int, **manners: object) -> tuple[Memory, Memory]:
    content = bytearray(rng.randbytes(size))
    return Memory(content, rng, **manners), Memory(content, rng)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_any_write_lands_exactly(seed: int) -> None:
    rng = random.Random(seed)
    align = rng.choice((512, 4096, 16384))
    limits = DirectLimits(memory_align=rng.choice((4, 512, 4096)), offset_align=align)
    size = rng.choice((0, 1, 5000, 70_000, 3 << 20))
    file, buffered = pair(
        rng,
        size,
        direct=limits,
        shortens=rng.choice((0, 0.5)),
        ragged=rng.random() < 0.5,
        interrupts=rng.choice((0, 0.2)),
    )
    expected = bytearray(file.content)
    for _ in range(5):
        offset = rng.randrange(size + 1)
        length = rng.randrange(size - offset + 1)
        shift = rng.choice((0, 1, 512))
        data = direct_io.aligned_buffer(length + 4096)[shift : shift + length]
        data[:] = rng.randbytes(length)
        assert direct_io.write_direct(file, buffered, data, offset)
        expected[offset : offset + length] = data
    assert file.content == expected
    for offset, length in buffered.calls:  # what goes the other way shares no page with a direct block
        assert length < 2 * max(align, 4096)


@pytest.mark.parametrize("seed", range(60))
def test_any_read_is_exact(seed: int) -> None:
    rng = random.Random(1000 + seed)
    limits = DirectLimits(memory_align=rng.choice((4, 512, 4096)), offset_align=rng.choice((512, 4096)))
    size = rng.choice((1, 511, 5000, 70_000, 5 << 20))
    file, buffered = pair(
        rng,
        size,
        direct=limits,
        shortens=rng.choice((0, 0.5)),
        ragged=rng.random() < 0.5,
        interrupts=rng.choice((0, 0.2)),
    )
    for _ in range(5):
        offset = rng.randrange(size + 1)
        length = rng.randrange(size - offset + 100)
        shift = rng.choice((0, 1, 512))
        memory = direct_io.aligned_buffer(length + 4096)
        before = rng.randbytes(memory.nbytes)
        memory[:] = before
        there = min(length, size - offset)
        assert direct_io.read_direct(file, buffered, memory[shift : shift + length], offset) == there
        assert memory[shift : shift + there] == file.content[offset : offset + there]
        assert memory[:shift] == before[:shift] and memory[shift + length :] == before[shift + length :]


def test_aligned_memory_is_not_copied() -> None:
    rng = random.Random(0)
    file, buffered = pair(rng, 8 << 20, direct=DirectLimits())
    block = direct_io.aligned_buffer(8 << 20)
    direct_io.write_direct(file, buffered, block, 0)
    direct_io.read_direct(file, buffered, block, 0)
    assert file.calls == [(0, 8 << 20)] * 2 and buffered.calls == []


def test_a_refusal_goes_through_the_page_cache() -> None:
    rng = random.Random(0)
    file, buffered = pair(rng, 100_000, direct=DirectLimits(), refuses=True)
    data = memoryview(rng.randbytes(100_000))
    assert direct_io.write_direct(file, buffered, data, 0) is False
    assert buffered.content == data
    back = memoryview(bytearray(99_000))
    assert direct_io.read_direct(file, buffered, back, 1000) == 99_000
    assert back == data[1000:]


def test_other_errors_pass() -> None:
    class Broken(Memory):
        def pwrite(self, data: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def pread_into(self, buffer: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = Broken(bytearray(8192), random.Random(0), direct=DirectLimits())
    with pytest.raises(OSError, match=r"Errno 5"):
        direct_io.write_direct(file, file, direct_io.aligned_buffer(4096), 0)
    with pytest.raises(OSError, match=r"Errno 5"):
        direct_io.read_direct(file, file, direct_io.aligned_buffer(4096), 0)


def test_a_write_that_moves_nothing_is_an_error() -> None:
    class Stuck(Memory):
        def pwrite(self, data: memoryview, offset: int) -> int:
            return 0

    file = Stuck(bytearray(8192), random.Random(0), direct=DirectLimits())
    with pytest.raises(OSError, match="no bytes"):
        direct_io.write_all(file, memoryview(b"x"), 0)
    with pytest.raises(OSError, match="no bytes"):
        direct_io.write_direct(file, file, direct_io.aligned_buffer(4096), 0)


def test_addresses() -> None:
    assert direct_io.address_of(direct_io.aligned_buffer(10)) % 4096 == 0
    data = bytes(100)
    assert direct_io.address_of(memoryview(data)[7:]) == direct_io.address_of(memoryview(data)) + 7
    assert direct_io.address_of(memoryview(b"")) == 0
