"""Accepts connections, and bounds what strangers can take of them.

Invariants: whoever has not shown the token yet is a stranger; strangers have a time limit (TLS handshake and first request together) and
a number limit, beyond which the oldest is cut off, so that scans can keep nobody out for long and slow ones hold nothing. What is no
HTTP gets a bare 400. Used from the loop's thread only.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from safehold.agent.net import wire
from safehold.agent.net.addresses import tune
from safehold.agent.net.gate import Refusals

ACCEPT_RETRY_S = 0.2
LINGER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the server.

    Attributes:
        max_connections: In all; further ones are closed at once.
        max_strangers: Of those, how many may be strangers.
        header_timeout_s: From connecting to the end of a first request's head that shows the token.
        idle_timeout_s: Between requests.
        body_timeout_s: For the body of control messages.
    """

    max_connections: int = 4096
    max_strangers: int = 256
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    body_timeout_s: float = 20.0


class Guest:
    """One accepted connection."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address = sock, address
        self.known = self.begun = False
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        """End it at once; the descriptor goes with its transport."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class Connection(web.RequestHandler):
    """aiohttp's side of a connection, which knows its guest and answers garbage in one word."""

    __slots__ = ("_lobby", "guest")

    def __init__(self, lobby: Lobby, guest: Guest, server: web.Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._lobby, self.guest = lobby, guest

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio."""
        self._lobby.left(self.guest)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request, or made a handler fail, without a word about this host."""
        if isinstance(exc, ConnectionError):
            raise exc
        self._lobby.refusals.tell(self.guest.address, "garbage" if status < 500 else "failure", str(exc))
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        answer = web.Response(status=status, headers={"Server": "safehold"})
        answer.force_close()
        return answer


class Lobby:
    """The accepting side of a server; see the module.

    Args:
        server: aiohttp's, with the handler.
        limits: Bounds.
        refusals: Where refusals are told.
        tls: Context, or None.
    """

    def __init__(self, server: web.Server, limits: Limits, refusals: Refusals, tls: ssl.SSLContext | None) -> None:
        self._server, self._limits, self.refusals, self._tls = server, limits, refusals, tls
        self._guests: dict[Guest, None] = {}
        self._strangers: dict[Guest, None] = {}
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None

    @property
    def num_open(self) -> int:
        """Connections there are."""
        return len(self._guests)

    def accept(self, listening: socket.socket) -> None:
        """Accept until `close`.

        Without a task: one that is cancelled drops what it has accepted in that moment, and nobody closes it.
        """
        listening.setblocking(False)
        self._listening = listening
        self._loop.add_reader(listening, self._accept_one)

    def _accept_one(self) -> None:
        listening = self._listening
        assert listening is not None
        try:
            sock, peer = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors, say: that passes
            self._loop.remove_reader(listening)
            self._loop.call_later(ACCEPT_RETRY_S, self._accept_again)
            return
        sock.setblocking(False)
        self._arrived(Guest(sock, str(peer[0])))

    def _accept_again(self) -> None:
        if self._listening is not None:
            self._loop.add_reader(self._listening, self._accept_one)

    def _arrived(self, guest: Guest) -> None:
        self._guests[guest] = self._strangers[guest] = None
        if len(self._strangers) > self._limits.max_strangers:
            oldest = next(iter(self._strangers))
            self._refuse(oldest, "crowd", "too many connections at once have not shown the token")
        if len(self._guests) > self._limits.max_connections:
            self._refuse(guest, "connections", f"more than {self._limits.max_connections} connections")
            guest.sock.close()
            return
        try:
            tune(guest.sock)
        except OSError:
            pass  # it is gone already: reading will tell
        late = "has not shown the token in time"
        guest.timer = self._loop.call_later(self._limits.header_timeout_s, self._refuse, guest, "slow", late)
        guest.task = self._loop.create_task(self._connect(guest))
        guest.task.add_done_callback(lambda task: None if guest.begun else guest.sock.close())

    async def _connect(self, guest: Guest) -> None:
        guest.begun = True  # from here on the socket is its transport's
        settings = {
            "loop": self._loop,
            "keepalive_timeout": self._limits.idle_timeout_s,
            "lingering_time": LINGER_S,
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": wire.MAX_HEADER_BYTES,
            "max_field_size": wire.MAX_HEADER_BYTES,
            "max_headers": wire.MAX_HEADERS,
        }
        handshake_s = self._limits.header_timeout_s if self._tls is not None else None
        make: Callable[[], Connection] = lambda: Connection(self, guest, self._server, **settings)  # noqa: E731
        try:
            await self._loop.connect_accepted_socket(make, guest.sock, ssl=self._tls, ssl_handshake_timeout=handshake_s)
        except (OSError, TimeoutError) as exc:
            self.left(guest)
            self.refusals.tell(guest.address, "handshake", str(exc) or type(exc).__name__)

    def welcome(self, guest: Guest) -> None:
        """It has shown the token."""
        if not guest.known:
            guest.known = True
            self._strangers.pop(guest, None)
            if guest.timer is not None:
                guest.timer.cancel()

    def left(self, guest: Guest) -> None:
        """It is gone."""
        self._guests.pop(guest, None)
        self._strangers.pop(guest, None)
        if guest.timer is not None:
            guest.timer.cancel()

    def _refuse(self, guest: Guest, reason: str, text: str) -> None:
        self.left(guest)
        self.refusals.tell(guest.address, reason, text)
        guest.cut()

    def close(self) -> None:
        """Accept no more, and cut everybody off; the listening socket is still open."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening = None
        for guest in list(self._guests):
            guest.cut()
