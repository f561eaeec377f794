"""What is remembered of one save on one node, and the connection of a rank as saves need it.

Invariants: data only; `safehold.agent.saves` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from safehold.agent.arenas import Arena
from safehold.agent.messages import Begin
from safehold.errors import CheckpointError, ConfigurationError, SkippedError

Key = tuple[int, int]
MAX_BYTES = 1 << 47


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
    in_memory: bool = False

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


def agreed(compared: dict[int, dict[str, int]]) -> dict[int, dict[str, int]]:
    """Keep of each range the checksum of the lowest rank that has it; the others have the same."""
    found: dict[int, dict[str, int]] = {}
    seen: set[str] = set()
    for rank in sorted(compared):
        found[rank] = {key: crc for key, crc in compared[rank].items() if key not in seen}
        seen.update(found[rank])
    return {rank: crcs for rank, crcs in found.items() if crcs}


def given_up(save: NodeSave) -> CheckpointError:
    """Return what a rank hears that begins a save too late."""
    return SkippedError("the save was over before this rank began it", step=save.step)


def check(message: Begin) -> None:
    """Refuse a request that contradicts itself, before anything is done about it."""
    end = 0
    for start, size in message.packs:
        if start != end or size <= 0 or size % 4096:
            raise ConfigurationError("the packs of a save do not lie end to end", step=message.step)
        end += size
    fits = all(
        start >= 0 and nbytes >= 0 and start + nbytes <= message.arena_bytes for _, start, nbytes in message.compare
    )
    if not 0 <= message.step < 1 << 40 or not 0 <= message.attempt < 1 << 40:
        raise ConfigurationError(f"there is no step {message.step}, attempt {message.attempt}")
    if not end <= message.arena_bytes < MAX_BYTES or not fits:
        raise ConfigurationError("a save does not fit the arena that it asks for", step=message.step)
