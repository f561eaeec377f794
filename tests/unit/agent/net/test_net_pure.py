"""The parts without I/O: words of the protocol, inbox, outbox, addresses."""

from __future__ import annotations

import socket

import pytest

from safehold.agent.net import addresses, wire
from safehold.agent.net.addresses import Address
from safehold.agent.net.inbox import Inbox
from safehold.agent.net.outbox import ControlSettings, Outbox
from safehold.agent.net.wire import Refusal, SessionId
from safehold.clock import new_token
from safehold.errors import AgentUnavailableError, ConfigurationError

A, B = new_token(), new_token()


# -- words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["x", "000000010/1-1/00000-00003.0.safetensors", "é/ü", "a b", "a%2Fb", "a?b#c", "...", "..a"]
)
def test_names_come_back(name: str) -> None:
    path = wire.data_path("pack", name)
    assert wire.kind_and_name(path) == ("pack", name)
    assert path.isascii() and not set(path.removeprefix("/v1/data/pack/")) & set("/?# \r\n")


@pytest.mark.parametrize(
    "path",
    [
        "pack", "pack/", "/x", "Pack/x", "p.k/x", "pack/a/b", "pack/..", "pack/%2e%2e", "pack/a%2F..%2Fb", "pack/%2Fetc",
        "pack/a%00b", "pack/a?b", "pack/%FF", "pack/%ED%A0%80", "pack/a%5Cb", "pack/a%2F%2Fb", "pack/a%2F", "pack/%0d%0aX",
        "pack/" + "x" * 4000, "pack/" + "%C3%A9" * 600,
    ],
)  # fmt: skip
def test_names_that_are_none(path: str) -> None:
    with pytest.raises(Refusal) as caught:
        wire.kind_and_name("/v1/data/" + path)
    assert caught.value.status == 404


def test_a_name_is_decoded_once() -> None:
    """What looks encoded after that is part of the name: `%2e%2e` is a name like any other."""
    assert wire.kind_and_name("/v1/data/pack/%252e%252e%252Fx") == ("pack", "%2e%2e%2Fx")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, (0, 10)), ("bytes=0-9", (0, 10)), ("bytes=3-", (3, 7)), ("bytes=9-9", (9, 1)), ("bytes=0-0", (0, 1))],
)
def test_ranges(text: str | None, expected: tuple[int, int]) -> None:
    assert wire.byte_range(text, 10) == expected


@pytest.mark.parametrize(
    "text",
    ["", "bytes", "bytes=", "bytes=-5", "bytes=5-4", "bytes=0-10", "bytes=10-", "bytes=0-1,3-4", "bytes=0-x", "items=0-1",
     "bytes= 0-1", "bytes=0-1\n", "bytes=0-" + "9" * 30, "bytes=\u0660-1"],
)  # fmt: skip
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(Refusal) as caught:
        wire.byte_range(text, 10)
    assert caught.value.status == 416 and caught.value.facts == {"size": 10}


def test_ranges_of_nothing() -> None:
    assert wire.byte_range(None, 0) == (0, 0)
    with pytest.raises(Refusal):
        wire.byte_range("bytes=0-0", 0)


def test_content_ranges() -> None:
    for offset, size, total in ((0, 5, 5), (3, 2, 9), (0, 0, 7)):
        assert wire.content_range(wire.format_content_range(offset, size, total), size) == (offset, total)
    for text in (
        None,
        "",
        "bytes 0-4",
        "bytes 0-4/3",
        "bytes 0-5/9",
        "bytes 4-0/9",
        "bytes */9",
        "bytes 0-4/*",
        "x 0-4/9",
    ):
        with pytest.raises(Refusal) as caught:
            wire.content_range(text, 5)
        assert caught.value.status == 400


def test_batches_come_back() -> None:
    for payloads in ([], [b""], [b"a", b"", b"b" * 70000]):
        assert wire.decode_batch(wire.encode_batch(payloads)) == payloads


# -- inbox ---------------------------------------------------------------------------------------------------------------


def take(inbox: Inbox, origin: str, number: int, first: int, *payloads: bytes) -> list[bytes]:
    return inbox.take("a", SessionId(origin, number), first, list(payloads))[0]


def refused(inbox: Inbox, origin: str, number: int, first: int, *payloads: bytes) -> str:
    with pytest.raises(Refusal) as caught:
        take(inbox, origin, number, first, *payloads)
    return caught.value.reason


def test_what_came_before_is_dropped() -> None:
    inbox = Inbox()
    assert take(inbox, A, 1, 1, b"1", b"2") == [b"1", b"2"]
    assert take(inbox, A, 1, 1, b"1", b"2") == []
    assert take(inbox, A, 1, 2, b"2", b"3") == [b"3"]
    assert take(inbox, A, 1, 4) == [] and take(inbox, A, 1, 1) == []
    assert refused(inbox, A, 1, 5, b"5") == "gap" and refused(inbox, A, 1, 5) == "gap"
    assert take(inbox, A, 1, 4, b"4") == [b"4"]


def test_what_was_given_up_never_arrives() -> None:
    """Late requests of older sessions of a process, and of processes that are no more."""
    inbox = Inbox()
    assert take(inbox, A, 1, 1, b"1") == [b"1"]
    assert take(inbox, A, 2, 1) == []
    assert refused(inbox, A, 1, 2, b"late") == "session"
    assert take(inbox, B, 1, 1, b"new") == [b"new"]
    assert refused(inbox, A, 2, 1, b"late") == "session" and refused(inbox, A, 3, 1, b"late") == "session"
    assert take(inbox, B, 1, 2, b"next") == [b"next"]


