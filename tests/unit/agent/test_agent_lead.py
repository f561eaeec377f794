"""The lead's hands: plans that are damaged when they are needed, and publishing that fails."""

from __future__ import annotations

import pytest
from agent_fakes import Node, states

from safehold.errors import CheckpointError, DeadlineError, ManifestError, StorageError, SupersededError


@pytest.fixture
def node() -> Node:
    return Node()


def to_publishing(node: Node, step: int, attempt: int = 0) -> None:
    """A save up to the moment when its manifest is written."""
    for rank in (0, 1):
        node.begin(rank, step, attempt)
        node.stage(rank, step, attempt)
        node.flushed(rank)
    node.record()
    node.work.run_until(lambda: node.flusher.open("publish") or node.flusher.open("plan"))
    if node.flusher.open("plan"):
        node.plan()
        node.work.run_until(lambda: node.flusher.open("publish"))


def lose(node: Node, error: CheckpointError, *, stuck: bool = False) -> None:
    """The flusher goes in the middle of publishing."""
    node.flusher.lost, node.flusher.may_still_run = True, stuck
    node.flusher.answer("publish", None, error)
    node.flusher.lost = node.flusher.may_still_run = False


# -- publishing that fails -----------------------------------------------------------------------------------------------


def test_a_publish_that_was_refused_is_withdrawn_before_it_is_told_and_its_files_go(node: Node) -> None:
    to_publishing(node, 10)
    node.flusher.answer("publish", None, StorageError("no fsync", path="/x"))
    assert states(node) == [], "first it is made certain"
    assert node.flusher.open("withdraw") == [{"commit": [10, 1, 0]}]
    node.flusher.answer("withdraw", True)
    assert states(node) == [("failed", 10)] and node.failure(1).path == "/x"
    assert node.flusher.open("abandon") == [{"commit": [10, 1, 0], "node": None}]
    node.flusher.answer("abandon")
    assert node.saves.known.given_up() == [] and node.saves.known.steps == set()


@pytest.mark.parametrize("answer", [False, StorageError("gone")])
def test_a_publish_that_cannot_be_withdrawn_is_in_doubt_and_its_files_stay(node: Node, answer: object) -> None:
    to_publishing(node, 10)
    node.flusher.answer("publish", None, StorageError("no fsync"))
    failure = answer if isinstance(answer, CheckpointError) else None
    node.flusher.answer("withdraw", None if failure else answer, failure)
    assert states(node) == [("failed", 10)] and "no fsync" in str(node.failure(0)), "the first cause is told"
    assert not node.flusher.done("abandon") and node.saves.known.given_up() == [[10, 1, 0]]


def test_a_publish_whose_flusher_died_is_withdrawn_and_its_files_stay(node: Node) -> None:
    """What the process had sent to a server may still be done: a tombstone is safe, deleting is not."""
    to_publishing(node, 10)
    lose(node, StorageError("the flusher is gone"))
    node.flusher.answer("withdraw", True)
    assert states(node) == [("failed", 10)] and not node.flusher.done("abandon")
    assert node.saves.known.given_up() == [[10, 1, 0]]


@pytest.mark.parametrize("case", ["late", "stuck", "superseded"])
def test_a_publish_that_may_still_be_done_is_left_alone(node: Node, case: str) -> None:
    to_publishing(node, 10)
    if case == "late":
        lose(node, DeadlineError("publish after 50 s"))
    elif case == "stuck":
        lose(node, StorageError("nonsense"), stuck=True)
    else:
        node.flusher.answer("publish", None, SupersededError("newer"))
    assert states(node) == [("failed", 10)]
    assert not node.flusher.done("withdraw") and not node.flusher.done("abandon")


def test_a_save_that_was_told_to_be_in_doubt_is_not_withdrawn_later(node: Node) -> None:
    """The next save may have made room on account of what is there."""
    to_publishing(node, 10)
    node.tick(60.0)
    assert states(node) == [("failed", 10)] and node.saves.known.given_up() == [], "the call is still open"
    node.flusher.answer("publish", None, StorageError("no fsync"))
    assert not node.flusher.done("withdraw") and node.saves.known.given_up() == [[10, 1, 0]]


def test_what_became_durable_after_all_is_not_given_up(node: Node) -> None:
    to_publishing(node, 10)
    node.tick(60.0)
    node.flusher.answer("publish")
    assert states(node)[-1] == ("durable", 10)
    assert node.saves.known.given_up() == [] and node.saves.known.acknowledged() == [[10, 1, 0]]


# -- plans that are needed again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["plans/{}", "/run/plans/{}"])
def test_a_plan_that_is_damaged_when_it_is_committed_with_is_stored_again(node: Node, path: str) -> None:
    node.save(10)
    to_publishing(node, 20)
    [publish] = node.flusher.open("publish")
    node.flusher.answer("publish", None, ManifestError("damaged", path=path.format(publish["plan_digest"])))
    assert states(node) == [("durable", 10)] and not node.flusher.done("withdraw")
    node.work.run_until(lambda: node.flusher.open("plan"))
    [plan] = node.flusher.open("plan")
    assert plan["digest"] == publish["plan_digest"]
    node.flusher.answer("plan")
    assert node.flusher.open("publish") == [publish]
    node.flusher.answer("publish")
    assert states(node)[-1] == ("durable", 20)
    to_publishing(node, 30)
    assert not node.flusher.open("plan"), "it is known again"


@pytest.mark.parametrize("case", ["again", "not stored", "other parts", "too late"])
def test_a_plan_that_cannot_be_mended_fails_the_save(node: Node, case: str) -> None:
    to_publishing(node, 10)
    damaged = ManifestError("damaged", path=f"plans/{node.flusher.open('publish')[0]['plan_digest']}")
    if case == "other parts":  # so that the same plan cannot be made
        node.session.parts._by_rank.clear()
    node.flusher.answer("publish", None, damaged)
    if case == "too late":
        node.tick(60.0)
    node.work.run_until(lambda: node.flusher.open("plan") or node.flusher.open("withdraw"))
    if node.flusher.open("plan"):
        node.flusher.answer("plan", None, StorageError("read-only") if case == "not stored" else None)
    if case == "again":
        node.flusher.answer("publish", None, damaged)
    if case != "too late":
        node.flusher.answer("withdraw", True)
    assert states(node) == [("failed", 10)] and not node.flusher.open("publish")
    words = {"again": "damaged", "not stored": "read-only", "other parts": "never reached", "too late": "published"}
    assert words[case] in str(node.failure(0))
    if case == "not stored":
        node.flusher.calls.clear()
        for rank in (0, 1):
            node.begin(rank, 20)
        node.work.run_until(lambda: node.flusher.open("plan"))  # it does not count as known
