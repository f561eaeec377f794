"""Retention: one time after another, and none is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from agent_fakes import FakeFlusher

from safehold.agent.known import Known
from safehold.agent.retention import Retention
from safehold.config import Config
from safehold.errors import CheckpointError, DeadlineError, StorageError, SupersededError

DONE = {"uncommitted": [], "problem": None}


class Job:
    """Retention of one session in its first incarnation."""

    def __init__(self) -> None:
        self.flusher = FakeFlusher()
        self.maintained: list[tuple[int, CheckpointError | None]] = []
        self.known = self.incarnation(1)
        self.retention = Retention(
            {"last": 2},
            flusher=self.flusher,  # type: ignore[arg-type]
            config=Config(),
            maintained=lambda incarnation, value, error: self.maintained.append((incarnation, error)),
        )

    def incarnation(self, number: int) -> Known:
        return Known(number, [], flusher=self.flusher, config=Config(), failed=lambda _: None)  # type: ignore[arg-type]

    def commit(self, step: int, known: Known | None = None) -> None:
        known = known or self.known
        known.committed(step, 0)
        self.retention.retire(known, step, 0)

    def open(self) -> list[list[int]]:
        return [arguments["commit"] for arguments in self.flusher.open("retire")]


@pytest.fixture
def job() -> Job:
    return Job()


def test_never_two_at_once_and_the_last_is_followed(job: Job) -> None:
    for step in (10, 20, 30):
        job.commit(step)
    assert job.open() == [[10, 1, 0]]
    job.known.give_up(25, 0)
    job.flusher.answer("retire", {**DONE, "uncommitted": [[10, 1, 0]]})
    [asked] = job.flusher.open("retire")
    assert asked["commit"] == [30, 1, 0] and asked["given_up"] == [[25, 1, 0]]
    assert asked["acknowledged"] == [[20, 1, 0], [30, 1, 0]], "what the one before let go is not claimed"
    job.flusher.answer("retire", DONE)
    assert job.open() == [] and job.maintained == [(1, None), (1, None)] and job.known.given_up() == []
    job.commit(40)
    assert job.open() == [[40, 1, 0]]


def test_another_incarnation_waits_for_the_one_before(job: Job) -> None:
    job.commit(10)
    job.commit(20, job.incarnation(2))
    job.flusher.answer("retire", DONE)
    assert job.open() == [[20, 2, 0]]


@pytest.mark.parametrize(
    ("error", "follows"),
    [(StorageError("read-only"), True), (SupersededError("newer"), False), (DeadlineError("stuck"), False)],
)
def test_after_a_failure(job: Job, error: Any, follows: bool) -> None:
    job.commit(10)
    job.commit(20)
    job.flusher.may_still_run = isinstance(error, DeadlineError)
    job.flusher.answer("retire", None, error)
    job.flusher.may_still_run = False
    assert bool(job.open()) == follows and job.maintained == [(1, error)]
    if not follows:
        job.commit(30)
        assert job.open() == [[30, 1, 0]]
