"""Checksums: zlib's polynomial, combined without reading again."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from safehold.format import crc


@pytest.mark.parametrize(
    "size", [0, 1, 4096, crc.BLOCK_BYTES - 1, crc.BLOCK_BYTES, crc.BLOCK_BYTES + 1, 3 * crc.BLOCK_BYTES + 7]
)
def test_blocks_combine_to_the_whole(size: int) -> None:
    data = random.Random(size).randbytes(size)
    blocks = crc.crc_blocks(data)
    assert blocks.dtype == np.uint32 and len(blocks) == crc.num_blocks(size)
    assert [zlib.crc32(data[at : at + crc.BLOCK_BYTES]) for at in range(0, size, crc.BLOCK_BYTES)] == blocks.tolist()
    assert crc.combine_blocks(blocks, size) == zlib.crc32(data) == crc.crc(data)
    assert np.array_equal(crc.decode_crcs(crc.encode_crcs(blocks)), blocks)
    assert len(crc.encode_crcs(blocks)) == crc.encoded_length(len(blocks))


def test_takes_any_contiguous_buffer() -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    expected = [zlib.crc32(array.tobytes())]
    assert crc.crc_blocks(memoryview(array)).tolist() == expected
    assert crc.crc_blocks(bytearray(array.tobytes())).tolist() == expected
    assert crc.crc_blocks(memoryview(np.empty((0, 3)))).tolist() == []


def test_pieces_of_any_length_combine() -> None:
    pieces = [b"", b"abc", b"", b"d" * 5000]
    assert crc.combine([zlib.crc32(piece) for piece in pieces], map(len, pieces)) == zlib.crc32(b"".join(pieces))
    assert crc.combine([], []) == 0
    with pytest.raises(ValueError):
        crc.combine([1], [])


def test_a_wrong_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="1 blocks, not 2"):
        crc.combine_blocks(np.array([1, 2], np.uint32), 5)


@pytest.mark.parametrize("text", ["A", "AAAA", "AAAAAA=", "AQAAAA==\n", "é", "AQAAAB==AA", "!QAAAA=="])
def test_what_is_no_list_of_checksums_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        crc.decode_crcs(text)
