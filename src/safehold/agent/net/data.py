"""The server's routes for bulk bytes: others read what providers have, and write where sinks say.

Invariants: a descriptor that a provider gave is closed; a landing that a sink gave hears `done` or `failed`, once. The loop only checks
requests: providers, sinks and the bytes themselves are the business of threads, which a dead disk may hold. Over TLS bytes pass through
the loop, since sendfile cannot encrypt.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

from aiohttp import web

from safehold.agent.net import wire
from safehold.agent.net.loop import Workers
from safehold.agent.net.seam import Incoming, Landing, Provider, Sink, Source
from safehold.agent.net.transfer import CutError, Filler, Patience, read_source, receive, send_source
from safehold.agent.net.wire import Refusal
from safehold.errors import AgentUnavailableError, CheckpointError

TLS_CHUNK_BYTES = 1 << 20
BUSY_S = 1.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class DataRoutes:
    """See the module.

    Args:
        node: This node's name.
        workers: Threads for what blocks; one transfer needs one at a time.
        num_transfers: At once; further ones are told to come again after `BUSY_S`. Not more than there are workers.
        patience: How long transfers may take.
        answer: Makes an answer of a status and plain values.
    """

    def __init__(
        self,
        node: str,
        workers: Workers,
        num_transfers: int,
        patience: Patience,
        answer: Callable[..., web.Response],
    ) -> None:
        self._node, self._workers, self._patience, self._answer = node, workers, patience, answer
        self._slots = asyncio.Semaphore(num_transfers)
        self._stop = threading.Event()
        self.providers: dict[str, Provider] = {}
        self.sinks: dict[str, Sink] = {}
        self.num_bytes_sent = self.num_bytes_received = 0

    def close(self) -> None:
        """End the transfers that are under way."""
        self._stop.set()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait for others to end, not for long: whoever asks has a deadline, and has to know that we live."""
        try:
            async with asyncio.timeout(BUSY_S):
                await self._slots.acquire()
        except TimeoutError:
            raise Refusal(503, "busy", "too many transfers are under way", told=False) from None
        try:
            yield
        finally:
            self._slots.release()

    async def serve(self, request: web.BaseRequest, node: str) -> web.StreamResponse:
        """Answer a GET or a PUT."""
        async with self._slot():
            return await (self._get if request.method == "GET" else self._put)(request, node)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _get(self, request: web.BaseRequest, node: str) -> web.StreamResponse:
        """Send a range of what a provider has."""
        kind, name = wire.kind_and_name(request.raw_path)
        provider = self.providers.get(kind)
        source = await self._workers.run(lambda: _ask(lambda: provider(node, name))) if provider is not None else None
        if source is None:
            raise Refusal(404, "absent", f"there is no {kind} {name!r} here", told=False)
        try:
            offset, size = wire.byte_range(request.headers.get("Range"), source.size)
            answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
            answer.headers.update(
                {"ETag": f'"{source.version}"', "Content-Type": "application/octet-stream", "Server": "safehold"}
            )
            answer.headers[wire.SIZE] = str(source.size)
            answer.headers[wire.NODE] = wire.quote(self._node)
            if "Range" in request.headers:
                answer.headers["Content-Range"] = wire.format_content_range(offset, size, source.size)
            answer.content_length = size
            try:
                await self._send(request, answer, source, offset, size)
            except (TimeoutError, OSError) as exc:
                raise CutError(str(exc) or "the other side was too slow") from exc
            return answer
        finally:
            os.close(source.fd)

    async def _send(
        self, request: web.BaseRequest, answer: web.StreamResponse, source: Source, offset: int, size: int
    ) -> None:
        writer = await answer.prepare(request)
        transport = request.transport
        if writer is None or transport is None:
            raise ConnectionError("the connection is gone")
        if transport.get_extra_info("sslcontext") is not None:
            await self._send_encrypted(answer, source, offset, size)
        else:
            writer.send_headers()
            async with asyncio.timeout(self._patience.stall_s):
                while transport.get_write_buffer_size():
                    await asyncio.sleep(0.001)
            sock = _duplicate(request)

            def work() -> None:
                with sock:
                    send_source(sock, source, offset, size, self._patience, self._stop)

            await self._workers.run(work)
        await answer.write_eof()
        self.num_bytes_sent += size

    async def _send_encrypted(self, answer: web.StreamResponse, source: Source, offset: int, size: int) -> None:
        async with asyncio.timeout(self._patience.total_s(size)):
            end = offset + size
            while offset < end:
                start, count = offset, min(TLS_CHUNK_BYTES, end - offset)
                data = await self._workers.run(lambda start=start, count=count: read_source(source, start, count))  # type: ignore[misc]
                async with asyncio.timeout(self._patience.stall_s):
                    await answer.write(data)
                offset += count

    # -- writing -------------------------------------------------------------------------------------------------------

    async def _put(self, request: web.BaseRequest, node: str) -> web.StreamResponse:
        """Receive a range to where a sink wants it."""
        kind, name = wire.kind_and_name(request.raw_path)
        size = request.content_length
        if size is None:
            raise Refusal(411, "length", "bytes without a Content-Length are not taken")
        offset, total = wire.content_range(request.headers.get("Content-Range"), size)
        sink = self.sinks.get(kind)
        if sink is None:
            raise Refusal(404, "absent", f"no {kind} is taken here", told=False)
        incoming = Incoming(node=node, name=name, offset=offset, size=size, total=total)
        invited = request.headers.get("Expect", "").lower() == "100-continue"
        encrypted = request.transport is None or request.transport.get_extra_info("sslcontext") is not None
        try:
            if invited and not encrypted and size and request.content.total_bytes == 0:
                value = await self._receive_in_place(request, sink, incoming)
                closing = True
            else:
                value = await self._receive_through_loop(request, sink, incoming, invited=invited)
                closing = False
        except CutError as exc:
            status = 408 if "slow" in str(exc) or "moved" in str(exc) else 400
            raise Refusal(status, "cut", str(exc)) from exc
        except CheckpointError as exc:  # of the landing's `done`
            raise Refusal(502, "error", exc.message, told=False, error=exc.to_wire()) from exc
        self.num_bytes_received += size
        answer = self._answer(200, crc32=value, size=size)
        if closing:
            answer.force_close()
        return answer

    async def _receive_in_place(self, request: web.BaseRequest, sink: Sink, incoming: Incoming) -> int:
        """Read the body from the socket beside the loop, which sees nothing of it; so the connection ends after the answer."""
        transport = request.transport
        assert transport is not None and isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        sock = _duplicate(request)

        def invite() -> None:
            sock.sendall(CONTINUE)  # nothing else is on its way out: this never waits

        def work() -> int:
            with sock:
                if self._stop.is_set():
                    raise CutError("the agent is closing")
                with _Outcome(_open(sink, incoming), incoming) as outcome:
                    filler = _filler(outcome.landing, incoming.size)
                    outcome.value = receive(sock, filler, incoming.size, self._patience, self._stop, invite=invite)
                return outcome.value

        try:
            return await self._workers.run(work)
        finally:
            request.content.feed_eof()  # nobody waits for a body that the loop does not get

    async def _receive_through_loop(
        self, request: web.BaseRequest, sink: Sink, incoming: Incoming, *, invited: bool
    ) -> int:
        landing = await self._workers.run(lambda: _open(sink, incoming))
        outcome = _Outcome(landing, incoming)
        try:
            with outcome:
                filler = _filler(landing, incoming.size)
                if invited and request.transport is not None and isinstance(request.transport, asyncio.Transport):
                    request.transport.write(CONTINUE)
                async with asyncio.timeout(self._patience.total_s(incoming.size)):
                    while filler.filled < incoming.size:
                        async with asyncio.timeout(self._patience.stall_s):
                            data = await request.content.readany()
                        if not data:
                            raise CutError(f"the body ended after {filler.filled} of {incoming.size} bytes")
                        filler.put(data)
                outcome.value = filler.finish()
        except TimeoutError as exc:
            raise CutError("the other side was too slow") from exc
        except (web.RequestPayloadError, ConnectionError) as exc:
            raise CutError(f"the connection ended: {exc}") from exc
        return outcome.value


