"""What the agent beside rank 0 does for all nodes of the job: commits, restores, announcements, retention.

Invariants: used from the dispatcher thread only; nothing here waits. What nodes report is checked against who they are before it counts:
a node speaks of itself and its ranks. What is told to several nodes is told to this one too, directly, in the same order. A node that is
lost takes its ranks along; what waits for them ends at once, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.announcer import Announcer
from safehold.agent.dealing import Dealing
from safehold.agent.fetching import Fetching
from safehold.agent.flusher_client import Flusher
from safehold.agent.here import Here
from safehold.agent.known import Known
from safehold.agent.lead import Lead
from safehold.agent.means import Spawn, in_thread
from safehold.agent.memory_held import Held
from safehold.agent.memory_lead import MemoryLead
from safehold.agent.parts import AllParts, PartStore
from safehold.agent.places import Places
from safehold.agent.protector import Protector
from safehold.agent.ranks_afar import afar
from safehold.agent.rebasing import Rebasing
from safehold.agent.replicator import Replicator
from safehold.agent.restores import Restores
from safehold.agent.retention import Retention
from safehold.agent.settling import OthersSettled
from safehold.agent.undeclared import specs_of, without_contradictions
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, SupersededError
from safehold.events import EventStream
from safehold.policy import commit as protocol
from safehold.policy import settlement as settlements
from safehold.policy.compare import disagreements, mismatch
from safehold.types import CommitId, TensorSpec

Post = Callable[[Callable[[], None]], None]
MAX_COMPARED = 64


class Head:
    """See the module.

    Args:
        here: This node's session.
        keep: Wire form of the retention rules.
        every_seconds: Interval of saves by time; 0: none.
        flusher: For tier work.
        copier: The process that copies to the second place; None: there is none.
        own_parts: The parts that this node's ranks began with.
        held: What is in memory here.
        send: Tells another node, if it can be reached.
        post: Runs a function in the dispatcher.
        spawn: Has planning done beside it.
    """

    def __init__(
        self,
        here: Here,
        *,
        config: Config,
        keep: dict[str, Any],
        every_seconds: float,
        flusher: Flusher,
        copier: Flusher | None,
        own_parts: PartStore,
        held: Held,
        send: Callable[[int, w.Word], None],
        post: Post,
        clock: Clock,
        events: EventStream,
        spawn: Spawn = in_thread,
    ) -> None:
        self._here, self._config, self._flusher, self._send = here, config, flusher, send
        self._post, self._clock, self._events, self._spawn = post, clock, events, spawn
        world = here.world
        self._ranks_of = dict(enumerate(world.ranks_by_node()))
        self._parts = AllParts(own_parts, ask=self._ask_part)
        self.replicator = self._new_replicator(copier)
        self._retention = Retention(
            keep, flusher=flusher, config=config, leased=self.replicator.held, maintained=self._maintained
        )
        self._undeclared: dict[int, list[TensorSpec]] = {}
        self._steps: dict[int, int] = {}
        self._compared: dict[tuple[int, int], dict[int, dict[str, int]]] = {}
        self._when_idle: list[Callable[[], None]] = []
        self._on_settled: list[Callable[[], None]] = []
        self._known: Known | None = None
        self._manifests: dict[int, int] = {}
        self.lead: Lead | None = None
        self._dealing = Dealing(self.tell, events)
        self.others = OthersSettled(set(self._ranks_of) - {here.node}, tell=self.tell, clock=clock)
        self.places = Places(
            names=world.node_names, here=here.node, config=config, flusher=flusher, tell=self.tell, clock=clock
        )
        self.protector = self._new_protector()
        self.announcer = Announcer(
            world_size=world.world_size,
            every_seconds=every_seconds,
            steps=lambda: {**self._steps, **here.steps()},
            announce=lambda step: self.tell_all(w.Announce(step)),
            clock=clock,
            drop=lambda: self.tell_all(w.DropAnnounced()),
            num_nodes=len(self._ranks_of),
        )
        self.memory = MemoryLead(
            here, config=config, held=held, tell_all=self.tell_all, post=post, clock=clock, events=events, spawn=spawn
        )
        rebasing = Rebasing(here, config=config, flusher=flusher, copier=copier, memory=self.memory)
        self.restores = Restores(
            local_ranks=list(range(world.world_size)),
            config=config,
            flusher=flusher,
            memory_of=lambda commit: here.memory.here(commit),
            memory=self.memory,
            rebase=rebasing.rebase,
            when_idle=self.when_idle,
            incarnation=lambda: here.incarnation,
            clock=clock,
            in_doubt=lambda: rebasing.lost,
            fetching=Fetching(config=config, copier=copier) if copier is not None else None,
            planned=lambda number: self._dealing.deal(number),
            restored=self.protector.restored,
        )

    def _new_protector(self) -> Protector:
        here = self._here
        return Protector(
            names=here.world.node_names,
            domains=here.world.domains,
            here=here.node,
            config=self._config,
            flusher=self._flusher,
            tell=self.tell,
            incarnation=lambda: here.incarnation,
            clock=self._clock,
            events=self._events,
        )

    def _new_replicator(self, copier: Flusher | None) -> Replicator:
        here = self._here
        return Replicator(
            self,
            num_nodes=len(self._ranks_of),
            token=here.world.token,
            config=self._config,
            copier=copier,
            restoring=lambda: self.restores.active,
            incarnation=lambda: here.incarnation,
            released=lambda: self._retention.released(),
            clock=self._clock,
            events=self._events,
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, known: Known) -> None:
        """Begin an incarnation without saves; what was in flight of one before gets no say any more."""
        here, world = self._here, self._here.world
        self._known, self._compared = known, {}
        self.memory.start()

        def current() -> bool:
            return self.lead is lead

        lead = self.lead = Lead(
            node_of=world.node_of,
            node_names=world.node_names,
            incarnation=here.incarnation,
            run_id=here.run_id,
            config=self._config,
            flusher=self._flusher,
            parts=self._parts,
            facts=here.facts_of,
            on_committed=lambda step, attempt, node: self._committed(step, attempt, node) if current() else None,
            on_abandoned=lambda action: self._abandoned(action) if current() else None,
            on_doubtful=known.give_up,
            on_settled=lambda: self._settled() if current() else None,
            post=self._post,
            clock=self._clock,
            events=self._events,
            spawn=self._spawn,
            memory=self.memory,
        )
        self.announcer.restart()

    @property
    def num_open(self) -> int:
        """Saves without a verdict."""
        return self.lead.num_open if self.lead is not None else 0

    def settle(self, then: Callable[[], None], deadline_s: float, grace_s: float) -> None:
        """Finish what all ranks have staged, or stage within `grace_s`, give up the rest, then call `then`."""
        if self.lead is None:
            then()
            return
        self._on_settled.append(then)
        self.lead.settle(deadline_s, grace_s)

    def _settled(self) -> None:
        waiting, self._on_settled = self._on_settled, []
        for then in waiting:
            then()

    def ended(self, by: int, error: CheckpointError) -> None:
        """A newer incarnation owns the run."""
        self.restores.stop(error)
        self.replicator.stop()
        self.protector.stop()
        if self.lead is not None:
            self.lead.handle(protocol.Superseded(incarnation=by))

    def sweep(self) -> None:
        """Clear what dead attempts left."""
        incarnation = self._here.incarnation
        swept = lambda value, error: self._maintained(incarnation, value, error)  # noqa: E731
        self._flusher.call("sweep", {"incarnation": incarnation}, swept, timeout_s=self._config.flush_timeout_s)

    # -- what nodes report -----------------------------------------------------------------------------------------------

    def report(self, node: int, report: w.Report) -> None:
        """Take a report of a node.

        Raises:
            msgspec.DecodeError: It is malformed, or speaks of others than that node and its ranks; nothing was changed.
        """
        match report:
            case w.EventTold():
                self._told(node, report)
            case w.RanksAsk():
                request = m.decode_request(report.request)
                self._check_ranks(node, report.ranks)
                for peer in afar(report.ranks, node, self.tell, self._manifests):
                    if not peer.answered:
                        self.ask(peer, request)
            case w.Compared():
                self._check_ranks(node, report.crcs)
                if report.incarnation == self._here.incarnation:
                    self._take_compared(node, report)
            case w.PartTold():
                self._check_ranks(node, [report.rank])
                self._parts.told(report)
            case w.RankBegins():
                self._check_ranks(node, [report.rank])
                self.announcer.begun(report.step, report.rank)
            case w.Undeclared():
                self._check_ranks(node, [rank for ranks, _ in report.groups for rank in ranks])
                self.undeclared({rank: specs_of(leaves) for ranks, leaves in report.groups for rank in ranks})
            case w.StepsSeen():
                self._check_ranks(node, report.steps)
                self._steps.update(report.steps)
            case w.SettledHere():
                self.memory.told[node] = report.held
                self.others.settled(node, report.number)
            case w.Saw():
                self.places.saw(node, report)
            case w.Copied():
                self.replicator.copied(node, report)
            case w.Wants():
                self._dealing.wants(node, report)
            case w.MemoryBegins() | w.HeldHere() | w.HoldsManifest():
                self.memory.report(node, report)
            case w.ProtectedHere():
                self.protector.told(node, report)
            case w.Came():
                self.node_lost(node)
                self.replicator.node_back(node)
                self.protector.node_back(node)
            case _:
                raise msgspec.ValidationError(f"{type(report).__name__} is no report")

    def _told(self, node: int, told: w.EventTold) -> None:
        event = w.event_of(told)
        rank, at = getattr(event, "rank", None), getattr(event, "node", node)
        self._check_ranks(node, [] if rank is None else [rank])
        if at != node:
            raise msgspec.ValidationError(f"node {node} speaks of node {at}")
        try:
            self.event(event, told.incarnation)
        except ValueError as exc:
            raise msgspec.ValidationError(str(exc)) from exc

    def _check_ranks(self, node: int, ranks: Iterable[int]) -> None:
        if not set(ranks) <= set(self._ranks_of[node]):
            raise msgspec.ValidationError(f"node {node} speaks of ranks {sorted(ranks)[:8]}, which are not all its own")

    def event(self, event: Any, incarnation: int) -> None:
        """Take an event of the commit protocol; one about a save of another incarnation is too late to matter."""
        match event:
            case protocol.RankGone():
                self.restores.rank_gone(event.rank)
            case protocol.RankBack():
                self.restores.rank_back(event.rank)
            case _ if incarnation != self._here.incarnation:
                return
        if self.lead is not None:
            self.lead.handle(event)

    def ask(self, peer: Any, message: m.Request) -> None:
        """A rank restores."""
        try:
            match message:
                case m.RestoreAsk():
                    self.restores.ask(peer, message)
                case m.Vote():
                    self.restores.vote(peer, message)
                case _:
                    raise msgspec.ValidationError(f"{type(message).__name__} is not for the lead")
        except CheckpointError as exc:
            peer.refuse(message.id, exc)

    def begins(self, step: int, rank: int) -> None:
        """A rank of this node asks to save."""
        self.announcer.begun(step, rank)

    def compared(self, incarnation: int, step: int, attempt: int, crcs: dict[int, dict[str, int]]) -> None:
        """What this node's ranks agree about."""
        if len(self._ranks_of) > 1:
            self._take_compared(self._here.node, w.Compared(incarnation, step, attempt, crcs))

    def part(self, wanted: w.PartWanted, data: bytes | None) -> None:
        """A part of this node is not where the lead looked for it, which is the only place."""
        self._parts.told(w.PartTold(wanted.rank, wanted.digest, 0, 0, b""))

    def undeclared(self, found: Mapping[int, list[TensorSpec]]) -> None:
        """Ranks said which undeclared leaves they hold; once all have, all are told who holds what."""
        self._undeclared.update(found)
        if len(self._undeclared) == self._here.world.world_size:
            settled = settlements.settle(without_contradictions(self._undeclared))
            self.tell_all(w.LeavesSettled(settlements.to_wire(settled)))

    def _take_compared(self, node: int, told: w.Compared) -> None:
        key = (told.step, told.attempt)
        found = self._compared.setdefault(key, {})
        found.update(told.crcs)
        while len(self._compared) > MAX_COMPARED:
            del self._compared[next(iter(self._compared))]
        try:
            error = mismatch(disagreements(found), step=told.step)
        except ValueError as exc:
            del self._compared[key]
            raise msgspec.ValidationError(str(exc)) from exc
        if error is not None and self.lead is not None:
            self.lead.handle(protocol.NodeFailed(step=told.step, attempt=told.attempt, node=node, error=error))

    def node_lost(self, node: int) -> None:
        """A node's agent is dead or cannot be reached."""
        if self.lead is not None:
            self.lead.handle(protocol.NodeGone(node=node))
        self.memory.node_lost(node)
        for rank in self._ranks_of[node]:
            self.restores.rank_gone(rank)
        self._manifests.pop(node, None)
        self.others.lost(node)
        self.places.lost(node)
        self.replicator.node_lost(node)
        self._dealing.node_lost(node)
        self.protector.node_lost(node)
        self._parts.lost(set(self._ranks_of[node]))

    def node_back(self, node: int) -> None:
        """A node that was lost can be reached again: it may have missed what became of its saves."""
        self.others.back(node)
        self.places.back(node)
        self.replicator.node_back(node)
        self.protector.node_back(node)
        self.tell(node, w.TellAgain())

    # -- the lead's word -------------------------------------------------------------------------------------------------

    def tell(self, node: int, word: w.Word) -> None:
        """Tell one node."""
        if node == self._here.node:
            self._here.hear(word)
        else:
            self._send(node, word)

    def tell_all(self, word: w.Word) -> None:
        """Tell all nodes, this one last, since it may answer at once."""
        for node in self._ranks_of:
            if node != self._here.node:
                self._send(node, word)
        self._here.hear(word)

    def tell_opened(self, steps: list[int], memory: CommitId | None = None) -> None:
        """Tell the other nodes of a new incarnation."""
        here = self._here
        for node in self._ranks_of:
            if node != here.node:
                self._send(node, w.Opened(here.run_id, here.incarnation, steps, memory))

    def _ask_part(self, rank: int, digest: str) -> None:
        self.tell(self._here.world.node_of[rank], w.PartWanted(rank, digest))

    def _committed(self, step: int, attempt: int, node: int | None) -> None:
        if node is not None:
            in_memory = self.memory.is_memory(step, attempt)
            self.tell(node, w.Committed(self._here.incarnation, step, attempt, in_memory))
            return
        in_memory = self.memory.committed(step, attempt)
        word = w.Committed(self._here.incarnation, step, attempt, in_memory)
        _, final = self._here.facts_of(step, attempt)
        try:
            self.tell_all(word)
        finally:
            self._over(step, attempt)
            self.announcer.committed(step)
            assert self._known is not None
            if not in_memory:  # else there is nothing to replicate or protect, and nothing in its place to delete
                self.replicator.committed(CommitId(step, self._here.incarnation, attempt), final=final)
                self._retention.retire(self._known, step, attempt)
                self.protector.committed(step, attempt)
            self._check_idle()

    def _abandoned(self, action: protocol.Abandon) -> None:
        incarnation = self._here.incarnation
        again = action.to_node is not None
        word = w.Abandoned(
            incarnation, action.step, action.attempt, action.error.to_wire(), action.in_doubt, again=again
        )
        if action.to_node is not None:
            self.tell(action.to_node, word)
            return
        self.memory.abandoned(action.step, action.attempt)
        self.tell_all(word)
        self._over(action.step, action.attempt)
        self.announcer.abandoned(action.step)
        self._check_idle()

    def _over(self, step: int, attempt: int) -> None:
        self._compared.pop((step, attempt), None)
        self._parts.over(step, attempt)

    def _maintained(self, incarnation: int, value: Any, error: CheckpointError | None) -> None:
        """What was asked for in the background is done, or failed; what concerns an incarnation before is of no interest."""
        if incarnation != self._here.incarnation:
            return
        if isinstance(error, SupersededError):
            self._here.end(incarnation + 1)
        elif error is not None:
            self.tell_all(w.ToAll(f"retention failed: {error}"))
        elif value and value.get("problem"):
            self.tell_all(w.ToAll(f"retention deletes nothing: {value['problem']}"))

    # -- time ------------------------------------------------------------------------------------------------------------

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` once no save is in flight; each has its deadlines."""
        self._when_idle.append(then)
        self._check_idle()

    def _check_idle(self) -> None:
        if self.num_open:
            return
        waiting, self._when_idle = self._when_idle, []
        for then in waiting:
            then()

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        parts = (self.lead, self.restores, self.announcer, self.others, self.places, self.replicator, self.protector)
        due = [when for part in parts if part is not None and (when := part.next_deadline()) is not None]
        return min(due, default=None)

    def tick(self) -> None:
        """Let deadlines pass."""
        for part in (
            self.lead,
            self.restores,
            self.announcer,
            self.others,
            self.places,
            self.replicator,
            self.protector,
        ):
            if part is not None:
                part.tick()
