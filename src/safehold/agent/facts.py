"""What `safehold agents` shows of a session.

Invariants: plain values, and nothing of them is a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safehold.agent.session import Session


def facts_of(session: Session) -> dict[str, Any]:
    """Return plain values."""
    return {
        "run_id": session.run_id,
        "incarnation": session.incarnation,
        "ranks": session.local_ranks,
        "connected": sorted(session.peers),
        "world_size": session.world.world_size,
        "saves_in_flight": session.saves.num_open if session.saves is not None else 0,
        "protected_step": session.guard.step,
        "superseded_by": session.ended_by or None,
        "address": session.nodes.address if session.nodes is not None else None,
        "nodes": session.world.node_names,
        "remote": session.head.replicator.facts() if session.head is not None else None,
        "memory": session.memory.facts(),
    }
