"""Planning cost of a new inventory: Llama-3-70B with Adam, FSDP over dim 0, N ranks.

Measures what the lead does (merge the parts of all ranks, check coverage, encode and store the plan), the bytes stored, the
peak memory, and what one rank does (inventory to part). With `--peer`, does the coordinator's work of PyTorch DCP for the
same state in the same run, with synthetic local plans of the same content, without the network, and prints the ratio.
Seconds are CPU seconds of the one thread that works, so that neighbours on the machine do not count; wall seconds stand
beside them. Each measurement runs in a process of its own.

    python benchmarks/planning.py [--ranks 64 256 1856] [--peer] [--peer-ranks 64 256] [--no-gc] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

DIM, FFN, VOCAB, KV, LAYERS = 8192, 28672, 128256, 1024, 80


def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The 723 parameters of Llama-3-70B."""
    yield "tok_embeddings.weight", (VOCAB, DIM)
    for layer in range(LAYERS):
        for name, shape in (
            ("attention.wq", (DIM, DIM)),
            ("attention.wk", (KV, DIM)),
            ("attention.wv", (KV, DIM)),
            ("attention.wo", (DIM, DIM)),
            ("feed_forward.w1", (FFN, DIM)),
            ("feed_forward.w2", (DIM, FFN)),
            ("feed_forward.w3", (FFN, DIM)),
            ("attention_norm", (DIM,)),
            ("ffn_norm", (DIM,)),
        ):
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", (DIM,)
    yield "output.weight", (VOCAB, DIM)


PARAMETERS = list(parameters())


