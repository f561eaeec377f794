"""A small real training over several hosts: `training.py RUN STEPS [--pause-at STEP FILE]`.

Prints `restored STEP HASH`, `saving STEP`, `saved STEP HASH` or `failed STEP ERROR`, and at the end `final HASH`; HASH is of all parameters
and optimizer states, gathered from all ranks, so that equal ones mean equal bits. Losses depend on the random states of all ranks.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import safehold
from safehold.errors import CheckpointError
from safehold.testing.hosts import tell

WAIT_S = 40.0


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    width = int(os.environ.get("WIDTH", "64"))
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in model.parameters():
        found.update(whole(tensor.detach()).numpy().tobytes())
        for _, value in sorted(optimizer.state.get(tensor, {}).items()):
            if isinstance(value, torch.Tensor):
                found.update(whole(value).numpy().tobytes())
    return found.hexdigest()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = next(model.parameters()).shape[1]
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wait_for(path: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause-at", nargs=2, metavar=("STEP", "FILE"))
    parser.add_argument("--settings", default="{}", help="of the Checkpointer, a Python dict")
    options = parser.parse_args()
    pause = (int(options.pause_at[0]), options.pause_at[1]) if options.pause_at else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank = dist.get_rank()
    model, optimizer = build()
    state = {"model": model, "optimizer": optimizer}
    settings = eval(options.settings)
    with safehold.Checkpointer(options.run, keep=3, **settings) as ckpt:
        torch.manual_seed(100 + rank)
        start = ckpt.restore(state) or 0
        report = ckpt.last_restore
        tell("restored", start)
        print(f"restored {start} {state_hash(model, optimizer)} {report.source if report else 'nothing'}", flush=True)
        for step in range(start + 1, options.steps + 1):
            train_step(model, optimizer)
            now = state_hash(model, optimizer)
            print(f"saving {step}", flush=True)
            try:
                handle = ckpt.save(step, state)
                print(f"staged {step}", flush=True)
                handle.wait(WAIT_S)
                tell("committed", step)
                print(f"saved {step} {now}", flush=True)
            except CheckpointError as exc:
                print(f"failed {step} {type(exc).__name__}: {str(exc).splitlines()[0]}", flush=True)
            if pause is not None and step == pause[0]:
                print("pausing", flush=True)
                wait_for(pause[1])
        print(f"final {state_hash(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
