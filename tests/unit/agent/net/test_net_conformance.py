"""Every network passes the one suite."""

from __future__ import annotations

from typing import Any

import pytest
from net_world import RealWorld, settings_for

from safehold.agent.net.outbox import ControlSettings
from safehold.agent.net.seam import Listeners
from safehold.testing.fake_network import FakeNetwork, FakeNode
from safehold.testing.network_suite import Log, NetworkSuite, World


class FakeWorld(World):
    def __init__(self, names: list[str], peer_timeout_s: float, **chances: Any) -> None:
        settings = ControlSettings(peer_timeout_s=peer_timeout_s, heartbeat_s=0.05)
        self.net = FakeNetwork(settings=settings, **chances)
        self.nodes, self.logs = {}, {}
        for name in names:
            self._join(name)

    def _join(self, name: str) -> None:
        self.logs[name] = Log()
        self.nodes[name] = self.net.join(name, self.logs[name].listeners())

    def until(self, condition: Any) -> bool:
        return self.net.run_until(condition)

    def cut(self, one: str, other: str) -> None:
        self.net.cut(one, other)

    def heal(self, one: str, other: str) -> None:
        self.net.heal(one, other)

    def restart(self, node: str) -> None:
        self.nodes[node].close()
        self._join(node)


class TestRealNetwork(NetworkSuite):
    def make_world(self, nodes: list[str], *, peer_timeout_s: float) -> World:
        return RealWorld(nodes, settings=settings_for(peer_timeout_s, body_timeout_s=5.0, header_timeout_s=5.0))


class TestFakeNetwork(NetworkSuite):
    def make_world(self, nodes: list[str], *, peer_timeout_s: float) -> World:
        return FakeWorld(nodes, peer_timeout_s, seed=1)


class TestFakeNetworkThatIsBad(NetworkSuite):
    """Requests and answers are lost, come twice and late."""

    def make_world(self, nodes: list[str], *, peer_timeout_s: float) -> World:
        return FakeWorld(nodes, peer_timeout_s, seed=2, loss=0.15, duplicates=0.3, latency_s=(0.0001, 0.01))


def history(seed: int) -> list[tuple[float, str, bytes]]:
    net = FakeNetwork(seed=seed, loss=0.1, duplicates=0.2)
    told: list[tuple[float, str, bytes]] = []
    ends: dict[str, FakeNode] = {}
    for name in "abc":
        listeners = Listeners(
            on_message=lambda node, payload: told.append((net.now, node, payload)),
            on_lost=lambda node, error: None,
            on_back=lambda node: None,
        )
        ends[name] = net.join(name, listeners)
    for index in range(50):
        for name, end in ends.items():
            end.broadcast(f"{name}{index}".encode())
        net.run(0.001)
    net.run(20)
    assert net.counts["messages"] == len(told) == 300
    assert net.counts["message_bytes"] == sum(len(payload) for _, _, payload in told)
    assert net.counts["lost"] and net.counts["duplicated"]
    return told


@pytest.mark.parametrize("seed", [1, 2])
def test_the_fake_is_the_same_each_time(seed: int) -> None:
    assert history(seed) == history(seed)


def test_the_fake_differs_by_seed() -> None:
    assert history(1) != history(2)


def test_the_suite_catches_a_careless_network() -> None:
    """A canary: a network that hands over what comes twice fails the suite."""
    suite = TestFakeNetworkThatIsBad()
    world = suite.make_world(["a", "b", "c"], peer_timeout_s=10.0)
    assert isinstance(world, FakeWorld)
    receiver = world.net.node("b")
    assert receiver is not None
    receiver._inbox.take = lambda node, session, first, payloads: (payloads, 0)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        suite.test_messages_arrive_in_order(world)
