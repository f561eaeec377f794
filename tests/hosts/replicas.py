"""Ranks that all hold the same: `replicas.py RUN MIB [--save] [--settings DICT] [--slow FILE BYTES_S]` saves it, or restores it.

Prints `restored` and facts in JSON, `hash HASH`, and a line for each warning of safehold. FILE makes all ranks share a slow storage.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import logging
import time

import torch
import torch.distributed as dist

import safehold
from safehold.errors import CheckpointError
from safehold.testing.hosts import tell
from safehold.testing.slow_tier import SharedRate, SlowTier


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("mib", type=int)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--slow", nargs=2, metavar=("FILE", "BYTES_S"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    generator = torch.Generator().manual_seed(1 if options.save else 2)
    pieces = max(1, options.mib // 4)
    state = {f"w{n}": torch.randint(0, 255, (4 << 20,), dtype=torch.uint8, generator=generator) for n in range(pieces)}
    with safehold.Checkpointer(options.run, **eval(options.settings)) as ckpt:
        if options.save:
            ckpt.save(1, state).wait(60)
            tell("committed", 1)
        else:
            if options.slow:
                rate = SharedRate(options.slow[0], float(options.slow[1]))
                ckpt._restorer._tier = SlowTier(ckpt._restorer._tier, rate)  # type: ignore[assignment]
            dist.barrier()
            print("restoring", flush=True)
            begun = time.monotonic()
            try:
                step = ckpt.restore(state)
            except CheckpointError as exc:
                print(f"failed {type(exc).__name__}: {exc}", flush=True)
                raise
            report = ckpt.last_restore
            facts = {
                "step": step,
                "source": report.source,
                "bytes": report.bytes_by_source,
                "storage": report.storage_bytes,
                "node": report.node_storage_bytes,
                "documents": report.documents,
                "seconds": report.seconds,
                "all_s": time.monotonic() - begun,
            }
            tell("restored", step)
            print(f"restored {json.dumps(facts)}", flush=True)
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(state):
            digest.update(state[name].numpy())
        print(f"hash {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


main()
