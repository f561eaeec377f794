"""What a rank of `puppets` can do: a small real training with FSDP2, dropout, AdamW, a cosine schedule and shuffled data, and saves of it.

Everything is deterministic, so that a resumed run can be compared with an unbroken one bit for bit. Actions are the functions listed in
`ACTIONS`; arguments and results are JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in every rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import safehold
from safehold.checkpointer import Checkpointer
from safehold.errors import CheckpointError
from safehold.host import device_torch  # noqa: F401 - these too are imported here once
from safehold.state import optimizer_restore, process_group  # noqa: F401
from safehold.trainer import restorer, saver  # noqa: F401

RANK = "RANK"
DIM = 16
NUM_SAMPLES = 40
BATCH = 4


class Loader:
    """Shuffled samples; its state is the order of the epoch and the position in it."""

    def __init__(self, rank: int, world_size: int) -> None:
        data = torch.Generator().manual_seed(11)
        self.x = torch.randn(NUM_SAMPLES, DIM, generator=data)
        self.y = torch.randn(NUM_SAMPLES, 4, generator=data)
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator().manual_seed(5)
        self.order: list[int] = []
        self.position = 0

    def next(self) -> list[int]:
        if self.position + BATCH * self.world_size > len(self.order):
            self.order = torch.randperm(NUM_SAMPLES, generator=self.generator).tolist()
            self.position = 0
        start = self.position + BATCH * self.rank
        self.position += BATCH * self.world_size
        return self.order[start : start + BATCH]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = list(state["order"]), state["position"]
        self.generator.set_state(state["generator"])


class Training:
    """The training of this rank."""

    def __init__(self, kind: str, width: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(DIM, width), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(width, 4)
        )
        self.model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (self.world_size,))
            fully_shard(self.model, mesh=mesh)
        self.kind = kind
        torch.manual_seed(100 if kind == "none" else 100 + self.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.loader = Loader(0, 1) if kind == "none" else Loader(self.rank, self.world_size)
        self.extra: dict[str, Any] = {"table": torch.arange(12.0).reshape(3, 4)}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": safehold.PerRank(self.loader, policy="first"),
            "extra": self.extra,
            "done": 0,
        }

    def step(self) -> tuple[str, str, list[int]]:
        """One step; returns loss and learning rate exactly, and the samples."""
        ids = self.loader.next()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(self.loader.x[ids]), self.loader.y[ids])
        loss.backward()
        if self.kind == "none":  # every rank for itself
            pass
        elif self.kind == "plain":
            for param in self.model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= self.world_size
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.model.seen += 1
        self.extra["table"] += 1
        return loss.item().hex(), rate.hex(), ids


class _Rank:
    training: Training
    ckpt: Checkpointer
    handles: dict[int, safehold.SaveHandle]


_me = _Rank()


# -- actions -----------------------------------------------------------------------------------------------------------------


def group(timeout_s: float = 60.0) -> None:
    """Join the other ranks."""
    if not dist.is_initialized():
        rank, world_size = int(os.environ[RANK]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["PUPPET_RENDEZVOUS"], world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )


def build(kind: str = "fsdp2", width: int = 32) -> None:
    """Make model, optimizer and data."""
    group()
    _me.training = Training(kind, width)


def open(run: str, **options: Any) -> dict[str, Any]:
    """Make the Checkpointer (and the training, if there is none yet)."""
    if not hasattr(_me, "training"):
        build()
    _me.ckpt = Checkpointer(run, **options)
    _me.handles = {}
    return {"incarnation": _me.ckpt.incarnation, "run_id": _me.ckpt.run_id}


def restore(step: int | None = None, **options: Any) -> dict[str, Any]:
    """Restore; returns the step and where it came from."""
    found = _me.ckpt.restore(_me.training.state, step, **options)
    report = _me.ckpt.last_restore
    return {
        "step": found,
        "done": _me.training.state["done"],
        "source": report.source if report else None,
        "skipped": list(report.skipped) if report else [],
        "incarnation": _me.ckpt.incarnation,
    }


def train(until: int, sleep_s: float = 0.0, checkpoint: bool = True) -> list[Any]:
    """Train to a step, saving when due; returns what every step did."""
    training, did = _me.training, []
    for step in range(training.state["done"] + 1, until + 1):
        did.append([step, *training.step()])
        training.state["done"] = step
        if sleep_s:
            time.sleep(sleep_s)
        if checkpoint:
            handle = _me.ckpt.step(step, training.state)
            if handle is not None:
                _me.handles[step] = handle
    return did


def save(step: int, wait: bool = False, **options: Any) -> dict[str, Any]:
    """Save now; returns the handle's state and how long the call took."""
    begun = time.monotonic()
    handle = _me.handles[step] = _me.ckpt.save(step, _me.training.state, **options)
    took = time.monotonic() - begun
    if wait:
        handle.wait(30.0)
    return {**handle_of(step), "seconds": took}


