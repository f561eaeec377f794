"""Which checkpoints stay.

Invariants: where there is a checkpoint, one stays; the newest stays, and so does the newest that is not quarantined,
whatever the setting. Pinned, final and leased ones stay. Only what is handed in is judged: believed commits of this
run, never debris.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from safehold.errors import ConfigurationError
from safehold.types import CommitId

MAX_COUNT = 1 << 40
"""More checkpoints, or steps, than there will ever be; what is larger is a mistake, and no message has room for it."""


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the best checkpoints by a metric that was given to `save`.

    Attributes:
        metric: Name of the metric.
        mode: Whether low or high is good.
        count: How many.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        named = isinstance(self.metric, str) and self.metric
        if not named or self.mode not in ("min", "max") or not _is_count(self.count):
            raise ConfigurationError(
                f"{self!r} does not name a metric, a mode (min or max) and a count from 1 to 2**40"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What to keep; what any of the rules names stays.

    Attributes:
        last: The newest ones; at least 1.
        every_steps: The first at or after each multiple of this many steps.
        every_hours: The first of each such span of time.
        best: The best by a metric.
    """

    last: int = 3
    every_steps: int | None = None
    every_hours: float | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise ConfigurationError(f"keep.last is {self.last!r}; it must be a number of checkpoints, from 1 to 2**40")
        if self.every_steps is not None and not _is_count(self.every_steps):
            raise ConfigurationError(
                f"keep.every_steps is {self.every_steps!r}; it must be a number of steps, from 1 to 2**40"
            )
        if self.every_hours is not None and not _is_span(self.every_hours):
            raise ConfigurationError(f"keep.every_hours is {self.every_hours!r}; it must be a positive number of hours")
        if self.best is not None and not isinstance(self.best, Best):
            raise ConfigurationError(f"keep.best is {self.best!r}; it must be a safehold.Best")


def as_keep(keep: object) -> Keep:
    """Return the rule that a user's word stands for: a number of checkpoints, or a rule.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(keep, bool) or not isinstance(keep, int | Keep):
        raise ConfigurationError(f"keep is a number of checkpoints or a safehold.Keep, not {keep!r}")
    return Keep(last=keep) if isinstance(keep, int) else keep


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def _is_span(hours: object) -> bool:
    return isinstance(hours, int | float) and not isinstance(hours, bool) and 1e-6 <= hours < 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """What retention needs to know of a believed commit.

    Attributes:
        commit: Which.
        created_s: Wall time of its manifest.
        metrics: Metrics given to `save`.
        pinned: A user pinned the step.
        final: The last save of a finished run.
        leased: Something reads it now (a restore, a replication).
        quarantined: A reader found it bad; it does not count towards what is kept, and is no reason to delete another.
    """

    commit: CommitId
    created_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    pinned: bool = False
    final: bool = False
    leased: bool = False
    quarantined: bool = False


def keep_set(commits: Sequence[CommitFacts], keep: Keep) -> set[CommitId]:
    """Return the commits that stay; not empty unless `commits` is."""
    if not commits:
        return set()
    newest_first = sorted(commits, key=lambda facts: facts.commit, reverse=True)
    good = [facts for facts in newest_first if not facts.quarantined]
    stay = {newest_first[0].commit}
    last = good[: keep.last]
    stay.update(facts.commit for facts in last)
    # A quarantine is advisory and can be cleared: what is among the newest is not destroyed on its word.
    oldest_of_last = last[-1].commit if len(last) == keep.last else CommitId(-1, -1, -1)
    stay.update(facts.commit for facts in newest_first if facts.commit >= oldest_of_last)
    stay.update(facts.commit for facts in commits if facts.pinned or facts.final or facts.leased)
    oldest_first = good[::-1]
    if keep.every_steps is not None:
        every_steps = keep.every_steps
        first = _first_of_each(oldest_first, lambda facts: facts.commit.step // every_steps)
        stay.update(facts.commit for facts in first if facts.commit.step >= every_steps)
    if keep.every_hours is not None:
        span_s = keep.every_hours * 3600.0
        dated = [facts for facts in oldest_first if math.isfinite(facts.created_s)]
        stay.update(facts.commit for facts in _first_of_each(dated, lambda facts: int(facts.created_s // span_s)))
    if keep.best is not None:
        stay.update(facts.commit for facts in _best(good, keep.best))
    if not stay or newest_first[0].commit not in stay or (good and not stay & {facts.commit for facts in good}):
        raise AssertionError(f"retention would keep {sorted(stay)} of {[facts.commit for facts in newest_first]}")
    return stay


def to_delete(commits: Sequence[CommitFacts], keep: Keep) -> list[CommitId]:
    """Return the commits that go, oldest first."""
    stay = keep_set(commits, keep)
    return sorted({facts.commit for facts in commits} - stay)


def _first_of_each(oldest_first: Sequence[CommitFacts], bucket: Callable[[CommitFacts], int]) -> list[CommitFacts]:
    first: dict[int, CommitFacts] = {}
    for facts in oldest_first:
        first.setdefault(bucket(facts), facts)
    return list(first.values())


def _best(newest_first: Sequence[CommitFacts], best: Best) -> list[CommitFacts]:
    """Return the best; of equals the newer; a value that is missing or not finite is never good."""
    measured = [facts for facts in newest_first if math.isfinite(facts.metrics.get(best.metric, math.nan))]
    measured.sort(key=lambda facts: facts.metrics[best.metric], reverse=best.mode == "max")
    return measured[: best.count]
