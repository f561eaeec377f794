"""Records: what a run, an incarnation, a node and a commit write about themselves.

Invariants: immutable; a decoder returns only what an encoder could have written, every number within bounds, every
list unique where it must be, every digest a digest; everything else is a `ManifestError` that names the file. Fields
that a reader does not know are skipped, so that optional ones can be added within one format version.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from safehold.errors import ManifestError
from safehold.format import crc, document, paths
from safehold.format.names import display
from safehold.types import CommitId

MAX_COUNT: Final = 2**60
"""Every number in a record is below this."""

MIN_LEASE_S: Final = 1.0
MAX_LEASE_S: Final = 86400.0
"""A reader's lease counts for at least and at most so long after its last renewal."""

Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Crc32 = Annotated[int, Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, Meta(ge=0, lt=float(MAX_COUNT))]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", min_length=64, max_length=64)]
Word = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=8192)]
_RunId = Annotated[str, Meta(min_length=1, max_length=128)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""


class RunInfo(Record, frozen=True, kw_only=True):
    """`run.json`: which run a directory belongs to.

    Attributes:
        run_id: Made once, at random; in every other record too.
        created_s: Seconds since the epoch.
        library: Version of safehold that made it.
    """

    run_id: _RunId
    created_s: Seconds
    library: Word


class Incarnation(Record, frozen=True, kw_only=True):
    """`incarnations/<n>.json`: one start of the job, and which earlier commits it believes.

    Attributes:
        number: Counts up from 1 at every start.
        token: Made at random, tells two writers of the same number apart.
        accepted: The commits of earlier incarnations that count, ascending.
        reason: Why it was opened (start, rollback, ...).
    """

    run_id: _RunId
    number: Count
    token: Word
    accepted: tuple[CommitId, ...]
    created_s: Seconds
    reason: Text = ""


class Tombstone(Record, frozen=True, kw_only=True):
    """`tombstone-<incarnation>.json` beside a manifest: un-commits it.

    Attributes:
        commit: The checkpoint.
        incarnation: Who laid it; void where a newer incarnation lists the checkpoint.
    """

    commit: CommitId
    incarnation: Count
    created_s: Seconds
    reason: Text = ""


class Pin(Record, frozen=True, kw_only=True):
    """`pins/<step>.json`: retention keeps the step."""

    step: Count
    created_s: Seconds
    note: Text = ""


class Quarantine(Record, frozen=True, kw_only=True):
    """`quarantine/<commit>.json`: advice not to restore a checkpoint that failed to verify.

    Attributes:
        path: The file that failed, relative to the run directory; shown, never opened.
    """

    commit: CommitId
    incarnation: Count
    created_s: Seconds
    reason: Text = ""
    path: Text = ""


class Lease(Record, frozen=True, kw_only=True):
    """`leases/<step>-<reader>.json`: somebody reads a checkpoint and keeps it from being deleted for a while.

    Attributes:
        commit: The checkpoint.
        reader: The reader's id, made at random; in the file's name too.
        host: Where the reader runs, for people.
        pid: Its process there, for people.
        lease_s: It counts until its content has not changed for so long, by the clock of whoever looks.
        renewals: How often it was renewed; what changes its content.
        created_s: When it was taken, for people.
    """

    commit: CommitId
    reader: Annotated[str, Meta(pattern="^[0-9a-f]{32}$", min_length=32, max_length=32)]
    host: Annotated[str, Meta(max_length=255)]
    pid: Count
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]
    renewals: Count
    created_s: Seconds


class Replication(Record, frozen=True, kw_only=True):
    """`replication/<commit>.<number>.json`: somebody copies a checkpoint into this directory, or was stopped doing it.

    Attributes:
        number: Counts up from 1 for each checkpoint; the highest is the one at work.
        token: Made at random, tells two writers of the same number apart.
        host: Where it runs.
        pid: Its process there.
        pid_ticks: When that process started, in clock ticks since boot.
        finished: Names of packs that were written completely and durably; compared, never opened.
        ended: It is not at work any more.
    """

    commit: CommitId
    number: Count
    token: Word
    host: Word
    pid: Count
    pid_ticks: Count
    created_s: Seconds
    finished: tuple[Word, ...] = ()
    ended: bool = False


