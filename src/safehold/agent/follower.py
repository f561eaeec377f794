"""The way from a node to a lead elsewhere: reports go over the network, and what waits for the lead ends when it is lost.

Invariants: used from the dispatcher thread only; nothing here waits. Every request of a rank that went to the lead is answered: by the
lead, or by its loss (`asks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.announcer import POLL_S, report_interval_s
from safehold.agent.asks import NodeAsks
from safehold.agent.node_save import Peer
from safehold.clock import Clock
from safehold.errors import CheckpointError, RankLostError
from safehold.types import TensorSpec


class Follower:
    """See the module.

    Args:
        lead_name: Name of the lead's node.
        send: Tells the lead.
        steps: Returns the last step of each rank of this node.
        every_seconds: Interval of saves by time; 0: none.
        num_nodes: Nodes of the run.
        num_ranks: Ranks of this node.
    """

    def __init__(
        self,
        *,
        lead_name: str,
        send: Callable[[w.Report], None],
        steps: Callable[[], dict[int, int]],
        every_seconds: float,
        num_nodes: int,
        num_ranks: int,
        clock: Clock,
    ) -> None:
        self._lead_name, self._send, self._steps, self._clock = lead_name, send, steps, clock
        self._every_s = report_interval_s(num_nodes)
        self._tells_steps = bool(every_seconds)
        self._told: dict[int, int] = {}
        self._told_at = self._polled_at = clock.monotonic()
        self._announced: int | None = None
        self._asks = NodeAsks(num_ranks, send, clock)
        self._manifests: dict[int, tuple[bytes, dict[int, list[int]]]] = {}
        self.lost: CheckpointError | None = None
        self._settling: list[tuple[float, Callable[[], None], Callable[[], bool]]] = []

    # -- reports -------------------------------------------------------------------------------------------------------

    def event(self, event: Any, incarnation: int) -> None:
        """Tell an event of the commit protocol."""
        self._send(w.event_told(event, incarnation))

    def ask(self, peer: Peer, message: Any) -> None:
        """A rank restores: the lead answers."""
        if self.lost is not None:
            peer.refuse(message.id, self.lost_error())
            return
        self._asks.ask(peer, message)

    def begins(self, step: int, rank: int) -> None:
        """A rank asks to save."""
        if self._tells_steps:
            self._send(w.RankBegins(step, rank))

    def compared(self, incarnation: int, step: int, attempt: int, crcs: dict[int, dict[str, int]]) -> None:
        """What this node's ranks agree about."""
        self._send(w.Compared(incarnation, step, attempt, crcs))

    def undeclared(self, found: Mapping[int, list[TensorSpec]]) -> None:
        """All ranks of this node have said which undeclared leaves they hold."""
        groups: dict[tuple[TensorSpec, ...], list[int]] = {}
        for rank, specs in found.items():
            groups.setdefault(tuple(specs), []).append(rank)
        self._send(
            w.Undeclared(
                [
                    (ranks, [(spec.name, spec.dtype, list(spec.shape), spec.kind) for spec in specs])
                    for specs, ranks in groups.items()
                ]
            )
        )

    def part(self, wanted: w.PartWanted, data: bytes | None) -> None:
        """Give the lead a part that it asked for, in pieces; None: it is not here any more."""
        if not data:
            self._send(w.PartTold(wanted.rank, wanted.digest, 0, 0, b""))
            return
        for start in range(0, len(data), w.PART_CHUNK_BYTES):
            piece = data[start : start + w.PART_CHUNK_BYTES]
            self._send(w.PartTold(wanted.rank, wanted.digest, start, len(data), piece))

    # -- what comes back -------------------------------------------------------------------------------------------------

    def answered(self, word: w.ToRank) -> list[tuple[Peer, m.Reply]]:
        """Return the ranks that an answer is for, as they asked; none if they are gone, or were answered before.

        Raises:
            msgspec.DecodeError: It is no answer.
        """
        reply = m.decode_reply(word.reply)
        waiting = self._asks.answered(word.rank, reply.id)
        if isinstance(reply, m.RestoreOffer) and reply.step is not None:
            if reply.manifest:
                self._manifests = {reply.round: (reply.manifest, reply.in_memory_of)}
            manifest, in_memory_of = self._manifests.get(reply.round, (b"", {}))
            reply = msgspec.structs.replace(reply, manifest=manifest, in_memory_of=in_memory_of)
        return [(peer, msgspec.structs.replace(reply, id=question.id)) for peer, question in waiting]

    def announced(self, step: int) -> None:
        """All ranks are asked to save at this step."""
        self._announced = step

    def rank_gone(self, rank: int) -> None:
        """A rank's connection ended; it waits for nothing."""
        self._asks.rank_gone(rank)

    def lead_lost(self, why: CheckpointError) -> None:
        """Nothing comes from the lead any more, or not from the one that was asked."""
        self.lost = why
        self._asks.refuse_all(self.lost_error())

    def lead_back(self) -> None:
        """It can be reached again."""
        self.lost = None

    def lost_error(self) -> CheckpointError:
        """What waits for a lead that is lost fails with this."""
        why = f": {self.lost.message}" if self.lost is not None else ""
        text = f"the lead agent, on node {self._lead_name}, was lost{why}"
        return RankLostError(
            text, node=self._lead_name, hint="see whether that node lives; training goes on without saves"
        )

    def settle(self, then: Callable[[], None], deadline_s: float, is_idle: Callable[[], bool]) -> None:
        """Call `then` once nothing is in flight on this node, or after `deadline_s`: the lead decides what becomes of it."""
        self._settling.append((self._clock.monotonic() + deadline_s, then, is_idle))
        self._settle()

    def _settle(self) -> None:
        now = self._clock.monotonic()
        over = [entry for entry in self._settling if now >= entry[0] or entry[2]()]
        self._settling = [entry for entry in self._settling if entry not in over]
        for _, then, _ in over:
            then()

    # -- time ------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        due = [self._steps_due(), self._asks.next_deadline()]
        if self._settling:
            due.append(self._clock.monotonic() + POLL_S)
        return min((when for when in due if when is not None), default=None)

    def _steps_due(self) -> float | None:
        if not self._tells_steps:
            return None
        return self._polled_at + (POLL_S if self._announced is not None else self._every_s)

    def tick(self) -> None:
        """Tell the ranks' steps: now and then, and at once if one has passed what was announced."""
        self._settle()
        self._asks.tick()
        now = self._clock.monotonic()
        due = self._steps_due()
        if due is None or now < due:
            return
        self._polled_at = now
        steps = self._steps()
        passed = self._announced is not None and any(step > self._announced for step in steps.values())
        if passed or (now - self._told_at >= self._every_s and steps != self._told):
            self._send(w.StepsSeen(steps))
            self._told, self._told_at = steps, now
            self._announced = None if passed else self._announced
