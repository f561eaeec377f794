"""What crosses the socket: every message there and back, and nothing else."""

from __future__ import annotations

import typing
from collections.abc import Callable

import msgspec
import pytest

from safehold._version import __version__
from safehold.agent import chunk_messages, greeting, held_messages
from safehold.agent import messages as m
from safehold.errors import CommitError, ConfigurationError
from safehold.host.sockets import MAX_FRAME_BYTES, Channel

ERROR = CommitError("no", step=3, rank=1, hint="do this").to_wire()
WORLD = m.World("t", 2, [0, 0], ["host"])
REQUESTS = [
    m.Hello(1, 1, "0", 0, 77, WORLD, {"flush_nice": 1}, {"last": 3}, 2.5, 4, "run"),
    m.Meet(3, ["10.0.0.1:7000", "[::1]:7001"]),
    m.OpenRun(2),
    m.JoinRun(3, "run", 4),
    m.Register(4, [("w", "float32", [2, 3], "torch")]),
    m.Prepare(5, 1 << 40),
    m.Begin(6, 10, 1, "d", b"part", [(0, 4096)], 8192, [("w@0,0", 4096, 4)], {"loss": 0.5}, 3, True, True, True),
    m.Staged(7, 10, 1, {"a": b"\x00\xff"}, True, 0.25),
    m.StageFailed(8, 10, 1, ERROR),
    m.RestoreAsk(9, None),
    m.RestoreAsk(9, 10),
    held_messages.MemoryAsk(10, 1),
    held_messages.MemoryAsk(10, 1, (5, 2, 0)),
    held_messages.HeldAsk(10, 1, "plans/0", 4096, 10),
    m.Vote(11, 2, "planned", ERROR, "p", ["a"], ["b"], ["c"], 9, b"set", 77),
    chunk_messages.CacheAsk(12, 3),
    chunk_messages.ChunksAsk(12, 3, [(5, 4096)], [6], 0.5),
    chunk_messages.ChunksUsed(12, 3, [5], [5]),
    chunk_messages.ReadingOver(12, 3, True),
    m.RestoreDone(12, 10),
    m.ProtectionAsk(13, 4.5),
    m.Bye(14, False),
    m.StatusAsk(15),
]
REPLIES = [
    m.Welcome(1, "0", 77),
    m.RunOpened(2, "run", 4, None, ["note"]),
    m.Done(3),
    m.Refused(4, ERROR),
    m.Prepared(5, 1, 4096),
    m.Granted(6, 1, 4096),
    m.PartWanted(6),
    m.Skipped(7, "busy"),
    m.RestoreOffer(8, 10, 1, 0, b"manifest", [0, 1], ["step 20 is bad"], 3),
    m.RestoreOffer(8, 10, 1, 0, b"manifest", [0], [], 3, [], {}, False, "memory", {0: [1], -1: [0, 1]}),
    held_messages.MemorySource(9, 4096, [(0, 4096)]),
    held_messages.HeldBytes(9, 4096),
    chunk_messages.Cache(9, 0, 8192, 1, [([0, 1], b"set")]),
    chunk_messages.ChunksToRead(9, [(5, 0)], False),
    chunk_messages.NodeRead(9, 4096),
    m.Verdict(10, "stop", ERROR, 4, (["a"], ["b"], ["c"])),
    m.Status(11, {"pid": 1, "session": None}),
    m.Settled({"groups": []}),
    m.Protected(10, True),
    m.Durable(10, 1, "flash", {"bytes": 1.0}),
    m.LeftOut(10, 1, "a newer one came"),
    m.SaveFailed(10, 1, ERROR),
    m.Superseded(5),
    m.Note("text"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_come_back_as_they_were(message: msgspec.Struct) -> None:
    assert m.decode_request(m.encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_come_back_as_they_were(message: msgspec.Struct) -> None:
    assert m.decode_reply(m.encode(message)) == message


def test_no_message_is_left_out() -> None:
    assert {type(message) for message in REQUESTS} == set(typing.get_args(m.Request))
    assert {type(message) for message in REPLIES} == set(typing.get_args(m.Reply))


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_is_no_request(message: msgspec.Struct) -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode_request(m.encode(message))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "drain", "id": "one"}),
        msgspec.msgpack.encode({"type": "prepare", "id": 1, "arena_bytes": 1.5}),
        msgspec.msgpack.encode({"type": "no such thing", "id": 1}),
        msgspec.msgpack.encode([1, 2, 3]),
        m.encode(m.Register(1, [])) + b"x",
        m.encode(REQUESTS[0])[:-1],
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode_request(data)


def test_the_line_that_never_changes() -> None:
    """Every agent and trainer that will ever be made reads and writes this."""
    assert m.PROTOCOL == 1, "one that counts up is fine, and the next lines then say so"
    for message, word in ((REQUESTS[0], b"hello"), (m.StatusAsk(1), b"status")):
        assert m.encode(message).startswith(b"safehold/1 " + __version__.encode() + b" " + word + b"\n")
    assert greeting.Greeting(7, "1.2.3", "is here").line() == b"safehold/7 1.2.3 is here\n"


@pytest.mark.parametrize("decode", [m.decode_request, m.decode_reply])
def test_another_protocol_is_named_and_not_decoded(decode: Callable[[bytes], object]) -> None:
    for data in (b"safehold/2 9.9 hello\n\xc1", b"safehold/2 9.9 busy\n", b"safehold/1 9.9 leaves\n"):
        with pytest.raises(greeting.OtherVersionError, match=r"safehold 9\.9 \(protocol [12]\)"):
            decode(data)


def test_what_another_version_of_the_protocol_says_is_read_if_it_can_be() -> None:
    line = b"safehold/1 9.9 hello\n"
    known = m.encode(REQUESTS[0]).partition(b"\n")[2]
    assert m.decode_request(line + known) == REQUESTS[0]
    with pytest.raises(greeting.OtherVersionError, match=r"9\.9"):
        m.decode_request(line + known[:-1])


@pytest.mark.parametrize(
    "line",
    [
        b"safehold/-1 9.9 hello\n", b"safehold/2 9.9\n", b"safehold/2 9.9 hello", b"safehold/12345678901 9.9 hello\n",
        b"safehold/2 " + b"9" * 65 + b" hello\n", b"safehold/2 9\x1b[31m hello\n", b" safehold/2 9.9 hello\n",
    ],
)  # fmt: skip
def test_what_looks_like_the_line_and_is_none_is_no_message(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode_request(line)


def test_what_is_too_long_is_refused_before_it_is_sent() -> None:
    one, other = Channel.pair()
    with one, other, pytest.raises(ConfigurationError, match="longer than"):
        one.send(m.encode(m.Staged(1, 1, 0, {"a": bytes(MAX_FRAME_BYTES)})))


def test_ranks_of_a_node() -> None:
    world = m.World("t", 4, [0, 1, 0, 1], ["a", "b"])
    assert world.ranks_of(0) == [0, 2] and world.ranks_of(1) == [1, 3]