class PackRecord(Record, frozen=True, kw_only=True):
    """One pack as it was written.

    Attributes:
        file: Its name in the checkpoint's directory, always `paths.pack(node, rank, part)`.
        crc32: Of the whole file.
        block_crcs: CRC32 of each block of 1 MiB, see `safehold.format.crc.encode_crcs`.
    """

    file: str
    rank: Count
    part: Count
    size_bytes: Count
    crc32: Crc32
    block_crcs: str


class NodeRecord(Record, frozen=True, kw_only=True):
    """`node-<n>.json`: what a node says it wrote.

    Attributes:
        packs: Sorted by rank and part.
        objects_size_bytes: Size of `node-<n>.objects`, 0 if there is none.
        part_digests: For each of its ranks the digest of the part that it wrote by.
        timings: Seconds spent, by phase.
    """

    run_id: _RunId
    node: Count
    node_name: Word
    commit: CommitId
    packs: tuple[PackRecord, ...]
    objects_size_bytes: Count = 0
    objects_crc32: Crc32 = 0
    objects_blake3: str = ""
    part_digests: dict[Count, Digest] = msgspec.field(default_factory=dict)
    timings: dict[Word, float] = msgspec.field(default_factory=dict)


class NodeRef(Record, frozen=True, kw_only=True):
    """Which node record a manifest means: size and blake3 of `node-<n>.json`."""

    node: Count
    size_bytes: Count
    blake3: Digest


class Manifest(Record, frozen=True, kw_only=True):
    """`manifest.json`: the commit record of a checkpoint.

    Attributes:
        nodes: Sorted by node.
        plan_digest: Names `plans/<digest>`.
        total_bytes: Of all packs and objects.
        crc32: Of all packs, one after the other in the order of rank and part.
        metrics: What the user gave, for retention; any float.
        final: The last save of a training that ended.
        tags: What the user gave.
        own_disks: The names of the nodes, by node, where each keeps its files on a disk of its own; empty: all are in one directory.
    """

    run_id: _RunId
    commit: CommitId
    world_size: Annotated[int, Meta(ge=1, lt=2**31)]
    nodes: Annotated[tuple[NodeRef, ...], Meta(min_length=1)]
    plan_digest: Digest
    plan_size_bytes: Count
    total_bytes: Count
    crc32: Crc32
    created_s: Seconds
    library: Word
    metrics: dict[Word, float] = msgspec.field(default_factory=dict)
    final: bool = False
    tags: tuple[Word, ...] = ()
    own_disks: tuple[Word, ...] = ()


R = TypeVar("R", bound=Record)

_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_run(record: RunInfo) -> bytes:
    """Return the bytes of `run.json`."""
    return _encode("run", record)


def decode_run(data: bytes, *, path: str = paths.RUN_JSON) -> RunInfo:
    """Read `run.json`; raises `ManifestError` or `FormatVersionError`, as every decoder here."""
    return _decode("run", data, RunInfo, path)


def encode_incarnation(record: Incarnation) -> bytes:
    """Return the bytes of an incarnation's file; the accepted commits are sorted."""
    return _encode("incarnation", msgspec.structs.replace(record, accepted=tuple(sorted(record.accepted))))


def decode_incarnation(data: bytes, *, path: str) -> Incarnation:
    """Read an incarnation's file."""
    return _decode("incarnation", data, Incarnation, path)


def encode_tombstone(record: Tombstone) -> bytes:
    """Return the bytes of a tombstone."""
    return _encode("tombstone", record)


def decode_tombstone(data: bytes, *, path: str) -> Tombstone:
    """Read a tombstone."""
    return _decode("tombstone", data, Tombstone, path)


def encode_pin(record: Pin) -> bytes:
    """Return the bytes of a pin."""
    return _encode("pin", record)


def decode_pin(data: bytes, *, path: str) -> Pin:
    """Read a pin."""
    return _decode("pin", data, Pin, path)


def encode_quarantine(record: Quarantine) -> bytes:
    """Return the bytes of a quarantine record."""
    return _encode("quarantine", record)


def decode_quarantine(data: bytes, *, path: str) -> Quarantine:
    """Read a quarantine record."""
    return _decode("quarantine", data, Quarantine, path)


def encode_lease(record: Lease) -> bytes:
    """Return the bytes of a reader's lease."""
    return _encode("lease", record)


def decode_lease(data: bytes, *, path: str) -> Lease:
    """Read a reader's lease."""
    return _decode("lease", data, Lease, path)


def encode_replication(record: Replication) -> bytes:
    """Return the bytes of a replication's record."""
    return _encode("replication", record)


