"""Faults for tests with real processes: what happens to which process in which phase of which save.

A test makes faults and hands `environment(...)` to the processes; in each of them `listen` is a listener of the event
stream that acts when its moment comes.

    env = os.environ | environment(fail_at(1, 20, "stage", marker=tmp_path / "once"))

Invariants: a fault with a marker acts once over all processes and restarts: whoever creates the marker file acts.
Without `SAFEHOLD_FAULTS` nothing happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

from safehold.events import Event

FAULTS_VARIABLE = "SAFEHOLD_FAULTS"
LISTENER_VARIABLE = "SAFEHOLD_LISTENER"
LISTENER = "safehold.testing.faults:listen"
EXIT_CODE = 71

Process = Literal["trainer", "agent", "flusher"]
Action = Literal["kill", "raise", "stop", "hang", "exit"]
Edge = Literal["started", "done", "failed", "note"]

_CHOICES = {
    "process": ("trainer", "agent", "flusher"),
    "action": ("kill", "raise", "stop", "hang", "exit"),
    "edge": ("started", "done", "failed", "note"),
}


class InjectedFaultError(BaseException):
    """What `raise` raises. No `Exception`, which an event stream would keep from the code that emitted the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        rank: The rank; None for any. Agents and flushers act for a rank where the event names one.
        step: The step; None for any.
        phase: The event's phase.
        process: Which kind of process.
        action: `kill` (SIGKILL itself), `stop` (SIGSTOP itself), `exit` (at once, with `EXIT_CODE`), `hang` (in the
            thread that emitted the event), `raise` (`InjectedFaultError`, there too).
        edge: The event's stage.
        marker: Path of a file that must not exist, and does afterwards; None: the fault acts each time.
        node: The event's field `node`; None for any.
    """

    rank: int | None
    step: int | None
    phase: str
    process: Process = "trainer"
    action: Action = "kill"
    edge: Edge = "started"
    marker: str | None = None
    node: int | None = None

    def matches(self, event: Event) -> bool:
        """Return whether this is the moment."""
        return (
            self.phase == event.phase
            and self.edge == event.stage
            and self.process == event.process
            and self.rank in (None, event.rank)
            and self.step in (None, event.step)
            and self.node in (None, event.fields.get("node"))
        )


def fail_at(
    rank: int | None,
    step: int | None,
    phase: str,
    *,
    process: Process = "trainer",
    action: Action = "kill",
    edge: Edge = "started",
    marker: str | os.PathLike[str] | None = None,
    node: int | None = None,
) -> Fault:
    """Say what breaks, where and when; see `Fault`.

    Raises:
        ValueError: A word is unknown.
    """
    for name, value in (("process", process), ("action", action), ("edge", edge)):
        if value not in _CHOICES[name]:
            raise ValueError(f"{name} {value!r} is none of {', '.join(_CHOICES[name])}")
    path = None if marker is None else os.path.abspath(os.fspath(marker))
    return Fault(rank=rank, step=step, phase=phase, process=process, action=action, edge=edge, marker=path, node=node)


def environment(*faults: Fault) -> dict[str, str]:
    """Return the environment variables that make processes listen for `faults`."""
    return {FAULTS_VARIABLE: json.dumps([asdict(fault) for fault in faults]), LISTENER_VARIABLE: LISTENER}


def faults_from(text: str) -> tuple[Fault, ...]:
    """Read the value of `SAFEHOLD_FAULTS`."""
    return tuple(fail_at(**entry) for entry in json.loads(text or "[]"))


_parsed: tuple[str, tuple[Fault, ...]] = ("", ())


def listen(event: Event) -> None:
    """A listener: act if `event` is the moment of one of the faults in this process's environment.

    Raises:
        InjectedFaultError: The fault's action is `raise`.
    """
    global _parsed
    text = os.environ.get(FAULTS_VARIABLE, "")
    if text != _parsed[0]:
        _parsed = (text, faults_from(text))
    for fault in _parsed[1]:
        if fault.matches(event) and _claim(fault):
            _act(fault)


def _claim(fault: Fault) -> bool:
    if fault.marker is None:
        return True
    try:
        fd = os.open(fault.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(fd, f"{os.getpid()}\n".encode())
    finally:
        os.close(fd)
    return True


def _act(fault: Fault) -> None:
    text = f"injected fault: {fault.action} at {fault.phase} {fault.edge} (rank {fault.rank}, step {fault.step})"
    print(text, file=sys.stderr, flush=True)  # noqa: T201
    if fault.action == "raise":
        raise InjectedFaultError(text)
    if fault.action == "exit":
        os._exit(EXIT_CODE)
    if fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # `hang`, and the moment until a SIGKILL arrives
        time.sleep(3600)
