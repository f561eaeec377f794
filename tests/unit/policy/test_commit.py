"""The commit protocol, story by story. Any order of events is in tests/property/test_policy_commit.py."""

from __future__ import annotations

import pytest

from safehold.errors import (
    CommitError,
    CoverageError,
    DeadlineError,
    RankLostError,
    SkippedError,
    StorageError,
    StorageFullError,
    SupersededError,
)
from safehold.format.records import NodeRef
from safehold.policy.commit import (
    Abandon,
    Begun,
    BuildPlan,
    Cancel,
    CommitMachine,
    Committed,
    Deadlines,
    NodeFailed,
    NodeGone,
    NodeRecorded,
    Phase,
    PlanFailed,
    PlanReady,
    Publish,
    Published,
    PublishFailed,
    RankBack,
    RankFailed,
    RankGone,
    Settle,
    Settled,
    Staged,
    Superseded,
    Tick,
)
from safehold.types import CommitId

NODES = (0, 0, 1, 1)
RANKS = range(4)
HEX = {node: f"{node}" * 64 for node in (0, 1)}
PLAN = "f" * 64
DEADLINES = Deadlines(begin_s=10, stage_s=20, flush_s=40, plan_s=5, publish_s=6)


def machine(**options):
    return CommitMachine(4, NODES, 3, DEADLINES, node_names={0: "host-a", 1: "host-b"}, **options)


def feed(m, *events, now=0.0):
    return [action for event in events for action in m.handle(event, now)]


def begun(*ranks, step=10, attempt=0):
    return [Begun(step, attempt, rank, f"d{rank}") for rank in ranks or RANKS]


def staged(*ranks, step=10, attempt=0):
    return [Staged(step, attempt, rank) for rank in ranks or RANKS]


def recorded(*nodes, step=10, attempt=0):
    return [
        NodeRecorded(step, attempt, node, 100 + node, HEX[node], {r: f"d{r}" for r in RANKS if NODES[r] == node})
        for node in nodes or (0, 1)
    ]


BUILD = BuildPlan(10, 0, {rank: f"d{rank}" for rank in RANKS})
PUBLISH = Publish(
    10, 0, PLAN, 77, tuple(NodeRef(node=node, size_bytes=100 + node, blake3=HEX[node]) for node in (0, 1))
)
READY = PlanReady(10, 0, PLAN, 77)


def abandoned(actions, error, **fields):
    (action,) = actions
    assert isinstance(action, Abandon)
    assert type(action.error) is error, action.error
    for name, value in fields.items():
        assert getattr(action.error, name) == value
    return action


def to_publishing(m):
    assert feed(m, *begun()) == [BUILD]
    assert feed(m, *staged(), READY, *recorded()) == [PUBLISH]


def test_a_save_from_begin_to_commit():
    m = machine()
    assert feed(m, *begun(0, 1, 2)) == []
    assert [status.phase for status in m.status()] == [Phase.BEGINNING]
    assert m.status()[0].waiting_for == "rank 3"
    assert feed(m, *begun(3)) == [BUILD]
    assert feed(m, *staged()) == []
    assert feed(m, READY) == []
    assert feed(m, *recorded(0)) == []
    assert m.status()[0].phase is Phase.FLUSHING and m.status()[0].waiting_for == "node host-b"
    assert feed(m, *recorded(1)) == [PUBLISH]
    assert m.live() == {CommitId(10, 3, 0)}
    assert feed(m, Published(10, 0)) == [Committed(10, 0)]
    assert m.live() == set() and m.next_deadline() is None and m.status() == []


def test_the_plan_may_be_ready_last():
    m = machine()
    feed(m, *begun(), *staged())
    assert feed(m, *recorded()) == []
    assert m.status()[0].phase is Phase.PLANNING
    assert feed(m, READY) == [PUBLISH]


def test_a_nodes_record_says_that_its_ranks_began_and_staged():
    m = machine()
    assert feed(m, *recorded(1), *begun(0)) == []
    assert feed(m, *begun(1)) == [BUILD]
    assert feed(m, *recorded(0), READY) == [PUBLISH]


def test_everything_twice_changes_nothing():
    m = machine()
    twice = [event for event in [*begun(), *staged(), READY, *recorded(), Published(10, 0)] for _ in (1, 2)]
    assert [a for a in feed(m, *twice) if getattr(a, "to_node", None) is None] == [BUILD, PUBLISH, Committed(10, 0)]


def test_saves_overlap_and_stand_alone():
    m = machine()
    feed(m, *begun(), *staged())
    assert feed(m, *begun(step=20))[0].step == 20
    feed(m, *staged(step=20), *recorded(step=20))
    assert feed(m, PlanReady(20, 0, PLAN, 77))[0].step == 20
    assert feed(m, RankFailed(10, 0, 1, StorageError("x")))[0].step == 10
    assert feed(m, Published(20, 0)) == [Committed(20, 0)]
    assert feed(m, *begun(attempt=1)) == [BuildPlan(10, 1, BUILD.part_digests)]


