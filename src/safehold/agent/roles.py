"""Makes what a session is besides a node of its job: the head of all nodes, or the way to the one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from safehold.agent.follower import Follower
from safehold.agent.head import Head
from safehold.agent.means import Means
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
        memory_of=here.pool.holding,
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