class _Outcome:
    """Tells a landing how it ended, once."""

    def __init__(self, landing: Landing, incoming: Incoming) -> None:
        self.landing, self._incoming = landing, incoming
        self.value = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.landing.done(self.value)
            return
        why = str(error) or ("too slow" if isinstance(error, TimeoutError) else type(error).__name__)
        text = f"{self._incoming.name!r} did not come whole from node {self._incoming.node}: {why}"
        self.landing.failed(AgentUnavailableError(text, node=self._incoming.node))


def _ask(call: Callable[[], Source | None]) -> Source | None:
    """Ask a provider; what it raises becomes an answer."""
    try:
        return call()
    except CheckpointError as exc:
        raise Refusal(502, "error", exc.message, told=False, error=exc.to_wire()) from exc


def _open(sink: Sink, incoming: Incoming) -> Landing:
    """Ask a sink, and hold it to the size."""
    try:
        landing = sink(incoming)
    except CheckpointError as exc:
        raise Refusal(502, "error", exc.message, told=False, error=exc.to_wire()) from exc
    if landing is None:
        raise Refusal(404, "absent", f"{incoming.name!r} is not taken here", told=False)
    if landing.view is not None and landing.view.nbytes != incoming.size:
        text = f"{incoming.size} bytes come where {landing.view.nbytes} are taken"
        landing.failed(AgentUnavailableError(text, node=incoming.node))
        raise Refusal(413, "size", text)
    return landing


def _filler(landing: Landing, size: int) -> Filler:
    if landing.view is not None:
        return Filler(size, view=landing.view)
    return Filler(size, fd=landing.fd, offset=landing.offset)


def _duplicate(request: web.BaseRequest) -> socket.socket:
    """Return the connection's socket under a descriptor of its own, which nobody else closes; non-blocking, as the other is."""
    shared = request.get_extra_info("socket")
    if shared is None or shared.fileno() < 0:
        raise ConnectionError("the connection is gone")
    sock = socket.socket(fileno=os.dup(shared.fileno()))
    sock.settimeout(0)
    return sock
