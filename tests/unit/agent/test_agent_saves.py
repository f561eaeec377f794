"""Saves of a node and the lead beside them, with the flusher and the trainers in the test's hands."""

from __future__ import annotations

import pytest
from agent_fakes import PACK_BYTES, FakePeer, Node, hello, part_of, states

from safehold.agent import messages as m
from safehold.agent.parts import KEPT, PartStore
from safehold.errors import (
    CommitError,
    SkippedError,
)
from safehold.format.plan import digest as digest_of
from safehold.types import CommitId

MiB = 1 << 20


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_save_from_begin_to_durable(node: Node) -> None:
    grants = [node.begin(rank, 10, metrics={"loss": 0.5}, final=True) for rank in (0, 1)]
    for rank, grant in enumerate(grants):
        reply = node.reply_to(rank, grant)
        assert isinstance(reply, m.Granted) and reply.arena_bytes == PACK_BYTES
    assert [call["rank"] for call in node.flusher.open("flush")] == [0, 1]
    node.stage(0, 10, objects={"a": b"1"})
    node.flushed(1)
    node.flushed(0)
    assert not node.flusher.open("record")
    node.stage(1, 10, objects={"a": b"2"})
    [record] = node.flusher.open("record")
    assert record["objects"] == {0: {"a": b"1"}, 1: {"a": b"2"}} and record["commit"] == [10, 1, 0]
    node.plan()
    node.record()
    [publish] = node.flusher.open("publish")
    assert publish["metrics"] == {"loss": 0.5} and publish["final"] and publish["world_size"] == 2
    assert states(node) == []
    node.publish()
    assert states(node, 0) == states(node, 1) == [("durable", 10)]
    figures = node.peers[0].last(m.Durable).figures
    assert figures["bytes"] == 2 * PACK_BYTES and figures["write_s"] == 0.2
    assert node.flusher.done("retire")[0]["commit"] == [10, 1, 0]
    assert sorted(arena.rank for arena in node.pool.holding(CommitId(10, 1, 0))) == [0, 1]
    assert node.saves.num_open == 0 and node.lead.num_open == 0
    assert node.flusher.done("sweep") == [{"incarnation": 1}], "a save that begins meanwhile is none of its business"


def test_known_parts_are_planned_once(node: Node) -> None:
    for step in range(1, 5):
        node.save(step)
    assert len(node.flusher.done("plan")) == 1
    assert states(node) == [("durable", step) for step in range(1, 5)]


def test_a_part_that_is_not_known_is_asked_for(node: Node) -> None:
    part = part_of(0, 2)
    wanted = node.begin(0, 10, part=b"", part_digest=digest_of(part))
    assert isinstance(node.reply_to(0, wanted), m.PartWanted)
    assert node.saves.num_open == 0, "nothing was begun"
    assert isinstance(node.reply_to(0, node.begin(0, 10, part=part)), m.Granted)


def test_layouts_that_change_at_every_save_do_not_fill_memory(node: Node) -> None:
    for step in range(1, 40):
        node.begin(0, step, part=part_of(0, 2, f"w{step}"))
        node.begin(1, step, part=part_of(1, 2, f"w{step}"))
        for rank in (0, 1):
            node.stage(rank, step, objects={"a": bytes(1000)})
            node.flushed(rank)
        node.record()
        node.plan()
        node.publish()
    assert all(len(kept) <= KEPT for kept in node.session.parts._by_rank.values())
    assert not any(save.ranks for save in node.saves._saves.values()), "objects of saves that are over are kept"
    for step in range(100, 300):
        node.save(step)
    assert len(node.saves._saves) <= 70 and len(node.lead._plans) <= 64


def test_the_store_of_parts_keeps_what_was_used_last() -> None:
    store = PartStore()
    for number in range(KEPT + 3):
        assert store.use(0, f"d{number}", b"x")
        assert store.use(0, "d0", b"")
    assert store.get(0, "d0") == b"x" and store.get(0, "d1") is None and store.get(1, "d0") is None
    assert not store.use(0, "d1", b"")
    for number in range(5):
        store.use(1, f"large{number}", bytes(5 * MiB))
    assert [store.get(1, f"large{number}") is not None for number in range(5)] == [False, False, False, True, True]


# -- policies ------------------------------------------------------------------------------------------------------------


