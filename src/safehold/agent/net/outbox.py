"""What waits to be sent to one peer, and when that peer is lost. No I/O and no clock: shared by the real network and the fake.

Invariants: messages leave in order and stay until they are acknowledged. When the peer is lost all of them are given up together with their
session, which is never used again. What does not fit makes the peer lost, too: to drop one message and go on with the next would break the
order that others rely on. `put` may be called from any thread, all else from one.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from safehold.agent.net import wire
from safehold.agent.net.seam import MAX_MESSAGE_BYTES
from safehold.agent.net.wire import SessionId
from safehold.errors import AgentUnavailableError, CheckpointError, ConfigurationError

BATCH_BYTES = 4 << 20
LARGE_BYTES = 1 << 20
TRIES = 3
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.02, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """How messages are sent.

    Attributes:
        peer_timeout_s: Without an answer for so long, a peer is lost.
        heartbeat_s: After so long without a word from a watched peer it is asked whether it is there.
        outbox_messages: How many messages may wait for one peer.
        outbox_bytes: And how many bytes of them.
        seed: For the jitter of retries; None: the system's randomness.
    """

    peer_timeout_s: float = 10.0
    heartbeat_s: float = 1.0
    outbox_messages: int = 4096
    outbox_bytes: int = 64 << 20
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one request carries; empty as a heartbeat."""

    session: SessionId
    first: int
    payloads: list[bytes]


class Outbox:
    """See the module.

    Args:
        node: The peer's name.
        origin: Random name of this process's sessions, 32 hex digits.
        settings: See there.
    """

    def __init__(self, node: str, origin: str, settings: ControlSettings) -> None:
        self._node, self._settings = node, settings
        self._lock = threading.Lock()
        self._box: deque[bytes] = deque()
        self._box_bytes = 0
        self._first = 1
        self._session = SessionId(origin, 1)
        self._lost: CheckpointError | None = None
        self._untold: CheckpointError | None = None
        self._waiting_since: float | None = None

    def __len__(self) -> int:
        return len(self._box)

    @property
    def lost(self) -> CheckpointError | None:
        """Why the peer is lost, if it is."""
        return self._lost

    @property
    def troubled(self) -> bool:
        """Whether the peer owes an answer, so that there is something to send in any case."""
        return self._lost is not None or self._waiting_since is not None

    def put(self, payload: bytes) -> bool:
        """Take a message; returns whether the box was empty.

        Raises:
            AgentUnavailableError: The peer is lost.
            OverflowError: Too much waits for it: it is lost from here on, and `overflowed` says so once, for the listeners.
            ConfigurationError: The message is too large.
        """
        check_size(payload)
        settings = self._settings
        with self._lock:
            if self._lost is not None:
                raise AgentUnavailableError(self._lost.message, node=self._node, hint=self._lost.hint)
            if len(self._box) >= settings.outbox_messages or self._box_bytes + len(payload) > settings.outbox_bytes:
                text = f"{len(self._box)} messages ({self._box_bytes} bytes) wait already for the agent of node {self._node}"
                hint = "it is slow, or not there, and counts as lost until it answers"
                self._untold = AgentUnavailableError(text, node=self._node, hint=hint)
                self._give_up(self._untold)
                raise OverflowError(text)
            self._box.append(payload)
            self._box_bytes += len(payload)
            return len(self._box) == 1

    def begin(self, now: float) -> Batch:
        """Return what to send next."""
        if self._waiting_since is None:
            self._waiting_since = now
        payloads, size = list[bytes](), 0
        with self._lock:
            for payload in self._box:
                size += wire.batch_bytes(payload)
                if payloads and (size > BATCH_BYTES or len(payloads) == wire.MAX_BATCH_MESSAGES):
                    break
                payloads.append(payload)
            return Batch(self._session, self._first, payloads)

    def attempt_s(self, now: float, size: int) -> float:
        """Return how long to wait for the answer to a request of that size."""
        whole_s = self._settings.peer_timeout_s
        attempt_s = whole_s if size > LARGE_BYTES else whole_s / TRIES
        if self._lost is None and self._waiting_since is not None:
            attempt_s = min(attempt_s, self._waiting_since + whole_s - now)
        return max(attempt_s, MIN_BACKOFF_S)

    def answered(self, batch: Batch) -> bool:
        """A batch was acknowledged; returns whether the peer was lost until now."""
        with self._lock:
            if batch.session != self._session:  # given up meanwhile, and told so
                self._waiting_since = None
                return False
            for _ in batch.payloads:
                self._box_bytes -= len(self._box.popleft())
            self._first += len(batch.payloads)
            was_lost, self._lost = self._lost, None
        self._waiting_since = None
        return was_lost is not None

    def overdue_s(self, now: float) -> float | None:
        """Return how long the peer has not answered if that makes it lost, and it is not yet."""
        if self._lost is not None or self._waiting_since is None:
            return None
        waited_s = now - self._waiting_since
        return waited_s if waited_s >= self._settings.peer_timeout_s else None

    def lose(self, error: CheckpointError) -> bool:
        """Give up what waits, and the session; returns whether this is news."""
        with self._lock:
            was_lost = self._lost
            self._give_up(error)
        return was_lost is None

    def overflowed(self) -> CheckpointError | None:
        """Return why the peer is lost if that is for want of room, and nobody was told yet."""
        with self._lock:
            error, self._untold = self._untold, None
        return error

    def _give_up(self, error: CheckpointError) -> None:
        self._lost = error
        self._box.clear()
        self._box_bytes, self._first = 0, 1
        self._session = SessionId(self._session.origin, self._session.number + 1)

    def backoff_s(self, failures: int, chance: float) -> float:
        """Return how long to wait after so many failures, `chance` being between 0 and 1."""
        longest_s = min(MAX_BACKOFF_S, self._settings.peer_timeout_s / 4)
        return min(longest_s, MIN_BACKOFF_S * 2.0 ** min(failures, 10)) * (0.5 + chance / 2)


def check_size(payload: bytes) -> None:
    """Refuse a message that is too large.

    Raises:
        ConfigurationError: It is.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ConfigurationError(f"a message of {len(payload)} bytes is too large, {MAX_MESSAGE_BYTES} at most")
