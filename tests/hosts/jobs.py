"""A small training job for `test_jobs`: `jobs.py RUN STEPS [WAIT_FOR]` saves after every step and prints what became of it.

After its last step it waits for the file WAIT_FOR, if one is given, and saves once more.
"""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import safehold
from safehold.testing.hosts import tell

WAIT_S = 30.0


def train(run: str, num_steps: int, wait_for: str | None) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(1000), "step": 0}
    with safehold.Checkpointer(run, every=1) as ckpt:
        start = ckpt.restore(state) or 0
        tell("restored", start)
        print(f"restored {start} {state['weight'].sum().item():g}", flush=True)
        for step in range(start + 1, start + num_steps + 1):
            state["weight"] += step
            state["step"] = step
            ckpt.save(step, state).wait(20)
            tell("committed", step)
            print(f"saved {step}", flush=True)
        if wait_for is not None:
            deadline = time.monotonic() + WAIT_S
            while not Path(wait_for).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            ckpt.save(start + num_steps + 1, state).wait(20)
            print("saved once more", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    mode, run, *rest = sys.argv[1:]
    if mode == "train":
        train(run, int(rest[0]), rest[1] if len(rest) > 1 else None)
    elif mode == "save":
        rank = dist.get_rank()
        state = {
            "all": torch.arange(1000.0),
            "mine": safehold.PerRank(torch.full((4,), float(rank)), policy="first"),
            "step": 3,
        }
        safehold.save(run, state, step=3)
        print("saved", flush=True)
    else:
        state = {"all": torch.zeros(1000), "step": 0, "mine": safehold.PerRank(torch.zeros(4), policy="first")}
        safehold.load(run, state)
        print(f"loaded {state['all'].sum().item():g} {state['mine'].value[0].item():g} {state['step']}", flush=True)
    dist.destroy_process_group()


main()
