"""Several sessions in one thread, with a network between them that the test delivers, cuts and mends."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
from agent_fakes import PACK_BYTES, FakeClock, FakeFlusher, FakePeer, Work, part_of

from safehold._version import __version__
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.arenas import ArenaPool
from safehold.agent.net.seam import Incoming, Listeners
from safehold.agent.session import Session
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CheckpointError, TornFileError, from_wire
from safehold.events import EventStream
from safehold.format.crc import crc
from safehold.format.plan import digest as digest_of

KEEP = {"last": 3, "every_steps": None, "every_hours": None, "best": None}


class Wire:
    """One node's end; what it sends waits in the job until the test delivers it."""

    def __init__(self, job: Job, name: str, listeners: Listeners) -> None:
        self.job, self.name, self.listeners = job, name, listeners
        self.watched: set[str] = set()
        self.providers: dict[str, Any] = {}
        self.closed = False
        self.sinks: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return f"10.0.0.{self.job.names.index(self.name) + 1}:7000"

    def meet(self, addresses: dict[str, Any]) -> None:
        assert set(addresses) == set(self.job.names)

    def watch(self, name: str) -> None:
        self.watched.add(name)

    def send(self, name: str, data: bytes) -> None:
        if frozenset((self.name, name)) in self.job.cuts:
            raise AgentUnavailableError("lost")
        self.job.sent.append((self.name, name, w.decode(data)))
        self.job.queue.append((self.name, name, data))

    def provide(self, kind: str, provider: Any) -> None:
        self.providers[kind] = provider

    def serve(self, kind: str, handler: Any) -> None:
        pass

    def accept(self, kind: str, sink: Any) -> None:
        self.sinks[kind] = sink

    def _reach(self, name: str) -> Wire:
        wire = self.job.wires.get(name)
        if frozenset((self.name, name)) in self.job.cuts or wire is None or self.closed or wire.closed:
            raise AgentUnavailableError(f"node {name} does not answer", node=name)
        return wire

    def read_into(self, name: str, kind: str, what: str, offset: int, view: memoryview, *, deadline_s: float) -> int:
        source = self._reach(name).providers[kind](self.name, what)
        if source is None or offset + len(view) > source.size:
            raise TornFileError(f"node {name} does not have {what}", node=name)
        try:
            view[:] = os.pread(source.fd, len(view), source.offset + offset)
        finally:
            os.close(source.fd)
        self.job.read_bytes[name] += len(view)
        return crc(view)

    def write_from(
        self, name: str, kind: str, what: str, offset: int, view: memoryview, *, total: int, deadline_s: float
    ) -> int:
        incoming = Incoming(node=self.name, name=what, offset=offset, size=len(view), total=total)
        landing = self._reach(name).sinks[kind](incoming)
        if landing is None:
            raise TornFileError(f"node {name} does not take {what}", node=name)
        data = self.job.spoil(self.name, name, what, bytes(view))
        if landing.view is not None:
            landing.view[:] = data
        else:
            os.pwrite(landing.fd, data, landing.offset)
        landing.done(crc(data))
        return crc(data)

    def close(self) -> None:
        self.closed = True