# ---- failures ----


def test_a_rank_that_fails_fails_the_save_for_all_at_once():
    m = machine()
    feed(m, *begun(0, 2))
    error = StorageFullError("no space", path="/data")
    abandoned(feed(m, RankFailed(10, 0, 1, error)), StorageFullError, rank=1, step=10, path="/data", message="no space")
    # The others are told when they come, each on its own node.
    late = feed(m, Begun(10, 0, 3, "d3"))
    assert [(action.to_node, type(action.error)) for action in late] == [(1, StorageFullError)]
    assert m.next_deadline() is None


def test_a_failure_before_anybody_began_is_told_to_who_begins():
    m = machine()
    abandoned(feed(m, RankFailed(10, 0, 1, CommitError("cannot"))), CommitError, rank=1)
    assert all(isinstance(action, Abandon) for action in feed(m, *begun(0, 2, 3)))


def test_the_first_cause_is_told():
    m = machine()
    feed(m, *begun())
    first = feed(m, NodeFailed(10, 0, 1, StorageError("disk broke")))
    abandoned(first, StorageError, node="host-b")
    again = feed(m, RankFailed(10, 0, 0, CommitError("because of that")))
    assert again[0].error is first[0].error and again[0].to_node == 0
    assert feed(m, RankGone(2), Tick(), PlanFailed(10, 0, CoverageError("late"))) == []


def test_a_plan_that_does_not_cover_fails_the_save():
    m = machine()
    feed(m, *begun())
    abandoned(feed(m, PlanFailed(10, 0, CoverageError("leaf x"))), CoverageError, step=10, message="leaf x")


def test_a_rank_that_goes_before_it_staged():
    m = machine()
    feed(m, *begun(), *staged(0, 1))
    action = abandoned(feed(m, RankGone(2)), RankLostError, rank=2, node="host-b")
    assert "rank 2" in str(action.error)


def test_a_rank_that_goes_after_it_staged_is_not_missed():
    m = machine()
    feed(m, *begun(), *staged(2))
    assert feed(m, RankGone(2)) == []
    assert feed(m, *staged(0, 1, 3), READY, *(RankGone(r) for r in RANKS)) == []
    assert feed(m, *recorded()) == [PUBLISH]


def test_a_save_begun_without_somebody_fails_at_once():
    m = machine()
    feed(m, RankGone(3))
    abandoned(feed(m, *begun(0)), RankLostError, rank=3)
    # Unless that rank is back.
    assert feed(m, *begun(3, step=20), *begun(0, 1, 2, step=20))[0].step == 20


def test_a_rank_that_is_back_is_waited_for_again():
    m = machine()
    feed(m, RankGone(3), RankBack(3))
    assert feed(m, *begun(0)) == []
    assert feed(m, *begun(1, 2, 3))[0].step == 10
    # What it had not staged when it went is lost all the same.
    abandoned(feed(m, RankGone(3)), RankLostError, rank=3)
    assert feed(m, RankBack(3)) == []


def test_a_node_that_goes_before_it_recorded():
    m = machine()
    feed(m, *begun(), *staged(), *recorded(0))
    action = abandoned(feed(m, NodeGone(1)), RankLostError, node="host-b")
    assert "host-b" in str(action.error)


def test_a_node_that_goes_after_it_recorded_is_not_missed():
    m = machine()
    feed(m, *begun(), *staged(), *recorded(1))
    assert feed(m, NodeGone(1), READY) == []
    assert feed(m, *recorded(0)) == [PUBLISH]


@pytest.mark.parametrize(
    ("events", "after_s", "words"),
    [
        (begun(0, 2), 10, "ranks 1, 3 had not begun the save"),
        ([*begun(), *staged(0, 1, 2)], 20, "rank 3 had not staged"),
        ([*begun(), *staged(), READY, *recorded(0)], 40, "node host-b had not written its share"),
        ([*begun(), *staged(), *recorded()], 5, "node host-a had not stored the plan"),
        ([*begun(), *staged(), *recorded(), READY], 6, "node host-a had not published it"),
    ],
)
def test_every_wait_has_an_end_that_names_who_is_late(events, after_s, words):
    m = machine()
    feed(m, *events, now=100.0)
    assert m.next_deadline() == 100.0 + after_s
    assert m.handle(Tick(), 100.0 + after_s - 0.01) == []
    action = abandoned(m.handle(Tick(), 100.0 + after_s), DeadlineError, step=10)
    assert words in str(action.error) and f"{after_s}.0 s" in str(action.error)
    assert action.in_doubt == ("published" in words)


