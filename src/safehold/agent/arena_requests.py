"""What trainers ask about arenas outside of saves: one to be made ahead, and the memory of a rank to restore from.

Invariants: used from the dispatcher thread only; nothing here waits. An arena that a trainer may write to is not verified any more, and one
that is read from cannot be written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.agent.arenas import Arena
from safehold.agent.node_save import Peer
from safehold.agent.saves import NodeSaves
from safehold.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from safehold.agent.session import Session


def prepare(here: Session, peer: Peer, message: m.Prepare, saves: NodeSaves) -> None:
    """Have an arena made for a rank; the answer comes when its pages exist."""

    def ready(arena: Arena | None, error: CheckpointError | None) -> None:
        if error is not None or arena is None:
            error = here.superseded(peer.rank) if here.ended_by else error  # which is why it got none
            peer.refuse(message.id, error or ConfigurationError("no arena", rank=peer.rank))
            return
        arena.verified = False  # from here on the trainer can write to it
        peer.reply(m.Prepared(message.id, arena.arena_id, arena.size_bytes), (arena.fd,))

    here.pool.prefer(peer.rank, message.numa_node)
    here.memory.wanted(peer.rank, message.arena_bytes)
    if message.other:
        here.memory.prepare_other(peer, message, ready)
    else:
        here.memory.turn(peer.rank, message.arena_bytes)
        here.pool.acquire(peer.rank, saves.arena_size(peer.rank, message.arena_bytes), ready)


def memory(here: Session, peer: Peer, message: held_messages.MemoryAsk | held_messages.HeldAsk | m.RestoreDone) -> None:
    """Let a rank read what is in memory of another one, or of a node, or hear that it is through.

    Raises:
        RankLostError: That memory is gone.
    """
    match message:
        case held_messages.MemoryAsk():
            here.memory.lend(peer, message)
        case held_messages.HeldAsk():
            here.memory.ask(peer, message)
        case m.RestoreDone():
            here.memory.restored()
            peer.reply(m.Done(message.id))
