"""Many incarnations in one run directory, each acting on what it saw earlier: nothing that is believed is ever lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from safehold.format.records import Incarnation, Tombstone
from safehold.policy import belief
from safehold.types import CommitId

GRACE_S = 10.0


@dataclass
class Process:
    """One job: its number once it has one, what it saw when it started, what it has in flight."""

    seen: belief.Listing
    number: int | None = None
    live: set[CommitId] = field(default_factory=set)


class RunDirectory(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.incarnations: dict[int, Incarnation] = {}
        self.bytes: set[CommitId] = set()
        self.manifests: set[CommitId] = set()
        self.tombstones: dict[CommitId, list[Tombstone]] = {}
        self.processes: list[Process] = []
        self.believed_before: set[CommitId] = set()
        self.may_go: set[CommitId] = set()
        self.born_late: set[CommitId] = set()

    def listing(self):
        attempts = {
            commit: belief.AttemptView(
                has_manifest=commit in self.manifests, tombstones=tuple(self.tombstones.get(commit, ()))
            )
            for commit in self.bytes | self.manifests | self.tombstones.keys()
        }
        return belief.Listing(incarnations=dict(self.incarnations), attempts=attempts)

    def pick(self, number):
        started = [process for process in self.processes if process.number is not None]
        return started[number % len(started)] if started else None

    @property
    def newest(self):
        return max(self.incarnations, default=0)

    @rule()
    def job_starts_and_looks(self):
        self.processes.append(Process(self.listing()))

    @rule(number=st.integers(0, 9), up_to=st.one_of(st.none(), st.integers(0, 4)))
    def job_takes_over(self, number, up_to):
        """Creates its incarnation from what it saw when it started, however long ago; a taken number makes it look again."""
        waiting = [process for process in self.processes if process.number is None]
        if not waiting:
            return
        process = waiting[number % len(waiting)]
        mine = (process.seen.newest or 0) + 1
        if mine in self.incarnations:
            process.seen = self.listing()
            return
        accepted = tuple(sorted(belief.accepted_for_new(process.seen, up_to)))
        process.number = mine
        self.incarnations[mine] = Incarnation(run_id="r", number=mine, token="t", accepted=accepted, created_s=self.now)
        assert mine == self.newest
        self.may_go |= {commit for commit in self.believed_before if commit not in accepted}
        # It reads tombstones again: what they name may have lost its bytes.
        listing = self.listing()
        for commit in belief.believed(listing):
            assert not listing.attempts[commit].tombstones or commit in self.bytes

    @rule(number=st.integers(0, 9), step=st.integers(0, 4), attempt=st.integers(0, 1))
    def job_saves(self, number, step, attempt):
        process = self.pick(number)
        if process is None:
            return
        commit = CommitId(step, process.number, attempt)
        if commit not in self.bytes | self.manifests and commit not in self.tombstones:
            self.bytes.add(commit)
            process.live.add(commit)

    @rule(number=st.integers(0, 9), commits=st.booleans())
    def job_finishes_a_save(self, number, commits):
        process = self.pick(number)
        if process is None or not process.live:
            return
        commit = min(process.live)
        process.live.discard(commit)
        if commits and commit in self.bytes:
            self.manifests.add(commit)
            if process.number < self.newest:
                self.born_late.add(commit)
            # An earlier attempt of the step is hidden by a later one.
            self.may_go |= {other for other in self.believed_before if other.step == commit.step and other < commit}

    @rule(number=st.integers(0, 9), which=st.integers(0, 9), careless=st.booleans())
    def job_deletes(self, number, which, careless):
        """Tombstones a commit; a careless job does so without looking whether it may."""
        process = self.pick(number)
        listing = self.listing()
        candidates = sorted(listing.attempts)
        if process is None or not candidates:
            return
        commit = candidates[which % len(candidates)]
        exists = commit in {*belief.believed(listing), *belief.shadowed(listing)}
        allowed = exists and process.number == listing.newest
        if not allowed and not careless:
            return
        # A deleted step must not come back as an earlier attempt.
        doomed = [other for other in belief.shadowed(listing) if other.step == commit.step] if allowed else []
        for one in [*doomed, commit]:
            self.tombstones.setdefault(one, []).append(
                Tombstone(commit=one, incarnation=process.number, created_s=self.now)
            )
            if process.number == self.newest:
                self.may_go.add(one)
        if allowed:
            assert commit.step not in {other.step for other in belief.believed(self.listing()) if other <= commit}

    @rule(number=st.integers(0, 9), knows_live=st.booleans(), cut_short=st.booleans())
    def job_sweeps(self, number, knows_live, cut_short):
        process = self.pick(number)
        if process is None:
            return
        listing = self.listing()
        live = process.live if knows_live else None
        for commit in belief.debris(
            listing, own_incarnation=process.number, live=live, now_s=self.now, grace_s=GRACE_S
        ):
            assert process.number == self.newest
            assert commit not in belief.believed(listing)
            others = (p for p in self.processes if p.number == self.newest)
            assert not any(commit in p.live for p in others) or not knows_live
            self.manifests.discard(commit)
            self.bytes.discard(commit)
            if cut_short:
                return
            self.tombstones.pop(commit, None)

    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def what_is_believed_is_whole(self):
        believed = belief.believed(self.listing())
        assert believed == sorted(believed, reverse=True)
        assert len({commit.step for commit in believed}) == len(believed)
        for commit in believed:
            assert commit in self.bytes and commit in self.manifests
            assert commit.incarnation == self.newest or commit in self.incarnations[self.newest].accepted

    @invariant()
    def nothing_vanishes_unasked(self):
        believed = set(belief.believed(self.listing()))
        assert self.believed_before - believed <= self.may_go
        self.believed_before = believed

    @invariant()
    def what_an_old_job_adds_late_is_not_believed(self):
        for commit in belief.believed(self.listing()):
            if commit in self.born_late:
                # Only if an incarnation that came after it took it up.
                assert commit in self.incarnations[self.newest].accepted


TestRunDirectory = RunDirectory.TestCase
TestRunDirectory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
