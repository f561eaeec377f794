"""Faults act at their moment, in their process, once where that was asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from safehold.events import Event, EventStream
from safehold.testing import faults
from safehold.testing.faults import Fault, InjectedFaultError, environment, fail_at, faults_from

CHILD = """
import sys
from safehold.events import EventStream
from safehold.testing.faults import listen
stream = EventStream(sys.argv[1])
stream.subscribe(listen)
for step in (10, 20, 30):
    with stream.span("stage", step=step, rank=1):
        pass
print("survived", flush=True)
"""


def event(phase: str = "stage", stage: Any = "started", **given: Any) -> Event:
    return Event(phase=phase, stage=stage, time_s=0.0, **given)


def run_child(*given: Fault, process: str = "trainer") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, process],
        env=os.environ | environment(*given),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_matching() -> None:
    fault = fail_at(1, 20, "stage", edge="done")
    assert fault.matches(event(stage="done", rank=1, step=20))
    for other in (
        event(stage="started", rank=1, step=20),
        event(stage="done", rank=0, step=20),
        event(stage="done", rank=1, step=10),
        event(stage="done", rank=1, step=20, process="agent"),
        event("flush", stage="done", rank=1, step=20),
    ):
        assert not fault.matches(other)
    assert fail_at(None, None, "flush", process="flusher", node=2).matches(
        event("flush", process="flusher", fields={"node": 2})
    )
    assert not fail_at(None, None, "stage", node=2).matches(event(fields={"node": 1}))


def test_the_environment_says_it_all(tmp_path: Path) -> None:
    given = (fail_at(0, 1, "stage", marker=tmp_path / "m"), fail_at(None, None, "x", process="agent", action="hang"))
    env = environment(*given)
    assert faults_from(env["SAFEHOLD_FAULTS"]) == given
    assert env["SAFEHOLD_LISTENER"] == "safehold.testing.faults:listen"
    assert faults_from("") == ()


@pytest.mark.parametrize("bad", [{"action": "explode"}, {"process": "driver"}, {"edge": "begin"}])
def test_unknown_words_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is none of"):
        fail_at(0, 1, "stage", **bad)


def test_without_faults_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFEHOLD_FAULTS", raising=False)
    faults.listen(event())


def test_raise_reaches_the_code_that_emitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "once"
    monkeypatch.setenv(
        "SAFEHOLD_FAULTS", environment(fail_at(None, 5, "stage", action="raise", marker=marker))["SAFEHOLD_FAULTS"]
    )
    stream = EventStream()
    stream.subscribe(faults.listen)
    stream.emit("stage", "started", step=4)
    with pytest.raises(InjectedFaultError, match="step 5"):
        stream.emit("stage", "started", step=5)
    stream.emit("stage", "started", step=5)  # once, over all processes
    assert marker.read_text() == f"{os.getpid()}\n"


@pytest.mark.procs
def test_kill_once_over_restarts(tmp_path: Path) -> None:
    fault = fail_at(1, 20, "stage", marker=tmp_path / "once")
    first = run_child(fault)
    out, err = first.communicate(timeout=30)
    assert first.returncode == -signal.SIGKILL and out == ""
    assert "injected fault: kill at stage started (rank 1, step 20)" in err
    second = run_child(fault)
    assert second.communicate(timeout=30)[0] == "survived\n" and second.returncode == 0


@pytest.mark.procs
def test_exit_and_other_processes() -> None:
    child = run_child(fail_at(1, 30, "stage", action="exit", edge="done", process="agent"), process="agent")
    child.communicate(timeout=30)
    assert child.returncode == faults.EXIT_CODE
    other = run_child(fail_at(1, 30, "stage", action="exit", process="agent"))
    assert other.communicate(timeout=30)[0] == "survived\n"


@pytest.mark.procs
@pytest.mark.parametrize("action", ["stop", "hang"])
def test_stop_and_hang(action: Any) -> None:
    child = run_child(fail_at(1, 20, "stage", action=action))
    try:
        deadline = time.monotonic() + 30
        wanted = "T" if action == "stop" else "S"
        while time.monotonic() < deadline:
            state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == wanted and child.poll() is None and action == "stop":
                break
            if action == "hang" and child.stderr is not None and "hang" in child.stderr.readline():
                break
            time.sleep(0.02)
        else:
            pytest.fail(f"did not {action}")
        if action == "stop":
            child.send_signal(signal.SIGCONT)
            assert child.communicate(timeout=30)[0] == "survived\n"
        else:
            time.sleep(0.2)
            assert child.poll() is None
    finally:
        child.kill()
        child.communicate(timeout=30)
