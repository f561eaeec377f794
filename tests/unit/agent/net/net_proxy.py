"""A TCP proxy that can be cut, by hand or after some bytes, and what tests need to wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from safehold.agent.net.addresses import Address

WAIT_S = 10.0


def wait_for(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class Proxy:
    """Forwards connections to `target`.

    Attributes:
        cut_after: Returns after how many bytes, to either side, a new connection is cut; None: never.
    """

    def __init__(self, target: Address) -> None:
        self.target = target
        self.cut_after: Callable[[], int] | None = None
        self.num_connections = self.num_cuts = self.num_bytes = 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = Address("127.0.0.1", self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = self._is_cut = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """End all connections, and let none in."""
        with self._lock:
            self._is_cut = True
            pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair)

    def heal(self) -> None:
        self._is_cut = False

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self.target.host, self.target.port), timeout=WAIT_S)
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
                self.num_connections += 1
                refused = self._is_cut or self._closed
            if refused:
                self._end(pair)
            left = [self.cut_after() if self.cut_after is not None else 1 << 62]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._forward, args=(source, sink, pair, left), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(
        self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, socket.socket], left: list[int]
    ) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data[: max(0, left[0])])
                self.num_bytes += min(len(data), max(0, left[0]))
                left[0] -= len(data)
                if left[0] <= 0:
                    self.num_cuts += 1
                    break
        except OSError:
            pass
        self._end(pair)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for sock in pair:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._closed = True
        self.cut()
        try:
            self._listening.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listening.close()
        for thread in self._threads:
            thread.join(WAIT_S)
        for near, far in self._pairs:
            near.close()
            far.close()
