"""Has the newest commit replicated, after it was acknowledged and beside training: the part of the lead.

Invariants: used from the dispatcher thread only; nothing here waits, and no save waits for anything here. One replication at a time; of
commits that come meanwhile the newest follows, and the others are left out. None begins while the trainers wait in a restore. All nodes
copy their share under one claim, which the lead holds; once all have said that theirs is durable, the lead writes the manifest.
A failure is told once for each cause, tried again after a growing while and at the next commit, and told to be over when it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from safehold.agent import words as w
from safehold.agent.copying import STOP_SLACK_S, stopped
from safehold.agent.flusher_client import Callback, Flusher
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import (
    CheckpointError,
    CommitError,
    DeadlineError,
    IntegrityError,
    RankLostError,
    SkippedError,
    StepNotFoundError,
    StorageFullError,
    from_wire,
)
from safehold.events import EventStream
from safehold.policy import replication
from safehold.types import CommitId

START_S = 2.0
RETRY_S, MAX_RETRY_S = 5.0, 300.0
POLL_S = 1.0
MAX_COMMITS = 4096
_numbers = itertools.count(1)


class Lead(Protocol):
    """The head, as its replicator needs it."""

    def tell(self, node: int, word: w.Word) -> None:
        """Tell one node."""
        ...

    def tell_all(self, word: w.Word) -> None:
        """Tell all nodes."""
        ...


@dataclass(slots=True)
class _Work:
    """A replication under way; `commit` None: the newest checkpoint that is there."""

    key: str
    commit: CommitId | None
    began_s: float
    wanted_s: float
    total_bytes: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0
    waiting: set[int] = field(default_factory=set)
    is_left: bool = False
    error: CheckpointError | None = None
    is_cancelled: bool = False


class Replicator:
    """See the module.

    Args:
        lead: Tells nodes.
        num_nodes: How many.
        token: Of this start of the job.
        config: The run's settings.
        copier: The process that copies, on this node; None: there is no second place, and nothing is done here.
        restoring: Whether the trainers wait in a restore.
        incarnation: The incarnation in force.
        released: Told that retention may let go of what was held for a replication.
        clock: Time.
        events: The event stream.
    """

    def __init__(
        self,
        lead: Lead,
        *,
        num_nodes: int,
        token: str,
        config: Config,
        copier: Flusher | None,
        restoring: Callable[[], bool],
        incarnation: Callable[[], int],
        released: Callable[[], None],
        clock: Clock,
        events: EventStream,
    ) -> None:
        self._lead, self._num_nodes, self._token = lead, num_nodes, token
        self._config, self._copier = config, copier
        self._restoring, self._incarnation, self._released = restoring, incarnation, released
        self._clock, self._events = clock, events
        self._work: _Work | None = None
        self._wanted: tuple[CommitId | None, float] | None = None
        self._commits: dict[CommitId, float] = {}
        self._count = 0
        self._retry_at = float("-inf")
        self._num_failed = 0
        self._told: set[str] = set()
        self._last_error = ""
        self._was_full = False
        self._done: CommitId | None = None
        self._is_stopped = self._is_told = False
        self._lost: set[int] = set()
        self._was_restoring = False

    # -- what is wanted --------------------------------------------------------------------------------------------------

    def opened(self, steps: list[int] | None) -> None:
        """An incarnation is open; what it went on from may not be there yet (None: what it has is not known)."""
        if self._copier is not None and self._work is None and self._wanted is None and (steps is None or steps):
            self._wanted = (None, self._clock.monotonic())
            self._retry_at = self._clock.monotonic() + START_S  # the trainers may be about to restore

    def committed(self, commit: CommitId, *, final: bool) -> None:
        """A save was committed and acknowledged."""
        if self._copier is None:
            return
        self._count += 1
        self._commits[commit] = self._clock.wall()
        while len(self._commits) > MAX_COMMITS:
            del self._commits[next(iter(self._commits))]
        every = self._config.remote_every
        if self._is_stopped or (self._count % every and not final):
            why = "the agent is leaving" if self._is_stopped else f"every {every} commits one is replicated"
            self._leave_out(commit, why)
            return
        before = self._wanted
        self._wanted = (commit, self._clock.monotonic())
        if before is not None and before[0] is not None:
            self._leave_out(before[0], f"step {commit.step} was committed before its turn had come")
        self._retry_at = self._clock.monotonic()
        self._consider()

    def held(self) -> list[CommitId]:
        """What retention has to leave alone: what is copied, and, for a while, what waits for it."""
        since_s = self._clock.monotonic() - self._config.remote_timeout_s
        found = [self._wanted[0]] if self._wanted is not None and self._wanted[1] > since_s else []
        work = self._work
        if work is not None and (work.total_bytes or work.wanted_s > since_s):
            found.insert(0, work.commit)
        return [commit for commit in found if commit is not None]

    def is_busy(self, waited_s: float) -> bool:
        """Whether the agents stay for it, `waited_s` after the last trainer has gone."""
        if self._work is not None:
            return waited_s < self._config.remote_timeout_s
        return self._wanted is not None and not self._is_stopped and waited_s < self._config.agent_linger_s

    @property
    def at_work(self) -> bool:
        """Whether a replication is under way."""
        return self._work is not None

    def stop(self, *, now: bool = True) -> None:
        """Begin no more; `now`: end what is under way, in a state that the next agent goes on from."""
        self._is_stopped = True
        if self._work is not None and now:
            self._cancel(self._work, stopped())

    # -- one replication -------------------------------------------------------------------------------------------------

    def _consider(self) -> None:
        now = self._clock.monotonic()
        if self._work is not None or self._wanted is None or self._is_stopped or now < self._retry_at:
            return
        if self._restoring():
            self._was_restoring = True
            return
        commit, wanted_s = self._wanted
        self._wanted = None
        work = self._work = _Work(f"{self._token}/{next(_numbers)}", commit, now, wanted_s)
        self._tell_active()
        self._events.emit("replicate", "started", step=commit.step if commit else None, tier="remote")
        wire = None if commit is None else [commit.step, commit.incarnation, commit.attempt]
        self._call(work, "copy_begin", {"commit": wire, "full": self._was_full}, self._begun)

    def _call(self, work: _Work, operation: str, arguments: dict[str, Any], then: Callable[[_Work, Any], None]) -> None:
        def answered(value: Any, error: CheckpointError | None) -> None:
            if self._work is not work:
                return
            done = error is None and operation == "copy_finish"
            if not done and (error is not None or work.error is not None):
                work.error = work.error or error
                self._end(work)
            else:
                then(work, value)

        left_s = work.began_s + self._config.remote_timeout_s - self._clock.monotonic()
        timeout_s = max(0.0, left_s) + STOP_SLACK_S
        self._ask(operation, {"key": work.key, **arguments}, answered, timeout_s)

    def _ask(self, operation: str, arguments: dict[str, Any], then: Callback, timeout_s: float) -> None:
        assert self._copier is not None
        self._copier.call(operation, arguments, then, timeout_s=timeout_s)

    def _begun(self, work: _Work, value: dict[str, Any]) -> None:
        if value["commit"] is None:
            self._over(work)
            return
        commit = work.commit = CommitId(*value["commit"])
        self._commits.setdefault(commit, value["created_s"])
        work.total_bytes = value["bytes"]
        if value["complete"]:
            self._succeeded(work)
            return
        work.sent_bytes, work.kept_bytes = value["sent_bytes"], value["kept_bytes"]
        there = [node for node in range(self._num_nodes) if node not in self._lost]
        shares = dict(zip(there, replication.shares(value["nodes"], len(there)), strict=True))
        work.waiting = {node for node, share in shares.items() if share}
        if not work.waiting:
            self._finish(work)
            return
        for node in sorted(work.waiting):
            self._lead.tell(node, w.Copy(work.key, value["commit"], value["claim"], shares[node]))

    def copied(self, node: int, report: w.Copied) -> None:
        """A node has copied its share, or failed to."""
        work = self._work
        if work is None or report.key != work.key or node not in work.waiting:
            return
        work.waiting.discard(node)
        work.sent_bytes += report.sent_bytes
        work.kept_bytes += report.kept_bytes
        if report.error is not None:
            self._cancel(work, from_wire(report.error))
        if not work.waiting:
            if work.error is None:
                self._finish(work)
            else:
                self._end(work)

    def node_lost(self, node: int) -> None:
        """A node's agent is dead or cannot be reached: the others copy its share at the next trial."""
        self._lost.add(node)
        work = self._work
        if work is not None and node in work.waiting:
            work.waiting.discard(node)
            self._cancel(work, RankLostError(f"node {node} was lost while it copied", tier="remote"))
            if not work.waiting:
                self._end(work)

    def node_back(self, node: int) -> None:
        """It can be reached again."""
        self._lost.discard(node)

    def _finish(self, work: _Work) -> None:
        self._call(work, "copy_finish", {"keep": self._config.remote_keep}, self._finished)

    def _finished(self, work: _Work, value: dict[str, Any]) -> None:
        if value["problem"]:
            self._tell_once(f"nothing is let go at the remote: {value['problem']}", "keep")
        self._succeeded(work)

    def _cancel(self, work: _Work, error: CheckpointError) -> None:
        """Have all nodes end what they copy; each says so."""
        work.error = work.error or error
        if work.is_cancelled:
            return
        work.is_cancelled = True
        for node in sorted(work.waiting):
            self._lead.tell(node, w.StopCopying(work.key))
        self._ask("copy_cancel", {"key": work.key}, lambda *_: None, self._config.request_timeout_s)

    def _end(self, work: _Work) -> None:
        """It has failed on all nodes: leave it to whoever comes next."""
        if work.is_left:
            return
        work.is_left = True
        left = lambda *_: self._failed(work) if self._work is work else None  # noqa: E731
        self._ask("copy_leave", {"key": work.key}, left, self._config.request_timeout_s)

    # -- what came of it -------------------------------------------------------------------------------------------------

    def _succeeded(self, work: _Work) -> None:
        commit, seconds = work.commit, self._clock.monotonic() - work.began_s
        assert commit is not None
        self._done = max(commit, self._done or commit)
        figures: dict[str, float] = {
            "bytes": work.total_bytes,
            "sent_bytes": work.sent_bytes,
            "kept_bytes": work.kept_bytes,
            "seconds": seconds,
        }
        fields: dict[str, Any] = {"tier": "remote", **figures}
        self._events.emit("replicate", "done", step=commit.step, **fields)
        if self._told - {"keep"}:
            text = f"replication works again: step {commit.step} is at {self._config.remote}"
            self._lead.tell_all(w.ToAll(text))
        self._told &= {"keep"}
        self._num_failed, self._last_error, self._was_full = 0, "", False
        if commit.incarnation == self._incarnation():
            self._lead.tell_all(w.Replicated(commit.incarnation, commit.step, commit.attempt, figures))
        self._over(work)

    def _failed(self, work: _Work) -> None:
        error = work.error or stopped()
        commit, step = work.commit, work.commit.step if work.commit else None
        self._last_error = str(error)
        self._was_full = isinstance(error, StorageFullError) and error.tier == "remote"
        self._events.emit("replicate", "failed", step=step, tier="remote", error=str(error))
        # What is damaged or gone here will not come back; the next commit is whole.
        hopeless = isinstance(error, IntegrityError | StepNotFoundError) or type(error) is CommitError
        if not isinstance(error, SkippedError):
            self._num_failed += 1
            what = "the newest checkpoint" if step is None else f"step {step}"
            self._tell_once(f"{what} is not replicated yet: {error}", type(error).__name__)
        if self._wanted is None and not hopeless:
            self._wanted = (commit, work.wanted_s)
        elif commit is not None:
            self._leave_out(commit, str(error))
        pause_s = min(RETRY_S * 2 ** min(self._num_failed - 1, 10), MAX_RETRY_S)
        self._retry_at = max(self._retry_at, self._clock.monotonic() + (pause_s if self._num_failed else 0.0))
        self._over(work)

    def _over(self, work: _Work) -> None:
        self._work = None
        self._forget_older()
        if work.commit is not None:
            self._released()
        self._consider()
        self._tell_active()

    def _tell_active(self) -> None:
        """Tell all nodes whether there is something to stay for."""
        active = self._work is not None or (self._wanted is not None and not self._is_stopped)
        if active != self._is_told:
            self._is_told = active
            self._lead.tell_all(w.Copying(active))

    def _forget_older(self) -> None:
        if self._done is not None:
            self._commits = {commit: at for commit, at in self._commits.items() if commit >= self._done}

    def _leave_out(self, commit: CommitId, reason: str) -> None:
        if commit.incarnation == self._incarnation():
            self._lead.tell_all(w.LeftOut(commit.incarnation, commit.step, commit.attempt, reason))

    def _tell_once(self, text: str, cause: str) -> None:
        if cause not in self._told:
            self._told.add(cause)
            self._lead.tell_all(w.ToAll(text))

    # -- time ------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        work = self._work
        if work is not None and work.is_cancelled and not work.waiting:
            return None  # the copying process has a deadline
        if work is not None:
            return work.began_s + self._config.remote_timeout_s + (STOP_SLACK_S if work.is_cancelled else 0.0)
        if self._wanted is None or self._is_stopped:
            return None
        return max(self._retry_at, self._clock.monotonic() + POLL_S if self._was_restoring else self._retry_at)

    def tick(self) -> None:
        """Let deadlines pass."""
        self._was_restoring = False
        work = self._work
        if work is None:
            self._consider()
            return
        over_s = self._clock.monotonic() - work.began_s - self._config.remote_timeout_s
        if over_s < 0:
            return
        text = f"the replication did not end within {self._config.remote_timeout_s:g} s"
        hint = "what was copied stays for the next trial; raise remote_timeout_s if the second place is slow"
        self._cancel(work, DeadlineError(text, tier="remote", path=self._config.remote, hint=hint))
        if over_s >= STOP_SLACK_S and work.waiting:  # nodes that do not even say that they have stopped
            work.waiting.clear()
            self._end(work)

    def facts(self) -> dict[str, Any] | None:
        """What `safehold agents` shows; None where there is no second place."""
        if self._copier is None:
            return None
        lag = replication.lag(self._commits, [] if self._done is None else [self._done])
        work = self._work
        left = max(0, work.total_bytes - work.sent_bytes - work.kept_bytes) if work is not None else 0
        return {
            "url": self._config.remote,
            "newest_step": None if self._done is None else self._done.step,
            "copying_step": work.commit.step if work is not None and work.commit is not None else None,
            "copying_bytes": left,
            "lag_steps": lag.steps,
            "lag_seconds": lag.seconds,
            "lag_checkpoints": lag.num_checkpoints,
            "last_error": self._last_error,
        }