def decode_replication(data: bytes, *, path: str) -> Replication:
    """Read a replication's record."""
    return _decode("replication", data, Replication, path)


def encode_node_record(record: NodeRecord) -> bytes:
    """Return the bytes of a node record; the packs are sorted."""
    packs = sorted(record.packs, key=lambda pack: (pack.rank, pack.part))
    return _encode("node", msgspec.structs.replace(record, packs=tuple(packs)))


def decode_node_record(data: bytes, *, path: str) -> NodeRecord:
    """Read a node record."""
    return _decode("node", data, NodeRecord, path)


def encode_manifest(record: Manifest) -> bytes:
    """Return the bytes of a manifest; the nodes are sorted."""
    nodes = sorted(record.nodes, key=lambda ref: ref.node)
    return _encode("manifest", msgspec.structs.replace(record, nodes=tuple(nodes)))


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    """Read a manifest."""
    return _decode("manifest", data, Manifest, path)


def _encode(kind: str, record: Record) -> bytes:
    """Seal a record, after the same checks that its reader makes.

    Raises:
        ValueError: A field is out of bounds, or the record contradicts itself.
    """
    body = msgspec.to_builtins(record, str_keys=True)
    if not body.get("own_disks", True):
        del body["own_disks"]  # written only where it says something
    for name in ("metrics", "timings"):
        if name in body:
            body[name] = {key: _write_float(value) for key, value in body[name].items()}
    data = document.seal(kind, body)
    try:
        _decode(kind, data, type(record), kind)
    except ManifestError as exc:
        raise ValueError(f"not a {kind} record: {exc.message}") from None
    return data


def _decode(kind: str, data: bytes, cls: type[R], path: str) -> R:
    body = document.unseal(kind, data, path=path)
    try:
        for name in ("metrics", "timings"):
            if isinstance(body.get(name), dict):
                body[name] = {key: _read_float(value) for key, value in body[name].items()}
        record = msgspec.convert(body, cls, strict=True, str_keys=True)
        _check(record)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ManifestError(f"the {kind} record contradicts itself: {display(str(exc))}", path=path) from None
    return record


def _write_float(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _read_float(value: Any) -> Any:
    return _FLOATS[value] if isinstance(value, str) and value in _FLOATS else value


def _check(record: Record) -> None:
    """Check what types cannot say.

    Raises:
        ValueError: The record contradicts itself.
    """
    match record:
        case Incarnation(accepted=accepted):
            _require(all(_is_commit(commit) for commit in accepted), "an accepted commit is out of bounds")
            _require(list(accepted) == sorted(set(accepted)), "accepted commits are not ascending")
            _require(
                all(commit.incarnation < record.number for commit in accepted),
                "an accepted commit is not of an earlier incarnation",
            )
        case Tombstone(commit=commit) | Quarantine(commit=commit) | Lease(commit=commit) | Replication(commit=commit):
            _require(_is_commit(commit), "the commit is out of bounds")
        case NodeRecord():
            _check_node(record)
        case Manifest():
            _require(_is_commit(record.commit), "the commit is out of bounds")
            nodes = [ref.node for ref in record.nodes]
            _require(nodes == sorted(set(nodes)), "nodes are not ascending")
            _require(len(nodes) <= record.world_size, "more nodes than ranks")
            named = not record.own_disks or max(nodes) < len(record.own_disks)
            _require(named, "a node with a disk of its own has no name")
        case _:
            pass


def _check_node(record: NodeRecord) -> None:
    _require(_is_commit(record.commit), "the commit is out of bounds")
    order = [(pack.rank, pack.part) for pack in record.packs]
    _require(order == sorted(set(order)), "packs are not ascending")
    for pack in record.packs:
        _require(pack.file == paths.pack(record.node, pack.rank, pack.part), "a pack has another name than it must")
        blocks = crc.num_blocks(pack.size_bytes)
        _require(len(pack.block_crcs) == crc.encoded_length(blocks), "a pack has the wrong number of block checksums")
        crc.decode_crcs(pack.block_crcs)
    if record.objects_size_bytes:
        _require(paths.parse_plan(record.objects_blake3) is not None, "the digest of the objects is not one")
    else:
        _require(not record.objects_blake3 and not record.objects_crc32, "there are no objects to have a checksum")


def _is_commit(commit: CommitId) -> bool:
    return all(0 <= number < MAX_COUNT for number in (commit.step, commit.incarnation, commit.attempt))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
