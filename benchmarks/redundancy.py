"""What redundancy costs over real agents: hosts as namespaces on one machine, each with flash of its own, joined by loopback (needs root).

    python benchmarks/redundancy.py --hosts 4 --bytes 67108864 --saves 4

For each scheme a training runs on all hosts, whose steps are a fixed computation; it saves now and then. Then one host is lost with its
flash, a replacement comes, and the job is started again.

- protect: from the manifest to the last record of redundancy, over all hosts; GB/s are of all hosts' own data.
- steps: how much longer training steps took while the checkpoint was being protected than outside of saves and protections (medians).
- restore: of the job with the replacement, on the slowest rank, from the call to its return.
- rebuild: the replacement's files given back in the background, as its agent says; its rate beside what one process writes at best to the
  same disk in large direct requests (of disk), and the bytes that come in for it, which are as many times more as a stripe has data
  symbols, beside a raw socket over loopback (of loop). Both limits are measured just before the loss (`limits.py`, `network.py`).

All hosts share the machine's cores, so that these are figures of one machine that does the work of all.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "copies=1": {"copies": 1},
    "xor:4": {"parity": "xor:4"},
    "rs:2+2": {"parity": "rs:2+2"},
}
RUN = "/run/flash/run"
WIDTH = 256
ROUNDS = 3


# ---- a rank ----


def train(options: argparse.Namespace) -> None:
    """Train and save; print what each step took, as one line of JSON."""
    import torch
    import torch.distributed as dist

    import safehold

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = torch.empty(options.bytes // 4).uniform_(generator=generator)
    state = {"own": safehold.PerRank(own)}
    a, steps, saves = torch.randn(WIDTH, WIDTH, generator=generator), [], []
    with safehold.Checkpointer(RUN, keep=2, **json.loads(options.settings)) as ckpt:
        begun = time.time()
        first = ckpt.restore(state) or 0
        print("resumed", json.dumps({"step": first, "seconds": time.time() - begun}), flush=True)
        handle = None
        for number in range(1, options.saves + 1):
            for _ in range(options.steps):
                at = time.time()
                for _ in range(4):
                    a = torch.tanh(a @ a)
                steps.append((at, time.time() - at))
                if handle is not None and handle.state == "durable":
                    saves.append((begun, time.time()))
                    handle = None
            if handle is not None:
                handle.wait()
                saves.append((begun, time.time()))
            begun = time.time()
            handle = ckpt.save(first + number, state)
        if handle is not None:
            handle.wait()
            saves.append((begun, time.time()))
    print("did", json.dumps({"steps": steps, "saves": saves}), flush=True)
    dist.destroy_process_group()


# ---- around it ----


@dataclass
class Figures:
    """What one scheme came to."""

    protect_s: list[float] = field(default_factory=list)
    slowdown: float | None = None
    restore_s: float = 0.0
    rebuild_s: float | None = None
    disk_bytes_s: float = 0.0
    loop_bytes_s: float = 0.0


def protections(hosts: Any) -> list[tuple[float, float]]:
    """When each checkpoint that is there was committed, and protected by all."""
    found: dict[str, list[float]] = {}
    committed: dict[str, float] = {}
    for host in hosts:
        for path in host.flash.glob("run/checkpoints/*/*/*.json"):
            if path.name == "manifest.json":
                committed[path.parent.name + path.parent.parent.name] = path.stat().st_mtime
            elif path.name.startswith("redundancy-"):
                found.setdefault(path.parent.name + path.parent.parent.name, []).append(path.stat().st_mtime)
    return [(committed[key], max(times)) for key, times in sorted(found.items()) if len(times) == len(hosts)]


def slowdown(did: list[dict[str, Any]], windows: list[tuple[float, float]]) -> float | None:
    """Return the median step inside of the windows by the median step outside of them and of saves."""
    inside, outside = [], []
    for rank in did:
        for at, took in rank["steps"]:
            if any(start <= at and at + took <= end for start, end in windows):
                inside.append(took)
            elif not any(start - took <= at <= end for start, end in [*windows, *rank["saves"]]):
                outside.append(took)
    return statistics.median(inside) / statistics.median(outside) if inside and outside else None


def measure(name: str, options: argparse.Namespace, zygote: Any, root: Path) -> Figures:
    """Run one scheme."""
    from safehold.testing.hosts import Hosts, Job, run_job

    def run(hosts: Hosts, saves: int) -> Job:
        words = ["--train", "--bytes", str(options.bytes), "--saves", str(saves), "--steps", str(options.steps)]
        words += ["--settings", json.dumps(SCHEMES[name])]
        job = run_job(hosts, 1, Path(__file__), words, timeout_s=240.0)
        codes = job.wait(240)
        if any(codes):
            raise SystemExit(f"{name}: the job ended with {codes}\n{job.tail()}")
        return job

    def said(job: Job, word: str) -> list[dict[str, Any]]:
        return [json.loads(text) for text in re.findall(rf"{word} (\{{.*\}})", job.text)]

    figures = Figures()
    with Hosts(options.hosts, root=root / name.replace(":", "-"), zygote=zygote) as hosts:
        with run(hosts, options.saves) as job:
            did = said(job, "did")
        windows = protections(hosts)
        figures.protect_s = [end - start for start, end in windows]
        figures.slowdown = slowdown(did, windows)
        figures.disk_bytes_s, figures.loop_bytes_s = limits_of(root, options.bytes)
        if name != "none":
            hosts[1].kill()
            hosts.replace(1)
        with run(hosts, 1) as job:
            figures.restore_s = max(entry["seconds"] for entry in said(job, "resumed"))
            rebuilt = re.search(r"rebuilt step .*?: \d+ bytes in ([0-9.]+) s", job.text)
            figures.rebuild_s = float(rebuilt[1]) if rebuilt else None
    return figures


def limits_of(root: Path, size_bytes: int) -> tuple[float, float]:
    """Return bytes per second that the disk takes at best, and that a raw socket moves over loopback."""
    from limits import measure_disk
    from network import measure as measure_network

    with tempfile.TemporaryDirectory(prefix="limit-", dir=root) as scratch:
        disk = measure_disk(Path(scratch), size_bytes, num_files=1, rounds=ROUNDS)
    return disk["bytes"] / disk["write_s"], 1e9 * measure_network(max(1, size_bytes >> 20) << 20, ROUNDS)["raw_gb_s"]


def incoming(name: str) -> int:
    """How many bytes come in for each that is given back."""
    from safehold.policy.placement import parse_scheme

    scheme = parse_scheme(**SCHEMES[name])
    return 0 if scheme is None else scheme.num_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of each host's state")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150, help="between saves")
    parser.add_argument("--only", default=",".join(SCHEMES))
    parser.add_argument(
        "--dir", default=tempfile.gettempdir(), help="where the flash of all hosts is (not below /dev or /run)"
    )
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return
    from safehold.testing.hosts import Zygote

    zygote = Zygote(
        ("torch", "torch.distributed", "numpy", "safehold", "safehold.checkpointer", "safehold.trainer.saver")
    )
    total = options.hosts * options.bytes
    print(f"{options.hosts} hosts, {options.bytes / 1e6:.0f} MB each, flash in {options.dir}")
    heads = f"{'scheme':10} {'protect s':>10} {'GB/s':>6} {'steps':>7} {'restore s':>10} {'rebuild s':>10} {'GB/s':>6}"
    print(f"{heads} {'of disk':>8} {'of loop':>8} {'disk GB/s':>10} {'loop GB/s':>10}")
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        try:
            for name in options.only.split(","):
                figures = measure(name, options, zygote, Path(root))
                protect_s = statistics.median(figures.protect_s) if figures.protect_s else None
                rate = options.bytes / figures.rebuild_s if figures.rebuild_s else None
                row = [
                    f"{name:10}",
                    _figure(protect_s, 10),
                    _figure(None if protect_s is None else total / protect_s / 1e9, 6),
                    _figure(figures.slowdown, 6) + "x",
                    _figure(figures.restore_s, 10),
                    _figure(figures.rebuild_s, 10),
                    _figure(None if rate is None else rate / 1e9, 6),
                    _figure(None if rate is None else rate / figures.disk_bytes_s, 8),
                    _figure(None if rate is None else rate * incoming(name) / figures.loop_bytes_s, 8),
                    _figure(figures.disk_bytes_s / 1e9, 10),
                    _figure(figures.loop_bytes_s / 1e9, 10),
                ]
                print(" ".join(row), flush=True)
        finally:
            zygote.close()


def _figure(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"


if __name__ == "__main__":
    sys.exit(main())
