"""The commit protocol of the lead, for all saves of one incarnation: events in, actions out.

A save goes through these phases. Each has one condition that ends it, and a deadline that abandons it and names who
is late (`commit_phases` has this table as data):

    phase        ends when                        then                  deadline
    BEGINNING    every rank has begun             BuildPlan, STAGING    begin_s
    STAGING      every rank has staged            FLUSHING              stage_s
    FLUSHING     every node has recorded          PLANNING              flush_s
    PLANNING     the plan is stored               Publish, PUBLISHING   plan_s
    PUBLISHING   the manifest is durable          Committed, COMMITTED  publish_s

and from each to ABANDONED: a rank or node fails; a rank goes before it staged, a node before it recorded; a newer
incarnation shows up. What comes early (a node's record before the last rank's word) is kept, so order between
senders does not matter.

Invariants: at most one Publish per (step, attempt), never before every node has recorded under the digests that the
plan was built from. Once asked for, publishing cannot be taken back: a save abandoned then is in doubt. The first
cause is the one that is told. No wait is without an end. Memory is bounded. Saves may overlap in time; each stands
alone. Nothing is sent from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from safehold.errors import CheckpointError, CommitError, DeadlineError, RankLostError, SupersededError, from_wire
from safehold.format.records import NodeRef
from safehold.policy.commit_events import (
    Abandon,
    Action,
    Begun,
    BuildPlan,
    Cancel,
    Committed,
    Deadlines,
    Event,
    NodeFailed,
    NodeGone,
    NodeRecorded,
    Phase,
    PlanFailed,
    PlanReady,
    Publish,
    Published,
    PublishFailed,
    RankBack,
    RankFailed,
    RankGone,
    SaveStatus,
    Settle,
    Settled,
    Staged,
    Superseded,
    Tick,
)
from safehold.policy.commit_phases import WAITS, Members, Save
from safehold.policy.spans import describe
from safehold.types import CommitId

__all__ = [
    "Abandon",
    "Action",
    "Begun",
    "BuildPlan",
    "Cancel",
    "CommitMachine",
    "Committed",
    "Deadlines",
    "Event",
    "NodeFailed",
    "NodeGone",
    "NodeRecorded",
    "Phase",
    "PlanFailed",
    "PlanReady",
    "Publish",
    "PublishFailed",
    "Published",
    "RankBack",
    "RankFailed",
    "RankGone",
    "SaveStatus",
    "Settle",
    "Settled",
    "Staged",
    "Superseded",
    "Tick",
]

MAX_REMEMBERED = 4096
MAX_OPEN = 256
IN_DOUBT = "; whether it is committed is not known"


class CommitMachine:
    """Decides when a save is committed or abandoned. Not thread-safe: one dispatcher calls `handle`.

    Args:
        world_size: Number of ranks.
        nodes: The node of each rank.
        incarnation: Number of this incarnation.
        deadlines: Limits of the waits.
        lead: The node that plans and publishes; by default that of rank 0.
        every_node_publishes: On node-local disks: a manifest counts only once every node has made it durable.
        node_names: How to call nodes in errors.
    """

    def __init__(
        self,
        world_size: int,
        nodes: Sequence[int],
        incarnation: int,
        deadlines: Deadlines | None = None,
        *,
        lead: int | None = None,
        every_node_publishes: bool = False,
        node_names: Mapping[int, str] | None = None,
    ) -> None:
        if world_size < 1 or len(nodes) != world_size:
            raise ValueError(f"{len(nodes)} nodes were given for {world_size} ranks")
        self._node_of = tuple(nodes)
        lead_only = frozenset({nodes[0] if lead is None else lead})
        self._members = Members(
            ranks=frozenset(range(world_size)),
            nodes=frozenset(nodes),
            lead=min(lead_only),
            lead_only=lead_only,
            publishers=frozenset(nodes) if every_node_publishes else lead_only,
        )
        self._ranks_of: dict[int, set[int]] = {node: set() for node in nodes}
        for rank, node in enumerate(nodes):
            self._ranks_of[node].add(rank)
        self._incarnation = incarnation
        self._deadlines = deadlines or Deadlines()
        self._names = dict(node_names or {})
        self._open: dict[tuple[int, int], Save] = {}
        self._closed: OrderedDict[tuple[int, int], Committed | Abandon] = OrderedDict()
        self._in_doubt: dict[tuple[int, int], set[int]] = {}
        self._gone_ranks: set[int] = set()
        self._gone_nodes: set[int] = set()
        self._superseded: int | None = None
        self._settle: Settle | None = None
        self._told_settled = False
        self._actions: list[Action] = []
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            Begun: self._begun,
            Staged: self._staged,
            RankFailed: self._rank_failed,
            NodeRecorded: self._node_recorded,
            NodeFailed: self._node_failed,
            PlanReady: self._plan_ready,
            PlanFailed: self._plan_failed,
            Published: self._published,
            PublishFailed: self._publish_failed,
            Cancel: self._cancel,
            RankGone: self._rank_gone,
            RankBack: self._rank_back,
            NodeGone: self._node_gone,
            Superseded: self._on_superseded,
            Settle: self._on_settle,
        }

    # ---- what callers use ----

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and return what is to be done, in order.

        Args:
            event: What happened.
            now: Monotonic seconds; never less than at the call before.

        Raises:
            ValueError: The event names a rank, node, step or attempt that cannot be; nothing was changed.
        """
        self._check(event)
        self._actions = []
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now)
        spoken_of = self._open.get((getattr(event, "step", -1), getattr(event, "attempt", -1)))
        if spoken_of is not None:
            self._advance(spoken_of, now)
        for save in [save for save in self._open.values() if now >= save.deadline]:
            self._expire(save, now)
        if self._settle is not None and not self._open and not self._told_settled:
            self._told_settled = True
            self._actions.append(Settled())
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """Return when `Tick` is due at the latest; None if nothing is waited for."""
        return min((save.deadline for save in self._open.values()), default=None)

    def live(self) -> set[CommitId]:
        """Return the attempts whose files must not be swept: in flight, or in doubt."""
        return {CommitId(step, self._incarnation, attempt) for step, attempt in (*self._open, *self._in_doubt)}

    def status(self) -> list[SaveStatus]:
        """Return the open saves, by step and attempt."""
        return [
            SaveStatus(*key, save.phase, save.since, save.deadline, self._describe_late(save))
            for key, save in sorted(self._open.items())
        ]

    # ---- events of ranks and nodes ----

    def _begun(self, event: Begun, now: float) -> None:
        self._heard_of_rank(event.rank)
        save = self._save(event.step, event.attempt, self._node_of[event.rank], now)
        if save is None:
            return
        for earlier in list(self._open.values()):
            if earlier is save:
                break
            if earlier.phase is Phase.BEGINNING and event.rank not in earlier.digests:
                words = f"rank {event.rank} went on to save step {event.step} without this one"
                hint = "call save for the same steps on every rank"
                self._abandon(earlier, CommitError(words, rank=event.rank, hint=hint))
        self._take_digest(save, event.rank, event.digest)

    def _staged(self, event: Staged, now: float) -> None:
        save = self._save(event.step, event.attempt, self._node_of[event.rank], now)
        if save is not None:
            save.staged.add(event.rank)

    def _rank_failed(self, event: RankFailed, now: float) -> None:
        save = self._save(event.step, event.attempt, self._node_of[event.rank], now)
        if save is not None and save.phase is not Phase.PUBLISHING:
            self._abandon(save, event.error, rank=event.rank)

    def _node_recorded(self, event: NodeRecorded, now: float) -> None:
        self._gone_nodes.discard(event.node)
        save = self._save(event.step, event.attempt, event.node, now)
        if save is None or save.phase is Phase.PUBLISHING:
            return
        name = self._name(event.node)
        ref = NodeRef(node=event.node, size_bytes=event.size_bytes, blake3=event.blake3)
        if event.part_digests.keys() != self._ranks_of[event.node]:
            self._abandon(save, CommitError("the node's record is not about exactly its ranks", node=name))
        elif save.recorded.get(event.node, ref) != ref:
            self._abandon(save, CommitError("the node recorded the save twice, and not alike", node=name))
        elif all(self._take_digest(save, rank, digest) for rank, digest in sorted(event.part_digests.items())):
            save.staged |= self._ranks_of[event.node]
            save.recorded[event.node] = ref

    def _node_failed(self, event: NodeFailed, now: float) -> None:
        self._gone_nodes.discard(event.node)
        save = self._save(event.step, event.attempt, event.node, now)
        if save is not None and save.phase is not Phase.PUBLISHING:
            self._abandon(save, event.error, node=self._name(event.node))

    def _take_digest(self, save: Save, rank: int, digest: str) -> bool:
        if save.digests.setdefault(rank, digest) == digest:
            return True
        if save.phase is not Phase.PUBLISHING:
            self._abandon(save, CommitError("the rank wrote by another part than it began the save with", rank=rank))
        return False

    def _rank_gone(self, event: RankGone, now: float) -> None:
        self._gone_ranks.add(event.rank)
        for save in list(self._open.values()):
            self._abandon_if_lost(save)

    def _rank_back(self, event: RankBack, now: float) -> None:
        self._heard_of_rank(event.rank)

    def _node_gone(self, event: NodeGone, now: float) -> None:
        self._gone_nodes.add(event.node)
        for save in list(self._open.values()):
            self._abandon_if_lost(save)

    def _heard_of_rank(self, rank: int) -> None:
        self._gone_ranks.discard(rank)
        self._gone_nodes.discard(self._node_of[rank])

    def _abandon_if_lost(self, save: Save) -> None:
        """Abandon a save that waits for somebody who is gone."""
        waits_for = (self._members.nodes - save.recorded.keys()) | (self._members.publishers - save.published)
        if save.phase is not Phase.PUBLISHING and (lost := self._gone_ranks - save.staged):
            words = f"{describe(lost)} died or left before its share was staged"
            self._abandon(save, RankLostError(words, rank=min(lost), node=self._name(self._node_of[min(lost)])))
        elif lost := self._gone_nodes & waits_for:
            words = f"{self._describe_nodes(lost)} was lost before it had done its share"
            self._abandon(save, RankLostError(words, node=self._name(min(lost))))

    # ---- events of the lead itself ----

    def _plan_ready(self, event: PlanReady, now: float) -> None:
        save = self._open.get((event.step, event.attempt))
        if save is not None and save.plan is None and save.phase is not Phase.BEGINNING:
            save.plan = (event.plan_digest, event.plan_size)
            save.planned.add(self._members.lead)

    def _plan_failed(self, event: PlanFailed, now: float) -> None:
        save = self._open.get((event.step, event.attempt))
        if save is not None and save.plan is None and save.phase is not Phase.BEGINNING:
            self._abandon(save, event.error)

    def _published(self, event: Published, now: float) -> None:
        key = (event.step, event.attempt)
        members = self._members
        node = event.node if event.node is not None and event.node in members.publishers else members.lead
        save = self._open.get(key)
        if save is not None and save.phase is Phase.PUBLISHING:
            save.published.add(node)
        elif key in self._in_doubt:
            self._in_doubt[key].discard(node)
            if not self._in_doubt[key] and self._superseded is None:
                del self._in_doubt[key]
                self._close(key, Committed(*key, late=True))

    def _publish_failed(self, event: PublishFailed, now: float) -> None:
        key = (event.step, event.attempt)
        save = self._open.get(key)
        if save is not None and save.phase is Phase.PUBLISHING:
            self._abandon(save, event.error, certain=event.certain)
        elif event.certain:
            self._in_doubt.pop(key, None)

    def _cancel(self, event: Cancel, now: float) -> None:
        if (event.step, event.attempt) in self._closed:
            return
        save = self._save(event.step, event.attempt, self._members.lead, now)
        if save is not None and save.phase is not Phase.PUBLISHING:
            self._abandon(save, event.error)

    def _on_superseded(self, event: Superseded, now: float) -> None:
        if event.incarnation <= self._incarnation:
            return
        self._superseded = max(event.incarnation, self._superseded or 0)
        for save in list(self._open.values()):
            self._abandon(save, self._superseded_error())

    def _on_settle(self, event: Settle, now: float) -> None:
        if self._settle is not None:
            event = Settle(min(event.deadline, self._settle.deadline), event.grace_s)
        self._settle = event
        self._told_settled = False
        for save in list(self._open.values()):
            self._advance(save, now)
            if save.phase is Phase.BEGINNING or (save.phase is Phase.STAGING and event.grace_s <= 0):
                self._abandon(save, self._settle_error(save))
            elif save.phase is Phase.STAGING:
                save.settling = True
                save.deadline = min(save.deadline, event.deadline, now + event.grace_s)
            else:
                save.deadline = min(save.deadline, event.deadline)

    # ---- the life of a save ----

    def _save(self, step: int, attempt: int, node: int, now: float) -> Save | None:
        """Return the open save, opening a new one; None if its verdict is known (whoever spoke hears it again)."""
        key = (step, attempt)
        if (save := self._open.get(key)) is not None:
            return save
        if (verdict := self._closed.get(key)) is not None:
            self._actions.append(replace(verdict, to_node=node))
            return None
        save = Save(step, attempt, Phase.BEGINNING, now, now + self._deadlines.begin_s)
        self._open[key] = save
        if self._superseded is not None:
            self._abandon(save, self._superseded_error())
        elif self._settle is not None:
            self._abandon(save, self._settle_error(save))
        elif len(self._open) > MAX_OPEN:
            self._abandon(save, CommitError(f"more than {MAX_OPEN} saves are open at once"))
        else:
            self._abandon_if_lost(save)
        return save if key in self._open else None

    def _advance(self, save: Save, now: float) -> None:
        """Go on to the first phase whose condition does not hold yet."""
        while (wait := WAITS.get(save.phase)) is not None and wait.is_over(self._members, save):
            save.phase, save.since, save.settling = wait.next, now, False
            key = (save.step, save.attempt)
            if save.phase is Phase.COMMITTED:
                del self._open[key]
                self._close(key, Committed(*key))
                return
            save.deadline = now + WAITS[save.phase].limit_s(self._deadlines)
            if self._settle is not None:
                save.deadline = min(save.deadline, self._settle.deadline)
            if save.phase is Phase.STAGING:
                self._actions.append(BuildPlan(*key, dict(sorted(save.digests.items()))))
            elif save.phase is Phase.PUBLISHING:
                assert save.plan is not None
                refs = tuple(save.recorded[node] for node in sorted(save.recorded))
                self._actions.append(Publish(*key, *save.plan, refs))

    def _expire(self, save: Save, now: float) -> None:
        if save.settling:
            self._abandon(save, self._settle_error(save))
            return
        wait = WAITS[save.phase]
        late = wait.late(self._members, save)
        words = f"{self._describe_late(save)} had not {wait.had_not} after {now - save.since:.1f} s"
        who: dict[str, Any] = {"rank": min(late)} if wait.of == "rank" else {"node": self._name(min(late))}
        hint = "see that node's agent log; a slow but healthy save needs longer deadlines"
        self._abandon(save, DeadlineError(words, **who, hint=hint))

    def _abandon(
        self,
        save: Save,
        error: CheckpointError,
        *,
        certain: bool = False,
        rank: int | None = None,
        node: str | None = None,
    ) -> None:
        key = (save.step, save.attempt)
        if self._open.pop(key, None) is None:
            return
        in_doubt = save.phase is Phase.PUBLISHING and not certain
        if in_doubt:
            self._in_doubt[key] = set(self._members.publishers - save.published)
            error = from_wire({**error.to_wire(), "message": error.message + IN_DOUBT})
        save.phase = Phase.ABANDONED
        self._close(key, Abandon(*key, _placed(error, step=save.step, rank=rank, node=node), in_doubt))

    def _close(self, key: tuple[int, int], verdict: Committed | Abandon) -> None:
        self._closed[key] = verdict
        while len(self._closed) > MAX_REMEMBERED:
            self._closed.popitem(last=False)
        self._actions.append(verdict)

    # ---- words ----

    def _superseded_error(self) -> SupersededError:
        return SupersededError(
            f"incarnation {self._superseded} of the run is newer than this one, {self._incarnation}",
            hint="another job started in this run directory; stop this one, or give it a directory of its own",
        )

    def _settle_error(self, save: Save) -> CommitError:
        late = f": {self._describe_late(save)} had not staged" if save.phase is Phase.STAGING else ""
        return CommitError(f"the run is being settled, and only saves that all ranks had staged are finished{late}")

    def _describe_late(self, save: Save) -> str:
        wait = WAITS[save.phase]
        late = wait.late(self._members, save)
        return describe(late) if wait.of == "rank" else self._describe_nodes(late)

    def _describe_nodes(self, nodes: Iterable[int]) -> str:
        nodes = set(nodes)
        if len(nodes) <= 4 and all(node in self._names for node in nodes):
            return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(self._names[node] for node in sorted(nodes))
        return describe(nodes, "node", "nodes")

    def _name(self, node: int) -> str:
        return self._names.get(node, str(node))

    def _check(self, event: Event) -> None:
        for name in ("step", "attempt"):
            number = getattr(event, name, 0)
            if not 0 <= number < 1 << 60:
                raise ValueError(f"{type(event).__name__} names {name} {number}")
        rank, node = getattr(event, "rank", 0), getattr(event, "node", None)
        if rank not in self._members.ranks:
            raise ValueError(f"{type(event).__name__} names rank {rank} of a world of {len(self._members.ranks)}")
        if node is not None and node not in self._members.nodes:
            raise ValueError(f"{type(event).__name__} names node {node}, which has no rank of this run")


def _placed(error: CheckpointError, **fields: Any) -> CheckpointError:
    """Return the error with step, rank and node filled in where it does not say them itself."""
    missing = {name: value for name, value in fields.items() if value is not None and getattr(error, name) is None}
    if not missing:
        return error
    placed = from_wire({**error.to_wire(), **missing})
    placed.__cause__ = error.__cause__
    return placed
