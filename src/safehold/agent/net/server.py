"""The HTTP server of an agent: control messages, bulk bytes, health and metrics, on one port.

Invariants: nothing is answered without the token, and nothing is delivered twice or out of order (`inbox`). Messages are delivered in the
loop's thread, before they are acknowledged. Every wait has a deadline, every body and table a bound; what is refused harms nobody else.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from safehold.agent.net import wire
from safehold.agent.net.addresses import Address, address_of, listening_socket
from safehold.agent.net.calls import CallRoutes, Handler, is_aside
from safehold.agent.net.connections import Connection, Limits, Lobby
from safehold.agent.net.data import DataRoutes
from safehold.agent.net.gate import Gate, Refusals
from safehold.agent.net.inbox import Inbox
from safehold.agent.net.loop import LoopThread, Workers
from safehold.agent.net.seam import OnMessage, Provider, Sink
from safehold.agent.net.transfer import CutError, Patience
from safehold.agent.net.wire import Refusal
from safehold.errors import ConfigurationError
from safehold.events import EventStream
from safehold.format.crc import crc

NUM_TRANSFERS = 32
MIN_TOKEN_CHARS = 16

OnHeard = Callable[[str], None]


class NetworkServer:
    """See the module. Listens from the constructor on; `know` says who may speak.

    Args:
        node: This node's name.
        bind: IP address, name of an interface, or host name to listen at.
        port: 0: any that is free.
        token: Shared by the agents of the run.
        run_id: Of the run.
        incarnation: Returns the current one.
        on_message: Gets messages, in the loop's thread; must not block or raise.
        on_heard: Hears of every request of a node, in the loop's thread.
        metrics: Gives the text of the metrics.
        thread: Runs the loop; the caller closes it.
        events: Where refusals are told.
        tls: Context for TLS, or None.
        limits: Bounds of connections.
        patience: How long bulk transfers may take.
        num_transfers: How many of them at once; each takes a thread.

    Raises:
        ConfigurationError: It cannot listen there, or the token is no good.
    """

    def __init__(
        self,
        *,
        node: str,
        bind: str,
        port: int = 0,
        token: str,
        run_id: str,
        incarnation: Callable[[], int],
        on_message: OnMessage,
        on_heard: OnHeard = lambda node: None,
        metrics: Callable[[], str] = lambda: "",
        thread: LoopThread,
        events: EventStream,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        patience: Patience | None = None,
        num_transfers: int = NUM_TRANSFERS,
    ) -> None:
        if len(token) < MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()) or " " in token:
            text = f"the token of the agents has to be {MIN_TOKEN_CHARS} or more printable ASCII characters"
            raise ConfigurationError(text)
        self._node, self._on_message, self._on_heard, self._metrics = node, on_message, on_heard, metrics
        self._thread, self._limits = thread, limits or Limits()
        self._gate = Gate(node=node, token=token, run_id=run_id, incarnation=incarnation)
        self._incarnation = incarnation
        self.refusals = Refusals(events)
        self._inbox = Inbox()
        self._workers = Workers(num_transfers, thread.loop)
        self._data = DataRoutes(node, self._workers, num_transfers, patience or Patience(), self._answer)
        self._calls = CallRoutes(node, self._body)
        self.num_messages = 0
        self._sock = listening_socket(bind, port)
        self.address: Address = address_of(self._sock, bind)
        self._lobby: Lobby | None = None
        thread.call(self._open(tls))

    async def _open(self, tls: ssl.SSLContext | None) -> None:
        server = web.Server(self._handle)
        self._lobby = Lobby(server, self._limits, self.refusals, tls)
        self._lobby.accept(self._sock)

    # -- what others call ----------------------------------------------------------------------------------------------

    def know(self, nodes: Iterable[str]) -> None:
        """From now on these nodes, and no others, may speak."""
        self._gate.know(nodes)

    def provide(self, kind: str, provider: Provider) -> None:
        """Let others read bytes of a kind."""
        self._data.providers[wire.check_kind(kind)] = provider

    def accept(self, kind: str, sink: Sink) -> None:
        """Let others write bytes of a kind."""
        self._data.sinks[wire.check_kind(kind)] = sink

    def answer_calls(self, kind: str, handler: Handler) -> None:
        """Let others ask questions of a kind; the handler is called in the loop's thread."""
        self._calls.handlers[wire.check_kind(kind)] = handler

    def close(self) -> None:
        """Stop listening, cut everybody off, end the transfers."""
        self._data.close()
        self._thread.call(self._close())
        self._workers.close()

    async def _close(self) -> None:
        if self._lobby is not None:
            self._lobby.close()
        self._sock.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection) and self._lobby is not None
        try:
            node = self._gate.admit(request.headers)
            self._lobby.welcome(connection.guest)
            if not is_aside(request.raw_path):
                self._on_heard(node)
            return await self._route(request, node)
        except Refusal as refusal:
            if refusal.told:
                self.refusals.tell(connection.guest.address, refusal.reason, refusal.text)
            return self._refuse(request, refusal)
        except CutError as exc:  # in the middle of an answer
            self.refusals.tell(connection.guest.address, "cut", str(exc))
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionError(str(exc)) from exc

    async def _route(self, request: web.BaseRequest, node: str) -> web.StreamResponse:
        path, method = request.raw_path, request.method
        if "Transfer-Encoding" in request.headers or "Content-Encoding" in request.headers:
            raise Refusal(411, "encoding", "a body comes as it is, with its Content-Length")
        if method == "GET" and request.content_length:
            raise Refusal(400, "body", "a GET has no body")
        match (method, path):
            case ("POST", wire.MESSAGES_PATH):
                return await self._messages(request, node)
            case ("POST", _) if path.startswith(wire.CALL_PATH):
                return await self._calls.post(request, node)
            case ("GET", wire.HEALTH_PATH):
                return self._answer(200, incarnation=self._incarnation(), connections=self._num_connections())
            case ("GET", wire.METRICS_PATH):
                return web.Response(text=self._metrics(), headers={"Server": "safehold"})
            case ("GET" | "PUT", _) if path.startswith(wire.DATA_PATH):
                return await self._data.serve(request, node)
        raise Refusal(404, "path", f"there is no {method} of this path")

    def _num_connections(self) -> int:
        return self._lobby.num_open if self._lobby is not None else 0

    async def _messages(self, request: web.BaseRequest, node: str) -> web.Response:
        session = wire.session_id(request.headers.get(wire.SESSION))
        first = wire.number(request.headers.get(wire.FIRST), wire.FIRST)
        body = await self._body(request)
        if crc(body) != wire.number(request.headers.get(wire.CRC), wire.CRC):
            raise Refusal(400, "checksum", "the messages do not match their checksum")
        new, last = self._inbox.take(node, session, first, wire.decode_batch(body))
        for payload in new:
            self.num_messages += 1
            self._on_message(node, payload)
        return self._answer(200, last=last)

    async def _body(self, request: web.BaseRequest) -> bytearray:
        size = request.content_length
        if size is None:
            raise Refusal(411, "length", "a body comes with its Content-Length")
        if size > wire.MAX_BODY_BYTES:
            raise Refusal(413, "size", f"{size} bytes of messages were announced, {wire.MAX_BODY_BYTES} at most")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while data := await request.content.readany():
                    body += data
        except TimeoutError:
            raise Refusal(408, "slow", f"{len(body)} of {size} bytes came in time") from None
        except (web.RequestPayloadError, ConnectionError) as exc:
            raise Refusal(400, "cut", f"{len(body)} of {size} bytes came: {exc}") from exc
        return body

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, status: int, **facts: Any) -> web.Response:
        headers = {"Server": "safehold", "Content-Type": "application/json", wire.NODE: wire.quote(self._node)}
        return web.Response(status=status, body=msgspec.json.encode(facts), headers=headers)

    def _refuse(self, request: web.BaseRequest, refusal: Refusal) -> web.Response:
        if refusal.status == 401:  # nothing at all to a stranger
            answer = web.Response(status=401, headers={"Server": "safehold", "WWW-Authenticate": "Bearer"})
        else:
            answer = self._answer(refusal.status, reason=refusal.reason, text=refusal.text, **refusal.facts)
        if refusal.told or request.method == "PUT":
            answer.force_close()  # a body may still be on its way
        return answer
