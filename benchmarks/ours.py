"""One job of safehold, under torchrun; `core.py` starts it.

- save: the first save after `prepare`, later ones, their cost in CPU and memory; leaves as if killed, so that the agent keeps its memory.
- overlap: saves whose staging runs beside the next forward and backward.
- interference: training steps inside windows and outside, saves back to back.
- restore: one restore by a new process; where from depends on what `core.py` left running.
- calls: system calls of agent and flusher in one save, counted by strace.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import torch
import torch.distributed as dist
from subject import IDLE_S, Report, Size, Subject, Training, build, compared, slowest, start, total

import safehold

GIB = 1 << 30
METADATA_CALLS = re.compile(
    r"^(open|openat|creat|close|mkdir|mkdirat|rename|renameat|renameat2|link|linkat|unlink|unlinkat|rmdir|f?stat|lstat|"
    r"newfstatat|statx|getdents64|fsync|fdatasync|fallocate|ftruncate|access|faccessat2?)$"
)


def agent_processes() -> list[int]:
    """Return the agent and its flushers of this benchmark."""
    return processes.with_environment(
        "SAFEHOLD_RUNTIME_DIR", os.environ["SAFEHOLD_RUNTIME_DIR"], containing="safehold.agent"
    )


def agent_cpu_s() -> float:
    """Return the CPU seconds that agent and flushers have used."""
    return sum(entry.cpu_s for pid in agent_processes() if (entry := processes.facts(pid)))


def checkpoint_files(run: Path) -> int:
    """Return the number of files of the newest checkpoint."""
    attempts = sorted(path.parent for path in run.glob("checkpoints/*/*/manifest.json"))
    return sum(1 for entry in attempts[-1].iterdir() if entry.is_file())


class Job:
    """What the modes share: the state, the checkpointer, the report."""

    def __init__(self, arguments: argparse.Namespace, *, random: bool, **options: Any) -> None:
        self.rank, self.world_size = start()
        self.saves: int = arguments.saves
        self.run: Path = arguments.dir
        self.report = Report(arguments.out, variant=arguments.variant, round=arguments.round)
        self.subject: Subject = build(Size(dim=arguments.dim, layers=arguments.layers), random=random)
        self.state = {"model": self.subject.model, "optimizer": self.subject.optimizer}
        self.bytes = int(total(self.subject.local_bytes()))
        self.ckpt = safehold.Checkpointer(str(self.run), keep=2, **options)

    def prepare(self) -> None:
        """Have arenas and settlement ready before the first save, and say how long it took."""
        begun = time.perf_counter()
        self.ckpt.prepare(self.state)
        self.report.say("prepare", seconds=slowest(time.perf_counter() - begun)[0], bytes=self.bytes)

    def save(self, step: int) -> tuple[Any, float, float]:
        """Save at `step` with idle trainers; return the handle and the seconds until it returned and until durable, of the slowest."""
        dist.barrier()
        begun = time.perf_counter()
        handle = self.ckpt.save(step, self.state)
        called = time.perf_counter() - begun
        handle.wait()
        window = time.perf_counter() - begun
        called, window = slowest(called, window)
        return handle, called, window


class PlainCopy:
    """Copies the same tensors, one by one, into populated memory of the same process: what a pause stands beside.

    What it copies into has been idle as long as the arena has (see `Subject.rest`), about; a copy right after another is faster.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tensors = list(job.subject.local_tensors())
        self._targets = [torch.empty_like(tensor).fill_(0) for tensor in self._tensors]

    def rest(self) -> None:
        """See `Subject.rest`."""
        self._job.subject.rest(*self._targets)

    def measure(self) -> float:
        """Copy on all ranks at once, as a save does; returns the seconds of the slowest."""
        dist.barrier()
        begun = time.perf_counter()
        for target, tensor in zip(self._targets, self._tensors, strict=True):
            target.copy_(tensor)
        seconds = slowest(time.perf_counter() - begun)[0]
        self._job.report.say("copy", seconds=seconds)
        return seconds

    def measure_restored(self, source_idle_s: float) -> None:
        """Copy as a restore does: from memory that nobody has touched for so long, into memory that was just made."""
        time.sleep(source_idle_s)
        for target in self._targets:
            target.sum()
        time.sleep(IDLE_S)
        self.measure()


def save(arguments: argparse.Namespace) -> None:
    """See the head of this file."""
    job = Job(arguments, random=True)
    copy = PlainCopy(job)
    job.prepare()
    cpu_s, moved = agent_cpu_s(), 0
    for number in range(job.saves):
        if number:
            copy.rest()
        else:
            job.subject.rest()  # arena and copies were made right before, both at once
        copy_s = copy.measure()
        handle, called, window = job.save(number + 1)
        moved += job.bytes
        job.report.say(
            "save",
            first=number == 0,
            pause_s=called,
            pause_ratio=called / copy_s,
            staged_s=slowest(handle.figures.stage_s)[0],
            told_pause_s=slowest(handle.figures.pause_s)[0],
            window_s=window,
            durable_s=window,
            num_files=checkpoint_files(job.run),
        )
    usage = [entry for pid in agent_processes() if (entry := processes.facts(pid))]
    job.report.say(
        "agent",
        cpu_s_per_gib=(agent_cpu_s() - cpu_s) / (moved / GIB),
        num_processes=len(usage),
        anon_bytes=sum(entry.anon_bytes for entry in usage),
        arena_bytes=max((entry.shared_bytes for entry in usage), default=0),
    )
    checksum = job.subject.checksum()
    (job.run.parent / f"checksum-{job.rank}").write_text(str(checksum))
    dist.barrier()
    os._exit(0)


