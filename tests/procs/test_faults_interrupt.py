"""Ctrl-C in a user's program: the exit code that a shell knows, one traceback, the user's own code left alone, nothing half done."""

from __future__ import annotations

import signal
import subprocess
import sys

import interrupted
import pytest
from puppets import HERE, Rig, until

import safehold

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

BY_SIGNAL = -signal.SIGINT  # what a shell shows as 130


def start(rig: Rig, what: str, phase: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "interrupted.py"), what, str(rig.run), phase]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env={**rig.environment(), **env}, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def run(rig: Rig, what: str, phase: str, **env: str) -> tuple[int, str]:
    """Run the program; returns its exit code and what it wrote to standard error."""
    with start(rig, what, phase, **env) as program:
        _, err = program.communicate(timeout=60)
        return program.returncode, err


def debris(rig: Rig) -> list[str]:
    """Files of attempts that were not committed."""
    attempts = [path for path in rig.run.glob("checkpoints/*/*") if not (path / "manifest.json").exists()]
    return [str(file) for path in attempts for file in path.iterdir()]


@pytest.mark.parametrize(
    ("what", "phase"), [("with_block", "stage"), ("bare", "begin"), ("bare", "walk"), ("own_code", "stage")]
)
def test_in_a_save(rig: Rig, what: str, phase: str) -> None:
    code, err = run(rig, what, phase)
    assert code == (42 if what == "own_code" else BY_SIGNAL), err
    assert err.count("Traceback") == (what != "own_code") and "a save failed" not in err
    if what != "own_code":
        assert err.endswith("KeyboardInterrupt\n")
    assert rig.verified_steps() == [1]
    until(lambda: not debris(rig), "the end of what was begun")
    assert run(rig, "go_on", "") == (0, "")
    assert rig.verified_steps() == [1, 2]


@pytest.mark.parametrize("phase", ["documents", "read"])
def test_in_a_restore(rig: Rig, phase: str) -> None:
    safehold.save(rig.run, interrupted.state(), step=1)
    before = sorted(rig.run.rglob("*.json"))
    code, err = run(rig, "restore", phase)
    assert code == BY_SIGNAL and err.count("Traceback") == 1, err
    assert ("safehold: the state was partly overwritten" in err) == (phase == "read")
    assert [path for path in sorted(rig.run.rglob("*.json")) if path not in before] == [rig.run / "incarnations/2.json"]
    assert run(rig, "restore", "nothing") == (0, "")


def test_while_a_program_that_has_ended_waits_for_its_last_save(rig: Rig) -> None:
    code, err = run(rig, "drain_at_exit", "exit")
    assert code == 130 and "Traceback" not in err and "Exception ignored" not in err
    assert err.startswith("safehold: interrupted: the last saves were not waited for") and err.count("\n") == 1
    until(lambda: rig.verified_steps() == [1], "the agent's commit")


@pytest.mark.parametrize("phase", ["close", "again"])
def test_while_close_waits(rig: Rig, phase: str) -> None:
    """Also a second Ctrl-C, while the first one's last save is waited for."""
    code, err = run(rig, "drain_at_exit", phase)
    assert code == BY_SIGNAL and err.count("Traceback") == 1, err
    assert ("interrupted again" in err) == (phase == "again")
    until(lambda: rig.verified_steps() == [1], "the agent's commit")


@pytest.mark.parametrize("phase", ["begin", "stage"])
def test_of_one_rank_is_told_to_the_other(rig: Rig, phase: str) -> None:
    store = rig.directory / "store"
    store.mkdir()
    both = [start(rig, "ranks", phase, RANK=str(rank), PUPPET_STORE=str(store)) for rank in range(2)]
    try:
        said = [program.communicate(timeout=60)[1] for program in both]
    finally:
        for program in both:
            program.kill()
    assert [program.returncode for program in both] == [130, BY_SIGNAL], said
    assert said[0].count("rank 1 was interrupted (KeyboardInterrupt)") == 1 and "Traceback" not in said[0]
    assert said[1].count("Traceback") == 1
    assert rig.verified_steps() == [1]
    until(lambda: not debris(rig), "the end of what was begun")


@pytest.mark.parametrize(("phase", "steps"), [("_collect", []), ("_open", []), ("write_at", []), ("_commit", [2])])
def test_in_a_save_without_an_agent(rig: Rig, phase: str, steps: list[int]) -> None:
    """It is stopped and cleaned up, or, once it commits, it ends."""
    code, err = run(rig, "once", phase)
    assert code == BY_SIGNAL and err.count("Traceback") == 1, err
    if rig.run.exists():
        assert rig.verified_steps() == steps
    assert not debris(rig)
    if not steps:
        assert run(rig, "go_on", "") == (0, "")
