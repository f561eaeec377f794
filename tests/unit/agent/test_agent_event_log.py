"""What went wrong is in the agent's log, once a minute."""

from __future__ import annotations

import io

from agent_fakes import FakeClock

from safehold.agent.event_log import MAX_TEXTS, EventLog
from safehold.events import EventStream


def test_failures_and_notes_are_written_once_a_minute() -> None:
    out, clock = io.StringIO(), FakeClock()
    events = EventStream("agent")
    log = EventLog(out, clock)
    events.subscribe(log)
    events.emit("flush", "started", step=3)
    events.emit("flush", "failed", step=3, seconds=1.0, error="no\nspace")
    events.emit("flush", "failed", step=3, seconds=2.0, error="no\nspace")
    events.emit("network", refused="token", address="10.0.0.9")
    assert out.getvalue().splitlines() == [
        "1970-01-01T00:16:40Z agent: flush failed: step 3, error no space",
        "1970-01-01T00:16:40Z agent: network note: refused token, address 10.0.0.9",
    ]
    clock.now += 61.0
    events.emit("flush", "failed", step=3, seconds=3.0, error="no\nspace")
    assert len(out.getvalue().splitlines()) == 3
    for number in range(2 * MAX_TEXTS):
        events.emit("flush", "failed", error=f"{number}")
    assert len(log._said) == MAX_TEXTS
    out.close()
    events.emit("flush", "failed", error="a log that is closed harms nothing")
