"""Safehold beside the limits of the machine and beside its peers: one run, all candidates interleaved round by round.

    python benchmarks/core.py --dir /scratch --out figures.json

Every round runs every candidate once, in an order that rotates, each as a job of its own (2 ranks, about 3 GB of model and Adam state);
what is printed are medians over the rounds. Peers that are not installed are left out and named. See `--help` for shorter runs.

What is not equal between candidates, in favour of the peers: the cost of `get_state_dict` is not counted for them, PyTorch DCP does not
make directory entries durable, torch_checkpointing makes nothing durable (its `durable` column adds one fsync of its files). What
stages in the background is measured beside the same steps of training for all, and what the optimizer's step has to wait then is part of
the pause.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from figures import Measurements, candidates_table, figures, figures_table
from limits import measure, measure_packs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
NAMES = {
    "save": "safehold",
    "overlap": "safehold, overlap=True",
    "dcp-sync": "PyTorch DCP, sync",
    "dcp-thread": "PyTorch DCP, async thread, kept stager",
    "dcp-thread-background": "PyTorch DCP, async thread, kept stager, staged in the background",
    "dcp-process": "PyTorch DCP, async process, kept shared stager",
    "torch-checkpointing": "torch_checkpointing, staged before it returns",
    "torch-checkpointing-background": "torch_checkpointing, staged in the background",
}
OURS = ("save", "overlap", "interference", "calls")
PEERS = tuple(name for name in NAMES if name not in OURS)
BYTES_PER_PARAMETER = 12
JOB_TIMEOUT_S = 400.0
console = Console(highlight=False, stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run of the benchmark consists of."""

    only: tuple[str, ...]
    rounds: int
    saves: int
    dim: int
    layers: int
    num_ranks: int = 2

    @property
    def num_bytes(self) -> int:
        """Bytes of the state: parameters and two moments, float32."""
        ffn = int(self.dim * 2.75)
        layer = 4 * self.dim**2 + 3 * self.dim * ffn + 2 * self.dim
        return BYTES_PER_PARAMETER * (self.layers * layer + 2 * 32_000 * self.dim + self.dim)


class Bench:
    """Runs jobs in a scratch directory and collects what they say."""

    def __init__(self, scratch: Path, setting: Setting) -> None:
        self.scratch, self.setting = scratch, setting
        self.out = scratch / "measurements.jsonl"
        self.out.touch()
        self.failed: list[str] = []
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SAFEHOLD_RUNTIME_DIR": str(scratch / "runtime"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    def note(self, kind: str, **fields: Any) -> None:
        """Add a measurement of our own."""
        with self.out.open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def job(self, script: str, variant: str, number: int, *options: str, num_ranks: int | None = None) -> bool:
        """Run one job under torchrun, watch its memory; returns whether it ended well."""
        run = self.scratch / ("run" if script == "ours.py" else "peers")
        run.mkdir(exist_ok=True)
        (self.scratch / "runtime").mkdir(mode=0o700, exist_ok=True)
        setting = self.setting
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks or setting.num_ranks), str(HERE / script)),
            *("--variant", variant, "--dir", str(run), "--out", str(self.out), "--round", str(number)),
            *("--saves", str(setting.saves), "--dim", str(setting.dim), "--layers", str(setting.layers), *options),
        ]
        log_path = self.scratch / f"{variant}-{number}.log"
        shared, peak, begun = processes.shared_memory_bytes(), 0, time.monotonic()
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
            try:
                while process.poll() is None:
                    if time.monotonic() - begun > JOB_TIMEOUT_S:
                        raise subprocess.TimeoutExpired(command, JOB_TIMEOUT_S)
                    used = [entry for pid in processes.descendants() if (entry := processes.facts(pid))]
                    anon = sum(entry.anon_bytes for entry in used)
                    peak = max(peak, anon + max(0, processes.shared_memory_bytes() - shared))
                    time.sleep(0.1)
            except BaseException as exc:
                process.kill()
                process.wait()
                if not isinstance(exc, subprocess.TimeoutExpired):
                    raise
        self.note("memory", variant=variant, round=number, peak_bytes=peak)
        if process.returncode != 0:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-25:])
            self.failed.append(f"{variant}, round {number}, exit code {process.returncode}:\n{tail}")
        return process.returncode == 0

    def clean(self) -> None:
        """Between candidates: no process, no file, no dirty page of the last one."""
        processes.stop_all()
        for name in ("run", "peers", "runtime"):
            shutil.rmtree(self.scratch / name, ignore_errors=True)
        os.sync()

    def candidate(self, name: str, number: int) -> None:
        """Run one candidate once."""
        if name == "limits":
            result = measure(self.scratch, self.setting.num_bytes, processes=self.setting.num_ranks, rounds=1)
            self.note("limits", variant="limits", round=number, **result)
        elif name == "save":
            # Three starts of the same run: the first saves and leaves as if killed, the second finds the agent and its memory, the
            # third finds neither.
            if self.job("ours.py", "save", number) and self.job("ours.py", "restore", number):
                processes.stop_all()
                drop_caches(self.scratch / "run")
                self.note("packs", variant="save", round=number, read_s=measure_packs(self.scratch / "run"))
                drop_caches(self.scratch / "run")
                self.job("ours.py", "restore", number)
        elif name == "interference":
            for num_ranks in (1, 2):
                self.job("ours.py", "interference", number, num_ranks=num_ranks)
                self.clean()
        elif name in OURS:
            self.job("ours.py", name, number)
        else:
            self.job("peers.py", name, number, "--load")
        self.clean()

    def run(self) -> None:
        """Run all rounds."""
        names = self.setting.only
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=self.setting.rounds * len(names))
            for number in range(self.setting.rounds):
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    if name == "calls" and number:
                        progress.advance(task)
                        continue
                    progress.update(task, description=f"round {number + 1}, {name}")
                    if not console.is_terminal:
                        console.print(f"round {number + 1} of {self.setting.rounds}: {name}")
                    self.candidate(name, number)
                    progress.advance(task)

    def measurements(self) -> list[dict[str, Any]]:
        """Return everything that was measured so far."""
        return [json.loads(line) for line in self.out.read_text().splitlines()]


