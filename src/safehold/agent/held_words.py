"""What agents say to each other of saves that stay in memory; part of `words`, whose invariants hold."""

from __future__ import annotations

from typing import Any

import msgspec

# ---- reports: a node to the lead ----


class MemoryBegins(msgspec.Struct, tag="memory_begins", frozen=True):
    """A save that has begun on this node stays in memory. Comes before the first `Begun` of the node."""

    incarnation: int
    step: int
    attempt: int


class HeldHere(msgspec.Struct, tag="held_here", frozen=True):
    """What a node has in memory of a save, and its partners have, too: (rank, part, size, CRC32) of its packs, and bytes of objects.

    Comes before the node's `NodeRecorded`.
    """

    incarnation: int
    step: int
    attempt: int
    packs: list[tuple[int, int, int, int]]
    objects_bytes: int


class ShareKept(msgspec.Struct, tag="share_kept", frozen=True):
    """With parity: a node keeps its own share of a memory save; size and digest of its record."""

    incarnation: int
    step: int
    attempt: int
    size_bytes: int
    blake3: str


class HoldsManifest(msgspec.Struct, tag="holds_manifest", frozen=True):
    """A node has the manifest of a memory save, and its plan; or an error says why not. Answers `HoldManifest`."""

    incarnation: int
    step: int
    attempt: int
    error: dict[str, Any] | None = None


# ---- words: the lead to nodes ----


class MakeParity(msgspec.Struct, tag="make_parity", frozen=True):
    """All members of a node's redundancy set keep their shares of a memory save: it makes its parity, and then tells `HeldHere`.

    `refs`: (node, size, digest) of their records, in the order of the ring.
    """

    incarnation: int
    step: int
    attempt: int
    refs: list[tuple[int, int, str]]


class HoldManifest(msgspec.Struct, tag="hold_manifest", frozen=True):
    """A memory save is whole: keep its manifest, and the plan, which the lead has. Each node answers with `HoldsManifest`."""

    incarnation: int
    step: int
    attempt: int
    manifest: bytes
    plan_digest: str
    plan_size: int
