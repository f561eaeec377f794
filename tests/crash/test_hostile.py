"""Run directories from the future, and those that somebody hostile made: refused by name, with little memory."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged_runs import KINDS, NEWEST, equal, expected, files, load, plan_of, reseal

import safehold
from safehold.errors import FormatVersionError
from safehold.format import document, objects_file, paths
from safehold.format import plan as plans
from safehold.pipeline.catalog import Catalog
from safehold.tiers.open import open_tier

# Newer formats.


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "pack" not in kind and "older" not in kind])
def test_a_newer_format_is_a_clear_error_and_never_worked_around(
    root: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, _ = files(root)[kind]
    data = (root / name).read_bytes()
    head, _, rest = data.partition(b"\n")
    newer = json.loads(head) | {"format": 2, "of the future": True}
    (root / name).write_bytes(json.dumps(newer).encode() + b"\n" + rest)
    if kind.startswith(("plan", "node record", "objects")):
        reseal(root, NEWEST)
    if kind in ("pin", "quarantine"):  # advice, of which the cautious half is taken
        found, said = load(root, caplog)
        assert equal(found, expected(40)) and name in said and "format 2" in said
        return
    with pytest.raises(FormatVersionError) as caught:
        safehold.load(root)
    wanted = plan_of(root, NEWEST) if kind == "plan" else name.rpartition("/")[2]
    assert wanted in str(caught.value) and "format 2" in str(caught.value)


# Hostile directories: everything agrees with everything, and nothing is true.


def with_plan(change: Callable[[plans.Plan], plans.Plan]) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        plan = Catalog(open_tier(root)).load(NEWEST).plan
        reseal(root, NEWEST, plan=plans.encode_plan(change(plan)))

    return act


def replaced(plan: plans.Plan, **columns: Any) -> plans.Plan:
    return dataclasses.replace(plan, **columns)


def huge_leaf(plan: plans.Plan) -> plans.Plan:
    """A leaf of half an exabyte, of which nothing is stored."""
    leaves = list(plan.leaves)
    index = next(i for i, leaf in enumerate(leaves) if leaf.name == "model.b")
    spec = leaves[index]
    leaves[index] = type(spec)(name=spec.name, dtype=spec.dtype, shape=(2**57,), kind=spec.kind)
    return replaced(plan, leaves=tuple(leaves))


def overlapping(plan: plans.Plan) -> plans.Plan:
    offset = plan.offset.copy()
    rows = np.flatnonzero(plan.rank == 0)
    offset[rows[-1]] = offset[rows[-2]]
    return replaced(plan, offset=offset)


def beyond_the_pack(plan: plans.Plan) -> plans.Plan:
    offset = plan.offset.copy()
    offset[-1] = 2**50
    return replaced(plan, offset=offset)


def huge_packs(plan: plans.Plan) -> plans.Plan:
    return replaced(plan, pack_sizes={rank: tuple(2**59 for _ in sizes) for rank, sizes in plan.pack_sizes.items()})


def node_record(**change: Any) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        file = root / paths.checkpoint_dir(NEWEST) / "node-00000.json"
        record = json.loads(file.read_bytes().split(b"\n")[1])
        for key, value in change.items():
            if key in record:
                record[key] = value
            else:
                record["packs"][0][key] = value
        data = document.seal("node", record)
        file.write_bytes(data)
        manifest_with(root, node_0={"size_bytes": len(data), "blake3": document.digest(data)})

    return act


def manifest_with(root: Path, *, node_0: dict[str, Any] | None = None, **change: Any) -> None:
    file = root / paths.checkpoint_dir(NEWEST) / "manifest.json"
    manifest = json.loads(file.read_bytes().split(b"\n")[1])
    manifest["nodes"][0] |= node_0 or {}
    file.write_bytes(document.seal("manifest", manifest | change))


def deep(kind: str, name: str) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        body = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
        head = {"safehold": kind, "format": 1, "bytes": len(body), "blake3": document.digest(body)}
        (root / name).write_bytes(json.dumps(head, separators=(",", ":")).encode() + b"\n" + body + b"\n")

    return act


def hostile_objects(blob: bytes) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        file = root / paths.checkpoint_dir(NEWEST) / "node-00000.objects"
        file.write_bytes(objects_file.encode_objects({0: {"rng": blob, "sched": blob, "step": blob}}))
        reseal(root, NEWEST)

    return act


HOSTILE: dict[str, Callable[[Path], None]] = {
    "huge leaf": with_plan(huge_leaf),
    "overlapping pieces": with_plan(overlapping),
    "pieces beyond the pack": with_plan(beyond_the_pack),
    "huge packs in the plan": with_plan(huge_packs),
    "huge objects": node_record(objects_size_bytes=2**59),
    "huge pack in a record": node_record(size_bytes=2**59),
    "checksums of a million blocks": node_record(block_crcs="AAAA" * 2**20),
    "a path in a record": node_record(file="../../../../etc/passwd"),
    "huge plan": lambda root: manifest_with(root, plan_size_bytes=2**59),
    "huge node record": lambda root: manifest_with(root, node_0={"size_bytes": 2**59}),
    "huge total": lambda root: manifest_with(root, total_bytes=2**59),
    "number out of bounds": lambda root: manifest_with(root, world_size=2**62),
    "many nodes": lambda root: manifest_with(
        root, nodes=[{"node": n, "size_bytes": 9, "blake3": "0" * 64} for n in range(20_000)]
    ),
    "deep manifest": deep("manifest", f"{paths.checkpoint_dir(NEWEST)}/manifest.json"),
    "deep incarnation": deep("incarnation", "incarnations/2.json"),
    "deep tombstone": deep("tombstone", f"{paths.checkpoint_dir(NEWEST)}/{paths.tombstone(2)}"),
    "deep objects": hostile_objects(b"\x91" * 100_000 + b"\xc0"),
    "long objects": hostile_objects(b"\xdd\xff\xff\xff\xff"),
    "bytes without end": hostile_objects(b"\xc6\xff\xff\xff\xff"),
    "not objects": hostile_objects(random.Random(2).randbytes(3000)),
    "huge sparse manifest": lambda root: os.truncate(root / paths.checkpoint_dir(NEWEST) / "manifest.json", 1 << 40),
    "huge sparse plan": lambda root: os.truncate(root / plan_of(root, NEWEST), 1 << 40),
    "huge sparse pack": lambda root: os.truncate(root / paths.checkpoint_dir(NEWEST) / paths.pack(0, 0, 0), 1 << 40),
    "huge sparse pin": lambda root: os.truncate(root / paths.pin(10), 1 << 40),
}

MEASURE = """
import json, resource, sys, time, warnings
import safehold
from safehold.errors import CheckpointError
from safehold.pipeline.verify import verify
from safehold.tiers.open import open_tier
from safehold.types import CommitId

