"""The documents of a checkpoint in one piece: what is in it, what reads it, and that it is read once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from run_dirs import RunDir

from safehold.agent.document_calls import DocumentCalls
from safehold.config import Config
from safehold.errors import ChecksumError, TornFileError
from safehold.events import EventStream
from safehold.format import document, paths
from safehold.pipeline.bundle import Bundled, collect, pack, unpack
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.stored_objects import StoredObjects
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

GIB = 1 << 30
FIND = {"step": None, "exclude": [], "share_from_bytes": 0}


def gets(tier: FakeTier) -> Counter[str]:
    return Counter(op.path for op in tier.log if op.kind == "get")


def wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def test_files_come_back_as_they_were() -> None:
    files = {"a/b": b"0123", "c": b"", "ü": b"x" * 1000}
    assert {path: bytes(data) for path, data in unpack(memoryview(pack(files))).items()} == files


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, pack({"a": b"0123"})[:-1]])
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(TornFileError, match="documents that were handed out"):
        unpack(memoryview(data))


def test_a_restore_reads_nothing_else_from_storage(run: RunDir) -> None:
    commit = run.save(10, world_size=4)
    found = collect(run.tier, commit, {}, GIB)
    assert found is not None
    tier = FakeTier(run.tier)
    bundled = Bundled(tier, unpack(memoryview(found))).tier  # type: ignore[arg-type]
    checkpoint = Catalog(bundled).load(commit, run_id=run.run_id, lazy=True)
    assert StoredObjects(bundled, checkpoint).first("step") == 10
    assert len(checkpoint.records) == 4 and not gets(tier)


def test_what_a_bundle_lacks_is_read_from_storage(run: RunDir) -> None:
    commit = run.save(10)
    found = collect(run.tier, commit, {}, GIB)
    assert found is not None
    tier, files = FakeTier(run.tier), unpack(memoryview(found))
    bundled = Bundled(tier, files).tier  # type: ignore[arg-type]
    files.clear()
    Catalog(bundled).load(commit, run_id=run.run_id)
    assert gets(tier)[f"{paths.checkpoint_dir(commit)}/manifest.json"] == 1
    assert bundled.list("checkpoints") and bundled.name == tier.name


def test_objects_that_do_not_fit_are_left_out_and_documents_that_do_not_fit_end_it(run: RunDir) -> None:
    commit = run.save(10, objects_={"large": "x" * 100_000})
    whole = collect(run.tier, commit, {}, GIB)
    assert whole is not None
    without = collect(run.tier, commit, {}, 50_000)
    assert without is not None and len(without) < 50_000 < len(whole)
    objects = f"{paths.checkpoint_dir(commit)}/{paths.node_objects(0)}"
    assert objects in unpack(memoryview(whole)) and objects not in unpack(memoryview(without))
    assert collect(run.tier, commit, {}, 500) is None


def test_documents_are_read_once_to_find_a_checkpoint_and_to_hand_it_out(run: RunDir) -> None:
    commit = run.save(10, world_size=12)
    calls, tier = DocumentCalls(), FakeTier(run.tier)
    value = calls.find(tier, Config(), FIND, EventStream())
    size, digest = value["documents"]
    directory = paths.checkpoint_dir(commit)
    read = {path: count for path, count in gets(tier).items() if path.startswith((directory, "plans/"))}
    assert len(read) == 2 + 2 * 12 and set(read.values()) == {1}
    tier.log.clear()
    data = calls.bundle(tier, Config(), {"commit": wire(commit), "blake3": digest})
    assert (len(data), document.digest(data)) == (size, digest) and not tier.log
    again = calls.bundle(tier, Config(), {"commit": wire(commit), "blake3": digest})
    assert again == data and gets(tier), "once it was put somewhere it is not kept"
    assert DocumentCalls().bundle(run.tier, Config(), {"commit": wire(commit), "blake3": digest}) == data


def test_a_flusher_gives_nothing_else_than_what_was_named(run: RunDir) -> None:
    commit = run.save(10)
    with pytest.raises(ChecksumError, match="not those that the lead has named") as caught:
        DocumentCalls().bundle(run.tier, Config(), {"commit": wire(commit), "blake3": "0" * 64})
    assert caught.value.step == 10


@pytest.mark.parametrize("arguments", [{**FIND, "share_from_bytes": 1 << 20}, {**FIND, "step": 10}])
def test_too_little_and_what_is_damaged_is_not_handed_out(run: RunDir, arguments: dict[str, Any]) -> None:
    commit = run.save(10)
    if arguments["step"]:
        run.path(commit, paths.node_objects(1)).unlink()
        with pytest.raises(TornFileError):
            DocumentCalls().find(run.tier, Config(), arguments, EventStream())
    else:
        tier = FakeTier(run.tier)
        assert DocumentCalls().find(tier, Config(), arguments, EventStream())["documents"] is None
        assert not [path for path in gets(tier) if path.endswith(".objects")], "small jobs do nothing more than before"


def test_an_object_file_that_cannot_be_read_leaves_it_to_the_ranks(run: RunDir) -> None:
    run.save(10)
    tier = FakeTier(run.tier)
    tier.fail("get", path="*.objects", error=OSError(5, "Input/output error"))
    value = DocumentCalls().find(tier, Config(), FIND, EventStream())
    assert value["commit"] == [10, 1, 0] and value["documents"] is None


def test_an_empty_run_has_none(run: RunDir) -> None:
    run.open()
    assert DocumentCalls().find(run.tier, Config(), FIND, EventStream())["documents"] is None
