"""The state that every candidate saves, and the measuring that every worker shares: about 3 GB of a Llama with Adam, sharded by FSDP2.

Invariants: the same tensors for all candidates (PyTorch DCP gets them as its own `get_state_dict` gives them), populated before anything is
timed; one torch thread per rank. Times are those of the slowest rank.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY, FFN_RATIO = 32_000, 2.75
# Memory that was not touched for a while is slower to copy into on some machines (virtual ones: 1.15 times after 1 s, 1.4 after 5 s).
IDLE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a state is; the defaults give 3.25 GB of float32 parameters and Adam moments in 589 tensors."""

    dim: int = 1024
    layers: int = 16


class Block(nn.Module):
    """The parameters of one layer; nothing is computed with them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        ffn = int(dim * FFN_RATIO)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = (nn.Linear(a, b, bias=False) for a, b in ((dim, ffn), (dim, ffn), (ffn, dim)))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)


class Model(nn.Module):
    """The parameters of a Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.dim)
        self.layers = nn.ModuleList(Block(size.dim) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCABULARY, bias=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A sharded model and its optimizer that has stepped once."""

    model: Model
    optimizer: torch.optim.Optimizer

    def local_tensors(self) -> Iterator[Tensor]:
        """Yield what this rank holds of every tensor."""
        for parameter in self.model.parameters():
            yield parameter.detach().to_local()
            for _, value in sorted(self.optimizer.state[parameter].items()):
                yield value.to_local() if hasattr(value, "to_local") else value

    def local_bytes(self) -> int:
        """Return the bytes of this rank's tensors."""
        return sum(tensor.nbytes for tensor in self.local_tensors())

    def rest(self, *targets: Tensor) -> None:
        """Before everything that is timed: what is copied into was idle for `IDLE_S`, and what is copied was just used, as in training."""
        for tensor in targets:
            tensor.sum()
        time.sleep(IDLE_S)
        for tensor in self.local_tensors():
            tensor.sum()

    def checksum(self) -> int:
        """Return a checksum of all bytes of this rank."""
        total = 0
        for tensor in self.local_tensors():
            total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), total)
        return total

    def clear(self) -> None:
        """Overwrite everything, so that a load has something to do."""
        with torch.no_grad():
            for tensor in self.local_tensors():
                tensor.fill_(-1)


def start() -> tuple[int, int]:
    """Join the other ranks over gloo; returns rank and world size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def build(size: Size, *, random: bool = True) -> Subject:
    """Build the state; `random` fills it with noise that differs by rank, else with a constant."""
    with torch.device("meta"):
        model = Model(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    with torch.no_grad():
        for parameter in model.parameters():
            moments = torch.zeros_like(parameter), torch.zeros_like(parameter)
            for tensor in (parameter, *moments):
                local = tensor.to_local()
                if random:
                    local.uniform_()
                else:
                    local.fill_(-1)
            state = {"step": torch.tensor(1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
            optimizer.state[parameter] = state
    return Subject(model=model, optimizer=optimizer)


def slowest(*seconds: float) -> list[float]:
    """Return each number's maximum over the ranks."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def total(number: float) -> float:
    """Return the sum over the ranks."""
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor[0])


class Report:
    """Appends what was measured to a file, one JSON object a line, from rank 0."""

    def __init__(self, path: Path, **always: Any) -> None:
        self._path, self._always = path, always

    def say(self, kind: str, **fields: Any) -> None:
        """Append one measurement."""
        if dist.get_rank() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, **self._always, **fields}) + "\n")


def drop_cache(directory: Path) -> int:
    """Write back and drop the cached pages of all files below; returns how many files there are."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return len(paths)


def sync_files(directory: Path) -> None:
    """Make all files below durable, for candidates that do not."""
    for path in directory.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Training:
    """Stands for training: steps of matrix products on one thread, about `step_s` long, timed one by one."""

    def __init__(self, step_s: float = 0.05, width: int = 768) -> None:
        self._left, self._right = torch.randn(width, width), torch.randn(width, width)
        self._products = 1
        for _ in range(3):
            self.step()
        begun = time.perf_counter()
        for _ in range(10):
            self.step()
        self._products = max(1, round(step_s / ((time.perf_counter() - begun) / 10)))

    def step(self) -> float:
        """Run one step; return its seconds."""
        begun = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._left, self._right)
        return time.perf_counter() - begun

    def run(self, *, steps: int = 1 << 30, until: Callable[[], bool] = lambda: False) -> list[float]:
        """Run steps until enough, or until told; return their seconds."""
        seconds: list[float] = []
        while len(seconds) < steps and not until():
            seconds.append(self.step())
        return seconds


def compared(outside: list[float], inside: list[float]) -> dict[str, float]:
    """Compare steps inside windows with those outside."""
    base = statistics.median(outside)
    return {
        "num_inside": len(inside),
        "num_outside": len(outside),
        "step_s": base,
        "mean_ratio": statistics.fmean(inside) / statistics.fmean(outside) if inside else 1.0,
        "worst_ratio": max(inside, default=base) / base,
        "worst_ratio_outside": max(outside) / base,
    }
