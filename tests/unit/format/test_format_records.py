"""Records: a reader returns only what a writer could have meant."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from safehold.errors import ManifestError
from safehold.format import crc, document, paths, records
from safehold.types import CommitId

COMMIT = CommitId(10, 3, 0)
HEX = "ab" * 32


def pack_record(rank: int = 0, part: int = 0, node: int = 0, **changes: Any) -> records.PackRecord:
    fields: dict[str, Any] = {
        "file": paths.pack(node, rank, part),
        "rank": rank,
        "part": part,
        "size_bytes": (1 << 20) + 4096,
        "crc32": 1,
        "block_crcs": crc.encode_crcs(np.array([1, 2], np.uint32)),
    }
    return records.PackRecord(**(fields | changes))


def node_record(**changes: Any) -> records.NodeRecord:
    fields: dict[str, Any] = {
        "run_id": "r",
        "node": 0,
        "node_name": "host",
        "commit": COMMIT,
        "packs": (pack_record(0), pack_record(1)),
        "objects_size_bytes": 5,
        "objects_crc32": 7,
        "objects_blake3": HEX,
        "part_digests": {0: HEX, 1: HEX},
        "timings": {"flush": 1.5},
    }
    return records.NodeRecord(**(fields | changes))


def manifest(**changes: Any) -> records.Manifest:
    fields: dict[str, Any] = {
        "run_id": "r",
        "commit": COMMIT,
        "world_size": 2,
        "nodes": (records.NodeRef(node=0, size_bytes=3, blake3=HEX),),
        "plan_digest": HEX,
        "plan_size_bytes": 4,
        "total_bytes": 5,
        "crc32": 6,
        "created_s": 1.25,
        "library": "0.1",
    }
    return records.Manifest(**(fields | changes))


def lease(**changes: Any) -> records.Lease:
    fields: dict[str, Any] = {
        "commit": COMMIT,
        "reader": "0a" * 16,
        "host": "é",
        "pid": 7,
        "lease_s": 600.0,
        "renewals": 3,
        "created_s": 1.0,
    }
    return records.Lease(**(fields | changes))


def test_records_come_back() -> None:
    run = records.RunInfo(run_id="r", created_s=1.0, library="0")
    assert records.decode_run(records.encode_run(run)) == run
    incarnation = records.Incarnation(
        run_id="r", number=4, token="t", accepted=(CommitId(5, 1, 0), COMMIT), created_s=1.0, reason="start"
    )
    assert records.decode_incarnation(records.encode_incarnation(incarnation), path="p") == incarnation
    tombstone = records.Tombstone(commit=COMMIT, incarnation=3, created_s=1.0)
    assert records.decode_tombstone(records.encode_tombstone(tombstone), path="p") == tombstone
    pin = records.Pin(step=10, created_s=1.0, note="é")
    assert records.decode_pin(records.encode_pin(pin), path="p") == pin
    quarantine = records.Quarantine(commit=COMMIT, incarnation=3, created_s=1.0, reason="r", path="x")
    assert records.decode_quarantine(records.encode_quarantine(quarantine), path="p") == quarantine
    assert records.decode_lease(records.encode_lease(lease()), path="p") == lease()
    replication = records.Replication(
        commit=COMMIT, number=2, token="t", host="h", pid=7, pid_ticks=8, created_s=1.0, finished=("a",), ended=True
    )
    assert records.decode_replication(records.encode_replication(replication), path="p") == replication
    node = node_record()
    assert records.decode_node_record(records.encode_node_record(node), path="p") == node
    whole = manifest(metrics={"loss": 0.1, "best": -0.0}, final=True, tags=("a", "b"))
    assert records.decode_manifest(records.encode_manifest(whole), path="p") == whole


def test_any_float_is_a_metric() -> None:
    given = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "int": 3, "big": 1e308, "small": 5e-324}
    found = records.decode_manifest(records.encode_manifest(manifest(metrics=given)), path="p").metrics
    assert math.isnan(found.pop("nan"))
    assert found == {name: float(value) for name, value in given.items() if name != "nan"}
    assert all(type(value) is float for value in found.values())


def test_writers_sort() -> None:
    node = node_record(packs=(pack_record(1), pack_record(0, 1), pack_record(0, 0)))
    packs = records.decode_node_record(records.encode_node_record(node), path="p").packs
    assert [(entry.rank, entry.part) for entry in packs] == [(0, 0), (0, 1), (1, 0)]
    given = records.Incarnation(run_id="r", number=9, token="t", accepted=(COMMIT, CommitId(5, 1, 0)), created_s=1.0)
    found = records.decode_incarnation(records.encode_incarnation(given), path="p")
    assert found.accepted == (CommitId(5, 1, 0), COMMIT)


def test_fields_of_later_writers_are_skipped() -> None:
    body = document.unseal("pin", records.encode_pin(records.Pin(step=1, created_s=1.0)), path="p")
    assert records.decode_pin(document.seal("pin", body | {"colour": "red"}), path="p").step == 1


@pytest.mark.parametrize(
    "change",
    [
        {"reader": ""},
        {"reader": "../../etc/passwd"},
        {"reader": "0A" * 16},
        {"reader": "0a" * 16 + "\n"},
        {"reader": "0a" * 17},
        {"host": "h" * 256},
        {"host": 5},
        {"pid": -1},
        {"pid": 2**60},
        {"lease_s": 0.99},
        {"lease_s": 86401},
        {"lease_s": -1e308},
        {"lease_s": "600"},
        {"lease_s": None},
        {"renewals": -1},
        {"renewals": 1.5},
        {"renewals": True},
        {"commit": None},
        {"commit": {"step": -1, "incarnation": 1, "attempt": 0}},
        {"commit": {"step": 2**60, "incarnation": 1, "attempt": 0}},
        {"commit": {"step": 1}},
        {"created_s": -1},
    ],
)
def test_leases_out_of_bounds_are_refused(change: dict[str, Any]) -> None:
    body = document.unseal("lease", records.encode_lease(lease()), path="p")
    with pytest.raises(ManifestError, match="p"):
        records.decode_lease(document.seal("lease", body | change), path="p")
    with pytest.raises(ValueError, match="at most 4096 bytes"):
        document.seal("lease", body | {"more": "x" * 4096})


BAD_NODES: list[dict[str, Any]] = [
    {"node": -1},
    {"node": 2**60},
    {"packs": (pack_record(0), pack_record(0))},
    {"packs": (pack_record(0, node=1),)},
    {"packs": (pack_record(0, file="../../etc/passwd"),)},
    {"packs": (pack_record(0, file=paths.pack(0, 1, 0)),)},
    {"packs": (pack_record(0, size_bytes=1 << 20),)},
    {"packs": (pack_record(0, size_bytes=-1),)},
    {"packs": (pack_record(0, crc32=2**32),)},
    {"packs": (pack_record(0, block_crcs="AAAAAAAAAA=="),)},
    {"packs": (pack_record(0, block_crcs="AAAAAAAAAAB="),)},
    {"packs": (pack_record(0, block_crcs="!!!!!!!!!!!="),)},
    {"objects_blake3": ""},
    {"objects_blake3": "x" * 64},
    {"objects_size_bytes": 0},
    {"part_digests": {0: "ab"}},
    {"part_digests": {0: HEX + "\n"}},
    {"part_digests": {-1: HEX}},
    {"commit": CommitId(-1, 0, 0)},
    {"commit": CommitId(0, 2**60, 0)},
    {"run_id": ""},
    {"node_name": "x" * 2000},
]
BAD_MANIFESTS: list[dict[str, Any]] = [
    {"world_size": 0},
    {"nodes": ()},
    {"nodes": (records.NodeRef(node=0, size_bytes=3, blake3=HEX),) * 2},
    {"nodes": tuple(records.NodeRef(node=node, size_bytes=3, blake3=HEX) for node in range(3))},
    {"plan_digest": "../x"},
    {"plan_digest": "AB" * 32},
    {"total_bytes": -1},
    {"total_bytes": 2**60},
    {"crc32": -1},
    {"created_s": -1.0},
    {"commit": CommitId(2**60, 0, 0)},
]


def forge(kind: str, record: msgspec.Struct) -> bytes:
    """Seal a record without the writer's checks."""
    return document.seal(kind, msgspec.to_builtins(record, str_keys=True))


