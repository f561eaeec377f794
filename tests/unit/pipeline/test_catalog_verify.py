"""Verification finds every flipped bit, and names the file, the block and the keys."""

from __future__ import annotations

import errno
import random
import shutil

import msgspec
import numpy as np
import pytest
from run_dirs import RunDir, compose_manifest, flip

from safehold.errors import FormatVersionError, StorageError
from safehold.format import crc, document, objects, objects_file, pack, paths, records
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.verify import verify
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

MIB = 1 << 20


def check(run: RunDir, commit: CommitId, **options):
    return verify(run.tier, commit, direct=False, patience_s=0.0, **options)


def big_tensors() -> dict[str, np.ndarray]:
    return {
        "first": np.arange(2 * MIB // 4, dtype=np.int32).reshape(-1, 64),
        "small": np.arange(7, dtype=np.int8),
        "third": np.arange(12 * MIB // 8, dtype=np.float64).reshape(-1, 16),
    }


def reseal(run: RunDir, commit: CommitId) -> None:
    """Make node records and manifest fit what the files are now, as a writer with a bug would have."""
    catalog = Catalog(run.tier)
    _, manifest = catalog.read_manifest(commit)
    written, stored = {}, {}
    for ref in manifest.nodes:
        path = run.path(commit, paths.node_record(ref.node))
        record = records.decode_node_record(path.read_bytes(), path="")
        packs = []
        for entry in record.packs:
            data = run.path(commit, entry.file).read_bytes()
            blocks = crc.crc_blocks(data)
            packs.append(msgspec.structs.replace(entry, crc32=crc.crc(data), block_crcs=crc.encode_crcs(blocks)))
        blob = run.path(commit, paths.node_objects(ref.node)).read_bytes()
        written[ref.node] = msgspec.structs.replace(
            record,
            packs=tuple(packs),
            objects_size_bytes=len(blob),
            objects_crc32=crc.crc(blob),
            objects_blake3=document.digest(blob),
        )
        stored[ref.node] = records.encode_node_record(written[ref.node])
        path.write_bytes(stored[ref.node])
    plan = (run.root / paths.plan(manifest.plan_digest)).read_bytes()
    again = compose_manifest(
        run_id=manifest.run_id,
        commit=commit,
        plan_bytes=plan,
        world_size=manifest.world_size,
        node_records=written,
        record_bytes=stored,
        created_s=manifest.created_s,
        library=manifest.library,
    )
    run.path(commit, "manifest.json").write_bytes(records.encode_manifest(again))


def test_whole_checkpoint(run: RunDir):
    commit = run.save(10, world_size=3, ranks_per_node=2, pack_size_bytes=64)
    seen: list[tuple[int, int]] = []
    report = check(run, commit, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and report.notes == ()
    files = list(run.path(commit).iterdir())
    assert report.num_files == len(files) + 1  # and the plan
    assert seen[-1] == (report.num_bytes, report.num_bytes) and seen == sorted(seen)
    _, manifest = Catalog(run.tier).read_manifest(commit)
    assert report.num_bytes == manifest.total_bytes


def test_checkpoint_of_nothing_and_of_objects_only(run: RunDir):
    assert check(run, run.save(10, {}, {})).ok
    assert check(run, run.save(20, {}, {"a": 1})).ok
    assert check(run, run.save(30, {"x": np.zeros((0, 4))}, {})).ok


def test_every_flipped_bit_of_every_file_is_found(run: RunDir):
    commit = run.save(10)
    files = [*run.path(commit).iterdir(), *(run.root / "plans").iterdir()]
    rng = random.Random(7)
    for file in files:
        size = file.stat().st_size
        for offset in {0, size - 1, *(rng.randrange(size) for _ in range(6))}:
            bit = rng.randrange(8)
            flip(file, offset, bit)
            report = check(run, commit)
            assert not report.ok, (file, offset)
            assert any(fault.path.endswith(file.name) for fault in report.faults), (file, offset, report)
            flip(file, offset, bit)
    assert check(run, commit).ok


@pytest.mark.parametrize(
    "name", ["manifest.json", "node-00000.json", "node-00001.objects", "00000-00000.0.safetensors"]
)
@pytest.mark.parametrize("how", ["half", "minus1", "plus1", "empty", "gone"])
def test_wrong_lengths_are_named(run: RunDir, name: str, how: str):
    commit = run.save(10)
    file = run.path(commit, name)
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(
            {"half": data[: len(data) // 2], "minus1": data[:-1], "plus1": data + b"\0", "empty": b""}[how]
        )
    faults = check(run, commit).faults
    assert any(fault.path == f"{paths.checkpoint_dir(commit)}/{name}" for fault in faults)
    assert all(str(fault).startswith(fault.path) for fault in faults)


def test_a_fault_names_block_and_keys(run: RunDir):
    commit = run.save(10, big_tensors(), {}, world_size=1)
    checkpoint = Catalog(run.tier).load(commit)
    index = {spec.name: i for i, spec in enumerate(checkpoint.plan.leaves)}
    row = int(np.flatnonzero(checkpoint.plan.leaf == index["third"])[0])
    start = int(checkpoint.plan.offset[row])
    file = run.path(commit, "00000-00000.0.safetensors")
    flip(file, start + 5 * MIB)
    flip(file, 10)
    first, second = check(run, commit).faults[:2]
    assert first.block == 0 and first.offset_bytes == 0 and first.keys == ("first",)
    block = (start + 5 * MIB) // MIB
    assert second.block == block and second.offset_bytes == block * MIB and second.keys == ("third",)
    assert "third" in str(second) and f"block {block}" in str(second) and second.rank == 0


def test_a_cut_names_the_keys_behind_it(run: RunDir):
    commit = run.save(10, big_tensors(), {}, world_size=1)
    file = run.path(commit, "00000-00000.0.safetensors")
    with open(file, "r+b") as opened:
        opened.truncate(9 * MIB + 5)
    (size, *_) = check(run, commit).faults
    assert "third" in size.keys and "first" not in size.keys


def test_unreadable_blocks_are_isolated(run: RunDir):
    commit = run.save(10, big_tensors(), {}, world_size=1)
    tier = FakeTier(run.tier)
    tier.fail("read_into", path="*.safetensors", at=0)
    tier.fail("read_into", path="*.safetensors", at=3)
    report = verify(tier, commit, threads=1)
    (fault,) = report.faults
    assert fault.block is not None and "injected" in fault.message


def test_a_pack_that_cannot_be_opened_is_a_fault(run: RunDir):
    commit = run.save(10, big_tensors(), {}, world_size=1)
    tier = FakeTier(run.tier)
    tier.fail("open_pack", error=OSError(errno.EIO, "Input/output error"))
    report = verify(tier, commit)
    [fault] = report.faults
    assert "EIO" in fault.message and fault.num_keys and fault.path.endswith(".safetensors")


def test_a_tier_that_fails_altogether_raises(run: RunDir):
    commit = run.save(10)
    tier = FakeTier(run.tier)
    tier.fail("get", times=-1)
    with pytest.raises(StorageError):
        verify(tier, commit, patience_s=0.0)


def test_newer_format_is_raised(run: RunDir):
    commit = run.save(10)
    file = run.path(commit, "manifest.json")
    file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":2', 1))
    with pytest.raises(FormatVersionError):
        check(run, commit)


def test_header_that_contradicts_the_plan_is_found_though_checksums_match(run: RunDir):
    commit = run.save(10)
    file = run.path(commit, "00000-00000.0.safetensors")
    data = file.read_bytes()
    for old, new in ((b'"model.emb.weight', b'"model.emc.weight'), (b'"F32"', b'"I32"')):
        file.write_bytes(data.replace(old, new, 1))
        reseal(run, commit)
        report = check(run, commit)
        assert not report.ok and all("header" in fault.message for fault in report.faults)
        assert any("model.em" in key for fault in report.faults for key in fault.keys)
    file.write_bytes(data)
    reseal(run, commit)
    assert check(run, commit).ok
    assert pack.parse_header(data, len(data), path="").tensors


def test_objects_that_contradict_the_plan_are_found(run: RunDir):
    commit = run.save(10)
    file = run.path(commit, "node-00000.objects")
    file.write_bytes(objects_file.encode_objects({0: {"step": objects.encode(10, name="step"), "odd": b"\xc1"}}))
    reseal(run, commit)
    messages = {fault.message.split(":")[0]: fault.keys for fault in check(run, commit).faults}
    assert messages["objects are missing"] == ("rng", "sched")
    assert messages["objects are not in the plan"] == ("odd",)
    assert messages["an object cannot be decoded"] == ("odd",)


def test_strangers_are_noted_and_no_fault(run: RunDir):
    commit = run.save(10)
    run.path(commit, "notes\x1b[31m.txt").touch()
    run.path(commit, "node-00007.json").touch()
    report = check(run, commit)
    assert report.ok and len(report.notes) == 2 and not any("\x1b" in note for note in report.notes)


def test_what_can_be_checked_is_checked_without_the_plan(run: RunDir):
    commit = run.save(10)
    shutil.rmtree(run.root / "plans")
    flip(run.path(commit, "00001-00001.0.safetensors"))
    faults = check(run, commit).faults
    assert {fault.path.split("/")[0] for fault in faults} == {"plans", "checkpoints"}
