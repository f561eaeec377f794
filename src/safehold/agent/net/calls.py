"""The server's route for calls: a question of one node to another, small enough for memory, answered once.

Invariants: the handler is called in the loop's thread and hands the work over; its answer may come from any thread, and an answer that
comes too late is dropped. Bodies are bounded each and all together; questions and answers carry a checksum. A call is carried out at most
once for each request that is sent; whether to ask again is for the asking side to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from safehold.agent.net import wire
from safehold.agent.net.wire import Refusal
from safehold.errors import CheckpointError
from safehold.format.crc import crc

MAX_CALLS, MAX_OPEN_BYTES = 256, 128 << 20
ANSWER_TIMEOUT_S = 900.0

Reply = Callable[[bytes | CheckpointError], None]
Handler = Callable[[str, bytes, Reply], None]
"""(asking node, question, reply): must not block or raise; calls `reply` once, from any thread."""


def is_aside(raw_path: str) -> bool:
    """Whether a request may come from a process beside the agent, so that it is no sign of the agent's life."""
    return raw_path.startswith((wire.CALL_PATH, f"{wire.DATA_PATH}flash/"))


class CallRoutes:
    """See the module.

    Args:
        node: This node's name.
        read: Receives the body of a request.
    """

    def __init__(self, node: str, read: Callable[[web.BaseRequest], Awaitable[bytearray]]) -> None:
        self._node, self._read = node, read
        self._num_open = self._open_bytes = 0
        self.handlers: dict[str, Handler] = {}

    async def post(self, request: web.BaseRequest, node: str) -> web.StreamResponse:
        """Receive a question, have it answered, and send the answer."""
        handler = self.handlers.get(request.raw_path.removeprefix(wire.CALL_PATH))
        if handler is None:
            raise Refusal(404, "kind", "there is nobody here for this kind of question", told=False)
        size = request.content_length or 0
        if self._num_open >= MAX_CALLS or self._open_bytes + size > MAX_OPEN_BYTES:
            raise Refusal(503, "busy", "too many questions at once", told=False)
        self._num_open, self._open_bytes = self._num_open + 1, self._open_bytes + size
        try:
            question = bytes(await self._read(request))
            if crc(question) != wire.number(request.headers.get(wire.CRC), wire.CRC):
                raise Refusal(400, "checksum", "the question does not match its checksum")
            return self._send(await self._ask(handler, node, question))
        finally:
            self._num_open, self._open_bytes = self._num_open - 1, self._open_bytes - size

    async def _ask(self, handler: Handler, node: str, question: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes | CheckpointError] = loop.create_future()

        def settle(answer: bytes | CheckpointError) -> None:
            if not future.done():
                future.set_result(answer)

        def reply(answer: bytes | CheckpointError) -> None:
            try:
                loop.call_soon_threadsafe(settle, answer)
            except RuntimeError:
                pass  # the loop is closed

        handler(node, question, reply)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await future
        except TimeoutError:
            raise Refusal(504, "slow", f"there was no answer in {ANSWER_TIMEOUT_S:g} s", told=False) from None
        if isinstance(answer, CheckpointError):
            raise Refusal(502, "error", answer.message, told=False, error=answer.to_wire())
        if len(answer) > wire.MAX_BODY_BYTES:
            raise Refusal(502, "size", f"the answer has {len(answer)} bytes, {wire.MAX_BODY_BYTES} at most", told=False)
        return answer

    def _send(self, answer: bytes) -> web.Response:
        headers = {
            "Server": "safehold",
            "Content-Type": "application/octet-stream",
            wire.NODE: wire.quote(self._node),
            wire.CRC: str(crc(answer)),
        }
        return web.Response(status=200, body=answer, headers=headers)
