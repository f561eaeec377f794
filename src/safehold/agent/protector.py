"""The lead's side of redundancy: after each commit it has all nodes protect the checkpoint, and after a restore give back what was lost.

Invariants: used from the dispatcher thread only; nothing here waits. It begins when a commit is acknowledged, never before, and delays no
save. One checkpoint at a time; one that two newer commits have overtaken is given up for the newest. What lies on storage is the truth:
what is noted here is for people. A cause of failure is told once, until a checkpoint is protected again; the next commit is the next try.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from safehold.agent import words as w
from safehold.agent.flusher_client import Flusher
from safehold.agent.guarding import patience_s
from safehold.agent.redundancy_wire import set_from_wire, set_to_wire
from safehold.clock import Clock, new_token
from safehold.config import Config
from safehold.errors import CheckpointError, DeadlineError, RankLostError, SkippedError, from_wire
from safehold.events import EventStream
from safehold.format.names import counted
from safehold.policy.mending import mend
from safehold.policy.placement import Layout, RedundancySet, Scheme, parse_scheme, place
from safehold.tiers.base import in_object_store
from safehold.types import CommitId

MAX_OVERTAKEN = 2


_UNPROTECTED = "saves that are flushed to the nodes' own disks are lost with any node, unlike those in memory: set copies or parity"


@dataclass(frozen=True, slots=True)
class _Task:
    """What one node of the job does for one node of the checkpoint; without a set it gives its files back."""

    where: int
    node: int
    of: RedundancySet | None


@dataclass(slots=True)
class _Work:
    """One checkpoint that is being protected."""

    number: int
    commit: CommitId
    phases: list[list[_Task]]
    at: dict[int, str]
    after_restore: bool = False
    overtaken: int = 0
    waiting: dict[int, _Task] = field(default_factory=dict)
    errors: list[CheckpointError] = field(default_factory=list)
    deadline: float = 0.0
    began: float = 0.0
    num_bytes: int = 0


class Protector:
    """See the module.

    Args:
        names: The nodes' names.
        domains: Their failure domains; empty: none is known of that node.
        here: This node.
        config: The run's settings.
        flusher: For tier work.
        tell: Tells a node.
        incarnation: The one in force.
        clock: Time.
    """

    def __init__(
        self,
        *,
        names: list[str],
        domains: list[str],
        here: int,
        config: Config,
        flusher: Flusher,
        tell: Callable[[int, w.Word], None],
        incarnation: Callable[[], int],
        clock: Clock,
        events: EventStream,
    ) -> None:
        self._names, self._here, self._config = names, here, config
        self._domains = {node: name for node, name in enumerate(domains) if name}
        self._flusher, self._tell, self._incarnation = flusher, tell, incarnation
        self._clock, self._events = clock, events
        self._scheme = scheme_of(config)
        self._layout: Layout | None = None
        self._number = int(new_token()[:12], 16)  # flushers outlive leads, and must not take one's work for another's
        self._running: _Work | None = None
        self._next: _Work | None = None
        self._lost: set[int] = set()
        self._warned: set[tuple[str, str | None]] = set()

    # -- how ---------------------------------------------------------------------------------------------------------------

    def placed(self, *, local_flash: bool) -> None:
        """It is known whether checkpoints are on disks of the nodes' own; only then they need redundancy."""
        several = local_flash and len(self._names) > 1 and self._scheme is not None
        self._layout = self._place() if several else None

    def _place(self) -> Layout:
        assert self._scheme is not None
        return place(self._scheme, range(len(self._names)), self._domains)

    def notes(self, *, local_flash: bool) -> tuple[list[str], list[str]]:
        """Return what the user is told at the start: notes, and warnings."""
        if self._scheme is None:
            alone = local_flash and self._config.flush_every > 1
            return [], [_UNPROTECTED] if alone else []
        if in_object_store(self._flusher.url):
            return [
                f"{self._scheme} is not needed: the run directory is in an object store, which no node's loss takes along"
            ], []
        if len(self._names) == 1:
            text = f"{self._scheme} protects nothing: node {self._names[0]} is the only one"
            return [f"{text}, and what is on a disk of its own is lost with it"], []
        if not local_flash:
            return [
                f"{self._scheme} is not needed: one directory that all nodes see, which no node's loss takes along"
            ], []
        layout = self._place()
        kinds = sorted({str(one) for one in layout.sets})
        text = f"redundancy: {', '.join(kinds)} over {counted(len(self._names), 'node')}, made after each commit"
        return [text], list(layout.warnings)

    # -- what is to be protected -------------------------------------------------------------------------------------------

    def committed(self, step: int, attempt: int) -> None:
        """A save is durable, and acknowledged."""
        if self._layout is None:
            return
        tasks = [_Task(node, node, one) for one in self._layout.sets for node in one.members]
        commit = CommitId(step, self._incarnation(), attempt)
        self._add(_Work(self._new_number(), commit, [tasks], dict(enumerate(self._names))))

    def restored(self, commit: CommitId) -> None:
        """All ranks have restored a checkpoint: what it has lost is given back, and its redundancy made again."""
        if self._layout is None:
            return

        def surveyed(value: Any, error: CheckpointError | None) -> None:
            if error is not None:
                self._warn(error, f"what step {commit.step} has lost is not given back")
            elif self._layout is not None:
                self._mend(commit, value)

        wire = [commit.step, commit.incarnation, commit.attempt]
        self._flusher.call("survey", {"commit": wire}, surveyed, timeout_s=self._config.restore_timeout_s)

    def _mend(self, commit: CommitId, found: dict[str, Any]) -> None:
        assert self._scheme is not None
        at = {int(node): name for node, name in found["at"].items()}
        saved = found["names"] or [str(node) for node in range(max(found["nodes"], default=0) + 1)]
        sets = [set_from_wire(one) for one in found["sets"]]
        plan = mend(self._scheme, found["nodes"], saved, at, sets, found["protected"], self._names, self._domains)
        if plan.left:
            lost = ", ".join(saved[node] for node in plan.left)
            text = f"step {commit.step} stays without the files of node {lost}: no node has come in its place"
            self._say(f"{text}; the next save is protected on the nodes that there are")
            return
        rebuilds = [_Task(where, node, None) for node, where in plan.rebuilds.items()]
        for task in rebuilds:
            self._say(
                f"rebuilding step {commit.step} on node {self._names[task.where]}: what node "
                f"{saved[task.node]} has saved"
            )
        shares = [_Task(plan.at[node], node, of) for node, of in plan.shares]
        phases = [phase for phase in (rebuilds, shares) if phase]
        if phases:
            names = {node: self._names[where] for node, where in plan.at.items()}
            self._add(_Work(self._new_number(), commit, phases, names, after_restore=True))

    def _new_number(self) -> int:
        self._number += 1
        return self._number

    def _add(self, work: _Work) -> None:
        if self._running is None:
            self._begin(work)
            return
        self._next = work
        self._running.overtaken += 1
        if self._running.overtaken >= MAX_OVERTAKEN:
            step = self._running.commit.step
            self._running.errors.append(SkippedError("given up for a newer checkpoint", step=step))
            self._finish()

    # -- one checkpoint ----------------------------------------------------------------------------------------------------

    def _begin(self, work: _Work) -> None:
        self._running, work.began = work, self._clock.monotonic()
        self._events.emit("protect", "started", step=work.commit.step)
        self._phase(work)

    def _phase(self, work: _Work) -> None:
        if not work.phases or work.errors:
            self._finish()
            return
        tasks = work.phases.pop(0)
        work.waiting = {task.node: task for task in tasks}
        work.deadline = self._clock.monotonic() + patience_s(self._config)
        for task in tasks:
            if task.where in self._lost:
                self._lose(task.where, work)
                return
        commit, incarnation = work.commit, self._incarnation()
        for task in tasks:
            needed = range(len(self._names)) if task.of is None else task.of.members
            at = work.at if task.of is None else {node: work.at[node] for node in needed if node in work.at}
            word = w.Protect(
                work.number,
                incarnation,
                [commit.step, commit.incarnation, commit.attempt],
                task.node,
                task.of is None,
                {} if task.of is None else set_to_wire(task.of),
                at,
                self._config.flush_timeout_s,
            )
            self._tell(task.where, word)

    def told(self, node: int, report: w.ProtectedHere) -> None:
        """A node has done its part, or could not."""
        self._lost.discard(node)
        work = self._running
        task = work.waiting.get(report.node) if work is not None and work.number == report.number else None
        if work is None or task is None or task.where != node:
            return
        del work.waiting[report.node]
        work.num_bytes += report.num_bytes
        if report.error is not None:
            error = from_wire(report.error)
            error.node = error.node or self._names[node]
            work.errors.append(error)
        elif task.of is None:
            text = f"rebuilt step {work.commit.step} on node {self._names[node]}"
            self._say(f"{text}: {report.num_bytes} bytes in {report.seconds:.2f} s")
        if not work.waiting:
            self._phase(work)

    def node_lost(self, node: int) -> None:
        """A node is dead or cannot be reached."""
        self._lost.add(node)
        if self._running is not None and any(task.where == node for task in self._running.waiting.values()):
            self._lose(node, self._running)

    def node_back(self, node: int) -> None:
        """It can be reached again."""
        self._lost.discard(node)

    def _lose(self, node: int, work: _Work) -> None:
        name = self._names[node]
        work.errors.append(RankLostError(f"node {name} was lost", step=work.commit.step, node=name))
        self._finish()

    def _finish(self) -> None:
        """What is running is over, as its errors say; the next begins."""
        work, self._running = self._running, None
        if work is None:
            return
        following, self._next = self._next, None
        step, error = work.commit.step, next(iter(work.errors), None)
        over = w.ProtectionOver(work.number, self._incarnation(), step, error is None, following is None)
        for node in range(len(self._names)):
            if node != self._here:
                self._tell(node, over)
        self._tell(self._here, over)
        if error is None:
            self._warned.clear()
            seconds = self._clock.monotonic() - work.began
            self._events.emit("protect", "done", step=step, num_bytes=work.num_bytes, seconds=seconds)
        else:
            self._events.emit("protect", "failed", step=step, error=str(error))
            if not isinstance(error, SkippedError):
                self._warn(error, f"step {step} is not protected against the loss of a node")
        if following is not None:
            self._begin(following)

    def stop(self) -> None:
        """The session ends."""
        self._running = self._next = self._layout = None

    def _warn(self, error: CheckpointError, what: str) -> None:
        """Tell a cause once, until a checkpoint is protected again."""
        cause = (type(error).__name__, error.node)
        if cause not in self._warned:
            self._warned.add(cause)
            self._say(f"{what}; the next commit is the next try: {error}")

    def _say(self, text: str) -> None:
        for node in range(len(self._names)):
            self._tell(node, w.ToAll(text))

    # -- time --------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return self._running.deadline if self._running is not None else None

    def tick(self) -> None:
        """Let the deadline pass."""
        work = self._running
        if work is None or self._clock.monotonic() < work.deadline:
            return
        late = sorted({self._names[task.where] for task in work.waiting.values()})
        text = f"node {', '.join(late[:4])} did not protect the checkpoint in time"
        hint = "are its storage and the network slow? flush_timeout_s is the time for it"
        work.errors.append(DeadlineError(text, step=work.commit.step, node=late[0] if late else None, hint=hint))
        self._finish()


def scheme_of(config: Config) -> Scheme | None:
    """Return the scheme that the settings ask for.

    Raises:
        ConfigurationError: They make no sense.
    """
    return parse_scheme(copies=config.copies or None, parity=config.parity or None)
