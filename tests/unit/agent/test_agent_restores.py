"""Restores: the votes of the ranks, and that nobody waits for ever, whatever becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest
from agent_fakes import FakeClock, FakeFlusher, FakePeer

from safehold.agent import messages as m
from safehold.agent.arenas import Arena
from safehold.agent.restores import Restores
from safehold.config import Config
from safehold.errors import (
    CheckpointError,
    ChecksumError,
    ConfigurationError,
    DeadlineError,
    RankLostError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
    from_wire,
)
from safehold.types import CommitId

BAD = ChecksumError("block 3 is wrong", path="checkpoints/000000020/1-0/00000-00000.0.safetensors").to_wire()


class Job:
    """Two ranks that restore."""

    def __init__(self, world_size: int = 2) -> None:
        self.clock, self.flusher = FakeClock(), FakeFlusher({"quarantine": None})
        self.peers = [FakePeer(rank) for rank in range(world_size)]
        self.arenas = [Arena(1, 0, 4096)]
        self.rebased: list[tuple[CommitId, list[CommitId], Any]] = []
        self.idle: list[Any] = []
        self.busy = False
        self.incarnation = 1
        self.restores = Restores(
            local_ranks=list(range(world_size)),
            config=Config(restore_timeout_s=100.0),
            flusher=self.flusher,
            memory_of=lambda commit: self.arenas if commit.step == 20 else [],
            rebase=lambda commit, bad, done: self.rebased.append((commit, list(bad), done)),
            when_idle=lambda then: self.idle.append(then) if self.busy else then(),
            incarnation=lambda: self.incarnation,
            clock=self.clock,
        )

    def ask(self, rank: int, step: int | None = None) -> None:
        try:
            self.restores.ask(self.peers[rank], m.RestoreAsk(50 + rank, step))
        except CheckpointError as exc:
            self.peers[rank].refuse(50 + rank, exc)

    def found(self, step: int | None, newest: int | None = None, bad: tuple[int, ...] = (), **more: Any) -> None:
        value = {
            "commit": None if step is None else [step, 1, 0],
            "manifest": b"manifest" if step is not None else b"",
            "newest": None if newest is None else [newest, 1, more.pop("newest_attempt", 0)],
            "any_commit": newest is not None,
            "bad": [[entry, 1, 0] for entry in bad],
            "skipped": [f"step {entry} cannot be used: torn" for entry in bad],
            **more,
        }
        self.flusher.answer("find", value)

    def offer(self, step: int = 20, newest: int = 20, asked: int | None = None) -> None:
        for rank in range(len(self.peers)):
            self.ask(rank, asked)
        self.found(step, newest)

    def vote(self, rank: int, phase: str, error: dict[str, Any] | None = None, bad_path: str = "", **more: Any) -> None:
        number = more.pop("round", None) or self.peers[rank].last(m.RestoreOffer).round
        try:
            self.restores.vote(self.peers[rank], m.Vote(60 + rank, number, phase, error, bad_path, **more))
        except CheckpointError as exc:
            self.peers[rank].refuse(60 + rank, exc)

    def votes(self, phase: str) -> None:
        for rank in range(len(self.peers)):
            self.vote(rank, phase)

    def verdicts(self) -> list[str]:
        return [peer.last(m.Verdict).outcome for peer in self.peers]

    def restored(self, step: int = 20, newest: int = 20, asked: int | None = None) -> None:
        self.offer(step, newest, asked)
        self.votes("planned")
        self.votes("verified")


@pytest.fixture
def job() -> Job:
    return Job()


def test_two_votes_and_go(job: Job) -> None:
    job.ask(0)
    assert not job.flusher.calls, "rank 1 has not asked"
    job.ask(1)
    assert job.flusher.open("find") == [{"step": None, "exclude": []}]
    job.found(20, 20)
    for peer in job.peers:
        offer = peer.last(m.RestoreOffer)
        assert (offer.step, offer.incarnation, offer.manifest, offer.memory) == (20, 1, b"manifest", [0])
    job.vote(0, "planned")
    assert not job.peers[0].of(m.Verdict)
    job.vote(1, "planned")
    assert job.verdicts() == ["go", "go"]
    job.votes("verified")
    assert job.verdicts() == ["go", "go"] and not job.rebased
    assert job.restores.next_deadline() is None


def test_a_run_without_commits_gives_none_to_all(job: Job) -> None:
    job.ask(0)
    job.ask(1)
    job.found(None)
    assert [peer.last(m.RestoreOffer).step for peer in job.peers] == [None, None]


def test_what_is_being_saved_is_waited_for(job: Job) -> None:
    job.busy = True
    job.ask(0)
    job.ask(1)
    assert not job.flusher.calls
    job.idle.pop()()
    job.found(20, 20)
    assert job.peers[0].last(m.RestoreOffer).step == 20


def test_a_restore_that_was_stopped_while_it_waited_finds_nothing(job: Job) -> None:
    job.busy = True
    job.ask(0)
    job.ask(1)
    job.restores.rank_gone(1)
    job.idle.pop()()
    assert not job.flusher.calls


def test_different_steps_stop_it_for_all(job: Job) -> None:
    job.ask(0, 10)
    job.ask(1, 20)
    for peer in job.peers:
        assert isinstance(peer.refusal(), StateMismatchError) and "step 10" in str(peer.refusal())


def test_a_storage_that_fails_stops_it_for_all(job: Job) -> None:
    job.ask(0)
    job.ask(1)
    job.flusher.answer("find", None, StorageError("gone"))
    assert all(isinstance(peer.refusal(), StorageError) for peer in job.peers)


# -- no's ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["planned", "verified"])
def test_a_bad_checkpoint_is_quarantined_and_the_next_older_one_offered(job: Job, phase: str) -> None:
    job.offer()
    if phase == "verified":
        job.votes("planned")
    job.vote(0, phase)
    job.vote(1, phase, BAD, "some/path")
    assert job.verdicts() == ["again", "again"]
    [record] = job.flusher.done("quarantine")
    assert record["commit"] == [20, 1, 0] and record["path"] == "some/path" and "block 3" in record["reason"]
    job.ask(0)
    job.ask(1)
    assert job.flusher.open("find")[0]["exclude"] == [[20, 1, 0]]
    job.found(10, 20)
    assert "block 3" in job.peers[0].last(m.RestoreOffer).skipped[0]
    job.votes("planned")
    job.votes("verified")
    [(commit, bad, done)] = job.rebased
    assert commit == CommitId(10, 1, 0) and bad == [CommitId(20, 1, 0)]
    job.incarnation = 2
    done(2, None)
    assert job.verdicts() == ["go", "go"] and job.peers[1].last(m.Verdict).incarnation == 2


def test_nothing_is_remembered_for_the_next_restore(job: Job) -> None:
    job.offer()
    job.vote(0, "planned")
    job.vote(1, "planned", BAD, "p")
    job.restored(10, 20)
    job.rebased.pop()[2](2, None)
    job.ask(0)
    job.ask(1)
    assert job.flusher.open("find")[0]["exclude"] == []
    job.found(30, 30)
    assert job.peers[0].last(m.RestoreOffer).skipped == []
    job.votes("planned")
    job.votes("verified")
    assert not job.rebased


@pytest.mark.parametrize("how", ["misfit", "own error", "explicit step", "rank gone", "none left"])
def test_a_restore_that_was_stopped_is_not_remembered_either(job: Job, how: str) -> None:
    job.offer(asked=20 if how == "explicit step" else None)
    if how == "misfit":
        job.vote(0, "planned", missing=["x"])
        job.vote(1, "planned")
    elif how == "own error":
        job.vote(0, "planned", StateMismatchError("no").to_wire())
        job.vote(1, "planned")
    else:
        job.vote(0, "planned", BAD, "p")
        job.vote(1, "planned")
        if how != "explicit step":
            job.ask(0)
        if how == "rank gone":
            job.restores.rank_gone(1)
            job.restores.rank_back(1)
        if how == "none left":
            job.ask(1)
            job.flusher.answer("find", None, StepNotFoundError("nothing"))
            assert "block 3" in str(job.peers[0].refusal()), "why the others were no good"
    job.ask(0)
    job.ask(1)
    assert job.flusher.open("find")[0]["exclude"] == []
    job.found(15, 40)
    job.votes("planned")
    job.votes("verified")
    assert len(job.rebased) == 1, "the newest is what is the newest now"


def test_going_back_behind_the_newest_opens_an_incarnation_first(job: Job) -> None:
    job.restored(10, 20, asked=10)
    assert job.verdicts() == ["go", "go"] and len(job.peers[0].of(m.Verdict)) == 1
    job.rebased[0][2](0, StorageError("cannot"))
    assert job.verdicts() == ["stop", "stop"]
    assert isinstance(from_wire(job.peers[0].last(m.Verdict).error), StorageError)


def test_an_older_attempt_of_the_newest_step_is_a_going_back_too(job: Job) -> None:
    job.ask(0)
    job.ask(1)
    job.found(20, 20, newest_attempt=1)
    job.votes("planned")
    job.votes("verified")
    assert len(job.rebased) == 1


def test_an_explicit_step_that_is_bad_stops(job: Job) -> None:
    job.offer(asked=20)
    job.votes("planned")
    job.vote(0, "verified", BAD, "p")
    job.vote(1, "verified")
    assert job.verdicts() == ["stop", "stop"] and len(job.flusher.done("quarantine")) == 1
    assert isinstance(from_wire(job.peers[1].last(m.Verdict).error), ChecksumError)


def test_a_no_that_is_not_the_checkpoints_fault_stops_with_the_lowest_ranks_error(job: Job) -> None:
    job.offer()
    job.vote(1, "planned", StateMismatchError("mine").to_wire())
    job.vote(0, "planned", BAD, "p")
    assert job.verdicts() == ["stop", "stop"] and not job.flusher.done("quarantine")
    assert from_wire(job.peers[1].last(m.Verdict).error).message == "block 3 is wrong"


def test_what_does_not_fit_is_joined(job: Job) -> None:
    job.offer()
    job.vote(0, "planned", missing=["a"], unexpected=["x", "y"], mismatched=["m"])
    job.vote(1, "planned", missing=["b"], unexpected=["y", "z"])
    for peer in job.peers:
        verdict = peer.last(m.Verdict)
        assert verdict.outcome == "stop" and tuple(map(list, verdict.misfit)) == (["a", "b"], ["y"], ["m"])


def test_leaves_that_another_rank_has_a_place_for_are_not_unexpected(job: Job) -> None:
    job.offer()
    job.vote(0, "planned", unexpected=["stage1.w"])
    job.vote(1, "planned", unexpected=["stage0.w"])
    assert job.verdicts() == ["go", "go"]


# -- who is late, or gone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["asked", "finding", "offered", "voted", "planned", "verified by one"])
def test_a_rank_that_goes_stops_it_for_all_at_once(job: Job, when: str) -> None:
    job.ask(0)
    if when != "asked":
        job.ask(1)
    if when not in ("asked", "finding"):
        job.found(20, 20)
    if when == "voted":
        job.vote(0, "planned")
    if when in ("planned", "verified by one"):
        job.votes("planned")
    if when == "verified by one":
        job.vote(0, "verified")
    job.restores.rank_gone(1)
    if when in ("asked", "finding"):
        error = job.peers[0].refusal()
    elif when in ("voted", "verified by one"):
        error = from_wire(job.peers[0].last(m.Verdict).error)
    else:
        job.vote(0, "planned" if when == "offered" else "verified")
        error = job.peers[0].refusal()
    assert isinstance(error, RankLostError) and error.rank == 1
    if when == "finding":
        job.found(20, 20)
        assert not job.peers[0].of(m.RestoreOffer)


def test_a_rank_that_went_between_two_rounds_is_not_waited_for(job: Job) -> None:
    job.offer()
    job.vote(0, "planned")
    job.vote(1, "planned", BAD, "p")
    job.restores.rank_gone(1)
    job.ask(0)
    assert isinstance(job.peers[0].refusal(), RankLostError) and "rank 1" in str(job.peers[0].refusal())
    job.restores.rank_back(1)
    job.restored()
    assert job.verdicts() == ["go", "go"]


def test_a_rank_that_never_asks_is_named(job: Job) -> None:
    job.ask(0)
    assert job.restores.next_deadline() == job.clock.now + 100.0
    job.clock.now += 99.0
    job.restores.tick()
    assert not job.peers[0].replies
    job.clock.now += 1.0
    job.restores.tick()
    assert isinstance(job.peers[0].refusal(), DeadlineError) and "rank 1 " in str(job.peers[0].refusal())
    assert job.restores.next_deadline() is None


@pytest.mark.parametrize("phase", ["planned", "verified"])
def test_a_rank_that_never_votes_is_named(job: Job, phase: str) -> None:
    job.offer()
    if phase == "verified":
        job.votes("planned")
    assert job.restores.next_deadline() is None
    job.vote(1, phase)
    job.clock.now += 100.0
    job.restores.tick()
    error = from_wire(job.peers[1].last(m.Verdict).error)
    assert isinstance(error, DeadlineError) and error.rank == 0
    job.vote(0, phase)
    assert isinstance(job.peers[0].refusal(), DeadlineError), "who comes late hears the same"


def test_storage_that_does_not_answer_is_no_ranks_fault(job: Job) -> None:
    job.ask(0)
    job.ask(1)
    job.clock.now += 100.0
    job.restores.tick()
    assert "storage" in str(job.peers[0].refusal()) and job.peers[0].refusal().rank is None


@pytest.mark.parametrize("when", ["asked", "offered", "voted"])
def test_a_rank_that_starts_over_stops_the_old_round_for_all(job: Job, when: str) -> None:
    if when == "asked":
        job.ask(1)
        job.ask(1)
        assert isinstance(job.peers[1].refusal(), RankLostError)
    else:
        job.offer()
        old = job.peers[0].last(m.RestoreOffer).round
        if when == "voted":
            job.vote(0, "planned")
        job.ask(1)
        if when == "voted":
            assert job.peers[0].last(m.Verdict).outcome == "stop"
        else:
            job.vote(0, "planned", round=old)
            assert "anew" in str(job.peers[0].refusal())
    job.ask(0)
    job.found(20, 20)
    job.votes("planned")
    assert job.verdicts() == ["go", "go"]


def test_votes_that_make_no_sense_are_refused(job: Job) -> None:
    job.vote(0, "planned", round=7)
    assert isinstance(job.peers[0].refusal(), RankLostError)
    job.offer()
    job.vote(0, "perhaps")
    assert isinstance(job.peers[0].refusal(), ConfigurationError)
    job.votes("planned")
    assert job.verdicts() == ["go", "go"]


def test_stopped_from_outside(job: Job) -> None:
    job.restores.stop(StorageError("nothing to stop"))
    job.offer()
    job.vote(0, "planned")
    job.restores.stop(ConfigurationError("superseded, say"))
    assert job.peers[0].last(m.Verdict).outcome == "stop"
    job.vote(1, "planned")
    assert isinstance(job.peers[1].refusal(), ConfigurationError)


def test_the_offer_says_which_memory_is_verified() -> None:
    job = Job()
    job.arenas = [Arena(1, 1, 4096, verified=True), Arena(2, 0, 4096)]
    job.offer()
    offer = job.peers[0].last(m.RestoreOffer)
    assert offer.memory == [0, 1] and offer.verified == [1]
