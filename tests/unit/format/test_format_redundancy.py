"""The redundancy record: a reader returns only what a writer could have meant."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from safehold.errors import FormatVersionError, ManifestError
from safehold.format import crc, document, paths, redundancy
from safehold.format.records import NodeRef
from safehold.format.redundancy import RedundancyRecord, ShareRecord
from safehold.types import CommitId

COMMIT = CommitId(10, 3, 0)
STORED = tuple(bytes([node]) * (1000 + node) for node in range(4))
CRCS = np.array([1, 2], np.uint32)
SIZE = crc.BLOCK_BYTES + 5


def share(row: int = 0, node: int = 2, **changes: Any) -> ShareRecord:
    fields: dict[str, Any] = {
        "file": paths.redundancy_share(node, row),
        "row": row,
        "size_bytes": SIZE,
        "crc32": crc.combine_blocks(CRCS, SIZE),
        "block_crcs": crc.encode_crcs(CRCS),
    }
    return ShareRecord(**(fields | changes))


def refs() -> tuple[NodeRef, ...]:
    return tuple(
        NodeRef(node=node, size_bytes=len(data), blake3=document.digest(data)) for node, data in enumerate(STORED)
    )


def record(**changes: Any) -> RedundancyRecord:
    fields: dict[str, Any] = {
        "run_id": "r",
        "commit": COMMIT,
        "node": 2,
        "kind": "rs",
        "num_data": 2,
        "num_parity": 2,
        "members": refs(),
        "shares": (share(0), share(1)),
        "created_s": 1.5,
        "library": "0.1",
    }
    return RedundancyRecord(**(fields | changes))


DATA = redundancy.encode_redundancy(record(), STORED)


def test_round_trip() -> None:
    assert redundancy.decode_redundancy(DATA, path="p") == (record(), STORED)
    assert len(DATA) % redundancy.ALIGNMENT_BYTES == 0
    assert redundancy.decode_redundancy(memoryview(DATA), path="p")[0] == record()


def test_its_bytes_are_part_of_the_format() -> None:
    assert document.digest(DATA) == "d84e45fb9b0a2a79538a6fb39871ac94aa9dd27de079d0492b3b83579bd3ea8f"


def test_the_head_tells_how_much_to_read() -> None:
    need = redundancy.head_bytes(DATA[: redundancy.ALIGNMENT_BYTES], path="p")
    found, end = redundancy.decode_head(DATA[:need], path="p")
    assert (found, end) == (record(), need)
    assert redundancy.file_bytes(found, end) == len(DATA)


def test_what_a_writer_may_not_mean() -> None:
    for changes in (
        {"node": 5},
        {"kind": "xor"},
        {"kind": "copies"},
        {"num_data": 3},
        {"num_data": 0},
        {"num_parity": 0},
        {"num_parity": 1},
        {"shares": (share(0),)},
        {"shares": (share(1), share(0))},
        {"shares": (share(0), share(1, node=3))},
        {"shares": (share(0), share(1, file="../../manifest.json"))},
        {"shares": (share(0), share(1, size_bytes=SIZE - 5))},
        {"shares": (share(0), share(1, size_bytes=SIZE - 6))},
        {"shares": (share(0), share(1, crc32=7))},
        {"shares": (share(0), share(1, block_crcs="AAAA"))},
        {"shares": (share(0), share(1, block_crcs="!" * crc.encoded_length(2)))},
        {"members": refs()[:3] + refs()[2:3]},
        {"commit": CommitId(-1, 3, 0)},
        {"run_id": ""},
    ):
        wrong = record(**changes)
        with pytest.raises(ValueError):
            redundancy.encode_redundancy(wrong, STORED[: len(wrong.members)])
        body = msgspec.to_builtins(wrong, str_keys=True)
        sealed = document.seal("redundancy", body) + b"".join(STORED)
        with pytest.raises(ManifestError) as caught:
            redundancy.decode_redundancy(sealed.ljust(-(-len(sealed) // 4096) * 4096, b"\0"), path="here")
        assert caught.value.path == "here", changes


def test_node_records_that_are_not_those_that_are_named() -> None:
    for stored in ((*STORED[:3], b"x" * len(STORED[3])), (*STORED[:3], STORED[3] + b"x")):
        with pytest.raises(ValueError):
            redundancy.encode_redundancy(record(), stored)


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    for offset in {*range(0, len(DATA), 13), 0, len(DATA) - 1}:
        damaged = bytearray(DATA)
        damaged[offset] ^= 4
        with pytest.raises(ManifestError):
            redundancy.decode_redundancy(damaged, path="p")
    for size in (0, 1, 100, 4095, 4096, len(DATA) - 1, len(DATA) - 4096):
        with pytest.raises(ManifestError):
            redundancy.decode_redundancy(DATA[:size], path="p")
    with pytest.raises(ManifestError):
        redundancy.decode_redundancy(DATA + bytes(4096), path="p")


def test_sizes_that_nobody_may_believe() -> None:
    for text in (
        b'{"safehold":"redundancy","format":1,"bytes":%d,"blake3":"%s"}\n' % (1 << 40, b"0" * 64),
        b'{"safehold":"redundancy","format":1,"bytes":-1,"blake3":"%s"}\n' % (b"0" * 64),
        b'{"safehold":"node","format":1,"bytes":1,"blake3":"%s"}\n' % (b"0" * 64),
        b"\0" * 4096,
        b"",
    ):
        with pytest.raises(ManifestError):
            redundancy.head_bytes(text.ljust(4096, b" "), path="p")
    large = tuple(msgspec.structs.replace(ref, size_bytes=redundancy.MAX_RECORD_BYTES) for ref in refs())
    many = tuple(msgspec.structs.replace(large[0], node=node) for node in range(8))
    for members in ((*large[:3], msgspec.structs.replace(large[3], size_bytes=redundancy.MAX_RECORD_BYTES + 1)), many):
        body = msgspec.to_builtins(record(members=members), str_keys=True)
        with pytest.raises(ManifestError):
            redundancy.decode_head(document.seal("redundancy", body), path="p")


def test_a_newer_format_is_told_as_such() -> None:
    with pytest.raises(FormatVersionError):
        redundancy.decode_redundancy(DATA.replace(b'"format":1', b'"format":2', 1), path="p")
    with pytest.raises(FormatVersionError):
        redundancy.head_bytes(DATA.replace(b'"format":1', b'"format":2', 1), path="p")


def test_unknown_fields_are_passed_over() -> None:
    body = msgspec.to_builtins(record(), str_keys=True) | {"later": [1]}
    sealed = document.seal("redundancy", body) + b"".join(STORED)
    found, _ = redundancy.decode_redundancy(sealed.ljust(-(-len(sealed) // 4096) * 4096, b"\0"), path="p")
    assert found == record()
