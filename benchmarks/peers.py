"""One job of a candidate that is not safehold, under torchrun; `core.py` starts it. See `VARIANTS` for what can be asked for."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from subject import Report, Size, Training, build, drop_cache, slowest, start, sync_files
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save under way: `staged` returns once the state may change again, `done` once the candidate says that it is finished."""

    staged: Callable[[], Any]
    done: Callable[[], Any]


class Peer:
    """A candidate: how it saves, loads and ends. `syncs` tells whether it makes its files durable itself."""

    syncs = True

    def save(self, state: dict[str, Any], path: str) -> Saved:
        raise NotImplementedError

    def load(self, state: dict[str, Any], path: str) -> None:
        dcp.load(state, checkpoint_id=path)

    def close(self) -> None:
        pass


class DcpSync(Peer):
    """`dcp.save` as it comes."""

    def save(self, state: dict[str, Any], path: str) -> Saved:
        dcp.save(state, checkpoint_id=path)
        return Saved(staged=lambda: None, done=lambda: None)


class DcpAsync(Peer):
    """`dcp.async_save` with a stager that keeps its buffers."""

    def __init__(self, *, process: bool, background_staging: bool = False) -> None:
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._kind = kind
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=background_staging,
                use_non_blocking_copy=False,
            )
        )

    def save(self, state: dict[str, Any], path: str) -> Saved:
        response = dcp.async_save(
            state, checkpoint_id=path, async_checkpointer_type=self._kind, async_stager=self._stager
        )
        if isinstance(response, Future):
            return Saved(staged=lambda: None, done=response.result)
        return Saved(staged=response.staging_completion.result, done=response.upload_completion.result)

    def close(self) -> None:
        self._stager.close()


class TorchCheckpointing(Peer):
    """torch_checkpointing with what it needs on a CPU: no direct I/O, no pinned memory, no resharder (it gathers by CUDA)."""

    syncs = False

    def __init__(self, *, background_staging: bool) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=background_staging
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, state: dict[str, Any], path: str) -> Saved:
        written = self._manager.save(path, state)
        staging = self._manager._staging_future  # no public name gives it
        assert written is not None
        return Saved(staged=staging.result if staging is not None else lambda: None, done=written.result)

    def load(self, state: dict[str, Any], path: str) -> None:
        self._manager.load(path, into=state)

    def close(self) -> None:
        self._manager.close()


VARIANTS: dict[str, Callable[[], Peer]] = {
    "dcp-sync": DcpSync,
    "dcp-thread": lambda: DcpAsync(process=False),
    "dcp-thread-background": lambda: DcpAsync(process=False, background_staging=True),
    "dcp-process": lambda: DcpAsync(process=True),
    "torch-checkpointing": lambda: TorchCheckpointing(background_staging=False),
    "torch-checkpointing-background": lambda: TorchCheckpointing(background_staging=True),
}


def timed_save(
    peer: Peer, state: dict[str, Any], path: Path, train: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Save once; return pause, staged, window and durable seconds of the slowest rank, and the number of files.

    What stages in the background goes on beside `train` (a forward and a backward); the optimizer's step has to wait for the rest of it,
    and that counts as pause, as it does for safehold.
    """
    dist.barrier()
    begun = time.perf_counter()
    saved = peer.save(state, str(path))
    called = time.perf_counter() - begun
    train()
    waited = time.perf_counter()
    saved.staged()
    pause = called + time.perf_counter() - waited
    staged = time.perf_counter() - begun
    saved.done()
    window = time.perf_counter() - begun
    dist.barrier()
    if dist.get_rank() == 0 and not peer.syncs:
        sync_files(path)
    durable = max(window, time.perf_counter() - begun) if not peer.syncs else window
    called, pause, staged, window, durable = slowest(called, pause, staged, window, durable)
    return {
        "called_s": called,
        "pause_s": pause,
        "staged_s": staged,
        "window_s": window,
        "durable_s": durable,
    }


def work(arguments: argparse.Namespace) -> None:
    rank, _ = start()
    subject = build(Size(dim=arguments.dim, layers=arguments.layers))
    model, optimizer = get_state_dict(subject.model, subject.optimizer)
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    report = Report(arguments.out, variant=arguments.variant, round=arguments.round)
    peer = VARIANTS[arguments.variant]()
    training = Training() if arguments.variant.endswith("background") else None
    train = (lambda: training.run(steps=arguments.steps_between)) if training is not None else lambda: None
    path = arguments.dir / "none"
    for number in range(arguments.saves):
        if rank == 0 and number:
            shutil.rmtree(path, ignore_errors=True)
        path = arguments.dir / f"{arguments.variant}-{number}"
        subject.rest()
        figures = timed_save(peer, state, path, train)
        num_files = sum(1 for entry in path.rglob("*") if entry.is_file())
        report.say("save", first=number == 0, num_files=num_files, **figures)
    if arguments.load:
        before = subject.checksum()
        dist.barrier()
        subject.clear()
        if rank == 0:
            drop_cache(path)
        dist.barrier()
        begun = time.perf_counter()
        peer.load(state, str(path))
        seconds = slowest(time.perf_counter() - begun)[0]
        report.say("restore", source="flash", seconds=seconds, equal=subject.checksum() == before)
    peer.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=sorted(VARIANTS), required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--dim", type=int, default=Size().dim)
    parser.add_argument("--layers", type=int, default=Size().layers)
    parser.add_argument(
        "--steps-between", type=int, default=20, help="steps of training between a save and the optimizer's step"
    )
    parser.add_argument("--load", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    work(arguments)
    sys.stdout.flush()
    os._exit(0)  # some candidates leave threads that would keep the process


if __name__ == "__main__":
    main()