def test_wait_lets_a_save_in_when_the_one_before_is_over(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
    first = node.begin(0, 20, pump=False)
    assert node.reply_to(0, first) is None and node.saves.num_open == 2
    for rank in (0, 1):
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    assert node.reply_to(0, first) is None
    second = node.begin(1, 20, pump=False)
    node.publish()
    assert isinstance(node.reply_to(0, first), m.Granted) and isinstance(node.reply_to(1, second), m.Granted)


def test_several_that_wait_go_in_one_after_the_other(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
    waiting = {step: [node.begin(rank, step, pump=False) for rank in (0, 1)] for step in (20, 30)}
    for rank in (0, 1):
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    node.publish()
    assert isinstance(node.reply_to(0, waiting[20][0]), m.Granted) and node.reply_to(0, waiting[30][0]) is None
    node.send(0, m.StageFailed(-1, 20, 0, CommitError("no").to_wire()))
    for rank in (0, 1):
        node.flushed(rank, error=SkippedError("cancelled"))
    assert isinstance(node.reply_to(0, waiting[30][0]), m.Granted)


def test_a_rank_that_goes_while_it_waits_does_not_keep_others_out() -> None:
    node = Node(world_size=1)
    node.begin(0, 10)
    node.begin(0, 20, pump=False)
    node.leave(0)
    node.flushed(0, error=SkippedError("cancelled"))
    assert node.saves.num_open == 0
    node.peers[0] = FakePeer(0)
    node.session.attach(node.peers[0], hello(0, node.world, incarnation=1))
    assert isinstance(node.reply_to(0, node.begin(0, 30)), m.Granted)


def test_skip_decides_once_for_all_ranks() -> None:
    node = Node(overlap_policy="skip")
    for rank in (0, 1):
        node.begin(rank, 10)
    skipped = node.begin(0, 20)
    assert isinstance(node.reply_to(0, skipped), m.Skipped)
    for rank in (0, 1):
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    node.publish()
    assert isinstance(node.reply_to(1, node.begin(1, 20)), m.Skipped), "the disk is idle now, but rank 0 was skipped"
    node.save(30)
    assert states(node) == [("durable", 10), ("durable", 30)]


def test_skip_never_skips_the_final_save() -> None:
    node = Node(world_size=1, overlap_policy="skip")
    node.begin(0, 10)
    final = node.begin(0, 20, final=True, pump=False)
    node.stage(0, 10)
    node.flushed(0)
    node.record()
    node.plan()
    node.publish()
    assert isinstance(node.reply_to(0, final), m.Granted)


def test_replace_gives_up_the_save_before() -> None:
    node = Node(overlap_policy="replace")
    for rank in (0, 1):
        node.begin(rank, 10)
    granted = node.begin(0, 20, pump=False)
    assert states(node, 1) == [("failed", 10)]
    assert isinstance(node.failure(1), SkippedError) and "step 20" in str(node.failure(1))
    assert node.flusher.done("cancel")[0]["commit"] == [10, 1, 0]
    assert node.reply_to(0, granted) is None, "its arenas are still being read"
    for rank in (0, 1):
        node.flushed(rank, error=SkippedError("cancelled"))
    assert isinstance(node.reply_to(0, granted), m.Granted)
    assert node.flusher.done("abandon")[0]["commit"] == [10, 1, 0]


def test_replace_lets_a_save_that_is_all_written_finish() -> None:
    node = Node(world_size=1, overlap_policy="replace")
    node.begin(0, 10)
    node.stage(0, 10)
    node.flushed(0)
    granted = node.begin(0, 20, pump=False)
    node.record()
    node.plan()
    node.publish()
    assert states(node) == [("durable", 10)] and isinstance(node.reply_to(0, granted), m.Granted)


def test_replace_of_one_that_has_not_begun_either() -> None:
    node = Node(world_size=1, overlap_policy="replace")
    node.begin(0, 10)
    node.stage(0, 10)
    node.flushed(0)  # recording: not replaced any more
    waiting = node.begin(0, 20, pump=False)
    last = node.begin(0, 30, pump=False)
    assert isinstance(node.peers[0].refusal(), SkippedError) and node.reply_to(0, waiting) is not None
    node.record()
    node.plan()
    node.publish()
    assert isinstance(node.reply_to(0, last), m.Granted)


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_a_committed_step_is_saved_again_only_if_asked(node: Node) -> None:
    node.save(10)
    node.begin(0, 10, 1)
    assert "committed already" in str(node.peers[0].refusal()) and "overwrite" in str(node.peers[0].refusal())
    assert isinstance(node.reply_to(0, node.begin(0, 10, 2, overwrite=True)), m.Granted)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"packs": [(0, 4096), (8192, 4096)]}, "end to end"),
        ({"packs": [(0, 5000)]}, "end to end"),
        ({"packs": [(0, -4096)]}, "end to end"),
        ({"arena_bytes": 4096}, "does not fit"),
        ({"arena_bytes": 1 << 60}, "does not fit"),
        ({"compare": [("w", 8000, 1000)]}, "does not fit"),
        ({"compare": [("w", -8, 8)]}, "does not fit"),
        ({"step": -1}, "no step -1"),
        ({"attempt": -1}, "attempt -1"),
        ({"step": 1 << 50}, "no step"),
    ],
)
def test_requests_that_make_no_sense_change_nothing(node: Node, fields: dict, word: str) -> None:
    step = fields.pop("step", 10)
    node.begin(0, step, **fields)
    assert word in str(node.peers[0].refusal())
    assert node.saves.num_open == 0 and node.lead.num_open == 0 and not node.flusher.calls
    node.save(11)
    assert states(node) == [("durable", 11)]


def test_begun_twice_is_refused_and_the_first_goes_on(node: Node) -> None:
    for rank in (0, 1):
        node.begin(rank, 10)
    node.begin(0, 10)
    assert "before" in str(node.peers[0].refusal())
    node.begin(0, 20, pump=False)
    node.begin(0, 20)
    assert len(node.peers[0].of(m.Refused)) == 2
    for rank in (0, 1):
        node.stage(rank, 10)
        node.flushed(rank)
    node.record()
    node.plan()
    node.publish()
    assert states(node) == [("durable", 10)]


def test_staged_out_of_the_blue_is_ignored(node: Node) -> None:
    node.stage(0, 10)
    assert isinstance(node.peers[0].replies[-1], m.Done) and node.lead.num_open == 0
