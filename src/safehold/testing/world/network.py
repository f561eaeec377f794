"""The network between agents by the contract of `agent.net.seam`: in order, once, or lost for good and then the sender is told.

Invariants: a message that its sender has given up can still arrive, as long as nothing newer of that sender has: it may have been received
by a process that was stopped, and its acknowledgement lost. A peer that came anew has none of what was sent to the one before.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safehold.agent.net.outbox import ControlSettings, check_size
from safehold.agent.net.seam import Listeners, Provider, Sink
from safehold.errors import AgentUnavailableError, CheckpointError, ConfigurationError, TornFileError
from safehold.testing.world import fibers
from safehold.testing.world.timeline import Process

if TYPE_CHECKING:
    from safehold.testing.world.world import World

HEARTBEAT_S = 1.0
BACK_S = 1.0


@dataclass(slots=True)
class Link:
    """What an endpoint keeps of a peer.

    Attributes:
        peer: The endpoint at the other side that was spoken to last.
        is_up: Whether it can be reached.
        down_since: Since when not.
        lost: Why it is lost, if it is.
        epoch: Counts losses.
        held: Messages that wait for the peer to be reachable.
        waiting: How many are held or under way.
        arrives_at: When the last of those under way arrives.
        spoke: Whether `peer` has been told anything.
        late_ok: Whether what was under way at a loss may still arrive, by epoch.
    """

    name: str
    peer: Endpoint | None = None
    is_up: bool = False
    down_since: float = 0.0
    lost: CheckpointError | None = None
    epoch: int = 0
    held: deque[tuple[int, bytes]] = field(default_factory=deque)
    waiting: int = 0
    arrives_at: float = 0.0
    spoke: bool = False
    late_ok: dict[int, bool] = field(default_factory=dict)


class Fabric:
    """All networks of a world: one for each start of the job.

    Attributes:
        counts: (`messages`, `bytes` or `bulk_bytes`, None) in all; and with (token, node) instead of None what a node has heard or said;
            (`given_bytes`, (token, node)): bulk that others have read of it.
        delay_s: Adds to every message between these machines.
        delay_message: Adds to a message by its number (exploring orders); what follows it on its way waits, too.
        num_sent: Messages so far.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: Counter[Any] = Counter()
        self.delay_s: dict[frozenset[str], float] = {}
        self.delay_message: Callable[[int], float] | None = None
        self.num_sent = 0
        self._ends: dict[tuple[str, str], Endpoint] = {}
        self._cuts: set[frozenset[str]] = set()
        self._numbers = itertools.count(1)

    def join(self, token: str, node: str, process: Process, listeners: Listeners) -> Endpoint:
        """Return a node's end of the network of a start of the job."""
        end = Endpoint(self, token, node, process, listeners, next(self._numbers))
        self._ends[token, node] = end
        process.on_end.append(end.close)
        self.changed()
        return end

    def end(self, token: str, node: str) -> Endpoint | None:
        """Return who can be spoken to there."""
        return self._ends.get((token, node))

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two machines."""
        self.world.timeline.note("cut", f"{one} | {other}")
        self._cuts.add(frozenset((one, other)))
        self.changed()

    def heal(self) -> None:
        """Let everything pass, at its usual pace."""
        self._cuts.clear()
        self.delay_s.clear()
        self.changed()

    def heal_cut(self, one: str, other: str) -> None:
        """Let everything pass between two machines."""
        self._cuts.discard(frozenset((one, other)))
        self.changed()

    def at_its_pace(self, one: str, other: str) -> None:
        """Messages between two machines take their usual time again."""
        self.delay_s.pop(frozenset((one, other)), None)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes."""
        return frozenset((one, other)) in self._cuts

    def changed(self) -> None:
        """Somebody came, went, stopped or went on, or a cut was made or healed."""
        for end in list(self._ends.values()):
            for link in end.links.values():
                end.look(link)

    def forget(self, end: Endpoint) -> None:
        """An endpoint is closed."""
        if self._ends.get((end.token, end.node)) is end:
            del self._ends[end.token, end.node]
        self.changed()


