"""Redundancy beside a checkpoint of a real run directory: verified, in nobody's way, and gone with the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_dirs import RunDir, flip

from safehold.format import paths
from safehold.pipeline import sweep
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.findings import VerifyReport
from safehold.pipeline.lost_node import open_lost
from safehold.pipeline.rebuild import rebuild
from safehold.pipeline.redundancy import protect
from safehold.pipeline.verify import verify
from safehold.policy.placement import parse_scheme, place
from safehold.policy.retention import Keep
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

MIB = 1 << 20


class Shared:
    """All nodes' files lie in one run directory."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        reader = self.run.tier.open_pack(path)
        try:
            reader.read_into(offset, buffer)
        finally:
            reader.close()


def save(run: RunDir, step: int, *, world_size: int = 3) -> CommitId:
    tensors = {"w": np.random.default_rng(step).normal(size=(world_size * 3, MIB // 16))}
    return run.save(step, tensors=tensors, world_size=world_size)


def protect_all(run: RunDir, commit: CommitId, parity: str = "xor:3") -> None:
    _, manifest = Catalog(run.tier).read_manifest(commit)
    scheme = parse_scheme(parity=parity)
    assert scheme is not None
    for one in place(scheme, [ref.node for ref in manifest.nodes]).sets:
        for node in one.members:
            protect(run.tier, manifest, node, one, Shared(run))


def check(run: RunDir, commit: CommitId, **options) -> VerifyReport:
    return verify(run.tier, commit, direct=False, patience_s=0.0, **options)


def test_whole_redundancy_is_read_and_not_told_of(run: RunDir) -> None:
    commit = save(run, 10)
    before = check(run, commit)
    protect_all(run, commit)
    seen: list[tuple[int, int]] = []
    report = check(run, commit, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and report.data_ok and not report.notes
    assert report.num_files == before.num_files + 6
    assert report.num_bytes > before.num_bytes and seen[-1] == (report.num_bytes, report.num_bytes)


@pytest.mark.parametrize("name", ["redundancy-00001.0", "redundancy-00001.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "foreign"])
def test_damaged_redundancy_is_a_fault_and_the_checkpoint_is_whole(run: RunDir, name: str, damage: str) -> None:
    commit, other = save(run, 10), save(run, 20)
    protect_all(run, commit)
    protect_all(run, other)
    path = run.path(commit, name)
    if damage == "flip":
        flip(path, MIB + 7 if name.endswith("0") else 300)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {"cut": path.read_bytes()[:-1], "empty": b"", "foreign": run.path(other, name).read_bytes()}[damage]
        )
    report = check(run, commit)
    if damage == "gone" and name.endswith("json"):
        assert report.ok and "redundancy that was not finished" in report.notes[0]
        return
    assert not report.ok and report.data_ok
    (fault,) = report.faults if damage != "foreign" or name.endswith("json") else report.faults[:1]
    assert fault.redundancy and fault.node == 1 and fault.path == f"{paths.checkpoint_dir(commit)}/{name}"
    if damage == "flip" and name.endswith("0"):
        assert (fault.block, fault.offset_bytes) == (1, MIB) and "block 1 (bytes 1048576 to" in fault.message


def test_blocks_that_cannot_be_read_are_named_one_by_one(run: RunDir) -> None:
    commit = save(run, 10)
    protect_all(run, commit)
    run.tier = FakeTier(run.tier)
    run.tier.fail("read_into", path="*redundancy-00000.0", times=2)
    report = check(run, commit)
    assert [(fault.block, fault.redundancy) for fault in report.faults] == [(0, True)]
    assert "injected failure" in report.faults[0].message


def test_damage_of_both_counts_as_damage_of_the_checkpoint(run: RunDir) -> None:
    commit = save(run, 10)
    protect_all(run, commit)
    flip(run.path(commit, "redundancy-00001.0"), 5)
    flip(run.path(commit, "00000-00000.0.safetensors"), -1)
    report = check(run, commit)
    assert not report.data_ok and [fault.redundancy for fault in report.faults] == [False, True]


def test_catalog_and_sweep_pass_it_over_and_take_it_along(run: RunDir) -> None:
    first = save(run, 10)
    protect_all(run, first)
    second = save(run, 20)
    protect_all(run, second)
    found = find_restore_candidate(run.tier)
    assert found.checkpoint is not None and found.checkpoint.commit == second and not found.problems
    view = next(view for view in Catalog(run.tier).commits() if view.commit == first)
    assert view.stored_bytes == sum(path.stat().st_size for path in run.path(first).iterdir())
    swept = sweep.retire(run.tier, Keep(last=1), incarnation=run.incarnation, grace_s=0.0, clock=run)
    assert swept.deleted == (first,) and swept.freed_bytes >= view.stored_bytes
    assert not run.path(first).exists() and not run.path(first).parent.exists()
    assert check(run, second).ok


def test_redundancy_of_an_attempt_without_a_manifest_goes_as_debris(run: RunDir) -> None:
    commit = save(run, 10)
    protect_all(run, commit)
    run.path(commit, paths.MANIFEST).unlink()
    run.open()
    save(run, 20)
    assert commit in sweep.sweep(run.tier, incarnation=run.incarnation, live=(), clock=run).deleted
    assert not run.path(commit).exists()


def test_a_real_node_comes_back(run: RunDir, tmp_path: Path) -> None:
    commit = save(run, 10)
    protect_all(run, commit)
    _, manifest = Catalog(run.tier).read_manifest(commit)
    before = {path.name: path.read_bytes() for path in run.path(commit).iterdir()}
    lost = open_lost(manifest, 1, Shared(run), [0, 2])
    for path in run.path(commit).iterdir():
        if path.name.startswith(("00001-", "node-00001", "redundancy-00001")):
            path.unlink()
    assert not check(run, commit).data_ok
    rebuild(run.tier, lost)
    protect_all(run, commit)
    after = {path.name: path.read_bytes() for path in run.path(commit).iterdir()}
    assert {n: d for n, d in after.items() if "00001.json" not in n} == {
        n: d for n, d in before.items() if "00001.json" not in n
    }
    assert check(run, commit).ok