def test_word_that_comes_with_the_deadline_still_counts():
    m = machine()
    feed(m, *begun(0, 1, 2), now=0.0)
    assert m.handle(begun(3)[0], 10.0) == [BUILD]


def test_a_rank_that_changes_its_part_within_a_save_is_refused():
    m = machine()
    feed(m, *begun())
    abandoned(feed(m, Begun(10, 0, 1, "another")), CommitError, rank=1)
    m = machine()
    feed(m, *begun(), *staged())
    wrong = NodeRecorded(10, 0, 0, 100, HEX[0], {0: "d0", 1: "another"})
    abandoned(feed(m, wrong), CommitError, rank=1)


@pytest.mark.parametrize("parts", [{}, {0: "d0"}, {0: "d0", 1: "d1", 2: "d2"}, {2: "d2", 3: "d3"}])
def test_a_record_that_is_not_about_the_nodes_ranks_is_refused(parts):
    m = machine()
    feed(m, *begun(), *staged())
    abandoned(feed(m, NodeRecorded(10, 0, 0, 100, HEX[0], parts)), CommitError, node="host-a")


def test_two_different_records_of_a_node_are_refused():
    m = machine()
    feed(m, *begun(), *staged(), *recorded(0))
    other = NodeRecorded(10, 0, 0, 101, HEX[0], {0: "d0", 1: "d1"})
    abandoned(feed(m, other), CommitError, node="host-a")


# ---- publishing ----


def test_a_publish_that_failed_is_in_doubt_and_stays_live():
    m = machine()
    to_publishing(m)
    action = abandoned(feed(m, PublishFailed(10, 0, StorageError("timed out"))), StorageError)
    assert action.in_doubt and m.live() == {CommitId(10, 3, 0)}
    assert "whether it is committed is not known" in str(action.error) and "timed out" in str(action.error)
    assert feed(m, Published(10, 0)) == [Committed(10, 0, late=True)]
    assert m.live() == set()


def test_a_publish_that_certainly_failed_is_over():
    m = machine()
    to_publishing(m)
    action = abandoned(feed(m, PublishFailed(10, 0, StorageError("refused"), certain=True)), StorageError)
    assert not action.in_doubt and m.live() == set() and "not known" not in str(action.error)
    assert feed(m, Published(10, 0)) == []


def test_doubt_can_be_cleared():
    m = machine()
    to_publishing(m)
    feed(m, PublishFailed(10, 0, StorageError("timed out")))
    assert feed(m, PublishFailed(10, 0, StorageError("never arrived"), certain=True)) == []
    assert m.live() == set()


def test_once_publishing_nothing_else_stops_it():
    m = machine()
    to_publishing(m)
    wrong = NodeRecorded(10, 0, 0, 999, HEX[0], {0: "x", 1: "y"})
    assert feed(m, RankFailed(10, 0, 1, CommitError("late")), RankGone(0), NodeGone(1), wrong) == []
    assert feed(m, Published(10, 0)) == [Committed(10, 0)]


def test_on_node_local_disks_every_node_publishes():
    m = machine(every_node_publishes=True)
    to_publishing(m)
    assert feed(m, Published(10, 0, node=0)) == []
    assert m.status()[0].waiting_for == "node host-b"
    assert feed(m, Published(10, 0, node=1)) == [Committed(10, 0)]


def test_on_node_local_disks_a_lost_node_leaves_it_in_doubt():
    m = machine(every_node_publishes=True)
    to_publishing(m)
    feed(m, Published(10, 0, node=0))
    assert abandoned(feed(m, NodeGone(1)), RankLostError, node="host-b").in_doubt
    m = machine(every_node_publishes=True)
    feed(m, *begun(), *staged(), *recorded(1))
    assert not abandoned(feed(m, NodeGone(1)), RankLostError, node="host-b").in_doubt


def test_the_lead_can_give_a_save_up_until_it_is_publishing():
    m = machine()
    feed(m, *begun(0, 1))
    cancel = Cancel(10, 0, SkippedError("a rank had passed the announced step"))
    abandoned(feed(m, cancel), SkippedError, step=10)
    assert feed(m, cancel) == []
    assert [action.to_node for action in feed(m, *begun(2))] == [1]
    # Before anybody spoke of it, too: whoever begins it hears so.
    abandoned(feed(m, Cancel(20, 0, SkippedError("x"))), SkippedError)
    assert [action.to_node for action in feed(m, *begun(2, step=20))] == [1]
    m = machine()
    to_publishing(m)
    assert feed(m, cancel) == []
    assert feed(m, Published(10, 0), cancel) == [Committed(10, 0)]


# ---- the end of an incarnation ----


