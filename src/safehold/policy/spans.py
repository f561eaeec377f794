"""Sorted sets of small integers (ranks, nodes) as runs, for the wire and for people.

Invariants: pure; the order of what comes in does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_SHOWN_RUNS = 8


def to_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the sorted, distinct numbers as (first, count) runs."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def describe(numbers: Iterable[int], one: str = "rank", many: str = "ranks") -> str:
    """Return "rank 3" or "ranks 0-2, 7", cut short where it would not fit on a line."""
    runs = to_runs(numbers)
    if not runs:
        return f"no {many}"
    if len(runs) == 1 and runs[0][1] == 1:
        return f"{one} {runs[0][0]}"
    parts = [str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in runs[:MAX_SHOWN_RUNS]]
    left = sum(count for _, count in runs[MAX_SHOWN_RUNS:])
    more = f" and {left} more" if left else ""
    return f"{many} {', '.join(parts)}{more}"
