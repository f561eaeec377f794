"""Faults that one process does to another: a listener for `SAFEHOLD_LISTENER` that kills the agent when a rank comes to a phase.

`PUPPET_KILLS_AGENT` is a JSON list of [rank, phase, edge, step]; each acts once, whoever comes to it first (a file in
`PUPPET_MARKERS` says so).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from safehold.events import Event
from safehold.host.runtime import list_slots
from safehold.testing import faults


def listen(event: Event) -> None:
    """Kill the agent if this is the moment; then act on ordinary faults."""
    for number, (rank, phase, edge, step) in enumerate(json.loads(os.environ.get("PUPPET_KILLS_AGENT", "[]"))):
        if (event.process, event.phase, event.stage) != ("trainer", phase, edge):
            continue
        if event.rank not in (None, rank) or (step is not None and event.step != step):
            continue
        marker = Path(os.environ["PUPPET_MARKERS"]) / f"agent-{number}"
        with contextlib.suppress(FileExistsError):
            marker.touch(exist_ok=False)
            kill_agents(Path(os.environ["SAFEHOLD_RUNTIME_DIR"]))
    faults.listen(event)


def kill_agents(runtime: Path) -> None:
    """SIGKILL to every agent of a runtime directory."""
    for slot in list_slots(runtime):
        info = slot.read_info() if slot.is_locked() else None
        if info is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGKILL)
