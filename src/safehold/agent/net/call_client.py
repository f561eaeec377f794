"""Asks another node's agent questions: whole bodies there and back, checked, and over by a deadline.

Invariants: a question that may be carried out only once is sent once: over a connection of its own, and not again after a byte of it went.
Used from any number of threads, and from processes beside the agent, which know its token.
"""

from __future__ import annotations

import ssl
import time

from safehold.agent.net import wire
from safehold.agent.net.addresses import Address
from safehold.agent.net.bulk import BulkClient, BulkSettings, length_of
from safehold.agent.net.identity import Identity
from safehold.agent.net.streams import BrokenError, Stream
from safehold.errors import AgentUnavailableError
from safehold.format.crc import crc

STREAMS = 16
NOT_DONE = (400, 408, 503)
"""Refusals of a question before anybody looked at it."""


class _NotDoneError(BrokenError):
    """The question was refused before anybody looked at it."""


class CallClient(BulkClient):
    """See the module.

    Args:
        node: The peer's name.
        address: Where it listens.
        identity: Who we are.
        tls: Context, or None.
        peer_timeout_s: Without a connection for so long, a call fails.
        once: Whether questions are sent only once, over connections of their own.
    """

    def __init__(
        self,
        node: str,
        address: Address,
        *,
        identity: Identity,
        tls: ssl.SSLContext | None,
        peer_timeout_s: float,
        once: bool = False,
    ) -> None:
        settings = BulkSettings(peer_timeout_s=peer_timeout_s, streams=STREAMS, idle_s=-1.0 if once else 20.0)
        super().__init__(node, address, identity=identity, tls=tls, settings=settings)
        self._once = once

    def call(self, kind: str, question: bytes, *, deadline_s: float) -> bytes:
        """Return the answer to a question.

        Raises:
            AgentUnavailableError: The node cannot be reached, or refuses; a question that is sent once may be carried out.
            DeadlineError: There was no answer in time.
            CheckpointError: What the other side answered with.
        """

        def go(stream: Stream) -> bytes:
            try:
                return self._exchange(stream, kind, question)
            except _NotDoneError:
                raise
            except BrokenError as exc:
                if not self._once:
                    raise
                text = f"the connection to the agent of node {self.node} at {self.address} broke before it had answered: {exc}"
                hint = "it may have done what was asked, or not"
                raise AgentUnavailableError(text, node=self.node, hint=hint) from exc

        return self._insist(go, f"a question ({kind})", deadline_s, lambda: 0)

    def _exchange(self, stream: Stream, kind: str, question: bytes) -> bytes:
        stream.request("POST", wire.CALL_PATH + wire.check_kind(kind), self._headers(question))
        self._send(stream, memoryview(question))
        status, headers = stream.head()
        if status in NOT_DONE:
            raise _NotDoneError(f"status {status}")
        if status != 200:
            self._answer_of(stream, status, headers, wanted=200)
        if headers.get(wire.NODE) != wire.quote(self.node):
            raise BrokenError(f"node {headers.get(wire.NODE)!r} answers there")
        answer = _body(stream, length_of(headers))
        stream.reusable = headers.get("Connection", "").lower() != "close"
        if headers.get(wire.CRC) != str(crc(answer)):
            raise BrokenError("the answer does not match its checksum")
        return answer

    def _headers(self, question: bytes) -> dict[str, str]:
        return {
            **self._identity.headers(self.node),
            "Content-Length": str(len(question)),
            "Content-Type": "application/octet-stream",
            wire.CRC: str(crc(question)),
        }

    def _take(self, deadline: float) -> Stream:
        """As for bulk bytes; but an answer may be as long in coming as the deadline says, a connection may not."""
        with self._lock:
            stream = self._kept.pop() if self._kept else None
            if self._closed:
                raise BrokenError("the way to the other node is closed")
        now = time.monotonic()
        if stream is not None and now - stream.used_at > self._settings.idle_s:
            stream.close()
            stream = None
        if stream is None:
            patience_s = self._settings.peer_timeout_s
            stream = Stream(
                self.address,
                tls=self._tls,
                deadline=min(deadline, now + patience_s),
                stall_s=max(0.0, deadline - now),
                lost_after_s=patience_s,
            )
        stream.deadline = deadline
        with self._lock:
            self._out.add(stream)
        return stream


def _body(stream: Stream, size: int) -> bytes:
    if size > wire.MAX_BODY_BYTES:
        raise BrokenError("the answer is too long")
    data = bytearray(size)
    view = memoryview(data)
    while len(view):
        view = view[stream.read_into(view) :]
    return bytes(data)