def drop_caches(directory: Path) -> None:
    """Write back and drop the cached pages of the files below."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": model[0] if model else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load": os.getloadavg()[0],
    }


def parse_arguments() -> argparse.Namespace:
    names = ("limits", *OURS, *PEERS)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dir", type=Path, help="where to write checkpoints; default: a temporary directory")
    parser.add_argument("--out", type=Path, help="write everything that was measured to this JSON file")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=4, help="saves per job; the first counts apart")
    parser.add_argument("--quick", action="store_true", help="one round of a small state, to see that everything runs")
    arguments = parser.parse_args()
    arguments.only = tuple(arguments.only.split(",")) if arguments.only else names
    if unknown := set(arguments.only) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    only = arguments.only
    if importlib.util.find_spec("torch_checkpointing") is None:
        missing = [name for name in only if name.startswith("torch-checkpointing")]
        only = tuple(name for name in only if name not in missing)
        if missing:
            console.print("torch_checkpointing is not installed and left out (pip install torch_checkpointing==0.1.1)")
    if arguments.quick:
        setting = Setting(only=only, rounds=1, saves=2, dim=256, layers=4)
    else:
        setting = Setting(only=only, rounds=arguments.rounds, saves=arguments.saves, dim=1024, layers=16)
    processes.adopt_orphans()
    if arguments.dir is not None:
        os.makedirs(arguments.dir, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="safehold-bench-", dir=arguments.dir))
    bench = Bench(scratch, setting)
    facts = machine()
    try:
        bench.run()
    except KeyboardInterrupt:
        console.print("stopped; the tables hold what was measured so far")
    finally:
        processes.stop_all()
        measured = bench.measurements()
        shutil.rmtree(scratch, ignore_errors=True)

    everything = Measurements(measured)
    rows = figures(everything, num_ranks=setting.num_ranks)
    print(f"{setting.num_bytes / 1e9:.2f} GB, {setting.num_ranks} ranks, {setting.rounds} rounds; {facts}\n")
    print(figures_table(rows))
    print(candidates_table(everything, NAMES))
    for failure in bench.failed:
        print(f"failed: {failure}\n")
    for variant in everything.wrong_loads():
        print(f"loaded other values than it saved: {variant}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": facts, "measurements": measured}, indent=1) + "\n")
    return 1 if bench.failed or everything.wrong_loads() else 0


if __name__ == "__main__":
    sys.exit(main())
