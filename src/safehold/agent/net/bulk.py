"""Bulk bytes from and to one peer: in place, resumed after a cut, checked, and over by their deadline.

Invariants: a call ends by its deadline, and earlier where the peer neither moves a byte nor says that it is busy for the peer timeout.
A read goes on where it was cut, and only if the bytes are still the same ones; a write begins again. The CRC32 that is returned is that
of the bytes in the caller's memory, and for writes the other side's, too. Used from any number of threads; each takes a connection, of
which there are few.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import TypeVar

from safehold.agent.net import wire
from safehold.agent.net.addresses import Address
from safehold.agent.net.answers import RETRIED, error_of, facts_of, unreachable
from safehold.agent.net.identity import Identity
from safehold.agent.net.streams import BrokenError, BusyError, Stream
from safehold.agent.net.transfer import Filler
from safehold.errors import AgentUnavailableError, CheckpointError, ChecksumError, DeadlineError, TornFileError
from safehold.format.crc import crc

T = TypeVar("T")

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.02, 0.5
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSettings:
    """How bulk bytes are asked for.

    Attributes:
        peer_timeout_s: Without a byte for so long, a call fails.
        stall_s: Without a byte for so long, another connection is tried.
        streams: Connections to one peer at most.
        idle_s: A kept connection is not used any more after so long.
    """

    peer_timeout_s: float = 10.0
    stall_s: float = 5.0
    streams: int = 4
    idle_s: float = 20.0


class BulkClient:
    """See the module.

    Args:
        node: The peer's name.
        address: Where it listens.
        identity: Who we are.
        tls: Context, or None.
        settings: See there.
        lost: Returns why the peer is lost, if it is known to be.
    """

    def __init__(
        self,
        node: str,
        address: Address,
        *,
        identity: Identity,
        tls: ssl.SSLContext | None,
        settings: BulkSettings,
        lost: Callable[[], CheckpointError | None] = lambda: None,
    ) -> None:
        self.node, self.address = node, address
        self._identity, self._tls, self._settings, self._lost = identity, tls, settings, lost
        self._slots = threading.BoundedSemaphore(settings.streams)
        self._lock = threading.Lock()
        self._kept: list[Stream] = []
        self._out: set[Stream] = set()
        self._closed = False

    def read_into(self, kind: str, name: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        """See `seam.Network.read_into`."""
        target = view.cast("B")
        if not len(target):
            return crc(b"")
        reading = _Reading(self, f"{kind} {name!r}", wire.data_path(wire.check_kind(kind), name), offset, target)
        return self._insist(reading.go_on, reading.what, deadline_s, lambda: reading.filler.filled)

    def write_from(self, kind: str, name: str, offset: int, view: memoryview, *, total: int, deadline_s: float) -> int:
        """See `seam.Network.write_from`."""
        source = view.cast("B")
        path, what = wire.data_path(wire.check_kind(kind), name), f"{kind} {name!r}"
        moved = 0

        def go(stream: Stream) -> int:
            nonlocal moved
            value = 0
            stream.request("PUT", path, self._put_headers(offset, len(source), total))
            status, headers = stream.head()
            if status == 100:
                for start in range(0, len(source), _CHUNK_BYTES):
                    chunk = source[start : start + _CHUNK_BYTES]
                    self._send(stream, chunk)
                    value = crc(chunk, value)
                    moved += len(chunk)
                status, headers = stream.head()
            elif status == 200 and len(source):
                raise BrokenError("the other side has not waited for the bytes")
            facts = self._answer_of(stream, status, headers, wanted=200)
            if facts.get("size") != len(source) or facts.get("crc32") != value:
                text = f"node {self.node} has received other bytes of {what} than were sent"
                raise ChecksumError(
                    text, node=self.node, hint="is the network, or memory, of one of the two nodes faulty?"
                )
            return value

        return self._insist(go, what, deadline_s, lambda: moved)

    def _put_headers(self, offset: int, size: int, total: int) -> dict[str, str]:
        return {
            **self._identity.headers(self.node),
            "Content-Length": str(size),
            "Content-Range": wire.format_content_range(offset, size, total),
            "Content-Type": "application/octet-stream",
            "Expect": "100-continue",
        }

    def _send(self, stream: Stream, chunk: memoryview) -> None:
        try:
            stream.send(chunk)
        except BrokenError as broken:  # it may have said why before it hung up
            stream.deadline = min(stream.deadline, time.monotonic() + 1.0)
            try:
                status, headers = stream.head()
                self._answer_of(stream, status, headers, wanted=200)
            except BrokenError:
                pass
            raise broken

    # -- what both have in common --------------------------------------------------------------------------------------

    def _insist(self, go: Callable[[Stream], T], what: str, deadline_s: float, progress: Callable[[], int]) -> T:
        """Try until it succeeds, is refused, or takes too long."""
        begun = moved_at = time.monotonic()
        deadline, failures, moved = begun + deadline_s, 0, 0
        cause: BrokenError | None = None
        while True:
            reused = False
            try:
                with self._stream(deadline) as stream:
                    reused = not stream.fresh
                    stream.fresh = False
                    return go(stream)
            except BrokenError as exc:
                now = time.monotonic()
                if self._closed:
                    raise AgentUnavailableError("the network of this node was closed", node=self.node) from exc
                if progress() > moved:
                    moved, moved_at, failures = progress(), now, 0
                if isinstance(exc, BusyError):
                    moved_at = now
                if now >= deadline:  # it says only that; what went wrong was said before, if anything did
                    raise self._late(what, deadline_s, progress(), cause or exc) from exc
                cause = exc
                if now - moved_at >= self._settings.peer_timeout_s:
                    raise unreachable(self.node, self.address, now - moved_at, exc) from exc
                if (lost := self._lost()) is not None:
                    raise unreachable(self.node, self.address, now - moved_at, lost.message) from exc
                if not reused:  # the other side may close what was idle for long: that is no failure
                    failures += 1
                    wait_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(failures, 8))
                    time.sleep(max(0.0, min(wait_s, deadline - now)))

    def _late(self, what: str, deadline_s: float, moved: int, cause: object) -> DeadlineError:
        text = f"{what} of the agent of node {self.node} at {self.address} was not done in {deadline_s:g} s ({moved} bytes were): {cause}"
        return DeadlineError(text, node=self.node, hint="is the network between the nodes slow, or cut?")

    @contextmanager
    def _stream(self, deadline: float) -> Iterator[Stream]:
        """Yield a connection, and keep it if it is as it was."""
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BrokenError(f"{self._settings.streams} other transfers are under way")
        stream: Stream | None = None
        good = False
        try:
            stream = self._take(deadline)
            yield stream
            good = True
        finally:
            self._give_back(stream, good)
            self._slots.release()

    def _take(self, deadline: float) -> Stream:
        with self._lock:
            stream = self._kept.pop() if self._kept else None
            if self._closed:
                raise BrokenError("this agent's network is closed")
        if stream is not None and time.monotonic() - stream.used_at > self._settings.idle_s:
            stream.close()
            stream = None
        if stream is None:
            stream = Stream(self.address, tls=self._tls, deadline=deadline, stall_s=self._settings.stall_s)
        stream.deadline = deadline
        with self._lock:
            self._out.add(stream)
        return stream

    def _give_back(self, stream: Stream | None, good: bool) -> None:
        if stream is None:
            return
        with self._lock:
            self._out.discard(stream)
            if good and stream.reusable and not self._closed:
                stream.used_at = time.monotonic()
                self._kept.append(stream)
                return
        stream.close()

    def _answer_of(self, stream: Stream, status: int, headers: Message, *, wanted: int) -> dict[str, object]:
        """Receive the values of an answer.

        Raises:
            CheckpointError: It is a refusal.
            BrokenError: It is one after which the same may succeed.
        """
        stream.reusable = headers.get("Connection", "").lower() != "close"
        facts = facts_of(stream.read(length_of(headers)))
        if status == wanted:
            if headers.get(wire.NODE) != wire.quote(self.node):
                raise BrokenError(f"node {headers.get(wire.NODE)!r} answers there")
            return facts
        if status == 503 and facts.get("reason") == "busy":
            raise BusyError(f"{facts.get('text')}")
        if status in RETRIED:
            raise BrokenError(str(facts.get("text") or f"status {status}"))
        raise error_of(self.node, self.address, status, facts)

    def close(self) -> None:
        """Close all connections; calls that are under way fail."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
            out = list(self._out)
        for stream in kept:
            stream.close()
        for stream in out:
            stream.hang_up()