def restore(arguments: argparse.Namespace) -> None:
    """See the head of this file."""
    job = Job(arguments, random=False)
    saved = job.run.parent / f"checksum-{job.rank}"
    wanted, idle_s = int(saved.read_text()), time.time() - saved.stat().st_mtime
    dist.barrier()
    begun = time.perf_counter()
    step = job.ckpt.restore(job.state)
    seconds = slowest(time.perf_counter() - begun)[0]
    equal = slowest(float(job.subject.checksum() != wanted))[0] == 0
    job.report.say("restore", source=job.ckpt.last_restore.source, seconds=seconds, equal=equal, step=step)
    if job.ckpt.last_restore.source == "memory":
        PlainCopy(job).measure_restored(idle_s)
    dist.barrier()
    os._exit(0)


def overlap(arguments: argparse.Namespace) -> None:
    """See the head of this file."""
    job = Job(arguments, random=True, overlap=True)
    parameters = list(job.subject.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    training = Training()
    job.prepare()

    def training_step() -> float:
        training.run(steps=arguments.steps_between)
        begun = time.perf_counter()
        job.subject.optimizer.step()
        return time.perf_counter() - begun

    plain = [training_step() for _ in range(2)]
    for number in range(job.saves):
        job.subject.rest()
        dist.barrier()
        begun = time.perf_counter()
        handle = job.ckpt.save(number + 1, job.state)
        called = time.perf_counter() - begun
        stepped = training_step()
        handle.wait()
        window = time.perf_counter() - begun
        called, stepped, window = slowest(called, stepped, window)
        job.report.say(
            "save",
            first=number == 0,
            pause_s=slowest(handle.figures.pause_s)[0],
            called_s=called,
            staged_s=slowest(handle.figures.stage_s)[0],
            window_s=window,
            durable_s=window,
            optimizer_step_s=stepped,
            optimizer_step_outside_s=sum(plain) / len(plain),
        )
    job.ckpt.close()


def interference(arguments: argparse.Namespace) -> None:
    """See the head of this file."""
    job = Job(arguments, random=True)
    training = Training()
    job.prepare()
    job.save(1)
    outside, inside = [], []
    step = 2
    while -slowest(-len(inside))[0] < arguments.steps_inside and step < 40:  # all ranks go on until the last has enough
        outside += training.run(steps=25)
        dist.barrier()
        handle = job.ckpt.save(step, job.state)
        inside += training.run(until=lambda handle=handle: handle.durable or handle.failed)
        handle.wait()
        step += 1
    figures = compared(outside, inside)
    names = sorted(figures)
    worst = dict(zip(names, slowest(*(float(figures[name]) for name in names)), strict=True))
    job.report.say("interference", num_ranks=job.world_size, num_cores=os.cpu_count(), **worst)
    job.ckpt.close()


def calls(arguments: argparse.Namespace) -> None:
    """See the head of this file."""
    job = Job(arguments, random=False)
    job.prepare()
    job.save(1)
    tracer, output = None, Path(tempfile.mkdtemp(prefix="calls-")) / "counts"
    if job.rank == 0 and shutil.which("strace"):
        attach = [option for pid in agent_processes() for option in ("-p", str(pid))]
        tracer = subprocess.Popen(
            ["strace", "-c", "-f", "-o", str(output), *attach], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(1.5)
    job.save(2)
    if tracer is not None:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(30)
        counted = parse_strace(output.read_text()) if output.exists() else {}
        metadata = sum(number for name, number in counted.items() if METADATA_CALLS.match(name))
        job.report.say("calls", total=sum(counted.values()), metadata=metadata, by_name=counted)
    shutil.rmtree(output.parent, ignore_errors=True)
    dist.barrier()
    job.ckpt.close()


def parse_strace(text: str) -> dict[str, int]:
    """Return the number of calls by name from the table of `strace -c`."""
    counted: dict[str, int] = {}
    for line in text.splitlines():
        columns = line.split()
        if len(columns) >= 5 and re.fullmatch(r"[\d.]+", columns[0]) and columns[-1] != "total":
            counted[columns[-1]] = counted.get(columns[-1], 0) + int(columns[3])
    return counted


MODES: dict[str, Callable[[argparse.Namespace], None]] = {
    "save": save,
    "restore": restore,
    "overlap": overlap,
    "interference": interference,
    "calls": calls,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=sorted(MODES), required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--dim", type=int, default=Size().dim)
    parser.add_argument("--layers", type=int, default=Size().layers)
    parser.add_argument(
        "--steps-between", type=int, default=20, help="training steps of 50 ms beside which staging overlaps"
    )
    parser.add_argument("--steps-inside", type=int, default=60, help="steps to see inside windows")
    arguments = parser.parse_args()
    MODES[arguments.variant](arguments)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
