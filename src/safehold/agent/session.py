"""One incarnation on one node: its ranks, their saves and restores; beside rank 0 with the head of all nodes, else following it.

Invariants: used from the dispatcher thread only; nothing here waits or touches storage. A session begins with the first `Hello` of a
token, is open once the lead has its incarnation, and ends when a newer token opens the run, or the agent exits. Trainers of a session
that has ended are told once and refused from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from safehold.agent import arena_requests, chunk_messages, held_messages
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.arenas import ArenaPool
from safehold.agent.flusher_client import Flusher
from safehold.agent.follower import Follower
from safehold.agent.guarding import Guard
from safehold.agent.head import Head
from safehold.agent.hearing import Hearing
from safehold.agent.known import Known
from safehold.agent.lead import SETTLE_GRACE_S, Lead
from safehold.agent.means import REAL, Means
from safehold.agent.memory_checks import MemoryChecks
from safehold.agent.memory_node import NodeMemory
from safehold.agent.node_save import Peer
from safehold.agent.nodes import MakeNetwork, Nodes
from safehold.agent.parts import PartStore
from safehold.agent.passing_on import PassingOn
from safehold.agent.restores import Restores
from safehold.agent.roles import new_copying, new_follower, new_head, new_saves
from safehold.agent.saves import NodeSaves
from safehold.agent.serving_disk import ask_disk
from safehold.agent.undeclared import specs_of
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    SupersededError,
    from_wire,
)
from safehold.events import EventStream
from safehold.format.names import numbered
from safehold.host.control import NodeControl, RankControl
from safehold.policy import commit as protocol
from safehold.types import CommitId, TensorSpec

Post = Callable[[Callable[[], None]], None]


def _no_network(*_: Any) -> Any:
    raise ConfigurationError("this agent has no network", hint="all ranks on one node")


class Session:
    """See the module.

    Args:
        hello: The first rank's hello.
        pool: The node's arenas.
        flusher: For tier work.
        post: Runs a function in the dispatcher.
        make_network: Makes the way to other nodes, where there are any.
        on_opened: Told of an incarnation that a lead elsewhere has opened: (this session, the committed steps).
        settle_old: Has the job before settle what it has in flight here: (this session, then, seconds).
        copier: The process that copies to the second place, if the run has one.
        means: Threads and control words.
    """

    def __init__(
        self,
        hello: m.Hello,
        *,
        pool: ArenaPool,
        flusher: Flusher,
        post: Post,
        clock: Clock,
        events: EventStream,
        make_network: MakeNetwork = _no_network,
        on_opened: Callable[[Session, list[int]], None] = lambda *_: None,
        settle_old: Callable[[Session, Callable[[], None], float], None] = lambda _, then, __: then(),
        copier: Flusher | None = None,
        means: Means = REAL,
    ) -> None:
        self.world = hello.world
        self.token = hello.world.token
        self.config = Config.from_wire(hello.config)
        self.keep = hello.keep
        self.every_seconds = hello.every_seconds
        self.node = hello.world.node_of[hello.rank]
        self.local_ranks = hello.world.ranks_of(self.node)
        self.pool, self.flusher, self.copier = pool, flusher, copier if self.config.remote else None
        self._post, self._clock, self._events, self._means = post, clock, events, means
        self._hearing = Hearing(self, on_opened=on_opened, settle_old=settle_old, events=events)
        self.peers: dict[int, Peer] = {}
        self.controls: dict[int, RankControl] = {}
        self.node_control = means.node_control()
        self.run_id, self.incarnation = hello.run_id, hello.incarnation
        self.ended_by = 0
        self.disorderly: set[int] = set()
        self._checks = MemoryChecks(pool, flusher, post, timeout_s=self.config.flush_timeout_s)
        self.undeclared: dict[int, list[TensorSpec]] = {}
        self.parts = PartStore()
        self.saves: NodeSaves | None = None
        self.memory = NodeMemory(self, config=self.config, pool=pool, post=post, events=events, spawn=means.spawn)
        self.nodes = self._reach(hello, make_network) if len(self.world.node_names) > 1 else None
        self.local_flash = False
        self.memory.connect()
        tell_lead = self._hearing.tell_lead
        self.copying = new_copying(self, clock)
        self.passing = PassingOn(self, config=self.config, pool=pool, post=post, clock=clock, events=events)
        self.guard = Guard(self.config, self.keep, flusher, tell_lead, clock)
        self.head = new_head(self, post, clock, events, means) if self.is_lead else None
        self.follower = None if self.is_lead else new_follower(self, clock)
        if self.incarnation:  # an agent before this one opened it
            self.placed(local_flash=hello.local_flash)
            self._start(self._known(None))
            if self.head is not None:
                self.head.replicator.opened(None)
            self._hearing.tell_others_came()

    @property
    def is_lead(self) -> bool:
        """Whether rank 0 is on this node."""
        return 0 in self.local_ranks

    @property
    def lead_node(self) -> int:
        """The node of rank 0."""
        return self.world.node_of[0]

    @property
    def lead(self) -> Lead | None:
        """The commit protocol, beside rank 0."""
        return self.head.lead if self.head is not None else None

    @property
    def restores(self) -> Restores | None:
        """The restores of all ranks, beside rank 0."""
        return self.head.restores if self.head is not None else None

    @property
    def num_open(self) -> int:
        """Saves without a verdict."""
        if self.head is not None:
            return self.head.num_open
        return self.saves.num_open if self.saves is not None else 0

    def _reach(self, hello: m.Hello, make: MakeNetwork) -> Nodes:
        watched = range(len(self.world.node_names)) if self.is_lead else [self.lead_node]
        nodes = Nodes(
            hello,
            make=make,
            watched=[node for node in watched if node != self.node],
            heard=self._hearing.heard,
            lost=self._hearing.node_lost,
            back=self._hearing.node_back,
            post=self._post,
            events=self._events,
            spawn=self._means.spawn,
        )
        nodes.serve_disk(self.flusher.url, lambda question, reply: ask_disk(self, question, reply))
        return nodes

    def placed(self, *, local_flash: bool) -> None:
        """It is known how the run directory is to be used: as one, or as the union of the nodes' own disks."""
        self.local_flash = local_flash
        self._hearing.placed(local_flash=local_flash)
        peers = None
        if local_flash and self.nodes is not None:
            from safehold.agent import joined_flash

            names, token = self.world.node_names, self.token
            peers = joined_flash.to_wire(node=self.node, names=names, addresses=self.nodes.addresses, token=token)
        for process in (self.flusher, self.copier):
            if process is not None:
                process.configure(self.config.to_wire(), peers)

    def is_copying(self, waited_s: float) -> bool:
        """Whether the agent stays for a replication, so long after its last trainer has gone."""
        if self.head is not None:
            return self.head.replicator.is_busy(waited_s)
        return self.copying is not None and self.copying.active and waited_s < self.config.remote_timeout_s

    def stop_copying(self, *, now: bool = True) -> None:
        """Begin no replication any more; `now`: end what is under way, in a state that the next agent goes on from."""
        if self.head is not None:
            self.head.replicator.stop(now=now)
        if self.copying is not None and now:
            self.copying.stop()

    @property
    def up(self) -> Head | Follower:
        """The lead's ear: here, or the way to it."""
        found = self.head or self.follower
        assert found is not None
        return found

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
        self.up.event(protocol.RankBack(rank=hello.rank), self.incarnation)
        control = self.controls.get(hello.rank)
        if control is None:
            control = self.controls[hello.rank] = self._means.rank_control()
        return control, self.node_control

    def detach(self, rank: int, peer: Peer, *, orderly: bool, pid: int = 0, pidfd: int = -1) -> None:
        """A rank's connection ended; `orderly` if it said that it will not be back; `pid` or `pidfd`: its process, where that is known."""
        if self.peers.get(rank) is not peer:
            return
        del self.peers[rank]
        if not orderly:
            self.disorderly.add(rank)
        self._events.emit("rank_gone", rank=rank, orderly=orderly)
        self._checks.rank_gone(rank, pid, pidfd)
        if self.saves is not None:
            self.saves.rank_gone(rank)
        if self.follower is not None:
            self.follower.rank_gone(rank)
        self.passing.rank_gone(rank)
        self.up.event(protocol.RankGone(rank=rank), self.incarnation)

    def opened(
        self, run_id: str, incarnation: int, steps: list[int] | None, memory: CommitId | None = None
    ) -> list[int]:
        """The lead has opened an incarnation that has these steps, or a rank brought its number (None: storage is asked).

        `memory` is the checkpoint in memory that it believes. Returns all steps that can be restored.
        """
        found = sorted({*(steps or ()), *([memory.step] if memory is not None else ())})
        if self.incarnation == incarnation and self.saves is not None:
            return found
        self.run_id, self.incarnation = run_id, incarnation
        self._start(self._known(None if steps is None else found))
        if steps is not None:
            self.memory.accept(memory)
        if self.head is not None:
            self.head.tell_opened(found, memory)
            self.head.sweep()
            self.head.replicator.opened(steps)
        return found

    def _known(self, steps: Iterable[int] | None) -> Known:
        incarnation = self.incarnation

        def failed(error: CheckpointError) -> None:
            self._events.emit("known", "failed", error=str(error))
            if isinstance(error, SupersededError) and incarnation == self.incarnation:
                self.end(incarnation + 1)

        return Known(
            incarnation, steps, flusher=self.flusher, config=self.config, failed=failed, is_lead=self.head is not None
        )

    def _start(self, known: Known) -> None:
        """Begin with no saves; what was in flight of an incarnation before gets no say any more."""
        incarnation = self.incarnation

        def tell_lead(event: Any) -> None:
            if self.saves is saves:
                self.up.event(event, incarnation)
                if self.follower is not None and self.follower.lost is not None:
                    self._post(self._hearing.give_up)  # nobody hears it

        def compared(step: int, attempt: int, crcs: dict[int, dict[str, int]]) -> None:
            if self.saves is saves:
                self.up.compared(incarnation, step, attempt, crcs)

        held = self.saves.take_held() if self.saves is not None else []
        saves = self.saves = new_saves(self, known, self._clock, tell_lead=tell_lead, compared=compared)
        if self.head is not None:
            self.head.start(known)
        saves.hold(held)

    def resume(self) -> None:
        """Take saves again after a `settle` that nobody took over from."""
        if self.saves is not None and not self.ended_by:
            self._start(self.saves.known)

    def settle(self, then: Callable[[], None], deadline_s: float, grace_s: float = SETTLE_GRACE_S) -> None:
        """Finish what all ranks have staged, or stage within `grace_s`, give up the rest, then call `then`."""
        if self.follower is not None:
            self.follower.settle(then, deadline_s, lambda: self.num_open == 0)
        elif self.head is not None:
            self.head.settle(then, deadline_s, grace_s)

    def end(self, by: int) -> None:
        """A newer incarnation owns the run: tell the trainers, and let none of them wait for anything here."""
        if self.ended_by:
            return
        self.ended_by = by
        self.stop_copying()
        self.guard.stop()
        error = self.superseded()
        if self.saves is not None:
            self.saves.end(error)
        for rank, peer in self.peers.items():
            self.pool.part_with(rank)
            peer.reply(m.Superseded(by))
        if self.head is not None:
            self.head.ended(by, error)

    def close(self) -> None:
        """Let go of the control words; no rank is here, and none will be."""
        for control in self.controls.values():
            control.close()
        self.controls.clear()
        self.node_control.close()
        self._checks.close()
        self.passing.close()
        self.memory.close()
        if self.nodes is not None:
            self.nodes.close()

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
            raise self.superseded(rank)

    def superseded(self, rank: int | None = None) -> SupersededError:
        """Return what whoever still asks for something is refused with."""
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
            case m.Meet():
                if self.nodes is not None:
                    self.nodes.meet(message.addresses)
                peer.reply(m.Done(message.id))
            case m.JoinRun():
                self._hearing.join(peer, message)
            case m.Register():
                self._register(peer, message)
            case m.Prepare():
                arena_requests.prepare(self, peer, message, self._open_saves(peer))
            case m.Begin():
                if self.follower is not None and self.follower.lost is not None:
                    raise self.follower.lost_error()  # nobody would ever decide about it
                self._open_saves(peer).begin(peer, message)
                self.up.begins(message.step, peer.rank)
            case m.Staged():
                self._open_saves(peer).staged(peer, message, message.objects if payload is None else payload)
                peer.reply(m.Done(message.id))
            case m.StageFailed():
                error = from_wire(message.error)
                self._open_saves(peer).stage_failed(message.step, message.attempt, peer.rank, error)
                peer.reply(m.Done(message.id))
            case m.RestoreAsk() | m.Vote():
                self._open_saves(peer)
                self.up.ask(peer, self.passing.note(peer.rank, message))
            case (
                chunk_messages.CacheAsk()
                | chunk_messages.ChunksAsk()
                | chunk_messages.ChunksUsed()
                | chunk_messages.ReadingOver()
            ):
                self.passing.handle(peer, message)
            case m.ProtectionAsk():
                self.guard.when_idle(lambda: peer.reply(m.Done(message.id)), message.timeout_s)
            case held_messages.MemoryAsk() | held_messages.HeldAsk() | m.RestoreDone():
                self._open_saves(peer)
                arena_requests.memory(self, peer, message)
            case _:
                raise ConfigurationError(f"unexpected request {type(message).__name__}", rank=peer.rank)

    def _open_saves(self, peer: Peer) -> NodeSaves:
        if self.saves is None:
            raise ConfigurationError("the run is not open yet", rank=peer.rank)
        return self.saves

    def _register(self, peer: Peer, message: m.Register) -> None:
        self.undeclared[peer.rank] = specs_of(message.leaves)
        peer.reply(m.Done(message.id))
        if len(self.undeclared) == len(self.local_ranks):
            self.up.undeclared(self.undeclared)

    # -- what the lead decides -------------------------------------------------------------------------------------------

    def committed(self, step: int, attempt: int, *, in_memory: bool = False) -> None:
        """A save is durable."""
        if self.saves is None:
            return
        figures: dict[str, float] = {}
        try:
            figures = self.saves.committed(step, attempt, in_memory=in_memory)
            self.memory.committed(CommitId(step, self.incarnation, attempt), in_memory=in_memory)
            self._checks.consider()
        finally:  # whatever is wrong here, it is durable, and who waits for it is told
            for peer in list(self.peers.values()):
                peer.reply(m.Durable(step, attempt, "memory" if in_memory else "flash", figures))

    def abandoned(self, word: w.Abandoned) -> None:
        """A save is given up."""
        if self.saves is None or (word.again and not self.saves.is_open(word.step, word.attempt)):
            return  # heard before
        error = from_wire(word.error)
        for peer in list(self.peers.values()):
            peer.reply(m.SaveFailed(word.step, word.attempt, word.error))
        self.saves.abandoned(word.step, word.attempt, error, in_doubt=word.in_doubt)
        if isinstance(error, SupersededError):
            self.end(self.incarnation + 1)

    def tell_all(self, text: str) -> None:
        """Warn the users of all ranks here."""
        for peer in self.peers.values():
            peer.reply(m.Note(text))

    def hear(self, word: w.Word) -> None:
        """Take a word of the lead."""
        self._hearing.hear(word)

    def send(self, node: int, message: msgspec.Struct) -> None:
        """Tell another node, if it can be reached."""
        if self.nodes is not None:
            self.nodes.send(node, message)

    def report(self, report: w.Report) -> None:
        """Tell the lead, which may be here."""
        if self.head is not None:
            self.head.report(self.node, report)
        else:
            self.send(self.lead_node, report)

    # -- time ------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        due = (self.up.next_deadline(), self.passing.next_deadline())
        return min((when for when in due if when is not None), default=None)

    def tick(self) -> None:
        """Let deadlines pass, and show that the agent lives."""
        self.node_control.beat()
        self.guard.tick()
        self.up.tick()
        self.passing.tick()

    def steps(self) -> dict[int, int]:
        """Return the last step of each rank of this node, as far as they have told."""
        return {rank: control.step for rank, control in self.controls.items() if control.beat_ns}

    def facts_of(self, step: int, attempt: int) -> tuple[dict[str, float], bool]:
        """Return the metrics of a save, and whether it is the final one."""
        return self.saves.facts(step, attempt) if self.saves is not None else ({}, False)

    def facts(self) -> dict[str, Any]:
        """What `safehold agents` shows."""
        return {
            "run_id": self.run_id,
            "incarnation": self.incarnation,
            "ranks": self.local_ranks,
            "connected": sorted(self.peers),
            "world_size": self.world.world_size,
            "saves_in_flight": self.saves.num_open if self.saves is not None else 0,
            "protected_step": self.guard.step,
            "superseded_by": self.ended_by or None,
            "address": self.nodes.address if self.nodes is not None else None,
            "nodes": self.world.node_names,
            "remote": self.head.replicator.facts() if self.head is not None else None,
            "memory": self.memory.facts(),
        }
