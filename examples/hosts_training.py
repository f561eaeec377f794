"""What every rank of `hosts_demo` runs: the training of train_llama.py, small, telling what happens on standard output.

    hosts_training.py RUN [--steps N] [--save-every N] [--gate STEP FILE]... [--settings JSON]

Prints `restored STEP SECONDS SOURCE`, `loss STEP HEX`, `staged STEP`, `committed STEP` or `failed STEP ERROR`, and `final DIGEST`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import ShuffledText
from torch import nn
from train_llama import TEXT, build_model, digest, start_process, warm_up_then_cosine

import safehold
from safehold.errors import CheckpointError
from safehold.testing.hosts import tell

GATE_S = 60.0
SAVE_S = 60.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument(
        "--gate",
        nargs=2,
        action="append",
        default=[],
        metavar=("STEP", "FILE"),
        help="before this step wait for this file",
    )
    parser.add_argument("--settings", type=json.loads, default={}, help="of the Checkpointer")
    # What build_model asks for:
    parser.set_defaults(seed=1611, layers=1, length=64)
    return parser.parse_args()


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + GATE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def save(ckpt: safehold.Checkpointer, step: int, state: dict[str, Any]) -> None:
    """Save, and wait until it is durable, so that the chart shows when; a training of one's own goes on meanwhile."""
    try:
        handle = ckpt.save(step, state)
        print(f"staged {step}", flush=True)
        handle.wait(SAVE_S)
        tell("committed", step)
    except CheckpointError as exc:
        tell("failed", f"{step} {type(exc).__name__}: {str(exc).splitlines()[0]}")


def main() -> None:
    arguments = parse_arguments()
    device, rank, world_size = start_process()
    torch.set_num_threads(1)
    model = build_model(arguments, device, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(arguments.steps))
    loader = ShuffledText(TEXT, length=arguments.length, batch_size=2, rank=rank, world_size=world_size, seed=1)
    torch.manual_seed(arguments.seed + 1 + rank)

    ckpt = safehold.Checkpointer(arguments.run, keep=3, **arguments.settings)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader}
    start = ckpt.restore(state) or 0
    if report := ckpt.last_restore:
        tell("restored", f"{start} {report.seconds:.3f} {report.source}")
    batches, gates = iter(loader), {int(step): Path(file) for step, file in arguments.gate}
    for step in range(start + 1, arguments.steps + 1):
        if step in gates:
            print(f"waiting before {step}", flush=True)
            wait_for(gates[step])
        inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"loss {step} {loss.item().hex()}", flush=True)
        if step % arguments.save_every == 0:
            save(ckpt, step, state)
    final = digest(model)
    ckpt.close()
    print(f"final {final}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
