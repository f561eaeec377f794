"""A small run with a file of every kind, and what a load of it gives: for tests that hurt the files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_dirs import RunDir, Typed, default_objects
from whole_saves import equal

import safehold
from safehold.errors import CheckpointError
from safehold.format import document, dtypes, paths, records
from safehold.pipeline import ledger
from safehold.types import CommitId

__all__ = ["equal"]

NEWEST = CommitId(40, 2, 0)
TOMBSTONED = CommitId(30, 2, 0)
QUARANTINED = CommitId(20, 1, 0)
OLDEST = CommitId(10, 1, 0)


def tensors_of(step: int) -> dict[str, Any]:
    """Leaves of a shape of its own for each step, so that each has a plan of its own."""
    rng = np.random.default_rng(step)
    return {
        "model.w": rng.normal(size=(6, 5 + step // 10)),
        "model.b": rng.integers(-9, 9, size=(step,), dtype=np.int16),
        "empty": np.zeros((0, 3), np.float32),
        "step_of": np.array(step, np.int64),
    }


def make_run(root: Path, *, seed: int = 0) -> RunDir:
    """A run of two incarnations, with a pin, an un-committed and a quarantined checkpoint."""
    run = RunDir(root)
    run.now_s += seed
    for step in (10, 20):
        run.save(step, numpy_kind(tensors_of(step)))
    run.open()
    for step in (30, 40):
        run.save(step, numpy_kind(tensors_of(step)))
    ledger.put_pin(run.tier, 10)
    ledger.uncommit(run.tier, 30, incarnation=2, reason="test")
    ledger.put_quarantine(run.tier, QUARANTINED, incarnation=2, reason="test")
    return run


def numpy_kind(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: Typed(dtypes.from_numpy(array.dtype), array, kind="numpy") for name, array in tensors.items()}


def expected(step: int) -> dict[str, Any]:
    found = tensors_of(step)
    plain = default_objects(step, 2)
    return {
        "model": {"w": found["model.w"], "b": found["model.b"]},
        "empty": found["empty"],
        "step_of": found["step_of"],
        "step": step,
        "sched": plain["sched"],
        "rng": plain["rng"].values[0],
    }


def plan_of(root: Path, commit: CommitId) -> str:
    manifest = records.decode_manifest((root / paths.checkpoint_dir(commit) / "manifest.json").read_bytes(), path="")
    return paths.plan(manifest.plan_digest)


def files(root: Path) -> dict[str, tuple[str, str]]:
    """Kind -> the file that is hurt, and another of its kind (relative paths)."""
    newest, other = paths.checkpoint_dir(NEWEST), paths.checkpoint_dir(TOMBSTONED)
    return {
        "run": ("run.json", "../another/run.json"),
        "incarnation 1": ("incarnations/1.json", "incarnations/2.json"),
        "incarnation 2": ("incarnations/2.json", "incarnations/1.json"),
        "plan": (plan_of(root, NEWEST), plan_of(root, TOMBSTONED)),
        "pack of rank 0": (f"{newest}/{paths.pack(0, 0, 0)}", f"{newest}/{paths.pack(1, 1, 0)}"),
        "pack of rank 1": (f"{newest}/{paths.pack(1, 1, 0)}", f"{other}/{paths.pack(1, 1, 0)}"),
        "node record 0": (f"{newest}/node-00000.json", f"{newest}/node-00001.json"),
        "node record 1": (f"{newest}/node-00001.json", f"{other}/node-00001.json"),
        "objects 0": (f"{newest}/node-00000.objects", f"{newest}/node-00001.objects"),
        "objects 1": (f"{newest}/node-00001.objects", f"{other}/node-00001.objects"),
        "manifest": (f"{newest}/manifest.json", f"{other}/manifest.json"),
        "manifest of another run": (f"{newest}/manifest.json", f"../another/{newest}/manifest.json"),
        "older manifest": (f"{paths.checkpoint_dir(OLDEST)}/manifest.json", f"{other}/manifest.json"),
        "tombstone": (f"{other}/{paths.tombstone(2)}", paths.pin(10)),
        "pin": (paths.pin(10), "run.json"),
        "quarantine": (paths.quarantine(QUARANTINED), paths.pin(10)),
    }


KINDS = (
    "run",
    "incarnation 1",
    "incarnation 2",
    "plan",
    "pack of rank 0",
    "pack of rank 1",
    "node record 0",
    "node record 1",
    "objects 0",
    "objects 1",
    "manifest",
    "manifest of another run",
    "older manifest",
    "tombstone",
    "pin",
    "quarantine",
)
OF_THE_NEWEST = KINDS[3:12]


def load(root: Path, log: pytest.LogCaptureFixture, **options: Any) -> tuple[Any, str]:
    """Load; return the state or the error, and all that was said."""
    log.clear()
    try:
        with log.at_level(logging.WARNING, "safehold"):
            return safehold.load(root, **options), log.text
    except CheckpointError as exc:
        return exc, f"{log.text}\n{exc}"


def reseal(root: Path, commit: CommitId, *, plan: bytes | None = None) -> None:
    """Make the documents of a checkpoint agree with what its files are now, as somebody hostile can."""
    directory = root / paths.checkpoint_dir(commit)
    manifest = json.loads((directory / "manifest.json").read_bytes().split(b"\n")[1])
    for ref in manifest["nodes"]:
        file = directory / paths.node_record(ref["node"])
        data = file.read_bytes()
        blob = (directory / paths.node_objects(ref["node"])).read_bytes()
        if b'"format":1' in data[:200]:
            record = json.loads(data.split(b"\n")[1])
            record |= {"objects_size_bytes": len(blob), "objects_blake3": document.digest(blob)}
            data = document.seal("node", record)
            file.write_bytes(data)
        ref |= {"size_bytes": len(data), "blake3": document.digest(data)}
    stored = plan if plan is not None else (root / paths.plan(manifest["plan_digest"])).read_bytes()
    manifest |= {"plan_digest": document.digest(stored), "plan_size_bytes": len(stored)}
    (root / paths.plan(manifest["plan_digest"])).write_bytes(stored)
    manifest["total_bytes"] = sum(
        entry["size_bytes"] for ref in manifest["nodes"] for entry in record_of(directory, ref["node"]).get("packs", [])
    ) + sum(record_of(directory, ref["node"]).get("objects_size_bytes", 0) for ref in manifest["nodes"])
    (directory / "manifest.json").write_bytes(document.seal("manifest", manifest))


def record_of(directory: Path, node: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / paths.node_record(node)).read_bytes().split(b"\n")[1])
    return found
