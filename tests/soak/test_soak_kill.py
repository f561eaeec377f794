"""Kills, stops and failures at random moments, one start of the job after the other, until the run is through.

Seeds come from `SAFEHOLD_SOAK_SEEDS` (comma-separated, default 1 to 3); a failure names its seed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "procs"))

import puppets
from puppets import RankError, RankGoneError, Rig, until

from safehold.testing.faults import Fault, environment, fail_at

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

SEEDS = [int(seed) for seed in os.environ.get("SAFEHOLD_SOAK_SEEDS", "1,2,3").split(",")]
LAST = 30
STARTS = 25
PHASES: dict[str, tuple[str, ...]] = {
    "trainer": (
        "open",
        "walk",
        "layout",
        "begin",
        "stage",
        "save_call",
        "save",
        "prepare",
        "restore",
        "documents",
        "bind",
        "read",
    ),
    "agent": ("plan", "commit", "flusher", "rank_gone"),
    "flusher": ("flush", "record", "plan", "publish", "retire", "open_run", "find", "sweep"),
}
OPTIONS: dict[str, Any] = {
    "every": 3,
    "on_failure": "warn",
    "max_failures": 0,
    "agent_linger_s": 30,
    "start_timeout_s": 8,
    "begin_timeout_s": 3,
    "stage_timeout_s": 3,
    "flush_timeout_s": 5,
    "restore_timeout_s": 10,
    "request_timeout_s": 4,
}


def any_fault(rng: random.Random, markers: Path, number: int) -> Fault:
    kind = rng.choice(list(PHASES))
    action = rng.choice(["kill", "kill", "kill", "stop", "hang"] if kind != "trainer" else ["kill", "kill", "stop"])
    return fail_at(
        rng.choice([0, 1]) if kind == "trainer" else None,
        None,
        rng.choice(PHASES[kind]),
        process=kind,  # type: ignore[arg-type]
        action=action,  # type: ignore[arg-type]
        edge=rng.choice(["started", "done"]),
        marker=markers / f"fault-{number}",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_any_faults(zygote: puppets.Zygote, seed: int) -> None:
    rng = random.Random(seed)
    with puppets.temporary_directory() as directory, puppets.rig_of(zygote, Path(directory)) as rig:
        with rig.job(2) as job:
            job.all("open", str(rig.directory / "unbroken"))
            steps = job.all("train", LAST)
            end = job.all("digest")
            job.all("close")
        have = 0
        for number in range(STARTS):
            fault = any_fault(rng, rig.directory, number)
            have = _one_start(rig, fault, rng, steps, have, f"seed {seed}, start {number}: {fault}")
        with rig.job(2) as job:
            job.all("open", str(rig.run), **{**OPTIONS, "start_timeout_s": 60})
            restored = job.all("restore")[0]["step"] or 0
            assert restored >= have
            assert job.all("train", LAST) == [rank[restored:] for rank in steps], f"seed {seed}"
            assert job.all("digest") == end, f"seed {seed}"
            job.all("close")
        assert rig.verified_steps()[-1] == LAST, f"seed {seed}"


def _one_start(rig: Rig, fault: Fault, rng: random.Random, steps: list[Any], have: int, what: str) -> int:
    with rig.job(2, environment(fault)) as job:
        for action, args, options in (
            ("open", (str(rig.run),), OPTIONS),
            ("restore", (), {}),
            ("train", (min(LAST, have + rng.randrange(2, 9)),), {}),
        ):
            for rank in job.ranks:
                rank.send(action, *args, **options)
            results: list[Any] = []
            for rank in job.ranks:
                try:
                    results.append(rank.answer(25.0))
                except (RankError, RankGoneError, AssertionError) as exc:
                    stopped = fault.process == "trainer" and fault.action in ("stop", "hang")
                    assert not isinstance(exc, AssertionError) or stopped, f"{what}\n{exc}"
                    results.append(exc)
            if any(isinstance(result, Exception) for result in results):
                break
            if action == "train":
                for rank, did in enumerate(results):
                    for step in did:
                        assert step == steps[rank][step[0] - 1], what
        job.kill()
    for pid in rig.processes():
        os.kill(pid, signal.SIGCONT)
    until(lambda: _idle(rig), f"the end of saves, {what}", timeout_s=40)
    found = rig.verified_steps() if rig.run.exists() else []
    newest = max(found, default=0)
    assert newest >= have, f"{what}: had {have}, have {found}"
    return newest


def _idle(rig: Rig) -> bool:
    status = rig.try_status()
    if status is None:
        return not rig.slots()
    return not (status["session"] or {"saves_in_flight": 0})["saves_in_flight"]
