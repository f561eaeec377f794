"""Retention never drops the last good checkpoint, and deleting what it says changes nothing about what it keeps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from safehold.policy.retention import Best, CommitFacts, Keep, keep_set, to_delete
from safehold.types import CommitId

facts = st.builds(
    CommitFacts,
    commit=st.builds(CommitId, st.integers(0, 60), st.integers(1, 3), st.integers(0, 1)),
    created_s=st.one_of(st.floats(0, 1e6), st.just(float("nan"))),
    metrics=st.dictionaries(st.sampled_from(["loss", "other"]), st.floats(allow_nan=True, allow_infinity=True)),
    pinned=st.booleans(),
    final=st.booleans(),
    leased=st.booleans(),
    quarantined=st.booleans(),
)
lists = st.lists(facts, max_size=20, unique_by=lambda one: one.commit)
keeps = st.builds(
    Keep,
    last=st.integers(1, 5),
    every_steps=st.one_of(st.none(), st.integers(1, 20)),
    every_hours=st.one_of(st.none(), st.floats(0.01, 50)),
    best=st.one_of(
        st.none(),
        st.builds(Best, metric=st.just("loss"), mode=st.sampled_from(["min", "max"]), count=st.integers(1, 3)),
    ),
)


@settings(max_examples=300, deadline=None)
@given(lists, keeps)
def test_what_must_stay_stays(commits, keep):
    stay = keep_set(commits, keep)
    all_commits = {one.commit for one in commits}
    assert stay <= all_commits
    assert set(to_delete(commits, keep)) == all_commits - stay
    assert to_delete(commits, keep) == sorted(all_commits - stay)
    assert bool(stay) == bool(commits)
    if commits:
        assert max(all_commits) in stay
    good = sorted((one.commit for one in commits if not one.quarantined), reverse=True)
    assert set(good[: keep.last]) <= stay
    assert {one.commit for one in commits if one.pinned or one.final or one.leased} <= stay


@settings(max_examples=300, deadline=None)
@given(lists, keeps)
def test_keeping_is_stable(commits, keep):
    """What stays still stays once the others are gone: a sweep repeated takes nothing more."""
    stay = keep_set(commits, keep)
    assert keep_set([one for one in commits if one.commit in stay], keep) == stay


@settings(max_examples=300, deadline=None)
@given(lists, keeps, st.sets(st.integers(0, 19)))
def test_whoever_looks_while_another_deletes_finds_the_same_to_stay(commits, keep, gone):
    """Several nodes that make room at once, each by what it saw, let go together what one alone would."""
    stay = keep_set(commits, keep)
    left = [one for number, one in enumerate(commits) if one.commit in stay or number not in gone]
    assert keep_set(left, keep) == stay


@settings(max_examples=200, deadline=None)
@given(lists, keeps)
def test_saves_that_come_never_take_the_last_good_one(commits, keep):
    """Replays a run: after each commit retention runs, and there is always a good checkpoint if there ever was one."""
    there: list[CommitFacts] = []
    had_good = False
    for one in sorted(commits, key=lambda one: one.commit):
        there.append(one)
        had_good |= not one.quarantined
        gone = set(to_delete(there, keep))
        there = [other for other in there if other.commit not in gone]
        assert there and there[-1].commit == one.commit
        assert not had_good or any(not other.quarantined for other in there)