class _Reading:
    """One read, over as many connections as it takes."""

    def __init__(self, client: BulkClient, what: str, path: str, offset: int, view: memoryview) -> None:
        self.what = what
        self._client, self._path, self._offset, self._view = client, path, offset, view
        self.filler = Filler(len(view), view=view)
        self._seen: tuple[str | None, str | None] | None = None

    def go_on(self, stream: Stream) -> int:
        """Ask for what is missing, and receive it."""
        client, filler = self._client, self.filler
        first, last = self._offset + filler.filled, self._offset + len(self._view) - 1
        headers = client._identity.headers(client.node)
        stream.request("GET", self._path, {**headers, "Range": f"bytes={first}-{last}"})
        status, answer = stream.head()
        if status != 206:
            client._answer_of(stream, status, answer, wanted=206)
        self._check(answer, first, last)
        while filler.filled < len(self._view):
            filler.came(stream.read_into(filler.room()))
        stream.reusable = answer.get("Connection", "").lower() != "close"
        return filler.finish()

    def _check(self, answer: Message, first: int, last: int) -> None:
        """The answer has to be what was asked for, and of the same bytes as the answer before a cut."""
        client = self._client
        if answer.get(wire.NODE) != wire.quote(client.node):
            raise BrokenError(f"node {answer.get(wire.NODE)!r} answers there")
        size = answer.get(wire.SIZE)
        if answer.get("Content-Range") != f"bytes {first}-{last}/{size}" or length_of(answer) != last - first + 1:
            text = f"node {client.node} has answered with another range of {self.what} than was asked for"
            raise TornFileError(text, node=client.node)
        seen = (size, answer.get("ETag"))
        if self._seen is not None and self._seen != seen:
            text = f"{self.what} of node {client.node} has changed while it was read"
            raise TornFileError(text, node=client.node, hint="read it again, as a whole")
        self._seen = seen


def length_of(headers: Message) -> int:
    """Return the length of a body."""
    text = headers.get("Content-Length", "")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BrokenError("the answer does not say how long it is")
    return int(text)
