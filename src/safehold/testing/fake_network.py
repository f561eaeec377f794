"""A network of agents without sockets, threads or time of its own: what can go wrong goes wrong by a seed, and the same each time.

    world = FakeNetwork(seed=7, loss=0.1, duplicates=0.1)
    a = world.join("a", listeners_of_a)
    b = world.join("b", listeners_of_b)
    a.send("b", b"hello")
    world.run(1.0)              # a virtual second; listeners are called from here
    world.cut("a", "b")         # nothing passes either way

Invariants: keeps the contract of `agent.net.seam`, with the outbox and the inbox of the real network: loss, delay and duplication are
those of requests and answers beneath them. All runs in the calling thread. A call that waits (`read_into`, `write_from`) lets virtual
time pass, for everybody, so listeners may be called within it.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from safehold.agent.net.answers import error_of, restarted, unreachable
from safehold.agent.net.inbox import Inbox
from safehold.agent.net.outbox import Batch, ControlSettings, Outbox, check_size
from safehold.agent.net.seam import Incoming, Landing, Listeners, Provider, Sink, Source
from safehold.agent.net.wire import Refusal, check_kind, check_name
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    SupersededError,
    TornFileError,
)
from safehold.format.crc import crc

CHUNK_BYTES = 1 << 20
_POLL_S = 0.01


class FakeNetwork:
    """The world that nodes join; see the module.

    Args:
        seed: Of everything that happens by chance.
        latency_s: Shortest and longest time that a request or an answer is under way.
        loss: Share of requests and of answers that are lost.
        duplicates: Share of requests that arrive twice.
        bandwidth_bytes_s: Of bulk bytes.
        settings: Of the nodes' outboxes.

    Attributes:
        now: Virtual seconds.
        counts: Of `requests`, `messages` (handed to listeners), `message_bytes`, `bulk_bytes`, `lost`, `duplicated`.
    """

    def __init__(
        self,
        *,
        seed: int,
        latency_s: tuple[float, float] = (0.0002, 0.002),
        loss: float = 0.0,
        duplicates: float = 0.0,
        bandwidth_bytes_s: float = 1e9,
        settings: ControlSettings | None = None,
    ) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.random = random.Random(seed)
        self.settings = settings or ControlSettings()
        self.latency_s, self.loss, self.duplicates, self.bandwidth_bytes_s = (
            latency_s,
            loss,
            duplicates,
            bandwidth_bytes_s,
        )
        self._nodes: dict[str, FakeNode] = {}
        self._cut: set[frozenset[str]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def join(self, node: str, listeners: Listeners, *, incarnation: int = 1) -> FakeNode:
        """Return a node's end of the network; a node that was here before and was closed starts anew, knowing nothing."""
        old = self._nodes.get(node)
        if old is not None and not old.closed:
            raise ConfigurationError(f"node {node} is here already")
        fresh = self._nodes[node] = FakeNode(self, node, listeners, incarnation)
        return fresh

    @property
    def nodes(self) -> list[str]:
        """All that ever joined."""
        return sorted(self._nodes)

    def node(self, name: str) -> FakeNode | None:
        """Return a node that is here."""
        found = self._nodes.get(name)
        return found if found is not None and not found.closed else None

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two nodes."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Let everything pass again."""
        self._cut.discard(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes."""
        return frozenset((one, other)) in self._cut

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), work))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._step()
        self.now = max(self.now, end)

    def run_until(self, condition: Callable[[], bool], *, limit_s: float = 60.0) -> bool:
        """Let time pass until something is so, or the limit is reached; returns whether it is."""
        end = self.now + limit_s
        while not condition():
            if not self._events or self._events[0][0] > end:
                self.now = max(self.now, end)
                return condition()
            self._step()
        return True

    def _step(self) -> None:
        when, _, work = heapq.heappop(self._events)
        self.now = max(self.now, when)
        work()

    def carry(self, sender: str, receiver: str, work: Callable[[], None]) -> None:
        """Bring a request or an answer to the other side, perhaps."""
        if self.random.random() < self.loss:
            self.counts["lost"] += 1
            return
        self.at(self.random.uniform(*self.latency_s), lambda: None if self.is_cut(sender, receiver) else work())


@dataclass(slots=True)
class _Link:
    """What a node keeps of a peer it sends to."""

    box: Outbox
    attempt: int = 0
    busy: bool = False
    failures: int = 0
    watched: bool = False
    superseded: int = 0
    refusal: CheckpointError | None = None
    heard_at: float = 0.0


class FakeNode:
    """One node's end: a `seam.Network`."""

    def __init__(self, world: FakeNetwork, node: str, listeners: Listeners, incarnation: int) -> None:
        self._world, self._node, self._listeners, self.incarnation = world, node, listeners, incarnation
        self._inbox = Inbox()
        self._links: dict[str, _Link] = {}
        self.providers: dict[str, Provider] = {}
        self.sinks: dict[str, Sink] = {}
        self.closed = False

    # -- seam.Network --------------------------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """Name of this node."""
        return self._node

    def send(self, node: str, payload: bytes) -> None:
        """See `seam.Network`."""
        self._check_open()
        if node == self._node:
            check_size(payload)
            self._world.at(0.0, lambda: self._hand_over(node, payload))
            return
        link = self._link(node)
        try:
            link.box.put(payload)
        except OverflowError as exc:
            self._world.at(0.0, lambda: self._overflowed(node, link))
            self._attempt_soon(node, link)
            raise AgentUnavailableError(str(exc), node=node, hint="it is slow, or not there") from exc
        link.watched = True
        self._attempt_soon(node, link)

    def broadcast(self, payload: bytes, nodes: Iterable[str] | None = None) -> dict[str, CheckpointError]:
        """See `seam.Network`."""
        failed: dict[str, CheckpointError] = {}
        for node in [name for name in self._world.nodes if name != self._node] if nodes is None else nodes:
            try:
                self.send(node, payload)
            except AgentUnavailableError as exc:
                failed[node] = exc
        return failed

    def watch(self, node: str) -> None:
        """See `seam.Network`."""
        self._check_open()
        if node != self._node:
            link = self._link(node)
            link.watched = True
            self._rest(node, link)

    def provide(self, kind: str, provider: Provider) -> None:
        """See `seam.Network`."""
        self.providers[check_kind(kind)] = provider

    def accept(self, kind: str, sink: Sink) -> None:
        """See `seam.Network`."""
        self.sinks[check_kind(kind)] = sink

    def set_incarnation(self, incarnation: int) -> None:
        """See `seam.Network`."""
        self.incarnation = incarnation

    def close(self) -> None:
        """See `seam.Network`."""
        self.closed = True

    # -- messages ------------------------------------------------------------------------------------------------------

    def _link(self, node: str) -> _Link:
        if node not in self._world.nodes:
            raise ConfigurationError(f"node {node} is not known to be anywhere", node=node)
        if node not in self._links:
            origin = f"{self._world.random.getrandbits(128):032x}"
            self._links[node] = _Link(Outbox(node, origin, self._world.settings))
        return self._links[node]

    def _attempt_soon(self, node: str, link: _Link) -> None:
        if not link.busy:
            link.busy = True
            self._world.at(0.0, lambda: self._attempt(node, link))

    def _attempt(self, node: str, link: _Link) -> None:
        if self.closed:
            return
        world = self._world
        batch = link.box.begin(world.now)
        link.attempt += 1
        attempt = link.attempt
        world.counts["requests"] += 1
        arrive: Callable[[], None] = lambda: self._arrive(node, link, attempt, batch)  # noqa: E731
        world.carry(self._node, node, arrive)
        if world.random.random() < world.duplicates:
            world.counts["duplicated"] += 1
            world.carry(self._node, node, arrive)
        size = sum(map(len, batch.payloads))
        world.at(link.box.attempt_s(world.now, size), lambda: self._failed(node, link, attempt, "no answer in time"))

    def _arrive(self, node: str, link: _Link, attempt: int, batch: Batch) -> None:
        """The request reaches the peer, or nobody."""
        peer, world = self._world.node(node), self._world
        if peer is None:
            return
        incarnation = self.incarnation
        try:
            if incarnation < peer.incarnation:
                text = f"incarnation {peer.incarnation} owns the run now; this request is of {incarnation}"
                raise Refusal(409, "incarnation", text, current=peer.incarnation)
            if self._node in peer._links:
                peer._links[self._node].heard_at = world.now
            new, _ = peer._inbox.take(self._node, batch.session, batch.first, batch.payloads)
        except Refusal as exc:
            refusal = exc
            world.carry(node, self._node, lambda: self._refused(node, link, attempt, refusal))
            return
        for payload in new:
            peer._hand_over(self._node, payload)
        world.carry(node, self._node, lambda: self._answered(node, link, attempt, batch))

    def _overflowed(self, node: str, link: _Link) -> None:
        if not self.closed and (error := link.box.overflowed()) is not None:
            self._listeners.on_lost(node, error)

    def _hand_over(self, sender: str, payload: bytes) -> None:
        if not self.closed:
            self._world.counts["messages"] += 1
            self._world.counts["message_bytes"] += len(payload)
            self._listeners.on_message(sender, payload)

    def _answered(self, node: str, link: _Link, attempt: int, batch: Batch) -> None:
        if self.closed or attempt != link.attempt or not link.busy:
            return
        link.busy, link.failures, link.refusal = False, 0, None
        if link.box.answered(batch):
            self._overflowed(node, link)
            self._listeners.on_back(node)
        if len(link.box):
            self._attempt_soon(node, link)
        else:
            self._rest(node, link)

    def _rest(self, node: str, link: _Link) -> None:
        """Ask again whether the peer is there, after a heartbeat of silence."""
        attempt, since = link.attempt, self._world.now

        def beat() -> None:
            if self.closed or link.busy or attempt != link.attempt:
                return
            if max(since, link.heard_at) + self._world.settings.heartbeat_s > self._world.now + 1e-9:
                self._rest(node, link)
            else:
                self._attempt_soon(node, link)

        wait_s = max(since, link.heard_at) + self._world.settings.heartbeat_s - self._world.now
        self._world.at(max(wait_s, _POLL_S), beat)

    def _refused(self, node: str, link: _Link, attempt: int, refusal: Refusal) -> None:
        if self.closed or attempt != link.attempt or not link.busy:
            return
        facts = {"reason": refusal.reason, "text": refusal.text, **refusal.facts}
        if refusal.reason in ("gap", "session"):
            self._lose(node, link, restarted(node, "its address"))
            self._failed(node, link, attempt, "it was started again")
            return
        current = refusal.facts.get("current", 0)
        if current > link.superseded:
            link.superseded = current
            self._listeners.on_superseded(node, current)
        link.refusal = error_of(node, "its address", refusal.status, facts)
        self._failed(node, link, attempt, refusal)

    def _failed(self, node: str, link: _Link, attempt: int, cause: object) -> None:
        if self.closed or attempt != link.attempt or not link.busy:
            return
        world = self._world
        link.attempt += 1  # a late answer is nobody's
        link.failures += 1
        waited_s = link.box.overdue_s(world.now)
        if waited_s is not None:
            self._lose(node, link, link.refusal or unreachable(node, "its address", waited_s, cause))
        world.at(link.box.backoff_s(link.failures, world.random.random()), lambda: self._attempt(node, link))

    def _lose(self, node: str, link: _Link, error: CheckpointError) -> None:
        link.refusal = None
        if link.box.lose(error):
            self._listeners.on_lost(node, error)

    # -- bulk ----------------------------------------------------------------------------------------------------------

    def read_into(self, node: str, kind: str, name: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        """See `seam.Network`."""
        target = view.cast("B")
        check_kind(kind)
        if not len(target):
            return crc(b"")
        peer = self._reach(node, deadline := self._world.now + deadline_s)
        self._refuse_if_older(peer)
        source = _ask(peer, self._node, kind, name)
        if source is None:
            raise TornFileError(
                f"the agent of node {node} does not have what was asked for: {kind} {name!r}", node=node
            )
        try:
            if offset < 0 or offset + len(target) > source.size:
                text = f"bytes {offset} to {offset + len(target) - 1} were asked for, of {source.size}"
                raise TornFileError(f"the agent of node {node} does not have what was asked for: {text}", node=node)
            for start in range(0, len(target), CHUNK_BYTES):
                chunk = target[start : start + CHUNK_BYTES]
                self._move(node, len(chunk), deadline)
                chunk[:] = os.pread(source.fd, len(chunk), source.offset + offset + start)
        finally:
            os.close(source.fd)
        return crc(target)

    def write_from(
        self, node: str, kind: str, name: str, offset: int, view: memoryview, *, total: int, deadline_s: float
    ) -> int:
        """See `seam.Network`."""
        source = view.cast("B")
        check_kind(kind)
        peer = self._reach(node, deadline := self._world.now + deadline_s)
        self._refuse_if_older(peer)
        incoming = Incoming(node=self._node, name=name, offset=offset, size=len(source), total=total)
        sink = peer.sinks.get(kind)
        landing = sink(incoming) if sink is not None else None
        if landing is None:
            text = f"the agent of node {node} does not have what was asked for: {kind} {name!r}"
            raise TornFileError(text, node=node)
        try:
            for start in range(0, len(source), CHUNK_BYTES):
                chunk = source[start : start + CHUNK_BYTES]
                self._move(node, len(chunk), deadline)
                _put(landing, start, chunk)
        except CheckpointError as exc:
            landing.failed(AgentUnavailableError(exc.message, node=self._node))
            raise
        value = crc(source)
        landing.done(value)
        return value

    def _refuse_if_older(self, peer: FakeNode) -> None:
        if self.incarnation < peer.incarnation:
            text = f"incarnation {peer.incarnation} owns the run now; this request is of {self.incarnation}"
            raise SupersededError(f"the agent of node {peer.node} refuses this one: {text}", node=peer.node)

    def _move(self, node: str, size: int, deadline: float) -> None:
        """Let the time pass that so many bytes take."""
        self._reach(node, deadline)
        self._world.run(size / self._world.bandwidth_bytes_s)
        self._world.counts["bulk_bytes"] += size

    def _reach(self, node: str, deadline: float) -> FakeNode:
        """Return the peer, once there is a way to it."""
        self._check_open()
        if node not in self._world.nodes or node == self._node:
            raise ConfigurationError(f"node {node} is not known to be anywhere", node=node)
        world, begun = self._world, self._world.now
        while True:
            peer = world.node(node)
            if world.now >= deadline:
                raise DeadlineError(f"node {node} has not sent all in time", node=node)
            if peer is not None and not world.is_cut(self._node, node):
                if world.random.random() >= world.loss:
                    return peer
            elif world.now - begun >= world.settings.peer_timeout_s:
                raise unreachable(node, "its address", world.now - begun, "no answer")
            world.run(min(_POLL_S, max(deadline - world.now, 1e-6)))

    def _check_open(self) -> None:
        if self.closed:
            raise ConfigurationError("the network of this node is closed", node=self._node)


def _ask(peer: FakeNode, node: str, kind: str, name: str) -> Source | None:
    provider = peer.providers.get(kind)
    try:
        check_name(name)
    except Refusal:
        return None
    return provider(node, name) if provider is not None else None


def _put(landing: Landing, start: int, chunk: memoryview) -> None:
    if landing.view is not None:
        landing.view.cast("B")[start : start + len(chunk)] = chunk
    else:
        os.pwrite(landing.fd, chunk, landing.offset + start)
