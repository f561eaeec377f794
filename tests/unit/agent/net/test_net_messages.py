"""Control messages over real sockets: cuts, duplicates, losses."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time

import pytest
from net_proxy import wait_for
from net_raw import Target
from net_world import Events, RealWorld, make_peers, settings_for

from safehold.agent.net.addresses import Address
from safehold.agent.net.seam import Listeners
from safehold.clock import new_token
from safehold.errors import AgentUnavailableError, ConfigurationError
from safehold.testing.network_suite import Log


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_messages_through_a_connection_that_is_cut_at_random(seed: int) -> None:
    """Each arrives, once, in order, though answers are cut as well as requests."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    world = RealWorld(["a", "b"], settings=settings_for(10.0, body_timeout_s=5.0, header_timeout_s=5.0))
    proxy = world.proxies["a", "b"]
    proxy.cut_after = lambda: chance.choice((chance.randrange(100, 1500), chance.randrange(1500, 10_000)))
    sent = [b"%d" % number + bytes(chance.randrange(300)) for number in range(100)]
    log = world.logs["b"]
    for number, payload in enumerate(sent, 1):
        world.nodes["a"].send("b", payload)
        if chance.random() < 0.2:
            assert wait_for(lambda: len(log.messages) >= number)
    assert wait_for(lambda: len(log.messages) >= len(sent))
    assert [payload for _, payload in log.messages] == sent
    assert proxy.num_cuts > 3 and not world.logs["a"].lost
    world.close()


def test_a_full_outbox_says_so_at_once() -> None:
    log = Log()
    settings = settings_for(10.0)
    peers = make_peers("a", ["a", "b"], log, settings=settings)
    peers.meet({"b": Address("127.0.0.1", 9)})  # nobody listens there
    with pytest.raises(AgentUnavailableError, match="wait already for the agent of node b"):
        for _ in range(settings.control.outbox_messages + 1):
            peers.send("b", b"x")
    peers.close()


def test_listeners_that_fail_harm_nobody() -> None:
    events, log = Events(), Log()

    def fail(node: str, payload: bytes) -> None:
        log.messages.append((node, payload))
        raise RuntimeError("a bug")

    listeners = Listeners(on_message=fail, on_lost=lambda node, error: None, on_back=lambda node: None)
    peers = make_peers("a", ["a"], log, listeners=listeners, events=events.stream)
    peers.send("a", b"1")
    peers.send("a", b"2")
    assert wait_for(lambda: len(log.messages) == 2 and len(events) == 2)
    assert events[0].fields["error"] == "RuntimeError: a bug"
    peers.close()


def test_nothing_is_told_after_close() -> None:
    """What waits while `close` is called is not handed over any more."""
    log, go_on = Log(), threading.Event()

    def slow(node: str, payload: bytes) -> None:
        log.messages.append((node, payload))
        go_on.wait(5)

    listeners = Listeners(on_message=slow, on_lost=lambda node, error: None, on_back=lambda node: None)
    peers = make_peers("a", ["a"], log, listeners=listeners)
    peers.send("a", b"1")
    peers.send("a", b"2")
    assert wait_for(lambda: bool(log.messages))
    closing = threading.Thread(target=peers.close)
    closing.start()
    assert wait_for(lambda: peers._closed)
    go_on.set()
    closing.join(5)
    assert not closing.is_alive() and log.messages == [("a", b"1")]


def test_an_answer_of_another_node_is_none() -> None:
    """Addresses were mixed up: nothing is delivered to the wrong node, and who sends hears why."""
    world = RealWorld(["a", "b", "c"], settings=settings_for(0.4))
    world.peers["a"].meet({"b": world.peers["c"].address})
    world.nodes["a"].send("b", b"for b")
    assert wait_for(lambda: bool(world.logs["a"].lost))
    error = world.logs["a"].lost[0][1]
    assert "this is node c" in str(error) and "another node answers" in str(error.hint)
    assert not world.logs["c"].messages and not world.logs["b"].messages
    world.close()


def test_a_node_that_moved_is_found() -> None:
    world = RealWorld(["a", "b"], settings=settings_for(10.0))
    world.peers["a"].meet({"b": Address("127.0.0.1", 9)})
    world.nodes["a"].send("b", b"1")
    time.sleep(0.05)
    world.peers["a"].meet({"b": world.peers["b"].address})
    assert wait_for(lambda: bool(world.logs["b"].messages)) and not world.logs["a"].lost
    world.close()


def test_strangers_cannot_be_met() -> None:
    peers = make_peers("a", ["a", "b"], Log())
    with pytest.raises(ConfigurationError, match="z"):
        peers.meet({"z": Address("127.0.0.1", 9)})
    with pytest.raises(AgentUnavailableError, match="not known yet where node b is"):
        peers.send("b", b"")
    assert list(peers.broadcast(b"")) == ["b"]
    peers.close()


def test_silence_on_one_side_is_broken_by_the_other() -> None:
    """Two that hear each other's heartbeats do not both ask; nobody is lost for it."""
    world = RealWorld(["a", "b"], settings=settings_for(0.4))
    world.nodes["a"].watch("b")
    world.nodes["b"].watch("a")
    time.sleep(0.6)
    assert not world.logs["a"].lost and not world.logs["b"].lost
    world.close()


def test_late_requests_of_what_was_given_up_are_refused(target: Target) -> None:
    origin = new_token()
    assert target.ask(target.messages([b"1"], X_Safehold_Session=f"{origin}.1")).status == 200
    assert target.ask(target.messages([], X_Safehold_Session=f"{origin}.2")).status == 200
    late = target.ask(target.messages([b"late"], first=2, X_Safehold_Session=f"{origin}.1"))
    assert (late.status, late.facts["reason"]) == (410, "session")
    assert [payload for _, payload in target.log.messages] == [b"1"]


def test_many_nodes_have_room() -> None:
    """A lead keeps a connection to and from each of thousands of nodes, whatever the soft limit of descriptors was."""
    code = (
        "import resource, sys\n"
        "from safehold.agent.net.peers import make_room\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 1 << 20) if hard > 0 else 1 << 20))\n"
        "make_room(100)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 712\n"
        "make_room(10)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 712\n"
        "make_room(1 << 30)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "assert soft == hard\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_agent_alone_does_not_pay_for_the_network() -> None:
    """Importing all of the agent but this room loads neither aiohttp nor asyncio's servers."""
    code = (
        "import importlib, pkgutil, sys, safehold.agent\n"
        "for entry in pkgutil.iter_modules(safehold.agent.__path__, 'safehold.agent.'):\n"
        "    if entry.name != 'safehold.agent.net':\n"
        "        importlib.import_module(entry.name)\n"
        "assert not {'aiohttp', 'asyncio', 'ssl'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
