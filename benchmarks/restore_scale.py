"""Restores of replicas on several hosts from a storage that they share, with and without passing on between the agents.

    python benchmarks/restore_scale.py --hosts 4 --bytes 1073741824 --rate 209715200 --rounds 3 --dir /var/tmp

The hosts are namespaces of this machine, each with its own agent and one rank, all of which hold the same tensors. The storage is a file
system whose packs are read no faster than `--rate` by all together, as over one link. Agents do not linger, so memory is no source. Modes
take turns. Prints one JSON object: for each mode the medians of the slowest rank's seconds, of the bytes read from storage (as the
storage counts them, and by the reports), and of what that is in times of the state.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from safehold.testing.slow_tier import SharedRate, SlowTier

PRELOAD = ("torch", "torch.distributed", "numpy", "safehold", "safehold.checkpointer", "safehold.trainer.saver")
PIECE_BYTES = 16 << 20
WAIT_S = 300.0


def be_a_rank(task: str, run: str, size: int, rate_path: str, bytes_s: float, settings: dict[str, Any]) -> None:
    """Save, or restore and print what came of it."""
    import torch
    import torch.distributed as dist

    import safehold

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=WAIT_S))
    generator = torch.Generator().manual_seed(7 if task == "save" else 8)
    names = [f"w{number:04d}" for number in range(max(1, size // PIECE_BYTES))]
    state = {name: torch.randint(0, 255, (PIECE_BYTES,), dtype=torch.uint8, generator=generator) for name in names}
    with safehold.Checkpointer(run, agent_linger_s=0.0, **settings) as ckpt:
        if task == "save":
            ckpt.save(1, state).wait(WAIT_S)
        else:
            ckpt._restorer._tier = SlowTier(ckpt._restorer._tier, SharedRate(rate_path, bytes_s))  # type: ignore[assignment]
            dist.barrier()
            ckpt.restore(state)
            report = ckpt.last_restore
            assert report is not None
            facts = {"s": report.seconds, "storage_bytes": report.storage_bytes, "by_source": report.bytes_by_source}
            print(f"facts {json.dumps(facts)}", flush=True)
        sums = [int(state[name].to(torch.int64).sum()) for name in names]
        print(f"sums {hash(tuple(sums))}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Save once, restore in all modes in turn."""
    from safehold.testing.hosts import Hosts, Zygote, run_job

    found: dict[str, list[dict[str, Any]]] = {"auto": [], "off": []}
    zygote = Zygote(PRELOAD)
    try:
        with Hosts(options.hosts, root=directory / "hosts", zygote=zygote) as hosts:
            rate_path = hosts.shared / "rate"
            rate = SharedRate(rate_path, options.rate)

            def run(task: str, settings: dict[str, Any]) -> str:
                args = [task, str(hosts.shared / "run"), str(options.bytes), str(rate_path), str(options.rate)]
                with run_job(hosts, 1, __file__, ["--rank", *args, json.dumps(settings)], timeout_s=WAIT_S) as job:
                    codes = job.wait(WAIT_S)
                    if any(codes):
                        raise RuntimeError(f"{task} {settings} failed: {job.tail()}")
                    return job.text

            sums = set(re.findall(r"sums (\S+)", run("save", {})))
            for number in range(options.rounds):
                for mode in ("auto", "off") if number % 2 == 0 else ("off", "auto"):
                    before = rate.total_bytes()
                    text = run("restore", {"restore_pass_on": mode})
                    if set(re.findall(r"sums (\S+)", text)) != sums:
                        raise RuntimeError(f"{mode}: other values were restored than were saved")
                    ranks = [json.loads(line) for line in re.findall(r"facts (.*)", text)]
                    entry = {
                        "s": max(rank["s"] for rank in ranks),
                        "storage_bytes": rate.total_bytes() - before,
                        "reported_bytes": sum(rank["storage_bytes"] for rank in ranks),
                    }
                    print(f"{mode}: {entry}", file=sys.stderr, flush=True)
                    found[mode].append(entry)
    finally:
        zygote.close()
    return {mode: summary(entries, options.bytes) for mode, entries in found.items()}


def summary(entries: list[dict[str, Any]], size: int) -> dict[str, float]:
    """Medians of the rounds."""
    medians = {key: statistics.median(entry[key] for entry in entries) for key in entries[0]}
    return {**medians, "times_of_state": medians["storage_bytes"] / size, "rounds": len(entries)}


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    if sys.argv[1:2] == ["--rank"]:
        task, run, size, rate_path, bytes_s, settings = sys.argv[2:]
        be_a_rank(task, run, int(size), rate_path, float(bytes_s), json.loads(settings))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of the state, which every rank holds")
    parser.add_argument("--rate", type=float, default=200 << 20, help="bytes per second of the storage")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where the hosts and the run directory are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        figures = measure(options, Path(directory))
    settings = {"hosts": options.hosts, "bytes": options.bytes, "rate_bytes_s": options.rate}
    print(json.dumps({**settings, **figures}, indent=2))


if __name__ == "__main__":
    main()
