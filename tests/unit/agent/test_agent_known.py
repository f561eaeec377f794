"""What is committed already: a new agent asks before it lets anybody save; and what retention is told."""

from __future__ import annotations

import pytest
from agent_fakes import FakePeer, Node, hello, states

from safehold.agent import known as known_module
from safehold.agent import messages as m
from safehold.errors import ConfigurationError, DeadlineError, SkippedError, StorageError, SupersededError
from safehold.types import CommitId

NOTHING = {"steps": [], "commits": [], "left": []}


@pytest.fixture
def restarted() -> Node:
    """A new agent of incarnation 3, with storage asked and no answer yet."""
    return Node(incarnation=3)


def granted(node: Node, rank: int, request: int) -> bool:
    return isinstance(node.reply_to(rank, request), m.Granted)


# -- after a restart -------------------------------------------------------------------------------------------------------


def test_a_restarted_agent_knows_what_is_committed(restarted: Node) -> None:
    assert restarted.flusher.open("known") == [{"incarnation": 3}], "asked when the first rank is back"
    found = {"steps": [5, 10], "commits": [[10, 3, 0]], "left": []}
    restarted.flusher.answer("known", found)
    restarted.begin(0, 10, 1)
    assert isinstance(restarted.peers[0].refusal(), ConfigurationError)
    assert "step 10 is committed already" in str(restarted.peers[0].refusal())
    restarted.begin(1, 5)
    assert "step 5 is committed already" in str(restarted.peers[1].refusal())
    for rank in (0, 1):
        assert granted(restarted, rank, restarted.begin(rank, 10, 2, overwrite=True))


def test_a_save_waits_until_storage_has_said_what_is_committed(restarted: Node) -> None:
    asked = [restarted.begin(rank, 10, 1, pump=False) for rank in (0, 1)]
    asked += [restarted.begin(rank, 10, 2, overwrite=True, pump=False) for rank in (0, 1)]
    restarted.work.run()
    assert not any(peer.replies for peer in restarted.peers) and not restarted.flusher.open("flush")
    restarted.flusher.answer("known", {"steps": [10], "commits": [], "left": []})
    restarted.work.run_until(lambda: all(restarted.reply_to(n % 2, request) for n, request in enumerate(asked)))
    assert [granted(restarted, n % 2, request) for n, request in enumerate(asked)] == [False, False, True, True]


def test_who_went_while_waiting_is_not_let_in(restarted: Node) -> None:
    restarted.begin(0, 10, pump=False)
    restarted.leave(0)
    restarted.flusher.answer("known", NOTHING)
    assert restarted.saves.num_open == 0 and restarted.lead.num_open == 0
    assert not restarted.peers[0].replies


def test_a_request_that_makes_no_sense_is_refused_after_the_wait_too(restarted: Node) -> None:
    restarted.send(0, m.Prepare(8, 8192))
    restarted.work.run_until(lambda: restarted.reply_to(0, 8))
    first, twice = restarted.begin(0, 10, pump=False), restarted.begin(0, 10, pump=False)
    restarted.flusher.answer("known", NOTHING)
    assert granted(restarted, 0, first) and isinstance(restarted.reply_to(0, twice), m.Refused)
    assert "begun this save before" in str(restarted.peers[0].refusal())


def test_storage_that_gives_no_answer_keeps_only_saves_of_the_same_step_again_out() -> None:
    node = Node(world_size=1, incarnation=3)
    again, new = node.begin(0, 10, 1, pump=False), node.begin(0, 20, pump=False)
    node.flusher.answer("known", None, DeadlineError("storage does not answer"))
    node.work.run_until(lambda: node.reply_to(0, new))
    assert granted(node, 0, new), "training does not wait for a disk that is stuck"
    refusal = node.peers[0].refusal()
    assert isinstance(refusal, StorageError) and refusal.retry and refusal.rank == 0
    assert "cannot tell whether step 10 is committed already" in str(refusal)
    assert isinstance(node.reply_to(0, again), m.Refused)
    assert len(node.flusher.open("known")) == 1, "asked again, once"
    node.flusher.answer("known", {"steps": [10], "commits": [], "left": [[20, 3, 0], [30, 3, 0]]})
    node.begin(0, 10, 2)
    assert "step 10 is committed already" in str(node.peers[0].refusal())
    assert node.saves.known.given_up() == [], "some of these may be saves that were let in meanwhile"


