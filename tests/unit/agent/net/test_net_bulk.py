"""Bulk bytes over real sockets: ranges, cuts, what is slow, and what a sink is told."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from net_proxy import Proxy, wait_for
from net_raw import Answer, Target, is_closed, receive, request_head
from net_world import RealWorld, settings_for

from safehold.agent.net.addresses import Address
from safehold.agent.net.bulk import BulkSettings
from safehold.agent.net.seam import Incoming, Landing, Source
from safehold.errors import AgentUnavailableError, CheckpointError, ChecksumError, DeadlineError, IntegrityError
from safehold.format.crc import crc
from safehold.testing.network_suite import memory

DATA = random.Random(7).randbytes((6 << 20) + 13)
DEADLINE_S = 10.0


@dataclass
class Copy:
    """A sink, and what it was told."""

    size: int = len(DATA)
    buffer: bytearray = field(default_factory=lambda: bytearray(len(DATA)))
    asked: list[Incoming] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    failed: list[CheckpointError] = field(default_factory=list)

    def __call__(self, incoming: Incoming) -> Landing:
        self.asked.append(incoming)
        view = memoryview(self.buffer)[incoming.offset : incoming.offset + min(incoming.size, self.size)]
        return Landing(view=view, done=self.done.append, failed=self.failed.append)


@pytest.fixture
def world() -> Iterator[RealWorld]:
    world = RealWorld(["a", "b"], settings=settings_for(2.0, body_timeout_s=5.0, header_timeout_s=5.0))
    yield world
    world.close()


def provide(world: RealWorld | Target, data: bytes = DATA, version: str = "1") -> int:
    fd = memory(b"123" + data)
    peers = world.peers if isinstance(world, Target) else world.peers["b"]
    peers.provide("pack", lambda node, name: Source(fd=os.dup(fd), offset=3, size=len(data), version=version))
    return fd


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_reads_go_on_where_they_were_cut(world: RealWorld) -> None:
    fd = provide(world)
    proxy = world.proxies["a", "b"]
    chance = random.Random(3)
    proxy.cut_after = lambda: chance.randrange(200_000, 3_000_000)
    buffer = bytearray(len(DATA))
    value = world.peers["a"].read_into("b", "pack", "x", 0, memoryview(buffer), deadline_s=DEADLINE_S)
    assert buffer == DATA and value == crc(DATA)
    assert proxy.num_cuts >= 2
    assert proxy.num_bytes < len(DATA) + 100_000  # what had come was not sent again
    os.close(fd)


def test_bytes_that_change_between_two_halves_are_refused(world: RealWorld) -> None:
    fd = memory(DATA)
    versions = iter(range(100))
    world.peers["b"].provide(
        "pack", lambda node, name: Source(fd=os.dup(fd), offset=0, size=len(DATA), version=str(next(versions)))
    )
    cuts = iter([1_000_000])
    world.proxies["a", "b"].cut_after = lambda: next(cuts, 1 << 60)
    with pytest.raises(IntegrityError, match="changed while it was read"):
        world.peers["a"].read_into("b", "pack", "x", 0, memoryview(bytearray(len(DATA))), deadline_s=DEADLINE_S)
    os.close(fd)


def test_writes_begin_again_after_a_cut(world: RealWorld) -> None:
    sink = Copy()
    world.peers["b"].accept("copy", sink)
    cuts = iter([1_000_000, 3_000_000])
    world.proxies["a", "b"].cut_after = lambda: next(cuts, 1 << 60)
    value = world.peers["a"].write_from("b", "copy", "x", 0, memoryview(DATA), total=len(DATA), deadline_s=DEADLINE_S)
    assert sink.buffer == DATA and sink.done == [value] == [crc(DATA)]
    assert len(sink.asked) == 3 and len(sink.failed) == 2
    assert all("did not come whole from node a" in str(error) for error in sink.failed)


def test_many_threads_at_once(world: RealWorld) -> None:
    fd = provide(world)
    before, wrong = open_fds(), list[int]()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(5):
            offset = chance.randrange(len(DATA) - 1)
            size = chance.randrange(1, min(1 << 20, len(DATA) - offset) + 1)
            view = memoryview(bytearray(size))
            value = world.peers["a"].read_into("b", "pack", "x", offset, view, deadline_s=DEADLINE_S)
            if view != DATA[offset : offset + size] or value != crc(view):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not wrong
    assert world.proxies["a", "b"].num_connections <= 4  # kept, and used again
    assert wait_for(lambda: open_fds() <= before + 4 * 4)  # per connection: both ends, and the proxy's two
    os.close(fd)


def test_a_kept_connection_that_was_closed_is_no_failure(world: RealWorld) -> None:
    fd = provide(world)
    view = memoryview(bytearray(1000))
    for _ in range(3):
        world.peers["a"].read_into("b", "pack", "x", 0, view, deadline_s=DEADLINE_S)
        world.cut("a", "b")
        world.heal("a", "b")
    assert world.proxies["a", "b"].num_connections == 3
    os.close(fd)


def test_a_peer_that_stalls_is_not_waited_for_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        world = RealWorld(["a", "b"], settings=settings_for(0.4))
        address = Address("127.0.0.1", silent.getsockname()[1])
        world.peers["a"].meet({"b": address})
        view = memoryview(bytearray(10))
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match=r"not done in 0\.2 s") as late:
            world.peers["a"].read_into("b", "pack", "x", 0, view, deadline_s=0.2)
        with pytest.raises(AgentUnavailableError, match="has not answered") as gone:
            world.peers["a"].write_from("b", "copy", "x", 0, view, total=10, deadline_s=30)
        assert time.monotonic() - begun < 3
        assert str(address) in str(late.value) and str(address) in str(gone.value)
        world.close()


def test_a_trickle_does_not_stretch_the_deadline() -> None:
    """A byte now and then is no progress that counts: the deadline is total, in the head of an answer and in its body."""

    def trickle(server: socket.socket) -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock:
                sock.recv(4096)
                try:
                    for byte in b"HTTP/1.1 206 Partial Content\r\nX: " + b"x" * 1000:
                        sock.sendall(bytes([byte]))
                        time.sleep(0.02)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,), daemon=True)
        thread.start()
        world = RealWorld(["a", "b"], settings=settings_for(5.0))
        world.peers["a"].meet({"b": Address("127.0.0.1", server.getsockname()[1])})
        begun = time.monotonic()
        with pytest.raises(DeadlineError):
            world.peers["a"].read_into("b", "pack", "x", 0, memoryview(bytearray(10)), deadline_s=0.3)
        assert time.monotonic() - begun < 1
        world.close()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_another_checksum_on_the_other_side_is_found(world: RealWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Copy()
    world.peers["b"].accept("copy", sink)
    monkeypatch.setattr("safehold.agent.net.data.receive", lambda *args, **kwargs: (_take_all(*args, **kwargs), 1)[1])
    with pytest.raises(ChecksumError, match="other bytes"):
        world.peers["a"].write_from("b", "copy", "x", 0, memoryview(DATA), total=len(DATA), deadline_s=DEADLINE_S)


def _take_all(*args: object, **kwargs: object) -> None:
    from safehold.agent.net.transfer import receive as original

    original(*args, **kwargs)  # type: ignore[arg-type]


def test_closing_ends_transfers_under_way(world: RealWorld) -> None:
    """A reader that does not read, and a writer that does not write, hold nobody."""
    fd, sink = provide(world), Copy()
    world.peers["b"].accept("copy", sink)
    errors: list[CheckpointError] = []

    def read() -> None:
        try:
            world.peers["a"].read_into("b", "pack", "x", 0, memoryview(bytearray(len(DATA))), deadline_s=30)
        except CheckpointError as exc:
            errors.append(exc)

    world.proxies["a", "b"].cut_after = lambda: 100_000
    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.05)
    begun = time.monotonic()
    world.peers["a"].close()
    thread.join(5)
    assert not thread.is_alive() and time.monotonic() - begun < 3
    assert isinstance(errors[0], AgentUnavailableError) and "closed" in str(errors[0])
    os.close(fd)


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_a_whole_source_by_hand(target: Target) -> None:
    fd = provide(target, b"0123456789", version="v7")
    answer = target.ask(target.head("GET /v1/data/pack/x"))
    assert (answer.status, answer.body) == (200, b"0123456789")
    assert answer.headers["ETag"] == '"v7"' and answer.headers["X-Safehold-Size"] == "10"
    part = target.ask(target.head("GET /v1/data/pack/x", Range="bytes=3-5"))
    assert (part.status, part.body, part.headers["Content-Range"]) == (206, b"345", "bytes 3-5/10")
    with target.connect() as sock:  # an error, and what comes after it, over one connection
        for text, status in (("bytes=3-10", 416), ("bytes=-3", 416), ("bytes=0-1,4-5", 416), ("bytes=9-", 206)):
            sock.sendall(target.head("GET /v1/data/pack/x", Range=text))
            answer = receive(sock)
            assert answer.status == status
            assert status == 206 or answer.facts["size"] == 10
    os.close(fd)
    assert not target.events


def test_an_empty_source(target: Target) -> None:
    fd = provide(target, b"")
    answer = target.ask(target.head("GET /v1/data/pack/x"))
    assert (answer.status, answer.body) == (200, b"")
    assert target.ask(target.head("GET /v1/data/pack/x", Range="bytes=0-0")).status == 416
    os.close(fd)


@pytest.mark.parametrize(
    "path", ["pack/../x", "pack/%2e%2e%2fx", "pack/..%2f..%2fetc%2fpasswd", "pack/%00", "pack//etc", "x/../pack/x"]
)
def test_tricks_with_paths(target: Target, path: str) -> None:
    asked: list[str] = []
    target.peers.provide("pack", lambda node, name: asked.append(name))
    assert target.ask(target.head(f"GET /v1/data/{path}")).status == 404
    assert (
        target.ask(target.head(f"PUT /v1/data/{path}", Content_Length="1", Content_Range="bytes 0-0/1") + b"x").status
        == 404
    )
    assert asked == []


def test_a_source_that_is_shorter_than_it_says(target: Target) -> None:
    """The answer has begun: all that is left is to break it, and a short answer is no answer."""
    fd = memory(b"12345")
    target.peers.provide("pack", lambda node, name: Source(fd=os.dup(fd), offset=0, size=10))
    before = open_fds()
    for _ in range(3):
        with target.connect() as sock:
            sock.sendall(target.head("GET /v1/data/pack/x"))
            answer = receive(sock)
            assert answer.body in (b"12345", b"") and is_closed(sock)
    assert target.events.refused() == ["cut"]
    assert wait_for(lambda: open_fds() <= before)
    os.close(fd)


def test_a_reader_that_does_not_read(target: Target) -> None:
    fd = provide(target, bytes(64 << 20))
    with target.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(target.head("GET /v1/data/pack/x"))
        assert wait_for(lambda: target.events.refused() == ["cut"], 3)
    os.close(fd)


def put(target: Target, body: bytes, size: int, content_range: str, **changes: str | None) -> bytes:
    given: dict[str, str | None] = {"Content_Length": str(size), "Content_Range": content_range}
    return target.head("PUT /v1/data/copy/x", **(given | changes)) + body


def answer_to(sock: socket.socket) -> Answer | None:
    try:
        return receive(sock)
    except (OSError, ValueError):
        return None


@pytest.mark.parametrize("invited", [True, False])
def test_a_body_that_is_cut_or_slow(target: Target, invited: bool) -> None:
    """The sink is told so, once; and the bytes of the next one come to their place."""
    sink = Copy()
    target.peers.accept("copy", sink)
    changes = {"Expect": "100-continue"} if invited else {}
    for number, hang_up in enumerate((True, False), 1):
        with target.connect() as sock:
            sock.sendall(put(target, b"", 100, "bytes 0-99/100", **changes))
            if invited:
                assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(bytes(60))
            if hang_up:
                sock.shutdown(socket.SHUT_WR)
            answer = answer_to(sock)
            assert answer is None or answer.status in (400, 408)
            assert wait_for(lambda: len(sink.failed) == number, 3)
    assert not sink.done and isinstance(sink.failed[0], AgentUnavailableError)
    with target.connect() as sock:
        sock.sendall(put(target, b"x" * 100, 100, "bytes 0-99/100"))
        assert receive(sock).facts == {"crc32": crc(b"x" * 100), "size": 100}
    assert sink.done == [crc(b"x" * 100)] and sink.buffer[:101] == b"x" * 100 + b"\0"


def test_a_trickling_body_is_over_in_time(target: Target) -> None:
    sink = Copy()
    target.peers.accept("copy", sink)
    with target.connect() as sock:
        sock.sendall(put(target, b"", 100, "bytes 0-99/100", Expect="100-continue"))
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 3:
                sock.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - begun < 2
    assert wait_for(lambda: len(sink.failed) == 1) and "too slow" in str(sink.failed[0])


def test_bytes_beyond_the_end_are_nobodys(target: Target) -> None:
    """More than was announced: what is beyond is neither stored nor taken for a request."""
    sink = Copy()
    target.peers.accept("copy", sink)
    with target.connect() as sock:
        sock.sendall(put(target, b"", 100, "bytes 0-99/100", Expect="100-continue"))
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(b"x" * 100 + target.messages([b"smuggled"]))
        answer = answer_to(sock)
        assert answer is None or answer.status == 200
    assert sink.done == [crc(b"x" * 100)] and not any(sink.buffer[100:]) and not target.log.messages


@pytest.mark.parametrize(
    ("size", "content_range", "status"),
    [
        ("100", "bytes 0-98/100", 400),
        ("100", "bytes 0-99/99", 400),
        ("100", "bytes 0-99", 400),
        ("100", None, 400),
        ("0", "bytes 0-0/1", 400),
        (None, "bytes 0-99/100", 411),
    ],
)
def test_ranges_that_contradict(target: Target, size: str | None, content_range: str | None, status: int) -> None:
    sink = Copy()
    target.peers.accept("copy", sink)
    changes = {"Content_Length": size, "Content_Range": content_range, "Expect": "100-continue"}
    assert target.ask(target.head("PUT /v1/data/copy/x", **changes)).status == status
    assert not sink.asked


def test_more_than_a_sink_takes(target: Target) -> None:
    """It is refused before a byte of it came."""
    sink = Copy(size=50)
    target.peers.accept("copy", sink)
    answer = target.ask(put(target, b"", 100, "bytes 0-99/100", Expect="100-continue"))
    assert (answer.status, answer.facts["reason"]) == (413, "size")
    assert len(sink.failed) == 1 and not sink.done


def test_a_dead_disk_holds_a_thread_and_not_the_node(target: Target) -> None:
    stuck = threading.Event()

    def provider(node: str, name: str) -> None:
        stuck.wait(10)

    target.peers.provide("pack", provider)
    with target.connect() as sock:
        sock.sendall(target.head("GET /v1/data/pack/x"))
        assert target.ask(target.messages([b"1"])).status == 200
        stuck.set()
        assert receive(sock).status == 404


def test_who_comes_while_all_are_busy_waits_its_turn(world: RealWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as its deadline says, though longer than the peer timeout: the peer says that it lives."""
    monkeypatch.setattr("safehold.agent.net.data.BUSY_S", 0.01)
    monkeypatch.setattr(world.peers["b"].server._data, "_slots", asyncio.Semaphore(1))
    monkeypatch.setattr(world.peers["a"]._peers["b"].bulk, "_settings", BulkSettings(peer_timeout_s=0.3))
    fd, stuck = memory(b"12345"), threading.Event()

    def provider(node: str, name: str) -> Source:
        if name == "slow":
            stuck.wait(10)
        return Source(fd=os.dup(fd), offset=0, size=5)

    world.peers["b"].provide("pack", provider)
    view, results = memoryview(bytearray(5)), list[int]()

    def read() -> None:
        results.append(world.peers["a"].read_into("b", "pack", "quick", 0, view, deadline_s=10))

    with socket.create_connection((world.peers["b"].address.host, world.peers["b"].address.port)) as sock:
        sock.sendall(request_head("GET /v1/data/pack/slow"))
        assert wait_for(lambda: world.peers["b"].server._data._slots.locked())
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.5)
        assert thread.is_alive()
        with pytest.raises(DeadlineError, match="too many transfers"):
            world.peers["a"].read_into("b", "pack", "quick", 0, view, deadline_s=0.1)
        stuck.set()
        thread.join(5)
    assert results == [crc(b"12345")]
    os.close(fd)


def test_a_sink_may_refuse_what_came(world: RealWorld) -> None:
    def refuse(value: int) -> None:
        raise ChecksumError("not what the record says", node="b")

    buffer = bytearray(3)
    world.peers["b"].accept(
        "copy", lambda incoming: Landing(view=memoryview(buffer), done=refuse, failed=lambda error: None)
    )
    with pytest.raises(ChecksumError, match="not what the record says"):
        world.peers["a"].write_from("b", "copy", "x", 0, memoryview(b"123"), total=3, deadline_s=5)


def test_the_proxy_cuts() -> None:
    """A canary: without cuts the tests above would show nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(Address("127.0.0.1", server.getsockname()[1]))
        proxy.cut_after = lambda: 10
        with socket.create_connection((proxy.address.host, proxy.address.port)) as near:
            far, _ = server.accept()
            near.sendall(b"x" * 20)
            with far, far.makefile("rb") as reader:
                assert len(reader.read()) == 10
        proxy.close()
