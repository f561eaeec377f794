"""The network of one node: its server, and a client for each other node. The real `seam.Network`.

Invariants: one thread runs the loop of server and senders, however many nodes there are; bulk bytes are moved by the threads that ask for
them, and by a few of the server's. Listeners are called from the loop's thread, one at a time, and never after `close`. Peers are watched
once something was sent to them, or on request, so that an ordinary node of a large job keeps an eye on its lead and on nobody else.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ParamSpec

import aiohttp

from safehold.agent.net.addresses import Address
from safehold.agent.net.bulk import BulkSettings
from safehold.agent.net.calls import Handler
from safehold.agent.net.client import PeerClient, http_client
from safehold.agent.net.connections import Limits
from safehold.agent.net.identity import Identity
from safehold.agent.net.loop import LoopThread
from safehold.agent.net.outbox import ControlSettings, check_size
from safehold.agent.net.seam import Listeners, Provider, Sink
from safehold.agent.net.server import NetworkServer
from safehold.agent.net.tls import TlsFiles, client_context, server_context
from safehold.agent.net.transfer import Patience
from safehold.errors import AgentUnavailableError, CheckpointError, ConfigurationError
from safehold.events import EventStream

log = logging.getLogger("safehold")
P = ParamSpec("P")

CONNECTIONS_PER_NODE, SPARE_CONNECTIONS = 6, 64
SPARE_DESCRIPTORS = 512
NODES_PER_HEARTBEAT_S = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Times and bounds; `connections` None: as many as the nodes need."""

    control: ControlSettings = field(default_factory=ControlSettings)
    bulk: BulkSettings = field(default_factory=BulkSettings)
    patience: Patience = field(default_factory=Patience)
    connections: Limits | None = None


