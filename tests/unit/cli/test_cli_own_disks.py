"""The command line on one node of several that keep what they save on disks of their own: it claims no more than it read."""

from __future__ import annotations

from pathlib import Path

import pytest
from joined_disks import LocalJob, LocalWorld
from run_dirs import flip
from whole_saves import Promises

from safehold.format import paths
from safehold.pipeline import ledger
from safehold.pipeline import snapshot as snapshots
from safehold.tiers import flash_probe
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

FIRST, SECOND = CommitId(10, 1, 0), CommitId(20, 1, 0)


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two nodes with two checkpoints; where each has its run directory."""
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)
    found = {node: tmp_path / node / "run" for node in "ab"}
    world = LocalWorld(list(found))
    world.tiers = {node: FlashTier(path) for node, path in found.items()}
    job = LocalJob(world, Promises())
    job.open()
    assert [job.save(10, 1), job.save(20, 2)] == [FIRST, SECOND]
    return found


def pack(disk: Path, commit: CommitId) -> Path:
    return next((disk / paths.checkpoint_dir(commit)).glob("*.safetensors"))


def test_verify_says_what_it_could_not_read(disks: dict[str, Path], safehold) -> None:
    done = safehold("verify", disks["a"], "--all")
    assert done.code == 0, done
    assert "step 10: no fault in what is here, 5 files" in done.out and ": ok" not in done.out
    assert done.out.endswith("verified 2 of 2 checkpoints in part, no fault found\n") and "whole" not in done.out
    assert "node b: what it saved is on its own disk, and was not read" in done.err
    assert done.err.endswith("hint: run this on node b, too: each node reads what is on its own disk\n")
    done = safehold("verify", disks["b"])
    assert (
        done.code == 0
        and done.out.endswith("verified 1 of 2 checkpoints in part\n")
        and "run this on node a" in done.err
    )
    done = safehold("verify", disks["b"], 10)
    assert done.code == 0 and "verified" not in done.out and "run this on node a" in done.err
    done = safehold("verify", disks["b"], "--all", "--json")
    assert [entry["not_read"] for entry in done.json] == [["a"], ["a"]] and done.err == ""


def test_verify_still_finds_what_is_wrong_here(disks: dict[str, Path], safehold) -> None:
    flip(pack(disks["a"], FIRST), 100)
    done = safehold("verify", disks["a"], "--all")
    assert done.code == 6 and done.out.endswith("verified 2 of 2 checkpoints in part, 1 damaged\n")
    assert safehold("verify", disks["b"], "--all").code == 0


def test_verify_of_parts_and_of_whole_ones(disks: dict[str, Path], safehold) -> None:
    """What node a saved of the older one was brought to node b by hand."""
    there = disks["b"] / paths.checkpoint_dir(FIRST)
    for file in (disks["a"] / paths.checkpoint_dir(FIRST)).iterdir():
        if not (there / file.name).exists():
            (there / file.name).write_bytes(file.read_bytes())
    done = safehold("verify", disks["b"], "--all")
    assert done.code == 0 and "step 10: ok" in done.out and "step 20: no fault in what is here" in done.out
    assert done.out.endswith("verified 2 of 2 checkpoints (1 of them in part), no fault found\n")


def test_a_quarantine_is_not_cleared_by_who_has_not_read_what_was_bad(disks: dict[str, Path], safehold) -> None:
    tiers = {node: FlashTier(path) for node, path in disks.items()}
    bad = f"{paths.checkpoint_dir(SECOND)}/{pack(disks['a'], SECOND).name}"
    for tier in tiers.values():
        ledger.put_quarantine(tier, SECOND, incarnation=1, reason="block 3", path=bad)
    done = safehold("verify", disks["b"], "--mark")
    assert (
        done.code == 0
        and "step 20 is quarantined, and what is here is whole" in done.err
        and "clears it" not in done.err
    )
    assert SECOND in snapshots.take(tiers["b"]).quarantined
    done = safehold("verify", disks["a"], "--mark")
    assert done.code == 0 and "is quarantined" not in done.err
    assert SECOND not in snapshots.take(tiers["a"]).quarantined


def test_status_says_that_only_a_part_is_here(disks: dict[str, Path], tmp_path: Path, safehold) -> None:
    done = safehold("status", disks["b"], "--to", tmp_path / "there")
    assert done.code == 0 and done.out.count("part") == 2 and done.out.count("not here: what node a saved") == 2
    rows = safehold("status", disks["b"], "--to", tmp_path / "there", "--json").json["checkpoints"]
    assert [(row["here"], row["not_here"]) for row in rows] == [("part", ["a"])] * 2
