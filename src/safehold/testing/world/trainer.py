"""One rank of the training job: a script in virtual time that says to its agent what the real client, saver and restorer say.

Invariants: it keeps the promises that agents rely on (a request at a time, staged after granted, the step of an announced save told after
it has begun), and every request has the deadline that the real one has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from safehold._version import __version__
from safehold.agent import document_messages as dm
from safehold.agent import messages as m
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    DeadlineError,
    RankLostError,
    SkippedError,
    SupersededError,
    from_wire,
)
from safehold.testing.world.machine import Line, Machine
from safehold.testing.world.parts import PACK_BYTES, part_of
from safehold.testing.world.timeline import Process
from safehold.types import CommitId

if TYPE_CHECKING:
    from safehold.testing.world.job import Job

Script = Generator[Any, Any, Any]
CONNECT_PAUSE_S = 0.2
COME_BACK_PAUSE_S = 1.0
SHARED_LEAF = ("shared", "float32", [8], "torch")


@dataclass(slots=True)
class Handle:
    """What a save is to its rank. `extra_s`: for how long its node was stopped when it began."""

    step: int
    attempt: int
    begun_at: float
    incarnation: int
    extra_s: float = 0.0
    state: str = "open"
    error: CheckpointError | None = None


class Trainer:
    """See the module.

    Attributes:
        handles: All saves without a verdict, by (step, attempt).
        incarnation: As this rank knows it.
        superseded: Whether it was told that another job owns the run.
        asked_at: When it last asked what to restore.
    """

    def __init__(self, job: Job, rank: int, machine: Machine) -> None:
        self.job, self.rank, self.machine = job, rank, machine
        self._world, self._timeline = job.world, job.world.timeline
        self.process: Process = machine.process(f"rank {rank} of job {job.number}")
        self.process.on_end.append(self._died)
        self.handles: dict[tuple[int, int], Handle] = {}
        self.incarnation, self.run_id = 0, ""
        self.superseded = False
        self.line: Line | None = None
        self._addresses: list[str] = []
        self._pending: dict[int, Callable[[Any], None]] = {}
        self._next = 1
        self._words: Any = None
        self._node_words: Any = None
        self._attempts: dict[int, int] = {}
        self._known_parts: set[str] = set()
        self._layout = 0
        self._seq = 0
        self._previous: int | None = None
        self._followed = (0, 0)
        self._generation = 0
        self._is_connecting = False
        self.asked_at = 0.0

    # -- scripts: what they yield is waited for --------------------------------------------------------------------------

    def run(self, script: Script) -> None:
        """Run a script until it ends; what it raises ends the rank."""
        self._go_on(script, lambda: next(script))

    def _go_on(self, script: Script, resume: Callable[[], Any]) -> None:
        try:
            wait = resume()
        except StopIteration:
            return
        except CheckpointError as exc:
            self._world.timeline.note("rank ends", f"{self.process.name}: {type(exc).__name__}: {exc.message}")
            self.process.kill()
            return
        is_over = False

        def answer(value: Any) -> None:
            nonlocal is_over
            if is_over or not self.process.alive:
                return
            is_over = True
            if isinstance(value, CheckpointError):
                self._go_on(script, lambda: script.throw(value))
            else:
                self._go_on(script, lambda: script.send(value))

        wait(answer)

    def pause(self, seconds: float) -> Callable[[Callable[[Any], None]], None]:
        """Wait so long."""
        return lambda answer: self._timeline.at(seconds, self.process, lambda: answer(None))

    def asks(self, message: Any, timeout_s: float) -> Callable[[Callable[[Any], None]], None]:
        """Ask the agent; the reply is sent into the script, or what it was refused with raised there."""

        def wait(answer: Callable[[Any], None]) -> None:
            number, self._next = self._next, self._next + 1
            if self.line is None:
                answer(AgentUnavailableError("the agent of this node is gone", rank=self.rank))
                return

            def replied(reply: Any) -> None:
                self._pending.pop(number, None)
                answer(from_wire(reply.error) if isinstance(reply, m.Refused) else reply)

            def late() -> None:
                if self._pending.get(number) is replied:
                    kind = type(message).__name__
                    replied(m.Refused(number, DeadlineError(f"{kind}: no answer", rank=self.rank).to_wire()))

            self._pending[number] = replied
            self.line.say(msgspec.structs.replace(message, id=number))
            self._timeline.at(timeout_s, self.process, late)

        return wait

    def _tell(self, message: Any) -> None:
        if self.line is not None:
            self.line.say(message)

    # -- what the agent says ---------------------------------------------------------------------------------------------

    def take(self, line: Line, reply: m.Reply, fds: tuple[int, ...]) -> None:
        """A message of the agent arrives."""
        if line is not self.line:
            return
        self._world.checks.heard(self, reply)
        if isinstance(reply, m.Welcome):
            shared = self._world.shared
            self._words, self._node_words = shared.words[fds[0]], shared.node_words[fds[2]]
        if reply.id:
            if reply.id in self._pending:
                found: Any = reply
                if isinstance(reply, m.Granted):
                    found = (reply, self._world.shared.arenas[fds[0]])
                elif isinstance(reply, dm.Documents):
                    found = self._world.shared.blocks.get(fds[0]) if fds else None
                self._pending[reply.id](found)
            return
        match reply:
            case m.Durable():
                self.verdict(reply.step, reply.attempt, "durable")
            case m.SaveFailed():
                self.verdict(reply.step, reply.attempt, "failed", from_wire(reply.error))
            case m.Superseded():
                self._end_superseded(SupersededError(f"incarnation {reply.incarnation} owns the run now"))
            case _:
                pass

    def _end_superseded(self, error: CheckpointError) -> None:
        self.superseded = True
        for handle in list(self.handles.values()):
            self.verdict(handle.step, handle.attempt, "failed", error)

    def verdict(self, step: int, attempt: int, state: str, error: CheckpointError | None = None) -> None:
        """It is known what became of a save."""
        handle = self.handles.pop((step, attempt), None)
        if handle is not None:
            handle.state, handle.error = state, error
            self._world.checks.verdict(self, handle)

    def line_ended(self, line: Line) -> None:
        """The agent is gone, or has closed the line."""
        if line is not self.line:
            return
        self.line = None
        error = AgentUnavailableError("the agent of this node died", rank=self.rank)
        lost = list(self.handles)
        for step, attempt in lost:
            self.verdict(step, attempt, "failed", error)
        for replied in list(self._pending.values()):
            replied(m.Refused(0, error.to_wire()))
        if self.incarnation and not self._is_connecting:
            self.run(self._come_back(lost, error))

    def _come_back(self, lost: list[tuple[int, int]], error: CheckpointError) -> Script:
        while self.line is None and not self.superseded:
            try:
                yield from self.connect()
            except SupersededError as exc:
                self._end_superseded(exc)
                return
            except CheckpointError:
                yield self.pause(COME_BACK_PAUSE_S)
                continue
            for step, attempt in lost:
                self._tell(m.StageFailed(-1, step, attempt, error.to_wire()))

    def _died(self) -> None:
        self.handles.clear()
        self._pending.clear()
        self.job.rank_died(self)

    # -- the script --------------------------------------------------------------------------------------------------------

    def life(self) -> Script:
        """What a rank does from start to end."""
        config, job = self._world.setting.wire, self.job
        yield self.pause(self._timeline.between(0.0, 0.5))
        welcome = yield from self.connect()
        job.addresses[self.rank] = welcome.address
        yield job.met(self, "connected")
        if len(job.machines) > 1:
            self._addresses = job.all_addresses()
            yield self.asks(m.Meet(0, self._addresses), config["request_timeout_s"])
            yield job.met(self, "met")
        if self.rank == 0:
            job.opened = yield self.asks(m.OpenRun(0), config["start_timeout_s"])
        yield job.met(self, "opened")
        self.run_id, self.incarnation = job.opened.run_id, job.opened.incarnation
        if self.rank != 0:
            yield self.asks(m.JoinRun(0, self.run_id, self.incarnation), config["request_timeout_s"])
        yield job.met(self, "joined")
        if self._world.setting.undeclared:
            yield self.asks(m.Register(0, [SHARED_LEAF]), config["request_timeout_s"])
        yield self.asks(m.Prepare(0, PACK_BYTES), config["start_timeout_s"])
        step = yield from self._restore()
        job.restored(self, step)
        yield from self._train(step)

    def connect(self) -> Script:
        """Find or start the agent and say hello."""
        job, setting = self.job, self._world.setting
        until = self._timeline.now + setting.wire["start_timeout_s"]
        if self._is_connecting:  # another script of this rank is at it
            yield self.pause(1.0)
            if self.line is None:
                raise AgentUnavailableError("the agent of this node is gone", rank=self.rank)
            return None
        self._is_connecting = True
        try:
            while True:
                yield self.pause(self._timeline.between(*setting.local_s))
                self._generation += 1
                line = self.line = Line(self._world, self.machine.agent(), self)
                hello = m.Hello(
                    id=0,
                    protocol=m.PROTOCOL,
                    version=__version__,
                    rank=self.rank,
                    pid=1,
                    world=job.wire,
                    config=setting.wire,
                    keep={"last": setting.keep_last, "every_steps": None, "every_hours": None, "best": None},
                    every_seconds=setting.every_seconds,
                    incarnation=self.incarnation,
                    run_id=self.run_id,
                    listen="world" if len(job.machines) > 1 else "",
                    addresses=self._addresses,
                )
                try:
                    return (yield self.asks(hello, max(0.1, until - self._timeline.now)))
                except CheckpointError as exc:
                    line.hang_up()
                    if self.line is line:
                        self.line = None
                    if not isinstance(exc, AgentUnavailableError) or self._timeline.now + CONNECT_PAUSE_S > until:
                        raise
                yield self.pause(CONNECT_PAUSE_S)
        finally:
            self._is_connecting = False

    def _restore(self) -> Script:
        timeout_s = self._world.setting.wire["restore_timeout_s"]
        while True:
            if self.line is None:
                yield from self.connect()
            self.asked_at = self._timeline.now
            offer = yield self.asks(m.RestoreAsk(0, self.job.restore_step), timeout_s)
            self._world.checks.offered(self, offer)
            if offer.step is None:
                return 0
            yield from self._read_documents(offer, timeout_s)
            outcome = yield from self._vote(offer, "planned")
            if offer.documents is not None:
                self._tell(dm.DocumentsOver(-1, offer.round, True))
            if outcome == "go":
                yield self.pause(self._timeline.between(*self._world.setting.write_s))
                outcome = yield from self._vote(offer, "verified")
            if outcome == "go":
                self._tell(m.RestoreDone(-1, offer.step))
                return offer.step

    def _read_documents(self, offer: m.RestoreOffer, timeout_s: float) -> Script:
        block = None
        if offer.documents is not None:
            block = yield self.asks(dm.DocumentsAsk(0, offer.round), timeout_s)
        if block is not None:
            self._world.checks.documents(offer, block)
            return
        commit = CommitId(offer.step or 0, offer.incarnation, offer.attempt)
        self._world.storage.read_bytes += self._world.storage.documents_bytes(commit)
        yield self.pause(self._timeline.between(*self._world.setting.storage_s))

    def _vote(self, offer: m.RestoreOffer, phase: str) -> Script:
        vote = m.Vote(0, offer.round, phase)
        verdict = yield self.asks(vote, self._world.setting.wire["restore_timeout_s"])
        if verdict.incarnation:
            self.incarnation = verdict.incarnation
        if verdict.outcome == "stop":
            raise from_wire(verdict.error) if verdict.error else RankLostError("the restore was stopped")
        return verdict.outcome

    def _train(self, step: int) -> Script:
        while True:
            step = yield self.job.stepped(self, step)
            if self.superseded:
                raise SupersededError("another job owns the run", rank=self.rank)
            announced = self._follows(step)
            due = self._world.setting.every_steps and step % self._world.setting.every_steps == 0
            self._previous = step
            if not announced and self._words is not None:
                self._words.set_progress(step)
            if due or announced:
                yield from self._save(step, announced=announced and not due)
                if self._words is not None:
                    self._words.set_progress(step)

    def _follows(self, step: int) -> bool:
        """Whether the lead's announcement is for this step, as `Checkpointer` decides it."""
        if not self._world.setting.every_seconds or self._node_words is None:
            return False
        announcement = self._node_words.announcement
        made = (self._generation, announcement.seq)
        if announcement.step is None or made == self._followed or step < announcement.step:
            return False
        self._followed = made
        return self._previous is None or self._previous < announcement.step

    def _save(self, step: int, *, announced: bool) -> Script:
        attempt = self._attempts[step] = self._attempts.get(step, -1) + 1
        handle = Handle(step, attempt, self._timeline.now, self.incarnation, self.process.stopped_s)
        self.handles[step, attempt] = handle
        self._world.checks.begun(self, handle)
        try:
            if self.line is None:
                yield from self.connect()
            yield from self._stage(handle, announced)
        except SupersededError as exc:
            self.verdict(step, attempt, "failed", exc)
            self._end_superseded(exc)
        except SkippedError as exc:
            self.verdict(step, attempt, "skipped", exc)
        except CheckpointError as exc:
            self.verdict(step, attempt, "failed", exc)
            self._tell(m.StageFailed(-1, step, attempt, exc.to_wire()))

    def _stage(self, handle: Handle, announced: bool) -> Script:
        setting, world_size = self._world.setting, self._world.setting.world_size
        if self._timeline.chance.random() < setting.relayout:
            self._layout += 1
        digest, part = part_of(self.rank, world_size, self._layout)
        self._seq += 1
        begin = m.Begin(
            id=0,
            step=handle.step,
            attempt=handle.attempt,
            part_digest=digest,
            part=b"" if digest in self._known_parts else part,
            packs=[(0, PACK_BYTES)],
            arena_bytes=PACK_BYTES,
            compare=[("shared", 0, 32)] if setting.undeclared else [],
            metrics={},
            save_seq=self._seq,
            announced=announced,
        )
        reply = yield self.asks(begin, setting.wire["flush_timeout_s"])
        if isinstance(reply, m.PartWanted):
            reply = yield self.asks(msgspec.structs.replace(begin, part=part), setting.wire["flush_timeout_s"])
        if isinstance(reply, m.Skipped):
            raise SkippedError(reply.reason, step=handle.step, rank=self.rank)
        _, arena = reply
        self._known_parts.add(digest)
        words, seq = self._words, self._seq
        arena.content = None
        yield self.pause(self._timeline.between(*setting.stage_s))
        arena.content = content_of(self.incarnation, handle.step, handle.attempt, self.rank)
        self._world.checks.staged(self, handle)
        words.stage(seq)
        self._tell(m.Staged(-1, handle.step, handle.attempt, {}, stage_s=0.1))


def content_of(incarnation: int, step: int, attempt: int, rank: int) -> tuple[int, int, int, int]:
    """Return the name of what a rank has staged."""
    return (incarnation, step, attempt, rank)