@pytest.mark.parametrize("changes", BAD_NODES, ids=str)
def test_contradictions_in_node_records_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="contradicts itself") as caught:
        records.decode_node_record(forge("node", node_record(**changes)), path="p")
    assert caught.value.path == "p"
    with pytest.raises(ValueError, match="not a node record"):
        records.encode_node_record(node_record(**changes))


@pytest.mark.parametrize("changes", BAD_MANIFESTS, ids=str)
def test_contradictions_in_manifests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="contradicts itself"):
        records.decode_manifest(forge("manifest", manifest(**changes)), path="p")
    with pytest.raises(ValueError, match="not a manifest record"):
        records.encode_manifest(manifest(**changes))


@pytest.mark.parametrize(
    ("number", "accepted"),
    [(3, (COMMIT,)), (4, (COMMIT, COMMIT)), (4, (COMMIT, CommitId(5, 1, 0))), (4, (CommitId(-1, 0, 0),))],
)
def test_an_incarnation_accepts_earlier_commits_once_and_in_order(number: int, accepted: tuple[CommitId, ...]) -> None:
    record = records.Incarnation(run_id="r", number=number, token="t", accepted=accepted, created_s=1.0)
    with pytest.raises(ManifestError):
        records.decode_incarnation(forge("incarnation", record), path="p")


@pytest.mark.parametrize("field", ["step", "created_s"])
@pytest.mark.parametrize("value", ["1", None, True, [1], {}])
def test_types_are_strict(field: str, value: Any) -> None:
    with pytest.raises(ManifestError):
        records.decode_pin(document.seal("pin", {"step": 1, "created_s": 1.0} | {field: value}), path="p")