def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

safehold.load(sys.argv[1])
verify(open_tier(sys.argv[1]), CommitId(40, 2, 0))
results = {}
for path in sys.argv[2:]:
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before, begun = peak_kib(), time.monotonic()
    try:
        found = int(safehold.load(path)["step"])
    except CheckpointError as exc:
        found = f"{type(exc).__name__}: {exc}"
    try:
        faults = [str(fault) for fault in verify(open_tier(path), CommitId(40, 2, 0)).faults]
    except CheckpointError as exc:
        faults = [str(exc)]
    results[path] = [found, faults, peak_kib() - before, time.monotonic() - begun]
print(json.dumps(results))
"""


def test_hostile_directories_are_refused_with_little_memory(original: Path, root: Path) -> None:
    made = {}
    for number, (name, act) in enumerate(HOSTILE.items()):
        path = root.parent / f"hostile-{number}"
        shutil.copytree(original, path)
        act(path)
        made[name] = path
    command = [sys.executable, "-c", MEASURE, str(root), *map(str, made.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    for name, path in made.items():
        found, faults, peak_kib, seconds = results[str(path)]
        known = name in ("deep incarnation", "deep tombstone", "huge sparse pin")
        assert found == (40 if known else 10), (name, found, faults)
        assert bool(faults) != known, (name, faults)
        assert peak_kib < 100 << 10, f"{name}: {peak_kib} KiB"
        assert seconds < 10, f"{name}: {seconds} s"