def test_sessions_begin_with_their_first_message() -> None:
    inbox = Inbox()
    assert refused(inbox, A, 1, 7, b"7") == "gap"
    assert take(inbox, A, 1, 1, b"1") == [b"1"]
    assert refused(inbox, A, 2, 7, b"7") == "gap"
    assert take(inbox, A, 1, 2, b"2") == [b"2"]  # the session goes on: nothing of the other was taken


def test_the_memory_of_processes_has_an_end() -> None:
    inbox = Inbox()
    for _ in range(100):
        take(inbox, new_token(), 1, 1, b"x")
    assert len(inbox._senders) == 1 and len(inbox._senders["a"].ended) == 16


# -- outbox --------------------------------------------------------------------------------------------------------------


def test_an_outbox_is_full() -> None:
    box = Outbox("b", A, ControlSettings(outbox_messages=3, outbox_bytes=10))
    assert [box.put(b"1234"), box.put(b"1234")] == [True, False]
    box.put(b"")
    batch = box.begin(0.0)
    assert batch.payloads == [b"1234", b"1234", b""] and batch.first == 1
    assert not box.answered(batch) and len(box) == 0 and box.overflowed() is None
    box.put(b"12345678")
    assert box.begin(0.0).first == 4


@pytest.mark.parametrize("payloads", [(b"1234", b"1234", b"123"), (b"", b"", b"", b"")])
def test_what_does_not_fit_loses_the_peer_and_all_that_waited(payloads: tuple[bytes, ...]) -> None:
    box = Outbox("b", A, ControlSettings(outbox_messages=3, outbox_bytes=10))
    *fit, last = payloads
    for payload in fit:
        box.put(payload)
    under_way = box.begin(0.0)
    with pytest.raises(OverflowError, match=rf"{len(fit)} messages \(\d bytes\) wait already for the agent of node b"):
        box.put(last)
    assert len(box) == 0 and box.lost is not None and box.lost.node == "b" and box.lost.hint
    with pytest.raises(AgentUnavailableError, match="wait already"):
        box.put(b"")
    assert not box.answered(under_way), "what was under way belongs to a session that is over"
    assert box.overflowed() is box.lost and box.overflowed() is None and box.troubled
    again = box.begin(1.0)
    assert again.payloads == [] and again.session > under_way.session
    assert box.answered(again)
    box.put(b"new")
    assert box.begin(2.0).payloads == [b"new"]


def test_an_outbox_loses_its_peer() -> None:
    box = Outbox("b", A, ControlSettings(peer_timeout_s=10))
    box.put(b"1")
    first = box.begin(100.0)
    assert box.attempt_s(100.0, 5) == pytest.approx(10 / 3) and box.attempt_s(109.0, 5) == pytest.approx(1.0)
    assert box.overdue_s(109.9) is None and box.overdue_s(110.5) == pytest.approx(10.5)
    error = AgentUnavailableError("gone", node="b", hint="look")
    assert box.lose(error) and not box.lose(error) and box.overdue_s(200) is None
    assert len(box) == 0 and box.lost is error
    with pytest.raises(AgentUnavailableError, match="gone"):
        box.put(b"2")
    again = box.begin(120.0)
    assert again.payloads == [] and again.session > first.session and again.first == 1
    assert box.answered(again) and not box.troubled
    box.put(b"3")
    assert box.begin(121.0).payloads == [b"3"]


def test_backoff_grows_and_ends() -> None:
    box = Outbox("b", A, ControlSettings(peer_timeout_s=10))
    waits = [box.backoff_s(failures, 1.0) for failures in range(1, 40)]
    assert waits == sorted(waits) and waits[0] == pytest.approx(0.04) and waits[-1] == 1.0
    assert box.backoff_s(5, 0.0) == box.backoff_s(5, 1.0) / 2


# -- addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["10.0.0.1:80", "node-1.cluster:65535", "[::1]:1", "[fe80::1%eth0]:9"])
def test_addresses_come_back(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "x", ":1", "x:", "x:0", "x:65536", "x:-1", "::1:80", "x:\u0661", "[]:1", "x:1 "])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no address"):
        Address.parse(text)


def test_where_to_listen() -> None:
    assert addresses.resolve("127.0.0.1") == (socket.AF_INET, "127.0.0.1")
    assert addresses.resolve("::1") == addresses.resolve("[::1]") == (socket.AF_INET6, "::1")
    assert addresses.resolve("lo") == (socket.AF_INET, "127.0.0.1")
    assert addresses.resolve("localhost")[1] in ("127.0.0.1", "::1")
    with pytest.raises(ConfigurationError, match="no network interface"):
        addresses.resolve("no-such-interface0")


def test_an_interface_with_ipv6_only(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000020000fffe000001 02 40 20 80    lo\n"
        "20010db8000000000000000000000001 02 40 00 80    lo\n"
        "00000000000000000000000000000009 01 80 10 80 other\n"
    )
    monkeypatch.setattr(addresses, "_INET6_TABLE", table)
    monkeypatch.setattr(addresses, "_ipv4_of", lambda interface: None)
    assert addresses.resolve("lo") == (socket.AF_INET6, "2001:db8::1")
    table.write_text("fe80000000000000020000fffe000001 02 40 20 80    lo\n")
    assert addresses.resolve("lo") == (socket.AF_INET6, "fe80::200:ff:fe00:1%lo")
    table.write_text("")
    with pytest.raises(ConfigurationError, match="has no IP address"):
        addresses.resolve("lo")


def test_a_port_that_is_taken() -> None:
    with addresses.listening_socket("127.0.0.1", 0) as sock:
        with pytest.raises(ConfigurationError, match="cannot listen"):
            addresses.listening_socket("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(ConfigurationError, match="cannot listen"):
        addresses.listening_socket("192.0.2.1", 0)  # nobody's
