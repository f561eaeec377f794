"""One incarnation on one node: its ranks, their saves and restores, and, beside rank 0, the lead.

Invariants: used from the dispatcher thread only; nothing here waits or touches storage. A session begins with the first `Hello` of a
token, is open once the lead has its incarnation, and ends when a newer token opens the run, or the agent exits. Trainers of a session
that has ended are told once and refused from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from safehold.agent import messages as m
from safehold.agent.announcer import Announcer
from safehold.agent.arenas import Arena, ArenaPool
from safehold.agent.flusher_client import Flusher
from safehold.agent.known import Known
from safehold.agent.lead import SETTLE_GRACE_S, Lead
from safehold.agent.memory_checks import MemoryChecks
from safehold.agent.node_save import Peer
from safehold.agent.parts import PartStore
from safehold.agent.restores import Restores
from safehold.agent.retention import Retention
from safehold.agent.saves import NodeSaves
from safehold.clock import Clock, new_token
from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    RankLostError,
    SkippedError,
    SupersededError,
    from_wire,
)
from safehold.events import EventStream
from safehold.format.names import numbered
from safehold.host import memfd
from safehold.host.control import NodeControl, RankControl
from safehold.policy import commit as protocol
from safehold.policy import settlement as settlements
from safehold.types import CommitId, TensorSpec

Post = Callable[[Callable[[], None]], None]


class Session:
    """See the module.

    Args:
        hello: The first rank's hello.
        pool: The node's arenas.
        flusher: For tier work.
        post: Runs a function in the dispatcher.
    """

    def __init__(
        self, hello: m.Hello, *, pool: ArenaPool, flusher: Flusher, post: Post, clock: Clock, events: EventStream
    ) -> None:
        self.world = hello.world
        self.token = hello.world.token
        self.config = Config.from_wire(hello.config)
        self.keep = hello.keep
        self.every_seconds = hello.every_seconds
        self.node = hello.world.node_of[hello.rank]
        self.local_ranks = hello.world.ranks_of(self.node)
        self.pool, self.flusher = pool, flusher
        self._post, self._clock, self._events = post, clock, events
        self.peers: dict[int, Peer] = {}
        self.controls: dict[int, RankControl] = {}
        self.node_control = NodeControl.create()
        self.run_id, self.incarnation = hello.run_id, hello.incarnation
        self.ended_by = 0
        self._rebase_lost = False
        self.disorderly: set[int] = set()
        self._checks = MemoryChecks(pool, flusher, post, timeout_s=self.config.flush_timeout_s)
        self._retention = Retention(self.keep, flusher=flusher, config=self.config, maintained=self._maintained)
        self._undeclared: dict[int, list[TensorSpec]] = {}
        self._parts = PartStore()
        self._when_idle: list[Callable[[], None]] = []
        self._on_settled: list[Callable[[], None]] = []
        self.saves: NodeSaves | None = None
        self.lead: Lead | None = None
        self.restores: Restores | None = None
        self.announcer: Announcer | None = None
        if self.incarnation:  # an agent before this one opened it
            self._start(self._known(None))

    @property
    def is_lead(self) -> bool:
        """Whether rank 0 is on this node."""
        return 0 in self.local_ranks

    # -- life ----------------------------------------------------------------------------------------------------------

    def attach(self, peer: Peer, hello: m.Hello) -> tuple[RankControl, NodeControl]:
        """A rank connects (again)."""
        if hello.rank not in self.local_ranks or hello.world != self.world:
            raise ConfigurationError(f"rank {hello.rank} does not belong to this session", rank=hello.rank)
        if hello.incarnation > self.incarnation:  # it heard of a rebase that an agent before this one made
            self.opened(hello.run_id, hello.incarnation, None)
        self.peers[hello.rank] = peer
        self.disorderly.discard(hello.rank)
        self._checks.rank_back(hello.rank)
        if self.lead is not None:
            self.lead.handle(protocol.RankBack(rank=hello.rank))
        if self.restores is not None:
            self.restores.rank_back(hello.rank)
        control = self.controls.get(hello.rank)
        if control is None:
            control = self.controls[hello.rank] = RankControl.create()
        return control, self.node_control

    def detach(self, rank: int, peer: Peer, *, orderly: bool, pid: int = 0) -> None:
        """A rank's connection ended; `orderly` if it said that it will not be back; `pid`: its process, where that is known."""
        if self.peers.get(rank) is not peer:
            return
        del self.peers[rank]
        if not orderly:
            self.disorderly.add(rank)
        self._events.emit("rank_gone", rank=rank, orderly=orderly)
        self._checks.rank_gone(rank, pid)
        if self.restores is not None:
            self.restores.rank_gone(rank)
        if self.saves is not None:
            self.saves.rank_gone(rank)
        if self.lead is not None:
            self.lead.handle(protocol.RankGone(rank=rank))

    def opened(self, run_id: str, incarnation: int, steps: list[int] | None) -> None:
        """The lead has opened an incarnation that has these steps, or a rank brought its number (None: storage is asked)."""
        if self.incarnation == incarnation and self.saves is not None:
            return
        self.run_id, self.incarnation = run_id, incarnation
        self._start(self._known(steps))
        if self.lead is not None:
            arguments = {"incarnation": incarnation}
            swept = lambda value, error: self._maintained(incarnation, value, error)  # noqa: E731
            self.flusher.call("sweep", arguments, swept, timeout_s=self.config.flush_timeout_s)

    def _known(self, steps: Iterable[int] | None) -> Known:
        incarnation = self.incarnation

        def failed(error: CheckpointError) -> None:
            self._events.emit("known", "failed", error=str(error))
            if isinstance(error, SupersededError):
                self._maintained(incarnation, None, error)

        return Known(incarnation, steps, flusher=self.flusher, config=self.config, failed=failed)

    def _start(self, known: Known) -> None:
        """Begin with no saves; what was in flight of an incarnation before gets no say any more."""

        def current() -> bool:
            return self.saves is saves

        def tell_lead(event: Any) -> None:
            if self.lead is not None and current():
                self.lead.handle(event)

        held = self.saves.take_held() if self.saves is not None else []
        saves = self.saves = NodeSaves(
            node=self.node,
            local_ranks=self.local_ranks,
            incarnation=self.incarnation,
            config=self.config,
            keep=self.keep,
            pool=self.pool,
            flusher=self.flusher,
            clock=self._clock,
            control_of=lambda rank: self.controls[rank].fds,
            tell_lead=tell_lead,
            run_id=self.run_id,
            node_name=self.world.node_names[self.node],
            parts=self._parts,
            known=known,
        )
        if self.is_lead:
            self.lead = Lead(
                node_of=self.world.node_of,
                node_names=self.world.node_names,
                incarnation=self.incarnation,
                run_id=self.run_id,
                config=self.config,
                flusher=self.flusher,
                parts=self._parts,
                facts=saves.facts,
                on_committed=lambda step, attempt: self._committed(step, attempt) if current() else None,
                on_abandoned=lambda action: self._abandoned(action) if current() else None,
                on_doubtful=lambda step, attempt: known.give_up(step, attempt),
                on_settled=lambda: self._settled() if current() else None,
                post=self._post,
                clock=self._clock,
                events=self._events,
            )
            self.announcer = Announcer(
                world_size=self.world.world_size,
                every_seconds=self.every_seconds,
                node_control=self.node_control,
                controls=self.controls,
                clock=self._clock,
                drop=self._drop_announced,
            )
        self.restores = self.restores or Restores(
            local_ranks=self.local_ranks,
            config=self.config,
            flusher=self.flusher,
            memory_of=self.pool.holding,
            rebase=self._rebase,
            when_idle=self.when_idle,
            incarnation=lambda: self.incarnation,
            clock=self._clock,
            in_doubt=lambda: self._rebase_lost,
        )
        saves.hold(held)

    def resume(self) -> None:
        """Take saves again after a `settle` that nobody took over from."""
        if self.saves is not None and not self.ended_by:
            self._start(self.saves.known)

    def settle(self, then: Callable[[], None], deadline_s: float, grace_s: float = SETTLE_GRACE_S) -> None:
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

    def end(self, by: int) -> None:
        """A newer incarnation owns the run: tell the trainers, and let none of them wait for anything here."""
        if self.ended_by:
            return
        self.ended_by = by
        error = self._superseded()
        if self.saves is not None:
            self.saves.end(error)
        if self.restores is not None:
            self.restores.stop(error)
        for rank, peer in self.peers.items():
            self.pool.part_with(rank)
            peer.reply(m.Superseded(by))
        if self.lead is not None:
            self.lead.handle(protocol.Superseded(incarnation=by))

    def close(self) -> None:
        """Let go of the control words; no rank is here, and none will be."""
        for control in self.controls.values():
            control.close()
        self.controls.clear()
        self.node_control.close()
        self._checks.close()

    def taken_over(self) -> list[str]:
        """Return what the next job must be told if this one still runs."""
        if not self.peers or self.ended_by:
            return []
        ranks = numbered("rank", sorted(self.peers))
        return [
            f"took this run over from a job that is still running (incarnation {self.incarnation}, {ranks} on this "
            "node): its saves are not used any more; to only read a checkpoint use safehold.load"
        ]

    def refuse_if_ended(self, rank: int) -> None:
        """Raise `SupersededError` if this session has ended."""
        if self.ended_by:
            raise self._superseded(rank)

    def _superseded(self, rank: int | None = None) -> SupersededError:
        text = f"incarnation {self.ended_by} owns the run now; this is {self.incarnation}"
        hint = "another job was started in this run directory; stop this one, or give it a directory of its own"
        return SupersededError(text, rank=rank, hint=hint)

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, message: m.Request, payload: dict[str, bytes] | None) -> None:
        """Carry out one request of an attached rank."""
        self.refuse_if_ended(peer.rank)
        if self.peers.get(peer.rank) is not peer:
            raise AgentUnavailableError("this rank is connected anew", rank=peer.rank)
        match message:
            case m.JoinRun():
                if self.incarnation not in (0, message.incarnation):
                    text = f"this session is incarnation {self.incarnation}, not {message.incarnation}"
                    raise ConfigurationError(text, rank=peer.rank)
                self.opened(message.run_id, message.incarnation, None)
                peer.reply(m.Done(message.id))
            case m.Register():
                self._register(peer, message)
            case m.Prepare():
                self._prepare(peer, message)
            case m.Begin():
                self._open_saves(peer).begin(peer, message)
                if self.announcer is not None:
                    self.announcer.begun(message.step, peer.rank)
            case m.Staged():
                self._open_saves(peer).staged(peer, message, message.objects if payload is None else payload)
                peer.reply(m.Done(message.id))
            case m.StageFailed():
                error = from_wire(message.error)
                self._open_saves(peer).stage_failed(message.step, message.attempt, peer.rank, error)
                peer.reply(m.Done(message.id))
            case m.RestoreAsk() | m.Vote() | m.MemoryAsk() | m.RestoreDone():
                self._restore(peer, message)
            case _:
                raise ConfigurationError(f"unexpected request {type(message).__name__}", rank=peer.rank)

    def _open_saves(self, peer: Peer) -> NodeSaves:
        if self.saves is None:
            raise ConfigurationError("the run is not open yet", rank=peer.rank)
        return self.saves

    def _register(self, peer: Peer, message: m.Register) -> None:
        specs = [
            TensorSpec(name=name, dtype=dtype, shape=tuple(shape), kind="numpy" if kind == "numpy" else "torch")
            for name, dtype, shape, kind in message.leaves
        ]
        self._undeclared[peer.rank] = specs
        peer.reply(m.Done(message.id))
        if len(self._undeclared) < len(self.local_ranks):
            return
        found = m.Settled(settlements.to_wire(settlements.settle(_without_contradictions(self._undeclared))))
        for other in self.peers.values():
            other.reply(found)

    def _prepare(self, peer: Peer, message: m.Prepare) -> None:
        def ready(arena: Arena | None, error: CheckpointError | None) -> None:
            if error is not None or arena is None:
                peer.refuse(message.id, error or ConfigurationError("no arena", rank=peer.rank))
                return
            arena.verified = False  # from here on the trainer can write to it
            peer.reply(m.Prepared(message.id, arena.arena_id, arena.size_bytes), (arena.fd,))

        self.pool.prefer(peer.rank, message.numa_node)
        size = self._open_saves(peer).arena_size(peer.rank, message.arena_bytes)
        self.pool.acquire(peer.rank, size, ready)

    def _restore(self, peer: Peer, message: m.RestoreAsk | m.Vote | m.MemoryAsk | m.RestoreDone) -> None:
        if self.restores is None:
            raise ConfigurationError("the run is not open yet", rank=peer.rank)
        match message:
            case m.RestoreAsk():
                self.restores.ask(peer, message)
            case m.Vote():
                self.restores.vote(peer, message)
            case m.MemoryAsk():
                arena = self.pool.of(message.rank)
                if arena is None or arena.content is None:
                    raise RankLostError(f"the memory of rank {message.rank} is gone", rank=message.rank)
                with memfd.read_only(arena.fd) as fd:
                    peer.reply(m.MemorySource(message.id, arena.size_bytes, arena.packs), (fd,))
            case m.RestoreDone():
                self.pool.drop_idle(set(self.local_ranks), set())  # no rank reads another job's memory any more
                peer.reply(m.Done(message.id))

    # -- the lead's word -------------------------------------------------------------------------------------------------

    def _committed(self, step: int, attempt: int) -> None:
        assert self.saves is not None
        figures: dict[str, float] = {}
        try:
            figures = self.saves.committed(step, attempt)
            self._checks.consider()
        finally:  # whatever is wrong here, it is durable, and who waits for it is told
            self._tell_committed(step, attempt, figures)

    def _tell_committed(self, step: int, attempt: int, figures: dict[str, float]) -> None:
        for peer in list(self.peers.values()):
            peer.reply(m.Durable(step, attempt, "flash", figures))
        if self.announcer is not None:
            self.announcer.committed(step)
        assert self.saves is not None
        self._retention.retire(self.saves.known, step, attempt)
        self._check_idle()

    def _maintained(self, incarnation: int, value: Any, error: CheckpointError | None) -> None:
        """What was asked for in the background is done, or failed; what concerns an incarnation before is of no interest."""
        if incarnation != self.incarnation:
            return
        if isinstance(error, SupersededError):
            self.end(self.incarnation + 1)
        elif error is not None:
            self._tell_all(f"retention failed: {error}")
        elif value and value.get("problem"):
            self._tell_all(f"retention deletes nothing: {value['problem']}")

    def _abandoned(self, action: protocol.Abandon) -> None:
        assert self.saves is not None
        if action.to_node is not None and not self.saves.is_open(action.step, action.attempt):
            return  # heard before
        for peer in list(self.peers.values()):
            peer.reply(m.SaveFailed(action.step, action.attempt, action.error.to_wire()))
        self.saves.abandoned(action.step, action.attempt, action.error, in_doubt=action.in_doubt)
        if self.announcer is not None:
            self.announcer.abandoned(action.step)
        if isinstance(action.error, SupersededError):
            self.end(self.incarnation + 1)
        self._check_idle()

    def _rebase(
        self, commit: CommitId, bad: list[CommitId], done: Callable[[int, CheckpointError | None], None]
    ) -> None:
        arguments = {
            "token": new_token(),
            "up_to": [commit.step, commit.incarnation, commit.attempt],
            "exclude": [[entry.step, entry.incarnation, entry.attempt] for entry in bad],
            "reason": f"restored step {commit.step}",
        }

        def ask(*, again: bool) -> None:
            def opened(value: Any, error: CheckpointError | None) -> None:
                self._rebase_lost = error is not None and self.flusher.lost
                if error is None:
                    self.opened(value["run_id"], value["incarnation"], value["steps"])
                    done(self.incarnation, None)
                elif self._rebase_lost and not again and not self.ended_by:
                    ask(again=True)  # else this very session may be superseded by what was done
                else:
                    done(0, error)

            self.flusher.call("open_run", arguments, opened, timeout_s=self.config.start_timeout_s)

        ask(again=False)

    def _tell_all(self, text: str) -> None:
        for peer in self.peers.values():
            peer.reply(m.Note(text))

    def _drop_announced(self) -> None:
        if self.saves is not None:
            text = "not all ranks could follow the announcement of this save by time"
            self.saves.drop_announced(SkippedError(text, hint="it is announced again, further ahead"))

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` once no save is in flight; each has its deadlines."""
        self._when_idle.append(then)
        self._check_idle()

    def _check_idle(self) -> None:
        if self.lead is not None and self.lead.num_open:
            return
        waiting, self._when_idle = self._when_idle, []
        for then in waiting:
            then()

    # -- time ------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        parts = (self.lead, self.restores, self.announcer)
        due = [when for part in parts if part is not None and (when := part.next_deadline()) is not None]
        return min(due, default=None)

    def tick(self) -> None:
        """Let deadlines pass, and show that the agent lives."""
        self.node_control.beat()
        for part in (self.lead, self.restores, self.announcer):
            if part is not None:
                part.tick()

    def facts(self) -> dict[str, Any]:
        """What `safehold agents` shows."""
        return {
            "run_id": self.run_id,
            "incarnation": self.incarnation,
            "ranks": self.local_ranks,
            "connected": sorted(self.peers),
            "world_size": self.world.world_size,
            "saves_in_flight": self.saves.num_open if self.saves is not None else 0,
            "superseded_by": self.ended_by or None,
        }


def _without_contradictions(undeclared: dict[int, list[TensorSpec]]) -> dict[int, list[TensorSpec]]:
    """Leave out the leaves that ranks have under one name and not alike; they stay unsettled."""
    specs: dict[str, set[TensorSpec]] = {}
    for leaves in undeclared.values():
        for spec in leaves:
            specs.setdefault(spec.name, set()).add(spec)
    return {rank: [spec for spec in leaves if len(specs[spec.name]) == 1] for rank, leaves in undeclared.items()}
