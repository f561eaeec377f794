"""Restores of one node: what is offered to its ranks, their votes, and falling back together.

Invariants: all ranks get the same offer and the same verdict; nothing waits without a deadline; a rank that dies or stays away stops the
restore for all by name, and so does one that starts over while others are in the old round; who speaks of it later is told the same.
What was found to be bad is remembered as long as one restore lasts. A checkpoint that failed verification gets its quarantine record
before the next older one is offered. Before the last `go` of a restore that went back behind the newest commit, a new incarnation
that accepts only what is kept has been opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from safehold.agent.fetching import Brought, Fetching
from safehold.agent.flusher_client import Flusher
from safehold.agent.memory_lead import MemoryLead
from safehold.agent.memory_node import InMemory
from safehold.agent.messages import RestoreAsk, RestoreOffer, Verdict, Vote
from safehold.agent.node_save import Peer
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    RankLostError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
    from_wire,
)
from safehold.format.names import numbered
from safehold.types import CommitId

PHASES = ("planned", "verified")


@dataclass(slots=True)
class _Round:
    """One offer and the votes on it."""

    number: int
    deadline: float
    step: int | None
    asked: dict[int, tuple[Peer, RestoreAsk]] = field(default_factory=dict)
    offered: bool = False
    commit: CommitId | None = None
    votes: dict[str, dict[int, tuple[Peer, Vote]]] = field(default_factory=dict)


class Restores:
    """Coordinates restores of the ranks of one node.

    Args:
        local_ranks: The ranks.
        config: The run's settings.
        flusher: For tier work.
        memory_of: Returns the ranks whose packs of a commit are in the memory of this node.
        memory: Knows of a checkpoint that is in memory only.
        rebase: Opens a new incarnation that accepts commits up to one, without the excluded; calls back with (incarnation, error).
        when_idle: Calls back once no save is in flight; what a save is about to commit is what a restore shall find.
        incarnation: The incarnation in force.
        clock: Time.
        restored: Told of what all ranks have restored, once that is certain.
        in_doubt: Whether a `rebase` before may have been carried out although it failed, so that one more is due.
        fetching: Brings back from the second place what is newer there than anything usable here; None: there is none.
        planned: Told the round in which all ranks begin to read, before they are.
        shares: From which size on the documents of a checkpoint are handed out by the agents; None: ranks read them.
        offering: Told what is offered, before the ranks are.
    """

    def __init__(
        self,
        *,
        local_ranks: list[int],
        config: Config,
        flusher: Flusher,
        memory_of: Callable[[CommitId], list[InMemory]],
        memory: MemoryLead | None = None,
        rebase: Callable[[CommitId, list[CommitId], Callable[[int, CheckpointError | None], None]], None],
        when_idle: Callable[[Callable[[], None]], None],
        incarnation: Callable[[], int],
        clock: Clock,
        in_doubt: Callable[[], bool] = lambda: False,
        fetching: Fetching | None = None,
        planned: Callable[[int], None] = lambda _: None,
        restored: Callable[[CommitId], None] = lambda commit: None,
        shares: Callable[[], int | None] = lambda: None,
        offering: Callable[[RestoreOffer], None] = lambda _: None,
    ) -> None:
        self._ranks, self._config, self._flusher = local_ranks, config, flusher
        self._memory = memory
        self._memory_of, self._rebase, self._incarnation, self._clock = memory_of, rebase, incarnation, clock
        self._when_idle, self._in_doubt, self._fetching, self._planned = when_idle, in_doubt, fetching, planned
        self._restored, self._shares, self._offering = restored, shares, offering
        self._round: _Round | None = None
        self._count = 0
        self._gone: set[int] = set()
        self._stopped: tuple[int, CheckpointError | None] = (0, None)
        self._bad: list[CommitId] = []
        self._bad_words: list[str] = []
        self._fetched: set[CommitId] = set()
        self._newest: CommitId | None = None

    @property
    def active(self) -> bool:
        """Whether ranks wait in a restore."""
        return self._round is not None

    def ask(self, peer: Peer, message: RestoreAsk) -> None:
        """A rank asks what to restore."""
        self._gone.discard(peer.rank)
        current = self._round
        if current is not None and (current.offered or peer.rank in current.asked):
            text = f"rank {peer.rank} began to restore anew"
            self._stop(current, RankLostError(text, rank=peer.rank, hint="call restore again on all ranks"))
            current = None
        if self._gone:
            self._end()
            raise self._lost(min(self._gone))
        if current is None:
            self._count += 1
            deadline = self._clock.monotonic() + self._config.restore_timeout_s
            current = self._round = _Round(self._count, deadline, message.step)
        if current.step != message.step:
            text = f"rank {peer.rank} restores {_named(message.step)}, another rank {_named(current.step)}"
            error = StateMismatchError(text, rank=peer.rank, hint="ask for the same step on all ranks")
            self._stop(current, error)
            raise error
        current.asked[peer.rank] = (peer, message)
        if len(current.asked) == len(self._ranks):
            current.offered = True
            asked = current
            self._when_idle(lambda: self._find(asked))

    def vote(self, peer: Peer, message: Vote) -> None:
        """A rank says yes or no to a phase of the current offer."""
        current = self._round
        if current is None or current.number != message.round or current.commit is None:
            number, error = self._stopped
            if error is None or number != message.round:
                error = RankLostError("the restore was stopped", rank=peer.rank, hint="call restore again on all ranks")
            peer.refuse(message.id, error)
            return
        if message.phase not in PHASES:
            raise ConfigurationError(f"there is no phase {message.phase!r} of a restore", rank=peer.rank)
        votes = current.votes.setdefault(message.phase, {})
        votes[peer.rank] = (peer, message)
        if len(votes) == len(self._ranks):
            self._decide(current, message.phase)

    def rank_gone(self, rank: int) -> None:
        """A trainer's connection ended: nobody waits for it, now or later."""
        self._gone.add(rank)
        if self._round is not None:
            self._stop(self._round, self._lost(rank))

    def rank_back(self, rank: int) -> None:
        """A trainer has connected again."""
        self._gone.discard(rank)

    def stop(self, error: CheckpointError) -> None:
        """End what is under way."""
        if self._round is not None:
            self._stop(self._round, error)

    @staticmethod
    def _lost(rank: int) -> RankLostError:
        hint = "restart the job; nothing on storage was changed"
        return RankLostError(f"rank {rank} left, and a restore needs all ranks", rank=rank, hint=hint)

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        return self._round.deadline if self._round is not None and self._waiting(self._round) else None

    def tick(self) -> None:
        """Let the deadline pass."""
        current = self._round
        if current is None or self._clock.monotonic() < current.deadline or not self._waiting(current):
            return
        heard = set(current.asked)
        for votes in current.votes.values():
            heard = set(votes)
        late = sorted(set(self._ranks) - heard)
        text = f"{numbered('rank', late)} did not take part in the restore in time"
        if not late:
            text = "storage, or a save before, kept the restore longer than it may take"
        hint = "call restore on every rank; raise restore_timeout_s for slow storage"
        self._stop(current, DeadlineError(text, hint=hint, rank=late[0] if late else None))

    def _waiting(self, current: _Round) -> bool:
        return bool(current.asked) or any(current.votes.values())

    def _find(self, current: _Round) -> None:
        if self._round is not current:
            return
        if self._fetching is None:
            self._look(current, Brought())
        else:
            self._fetching.bring(current.step, self._bad, self._fetched, lambda brought: self._look(current, brought))

    def _look(self, current: _Round, brought: Brought) -> None:
        if self._round is not current:
            return
        self._bad_words.extend(brought.words)
        if brought.commit is not None:
            self._fetched.add(brought.commit)
            self._bad = [commit for commit in self._bad if commit != brought.commit]  # it was mended
        arguments = {"step": current.step, "exclude": [_wire(commit) for commit in self._bad]}
        if (least := self._shares()) is not None:
            arguments["share_from_bytes"] = least

        def looked(value: Any, error: CheckpointError | None) -> None:
            if self._round is current and self._memory is not None:
                self._memory.find(current.step, self._bad, value, error, found)
            else:
                found(value, error)

        def found(value: Any, error: CheckpointError | None) -> None:
            if self._round is not current:
                return
            if error is not None:
                self._stop(current, error)
            elif value["commit"] is None and brought.failed:
                text = "\n  ".join(["the run has no checkpoint here, and none could be fetched", *self._bad_words])
                hint = "restore again once the remote answers; without 'remote' the run starts from nothing"
                self._stop(current, StorageError(text, tier="remote", path=self._config.remote, hint=hint))
            else:
                self._offer(current, value)

        self._flusher.call("find", arguments, looked, timeout_s=self._config.restore_timeout_s)

    def _offer(self, current: _Round, value: dict[str, Any]) -> None:
        skipped = [*self._bad_words, *value["skipped"]]
        if value["commit"] is None:
            if value["any_commit"] or self._bad:
                text = "\n  ".join(["the run has checkpoints, and none can be restored", *value["skipped"]])
                hint = (
                    "look with 'safehold verify'; restore another step by name, or start afresh in a new run directory"
                )
                self._stop(current, StepNotFoundError(text, step=current.step, hint=hint))
                return
            for peer, ask in current.asked.values():
                peer.reply(RestoreOffer(ask.id, None, skipped=skipped, round=current.number))
            self._end()
            return
        commit = current.commit = CommitId(*value["commit"])
        if self._newest is None and value["newest"] is not None:
            self._newest = CommitId(*value["newest"])
        self._bad.extend(CommitId(*entry) for entry in value["bad"])
        held = self._memory_of(commit)
        memory = sorted(arena.rank for arena in held)
        verified = sorted(arena.rank for arena in held if arena.verified)
        tier = value.get("tier", "flash")
        documents = value.get("documents") if tier == "flash" else None
        offer = RestoreOffer(
            0,
            commit.step,
            commit.incarnation,
            commit.attempt,
            value["manifest"] if documents is None else b"",
            memory,
            skipped,
            current.number,
            verified,
            value.get("holders", {}),
            commit in self._fetched,
            tier,
            value.get("in_memory_of", {}),
            None if documents is None else (documents[0], documents[1]),
        )
        self._offering(offer)
        for peer, ask in current.asked.values():
            peer.reply(msgspec.structs.replace(offer, id=ask.id))
        current.asked = {}

    def _decide(self, current: _Round, phase: str) -> None:
        votes = current.votes.pop(phase)
        no = {rank: vote for rank, (_, vote) in votes.items() if vote.error is not None}
        if not no:
            misfit = _misfit([vote for _, vote in votes.values()])
            if misfit is not None:
                self._end()
                for peer, vote in votes.values():
                    peer.reply(Verdict(vote.id, "stop", None, self._incarnation(), misfit))
            elif phase == "verified":
                self._finish(current, votes)
            else:
                self._planned(current.number)
                self._answer(votes, "go", None)
            return
        broken = next((vote for vote in no.values() if vote.bad_path), None)
        worst = no[min(no)]
        assert worst.error is not None
        only_integrity = all(vote.bad_path for vote in no.values())
        if broken is None or broken.error is None or current.commit is None or not only_integrity:
            error = from_wire(worst.error)
            self._end(current, error)
            self._answer(votes, "stop", error)
            return
        bad, words = current.commit, str(from_wire(broken.error))
        self._bad.append(bad)
        self._bad_words.append(f"step {bad.step} cannot be used: {words}")
        arguments = {
            "commit": _wire(bad),
            "incarnation": self._incarnation(),
            "reason": words,
            "path": broken.bad_path,
        }
        outcome = "again" if current.step is None else "stop"
        in_memory = self._memory is not None and self._memory.is_believed(bad)
        failure = from_wire(broken.error) if outcome == "stop" else None
        self._round = None
        if outcome == "stop":
            self._end(current, failure)
        if in_memory:  # there is nothing on storage to leave word against
            self._answer(votes, outcome, failure)
            return
        self._flusher.call(
            "quarantine",
            arguments,
            lambda *_: self._answer(votes, outcome, failure),
            timeout_s=self._config.request_timeout_s,
        )

    def _finish(self, current: _Round, votes: dict[int, tuple[Peer, Vote]]) -> None:
        commit, newest, bad = current.commit, self._newest, self._bad
        self._end()
        if commit is None or newest is None or (newest <= commit and not self._in_doubt()):
            self._answer(votes, "go", None)
            if commit is not None:
                self._tell_restored(commit)
            return

        def rebased(incarnation: int, error: CheckpointError | None) -> None:
            self._answer(votes, "go" if error is None else "stop", error)
            if error is None:
                self._tell_restored(commit)

        self._rebase(commit, bad, rebased)

    def _tell_restored(self, commit: CommitId) -> None:
        if self._memory is None or not self._memory.is_believed(
            commit
        ):  # of what is in memory, storage has nothing to give back
            self._restored(commit)

    def _answer(self, votes: dict[int, tuple[Peer, Vote]], outcome: str, error: CheckpointError | None) -> None:
        wire = error.to_wire() if error else None
        for peer, vote in votes.values():
            peer.reply(Verdict(vote.id, outcome, wire, self._incarnation()))

    def _stop(self, current: _Round, error: CheckpointError) -> None:
        if self._bad_words and isinstance(error, StepNotFoundError):
            error.message = "\n  ".join([error.message, *self._bad_words])
        self._end(current, error)
        for peer, ask in current.asked.values():
            peer.refuse(ask.id, error)
        for votes in current.votes.values():
            self._answer(votes, "stop", error)

    def _end(self, current: _Round | None = None, error: CheckpointError | None = None) -> None:
        """The restore is over; the next one starts from nothing. Votes that come late for it hear the error."""
        self._round = None
        self._bad, self._bad_words, self._newest = [], [], None
        self._fetched = set()
        self._stopped = (current.number if current is not None else 0, error)


def _named(step: int | None) -> str:
    return "the newest checkpoint" if step is None else f"step {step}"


def _misfit(votes: list[Vote]) -> tuple[list[str], list[str], list[str]] | None:
    """Join what does not fit: missing and mismatched of any rank, unexpected only what no rank has a place for."""
    missing = sorted({name for vote in votes for name in vote.missing})
    mismatched = sorted({text for vote in votes for text in vote.mismatched})
    unexpected = sorted(set.intersection(*(set(vote.unexpected) for vote in votes)))
    return (missing, unexpected, mismatched) if missing or unexpected or mismatched else None


def _wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]
