"""A TCP proxy that is slow or breaks connections off: what a bad network does, where the kernel has no netem.

    with Proxy(target, listener=host.listen(7000), open_socket=other.open_socket, delay_s=0.2) as proxy: ...

Listener and sockets may live in the networks of hosts (`Host.listen`, `Host.open_socket`), so that the proxy stands between two of them.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

CONNECT_S = 10.0
_CHUNK_BYTES = 1 << 16
_HELD_BYTES = 8 << 20
_POLL_S = 0.2
_RESET = struct.pack("ii", 1, 0)


def tcp_socket() -> socket.socket:
    """A TCP socket of this process's own network."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


class Proxy:
    """Passes connections on to `target`; see the module.

    Args:
        target: Address and port of the server.
        listener: A listening socket, which the proxy owns from then on; None: on loopback, at a free port.
        open_socket: Makes the sockets that connect to the target.
        delay_s: Every byte arrives so much later, in both directions; may be changed while connections are open.
        drop_after_bytes: Each connection is reset when so many bytes have passed, both directions together; None: never.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        listener: socket.socket | None = None,
        open_socket: Callable[[], socket.socket] = tcp_socket,
        delay_s: float = 0.0,
        drop_after_bytes: int | None = None,
    ) -> None:
        self.target, self.delay_s, self.drop_after_bytes = target, delay_s, drop_after_bytes
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)
        self._open_socket = open_socket
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.passed_bytes = 0
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and reset all connections."""
        self._closed.set()
        for thread in list(self._threads):
            thread.join(CONNECT_S + 1.0)
        self._listener.close()

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._spawn(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        with client, self._open_socket() as server:
            try:
                server.settimeout(CONNECT_S)
                server.connect(self.target)
                client.settimeout(CONNECT_S)
                if self._pass_on(client, server):
                    return
            except OSError:
                pass
            for end in (client, server):
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                except OSError:
                    pass

    def _pass_on(self, client: socket.socket, server: socket.socket) -> bool:
        """Return whether both ended their streams; if not, connections are to be reset."""
        waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {client: deque(), server: deque()}
        other = {client: server, server: client}
        open_ends = {client, server}
        passed = 0
        while open_ends or any(waiting.values()):
            if self._closed.is_set():
                return False
            now = time.monotonic()
            due = [queue[0][0] - now for queue in waiting.values() if queue]
            sources = [end for end in open_ends if sum(len(data) for _, data in waiting[end]) < _HELD_BYTES]
            ready, _, _ = select.select(sources, [], [], max(0.0, min([_POLL_S, *due])))
            for end in ready:
                data = end.recv(_CHUNK_BYTES)
                waiting[end].append((time.monotonic() + self.delay_s, data))
                if not data:
                    open_ends.discard(end)
            for end, queue in waiting.items():
                while queue and queue[0][0] <= time.monotonic():
                    data = queue.popleft()[1]
                    if not data:
                        other[end].shutdown(socket.SHUT_WR)
                        continue
                    passed += len(data)
                    self.passed_bytes += len(data)
                    if self.drop_after_bytes is not None and passed > self.drop_after_bytes:
                        return False
                    other[end].sendall(data)
        return True