class Job:
    """A job on several nodes, an open incarnation, and everything in the test's hands."""

    def __init__(self, num_nodes: int = 2, per_node: int = 1, every_seconds: float = 0.0, **settings: Any) -> None:
        self.clock, self.work = FakeClock(), Work()
        self.names = [f"n{index}" for index in range(num_nodes)]
        self.world_size, self.per_node = num_nodes * per_node, per_node
        self.token = "token"
        self.world = self.world_of()
        self.queue: deque[tuple[str, str, bytes]] = deque()
        self.sent: list[tuple[str, str, Any]] = []
        self.cuts: set[frozenset[str]] = set()
        self.read_bytes: Counter[str] = Counter()
        self.settings = {"begin_timeout_s": 10.0, "stage_timeout_s": 20.0, "flush_timeout_s": 50.0, **settings}
        self.every_seconds = every_seconds
        self.events = EventStream("agent")
        self.heard: list[Any] = []
        self.events.subscribe(self.heard.append)
        self.wires: dict[str, Wire] = {}
        self.flushers = [FakeFlusher({"sweep": {}, "cancel": True, "abandon": None}) for _ in self.names]
        self.copiers = [FakeFlusher({"copy_cancel": True, "copy_leave": None}) for _ in self.names]
        self.pools = [ArenaPool(self.work.post, 0, released=flusher.forget) for flusher in self.flushers]
        self.spoil: Callable[[str, str, str, bytes], bytes] = lambda source, target, what, data: data
        self.settle_old: Callable[[Session, Callable[[], None], float], None] = lambda _, then, __: then()
        self.sessions = [self.start(node) for node in range(num_nodes)]
        self.peers = [FakePeer(rank) for rank in range(self.world_size)]
        self.controls = [self.attach(rank) for rank in range(self.world_size)]
        self._id = 100
        for session in self.sessions:
            session.nodes.meet([wire.address for wire in self.wires.values()])
        self.sessions[0].opened("run", 1, [])
        self.deliver()

    def world_of(self) -> m.World:
        return m.World(self.token, self.world_size, [r // self.per_node for r in range(self.world_size)], self.names)

    def replace_pool(self, node: int) -> None:
        """The node's agent is another, with no memory."""
        self.pools[node] = ArenaPool(self.work.post, 0, released=self.flushers[node].forget)

    def hello(self, rank: int, incarnation: int = 0) -> m.Hello:
        return m.Hello(
            id=1,
            protocol=m.PROTOCOL,
            version=__version__,
            rank=rank,
            pid=1,
            world=self.world,
            config=Config(**self.settings).to_wire(),
            keep=KEEP,
            every_seconds=self.every_seconds,
            incarnation=incarnation,
            run_id="run" if incarnation else "",
            listen="127.0.0.1",
            addresses=[wire.address for wire in self.wires.values()] if incarnation else [],
        )

    def start(self, node: int, incarnation: int = 0) -> Session:
        def make(hello: m.Hello, listeners: Listeners) -> Wire:
            wire = self.wires[self.names[node]] = Wire(self, self.names[node], listeners)
            return wire

        return Session(
            self.hello(node * self.per_node, incarnation),
            pool=self.pools[node],
            flusher=self.flushers[node],
            post=self.work.post,
            clock=self.clock,
            events=self.events,
            make_network=make,
            settle_old=lambda *args: self.settle_old(*args),
            copier=self.copiers[node] if self.settings.get("remote") else None,
        )

    def attach(self, rank: int, incarnation: int = 0) -> Any:
        session = self.sessions[rank // self.per_node]
        return session.attach(self.peers[rank], self.hello(rank, incarnation))[0]

    # -- the network -----------------------------------------------------------------------------------------------------

    def deliver(self, at_most: int = 10_000) -> None:
        """Deliver what is on its way, and what follows from it."""
        self.work.run()
        while self.queue and at_most:
            at_most -= 1
            source, target, data = self.queue.popleft()
            if frozenset((source, target)) not in self.cuts:
                self.wires[target].listeners.on_message(source, data)
            self.work.run()

    def cut(self, one: int, other: int, *, noticed: bool = True) -> None:
        """Nothing passes between two nodes any more; who watches the other is told."""
        names = self.names[one], self.names[other]
        self.cuts.add(frozenset(names))
        self.queue = deque(entry for entry in self.queue if frozenset(entry[:2]) != frozenset(names))
        for here, there in (names, names[::-1]) if noticed else ():
            if there in self.wires[here].watched:
                self.wires[here].listeners.on_lost(there, AgentUnavailableError("it does not answer"))
        self.deliver()

    def mend(self, one: int, other: int) -> None:
        names = self.names[one], self.names[other]
        self.cuts.discard(frozenset(names))
        for here, there in (names, names[::-1]):
            if there in self.wires[here].watched:
                self.wires[here].listeners.on_back(there)
        self.deliver()

    def told(self, kind: type, to: int | None = None) -> list[Any]:
        return [msg for _, target, msg in self.sent if isinstance(msg, kind) and to in (None, self.names.index(target))]

    # -- ranks -----------------------------------------------------------------------------------------------------------

    def send(self, rank: int, message: Any) -> int:
        self._id += 1
        message = msgspec.structs.replace(message, id=self._id)
        try:
            self.sessions[rank // self.per_node].handle(self.peers[rank], message, None)
        except CheckpointError as exc:
            self.peers[rank].refuse(self._id, exc)
        self.deliver()
        return self._id

    def answer_to(self, rank: int, request: int) -> Any:
        return next((reply for reply in self.peers[rank].replies if reply.id == request), None)

    def begin(self, rank: int, step: int, attempt: int = 0, **fields: Any) -> None:
        part = part_of(rank, self.world_size)
        given = {"compare": [], "metrics": {}, "part": part, "packs": [(0, PACK_BYTES)], "arena_bytes": PACK_BYTES}
        request = self.send(rank, m.Begin(0, step, attempt, digest_of(part), **{**given, **fields}))
        save = self.sessions[rank // self.per_node].saves._saves.get((step, attempt))
        if save is not None and not save.blocked and self.answer_to(rank, request) is None:
            self.work.run_until(lambda: self.answer_to(rank, request))
        self.deliver()

    def stage_and_flush(self, rank: int, step: int, attempt: int = 0, compare: dict[str, int] | None = None) -> None:
        self.send(rank, m.Staged(-1, step, attempt, {}))
        timings = {"allocate_s": 0.1, "write_s": 0.2, "sync_s": 0.3}
        value = {"packs": [{"rank": rank}], "compare": compare or {}, "timings": timings}
        self.flushers[rank // self.per_node].answer("flush", value, rank=rank)
        self.deliver()

    def record(self, node: int) -> None:
        self.flushers[node].answer("record", {"size_bytes": 10, "blake3": f"{node}" * 64})
        self.deliver()

    def publish(self, error: CheckpointError | None = None) -> None:
        lead = self.flushers[0]

        def asked() -> Any:
            self.deliver()
            while lead.open("plan"):
                lead.answer("plan")
                self.deliver()
            return lead.open("publish")

        self.work.run_until(asked)
        lead.answer("publish", None, error)
        self.deliver()

    def save(self, step: int) -> None:
        for rank in range(self.world_size):
            self.begin(rank, step)
        for rank in range(self.world_size):
            self.stage_and_flush(rank, step)
        for node in range(len(self.names)):
            self.record(node)
        self.publish()

    def verdicts(self, rank: int) -> list[tuple[str, int]]:
        found = [reply for reply in self.peers[rank].replies if isinstance(reply, m.Durable | m.SaveFailed)]
        return [("durable" if isinstance(reply, m.Durable) else "failed", reply.step) for reply in found]

    def failure(self, rank: int) -> CheckpointError:
        return from_wire(self.peers[rank].last(m.SaveFailed).error)

    def tick(self, seconds: float) -> None:
        self.clock.now += seconds
        for session in self.sessions:
            session.tick()
        self.deliver()
