"""What happened on which host and when, and a chart of it for a terminal.

Processes of a job tell by a line on standard output (`tell`), the harness notes what it does itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PREFIX = "@timeline "
SYMBOLS = {
    "saved": "s",
    "committed": "C",
    "restored": "R",
    "killed": "X",
    "crashed": "x",
    "replaced": "+",
    "paused": "(",
    "resumed": ")",
    "cut": "/",
    "throttled": "~",
    "healed": "=",
    "started": ">",
    "ended": "<",
}
OTHER_SYMBOL = "*"
_ALIVE, _DEAD, _PAUSED = "-", " ", "."
_MIN_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One thing that happened.

    Attributes:
        host: Index of the host; None: all of them.
        t: When, in seconds of the monotonic clock.
        what: One of `SYMBOLS`, or any other word.
        detail: More, for `events`.
    """

    host: int | None
    t: float
    what: str
    detail: str = ""


def tell(what: str, detail: object = "") -> None:
    """In a process of a job: have the job's timeline show this moment."""
    print(PREFIX + json.dumps({"t": time.monotonic(), "what": what, "detail": str(detail)}), flush=True)  # noqa: T201


def heard(line: str, host: int) -> Moment | None:
    """Return what a line of output tells, None if it is an ordinary line."""
    if not line.startswith(PREFIX):
        return None
    try:
        said = json.loads(line[len(PREFIX) :])
        return Moment(host=host, t=float(said["t"]), what=str(said["what"]), detail=str(said["detail"]))
    except (ValueError, KeyError, TypeError):
        return None


class Timeline:
    """What happened; safe to add to from several threads.

    Args:
        names: Names of the hosts, by index.
        clock: Monotonic seconds.
    """

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names, self._clock = list(names), clock
        self._begun = clock()
        self._moments: list[Moment] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> list[Moment]:
        """All moments so far, in order of time."""
        with self._lock:
            return sorted(self._moments, key=lambda moment: moment.t)

    def add(self, host: int | None, what: str, detail: object = "") -> None:
        """Note that something happened now."""
        self.put(Moment(host=host, t=self._clock(), what=what, detail=str(detail)))

    def put(self, moment: Moment) -> None:
        """Note what happened at a moment."""
        with self._lock:
            self._moments.append(moment)

    def render(self, width: int = 100) -> str:
        """Return the chart: a line for each host, time to the right, an axis in seconds, and the meaning of the symbols."""
        events = self.events
        label = max(map(len, self._names), default=0) + 1
        columns = max(_MIN_WIDTH, width - label)
        last = max([moment.t for moment in events], default=self._begun)
        per_column = max(last - self._begun, 0.001) / (columns - 1)
        lines = []
        for host, name in enumerate(self._names):
            mine = [moment for moment in events if moment.host in (None, host)]
            lines.append(f"{name:<{label}}{self._row(mine, columns, per_column)}".rstrip())
        lines.append(" " * label + _axis(columns, per_column))
        used = dict.fromkeys(moment.what for moment in events)
        lines.append("  ".join(f"{SYMBOLS.get(what, OTHER_SYMBOL)} {what}" for what in used))
        return "\n".join(lines)

    def _row(self, moments: Sequence[Moment], columns: int, per_column: float) -> str:
        row: list[str] = []
        line = _ALIVE
        taken: dict[int, str] = {}
        for moment in moments:
            at = max(0, min(columns - 1, int((moment.t - self._begun) / per_column)))
            row += line * (at - len(row))
            if moment.what == "killed":
                line = _DEAD
            elif moment.what == "paused":
                line = _PAUSED
            elif moment.what in ("replaced", "resumed"):
                line = _ALIVE
            while at in taken and at < columns - 1 and taken[at] != SYMBOLS.get(moment.what, OTHER_SYMBOL):
                at += 1  # two things in one column: the later one moves on
            taken[at] = SYMBOLS.get(moment.what, OTHER_SYMBOL)
            if at == len(row):
                row.append(taken[at])
            elif at < len(row):
                row[at] = taken[at]
        row += line * (columns - len(row))
        return "".join(row)


def _axis(columns: int, per_column: float) -> str:
    step_s = next(
        step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 86400)
        if step / per_column >= 8 or step == 86400
    )  # fmt: skip
    row = [" "] * (columns + 8)
    number = 0
    while (at := round(number * step_s / per_column)) < columns:
        text = f"{number * step_s:.1f}s" if step_s < 1 else f"{number * step_s:g}s"
        row[at : at + len(text)] = list(text)
        number += 1
    return "".join(row).rstrip()