class Peers:
    """See the module. It listens from the constructor on; with `meet` it learns where the others are.

    Args:
        node: This node's name.
        nodes: The names of all nodes, this one included.
        bind: IP address, name of an interface, or host name to listen at.
        port: 0: any that is free; `address` says which.
        token: Shared by the agents of the run, 16 characters or more; `clock.new_token` makes one.
        run_id: Of the run.
        incarnation: The current one.
        listeners: Who is told of messages and losses.
        events: Where refusals are told.
        metrics: Gives the text of `/v1/metrics`.
        tls: Files for TLS; None: no TLS, for networks that can be trusted.
        settings: Times and bounds.

    Raises:
        ConfigurationError: It cannot listen there, or TLS or the token is no good.
    """

    def __init__(
        self,
        node: str,
        *,
        nodes: Iterable[str],
        bind: str,
        port: int = 0,
        token: str,
        run_id: str,
        incarnation: int,
        listeners: Listeners,
        events: EventStream,
        metrics: Callable[[], str] = lambda: "",
        tls: TlsFiles | None = None,
        settings: NetworkSettings | None = None,
    ) -> None:
        self._node, self._nodes = node, frozenset(nodes) | {node}
        self._settings = _for_so_many(settings or NetworkSettings(), len(self._nodes))
        self._tls = client_context(tls) if tls is not None else None
        self._identity = Identity(node=node, token=token, run_id=run_id, incarnation=incarnation)
        self._lock = threading.Lock()
        self._peers: dict[str, PeerClient] = {}
        self._closed = False
        self._events = events
        self._listeners = Listeners(
            on_message=self._guarded(listeners.on_message),
            on_lost=self._guarded(listeners.on_lost),
            on_back=self._guarded(listeners.on_back),
            on_superseded=self._guarded(listeners.on_superseded),
        )
        make_room(self._settings.connections.max_connections if self._settings.connections else 0)
        self._thread = LoopThread()
        try:
            self._server = NetworkServer(
                node=node,
                bind=bind,
                port=port,
                token=token,
                run_id=run_id,
                incarnation=lambda: self._identity.incarnation,
                on_message=self._listeners.on_message,
                on_heard=self._heard,
                metrics=metrics,
                thread=self._thread,
                events=events,
                tls=server_context(tls) if tls is not None else None,
                limits=self._settings.connections,
                patience=self._settings.patience,
            )
            self._server.know(self._nodes)
            self._http: aiohttp.ClientSession = self._thread.call(self._open())
        except BaseException:
            self._thread.close()
            raise

    async def _open(self) -> aiohttp.ClientSession:
        return http_client(self._tls)

    @property
    def node(self) -> str:
        """Name of this node."""
        return self._node

    @property
    def address(self) -> Address:
        """Where this node listens."""
        return self._server.address

    @property
    def server(self) -> NetworkServer:
        """The server, for its counts."""
        return self._server

    def meet(self, addresses: Mapping[str, Address]) -> None:
        """Learn where other nodes are; again where one has moved (an agent that was started anew, a node that was replaced).

        Raises:
            ConfigurationError: A name is none of the job's nodes.
        """
        strangers = sorted(set(addresses) - self._nodes)
        if strangers:
            raise ConfigurationError(f"{', '.join(strangers)}: no nodes of this job", node=self._node)
        with self._lock:
            self._check_open()
            for node, address in addresses.items():
                if node == self._node:
                    continue
                if (peer := self._peers.get(node)) is None:
                    self._peers[node] = self._new_peer(node, address)
                elif peer.bulk.address != address:
                    peer.bulk.address = address
                    self._thread.post(peer.sender.move, address)

    def _new_peer(self, node: str, address: Address) -> PeerClient:
        return PeerClient(
            node,
            address,
            identity=self._identity,
            http=self._http,
            tls=self._tls,
            listeners=self._listeners,
            control=self._settings.control,
            bulk=self._settings.bulk,
            loop=self._thread.loop,
        )

    # -- seam.Network --------------------------------------------------------------------------------------------------

    def send(self, node: str, payload: bytes) -> None:
        """See `seam.Network`."""
        if node == self._node:
            self._check_open()
            check_size(payload)
            self._thread.post(self._listeners.on_message, node, payload)
            return
        peer = self._peer(node)
        peer.sender.send(payload)
        if not peer.sender.started:
            self._thread.post(peer.sender.start)

    def broadcast(self, payload: bytes, nodes: Iterable[str] | None = None) -> dict[str, CheckpointError]:
        """See `seam.Network`."""
        failed: dict[str, CheckpointError] = {}
        for node in sorted(self._nodes - {self._node}) if nodes is None else nodes:
            try:
                self.send(node, payload)
            except AgentUnavailableError as exc:
                failed[node] = exc
        return failed

    def watch(self, node: str) -> None:
        """See `seam.Network`."""
        if node != self._node:
            self._thread.post(self._peer(node).sender.start)

    def read_into(self, node: str, kind: str, name: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        """See `seam.Network`."""
        return self._peer(node).bulk.read_into(kind, name, offset, view, deadline_s=deadline_s)

    def write_from(
        self, node: str, kind: str, name: str, offset: int, view: memoryview, *, total: int, deadline_s: float
    ) -> int:
        """See `seam.Network`."""
        return self._peer(node).bulk.write_from(kind, name, offset, view, total=total, deadline_s=deadline_s)

    def provide(self, kind: str, provider: Provider) -> None:
        """See `seam.Network`."""
        self._server.provide(kind, provider)

    def accept(self, kind: str, sink: Sink) -> None:
        """See `seam.Network`."""
        self._server.accept(kind, sink)

    def answer_calls(self, kind: str, handler: Handler) -> None:
        """Let other nodes ask questions; the handler is called in the network's thread, and must not block."""
        self._server.answer_calls(kind, handler)

    def set_incarnation(self, incarnation: int) -> None:
        """See `seam.Network`."""
        self._identity.incarnation = incarnation
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            self._thread.post(peer.sender.retry)

    def close(self) -> None:
        """See `seam.Network`; not from a listener."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            self._thread.post(peer.close)
        try:
            self._server.close()
            self._thread.call(self._http.close())
        except AgentUnavailableError:
            pass  # the loop hangs in a listener; its thread is a daemon
        self._thread.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _guarded(self, listener: Callable[P, None]) -> Callable[P, None]:
        """Return a listener that is not called after `close`, and whose errors harm nobody."""

        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if self._closed:
                return
            try:
                listener(*args, **kwargs)
            except Exception as exc:
                self._events.emit("network", "failed", error=f"{type(exc).__name__}: {exc}")
                log.exception("a listener of the network failed")

        return call

    def _heard(self, node: str) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.sender.heard()

    def _peer(self, node: str) -> PeerClient:
        with self._lock:
            self._check_open()
            peer = self._peers.get(node)
        if peer is None and node in self._nodes - {self._node}:
            text = f"it is not known yet where node {node} is"
            raise AgentUnavailableError(text, node=node, hint="its agent has not said where it listens; is it up?")
        if peer is None:
            other = "this node itself" if node == self._node else "not one of this job's"
            raise ConfigurationError(f"node {node} is {other}", node=node)
        return peer

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("the network of this node is closed", node=self._node)


def _for_so_many(settings: NetworkSettings, num_nodes: int) -> NetworkSettings:
    """Make bounds and heartbeats fit the number of nodes: a lead hears from all of them."""
    if settings.connections is None:
        largest = CONNECTIONS_PER_NODE * num_nodes + SPARE_CONNECTIONS
        limits = Limits(max_connections=largest, max_strangers=max(64, 2 * num_nodes))
        settings = replace(settings, connections=limits)
    slower = settings.control.heartbeat_s * max(1.0, num_nodes / NODES_PER_HEARTBEAT_S)
    return replace(settings, control=replace(settings.control, heartbeat_s=slower))


def make_room(num_connections: int) -> None:
    """Let this process have so many connections each way, as far as the system lets it: 1,024 descriptors are a common limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * num_connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
