"""One kept connection for bulk bytes, from the asking side, with a deadline for everything.

Invariants: every wait ends by the deadline of the call that uses the stream, also where the other side sends a byte now and then; bytes
of a body go from the socket to where they belong. (`http.client` cannot do either, nor wait for `100 Continue`; its parser of headers
is used.)
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import ssl
import time
from collections.abc import Iterator
from email.message import Message

from safehold.agent.net import wire
from safehold.agent.net.addresses import Address, tune

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r?\n")
_HEAD_BUFFER_BYTES = 4096
_SEND_BYTES = 1 << 20


class BrokenError(Exception):
    """The connection broke or stalled, or what came is no answer; a new one may do better."""


class BusyError(BrokenError):
    """The other side is there, and has no room for one more transfer now."""


class _Raw(io.RawIOBase):
    """The receiving end of a socket, with the stream's deadline for each read."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        sock = self._stream.sock
        sock.settimeout(self._stream.patience_s())
        return sock.recv_into(buffer)


class Stream:
    """A connection to a peer.

    Attributes:
        deadline: Of the call that uses it, monotonic seconds.
        used_at: When it was last given back.
        fresh: Whether nothing was asked over it yet.
        reusable: Whether the next may use it.

    Args:
        address: Where it listens.
        tls: Context, or None.
        deadline: Of the first call, monotonic seconds.
        stall_s: The longest that nothing may move.
        lost_after_s: A host that is not there any more is noticed by then, however long the deadline is; 0: by the deadline.

    Raises:
        BrokenError: There is no connection to be had.
    """

    def __init__(
        self,
        address: Address,
        *,
        tls: ssl.SSLContext | None,
        deadline: float,
        stall_s: float,
        lost_after_s: float = 0.0,
    ) -> None:
        self.deadline, self._stall_s = deadline, stall_s
        self.used_at = time.monotonic()
        self.fresh = self.reusable = True
        self._address = address
        with _translated("connecting"):
            self.sock = self._connect(address)
            try:
                tune(self.sock, lost_after_s)
                if tls is not None:
                    self.sock.settimeout(self.patience_s())
                    self.sock = tls.wrap_socket(self.sock, server_hostname=address.host.partition("%")[0])
            except BaseException:
                self.sock.close()
                raise
        self._reader = io.BufferedReader(_Raw(self), _HEAD_BUFFER_BYTES)

    def _connect(self, address: Address) -> socket.socket:
        error: OSError | None = None
        for family, kind, protocol, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.patience_s())
                sock.connect(where)
                return sock
            except OSError as exc:
                error = exc
                sock.close()
        raise error or OSError(f"{address.host} has no address")

    def patience_s(self) -> float:
        """Return how long one wait may take."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left_s, self._stall_s)

    def request(self, method: str, path: str, headers: dict[str, str]) -> None:
        """Send the head of a request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._address}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with _translated("asking"):
            self.sock.settimeout(self.patience_s())
            self.sock.sendall("\r\n".join([*lines, "\r\n"]).encode("ascii"))

    def head(self) -> tuple[int, Message]:
        """Receive the head of an answer; returns status and headers."""
        with _translated("waiting for the answer"):
            line = self._reader.readline(wire.MAX_HEADER_BYTES)
            if not line:
                raise BrokenError("the connection was closed")
            found = _STATUS.fullmatch(line)
            if found is None:
                raise BrokenError("what came is no answer of HTTP")
            return int(found[1]), http.client.parse_headers(self._reader)

    def read_into(self, view: memoryview) -> int:
        """Receive some bytes of a body; returns how many, at least one."""
        with _translated("receiving"):
            count = self._reader.readinto1(view)
            if not count:
                raise BrokenError("the connection was closed in the middle of an answer")
            return count

    def read(self, size: int) -> bytes:
        """Receive a short body as a whole."""
        if not 0 <= size <= wire.MAX_ANSWER_BYTES:
            raise BrokenError("the answer is too long")
        data = bytearray(size)
        view = memoryview(data)
        while len(view):
            view = view[self.read_into(view) :]
        return bytes(data)

    def send(self, view: memoryview) -> None:
        """Send bytes of a body."""
        with _translated("sending"):
            for start in range(0, len(view), _SEND_BYTES):
                self.sock.settimeout(self.patience_s())
                self.sock.sendall(view[start : start + _SEND_BYTES])

    def close(self) -> None:
        """Close, from the thread that uses it."""
        self.sock.close()

    def hang_up(self) -> None:
        """Break it from another thread; who uses it sees the end of it, and closes."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise BrokenError(f"{doing} took too long") from exc
    except (OSError, http.client.HTTPException) as exc:
        raise BrokenError(f"{doing} failed: {getattr(exc, 'strerror', None) or exc or type(exc).__name__}") from exc
