"""Saves that fail, ranks and jobs that go, and what the others are told."""

from __future__ import annotations

import pytest
from agent_fakes import PACK_BYTES, FakePeer, Node, hello, part_of, states

from safehold.agent import flusher_client
from safehold.agent import messages as m
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    CommitError,
    ConfigurationError,
    DeadlineError,
    ManifestError,
    RankLostError,
    SkippedError,
    StateMismatchError,
    StorageError,
    StorageFullError,
    SupersededError,
)
from safehold.types import CommitId

MiB = 1 << 20


@pytest.fixture
def node() -> Node:
    return Node()


# -- failures ------------------------------------------------------------------------------------------------------------


def test_over_budget_fails_for_all_by_name() -> None:
    node = Node(budget_bytes=MiB)
    node.begin(0, 10, arena_bytes=2 * MiB)
    assert isinstance(node.peers[0].refusal(), ConfigurationError) and "budget" in str(node.peers[0].refusal())
    assert states(node, 1) == [("failed", 10)] and "budget" in str(node.failure(1))
    node.begin(1, 10)
    assert "budget" in str(node.peers[1].refusal()), "rank 1 need not stage, and knows why"
    node.save(20)


def test_too_small_a_budget_makes_a_ring() -> None:
    node = Node(world_size=1, budget_bytes=64 * MiB)
    size = 100 * MiB
    granted = node.reply_to(0, node.begin(0, 10, packs=[(0, size)], arena_bytes=size, compare=[("w", 0, 4)]))
    assert granted.arena_bytes == 64 * MiB
    [flush] = node.flusher.open("flush")
    assert flush["ring_bytes"] == 64 * MiB and flush["compare"] == [] and flush["staged_total"] == size
    node.stage(0, 10)
    node.flushed(0)
    node.record()
    node.plan()
    node.publish()
    assert states(node) == [("durable", 10)] and not node.pool.holding(CommitId(10, 1, 0))


@pytest.mark.parametrize("when", ["before", "begun", "staged by one", "flushed by one"])
def test_a_rank_that_goes_before_it_staged_ends_the_save_for_all(node: Node, when: str) -> None:
    if when != "before":
        node.begin(1, 10)
    node.begin(0, 10)
    if when in ("staged by one", "flushed by one"):
        node.stage(0, 10)
    if when == "flushed by one":
        node.flushed(0)
    node.leave(1)
    assert isinstance(node.failure(0), RankLostError) and "rank 1" in str(node.failure(0))
    for call in node.flusher.open("flush"):
        node.flushed(call["rank"], error=SkippedError("cancelled"))
    assert node.flusher.done("abandon") and node.saves.num_open == 0
    assert not any(arena.busy for arena in node.pool._arenas.values())


