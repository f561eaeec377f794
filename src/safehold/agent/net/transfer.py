"""Bulk bytes between a socket and a file or memory, in a thread: the server's half.

Invariants: works on duplicates of descriptors, so that nobody can close one under it; whatever the other side does, it ends: by its
deadline, when nothing moves for the stall time, or when it is told to stop. Bytes are received where they belong, never joined.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from safehold.agent.net.seam import Source
from safehold.format.crc import crc

_CHUNK_BYTES = 1 << 20
_SEND_BYTES = 8 << 20
_LOOK_S = 0.2


class CutError(Exception):
    """A transfer did not come to its end; the text says why."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a transfer may take.

    Attributes:
        start_s: Whatever the size.
        min_rate_bytes_s: What comes on top of it, by size.
        stall_s: Without a single byte.
    """

    start_s: float = 10.0
    min_rate_bytes_s: float = 1e6
    stall_s: float = 10.0

    def total_s(self, size: int) -> float:
        """Return the seconds that so many bytes may take."""
        return self.start_s + size / self.min_rate_bytes_s


class Waiter:
    """Waits for a socket within the limits of one transfer."""

    def __init__(self, sock: socket.socket, event: int, size: int, patience: Patience, stop: threading.Event) -> None:
        self._poll = select.poll()
        self._poll.register(sock.fileno(), event)
        self._deadline = time.monotonic() + patience.total_s(size)
        self._stall_s, self._stop = patience.stall_s, stop
        self._moved = time.monotonic()

    def moved(self) -> None:
        """Some bytes went."""
        self._moved = time.monotonic()

    def wait(self) -> None:
        """Wait until the socket is ready, or broken.

        Raises:
            CutError: It has been too long, or the network is closing.
        """
        while True:
            now = time.monotonic()
            if self._stop.is_set():
                raise CutError("the agent is closing")
            if now >= self._deadline:
                raise CutError("the other side was too slow")
            if now - self._moved >= self._stall_s:
                raise CutError(f"nothing moved for {self._stall_s:g} s")
            left_s = min(_LOOK_S, self._deadline - now, self._moved + self._stall_s - now)
            if self._poll.poll(left_s * 1000 + 1):
                return


def send_source(
    sock: socket.socket, source: Source, offset: int, size: int, patience: Patience, stop: threading.Event
) -> None:
    """Send bytes of a source by sendfile.

    Raises:
        CutError: They did not all go.
    """
    waiter = Waiter(sock, select.POLLOUT, size, patience, stop)
    out, position, end = sock.fileno(), source.offset + offset, source.offset + offset + size
    while position < end:
        try:
            sent = os.sendfile(out, source.fd, position, min(end - position, _SEND_BYTES))
        except BlockingIOError:
            waiter.wait()
            continue
        except OSError as exc:
            raise CutError(f"sending failed: {exc.strerror or exc}") from exc
        if not sent:
            raise CutError("the source has fewer bytes than it said")
        position += sent
        waiter.moved()


def read_source(source: Source, offset: int, size: int) -> bytes:
    """Read bytes of a source, for where sendfile cannot be.

    Raises:
        CutError: They are not all there.
    """
    data = os.pread(source.fd, size, source.offset + offset)
    if len(data) != size:
        raise CutError("the source has fewer bytes than it said")
    return data


class Filler:
    """Fills memory, or a file, in order, and knows the CRC32 of what has come.

    Attributes:
        filled: Bytes that have come.
    """

    def __init__(self, size: int, *, view: memoryview | None = None, fd: int = -1, offset: int = 0) -> None:
        self._size, self._fd, self._offset = size, fd, offset
        self._view = view.cast("B") if view is not None else None
        self._scratch = memoryview(bytearray(min(size, _CHUNK_BYTES) if self._view is None else 0))
        self._checked = self._crc = 0
        self.filled = 0

    def room(self) -> memoryview:
        """Return where the next bytes go."""
        if self._view is not None:
            return self._view[self.filled : min(self._size, self.filled + _CHUNK_BYTES)]
        return self._scratch[: self._size - self.filled]

    def came(self, count: int) -> None:
        """So many bytes are in `room` now."""
        if self._view is None:
            part = self._scratch[:count]
            self._crc = crc(part, self._crc)
            _write_all(self._fd, part, self._offset + self.filled)
            self.filled += count
            return
        self.filled += count
        if self.filled - self._checked >= _CHUNK_BYTES // 4 or self.filled == self._size:
            self._crc = crc(self._view[self._checked : self.filled], self._crc)
            self._checked = self.filled

    def put(self, data: bytes) -> None:
        """Take bytes that are in memory already."""
        rest = memoryview(data)
        while len(rest):
            room = self.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            self.came(count)
            rest = rest[count:]

    def finish(self) -> int:
        """Return the CRC32 of all."""
        if self.filled != self._size:
            raise CutError(f"{self.filled} of {self._size} bytes came")
        return self._crc


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def receive(
    sock: socket.socket,
    filler: Filler,
    size: int,
    patience: Patience,
    stop: threading.Event,
    *,
    invite: Callable[[], None],
) -> int:
    """Receive `size` bytes into place; returns their CRC32.

    Args:
        sock: Non-blocking; nobody else reads from it.
        filler: Where they go.
        size: How many.
        patience: How long.
        stop: Ends it.
        invite: Tells the other side to begin.

    Raises:
        CutError: They did not all come.
    """
    waiter = Waiter(sock, select.POLLIN, size, patience, stop)
    try:
        invite()
        while filler.filled < size:
            try:
                count = sock.recv_into(filler.room())
            except BlockingIOError:
                waiter.wait()
                continue
            if not count:
                raise CutError(f"the connection ended after {filler.filled} of {size} bytes")
            filler.came(count)
            waiter.moved()
    except OSError as exc:
        raise CutError(f"receiving failed: {exc.strerror or exc}") from exc
    return filler.finish()