def handle_of(step: int) -> dict[str, Any]:
    """What a save has become."""
    handle = _me.handles[step]
    error = handle.error
    return {
        "state": handle.state,
        "error": type(error).__name__ if error else None,
        "text": str(error) if error else "",
        "rank": error.rank if error else None,
        "figures": {name: getattr(handle.figures, name) for name in handle.figures.__dataclass_fields__},
    }


def handles() -> dict[int, str]:
    """State of every save."""
    return {step: handle.state for step, handle in _me.handles.items()}


def wait(step: int, timeout_s: float = 30.0) -> dict[str, Any]:
    """Wait until a save is durable."""
    _me.handles[step].wait(timeout_s)
    return handle_of(step)


def settle(step: int, timeout_s: float = 30.0) -> dict[str, Any]:
    """Wait until the fate of a save is known, whatever it is."""
    try:
        _me.handles[step].wait(timeout_s)
    except CheckpointError as exc:
        if _me.handles[step].state in ("staging", "staged"):
            raise exc
    return handle_of(step)


def prepare(wait: bool = True) -> None:
    """Prepare for saves."""
    _me.ckpt.prepare(_me.training.state, wait=wait)


def drain(timeout_s: float = 30.0) -> None:
    """Wait for everything."""
    _me.ckpt.wait(timeout_s)


def close(timeout_s: float | None = None) -> None:
    """Close the Checkpointer."""
    _me.ckpt.close(timeout_s)


def put(name: str, shape: list[int], value: float | None = None, kind: str = "plain") -> None:
    """Put a tensor into the state: filled with `value`, or with its row-major positions."""
    whole = torch.full(shape, value) if value is not None else torch.arange(float(math.prod(shape))).reshape(shape)
    if kind == "per_rank":
        _me.training.extra[name] = safehold.PerRank(whole)
    elif kind == "dtensor":
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        _me.training.extra[name] = distribute_tensor(whole, mesh, [Shard(0)])
    else:
        _me.training.extra[name] = whole


def put_value(name: str, value: Any) -> None:
    """Put a plain value into the state."""
    _me.training.extra[name] = value


def drop(name: str) -> None:
    """Take a leaf out of the state."""
    del _me.training.extra[name]


def value_of(name: str) -> Any:
    """Return a leaf: a tensor as nested lists (a DTensor whole)."""
    value = _me.training.extra[name]
    if isinstance(value, safehold.PerRank):
        value = value.value
    return _whole(value).tolist() if isinstance(value, torch.Tensor) else value


def digest() -> dict[str, str]:
    """Hashes of the whole parameters, optimizer states and the rest; equal on all world sizes if the values are."""
    found = {}
    for name, param in _me.training.model.named_parameters():
        found[name] = _hash(_whole(param))
        for key, value in sorted(_me.training.optimizer.state[param].items()):
            found[f"{name}/{key}"] = _hash(_whole(value))
    found["seen"] = str(int(_me.training.model.seen))
    found["table"] = _hash(_me.training.extra["table"])
    found["schedule"] = json.dumps(
        {key: value for key, value in _me.training.schedule.state_dict().items() if isinstance(value, (int, float))},
        sort_keys=True,
    )
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        repr((tuple(tensor.shape), str(tensor.dtype))).encode() + tensor.numpy().tobytes()
    ).hexdigest()[:16]


def facts() -> dict[str, Any]:
    """What the test wants to know about this rank."""
    return {
        "pid": os.getpid(),
        "num_failed": _me.ckpt.num_failed,
        "incarnation": _me.ckpt.incarnation,
        "agent_pid": _me.ckpt._run.client.agent_pid,
        "alive": _me.ckpt._run.client.alive,
    }


def evaluate(code: str) -> Any:
    """Run a few lines with `me` (training, ckpt, handles), and return `result`."""
    names: dict[str, Any] = {"me": _me, "torch": torch, "dist": dist, "os": os, "time": time, "result": None}
    exec(code, names)
    return names["result"]


def ping() -> str:
    """Answer."""
    return "pong"


ACTIONS = {
    action.__name__: action
    for action in (
        group, build, open, restore, train, save, wait, settle, prepare, drain, close, put, put_value, drop, value_of,
        digest, facts, evaluate, ping, handles, handle_of,
    )
}  # fmt: skip


def serve(commands: Any) -> None:
    """Carry out actions until the socket ends."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    with commands.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                said: dict[str, Any] = {"result": ACTIONS[request["action"]](*request["args"], **request["options"])}
            except BaseException as exc:
                said = {"error": _error(exc)}
            commands.sendall(json.dumps(said).encode() + b"\n")


def _error(exc: BaseException) -> dict[str, Any]:
    fields = {}
    if isinstance(exc, CheckpointError):
        fields = {name: getattr(exc, name) for name in ("step", "rank", "node", "tier", "path", "hint")}
    return {"class": type(exc).__name__, "text": str(exc), "fields": fields, "trace": traceback.format_exc()}
