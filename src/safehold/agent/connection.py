"""One trainer's connection, as the agent sees it.

Invariants: sending never blocks the dispatcher: messages wait in a queue that a thread of the connection empties. A trainer that does not
read for long is cut off.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING

import msgspec

from safehold.agent import messages as m
from safehold.errors import AgentUnavailableError, CheckpointError
from safehold.host.process import Process
from safehold.host.sockets import Channel, ChannelClosed

if TYPE_CHECKING:
    from safehold.agent.session import Session

SEND_TIMEOUT_S = 30.0


class Connection:
    """See the module.

    Attributes:
        rank: Of the trainer; -1 before its `Hello`.
        pid: Of its process; 0 where that cannot be seen from here.
        process: It, where `pid` is 0 (it is in another container) and the kernel tells.
        refused: Whether its `Hello` was.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[tuple[bytes, tuple[int, ...]] | None] = queue.SimpleQueue()
        self.rank = -1
        self.pid = channel.peer_credentials().pid
        self.process: Process | None = None
        if self.pid <= 0:
            with contextlib.suppress(OSError):
                self.process = Process.of_pidfd(channel.peer_pidfd())
        self.session: Session | None = None
        self.orderly = False
        self.linger = True
        self.closed = False
        self.refused = False
        self._sender = threading.Thread(target=self._send, name="to-trainer", daemon=True)
        self._sender.start()

    def reply(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting; the descriptors are duplicated, the caller may close its own."""
        if self.closed:
            return
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError as exc:
            while copies:
                os.close(copies.pop())
            error = AgentUnavailableError(f"the agent cannot pass memory on: {exc}", rank=self.rank)
            message = m.Refused(getattr(message, "id", 0), error.to_wire())
        self._queue.put((m.encode(message), tuple(copies)))

    def refuse(self, request: int, error: CheckpointError) -> None:
        """Answer a request with an error."""
        self.reply(m.Refused(request, error.to_wire()))

    def greet(self, word: str) -> None:
        """Answer somebody of another version with the line that all versions understand."""
        self._queue.put((m.greet(word).line(), ()))

    def close(self) -> None:
        """End it, once what was to be sent is sent."""
        self.closed = True
        if self.process is not None:
            self.process.close()
        self._queue.put(None)

    def flush(self, timeout_s: float) -> None:
        """After `close`: wait until everything is sent, as long as that takes at most."""
        self._sender.join(timeout_s)

    def _send(self) -> None:
        while (entry := self._queue.get()) is not None:
            data, fds = entry
            try:
                if not self._channel.closed:
                    self._channel.send(data, fds, timeout_s=SEND_TIMEOUT_S)
            except (ChannelClosed, OSError, CheckpointError):
                self.closed = True
                self._channel.close()  # the receiving thread sees the end of it, and the dispatcher hears
            finally:
                for fd in fds:
                    os.close(fd)
        self._channel.close()
