"""What is no request, or a bad one: refused within its time, and nobody else notices."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from net_proxy import wait_for
from net_raw import TIMEOUT_S, Target, is_closed, receive

from safehold.agent.net import wire
from safehold.agent.net.addresses import tune

KEPT_ALIVE = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)


@pytest.fixture
def crowded() -> Iterator[Target]:
    target = Target(max_connections=6, max_strangers=4, header_timeout_s=5.0)
    yield target
    target.close()


def still_serves(target: Target) -> bool:
    return target.ask(target.head("GET /v1/health")).status == 200


def test_messages_by_hand(target: Target) -> None:
    answer = target.ask(target.messages([b"1", b"", b"3"]))
    assert answer.status == 200 and answer.facts == {"last": 3}
    assert target.log.messages == [("a", b"1"), ("a", b""), ("a", b"3")]
    assert target.ask(target.messages([b"1", b"", b"3", b"4"])).facts == {"last": 4}  # sent again, with one more
    assert [payload for _, payload in target.log.messages] == [b"1", b"", b"3", b"4"]
    gap = target.ask(target.messages([b"6"], first=6))
    assert (gap.status, gap.facts["reason"], gap.facts["expected"]) == (409, "gap", 5)
    assert len(target.log.messages) == 4 and not target.events


def test_many_requests_over_one_connection(target: Target) -> None:
    with target.connect() as sock:
        for number in range(1, 20):
            sock.sendall(target.messages([b"%d" % number], first=number))
            assert receive(sock).facts == {"last": number}


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"X_Safehold_Crc32": "1"}, 400, "checksum"),
        ({"X_Safehold_Crc32": None}, 400, "malformed"),
        ({"X_Safehold_Session": None}, 400, "malformed"),
        ({"X_Safehold_Session": "x.1"}, 400, "malformed"),
        ({"X_Safehold_First": "x"}, 400, "malformed"),
        ({"X_Safehold_First": "0"}, 409, "gap"),
        ({"Content_Length": str(wire.MAX_BODY_BYTES + 1)}, 413, "size"),
        ({"Content_Encoding": "gzip"}, 411, "encoding"),
    ],
)
def test_bad_headers(target: Target, changes: dict[str, str | None], status: int, reason: str) -> None:
    answer = target.ask(target.messages([b"x"], **changes))
    assert (answer.status, answer.facts["reason"]) == (status, reason)
    assert not target.log.messages and still_serves(target)


def test_chunks_and_bodies_without_a_length_are_not_taken(target: Target) -> None:
    head = target.messages([], Content_Length=None, Transfer_Encoding="chunked")
    for request in (head + b"5\r\n\1\0\0\0x\r\n0\r\n\r\n", target.messages([], Content_Length=None)):
        answer = target.ask(request)
        assert answer.status == 411 and answer.facts["reason"] in ("encoding", "length")
    assert not target.log.messages and still_serves(target)


@pytest.mark.parametrize("body", [b"\x05\0\0\0abc", b"\xff\xff\xff\xff", b"\0\0", struct.pack("<I", 0) * 5000])
def test_bad_batches(target: Target, body: bytes) -> None:
    from safehold.format.crc import crc

    request = target.messages([], Content_Length=str(len(body)), X_Safehold_Crc32=str(crc(body))) + body
    assert target.ask(request).status == 400
    assert not target.log.messages


def test_a_body_that_is_cut(target: Target) -> None:
    with target.connect() as sock:
        sock.sendall(target.messages([b"x" * 100])[:-1])
        sock.shutdown(socket.SHUT_WR)
        try:
            assert receive(sock).status in (400, 408)
        except (OSError, ValueError):
            pass  # or none at all: it has hung up
    assert still_serves(target) and not target.log.messages


def test_a_slow_body(target: Target) -> None:
    with target.connect() as sock:
        sock.sendall(target.messages([b"x" * 100])[:-50])
        begun = time.monotonic()
        answer = receive(sock)
        assert answer.status == 408 and time.monotonic() - begun < 3
        assert is_closed(sock)
    assert "slow" in target.events.refused() and not target.log.messages


@pytest.mark.parametrize("start", [b"", b"GET /v1/health HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01"])
def test_who_says_nothing_is_closed(target: Target, start: bytes) -> None:
    with target.connect() as sock:
        sock.sendall(start)
        begun = time.monotonic()
        while not is_closed(sock):
            pass
        assert time.monotonic() - begun < 3
    assert set(target.events.refused()) & {"slow", "garbage"}


def test_a_trickle_of_headers_is_closed(target: Target) -> None:
    with target.connect() as sock:
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun < 3:
                sock.sendall(b"G")
                time.sleep(0.02)
        assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"\0" * 5000,
        b"GET / HTTP/1.1\r\nA: " + b"x" * 10000,
        b"GET /" + b"x" * 10000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 100 + b"\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_garbage_gets_one_word(target: Target, garbage: bytes) -> None:
    with target.connect() as sock:
        sock.sendall(garbage)
        try:
            answer = receive(sock)
            assert answer.status in (400, 401) and b"ython" not in answer.body
            assert "aiohttp" not in json.dumps(answer.headers)
            assert is_closed(sock)
        except OSError:
            pass  # closed with what it had not read yet
    assert wait_for(lambda: set(target.events.refused()) <= {"garbage", "token", "slow"} and bool(target.events))
    assert still_serves(target)


def test_strangers_do_not_keep_others_out(crowded: Target) -> None:
    """More silent connections than are allowed: the oldest go, and whoever knows the token gets in."""
    with crowded.connect() as friend:
        friend.sendall(crowded.messages([b"1"]))
        assert receive(friend).status == 200
        strangers = [crowded.connect() for _ in range(20)]
        assert still_serves(crowded)
        assert sum(is_closed(sock) for sock in strangers[:16]) == 16
        friend.sendall(crowded.messages([b"2"], first=2))
        assert receive(friend).facts == {"last": 2}
        for sock in strangers:
            sock.close()
    assert "crowd" in crowded.events.refused()


def test_connections_have_an_end(crowded: Target) -> None:
    friends = []
    for _ in range(6):
        friends.append(crowded.connect())
        friends[-1].sendall(crowded.head("GET /v1/health"))
        assert receive(friends[-1]).status == 200
    with crowded.connect() as one_more:
        assert is_closed(one_more)
    friends.pop().close()
    assert wait_for(lambda: crowded.peers.server._lobby.num_open < 6)  # type: ignore[union-attr]
    assert still_serves(crowded)
    for friend in friends:
        friend.close()
    assert "connections" in crowded.events.refused()


def test_an_idle_connection_is_closed() -> None:
    target = Target(idle_timeout_s=0.2)
    with target.connect() as sock:
        sock.sendall(target.head("GET /v1/health"))
        assert receive(sock).status == 200
        begun = time.monotonic()
        assert is_closed(sock) and time.monotonic() - begun < TIMEOUT_S / 2
    target.close()


@pytest.mark.parametrize(
    "start", ["GET /v1/nothing", "POST /v1/health", "PUT /v1/messages", "GET /v1/messages", "GET http://x/v1/health"]
)
def test_other_paths_and_methods(target: Target, start: str) -> None:
    assert target.ask(target.head(start, Content_Length="0")).status == 404


def test_close_is_quick_with_connections_open(target: Target) -> None:
    with target.connect() as silent, target.connect() as friend:
        friend.sendall(target.head("GET /v1/health"))
        assert receive(friend).status == 200
        begun = time.monotonic()
        target.close()
        assert time.monotonic() - begun < 2
        assert is_closed(silent) and is_closed(friend)
    with pytest.raises(OSError):
        target.connect()


@pytest.mark.parametrize(("lost_after_s", "at_most_s"), [(2.0, 4), (10.0, 10), (60.0, 60)])
def test_a_host_that_is_gone_is_noticed_while_an_answer_is_awaited(
    target: Target, lost_after_s: float, at_most_s: int
) -> None:
    """By the kernel's probes: here only that they are asked for, since loopback is always there."""
    with target.connect() as sock:
        tune(sock, lost_after_s)
        found = [sock.getsockopt(socket.IPPROTO_TCP, name) for name in KEPT_ALIVE]
        assert found[0] + found[1] * found[2] <= at_most_s and sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == at_most_s * 1000
