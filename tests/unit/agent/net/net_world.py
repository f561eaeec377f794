"""Real networks on loopback, for tests."""

from __future__ import annotations

from typing import Any

from net_proxy import Proxy, wait_for

from safehold.agent.net.bulk import BulkSettings
from safehold.agent.net.connections import Limits
from safehold.agent.net.outbox import ControlSettings
from safehold.agent.net.peers import NetworkSettings, Peers
from safehold.agent.net.transfer import Patience
from safehold.events import Event, EventStream
from safehold.testing.network_suite import Log, World

TOKEN, RUN = "0123456789abcdef0123456789abcdef", "run 1/é"


def settings_for(peer_timeout_s: float, **limits: Any) -> NetworkSettings:
    """Small times and bounds."""
    limits = {"max_connections": 32, "max_strangers": 8, "header_timeout_s": 0.3, "body_timeout_s": 0.3} | limits
    return NetworkSettings(
        control=ControlSettings(peer_timeout_s=peer_timeout_s, heartbeat_s=0.05),
        bulk=BulkSettings(peer_timeout_s=peer_timeout_s, stall_s=0.3),
        patience=Patience(start_s=0.4, stall_s=0.3),
        connections=Limits(**limits),
    )


class Events(list[Event]):
    """Events of a node, and the stream that writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = EventStream("agent")
        self.stream.subscribe(self.append)

    def refused(self) -> list[str]:
        return [str(event.fields["refused"]) for event in self if "refused" in event.fields]


def make_peers(node: str, nodes: list[str], log: Log, **changes: Any) -> Peers:
    settings: dict[str, Any] = {
        "nodes": nodes,
        "bind": "127.0.0.1",
        "token": TOKEN,
        "run_id": RUN,
        "incarnation": 1,
        "listeners": log.listeners(),
        "events": EventStream("agent"),
        "settings": settings_for(0.5),
    }
    return Peers(node, **(settings | changes))


class RealWorld(World):
    """Nodes on loopback; each reaches each other through a proxy of its own, which can be cut."""

    def __init__(self, names: list[str], **changes: Any) -> None:
        self._names, self._changes = names, changes
        self.nodes, self.logs = {}, {}
        self.peers: dict[str, Peers] = {}
        for name in names:
            self._start(name)
        self.proxies = {
            (one, other): Proxy(self.peers[other].address) for one in names for other in names if one != other
        }
        for name in names:
            self._meet(name)

    def _start(self, name: str, port: int = 0) -> None:
        self.logs[name] = Log()
        self.peers[name] = make_peers(name, self._names, self.logs[name], port=port, **self._changes)
        self.nodes[name] = self.peers[name]

    def _meet(self, name: str) -> None:
        self.peers[name].meet({other: self.proxies[name, other].address for other in self._names if other != name})

    def until(self, condition: Any) -> bool:
        return wait_for(condition)

    def cut(self, one: str, other: str) -> None:
        self.proxies[one, other].cut()
        self.proxies[other, one].cut()

    def heal(self, one: str, other: str) -> None:
        self.proxies[one, other].heal()
        self.proxies[other, one].heal()

    def restart(self, node: str) -> None:
        port = self.peers[node].address.port
        self.peers[node].close()
        self._start(node, port)
        self._meet(node)

    def close(self) -> None:
        for peers in self.peers.values():
            peers.close()
        for proxy in self.proxies.values():
            proxy.close()