def test_superseded_while_there_was_no_agent_everybody_is_told(restarted: Node) -> None:
    waiting = restarted.begin(0, 10, pump=False)
    restarted.flusher.answer("known", None, SupersededError("newer"))
    assert restarted.session.ended_by == 4
    assert [peer.last(m.Superseded).incarnation for peer in restarted.peers] == [4, 4]
    assert restarted.reply_to(0, waiting).error["class"] == "SupersededError"


def test_who_waits_is_let_in_after_a_settling_that_came_to_nothing(restarted: Node) -> None:
    waiting = restarted.begin(0, 10, pump=False)
    restarted.session.settle(lambda: None, 5.0)
    restarted.session.resume()
    assert restarted.reply_to(0, waiting) is None
    restarted.flusher.answer("known", NOTHING)
    restarted.work.run_until(lambda: restarted.reply_to(0, waiting))
    assert granted(restarted, 0, waiting)
    restarted.begin(1, 10)
    for rank in (0, 1):
        restarted.stage(rank, 10)
        restarted.flushed(rank)
    restarted.record()
    restarted.publish()
    assert states(restarted) == [("durable", 10)]


def test_a_newer_incarnation_that_a_rank_brings_is_asked_about_too() -> None:
    node = Node()
    node.peers[1] = FakePeer(1)
    node.session.attach(node.peers[1], hello(1, node.world, incarnation=5))
    node.begin(1, 10, pump=False)
    assert node.flusher.open("known") == [{"incarnation": 5}] and not node.peers[1].replies


def test_news_of_an_incarnation_before_do_not_end_the_session() -> None:
    """Going back opened a newer one while storage was busy for the one before."""
    node = Node()
    node.save(10)
    node.session.opened("run", 2, [10])
    node.flusher.answer("retire", None, SupersededError("incarnation 2 owns the run now"))
    assert node.session.ended_by == 0 and not node.peers[0].of(m.Superseded)


# -- what retention is told ------------------------------------------------------------------------------------------------


def test_retention_hears_of_what_is_committed_and_of_what_was_given_up(restarted: Node) -> None:
    restarted.flusher.answer("known", {"steps": [10], "commits": [[10, 3, 0]], "left": [[5, 3, 0], [15, 3, 2]]})
    restarted.save(20)
    [asked] = restarted.flusher.open("retire")
    assert asked["acknowledged"] == [[10, 3, 0], [20, 3, 0]] and asked["given_up"] == [[5, 3, 0], [15, 3, 2]]
    assert restarted.flusher.done("flush")[0]["given_up"] == asked["given_up"], "for the room that a save may need"
    restarted.flusher.answer("retire", {"uncommitted": [[10, 3, 0], [20, 1, 0]]})
    restarted.save(30)
    [asked] = restarted.flusher.open("retire")
    assert asked["acknowledged"] == [[20, 3, 0], [30, 3, 0]] and asked["given_up"] == []


def test_what_retention_could_not_do_is_asked_for_again(restarted: Node) -> None:
    restarted.flusher.answer("known", {"steps": [], "commits": [], "left": [[5, 3, 0]]})
    restarted.save(20)
    restarted.flusher.answer("retire", None, StorageError("read-only"))
    restarted.save(30)
    assert restarted.flusher.open("retire")[0]["given_up"] == [[5, 3, 0]]


def test_an_attempt_whose_files_could_not_be_swept_is_given_up() -> None:
    node = Node()
    node.begin(0, 10)
    node.send(0, m.StageFailed(-1, 10, 0, StorageError("x").to_wire()))
    node.flushed(0, error=SkippedError("cancelled"))
    assert node.saves.known.given_up() == []
    node.flusher.answer("abandon", None, StorageError("i/o error"))
    assert node.saves.known.given_up() == [[10, 1, 0]]


def test_an_attempt_that_a_stuck_process_still_writes_is_given_up() -> None:
    node = Node(world_size=1)
    node.begin(0, 10)
    node.flusher.may_still_run = node.flusher.lost = True
    node.flushed(0, error=DeadlineError("stuck"))
    assert node.saves.known.given_up() == [[10, 1, 0]]


def test_the_names_of_what_was_given_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "MAX_GIVEN_UP", 3)
    node = Node()
    for step in range(10):
        node.saves.known.give_up(step, 0)
    assert [step for step, _, _ in node.saves.known.given_up()] == [7, 8, 9]
    node.save(20)
    node.saves.known.give_up(20, 0)
    assert len(node.saves.known.given_up()) == 3 and node.pool.holding(CommitId(20, 1, 0))
