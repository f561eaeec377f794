"""Which checkpoints stay. What holds for any input is in tests/property/test_policy_retention.py."""

from __future__ import annotations

import pytest

from safehold.errors import ConfigurationError
from safehold.policy.retention import Best, CommitFacts, Keep, keep_set, to_delete
from safehold.types import CommitId

HOUR_S = 3600.0


def facts(step, incarnation=1, attempt=0, **fields):
    return CommitFacts(commit=CommitId(step, incarnation, attempt), **fields)


def steps(commits):
    return sorted(commit.step for commit in commits)


def test_the_newest_by_step_stay_whatever_their_names_sort_as():
    commits = [facts(step) for step in (9_900, 10_000, 800, 10_100)]
    assert steps(keep_set(commits, Keep(last=2))) == [10_000, 10_100]
    assert steps(to_delete(commits, Keep(last=2))) == [800, 9_900]


def test_keep_one_with_best_keeps_both():
    commits = [facts(step, metrics={"loss": loss}) for step, loss in [(1, 0.5), (2, 0.1), (3, 0.9)]]
    assert steps(keep_set(commits, Keep(last=1, best=Best(metric="loss")))) == [2, 3]
    assert steps(keep_set(commits, Keep(last=1, best=Best(metric="loss", mode="max", count=2)))) == [1, 3]


def test_nan_inf_and_missing_metrics_are_never_best():
    values = [float("nan"), float("-inf"), float("inf")]
    commits = [facts(step, metrics={"loss": value}) for step, value in enumerate(values)] + [facts(7), facts(8)]
    assert steps(keep_set(commits, Keep(last=1, best=Best(metric="loss", count=9)))) == [8]
    assert steps(keep_set(commits, Keep(last=1, best=Best(metric="loss", mode="max", count=9)))) == [8]


def test_of_equally_good_ones_the_newer_stays():
    commits = [facts(step, metrics={"loss": 1.0}) for step in (1, 2, 3, 4)]
    assert steps(keep_set(commits, Keep(last=1, best=Best(metric="loss", count=2)))) == [3, 4]


def test_spaced_older_ones_stay():
    commits = [facts(step) for step in range(10, 1001, 10)]
    assert steps(keep_set(commits, Keep(last=1, every_steps=250))) == [250, 500, 750, 1000]
    # Saves by time hit no multiples: the first at or after each one stays.
    commits = [facts(step) for step in (7, 240, 263, 490, 777, 999)]
    assert steps(keep_set(commits, Keep(last=1, every_steps=250))) == [263, 777, 999]


def test_one_of_each_span_of_hours_stays():
    commits = [facts(step, created_s=1e9 + step * HOUR_S / 4) for step in range(40)]
    kept = keep_set(commits, Keep(last=1, every_hours=5))
    assert len(kept) in (3, 4) and CommitId(39, 1, 0) in kept


def test_pinned_final_and_leased_stay():
    commits = [facts(1, pinned=True), facts(2, final=True), facts(3, leased=True), facts(4), facts(5)]
    assert steps(to_delete(commits, Keep(last=1))) == [4]


def test_quarantine_does_not_cost_the_last_good_one():
    commits = [facts(1), facts(2), facts(3, quarantined=True), facts(4, quarantined=True)]
    assert steps(keep_set(commits, Keep(last=1))) == [2, 3, 4]
    # Only the newest ones are spared on the chance that the quarantine is wrong.
    commits = [facts(1, quarantined=True), facts(2), facts(3)]
    assert steps(keep_set(commits, Keep(last=2))) == [2, 3]
    assert steps(keep_set([facts(1, quarantined=True)], Keep(last=1))) == [1]


def test_attempts_of_one_step_are_ordered_by_incarnation():
    commits = [facts(10, 1, 5), facts(10, 2, 0), facts(9, 3, 0)]
    assert keep_set(commits, Keep(last=1)) == {CommitId(10, 2, 0)}


def test_nothing_to_keep():
    assert keep_set([], Keep()) == set()
    assert to_delete([], Keep()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Keep(last=0),
        lambda: Keep(last=1.5),
        lambda: Keep(last="3"),
        lambda: Keep(last=True),
        lambda: Keep(every_steps=2.5),
        lambda: Keep(every_hours="1"),
        lambda: Keep(every_hours=1e-320),
        lambda: Keep(best="loss"),
        lambda: Best(metric="loss", count=1.5),
        lambda: Best(metric=5),
        lambda: Keep(every_steps=0),
        lambda: Keep(every_hours=0.0),
        lambda: Keep(every_hours=float("nan")),
        lambda: Keep(every_hours=float("inf")),
        lambda: Best(metric=""),
        lambda: Best(metric="loss", count=0),
        lambda: Best(metric="loss", mode="best"),
    ],
)
def test_settings_that_cannot_be_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()
