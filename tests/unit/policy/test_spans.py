"""Ranks in few words."""

from __future__ import annotations

from safehold.policy.spans import describe, to_runs


def test_runs():
    assert to_runs([]) == []
    assert to_runs([3, 1, 2, 7, 7]) == [(1, 3), (7, 1)]


def test_words():
    assert describe([]) == "no ranks"
    assert describe([4]) == "rank 4"
    assert describe([2, 0, 1, 9]) == "ranks 0-2, 9"
    assert describe(range(0, 100, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 42 more"
    assert describe([1], "node", "nodes") == "node 1"
