"""The redundancy record: what a node holds for the other members of its redundancy set, and their node records.

`redundancy-<node>.json` is an envelope, then the node records of all members end to end in the order of the set, then zeros up to a
multiple of 4096 bytes. It is written last: without it the shares beside it (`redundancy-<node>.<row>`) are debris.

Invariants: as `safehold.format.records`. Members are named with size and blake3 of their node records, which the manifest names as
well, so that a record of another checkpoint, or of one that was saved anew, is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from safehold.errors import ManifestError
from safehold.format import crc, document, paths
from safehold.format.names import display
from safehold.format.records import MAX_COUNT, Count, Crc32, NodeRef, Record, Seconds, Word
from safehold.types import CommitId

KIND: Final = "redundancy"
ALIGNMENT_BYTES: Final = 4096
"""A record's size is a multiple of it, so that so many bytes of one can be asked for without knowing its size."""

MAX_MEMBERS: Final = 4096
MAX_SYMBOLS: Final = 255
MAX_RECORD_BYTES: Final = document.max_file_bytes("node")

_Small = Annotated[int, Meta(ge=1, le=MAX_SYMBOLS)]


class ShareRecord(Record, frozen=True, kw_only=True):
    """One share as it was written.

    Attributes:
        file: Its name in the checkpoint's directory, always `paths.redundancy_share(node, row)`; there is none if its size is 0.
        row: Which parity row, or copy, it is.
        crc32: Of the whole file.
        block_crcs: CRC32 of each block of 1 MiB, see `safehold.format.crc.encode_crcs`.
    """

    file: Word
    row: Count
    size_bytes: Count
    crc32: Crc32
    block_crcs: str


class RedundancyRecord(Record, frozen=True, kw_only=True):
    """`redundancy-<n>.json`: what a node holds for its set.

    Attributes:
        kind: `copies`, `xor` or `rs`.
        num_data: Data symbols of a stripe.
        num_parity: Parity symbols of a stripe, or copies.
        members: The nodes of the set in the order of the ring, with size and blake3 of their node records.
        shares: One for each parity row, ascending.
    """

    run_id: Annotated[str, Meta(min_length=1, max_length=128)]
    commit: CommitId
    node: Count
    kind: Literal["copies", "xor", "rs"]
    num_data: _Small
    num_parity: _Small
    members: Annotated[tuple[NodeRef, ...], Meta(min_length=2, max_length=MAX_MEMBERS)]
    shares: tuple[ShareRecord, ...]
    created_s: Seconds
    library: Word


def encode_redundancy(record: RedundancyRecord, node_records: Sequence[bytes]) -> bytes:
    """Return the bytes of a redundancy record.

    Args:
        record: What is sealed.
        node_records: The members' node records as stored, in their order.

    Raises:
        ValueError: The record contradicts itself or the node records.
    """
    _check(record)
    for ref, data in zip(record.members, node_records, strict=True):
        if len(data) != ref.size_bytes or document.digest(data) != ref.blake3:
            raise ValueError(f"the record of node {ref.node} is not the one that is named")
    head = document.seal(KIND, msgspec.to_builtins(record, str_keys=True))
    try:
        decode_head(head, path=KIND)
    except ManifestError as exc:
        raise ValueError(exc.message) from None
    return b"".join((head, *node_records)).ljust(file_bytes(record, len(head)), b"\0")


def file_bytes(record: RedundancyRecord, head_bytes: int) -> int:
    """Return the size of a record's file from that of its head."""
    total = head_bytes + sum(ref.size_bytes for ref in record.members)
    return -(-total // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def head_bytes(data: bytes | memoryview, *, path: str) -> int:
    """Return how long a record's head is, from the first `ALIGNMENT_BYTES` of its file; errors as for `decode_head`."""
    return document.head_bytes(KIND, data, path=path)


def decode_head(data: bytes | memoryview, *, path: str) -> tuple[RedundancyRecord, int]:
    """Read a record's head, which stands at the start of its file; return it and its length.

    Raises:
        ManifestError: It is nothing that `encode_redundancy` writes.
        FormatVersionError: A newer version of safehold wrote it.
    """
    body: Any
    body, end = document.unseal_head(KIND, data, path=path)
    try:
        record = msgspec.convert(body, RedundancyRecord, strict=True, str_keys=True)
        _check(record)
        if file_bytes(record, end) > document.max_file_bytes(KIND):
            raise ValueError("it is larger than it may be")
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ManifestError(f"the redundancy record contradicts itself: {display(str(exc))}", path=path) from None
    return record, end


def decode_redundancy(data: bytes | memoryview, *, path: str) -> tuple[RedundancyRecord, tuple[bytes, ...]]:
    """Read a whole record; return it and the members' node records as stored, which are compared with their blake3.

    Raises:
        ManifestError: It is nothing that `encode_redundancy` writes.
        FormatVersionError: A newer version of safehold wrote it.
    """
    record, end = decode_head(data, path=path)
    view = memoryview(data)
    if len(view) != file_bytes(record, end):
        raise ManifestError(f"the record has {len(view)} bytes, not {file_bytes(record, end)}", path=path)
    found = []
    for ref in record.members:
        stored = bytes(view[end : end + ref.size_bytes])
        if document.digest(stored) != ref.blake3:
            raise ManifestError(f"the record of node {ref.node} in it does not match its blake3", path=path)
        found.append(stored)
        end += ref.size_bytes
    if any(view[end:]):
        raise ManifestError("the record does not end in zeros", path=path)
    return record, tuple(found)


def _check(record: RedundancyRecord) -> None:
    """Check what types cannot say.

    Raises:
        ValueError: The record contradicts itself.
    """
    commit, nodes = record.commit, [ref.node for ref in record.members]
    _require(
        all(0 <= n < MAX_COUNT for n in (commit.step, commit.incarnation, commit.attempt)), "a commit out of bounds"
    )
    _require(len(set(nodes)) == len(nodes) and record.node in nodes, "members that are there twice, or not the node")
    _require(all(ref.size_bytes <= MAX_RECORD_BYTES for ref in record.members), "a node record that is too large")
    _require(record.num_data + record.num_parity <= min(len(nodes), MAX_SYMBOLS), "more symbols than members")
    _require(record.kind != "copies" or record.num_data == 1, "copies of more than one node in one")
    _require(record.kind != "xor" or record.num_parity == 1, "more than one XOR")
    _require([share.row for share in record.shares] == list(range(record.num_parity)), "not one share for each row")
    for share in record.shares:
        _require(
            share.file == paths.redundancy_share(record.node, share.row), "a share of another name than it must have"
        )
        blocks = crc.num_blocks(share.size_bytes)
        _require(len(share.block_crcs) == crc.encoded_length(blocks), "a share with the wrong number of checksums")
        combined = crc.combine_blocks(crc.decode_crcs(share.block_crcs), share.size_bytes)
        _require(combined == share.crc32, "a share whose checksum is not that of its blocks")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
