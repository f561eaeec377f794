"""Checksums of stored bytes: CRC32 per block of 1 MiB, combined upward without reading anything again.

Invariants: the polynomial is zlib's (and S3's). Blocks start at multiples of `BLOCK_BYTES`; only the last may be
shorter. Checksumming releases the interpreter lock.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

BLOCK_BYTES: Final = 1 << 20
"""Bytes of a block."""

Buffer = bytes | bytearray | memoryview


def num_blocks(size_bytes: int) -> int:
    """Return how many blocks that many bytes have."""
    return -(-size_bytes // BLOCK_BYTES)


def crc(buffer: Buffer, value: int = 0) -> int:
    """Return the CRC32 of a contiguous buffer, continuing from `value`."""
    return int(isal_zlib.crc32(buffer, value))


def crc_blocks(buffer: Buffer) -> npt.NDArray[np.uint32]:
    """Return the CRC32 of each block of a contiguous buffer that starts at the border of a block."""
    view = memoryview(buffer)
    if not view.nbytes:
        return np.empty(0, dtype=np.uint32)
    view = view.cast("B")
    crc32 = isal_zlib.crc32
    values = [crc32(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]
    return np.array(values, dtype=np.uint32)


def combine(crcs: Iterable[Any], lengths: Iterable[int]) -> int:
    """Return the CRC32 of pieces laid end to end, from that of each and its length in bytes."""
    total = 0
    combine_two = isal_zlib.crc32_combine
    for value, length in zip(crcs, lengths, strict=True):
        total = combine_two(total, int(value), int(length))
    return int(total)


def combine_blocks(crcs: npt.NDArray[np.uint32], size_bytes: int) -> int:
    """Return the CRC32 of `size_bytes` bytes from those of its blocks.

    Raises:
        ValueError: The number of blocks does not fit the size.
    """
    if len(crcs) != num_blocks(size_bytes):
        raise ValueError(f"{size_bytes} bytes have {num_blocks(size_bytes)} blocks, not {len(crcs)}")
    if not len(crcs):
        return 0
    last = size_bytes - (len(crcs) - 1) * BLOCK_BYTES
    return combine(crcs, [BLOCK_BYTES] * (len(crcs) - 1) + [last])


def encoded_length(blocks: int) -> int:
    """Return the length of what `encode_crcs` writes for that many blocks."""
    return -(-blocks * 4 // 3) * 4


def encode_crcs(crcs: npt.NDArray[np.uint32]) -> str:
    """Write checksums as base64 of little-endian 32-bit words."""
    return base64.b64encode(np.ascontiguousarray(crcs, dtype="<u4").tobytes()).decode("ascii")


def decode_crcs(text: str) -> npt.NDArray[np.uint32]:
    """Read what `encode_crcs` wrote.

    Raises:
        ValueError: The text is nothing that `encode_crcs` writes.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("block checksums are not base64") from None
    if len(raw) % 4 or base64.b64encode(raw).decode("ascii") != text:
        raise ValueError("block checksums are not whole 32-bit words")
    return np.frombuffer(raw, dtype="<u4").astype(np.uint32)
