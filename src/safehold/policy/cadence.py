"""When to save: by steps, which every rank decides alone and alike, or by time, which the lead announces.

Invariants: ranks never need to talk to agree. A save by time is announced for a step that no rank is known to have
passed; it counts only if every rank began it, else it is dropped and announced again further ahead. Nothing waits
for an announcement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from safehold.errors import ConfigurationError

_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d)(?![a-z])")
_STEPS = re.compile(r"(\d{1,15})\s*(?:steps?)?")
MAX_STEPS = 1 << 40
MAX_SECONDS = 366 * 86400.0

Verdict = Literal["wait", "ok", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """How often to save: by time, by steps, or (both None) only when asked.

    Attributes:
        seconds: Time between saves.
        steps: Steps between saves.
    """

    seconds: float | None = None
    steps: int | None = None

    def __bool__(self) -> bool:
        return self.seconds is not None or self.steps is not None

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:g}s"
        return "None" if self.steps is None else f"{self.steps} steps"


def parse_every(value: str | int | None) -> Every:
    """Read an interval: `"20min"`, `"2h"`, `"1h30min"`, `"90s"`, `500`, `"500steps"`, or None for never.

    Raises:
        ConfigurationError: The value is none of these, zero, negative, or absurdly large.
    """
    if value is None:
        return Every()
    if isinstance(value, int) and not isinstance(value, bool):
        return _every_steps(value, value)
    if not isinstance(value, str):
        raise _bad_interval(value)
    text = value.strip().lower()
    if found := _STEPS.fullmatch(text):
        return _every_steps(int(found[1]), value)
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        raise _bad_interval(value)
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    if not 0 < seconds <= MAX_SECONDS:
        raise _bad_interval(value)
    return Every(seconds=seconds)


def _every_steps(steps: int, value: object) -> Every:
    if not 0 < steps <= MAX_STEPS:
        raise _bad_interval(value)
    return Every(steps=steps)


def _bad_interval(value: object) -> ConfigurationError:
    return ConfigurationError(
        f"{value!r} is no interval between saves",
        hint='use steps (500), or a time like "20min", "2h", "90s"; None for never',
    )


def due_by_steps(every: Every, previous_step: int | None, step: int, last_saved: int | None) -> bool:
    """Say whether a save is due at `step`: a multiple of the interval was reached since `previous_step`.

    Every rank that calls this with the same steps gets the same answer.

    Args:
        every: The interval; never due unless it counts steps.
        previous_step: The step of the call before; None at the first call, where only an exact multiple is due.
        step: The step now; steps may be left out, and nothing is due at step 0 or after going back.
        last_saved: The step saved or restored last; never due there again.
    """
    if every.steps is None or step <= 0 or step == last_saved:
        return False
    if previous_step is None:
        return step % every.steps == 0
    return step // every.steps > max(previous_step, 0) // every.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A save that the lead asked all ranks for.

    Attributes:
        step: The step to save at.
        made_s: When it was announced, monotonic seconds of the lead.
        num_dropped: How many announcements for the same save were dropped before.
    """

    step: int
    made_s: float
    num_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCadence:
    """Saves by time.

    Attributes:
        interval_s: Time from one commit (or the start) to the next announcement; None: only on request.
        world_size: Number of ranks that must have reported a step before anything is announced.
        margin_steps: How far ahead of the furthest rank the first announcement lies; doubled after each one that
            was dropped.
        margin_s: The same as a time, for the news to reach all ranks: with short steps it is worth more steps.
        max_margin_steps: Limit of both.
        expire_s: After this long an announcement that some rank neither reached nor passed is dropped.
    """

    world_size: int
    interval_s: float | None = None
    margin_steps: int = 2
    margin_s: float = 0.5
    max_margin_steps: int = 4096
    expire_s: float = 600.0

    def announce(
        self,
        now: float,
        last_commit_or_start: float,
        rank_steps: Mapping[int, int],
        pending: Announcement | None,
        *,
        requested: bool = False,
        num_dropped: int = 0,
        step_s: float | None = None,
    ) -> int | None:
        """Return the step to announce; None if nothing is due, one is pending, or a rank has not reported a step.

        Args:
            now: Monotonic seconds.
            last_commit_or_start: When the last save was committed, or the run started.
            rank_steps: Rank -> the last step that it is known to have reached.
            pending: The announcement not judged yet.
            requested: Somebody asked for a save now (preemption, command line).
            num_dropped: Announcements dropped in a row for this save.
            step_s: Time of a step, if it is known.
        """
        due = self.interval_s is not None and now - last_commit_or_start >= self.interval_s
        if pending is not None or not (due or requested or num_dropped) or len(rank_steps) < self.world_size:
            return None
        margin = self.margin_steps
        if step_s is not None and step_s > 0:
            margin = max(margin, math.ceil(min(self.margin_s / step_s, self.max_margin_steps)))
        margin = min(max(1, margin) << min(num_dropped, 16), self.max_margin_steps)
        return max(rank_steps.values()) + margin

    def judge(
        self, pending: Announcement, rank_steps: Mapping[int, int], begun: Collection[int], now: float | None = None
    ) -> Verdict:
        """Say what became of an announcement.

        Args:
            pending: The announcement.
            rank_steps: Rank -> the last step that it is known to have reached; a rank inside the save is at
                `pending.step`.
            begun: Ranks that began the save at that step.
            now: Monotonic seconds; None leaves expiry out.

        Returns:
            `ok` once every rank began it, `drop` if a rank has passed the step without beginning or the time is up,
            else `wait`.
        """
        if len(set(begun)) >= self.world_size:
            return "ok"
        if any(step > pending.step and rank not in begun for rank, step in rank_steps.items()):
            return "drop"
        if now is not None and now - pending.made_s > self.expire_s:
            return "drop"
        return "wait"
