"""An agent's rooms in one thread: fakes of the clock, the flusher and the trainers, and a session between them."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.agent.arenas import ArenaPool
from safehold.agent.session import Session
from safehold.config import Config
from safehold.errors import CheckpointError, from_wire
from safehold.events import EventStream
from safehold.format import part as parts
from safehold.format.plan import digest as digest_of
from safehold.host.control import RankControl
from safehold.types import TensorSpec

PACK_BYTES = 8192


class FakeClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeFlusher:
    """Keeps the calls until the test answers them; some operations may be answered at once."""

    def __init__(self, at_once: dict[str, Any] | None = None) -> None:
        self.url = "/run"
        self.calls: list[tuple[str, dict[str, Any], Callable[[Any, CheckpointError | None], None]]] = []
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.at_once = dict(at_once or {})
        self.forgotten: list[int] = []
        self.abandoned: list[Any] = []
        self.may_still_run = self.lost = False
        self.replaced = 0
        self.pid = None
        self.configured: list[dict[str, Any]] = []
        self.peers: dict[str, Any] | None = None
        self.url = "/run"

    @property
    def num_open(self) -> int:
        return len(self.calls)

    def call(self, operation, arguments, callback, *, timeout_s, fds=()) -> int:
        assert timeout_s > 0
        for fd in fds:
            os.fstat(fd)
        self.log.append((operation, arguments))
        if operation in self.at_once:
            answer = self.at_once[operation]
            answer = answer(arguments) if callable(answer) else answer
            error = answer if isinstance(answer, CheckpointError) else None
            callback(None if error else answer, error)
        else:
            self.calls.append((operation, arguments, callback))
        return len(self.log)

    def open(self, operation: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments, _ in self.calls if name == operation]

    def done(self, operation: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.log if name == operation]

    def answer(self, operation: str, value: Any = None, error: CheckpointError | None = None, **match: Any) -> None:
        """Answer the oldest open call of an operation (whose arguments are like `match`)."""
        for entry in self.calls:
            if entry[0] == operation and all(entry[1][key] == wanted for key, wanted in match.items()):
                self.calls.remove(entry)
                entry[2](value, error)
                return
        raise AssertionError(f"no open call {operation} {match}; open: {[(c[0], c[1]) for c in self.calls]}")

    def configure(self, config: dict[str, Any], peers: dict[str, Any] | None = None) -> None:
        self.configured.append(config)
        self.peers = peers

    def forget(self, arena_id: int) -> None:
        self.forgotten.append(arena_id)

    def next_deadline(self) -> float | None:
        return None

    def check_deadlines(self) -> None:
        pass

    def reap_abandoned(self) -> bool:
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        pass


class FakePeer:
    """A trainer's connection; remembers what it was told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closed = False
        self.replies: list[Any] = []
        self.taken: dict[int, bytes] = {}

    def reply(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        for fd in fds:
            os.fstat(fd)
        assert m.decode_reply(m.encode(message)) == message
        if isinstance(message, held_messages.MemorySource | held_messages.HeldBytes):
            self.taken[message.id] = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
        self.replies.append(message)

    def refuse(self, request: int, error: CheckpointError) -> None:
        self.reply(m.Refused(request, error.to_wire()))

    def of(self, kind: type) -> list[Any]:
        return [reply for reply in self.replies if isinstance(reply, kind)]

    def last(self, kind: type) -> Any:
        found = self.of(kind)
        assert found, f"rank {self.rank} was told {self.replies}, and no {kind.__name__}"
        return found[-1]

    def refusal(self) -> CheckpointError:
        return from_wire(self.last(m.Refused).error)


class Work:
    """The dispatcher's queue, emptied by the test."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, work: Callable[[], None]) -> None:
        self.queue.put(work)

    def run_until(self, reached: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Run what is posted (by threads that populate or plan) until something holds."""
        while not reached():
            self.queue.get(timeout=timeout_s)()

    def run_for(self, seconds: float) -> None:
        """Run what is posted within some time."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            try:
                self.queue.get(timeout=left)()
            except queue.Empty:
                return

    def run(self) -> None:
        """Run what is posted now."""
        while not self.queue.empty():
            self.queue.get()()


def part_of(rank: int, world_size: int, name: str = "w") -> bytes:
    """The part of a rank that writes its row of one tensor of float32."""
    rows = np.array([[rank]], np.int64)
    return parts.encode_part(
        parts.Part(
            rank=rank,
            world_size=world_size,
            leaves=(TensorSpec(name=name, dtype="float32", shape=(world_size,), kind="torch"),),
            leaf=np.zeros(1, np.int32),
            offsets=rows,
            sizes=np.ones((1, 1), np.int64),
            pack=np.zeros(1, np.int32),
            offset=np.array([4096], np.int64),
            pack_sizes=(PACK_BYTES,),
            objects=(),
            aliases=(),
        )
    )


def world_of(world_size: int, token: str = "token") -> m.World:
    return m.World(token, world_size, [0] * world_size, ["host"])


def hello(rank: int, world: m.World, *, incarnation: int = 0, every_seconds: float = 0.0, **settings: Any) -> m.Hello:
    return m.Hello(
        id=1,
        protocol=m.PROTOCOL,
        version=_version(),
        rank=rank,
        pid=1,
        world=world,
        config=Config(**settings).to_wire(),
        keep={"last": 3, "every_steps": None, "every_hours": None, "best": None},
        every_seconds=every_seconds,
        incarnation=incarnation,
        run_id="run" if incarnation else "",
    )


def _version() -> str:
    from safehold._version import __version__

    return __version__


class Node:
    """A session with its ranks, an open incarnation, and everything in the test's hands.

    With `incarnation` it is a new agent, to which the ranks come back with that number.
    """

    def __init__(
        self,
        world_size: int = 2,
        every_seconds: float = 0.0,
        budget_bytes: int = 0,
        incarnation: int = 0,
        **settings: Any,
    ) -> None:
        self.clock, self.flusher, self.work = FakeClock(), FakeFlusher({"sweep": {}, "cancel": True}), Work()
        self.pool = ArenaPool(self.work.post, budget_bytes, released=self.flusher.forget)
        self.world_size = world_size
        self.world = world_of(world_size)
        settings = {"begin_timeout_s": 10.0, "stage_timeout_s": 20.0, "flush_timeout_s": 50.0, **settings}
        hellos = [
            hello(rank, self.world, every_seconds=every_seconds, incarnation=incarnation, **settings)
            for rank in range(world_size)
        ]
        self.session = Session(
            hellos[0],
            pool=self.pool,
            flusher=self.flusher,
            post=self.work.post,
            clock=self.clock,
            events=EventStream("agent"),
        )
        self.peers = [FakePeer(rank) for rank in range(world_size)]
        self.controls: list[RankControl] = []
        for peer, message in zip(self.peers, hellos, strict=True):
            self.controls.append(self.session.attach(peer, message)[0])
        if not incarnation:
            self.session.opened("run", 1, [])
        self._id = 100

    def next_id(self) -> int:
        self._id += 1
        return self._id

    def send(self, rank: int, message: Any) -> CheckpointError | None:
        """Say something as the server passes it on; what is raised becomes a refusal, as there."""
        message = m.decode_request(m.encode(message))
        try:
            self.session.handle(self.peers[rank], message, None)
        except CheckpointError as exc:
            self.peers[rank].refuse(message.id, exc)
            return exc
        return None

    def begin(self, rank: int, step: int, attempt: int = 0, *, pump: bool = True, **fields: Any) -> int:
        part = fields.pop("part", part_of(rank, self.world_size))
        request = m.Begin(
            id=self.next_id(),
            step=step,
            attempt=attempt,
            part_digest=fields.pop("part_digest", digest_of(part) if part else "?"),
            part=part,
            packs=fields.pop("packs", [(0, PACK_BYTES)]),
            arena_bytes=fields.pop("arena_bytes", PACK_BYTES),
            compare=fields.pop("compare", []),
            metrics=fields.pop("metrics", {}),
            **fields,
        )
        self.send(rank, request)
        if pump:
            answered = lambda: any(reply.id == request.id for reply in self.peers[rank].replies)  # noqa: E731
            self.work.run_until(answered)
        return request.id

    def reply_to(self, rank: int, request: int) -> Any:
        return next((reply for reply in self.peers[rank].replies if reply.id == request), None)

    def stage(self, rank: int, step: int, attempt: int = 0, objects: dict[str, bytes] | None = None) -> None:
        self.send(rank, m.Staged(-1, step, attempt, objects or {}))

    def flushed(self, rank: int, compare: dict[str, int] | None = None, error: CheckpointError | None = None) -> None:
        """The oldest flush of a rank ends."""
        timings = {"allocate_s": 0.1, "write_s": 0.2, "sync_s": 0.3}
        value = {"packs": [{"rank": rank}], "compare": compare or {}, "timings": timings}
        self.flusher.answer("flush", None if error else value, error, rank=rank)

    def record(self, error: CheckpointError | None = None) -> None:
        self.flusher.answer("record", None if error else {"size_bytes": 10, "blake3": "0" * 64}, error)

    def plan(self) -> None:
        self.work.run_until(lambda: self.flusher.open("plan"))
        self.flusher.answer("plan")

    def publish(self, error: CheckpointError | None = None) -> None:
        """The save is published, once its plan is stored."""
        self.work.run_until(lambda: self.flusher.open("publish") or self.flusher.open("plan"))
        if self.flusher.open("plan"):
            self.plan()
        self.flusher.answer("publish", None, error)

    def save(self, step: int, attempt: int = 0, **fields: Any) -> None:
        """A whole save, without trouble."""
        for rank in range(self.world_size):
            self.begin(rank, step, attempt, **fields)
        for rank in range(self.world_size):
            self.stage(rank, step, attempt)
            self.flushed(rank)
        self.record()
        self.publish()

    def leave(self, rank: int) -> None:
        peer = self.peers[rank]
        self.session.detach(rank, peer, orderly=False)
        peer.closed = True

    def tick(self, seconds: float) -> None:
        self.clock.now += seconds
        self.session.tick()

    def failure(self, rank: int) -> CheckpointError:
        return from_wire(self.peers[rank].last(m.SaveFailed).error)

    @property
    def lead(self) -> Any:
        return self.session.lead

    @property
    def saves(self) -> Any:
        return self.session.saves


def states(node: Node, rank: int = 0) -> list[tuple[str, int]]:
    """What a rank was told became of its saves."""
    found = [reply for reply in node.peers[rank].replies if isinstance(reply, m.Durable | m.SaveFailed)]
    return [("durable" if isinstance(reply, m.Durable) else "failed", reply.step) for reply in found]