def test_a_newer_incarnation_ends_all_saves():
    m = machine()
    to_publishing(m)
    feed(m, *begun(step=20))
    actions = feed(m, Superseded(4))
    assert [(a.step, type(a.error), a.in_doubt) for a in actions] == [
        (10, SupersededError, True),
        (20, SupersededError, False),
    ]
    abandoned(feed(m, Begun(30, 0, 0, "d0")), SupersededError)
    # A manifest that became visible then is nothing: the newer incarnation does not list it.
    assert feed(m, Published(10, 0)) == []
    assert m.live() == {CommitId(10, 3, 0)}


def test_news_of_older_incarnations_are_no_news():
    m = machine()
    feed(m, *begun())
    assert feed(m, Superseded(3), Superseded(2)) == []


def test_settling_finishes_what_all_had_staged_and_abandons_the_rest():
    m = machine()
    feed(m, *begun(), *staged(), READY, *recorded(0))
    feed(m, *begun(step=20), *staged(0, step=20))
    feed(m, *begun(0, step=30))
    actions = feed(m, Settle(deadline=50.0))
    assert [action.step for action in actions] == [20, 30]
    assert "settled" in str(actions[0].error)
    abandoned(feed(m, Begun(40, 0, 0, "d0")), CommitError)
    assert m.next_deadline() == 40.0
    assert feed(m, *recorded(1)) == [PUBLISH]
    assert feed(m, Published(10, 0), Tick()) == [Committed(10, 0), Settled()]


def test_settling_has_an_end():
    m = machine()
    feed(m, *begun(), *staged())
    assert feed(m, Settle(deadline=3.0)) == []
    assert m.next_deadline() == 3.0
    actions = m.handle(Tick(), 3.0)
    assert isinstance(actions[0].error, DeadlineError) and actions[1:] == [Settled()]


def test_settling_ends_later_phases_in_time_too():
    m = machine()
    feed(m, *begun(), *staged(), READY)
    feed(m, Settle(deadline=3.0))
    assert feed(m, *recorded(), now=1.0) == [PUBLISH]
    assert m.next_deadline() == 3.0
    # The nearest end counts.
    feed(m, Settle(deadline=2.0), Settle(deadline=9.0), now=1.0)
    assert m.next_deadline() == 2.0


def test_settling_may_wait_for_news_that_is_under_way():
    m = machine()
    feed(m, *begun(), *staged(0, 1, 2))
    feed(m, *begun(step=20), *staged(0, step=20))
    assert feed(m, Settle(deadline=50.0, grace_s=2.0)) == []
    assert feed(m, *staged(3), now=1.0) == []
    action = m.handle(Tick(), 2.0)[0]
    assert action.step == 20 and type(action.error) is CommitError and "ranks 1-3 had not staged" in str(action.error)
    assert m.status()[0].deadline == 41.0


def test_settling_nothing_is_done_at_once():
    m = machine()
    assert feed(m, Settle(deadline=50.0)) == [Settled()]
    assert feed(m, Tick()) == []


# ---- what cannot be ----


@pytest.mark.parametrize(
    "event",
    [
        Begun(10, 0, 4, "d"),
        Begun(10, 0, -1, "d"),
        Begun(-1, 0, 0, "d"),
        Staged(10, -1, 0),
        RankGone(9),
        NodeGone(7),
        NodeRecorded(10, 0, 7, 1, "", {}),
        Published(10, 0, node=7),
        Begun(1 << 60, 0, 0, "d"),
    ],
)
def test_events_that_cannot_be_are_refused_and_change_nothing(event):
    m = machine()
    with pytest.raises(ValueError):
        m.handle(event, 0.0)
    assert m.status() == [] and m.next_deadline() is None


def test_answers_to_what_was_never_asked_are_ignored():
    m = machine()
    assert (
        feed(m, Published(10, 0), PublishFailed(10, 0, CommitError("x")), READY, PlanFailed(10, 0, CommitError("x")))
        == []
    )
    feed(m, *begun(0))
    assert feed(m, READY, PlanFailed(10, 0, CommitError("x")), Published(10, 0)) == []
    feed(m, *begun(1, 2, 3), *staged())
    assert feed(m, *recorded()) == []  # the early PlanReady answered no question
    assert m.status()[0].phase is Phase.PLANNING


def test_memory_is_bounded():
    m = CommitMachine(1, (0,), 1, DEADLINES)
    for step in range(5000):
        feed(m, Begun(step, 0, 0, "d"), RankFailed(step, 0, 0, CommitError("x")))
    assert len(m._closed) <= 4096
    m = CommitMachine(2, (0, 0), 1, DEADLINES)
    actions = feed(m, *(Begun(step, 0, 0, "d") for step in range(300)))
    assert len(m.status()) == 256 and len(actions) == 44


def test_a_machine_needs_a_node_for_each_rank():
    with pytest.raises(ValueError):
        CommitMachine(2, (0,), 1)
