"""What trainers and their agent say about checkpoints that lie in memory; see `agent.messages` for the rest."""

from __future__ import annotations

import msgspec


class MemoryAsk(msgspec.Struct, tag="memory_ask", frozen=True):
    """A rank asks for the memory of `rank` to restore `commit` (step, incarnation, attempt) from it; None: whatever its arena holds."""

    id: int
    rank: int
    commit: tuple[int, int, int] | None = None


class HeldAsk(msgspec.Struct, tag="held_ask", frozen=True):
    """A rank asks for bytes of what a node holds in memory of a checkpoint: `size` from `offset` of the file that a tier would have."""

    id: int
    node: int
    path: str
    offset: int
    size: int


class HeldBytes(msgspec.Struct, tag="held_bytes", frozen=True):
    """Descriptor: memory with these bytes, the asker's own."""

    id: int
    size: int


class MemorySource(msgspec.Struct, tag="memory_source", frozen=True):
    """Descriptor: the arena (always sent). `packs`: (arena offset, size) by part; block checksums are in the node record."""

    id: int
    arena_bytes: int
    packs: list[tuple[int, int]]
