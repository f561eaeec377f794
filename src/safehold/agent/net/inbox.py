"""Which of the messages that arrive are new: in order and once, whatever was sent again. Pure; used from one thread.

Invariants: of a session, message n is taken only after n - 1. A sender has one session at a time; once a newer one of the same process,
or one of another process, has begun, messages of the older are refused, so that what its sender has given up can never arrive late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from safehold.agent.net.wire import Refusal, SessionId

_KEPT_ORIGINS = 16


@dataclass(slots=True)
class _Sender:
    session: SessionId
    last: int = 0
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_ORIGINS))


class Inbox:
    """Sequence numbers by sending node; the caller admits only nodes it knows, which bounds the table."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def take(self, node: str, session: SessionId, first: int, payloads: list[bytes]) -> tuple[list[bytes], int]:
        """Return those messages of a batch that are new, and the number of the last message taken in all.

        Args:
            node: Who sends.
            session: Which row of messages.
            first: Number of the first message of the batch, counting from 1; for an empty batch that of the next.
            payloads: The batch.

        Raises:
            Refusal: The session is over, or messages before `first` never arrived (they were sent to a process that is no more).
        """
        sender = self._current(node, session, first)
        if first < 1 or first > sender.last + 1:
            raise _gap(sender.last + 1)
        new = payloads[sender.last + 1 - first :]
        sender.last += len(new)
        return new, sender.last

    def _current(self, node: str, session: SessionId, first: int) -> _Sender:
        sender = self._senders.get(node)
        if sender is not None and sender.session == session:
            return sender
        if sender is not None:
            same = sender.session.origin == session.origin
            if (same and session.number < sender.session.number) or session.origin in sender.ended:
                raise Refusal(410, "session", f"session {session} is over", told=False)
        if first != 1:
            raise _gap(1)
        ended = sender.ended if sender is not None else deque(maxlen=_KEPT_ORIGINS)
        if sender is not None and sender.session.origin != session.origin:
            ended.append(sender.session.origin)
        fresh = self._senders[node] = _Sender(session, ended=ended)
        return fresh


def _gap(expected: int) -> Refusal:
    return Refusal(409, "gap", f"message {expected} never arrived", told=False, expected=expected)
