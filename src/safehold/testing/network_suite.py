"""The suite that every network passes, real or fake: derive from it, say how a world of nodes is made, and pytest runs the rest.

class TestFakeNetwork(NetworkSuite):
    def make_world(self, nodes: list[str]) -> World:
        return FakeWorld(nodes)
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

import pytest

from safehold.agent.net.seam import MAX_MESSAGE_BYTES, Incoming, Landing, Listeners, Network, Source
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    IntegrityError,
    StorageError,
    SupersededError,
)
from safehold.format.crc import crc


class Log:
    """What a node was told."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.lost: list[tuple[str, CheckpointError]] = []
        self.back: list[str] = []
        self.superseded: list[tuple[str, int]] = []

    def listeners(self) -> Listeners:
        """Return what writes this log."""
        return Listeners(
            on_message=lambda node, payload: self.messages.append((node, payload)),
            on_lost=lambda node, error: self.lost.append((node, error)),
            on_back=self.back.append,
            on_superseded=lambda node, incarnation: self.superseded.append((node, incarnation)),
        )


class World:
    """Nodes that know each other; every node starts at incarnation 1.

    Attributes:
        nodes: The ends of the network.
        logs: What they were told.
        patience_s: Longest wait for anything.
    """

    nodes: dict[str, Network]
    logs: dict[str, Log]
    patience_s: float = 10.0

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until something is so; returns whether it is."""
        raise NotImplementedError

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two nodes."""
        raise NotImplementedError

    def heal(self, one: str, other: str) -> None:
        """Let everything pass again."""
        raise NotImplementedError

    def restart(self, node: str) -> None:
        """Close a node, and let another process take its name and place."""
        raise NotImplementedError

    def close(self) -> None:
        """Close everything."""
        for node in self.nodes.values():
            node.close()


def memory(data: bytes) -> int:
    """Return a descriptor of a memfd with these bytes."""
    fd = os.memfd_create("safehold-network-suite")
    os.write(fd, data)
    return fd


