"""Where each byte of a redundancy set lies: members' files as streams of blocks, chunks, stripes and rows.

A member's stream is its objects file and its packs, in the order of its node record, each padded with zeros to whole blocks of 1 MiB:
so a block of the stream is a block that the node record has a checksum of. With R the rows of a chunk (the blocks of the longest
stream, divided by the data symbols of a stripe, rounded up), block b of a stream is row b % R of chunk b // R. What lies behind the
end of a stream is zeros. A share is one parity row of a stripe as stored: its rows end to end, the last one cut to the longest data
block that goes into it.

Invariants: pure; derived from the set and the node records alone, so that all members and whoever rebuilds agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from safehold.format import paths
from safehold.format.crc import BLOCK_BYTES, num_blocks
from safehold.format.records import NodeRecord
from safehold.policy.placement import RedundancySet


@dataclass(frozen=True, slots=True)
class StreamFile:
    """One file of a stream.

    Attributes:
        name: Its name in the checkpoint's directory.
        size_bytes: Its size.
        first_block: Block of the stream at which it begins.
    """

    name: str
    size_bytes: int
    first_block: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the stream that it fills."""
        return num_blocks(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one file.

    Attributes:
        file: Index of the file in its stream.
        block: First block in the stream.
        count: How many.
        offset: First byte in the file.
        nbytes: Bytes that are there; less than `count` blocks only at the end of the file.
    """

    file: int
    block: int
    count: int
    offset: int
    nbytes: int


class Stream:
    """The files of one member, end to end."""

    def __init__(self, files: Iterable[tuple[str, int]]) -> None:
        """Lay out (name, size in bytes) of each file; empty ones have no block."""
        found, first = [], 0
        for name, size_bytes in files:
            found.append(StreamFile(name, size_bytes, first))
            first += num_blocks(size_bytes)
        self.files = tuple(found)
        self.num_blocks = first
        self._filled = [index for index, file in enumerate(found) if file.size_bytes]
        self._firsts = [found[index].first_block for index in self._filled]

    def runs(self, block: int, count: int) -> list[Run]:
        """Return what is there of `count` blocks from `block`, file by file; what lies behind the end is left out."""
        runs, end = [], min(block + count, self.num_blocks)
        while block < end:
            index = self._filled[bisect_right(self._firsts, block) - 1]
            file = self.files[index]
            inside = block - file.first_block
            number = min(end, file.first_block + file.num_blocks) - block
            offset = inside * BLOCK_BYTES
            runs.append(Run(index, block, number, offset, min(number * BLOCK_BYTES, file.size_bytes - offset)))
            block += number
        return runs

    def block_bytes(self, block: int) -> int:
        """Return the bytes of a block; 0 behind the end."""
        return sum(run.nbytes for run in self.runs(block, 1))


def stream_of(record: NodeRecord) -> Stream:
    """Return the stream of what a node wrote."""
    objects = [(paths.node_objects(record.node), record.objects_size_bytes)] if record.objects_size_bytes else []
    return Stream([*objects, *((pack.file, pack.size_bytes) for pack in record.packs)])


class Geometry:
    """Streams of a set's members, and how they lie in its stripes.

    Attributes:
        of: The set.
        streams: By position in the ring.
        rows_per_chunk: Blocks of a chunk.
    """

    def __init__(self, of: RedundancySet, streams: Sequence[Stream]) -> None:
        if len(streams) != len(of.members):
            raise ValueError(f"{len(of.members)} members have as many streams, not {len(streams)}")
        self.of = of
        self.streams = tuple(streams)
        longest = max(stream.num_blocks for stream in streams)
        self.rows_per_chunk = -(-longest // of.num_data)

    def blocks(self, stripe: int, chunk: int, row: int, count: int) -> tuple[int, int, int]:
        """Return (position, first block, number of blocks that are there) of rows of a data symbol."""
        position = self.of.data_position(stripe, chunk)
        first = chunk * self.rows_per_chunk + row
        count = min(count, self.rows_per_chunk - row, self.streams[position].num_blocks - first)
        return position, first, max(0, count)

    def locate(self, position: int, block: int) -> tuple[int, int, int]:
        """Return (stripe, chunk, row) of a block of a member's stream."""
        chunk, row = divmod(block, self.rows_per_chunk)
        return self.of.stripe_of_chunk(position, chunk), chunk, row

    def num_rows(self, stripe: int) -> int:
        """Return how many rows of a stripe have data."""
        return max(self.blocks(stripe, chunk, 0, self.rows_per_chunk)[2] for chunk in range(self.of.num_data))

    def share_bytes(self, stripe: int) -> int:
        """Return the size of each stored parity row of a stripe."""
        rows = self.num_rows(stripe)
        if not rows:
            return 0
        return (rows - 1) * BLOCK_BYTES + self.row_bytes(stripe, rows - 1)

    def row_bytes(self, stripe: int, row: int) -> int:
        """Return the bytes of the longest data block in one row of a stripe."""
        longest = 0
        for chunk in range(self.of.num_data):
            position, block, count = self.blocks(stripe, chunk, row, 1)
            if count:
                longest = max(longest, self.streams[position].block_bytes(block))
        return longest

    def held_bytes(self, position: int) -> int:
        """Return the bytes of redundancy that a member holds, its record apart."""
        rows = range(self.of.num_parity)
        return sum(self.share_bytes(self.of.stripe_of_row(position, row)) for row in rows)
