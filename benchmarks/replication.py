"""What a second place costs training, and how fast copies go there and come back, beside what the machine can do.

    python benchmarks/replication.py --bytes 268435456 --rounds 5 --directory /a/disk

One process trains: steps of matrix products on one thread. In each round, in turn, so that all see the same machine:

- off, on: a save of a job without and one with `remote`. Once it is durable, training steps are timed: with `remote` for as long as the
  copy takes, without it for as many steps. So what differs is the copy, and not the flush.
- replicate, fetch: the same checkpoint there and back, unpaced, as `safehold replicate` and `safehold fetch` do it; from disk, not
  from the cache.
- copy: its files, read and written by as many threads in pieces of the same size, and fsynced; no checksum.
- socket: as many bytes over a loopback socket, from memory to memory.

Prints one table, or with `--json` one JSON object: medians of the rounds; shares are of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from subject import Training, drop_cache, sync_files

import safehold
from safehold.pipeline.catalog import find_restore_candidate
from safehold.pipeline.replicate import replicate
from safehold.pipeline.trials import CopySettings
from safehold.tiers.open import open_tier

CHUNK_BYTES = CopySettings().chunk_bytes
THREADS = CopySettings().packs_at_once
WAIT_S = 60.0
MIN_STEPS = 5


class Job:
    """A job of one rank that saves; `remote` None: without a second place."""

    def __init__(self, root: Path, size: int, remote: Path | None) -> None:
        more = {} if remote is None else {"remote": str(remote), "remote_keep": 1}
        self.has_remote = remote is not None
        self.run = root / ("on" if self.has_remote else "off")
        self.ckpt = safehold.Checkpointer(str(self.run), keep=1, delete_grace_s=0, agent_linger_s=1, **more)
        self.state = {"weights": torch.empty(size // 4).uniform_()}
        self.ckpt.restore(self.state)
        self._step = 0

    def save(self) -> Any:
        """Save; return the handle once it is durable."""
        self._step += 1
        handle = self.ckpt.save(self._step, self.state)
        handle.wait()
        return handle


def steps_while_copied(job: Job, training: Training) -> tuple[list[float], float]:
    """Train until the copy is there; return seconds of the steps, and of the copy."""
    handle, there = job.save(), threading.Event()

    def wait() -> None:
        handle.wait(WAIT_S, tier="remote")
        there.set()

    begun = time.perf_counter()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    steps = training.run(until=there.is_set)
    thread.join()
    return steps, time.perf_counter() - begun


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def copy_files(files: list[Path], target: Path) -> None:
    """Copy files as plainly as it can be done, and make them durable."""
    target.mkdir()

    def one(path: Path) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with path.open("rb", buffering=0) as source, (target / path.name).open("wb", buffering=0) as out:
            while count := source.readinto(buffer):
                out.write(buffer[:count])
            os.fsync(out.fileno())

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, files))


def move_over_socket(size: int) -> None:
    """Send so many bytes over the loopback."""
    one, other = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname(), timeout=WAIT_S) as out:
                for start in range(0, size, CHUNK_BYTES):
                    out.sendall(one[: min(CHUNK_BYTES, size - start)])

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        came, _ = server.accept()
        with came:
            left = size
            while left:
                count = came.recv_into(other)
                assert count
                left -= count
        thread.join()


def move_once(source: Path, root: Path) -> tuple[int, dict[str, float]]:
    """Copy the newest checkpoint of a run there and back, and beside that its files and as many bytes."""
    found = find_restore_candidate(open_tier(source)).checkpoint
    assert found is not None
    there, back, plain = root / "there", root / "back", root / "plain"
    files = sorted(source.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    seconds = {}

    def cold(directory: Path) -> None:
        sync_files(directory)
        drop_cache(directory)

    commit = found.commit
    cold(source)
    seconds["replicate"] = timed(lambda: replicate(open_tier(source), open_tier(there, name="remote"), commit))
    cold(there)
    seconds["fetch"] = timed(lambda: replicate(open_tier(there), open_tier(back), commit, restrict=True))
    cold(source)
    seconds["copy"] = timed(lambda: copy_files(files, plain))
    seconds["socket"] = timed(lambda: move_over_socket(size))
    for directory in (there, back, plain):
        shutil.rmtree(directory)
    return size, seconds


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def steps_report(times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Compare steps with and without copies; ratios are of the same round."""
    found: dict[str, Any] = {}
    for name, rounds in times.items():
        every = [second for steps in rounds for second in steps]
        found[f"steps_{name}"] = len(every)
        found[f"step_{name}_median_ms"] = round(1000 * statistics.median(every), 2)
        found[f"step_{name}_p95_ms"] = round(1000 * p95(every), 2)
    for what, of in (("median", statistics.median), ("p95", p95)):
        ratios = [of(on) / of(off) for on, off in zip(times["on"], times["off"], strict=True)]
        found[f"step_{what}_ratio"] = round(statistics.median(ratios), 3)
    return found


def measure(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    training = Training(step_s=options.step_s)
    jobs = {"off": Job(root, options.bytes, None), "on": Job(root, options.bytes, root / "second")}
    times: dict[str, list[list[float]]] = {"off": [], "on": []}
    copied_s, moved = [], []
    try:
        for job in jobs.values():
            job.save()
        jobs["on"].ckpt.wait()
        for number in range(options.rounds):
            num_steps = MIN_STEPS
            if number % 2:  # which of them is first changes with the round
                jobs["off"].save()
                times["off"].append(training.run(steps=len(times["on"][-1])))
            steps, seconds = steps_while_copied(jobs["on"], training)
            while len(steps) < num_steps:  # a copy that is shorter than that: some more saves
                more, seconds = steps_while_copied(jobs["on"], training)
                steps += more
            times["on"].append(steps)
            copied_s.append(seconds)
            if not number % 2:
                jobs["off"].save()
                times["off"].append(training.run(steps=len(steps)))
            moved.append(move_once(jobs["off"].run, root))
    finally:
        for job in jobs.values():
            job.ckpt.close()
    size = moved[0][0]
    report = {"bytes": size, "rounds": options.rounds, "num_cores": os.cpu_count(), **steps_report(times)}
    report["beside_training_gb_s"] = round(size / 1e9 / statistics.median(copied_s), 3)
    for name in ("replicate", "fetch", "copy", "socket"):
        report[f"{name}_gb_s"] = round(size / 1e9 / statistics.median(seconds[name] for _, seconds in moved), 3)
    for name in ("replicate", "fetch"):
        for beside in ("copy", "socket"):
            shares = [seconds[beside] / seconds[name] for _, seconds in moved]
            report[f"{name}_share_of_{beside}"] = round(statistics.median(shares), 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=256 << 20, help="bytes of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.05, help="seconds of a training step")
    parser.add_argument(
        "--directory", type=Path, help="where the run and its copies are, for the time of the measurement"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="replication-") as root:
        report = measure(Path(root), options)
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return
    width = max(map(len, report))
    for name, value in report.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
