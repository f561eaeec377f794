"""The words of the protocol: headers, batches of messages, ranges, names, refusals. Pure.

Invariants: whatever is malformed raises `Refusal`, never anything else; nothing is allocated by a size that was only claimed.
"""

from __future__ import annotations

import re
import struct
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from safehold.errors import ConfigurationError

RUN, INCARNATION, NODE, TO = "X-Safehold-Run", "X-Safehold-Incarnation", "X-Safehold-Node", "X-Safehold-To"
SESSION, FIRST, CRC, SIZE = "X-Safehold-Session", "X-Safehold-First", "X-Safehold-Crc32", "X-Safehold-Size"
MESSAGES_PATH, DATA_PATH, HEALTH_PATH, METRICS_PATH = "/v1/messages", "/v1/data/", "/v1/health", "/v1/metrics"
CALL_PATH = "/v1/call/"

MAX_BODY_BYTES = 16 << 20
MAX_BATCH_MESSAGES = 4096
MAX_NAME_BYTES = 1024
MAX_HEADER_BYTES = 4096
MAX_HEADERS = 32
MAX_ANSWER_BYTES = 64 << 10

_LENGTH = struct.Struct("<I")
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)
_SESSION = re.compile(r"([0-9a-f]{32})\.([0-9]{1,18})", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})", re.ASCII)
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})", re.ASCII)


class Refusal(Exception):
    """A request is refused.

    Attributes:
        status: Of HTTP.
        reason: One word for programs.
        text: A sentence for people.
        facts: Further plain values for the answer.
        told: Whether it is worth an event: an honest peer of the same version never causes it.
    """

    def __init__(self, status: int, reason: str, text: str, *, told: bool = True, **facts: Any) -> None:
        super().__init__(text)
        self.status, self.reason, self.text, self.told, self.facts = status, reason, text, told, facts


@dataclass(frozen=True, slots=True, order=True)
class SessionId:
    """Names a sender's row of messages: which process (`origin`), and the how many-th row of it."""

    origin: str
    number: int

    def __str__(self) -> str:
        return f"{self.origin}.{self.number}"


def _bad(text: str) -> NoReturn:
    raise Refusal(400, "malformed", text)


def number(text: str | None, what: str) -> int:
    """Read a header that is a plain number."""
    if text is None or not _NUMBER.fullmatch(text):
        _bad(f"{what} is missing or no number")
    return int(text)


def session_id(text: str | None) -> SessionId:
    """Read the session header."""
    found = _SESSION.fullmatch(text or "")
    if found is None:
        _bad(f"{SESSION} is missing or malformed")
    return SessionId(found[1], int(found[2]))


def quote(text: str) -> str:
    """Write a name for a header or a path: nothing of it can be mistaken for either's syntax."""
    return urllib.parse.quote(text, safe="")


def node_name(text: str | None) -> str:
    """Read a name from a header."""
    if not text or len(text) > MAX_NAME_BYTES:
        _bad("the name of a node is missing or too long")
    return urllib.parse.unquote(text, errors="replace")


def check_kind(kind: str) -> str:
    """Return a kind of bulk bytes that can stand in a path.

    Raises:
        ConfigurationError: It cannot.
    """
    if not _KIND.fullmatch(kind):
        raise ConfigurationError(
            f"{kind!r} names no kind of bytes", hint="lower-case letters, digits, '-' and '_', 32 at most"
        )
    return kind


def data_path(kind: str, name: str) -> str:
    """Return where bulk bytes are asked for."""
    return f"{DATA_PATH}{kind}/{quote(name)}"


def kind_and_name(raw_path: str) -> tuple[str, str]:
    """Read the path of a request for bulk bytes.

    Each is one segment of the path as it came, so a slash inside the name is `%2F`; the name is decoded once, and then refused if a path
    made of it could lead anywhere but downwards.
    """
    kind, slash, quoted = raw_path.removeprefix(DATA_PATH).partition("/")
    if not slash or not _KIND.fullmatch(kind):
        raise Refusal(404, "kind", "there is no such kind of bytes", told=False)
    if not quoted or len(quoted) > 3 * MAX_NAME_BYTES or any(sign in quoted for sign in "/?#"):
        raise Refusal(404, "name", "the name of the bytes is no name")
    try:
        name = urllib.parse.unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        raise Refusal(404, "name", "the name of the bytes is not UTF-8") from None
    check_name(name)
    return kind, name


def check_name(name: str) -> None:
    """Refuse names that lead out of a directory or that no file can have."""
    segments = name.split("/")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise Refusal(404, "name", f"the name of the bytes has more than {MAX_NAME_BYTES} bytes")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in name or not name.isprintable():
        raise Refusal(404, "name", "the name of the bytes has a part that no name has")


def byte_range(text: str | None, size: int) -> tuple[int, int]:
    """Read a `Range` header against the size of the thing; returns offset and size. Only one range, which has to exist as a whole."""
    if text is None:
        return 0, size
    found = _RANGE.fullmatch(text)
    if found is None:
        _refuse_range("only 'bytes=first-last' is understood", size)
    first = int(found[1])
    last = int(found[2]) if found[2] else size - 1
    if first > last or last >= size:
        _refuse_range(f"bytes {first} to {last} were asked for, of {size}", size)
    return first, last - first + 1


def _refuse_range(text: str, size: int) -> NoReturn:
    raise Refusal(416, "range", text, told=False, size=size)


def content_range(text: str | None, length: int) -> tuple[int, int]:
    """Read a `Content-Range` header; returns offset and total, for a body of `length` bytes."""
    found = _CONTENT_RANGE.fullmatch(text or "")
    if found is None:
        _bad("Content-Range is missing or malformed")
    total = int(found[3])
    if found[1] is None:
        first, size = 0, 0
    else:
        first, size = int(found[1]), int(found[2]) - int(found[1]) + 1
    if size != length or size < 0 or first + size > total or (size == 0 and found[1] is not None):
        _bad(f"Content-Range and Content-Length ({length}) contradict each other")
    return first, total


def format_content_range(offset: int, size: int, total: int) -> str:
    """Write a `Content-Range` header."""
    return f"bytes {offset}-{offset + size - 1}/{total}" if size else f"bytes */{total}"


def encode_batch(payloads: Sequence[bytes]) -> bytes:
    """Write messages as one body: the length of each, then its bytes."""
    pieces: list[bytes] = []
    for payload in payloads:
        pieces += (_LENGTH.pack(len(payload)), payload)
    return b"".join(pieces)


def decode_batch(body: bytes | bytearray | memoryview) -> list[bytes]:
    """Read what `encode_batch` wrote."""
    view, position, found = memoryview(body), 0, list[bytes]()
    while position < len(view):
        if position + _LENGTH.size > len(view) or len(found) == MAX_BATCH_MESSAGES:
            _bad("the batch of messages is malformed")
        (length,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if position + length > len(view):
            _bad("the batch of messages is cut")
        found.append(bytes(view[position : position + length]))
        position += length
    return found


def batch_bytes(payload: bytes) -> int:
    """Return what a message takes of a body."""
    return _LENGTH.size + len(payload)
