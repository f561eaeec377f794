"""What trainers and their agent say about chunks that are passed on between nodes in a restore; see `agent.messages` for the rest."""

from __future__ import annotations

import msgspec


class CacheAsk(msgspec.Struct, tag="cache_ask", frozen=True):
    """After `planned` went well: a rank that wants chunks asks whether some are passed on between nodes."""

    id: int
    round: int


class Cache(msgspec.Struct, tag="cache", frozen=True):
    """Descriptor: the memory that chunks are passed on through (`agent.chunk_cache`); none, and no groups, where none are.

    `groups`: [nodes as they are dealt chunks, encoded set of chunks], as far as they concern this node.
    """

    id: int
    node: int
    size_bytes: int
    num_slots: int
    groups: list[tuple[list[int], bytes]]


class ChunksAsk(msgspec.Struct, tag="chunks_ask", frozen=True):
    """A rank has read chunks from storage into their slots, verified ([number, size]), or failed to, and asks for more.

    `read_s`: the longest that one of them took.
    """

    id: int
    round: int
    read: list[tuple[int, int]] = []
    failed: list[int] = []
    read_s: float = 0.0


class ChunksToRead(msgspec.Struct, tag="chunks_to_read", frozen=True):
    """Chunks to read: [number, slot]. Empty: ask again, unless it is `over`."""

    id: int
    chunks: list[tuple[int, int]]
    over: bool


class ChunksUsed(msgspec.Struct, tag="chunks_used", frozen=True):
    """A rank needs these chunks no more; the bytes of `wrong` did not verify."""

    id: int
    round: int
    chunks: list[int]
    wrong: list[int] = []


class ReadingOver(msgspec.Struct, tag="reading_over", frozen=True):
    """A rank needs the cache no more; `done`: nor does any other on any node, since all have verified. Replied to with `NodeRead`."""

    id: int
    round: int
    done: bool


class NodeRead(msgspec.Struct, tag="node_read", frozen=True):
    """Bytes that all ranks of the node have read from storage, as they have voted."""

    id: int
    storage_bytes: int
