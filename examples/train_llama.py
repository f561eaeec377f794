"""Train a small Llama on text with FSDP2, saved and resumed by safehold.

    torchrun --standalone --nproc-per-node 2 examples/train_llama.py runs/llama

Start it again after whatever stopped it: it goes on where the newest good checkpoint was taken, bit for bit as if nothing had happened.
What concerns safehold is marked with `#:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from text import ShuffledText
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import safehold  #:

TEXT = Path(__file__).parent / "data" / "kjv.txt"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", help="run directory, where the checkpoints go")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--events", type=Path, help="append what happens to this file, one JSON object a line")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=LlamaConfig().num_layers)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=1611)
    return parser.parse_args()


def start_process() -> tuple[torch.device, int, int]:
    """Join the other ranks; NCCL where every rank has a GPU, else gloo. Returns device, rank and world size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
        dist.init_process_group("gloo")
    return device, dist.get_rank(), dist.get_world_size()


def build_model(arguments: argparse.Namespace, device: torch.device, world_size: int) -> Llama:
    """Draw the same weights on every rank, then shard them."""
    torch.manual_seed(arguments.seed)
    model = Llama(LlamaConfig(num_layers=arguments.layers, max_length=arguments.length))
    model.init_weights()
    model.to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def warm_up_then_cosine(steps: int) -> Any:
    """Return the learning rate's factor as a function of the step."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

    return factor


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters of all ranks."""
    own = hashlib.sha256()
    for name, parameter in model.named_parameters():
        own.update(name.encode())
        own.update(parameter.detach().to_local().cpu().contiguous().numpy().tobytes())
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own.hexdigest())
    return hashlib.sha256("".join(ranks).encode()).hexdigest()


class Log:
    """Says what happens: one JSON object a line, from rank 0 only."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self._file = path.open("a") if path and rank == 0 else None
        self._rank = rank

    def say(self, event: str, **fields: Any) -> None:
        if self._file:
            plain = {key: asdict(value) if is_dataclass(value) else value for key, value in fields.items()}
            self._file.write(json.dumps({"event": event, "time_s": time.time(), **plain}) + "\n")
            self._file.flush()
        elif self._rank == 0 and event == "step":
            print(f"step {fields['step']:5d}  loss {fields['loss']:.4f}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    device, rank, world_size = start_process()
    log = Log(arguments.events, rank)

    model = build_model(arguments, device, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(arguments.steps))
    loader = ShuffledText(
        TEXT,
        length=arguments.length,
        batch_size=arguments.batch_size,
        rank=rank,
        world_size=world_size,
        seed=arguments.seed,
    )
    torch.manual_seed(arguments.seed + 1 + rank)  # dropout differs between ranks

    ckpt = safehold.Checkpointer(arguments.run, every=arguments.save_every, keep=3)  #:
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader}  #:
    start = ckpt.restore(state) or 0  #:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log.say("start", step=start, restored=ckpt.last_restore, num_parameters=num_parameters, steps=arguments.steps)

    batches, saves = iter(loader), []
    for step in range(start, arguments.steps):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        log.say("step", step=step + 1, loss=mean.item() / world_size)
        if save := ckpt.step(step + 1, state):  #: saves when due
            saves.append(save)
            log.say("save", step=step + 1)
    # Not as the last thing before the end: a thread of gloo that still holds the last collective's tensors when the interpreter ends
    # aborts the process, and has let go of them once something was waited for.
    final = digest(model)
    ckpt.close()  #: waits until the last save is durable

    for save in saves:
        log.say("durable", step=save.step, figures=save.figures)
    log.say("end", step=arguments.steps, digest=final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