class Endpoint:
    """One node's end: a `nodes.MeetingNetwork`."""

    def __init__(
        self, fabric: Fabric, token: str, node: str, process: Process, listeners: Listeners, number: int
    ) -> None:
        self._fabric, self.token, self._node, self.process = fabric, token, node, process
        self._listeners, self.number = listeners, number
        self._timeline, self._setting = fabric.world.timeline, fabric.world.setting
        self._limits = ControlSettings(peer_timeout_s=self._setting.wire["peer_timeout_s"])
        self.links: dict[str, Link] = {}
        self.providers: dict[str, Provider] = {}
        self._heard: dict[str, int] = {}
        self.closed = False

    @property
    def node(self) -> str:
        """See `seam.Network`."""
        return self._node

    @property
    def address(self) -> str:
        """Where it listens; of no use here."""
        return f"{self._node}:7000"

    def meet(self, addresses: dict[str, Any]) -> None:
        """Learn where the others are: here by name."""

    def watch(self, node: str) -> None:
        """See `seam.Network`."""
        if node != self._node:
            self.look(self._link(node))

    def send(self, node: str, payload: bytes) -> None:
        """See `seam.Network`."""
        check_size(payload)
        if self.closed:
            raise ConfigurationError("the network of this node is closed", node=self._node)
        link = self._link(node)
        if link.lost is not None:
            raise AgentUnavailableError(link.lost.message, node=node, hint=link.lost.hint)
        if link.waiting >= self._limits.outbox_messages:
            raise AgentUnavailableError(f"{link.waiting} messages wait already for the agent of node {node}", node=node)
        link.waiting += 1
        self.look(link)
        if not link.is_up or link.held:
            link.held.append((link.epoch, payload))
        else:
            self._carry(link, link.epoch, payload)

    def broadcast(self, payload: bytes, nodes: Iterable[str] | None = None) -> dict[str, CheckpointError]:
        """See `seam.Network`."""
        failed: dict[str, CheckpointError] = {}
        for node in list(self.links) if nodes is None else nodes:
            try:
                self.send(node, payload)
            except AgentUnavailableError as exc:
                failed[node] = exc
        return failed

    def read_into(self, node: str, kind: str, name: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        """See `seam.Network`; in a fiber it takes time, in which the way can be lost, else it happens at once. There is no CRC32."""
        self._take_time(deadline_s, node)
        peer = self._peer_for_bulk(node, deadline_s)
        provider = peer.providers.get(kind)
        source = provider(self._node, name) if provider is not None else None
        if source is None or offset + len(view) > source.size:
            raise TornFileError(f"there is no {kind} {name!r} on node {node}", node=node)
        block = self._fabric.world.shared.blocks[source.fd]  # which lives on, should its agent let go of it
        self._take_time(deadline_s, node)
        peer = self._peer_for_bulk(node, deadline_s)
        begin = source.offset + offset
        view[:] = block.view[begin : begin + len(view)]
        counts = self._fabric.counts
        for who in (None, (self.token, self._node), (self.token, node)):
            counts["bulk_bytes", who] += len(view)
        counts["given_bytes", (self.token, node)] += len(view)
        return 0

    def _take_time(self, deadline_s: float, node: str) -> None:
        fiber = fibers.current()
        if fiber is not None:
            extra_s = self._fabric.delay_s.get(frozenset((self._node, node)), 0.0)
            fiber.pause(min(deadline_s, self._timeline.between(*self._setting.network_s) + extra_s))

    def _peer_for_bulk(self, node: str, deadline_s: float) -> Endpoint:
        peer = None if self.closed else self._reachable(node)
        if peer is None:
            fiber = fibers.current()
            if fiber is not None:
                fiber.pause(min(deadline_s, self._limits.peer_timeout_s))
            raise AgentUnavailableError(f"the agent of node {node} does not answer", node=node)
        return peer

    def write_from(
        self, node: str, kind: str, name: str, offset: int, view: memoryview, *, total: int, deadline_s: float
    ) -> int:
        """Nothing is written to other nodes in this world."""
        raise AgentUnavailableError("this world carries nothing written", node=node)

    def provide(self, kind: str, provider: Provider) -> None:
        """See `seam.Network`."""
        self.providers[kind] = provider

    def accept(self, kind: str, sink: Sink) -> None:
        """See `seam.Network`; nobody writes here."""

    def set_incarnation(self, incarnation: int) -> None:
        """See `seam.Network`; here each start of the job has a network of its own."""

    def close(self) -> None:
        """See `seam.Network`."""
        if not self.closed:
            self.closed = True
            self._fabric.forget(self)

    # -- the peers ---------------------------------------------------------------------------------------------------------

    def _link(self, node: str) -> Link:
        if node not in self.links:
            self.links[node] = Link(node)
            self.links[node].down_since = self._timeline.now
            self._expect_loss(self.links[node])
        return self.links[node]

    def _reachable(self, node: str) -> Endpoint | None:
        peer = self._fabric.end(self.token, node)
        if peer is None or peer.closed or not peer.process.alive or peer.process.stopped:
            return None
        return None if self._fabric.is_cut(self._node, node) else peer

    def look(self, link: Link) -> None:
        """See whether a peer can be reached now, and what follows."""
        if self.closed or not self.process.alive:
            return
        peer = self._reachable(link.name)
        if peer is None:
            if link.is_up:
                link.is_up, link.down_since = False, self._timeline.now
                self._expect_loss(link)
            return
        if link.is_up and link.peer is peer:
            return
        if link.peer is not None and link.peer is not peer and link.spoke and link.lost is None:
            # Another process: it has not got what was sent to the one before.
            link.peer, link.spoke, link.is_up = peer, False, False
            why = AgentUnavailableError(f"the agent of node {link.name} was started again", node=link.name)
            self._timeline.at(self._timeline.between(0.001, 0.3), self.process, lambda: self._restarted(link, why))
            return
        link.peer = peer
        if link.lost is not None:
            self._timeline.at(self._timeline.between(0.01, BACK_S), self.process, lambda: self._back(link))
            return
        link.is_up = True
        while link.held:
            self._carry(link, *link.held.popleft())

    def _restarted(self, link: Link, why: CheckpointError) -> None:
        self._lose(link, why)
        self.look(link)

    def _expect_loss(self, link: Link) -> None:
        since = link.down_since
        patience_s = self._limits.peer_timeout_s + self._timeline.between(0.0, HEARTBEAT_S)

        def due() -> None:
            if not self.closed and not link.is_up and link.down_since == since and link.lost is None:
                text = f"the agent of node {link.name} has not answered for {patience_s:.1f} s"
                self._lose(link, AgentUnavailableError(text, node=link.name))
                self.look(link)

        self._timeline.at(patience_s, self.process, due)

    def _lose(self, link: Link, why: CheckpointError) -> None:
        if link.lost is not None:
            return
        link.late_ok[link.epoch] = self._timeline.chance.random() < 0.5
        link.epoch += 1
        link.held.clear()
        link.waiting, link.lost, link.is_up, link.spoke = 0, why, False, False
        self._timeline.note("lost", f"{self._node} has lost {link.name}")
        self._listeners.on_lost(link.name, why)

    def _back(self, link: Link) -> None:
        if self.closed or link.lost is None or self._reachable(link.name) is None:
            return
        link.lost = None
        self._timeline.note("back", f"{self._node} reaches {link.name} again")
        self._listeners.on_back(link.name)
        self.look(link)

    # -- messages --------------------------------------------------------------------------------------------------------

    def _carry(self, link: Link, epoch: int, payload: bytes) -> None:
        peer = link.peer
        if peer is None:
            return
        extra_s = self._fabric.delay_s.get(frozenset((self._node, link.name)), 0.0) if self._fabric.delay_s else 0.0
        self._fabric.num_sent += 1
        if self._fabric.delay_message is not None:
            extra_s += self._fabric.delay_message(self._fabric.num_sent)
        when = self._timeline.now + self._timeline.between(*self._setting.network_s) + extra_s
        link.arrives_at = max(link.arrives_at, when)
        link.spoke = True
        self._timeline.at(
            link.arrives_at - self._timeline.now, peer.process, lambda: self._arrive(link, epoch, payload, peer)
        )

    def _arrive(self, link: Link, epoch: int, payload: bytes, peer: Endpoint) -> None:
        given_up = epoch != link.epoch
        if peer.closed or (given_up and not link.late_ok.get(epoch, False)):
            return
        if not given_up and self._fabric.is_cut(self._node, link.name):
            link.held.append((epoch, payload))
            return
        if not given_up:
            link.waiting -= 1
        peer.take(self, epoch, payload)

    def take(self, sender: Endpoint, epoch: int, payload: bytes) -> None:
        """A message arrives."""
        number = sender.number << 32 | epoch
        if number < self._heard.get(sender.node, 0):
            return  # its sender has given it up, and has spoken since
        self._heard[sender.node] = number
        counts = self._fabric.counts
        for who in (None, (self.token, self._node), (self.token, sender.node)):
            counts["messages", who] += 1
            counts["bytes", who] += len(payload)
        self._listeners.on_message(sender.node, payload)