class NetworkSuite:
    """The tests; see the head of this module.

    Attributes:
        num_messages: Of the longer tests.
    """

    num_messages: ClassVar[int] = 100

    def make_world(self, nodes: list[str], *, peer_timeout_s: float) -> World:
        """Return a world; the class that derives says how."""
        raise NotImplementedError

    @pytest.fixture
    def world(self) -> Iterator[World]:
        """Three nodes that are patient with each other, so that a busy machine loses nothing."""
        world = self.make_world(["a", "b", "c"], peer_timeout_s=10.0)
        yield world
        world.close()

    @pytest.fixture
    def quick(self) -> Iterator[World]:
        """Three nodes that are not, for tests where some are lost."""
        world = self.make_world(["a", "b", "c"], peer_timeout_s=0.4)
        yield world
        world.close()

    def test_messages_arrive_in_order(self, world: World) -> None:
        """All that is sent arrives, once, in order, with its sender's name."""
        sent, log = list[bytes](), world.logs["b"]
        for index in range(self.num_messages):
            sent.append(b"%d" % index)
            world.nodes["a"].send("b", sent[-1])
            world.nodes["c"].send("b", sent[-1])
            if index % 10 == 9:  # so that there is more than one batch
                assert world.until(lambda: len(log.messages) >= 2 * len(sent))
        for sender in ("a", "c"):
            assert [payload for node, payload in log.messages if node == sender] == sent
        assert not world.logs["a"].messages and not world.logs["a"].lost

    def test_messages_to_oneself(self, world: World) -> None:
        """They come as all others do, and not within `send`."""
        node, log = world.nodes["a"], world.logs["a"]
        for payload in (b"1", b"2", b""):
            node.send("a", payload)
        assert world.until(lambda: len(log.messages) == 3)
        assert log.messages == [("a", b"1"), ("a", b"2"), ("a", b"")]

    def test_sizes(self, world: World) -> None:
        """Empty and large messages arrive as they are; larger ones are refused, with nothing sent."""
        payloads = [b"", random.Random(1).randbytes(5 << 20), b"x", b"y" * MAX_MESSAGE_BYTES, b"end"]
        for payload in payloads:
            world.nodes["a"].send("b", payload)
        with pytest.raises(ConfigurationError, match="too large"):
            world.nodes["a"].send("b", bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConfigurationError, match="too large"):
            world.nodes["a"].send("a", bytes(MAX_MESSAGE_BYTES + 1))
        log = world.logs["b"]
        assert world.until(lambda: len(log.messages) == len(payloads))
        assert [payload for _, payload in log.messages] == payloads

    def test_broadcast(self, world: World) -> None:
        """It reaches all others, or those that are named."""
        assert world.nodes["a"].broadcast(b"all") == {}
        assert world.nodes["a"].broadcast(b"one", ["c"]) == {}
        assert world.until(lambda: len(world.logs["b"].messages) == 1 and len(world.logs["c"].messages) == 2)
        assert not world.logs["a"].messages

    def test_unknown_nodes_are_refused(self, world: World) -> None:
        """A name that nobody has is the caller's mistake."""
        node, view = world.nodes["a"], memoryview(bytearray(1))
        for call in (
            lambda: node.send("z", b""),
            lambda: node.watch("z"),
            lambda: node.read_into("z", "pack", "n", 0, view, deadline_s=1),
            lambda: node.write_from("z", "pack", "n", 0, view, total=1, deadline_s=1),
        ):
            with pytest.raises(ConfigurationError, match="z"):
                call()

    def test_a_cut_is_told_once_and_loses_for_good(self, quick: World) -> None:
        """The sender hears of the loss once, what was sent until then never arrives, and what is sent after the return does."""
        node, log = quick.nodes["a"], quick.logs["a"]
        node.send("b", b"before")
        assert quick.until(lambda: len(quick.logs["b"].messages) == 1)
        quick.cut("a", "b")
        node.send("b", b"lost")
        assert quick.until(lambda: bool(log.lost))
        with pytest.raises(AgentUnavailableError, match="b"):
            node.send("b", b"refused")
        assert list(node.broadcast(b"refused")) == ["b"]
        assert not log.back and [name for name, _ in log.lost] == ["b"]
        error = log.lost[0][1]
        assert isinstance(error, AgentUnavailableError) and error.node == "b" and error.hint
        quick.heal("a", "b")
        assert quick.until(lambda: bool(log.back))
        node.send("b", b"after")
        assert quick.until(lambda: len(quick.logs["b"].messages) >= 2)
        assert [payload for _, payload in quick.logs["b"].messages] == [b"before", b"after"]
        assert [name for name, _ in log.lost] == ["b"] and log.back == ["b"]

    def test_what_does_not_fit_counts_as_a_loss(self, world: World) -> None:
        """One message that is dropped takes those before it along, the sender is told, and later ones arrive."""
        node, log, heard = world.nodes["a"], world.logs["a"], world.logs["b"].messages
        node.send("b", b"before")
        assert world.until(lambda: len(heard) == 1)
        world.cut("a", "b")
        with pytest.raises(AgentUnavailableError, match="wait already for the agent of node b"):
            for number in range(5000):
                node.send("b", b"%d" % number)
        with pytest.raises(AgentUnavailableError):
            node.send("b", b"refused")
        assert world.until(lambda: bool(log.lost))
        assert [name for name, _ in log.lost] == ["b"] and not log.back
        world.heal("a", "b")
        assert world.until(lambda: bool(log.back))
        node.send("b", b"after")
        assert world.until(lambda: heard[-1] == ("a", b"after"))
        kept = [int(payload) for _, payload in heard[1:-1]]
        assert kept == list(range(len(kept))), "some of those before it may have arrived, in order"
        assert len(log.lost) == len(log.back) == 1

    def test_who_is_watched_is_missed(self, quick: World) -> None:
        """Without a message under way, too."""
        quick.nodes["a"].watch("b")
        quick.cut("a", "b")
        assert quick.until(lambda: [name for name, _ in quick.logs["a"].lost] == ["b"])
        assert not quick.logs["c"].lost

    def test_a_short_cut_loses_nothing(self, world: World) -> None:
        """What could not be delivered for a moment is delivered later, in order."""
        node, log = world.nodes["a"], world.logs["b"]
        node.send("b", b"0")
        assert world.until(lambda: len(log.messages) == 1)
        world.cut("a", "b")
        for index in range(1, 10):
            node.send("b", b"%d" % index)
        world.heal("a", "b")
        assert world.until(lambda: len(log.messages) == 10)
        assert [payload for _, payload in log.messages] == [b"%d" % index for index in range(10)]
        assert not world.logs["a"].lost

    def test_a_restarted_peer_is_told(self, world: World) -> None:
        """What another process had been told is lost with it; the sender hears of it, though the peer is back at once."""
        node, log = world.nodes["a"], world.logs["a"]
        node.send("b", b"old")
        assert world.until(lambda: len(world.logs["b"].messages) == 1)
        world.restart("b")
        assert world.until(lambda: bool(log.back))
        assert [name for name, _ in log.lost] == ["b"]
        assert "started again" in log.lost[0][1].message
        node.send("b", b"new")
        assert world.until(lambda: bool(world.logs["b"].messages))
        assert world.logs["b"].messages == [("a", b"new")]

    def test_a_stale_incarnation_is_told(self, world: World) -> None:
        """A node that is behind is refused and told; once it has caught up, what waited is delivered."""
        world.nodes["b"].set_incarnation(3)
        world.nodes["a"].send("b", b"late")
        assert world.until(lambda: bool(world.logs["a"].superseded))
        assert world.logs["a"].superseded == [("b", 3)] and not world.logs["b"].messages
        with pytest.raises(SupersededError, match="incarnation 3"):
            world.nodes["a"].read_into("b", "pack", "n", 0, memoryview(bytearray(1)), deadline_s=5)
        world.nodes["a"].set_incarnation(3)
        assert world.until(lambda: bool(world.logs["b"].messages))
        assert not world.logs["a"].lost

    def test_a_newer_incarnation_is_heard(self, world: World) -> None:
        """It has to be: its message may be the news."""
        world.nodes["a"].set_incarnation(2)
        world.nodes["a"].send("b", b"we are 2")
        assert world.until(lambda: bool(world.logs["b"].messages))

    def test_a_superseded_node_is_lost_in_the_end(self, quick: World) -> None:
        """Who does not catch up hears why."""
        quick.nodes["b"].set_incarnation(2)
        quick.nodes["a"].send("b", b"late")
        assert quick.until(lambda: bool(quick.logs["a"].lost))
        assert isinstance(quick.logs["a"].lost[0][1], SupersededError)

    def test_a_refusal_is_what_is_told(self, quick: World) -> None:
        """Though there was silence after it: it says more."""
        quick.nodes["b"].set_incarnation(2)
        quick.nodes["a"].send("b", b"late")
        assert quick.until(lambda: bool(quick.logs["a"].superseded))
        quick.cut("a", "b")
        assert quick.until(lambda: bool(quick.logs["a"].lost))
        assert isinstance(quick.logs["a"].lost[0][1], SupersededError)

    def test_closed_is_closed(self, quick: World) -> None:
        """After `close` every call is refused, and nothing is told any more; closing again does nothing."""
        node, log = quick.nodes["a"], quick.logs["a"]
        node.close()
        node.close()
        with pytest.raises(ConfigurationError, match="closed"):
            node.send("b", b"")
        with pytest.raises(ConfigurationError, match="closed"):
            node.send("a", b"")
        quick.nodes["b"].send("a", b"nobody")
        assert quick.until(lambda: bool(quick.logs["b"].lost))
        assert not log.messages

    # -- bulk ----------------------------------------------------------------------------------------------------------

    def test_reads_any_range(self, world: World) -> None:
        """Bytes arrive in place, with their checksum, and nothing beside them is touched."""
        data = random.Random(2).randbytes((3 << 20) + 17)
        fd = memory(b"head" + data)
        asked: list[tuple[str, str]] = []

        def provider(node: str, name: str) -> Source:
            asked.append((node, name))
            return Source(fd=os.dup(fd), offset=4, size=len(data))

        world.nodes["b"].provide("pack", provider)
        for offset, size in ((0, len(data)), (1, 1), (len(data) - 1, 1), (12345, 2 << 20), (7, 0)):
            buffer = bytearray(b"\xaa" * (size + 2))
            view = memoryview(buffer)[1 : size + 1]
            value = world.nodes["a"].read_into("b", "pack", "000/x é+%2F", offset, view, deadline_s=world.patience_s)
            assert buffer[1:-1] == data[offset : offset + size] and value == crc(view)
            assert buffer[0] == buffer[-1] == 0xAA
        assert set(asked) == {("a", "000/x é+%2F")}
        os.close(fd)

    def test_what_is_not_there_is_an_error(self, world: World) -> None:
        """Unknown kinds and names, and ranges beyond the end, by name and at once."""
        fd = memory(b"12345")
        world.nodes["b"].provide(
            "pack", lambda node, name: Source(fd=os.dup(fd), offset=0, size=5) if name == "there" else None
        )
        view = memoryview(bytearray(3))
        for kind, name, offset in (
            ("record", "there", 0),
            ("pack", "absent", 0),
            ("pack", "there", 3),
            ("pack", "there", 5),
            ("pack", "there", 1 << 40),
        ):
            with pytest.raises(IntegrityError, match="node b") as caught:
                world.nodes["a"].read_into("b", kind, name, offset, view, deadline_s=world.patience_s)
            assert caught.value.node == "b"
        assert world.nodes["a"].read_into("b", "pack", "there", 2, view, deadline_s=world.patience_s) == crc(b"345")
        os.close(fd)

    def test_names_that_lead_elsewhere_never_reach_a_provider(self, world: World) -> None:
        """Whatever a provider makes of names, it gets none that climbs."""
        asked: list[str] = []
        world.nodes["b"].provide("pack", lambda node, name: asked.append(name))
        for name in ("..", "../x", "a/../../b", "/etc/passwd", "a//b", ".", "a\0b", "a\\b", "x" * 2000, "a\nb"):
            with pytest.raises(IntegrityError):
                world.nodes["a"].read_into("b", "pack", name, 0, memoryview(bytearray(1)), deadline_s=world.patience_s)
        assert asked == []

    def test_errors_of_a_provider_reach_the_reader(self, world: World) -> None:
        """As they are, with the node's name."""

        def provider(node: str, name: str) -> Source:
            raise StorageError("the disk is gone", tier="flash")

        world.nodes["b"].provide("pack", provider)
        with pytest.raises(StorageError, match="the disk is gone"):
            world.nodes["a"].read_into("b", "pack", "x", 0, memoryview(bytearray(1)), deadline_s=world.patience_s)

    @pytest.mark.parametrize("into", ["view", "fd"])
    def test_writes_where_the_sink_says(self, world: World, into: str) -> None:
        """Into memory or a descriptor; the sink is told before the writer is."""
        data = random.Random(3).randbytes((2 << 20) + 5)
        buffer, fd = bytearray(len(data) + 2), memory(b"")
        told: list[tuple[Incoming, int]] = []

        def sink(incoming: Incoming) -> Landing:
            def done(value: int) -> None:
                told.append((incoming, value))

            view = memoryview(buffer)[1 + incoming.offset : 1 + incoming.offset + incoming.size]
            if into == "view":
                return Landing(view=view, done=done, failed=lambda error: None)
            return Landing(fd=fd, offset=1 + incoming.offset, done=done, failed=lambda error: None)

        world.nodes["b"].accept("copy", sink)
        node, half = world.nodes["a"], len(data) // 2
        for start, end in ((half, len(data)), (0, half), (0, 0)):
            value = node.write_from(
                "b", "copy", "n/1", start, memoryview(data)[start:end], total=len(data), deadline_s=world.patience_s
            )
            incoming, theirs = told.pop()
            assert value == theirs == crc(data[start:end]) and not told
            assert (incoming.node, incoming.name, incoming.total) == ("a", "n/1", len(data))
            assert (incoming.offset, incoming.size) == (start, end - start)
        if into == "fd":
            buffer[:] = os.pread(fd, len(buffer), 0).ljust(len(buffer), b"\0")
        assert buffer[1:-1] == data and buffer[0] == buffer[-1] == 0
        os.close(fd)

    def test_writes_that_nobody_wants(self, world: World) -> None:
        """Unknown kinds, names that a sink refuses, errors of a sink."""

        def sink(incoming: Incoming) -> Landing | None:
            if incoming.name == "full":
                raise StorageError("no room", node="b")
            return None

        world.nodes["b"].accept("copy", sink)
        view = memoryview(b"123")
        for kind, name, error in (
            ("copy", "x", IntegrityError),
            ("pack", "x", IntegrityError),
            ("copy", "full", StorageError),
        ):
            with pytest.raises(error):
                world.nodes["a"].write_from("b", kind, name, 0, view, total=3, deadline_s=world.patience_s)

    def test_bulk_of_a_node_that_is_cut_off_ends(self, quick: World) -> None:
        """By its deadline, or once the peer has not moved a byte for long; the error names the node."""
        fd = memory(b"12345")
        quick.nodes["b"].provide("pack", lambda node, name: Source(fd=os.dup(fd), offset=0, size=5))
        quick.cut("a", "b")
        view = memoryview(bytearray(5))
        with pytest.raises(DeadlineError, match="b") as late:
            quick.nodes["a"].read_into("b", "pack", "x", 0, view, deadline_s=0.05)
        with pytest.raises((AgentUnavailableError, DeadlineError), match="b") as gone:
            quick.nodes["a"].write_from("b", "copy", "x", 0, view, total=5, deadline_s=quick.patience_s)
        assert late.value.node == gone.value.node == "b"
        quick.heal("a", "b")
        assert quick.nodes["a"].read_into("b", "pack", "x", 0, view, deadline_s=quick.patience_s) == crc(b"12345")
        with suppress(OSError):
            os.close(fd)
