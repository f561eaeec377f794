"""The commit machine under any order of events, duplicates, deaths and lateness."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from safehold.errors import CheckpointError, CommitError, StorageError
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

DEADLINES = Deadlines(begin_s=10, stage_s=20, flush_s=40, plan_s=15, publish_s=15)
keys = st.sampled_from([(10, 0), (10, 0), (10, 0), (10, 1), (20, 0)])
digests = st.sampled_from(["d"] * 5 + ["other"])


class Commits(RuleBasedStateMachine):
    """Throws events at the machine and keeps a plain record of what was said, to judge every action by."""

    @initialize(nodes=st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1, 1), (5, 3, 5)]), every=st.booleans())
    def start(self, nodes, every):
        self.nodes = nodes
        self.every = every
        self.machine = CommitMachine(len(nodes), nodes, 3, DEADLINES, every_node_publishes=every)
        self.now = 100.0
        self.said = defaultdict(set)  # key -> events
        self.begun = defaultdict(dict)
        self.staged = defaultdict(set)
        self.recorded = defaultdict(dict)
        self.sizes = defaultdict(lambda: defaultdict(set))
        self.settle_by = float("inf")
        self.built, self.publish, self.published = {}, {}, defaultdict(set)
        self.planned = set()
        self.verdict = {}
        self.certain = set()
        self.settled = 0
        self.settles = 0
        self.superseded = False
        self.gone = set()

    def feed(self, event):
        for action in self.machine.handle(event, self.now):
            self.judge(action, event)

    def judge(self, action, event):
        if isinstance(action, Settled):
            assert self.settles and not self.machine.status()
            self.settled += 1
            assert self.settled <= self.settles
            return
        key = (action.step, action.attempt)
        match action:
            case BuildPlan():
                assert key not in self.built and key not in self.verdict
                assert set(action.part_digests) == set(range(len(self.nodes)))
                assert all(digest in self.begun[key][rank] for rank, digest in action.part_digests.items())
                self.built[key] = dict(action.part_digests)
            case Publish():
                assert key not in self.publish and key not in self.verdict and not self.superseded
                assert [ref.node for ref in action.nodes] == sorted(set(self.nodes)) == sorted(self.recorded[key])
                # Every node recorded under the digests that the plan was built from.
                for node, seen in self.recorded[key].items():
                    mine = {rank: self.built[key][rank] for rank in range(len(self.nodes)) if self.nodes[rank] == node}
                    assert mine in seen
                assert key in self.planned
                # Nobody contradicted himself.
                assert all(len(seen) == 1 for seen in self.begun[key].values())
                assert all(len(seen) == 1 for seen in self.sizes[key].values())
                self.publish[key] = action
            case Committed(to_node=None):
                assert key in self.publish
                assert self.published[key] >= (set(self.nodes) if self.every else {self.nodes[0]})
                if action.late:
                    assert self.verdict[key].in_doubt and not self.superseded
                else:
                    assert key not in self.verdict
                self.verdict[key] = action
            case Abandon(to_node=None):
                assert key not in self.verdict
                assert isinstance(action.error, CheckpointError) and str(action.error)
                assert action.in_doubt == (key in self.publish and not getattr(event, "certain", False))
                self.verdict[key] = action
            case Committed() | Abandon():
                # Given again, to one node, the same.
                assert type(action) is type(self.verdict[key])
                assert (event.step, event.attempt) == key
                assert action.to_node == (event.node if hasattr(event, "node") else self.nodes[event.rank])

    def open(self, key):
        return any((status.step, status.attempt) == key for status in self.machine.status())

    def rank_of(self, number):
        return number % len(self.nodes)

    def node_of(self, number):
        return self.nodes[number % len(self.nodes)]

    # ---- what the world does ----

    @rule(key=keys, number=st.integers(0, 3), digest=digests)
    def begin(self, key, number, digest):
        rank = self.rank_of(number)
        self.begun[key].setdefault(rank, set()).add(digest)
        self.gone -= {("rank", rank), ("node", self.nodes[rank])}
        self.feed(Begun(*key, rank, digest))

    @rule(key=keys)
    def all_begin(self, key):
        for rank in range(len(self.nodes)):
            self.begin(key, rank, "d")

    @rule(key=keys, number=st.integers(0, 3))
    def stage(self, key, number):
        self.staged[key].add(self.rank_of(number))
        self.feed(Staged(*key, self.rank_of(number)))

    @rule(key=keys)
    def all_stage(self, key):
        for rank in range(len(self.nodes)):
            self.stage(key, rank)

    @rule(key=keys, number=st.integers(0, 3), digest=digests, size=st.sampled_from([7] * 5 + [8]))
    def record(self, key, number, digest, size):
        node = self.node_of(number)
        parts = {rank: digest for rank in range(len(self.nodes)) if self.nodes[rank] == node}
        self.recorded[key].setdefault(node, []).append(parts)
        for rank in parts:
            self.begun[key].setdefault(rank, set()).add(digest)
        self.sizes[key][node].add(size)
        self.gone -= {("node", node)}
        self.feed(NodeRecorded(*key, node, size, "a" * 64, parts))

    @rule(key=keys)
    def all_record(self, key):
        for number in range(len(self.nodes)):
            self.record(key, number, "d", 7)

    @rule(key=keys)
    def plan(self, key):
        if key in self.built:
            self.planned.add(key)
        self.feed(PlanReady(*key, "b" * 64, 9))

    @rule(key=keys)
    def plan_fails(self, key):
        self.feed(PlanFailed(*key, CommitError("no plan")))

    @rule(key=keys, number=st.integers(0, 3))
    def is_published(self, key, number):
        if key not in self.publish:
            self.feed(Published(*key, self.node_of(number)))
            assert key not in self.publish
            return
        if key in self.certain:
            return
        node = self.node_of(number) if self.every else None
        self.published[key].add(self.nodes[0] if node is None else node)
        self.feed(Published(*key, node))

    @rule(key=keys, certain=st.booleans())
    def publish_fails(self, key, certain):
        if certain and key in self.publish and not isinstance(self.verdict.get(key), Committed):
            self.certain.add(key)
        self.feed(PublishFailed(*key, StorageError("disk"), certain))

    @rule(key=keys, number=st.integers(0, 3), whole_node=st.booleans())
    def fail(self, key, number, whole_node):
        waiting = self.open(key) and key not in self.publish
        error = StorageError("disk full")
        event = (
            NodeFailed(*key, self.node_of(number), error)
            if whole_node
            else RankFailed(*key, self.rank_of(number), error)
        )
        if whole_node:
            self.gone -= {("node", self.node_of(number))}
        self.feed(event)
        if waiting:
            # The first cause is what is told, with the place filled in.
            told = self.verdict[key].error
            assert isinstance(told, StorageError) and told.message == "disk full" and told.step == key[0]
            assert (told.node if whole_node else told.rank) is not None

    @rule(key=keys)
    def cancel(self, key):
        self.feed(Cancel(*key, CommitError("given up")))
        assert key in self.publish or key in self.verdict

    def after_a_loss(self, event, is_lost):
        """Feeds a loss; what waits for the lost one is abandoned at once, all else goes on."""
        before = {(status.step, status.attempt): status.phase for status in self.machine.status()}
        self.feed(event)
        for key, phase in before.items():
            assert (key in self.verdict) == is_lost(key, phase), (key, phase)

    @rule(number=st.integers(0, 3))
    def rank_goes(self, number):
        rank = self.rank_of(number)
        self.gone.add(("rank", rank))

        def is_lost(key, phase):
            staged = rank in self.staged[key] or self.nodes[rank] in self.recorded[key]
            return phase in (Phase.BEGINNING, Phase.STAGING) and not staged

        self.after_a_loss(RankGone(rank), is_lost)

    @rule(number=st.integers(0, 3))
    def rank_is_back(self, number):
        rank = self.rank_of(number)
        self.gone -= {("rank", rank), ("node", self.nodes[rank])}
        self.after_a_loss(RankBack(rank), lambda key, phase: False)

    @rule(number=st.integers(0, 3))
    def node_goes(self, number):
        node = self.node_of(number)
        self.gone.add(("node", node))

        def is_lost(key, phase):
            publishes = self.every or node == self.nodes[0]
            return node not in self.recorded[key] or (publishes and node not in self.published[key])

        self.after_a_loss(NodeGone(node), is_lost)

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 30.0]))
    def tick(self, seconds):
        self.now += seconds
        self.feed(Tick())

    @precondition(lambda self: self.machine.next_deadline() is not None)
    @rule()
    def time_out(self):
        self.now = max(self.now, self.machine.next_deadline())
        before = len(self.machine.status())
        self.feed(Tick())
        assert len(self.machine.status()) < before

    @rule(incarnation=st.integers(2, 5))
    def supersede(self, incarnation):
        self.feed(Superseded(incarnation))
        if incarnation > 3:
            self.superseded = True
            assert not self.machine.status()

    @rule(seconds=st.sampled_from([0.0, 5.0, 100.0]), grace=st.sampled_from([0.0, 3.0]))
    def settle(self, seconds, grace):
        self.settles += 1
        self.settle_by = min(self.settle_by, self.now + seconds)
        self.feed(Settle(self.now + seconds, grace))
        for status in self.machine.status():
            assert status.phase is not Phase.BEGINNING
            assert status.phase is not Phase.STAGING or grace
            assert status.deadline <= self.now + seconds

    @rule(key=keys, first=st.integers(0, 4), last=st.integers(0, 5), gap=st.integers(0, 9))
    def go_well(self, key, first, last, gap):
        """Some of the way that a save takes when nothing is wrong, with one event left out."""
        one_by_one = [
            *(lambda r=r: self.begin(key, r, "d") for r in range(len(self.nodes))),
            *(lambda r=r: self.stage(key, r) for r in range(len(self.nodes))),
            lambda: self.plan(key),
            *(lambda r=r: self.record(key, r, "d", 7) for r in range(len(self.nodes))),
            *(lambda r=r: self.is_published(key, r) for r in range(len(self.nodes))),
        ]
        count = len(one_by_one)
        for place in range(first * count // 5, last * count // 5):
            if place != gap * count // 5:
                one_by_one[place]()

    # ---- what always holds ----

    @invariant()
    def waits_end(self):
        if not hasattr(self, "machine"):
            return
        open_saves = self.machine.status()
        assert (self.machine.next_deadline() is None) == (not open_saves)
        for status in open_saves:
            assert self.now < status.deadline <= self.now + 40
            assert status.waiting_for
            assert not self.superseded
            assert status.deadline <= self.settle_by
        if self.settles and not open_saves:
            assert self.settled

    @invariant()
    def what_may_be_visible_is_live(self):
        if not hasattr(self, "machine"):
            return
        live = self.machine.live()
        for key in self.publish:
            committed = isinstance(self.verdict.get(key), Committed)
            if not committed and key not in self.certain:
                assert CommitId(key[0], 3, key[1]) in live
        for status in self.machine.status():
            assert CommitId(status.step, 3, status.attempt) in live

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        # Left alone, every save comes to its end within the sum of the limits.
        end = self.now + 100
        while (deadline := self.machine.next_deadline()) is not None:
            self.now = deadline
            self.feed(Tick())
        assert self.now <= end
        assert not self.machine.status()


TestCommits = Commits.TestCase
TestCommits.settings = settings(max_examples=800, stateful_step_count=30, deadline=None)