def test_a_rank_that_goes_after_it_staged_is_not_needed(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
    node.leave(1)
    for rank in (0, 1):
        node.flushed(rank)
    node.record()
    node.leave(0)
    node.plan()
    node.publish()
    assert node.saves.known.steps == {10}


def test_a_rank_that_goes_while_its_memory_is_populated(node: Node) -> None:
    node.begin(0, 10, pump=False)
    node.leave(0)
    node.work.run_until(lambda: node.pool.of(0))
    assert not node.pool.of(0).busy and node.saves.num_open == 0


def test_a_rank_that_cannot_stage_ends_the_save_for_all(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
    node.send(1, m.StageFailed(-1, 10, 0, StateMismatchError("leaf x is bad").to_wire()))
    assert isinstance(node.failure(0), StateMismatchError) and node.failure(0).rank == 1
    node.stage(0, 10)  # it did not know yet
    assert len(node.peers[0].of(m.SaveFailed)) == 1


def test_a_rank_that_cannot_even_begin_ends_the_save_for_those_who_come_later(node: Node) -> None:
    node.send(0, m.StageFailed(-1, 10, 0, StateMismatchError("leaf x is bad").to_wire()))
    node.begin(1, 10)
    assert "leaf x" in str(node.failure(1))
    node.flushed(1, error=SkippedError("cancelled"))
    assert node.saves.num_open == 0


@pytest.mark.parametrize("stage", ["flush", "record", "plan"])
def test_storage_that_fails_ends_the_save_by_name(node: Node, stage: str) -> None:
    error = StorageFullError("no space", path="/x")
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
    node.flushed(0, error=error if stage == "flush" else None)
    node.flushed(1, error=SkippedError("cancelled") if stage == "flush" else None)
    if stage != "flush":
        node.record(error if stage == "record" else None)
    node.work.run_until(lambda: node.flusher.open("plan"))
    node.flusher.answer("plan", None, error if stage == "plan" else None)
    for rank in (0, 1):
        assert isinstance(node.failure(rank), StorageFullError) and node.failure(rank).path == "/x"
    assert node.flusher.done("abandon") and not node.flusher.open("publish")
    for rank in (0, 1):
        node.begin(rank, 20)
        node.stage(rank, 20)
        node.flushed(rank)
    node.record()
    if stage == "plan":
        node.plan()
    node.publish()
    assert states(node)[-1] == ("durable", 20)


def test_late_news_of_a_save_does_not_touch_an_arena_that_another_uses(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    node.work.run_until(lambda: node.flusher.open("publish"))
    node.tick(60.0)  # the answer is late
    assert states(node) == [("failed", 10)]
    for rank in (0, 1):
        node.begin(rank, 20)
    node.flusher.answer("publish")
    assert states(node)[-1] == ("durable", 10), "the checkpoint exists after all"
    assert not node.pool.holding(CommitId(10, 1, 0)), "its arenas are being written by step 20"


def test_ranks_that_differ_are_named(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
    node.flushed(0, compare={"w": 1})
    node.flushed(1, compare={"w": 2})
    assert isinstance(node.failure(0), StateMismatchError) and "'w'" in str(node.failure(0))
    assert "rank 1" in str(node.failure(0))
    assert not node.flusher.done("record")


def test_parts_that_contradict_each_other_fail_the_plan(node: Node) -> None:
    node.begin(0, 10, part=part_of(0, 2))
    node.begin(1, 10, part=part_of(0, 2))  # rank 1 comes with rank 0's
    for rank in (0, 1):
        node.stage(rank, 10)
    node.work.run_until(lambda: states(node))
    assert isinstance(node.failure(0), CheckpointError) and node.failure(0).step == 10


def test_a_part_that_is_garbage_fails_the_plan(node: Node) -> None:
    node.begin(0, 10, part=b"garbage")
    node.begin(1, 10)
    node.work.run_until(lambda: states(node))
    assert isinstance(node.failure(0), ManifestError)


@pytest.mark.parametrize(
    ("ranks_begun", "ranks_staged", "wait_s", "words"),
    [
        ([0], [], 10.0, "rank 1 had not begun"),
        ([0, 1], [0], 20.0, "rank 1 had not staged"),
        ([0, 1], [0, 1], 60.0, "host"),  # its own time, and that of its answer
    ],
)
def test_whoever_is_late_is_named(node: Node, ranks_begun, ranks_staged, wait_s: float, words: str) -> None:
    for rank in ranks_begun:
        node.begin(rank, 10)
    for rank in ranks_staged:
        node.stage(rank, 10)
    node.tick(wait_s - 0.1)
    assert states(node) == []
    assert node.session.next_deadline() is not None
    node.tick(0.2)
    assert isinstance(node.failure(0), DeadlineError) and words in str(node.failure(0))


def test_a_stuck_process_keeps_its_arena_and_others_do_not() -> None:
    node = Node(budget_bytes=MiB)
    for rank in (0, 1):
        node.begin(rank, 10)
    first, second = node.pool.of(0), node.pool.of(1)
    node.flusher.may_still_run = True
    node.flushed(0, error=DeadlineError("stuck"))
    node.flusher.may_still_run = False
    node.flusher.abandoned = [object()]  # an older one is still there: no reason to lose more
    node.flushed(1, error=StorageError("another reason"))
    assert node.pool.of(0) is None and node.pool.of(1) is second and first.fd == -1
    assert node.pool.total_bytes == 2 * PACK_BYTES
    assert node.flusher.forgotten == [first.arena_id]


# -- mistakes of the agent itself ------------------------------------------------------------------------------------------


def broken(*args: object, **more: object) -> None:
    raise ZeroDivisionError("a mistake")


def answered(node: Node, operation: str, value: object = None) -> None:
    """As the flusher's client does it: what fails in the callback comes back to it as an error."""
    [(_, _, callback)] = [call for call in node.flusher.calls if call[0] == operation]
    node.flusher.calls = [call for call in node.flusher.calls if call[2] is not callback]
    flusher_client._end(flusher_client._Call(operation, 0.0, callback, 1.0), value, None)


def test_a_mistake_after_the_commit_hides_it_from_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    node.work.run_until(lambda: node.flusher.open("publish"))
    for rank in (0, 1):
        node.begin(rank, 20, pump=False)
    monkeypatch.setattr(node.pool, "hold", broken)
    answered(node, "publish")
    assert states(node) == states(node, 1) == [("durable", 10)]
    assert node.saves.known.acknowledged() == [[10, 1, 0]] and node.saves.known.given_up() == []
    assert len(node.flusher.open("retire")) == 1
    assert len(node.flusher.open("flush")) == 2, "the next save is let in"


@pytest.mark.parametrize("operation", ["flush", "record"])
def test_a_mistake_before_the_commit_fails_the_save(
    operation: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node(world_size=1)
    node.begin(0, 10)
    node.stage(0, 10)
    timings = {"allocate_s": 0.1, "write_s": 0.2, "sync_s": 0.3}
    done = {"packs": [{"rank": 0}], "compare": {}, "timings": timings}
    if operation == "flush":
        monkeypatch.setattr(node.saves, "_maybe_record", broken)
        answered(node, "flush", done)
    else:
        node.flushed(0)
        answered(node, "record", {})  # and not what it should be
    assert states(node) == [("failed", 10)] and f"{operation} was done, and the agent failed" in str(node.failure(0))
    assert node.lead.num_open == 0 and "Traceback" in capfd.readouterr().err


# -- life of a session -----------------------------------------------------------------------------------------------------


def test_superseded_while_blocked_everybody_is_told_at_once(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
    node.begin(0, 20, pump=False)
    node.send(0, m.RestoreAsk(7, None))
    node.session.end(2)
    refused = node.peers[0].of(m.Refused)
    assert len(refused) == 2 and all(reply.error["class"] == "SupersededError" for reply in refused)
    assert node.peers[0].last(m.Superseded).incarnation == 2
    assert isinstance(node.failure(1), SupersededError) and node.lead.num_open == 0
    assert isinstance(node.send(0, m.Register(8, [])), SupersededError)
    node.session.end(3)
    assert len(node.peers[0].of(m.Superseded)) == 1


def test_superseded_in_the_middle_of_a_publish_leaves_the_files(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    node.work.run_until(lambda: node.flusher.open("publish"))
    node.session.end(2)
    assert states(node) == [("failed", 10)] and not node.flusher.done("abandon")


def test_retention_finds_out_that_somebody_else_owns_the_run(node: Node) -> None:
    node.save(10)
    node.flusher.answer("retire", None, SupersededError("newer"))
    assert node.session.ended_by == 2 and isinstance(node.send(0, m.Register(8, [])), SupersededError)


def test_trouble_with_retention_is_said(node: Node) -> None:
    node.save(10)
    node.flusher.answer("retire", None, StorageError("read-only"))
    node.save(20)
    node.flusher.answer("retire", {"uncommitted": [], "problem": "step 10 is not whole"})
    texts = [note.text for note in node.peers[1].of(m.Note)]
    assert "read-only" in texts[0] and "step 10 is not whole" in texts[1]


def test_settling_finishes_what_all_have_staged_and_gives_up_the_rest(node: Node) -> None:
    settled: list[int] = []
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
    node.begin(0, 20, pump=False)
    node.session.settle(lambda: settled.append(1), 30.0)
    node.session.settle(lambda: settled.append(2), 30.0)
    assert not settled
    for rank in (0, 1):
        node.flushed(rank)
    node.record()
    node.plan()
    node.publish()
    assert settled == [1, 2] and sorted(states(node)) == [("durable", 10), ("failed", 20)]


def test_settling_ends_at_its_deadline(node: Node) -> None:
    settled: list[int] = []
    for rank in (0, 1):
        node.begin(rank, 10)
        node.stage(rank, 10)
    node.session.settle(lambda: settled.append(1), 5.0)
    node.tick(5.1)
    assert settled == [1] and states(node) == [("failed", 10)]


def test_a_session_that_nobody_took_over_from_saves_again(node: Node) -> None:
    node.save(10)
    node.session.settle(lambda: None, 5.0)
    node.begin(0, 20)
    assert "settled" in str(node.failure(0))
    for call in node.flusher.open("flush"):
        node.flushed(call["rank"], error=SkippedError("cancelled"))
    node.session.resume()
    node.flusher.log.clear()
    node.save(30)
    assert states(node)[-1] == ("durable", 30)
    node.begin(0, 10, 5)
    assert "committed already" in str(node.peers[0].refusal())


def test_drained_when_nothing_is_in_flight(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
    idle: list[int] = []
    node.session.head.when_idle(lambda: idle.append(1))
    assert not idle
    node.send(0, m.StageFailed(-1, 10, 0, CommitError("no").to_wire()))
    assert idle == [1]
    node.session.head.when_idle(lambda: idle.append(2))
    assert idle == [1, 2]


def test_a_rank_that_comes_back_with_a_newer_incarnation_brings_it(node: Node) -> None:
    node.peers[1] = FakePeer(1)
    node.session.attach(node.peers[1], hello(1, node.world, incarnation=5))
    assert node.session.incarnation == 5 and node.session.restores is not None
    node.flusher.answer("known", {"steps": [], "commits": [], "left": []})
    node.save(10)
    assert node.flusher.done("publish")[0]["commit"] == [10, 5, 0]


def test_old_connections_and_strangers_are_refused(node: Node) -> None:
    old = node.peers[0]
    node.session.attach(FakePeer(0), hello(0, node.world))
    assert isinstance(node.send(0, m.Register(8, [])), AgentUnavailableError)
    node.session.detach(0, old, orderly=True)
    assert 0 in node.session.peers
    for stranger in (hello(2, node.world), hello(0, m.World("token", 3, [0, 0, 0], ["host"]))):
        with pytest.raises(ConfigurationError, match="does not belong"):
            node.session.attach(FakePeer(0), stranger)
    assert isinstance(node.send(1, m.JoinRun(9, "run", 4)), ConfigurationError)


def test_contradicting_leaves_stay_unsettled_and_are_no_error(node: Node) -> None:
    node.send(0, m.Register(8, [("a", "float32", [4], "torch"), ("b", "float32", [4], "torch")]))
    assert not node.peers[0].of(m.Settled)
    node.send(1, m.Register(8, [("a", "float32", [4], "torch"), ("b", "float32", [5], "torch")]))
    for peer in node.peers:
        assert "'b'" not in str(peer.last(m.Settled).settlement) and "'a'" in str(peer.last(m.Settled).settlement)


def test_prepare_gives_an_arena_or_says_why_not() -> None:
    node = Node(world_size=1, budget_bytes=16 * MiB)
    node.send(0, m.Prepare(8, 5 * MiB))
    node.work.run_until(lambda: node.reply_to(0, 8))
    assert node.reply_to(0, 8).arena_bytes == 5 * MiB
    node.send(0, m.Prepare(9, 8 * MiB))
    node.work.run_until(lambda: node.reply_to(0, 9))
    assert node.reply_to(0, 9).arena_id > node.reply_to(0, 8).arena_id
    node.session.close()
