"""What the ranks of a node ask a lead elsewhere in a restore: like questions go as one, and the answer comes back to each.

A lead of 1,024 nodes with 8 ranks each so hears 3,072 messages in a restore, not 24,576, and none that repeats what 8 ranks do not know.

Invariants: used from the dispatcher thread only; nothing here waits. Every question is answered: by the lead, or by its loss. A rank that
is late keeps the others of its node for `GATHER_S` at most, so that the lead can tell who is late. A vote against is never joined with
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.node_save import Peer
from safehold.clock import Clock
from safehold.errors import CheckpointError

GATHER_S = 0.25
Question = tuple[Peer, Any]


class NodeAsks:
    """See the module.

    Args:
        num_ranks: Ranks of this node.
        send: Tells the lead.
        clock: Time.
    """

    def __init__(self, num_ranks: int, send: Callable[[w.RanksAsk], None], clock: Clock) -> None:
        self._num_ranks, self._send, self._clock = num_ranks, send, clock
        self._gathered: dict[tuple[Any, ...], tuple[float, dict[int, Question]]] = {}
        self._asked: dict[tuple[int, int], list[Question]] = {}

    def ask(self, peer: Peer, message: Any) -> None:
        """A rank asks; its question goes once all ranks have asked the like, or soon."""
        key = _like(message)
        since, questions = self._gathered.setdefault(key, (self._clock.monotonic(), {}))
        if peer.rank in questions:  # it asks anew: what it asked before goes first
            self._go(key)
            since, questions = self._gathered.setdefault(key, (since, {}))
        questions[peer.rank] = (peer, message)
        if len(questions) == self._num_ranks:
            self._go(key)

    def _go(self, key: tuple[Any, ...]) -> None:
        _, questions = self._gathered.pop(key)
        apart = [[found] for found in questions.values() if getattr(found[1], "error", None) is not None]
        joined = [found for found in questions.values() if getattr(found[1], "error", None) is None]
        for group in (*([joined] if joined else []), *apart):
            group.sort(key=lambda found: found[0].rank)
            first = group[0][1]
            self._asked[group[0][0].rank, first.id] = group
            message = _joined([message for _, message in group]) if isinstance(first, m.Vote) else first
            self._send(w.RanksAsk([peer.rank for peer, _ in group], m.encode(message)))

    def answered(self, rank: int, request: int) -> list[Question]:
        """Return those who asked what is answered now: (peer, its own question)."""
        return self._asked.pop((rank, request), [])

    def rank_gone(self, rank: int) -> None:
        """A rank's connection ended; it waits for nothing."""
        for _, questions in self._gathered.values():
            questions.pop(rank, None)
        self._gathered = {key: found for key, found in self._gathered.items() if found[1]}
        for key, group in list(self._asked.items()):
            self._asked[key] = [found for found in group if found[0].rank != rank]

    def refuse_all(self, error: CheckpointError) -> None:
        """Nothing that was asked will be answered."""
        gathered, self._gathered = self._gathered, {}
        asked, self._asked = self._asked, {}
        waiting = [*asked.values(), *(list(questions.values()) for _, questions in gathered.values())]
        for peer, message in (found for group in waiting for found in group):
            peer.refuse(message.id, error)

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return min((since + GATHER_S for since, _ in self._gathered.values()), default=None)

    def tick(self) -> None:
        """Let deadlines pass."""
        now = self._clock.monotonic()
        for key, (since, _) in list(self._gathered.items()):
            if now >= since + GATHER_S:
                self._go(key)


def _like(message: Any) -> tuple[Any, ...]:
    """What questions must have in common to go as one."""
    if isinstance(message, m.Vote):
        return ("vote", message.round, message.phase)
    return ("ask", message.step)


def _joined(votes: list[m.Vote]) -> m.Vote:
    """Join votes that are all for: what any rank misses, and what no rank has a place for."""
    if len(votes) == 1:
        return votes[0]
    return msgspec.structs.replace(
        votes[0],
        missing=sorted({name for vote in votes for name in vote.missing}),
        mismatched=sorted({text for vote in votes for text in vote.mismatched}),
        unexpected=sorted(set.intersection(*(set(vote.unexpected) for vote in votes))),
    )