def row_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """First row and number of rows of a rank's shard, as `torch.chunk` deals them."""
    chunk = -(-rows // world_size)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


class Clock:
    """Collects CPU seconds by name, and wall seconds of all together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.wall_s = 0.0

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        started, started_cpu = time.perf_counter(), time.process_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - started_cpu
        self.wall_s += time.perf_counter() - started
        return result


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def store(write: Callable[[IO[bytes]], Any]) -> int:
    """Write a file and fsync it, as both libraries do; returns its size."""
    with tempfile.TemporaryFile() as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


# ---- safehold ----


def inventory(rank: int, world_size: int) -> Any:
    """What a rank holds: bf16 parameters and fp32 moments, sharded; a scalar step for each parameter, the same on all ranks."""
    from safehold.types import Holders, Inventory, ObjectSpec, Rect, Shard, TensorSpec

    alone, everybody = Holders(ranks=(rank,)), Holders(ranks=tuple(range(world_size)))
    shards = []

    def add(name: str, dtype: str, shape: tuple[int, ...], rect: Rect | None, holders: Holders) -> None:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        shards.append(Shard(spec=spec, rects=(rect,) if rect is not None else (), holders=holders))

    for name, shape in PARAMETERS:
        start, count = row_range(shape[0], rank, world_size)
        rect = Rect((start, *(0 for _ in shape[1:])), (count, *shape[1:])) if count else None
        add(f"model.{name}", "bfloat16", shape, rect, alone)
        add(f"optim.state.{name}.exp_avg", "float32", shape, rect, alone)
        add(f"optim.state.{name}.exp_avg_sq", "float32", shape, rect, alone)
        add(f"optim.state.{name}.step", "float32", (), Rect((), ()), everybody)
    shards.sort(key=lambda shard: shard.spec.name)
    objects = tuple(ObjectSpec(name=name) for name in ("optim.param_groups.(0).lr", "trainer.rng", "trainer.step"))
    return Inventory(rank=rank, world_size=world_size, shards=tuple(shards), objects=objects)


def rank_part(held: Any) -> bytes:
    """What a rank does: choose what to write, lay out its packs, encode its part."""
    from safehold.format import pack, plan
    from safehold.policy import planning

    assignments = planning.pieces_to_write(held)
    layouts = pack.layout(planning.pieces_in(held, assignments))
    return plan.encode_part(planning.make_part(held, assignments, layouts))


def measure_safehold(world_size: int) -> dict[str, Any]:
    from safehold.format import plan
    from safehold.policy import coverage, resharding
    from safehold.types import Rect

    encoded, rank_s = [], []
    for rank in range(world_size):
        held = inventory(rank, world_size)
        started = time.process_time()
        encoded.append(rank_part(held))
        rank_s.append(time.process_time() - started)
    memory_before = peak_bytes()
    clock = Clock()
    nodes = [rank // 8 for rank in range(world_size)]
    merged = clock.run("merge", lambda: plan.merge_parts(encoded, nodes))
    counts = clock.run("coverage", lambda: coverage.check(merged))
    stored = clock.run("encode", lambda: plan.encode_plan(merged))
    clock.run("store", lambda: store(lambda file: file.write(stored)))
    lead_peak = peak_bytes()

    # A reader at another world size, for the record: one rank of 48 finds the sources of its shards.
    reader = Clock()
    decoded = reader.run("decode", lambda: plan.decode_plan(stored))
    wanted = [
        (shard.spec.name, rect) for shard in inventory(5, 48).shards for rect in shard.rects if isinstance(rect, Rect)
    ]
    found = reader.run("transfers", lambda: resharding.transfers(decoded, wanted))
    return {
        "library": "safehold",
        "ranks": world_size,
        "rows": merged.num_rows,
        "counting": int(counts.sum()),
        "lead_s": clock.total_s,
        "lead_wall_s": clock.wall_s,
        "phases_s": clock.seconds,
        "rank_s": sorted(rank_s)[len(rank_s) // 2],
        "parts_bytes": sum(map(len, encoded)),
        "stored_bytes": len(stored),
        "peak_bytes": lead_peak,
        "peak_before_lead_bytes": memory_before,
        "reader_s": reader.seconds,
        "reader_transfers": len(found),
    }


# ---- PyTorch DCP ----


def dcp_local_plan(rank: int, world_size: int) -> Any:
    """The local plan that DCP's default planner makes for the same state."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def item(kind: Any, name: str, dtype: Any, shape: tuple[int, ...], offsets: Any, sizes: Any) -> Any:
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
        return WriteItem(index=MetadataIndex(name, chunk.offsets), type=kind, tensor_data=data)

    items, paths = [], {}
    for name, shape in PARAMETERS:
        start, count = row_range(shape[0], rank, world_size)
        offsets, sizes = (start, *(0 for _ in shape[1:])), (count, *shape[1:])
        for fqn, path, dtype in (
            (f"model.{name}", ("model", name), torch.bfloat16),
            (f"optim.state.{name}.exp_avg", ("optim", "state", name, "exp_avg"), torch.float32),
            (f"optim.state.{name}.exp_avg_sq", ("optim", "state", name, "exp_avg_sq"), torch.float32),
        ):
            items.append(item(WriteItemType.SHARD, fqn, dtype, shape, offsets, sizes))
            paths[fqn] = path
        fqn = f"optim.state.{name}.step"
        items.append(item(WriteItemType.TENSOR, fqn, torch.float32, (), (), ()))
        paths[fqn] = ("optim", "state", name, "step")
    for fqn in ("optim.param_groups.0.lr", "trainer.rng", "trainer.step"):
        items.append(WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO))
        paths[fqn] = tuple(fqn.split("."))
    return SavePlan(items, planner_data=paths)


