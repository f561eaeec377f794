"""Makes what a session consists of: the saves of its node, and the head of all nodes or the way to the one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safehold.agent.copying import Copying
from safehold.agent.follower import Follower
from safehold.agent.head import Head
from safehold.agent.known import Known
from safehold.agent.means import Means
from safehold.agent.saves import NodeSaves
from safehold.clock import Clock
from safehold.events import EventStream

if TYPE_CHECKING:
    from safehold.agent.session import Session

Post = Callable[[Callable[[], None]], None]


def new_head(here: Session, post: Post, clock: Clock, events: EventStream, means: Means) -> Head:
    """Return the head, for the session beside rank 0."""
    return Head(
        here,
        config=here.config,
        keep=here.keep,
        every_seconds=here.every_seconds,
        flusher=here.flusher,
        copier=here.copier,
        own_parts=here.parts,
        held=here.pool.held,
        send=here.send,
        post=post,
        clock=clock,
        events=events,
        spawn=means.spawn,
    )


def new_follower(here: Session, clock: Clock) -> Follower:
    """Return the way to the head, for all other sessions."""
    return Follower(
        lead_name=here.world.node_names[here.lead_node],
        send=lambda report: here.send(here.lead_node, report),
        steps=here.steps,
        every_seconds=here.every_seconds,
        num_nodes=len(here.world.node_names),
        num_ranks=len(here.local_ranks),
        clock=clock,
    )


def new_copying(here: Session, clock: Clock) -> Copying | None:
    """Return this node's part in replications; None without a second place."""
    if here.copier is None:
        return None
    return Copying(here.node, config=here.config, copier=here.copier, tell_lead=here.report, clock=clock)


def new_saves(
    here: Session,
    known: Known,
    clock: Clock,
    *,
    tell_lead: Callable[[Any], None],
    compared: Callable[[int, int, dict[int, dict[str, int]]], None],
) -> NodeSaves:
    """Return the saves of this node in an incarnation that begins."""
    return NodeSaves(
        node=here.node,
        local_ranks=here.local_ranks,
        incarnation=here.incarnation,
        config=here.config,
        keep=here.keep,
        pool=here.pool,
        flusher=here.flusher,
        clock=clock,
        control_of=lambda rank: here.controls[rank].fds,
        tell_lead=tell_lead,
        compared=compared,
        several_nodes=here.nodes is not None,
        run_id=here.run_id,
        node_name=here.world.node_names[here.node],
        parts=here.parts,
        known=known,
        memory=here.memory,
    )
