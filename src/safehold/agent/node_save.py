"""What is remembered of one save on one node, and the connection of a rank as saves need it.

Invariants: data only; `safehold.agent.saves` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from safehold.agent.arenas import Arena
from safehold.agent.messages import Begin
from safehold.errors import CheckpointError

Key = tuple[int, int]


class Peer(Protocol):
    """The connection of one rank, as the saves need it."""

    rank: int
    closed: bool

    def reply(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting."""
        ...

    def refuse(self, request: int, error: CheckpointError) -> None:
        """Answer a request with an error."""
        ...


@dataclass(slots=True)
class RankSave:
    """One rank's share of a save on this node."""

    peer: Peer
    begin: Begin
    arena: Arena
    use: int
    staged: bool = False
    stage_s: float = 0.0
    objects: dict[str, bytes] = field(default_factory=dict)
    flush: dict[str, Any] | None = None
    flushing: bool = True


@dataclass(slots=True)
class NodeSave:
    """One save on this node. `closed` once it is committed or abandoned; its arenas stay busy until `flushing` ends."""

    step: int
    attempt: int
    opened_at: float
    ranks: dict[int, RankSave] = field(default_factory=dict)
    waiting: list[tuple[Peer, Begin]] = field(default_factory=list)
    blocked: bool = False
    skipped: str = ""
    closed: bool = False
    committed: bool = False
    recording: bool = False
    swept: bool = False
    error: CheckpointError | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    announced: bool = False

    @property
    def key(self) -> Key:
        """(step, attempt)."""
        return self.step, self.attempt

    @property
    def holds_arenas(self) -> bool:
        """Whether a later save must not touch the arenas yet."""
        return bool(self.waiting) or not self.closed or any(rank.flushing for rank in self.ranks.values())

    @property
    def timings(self) -> dict[str, float]:
        """The longest that any rank took, phase by phase, as far as that is over."""
        flushes = [rank.flush["timings"] for rank in self.ranks.values() if rank.flush]
        found = {"stage_s": max((rank.stage_s for rank in self.ranks.values()), default=0.0)}
        for name in ("allocate_s", "write_s", "sync_s"):
            found[name] = max((entry[name] for entry in flushes), default=0.0)
        return found