def measure_dcp(world_size: int) -> dict[str, Any]:
    """The coordinator's share of one `dcp.save` with a new plan: gather, plan, scatter, results, metadata."""
    import dataclasses
    import pickle
    from collections import ChainMap

    from torch.distributed.checkpoint import default_planner
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StoragePrefix

    sent = [pickle.dumps(dcp_local_plan(rank, world_size)) for rank in range(world_size)]
    memory_before = peak_bytes()
    clock = Clock()

    def merge_mappings() -> Any:
        return dataclasses.replace(metadata, planner_data=dict(ChainMap(*[plan.planner_data for plan in plans])))

    def add_prefixes() -> list[Any]:
        return [dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{i}_")) for i, plan in enumerate(plans)]

    plans = clock.run("gather", lambda: [pickle.loads(blob) for blob in sent])
    sent.clear()
    plans = clock.run("dedup", lambda given=plans: default_planner.dedup_save_plans(given, False))
    plans, metadata = clock.run(
        "global_plan", lambda given=plans: default_planner.create_default_global_save_plan(given)
    )
    metadata = clock.run("mappings", merge_mappings)
    errors = clock.run("validate", lambda given=plans: default_planner._validate_global_plan(given, metadata))
    if errors:
        raise RuntimeError(f"DCP found the plan invalid: {errors[:2]}")
    plans = clock.run("prefix", add_prefixes)
    clock.run("scatter", lambda given=plans: sum(len(pickle.dumps(plan)) for plan in given))

    sent = [dcp_results(rank, plan) for rank, plan in enumerate(plans)]
    plans = []
    results = clock.run("gather_results", lambda: [pickle.loads(blob) for blob in sent])
    sent.clear()

    def finish() -> None:
        metadata.storage_data = {item.index: item.storage_data for items in results for item in items}
        metadata.version = CURRENT_DCP_VERSION

    clock.run("storage_data", finish)
    stored = clock.run("store", lambda: store(lambda file: pickle.dump(metadata, file)))
    clock.run("broadcast", lambda: len(pickle.dumps(metadata)))
    return {
        "library": "PyTorch DCP",
        "ranks": world_size,
        "lead_s": clock.total_s,
        "lead_wall_s": clock.wall_s,
        "phases_s": clock.seconds,
        "stored_bytes": stored,
        "peak_bytes": peak_bytes(),
        "peak_before_lead_bytes": memory_before,
    }


def dcp_results(rank: int, plan: Any) -> bytes:
    """What a rank of DCP sends back after it has written."""
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    place = f"__{rank}_0.distcp"
    return pickle.dumps([WriteResult(item.index, 1500, _StorageInfo(place, 0, 1500)) for item in plan.items])


# ---- both ----


def alone(measure: Callable[[int], dict[str, Any]], world_size: int, no_gc: bool) -> dict[str, Any]:
    """Run a measurement in a fresh process, so that its peak of memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1, initializer=gc.disable if no_gc else None) as pool:
        return pool.apply(measure, (world_size,))


def show(found: dict[str, Any]) -> None:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["phases_s"].items())
    print(
        f"{found['library']:<12} {found['ranks']:>5} ranks: lead {found['lead_s']:8.2f} s (wall {found['lead_wall_s']:.2f}), "
        f"stored {found['stored_bytes'] / 1e6:7.2f} MB, peak memory {found['peak_bytes'] / 2**30:5.2f} GiB  ({parts})"
    )
    if "rank_s" in found:
        reader = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["reader_s"].items())
        print(
            f"{'':<12} one rank {found['rank_s'] * 1e3:.0f} ms, {found['rows']} rows, "
            f"parts {found['parts_bytes'] / 1e6:.1f} MB; a reader as rank 5 of 48: {reader}, {found['reader_transfers']} transfers"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1856])
    parser.add_argument("--peer", action="store_true", help="measure PyTorch DCP as well, in the same run")
    parser.add_argument("--peer-ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--no-gc", action="store_true", help="without Python's garbage collector, which costs DCP most")
    parser.add_argument("--json", action="store_true", help="print one JSON object per measurement")
    options = parser.parse_args()
    ours: dict[int, dict[str, Any]] = {}
    for world_size in options.ranks:
        ours[world_size] = alone(measure_safehold, world_size, options.no_gc)
        print(json.dumps(ours[world_size])) if options.json else show(ours[world_size])
    for world_size in options.peer_ranks if options.peer else ():
        peer = alone(measure_dcp, world_size, options.no_gc)
        if world_size in ours:
            peer["seconds_ratio"] = peer["lead_s"] / ours[world_size]["lead_s"]
            peer["stored_ratio"] = peer["stored_bytes"] / ours[world_size]["stored_bytes"]
        print(json.dumps(peer)) if options.json else show(peer)
        if "seconds_ratio" in peer and not options.json:
            print(
                f"{'':<12} {world_size:>5} ranks: DCP takes {peer['seconds_ratio']:.0f} x the seconds "
                f"and {peer['stored_ratio']:.0f} x the bytes of safehold"
            )


if __name__ == "__main__":
    main()
