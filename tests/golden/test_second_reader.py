"""A second reader, written from `docs/format.md` alone: reads one tensor of the golden checkpoint without safehold."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

RUN = Path(__file__).parent / "v1" / "whole"


def open_envelope(data: bytes, kind: str) -> tuple[dict[str, Any], bytes]:
    line, rest = data.split(b"\n", 1)
    header = json.loads(line)
    assert list(header) == ["safehold", "format", "bytes", "blake3"]
    assert header["format"] == 1 and header["safehold"] == kind
    body, end, tail = rest[: header["bytes"]], rest[header["bytes"] : header["bytes"] + 1], rest[header["bytes"] + 1 :]
    assert end == b"\n" and blake3(body).hexdigest() == header["blake3"]
    return json.loads(body), tail


def open_table(data: bytes, kind: str) -> tuple[dict[str, Any], dict[str, list[int]], dict[str, Any]]:
    head, payload = open_envelope(data, kind)
    assert blake3(payload).hexdigest() == head["payload_blake3"]
    at, rows = 0, head["rows"]
    columns: dict[str, list[int]] = {}
    for column in head["columns"]:
        stored, at = payload[at : at + column["bytes"]], at + column["bytes"]
        width, numbers = column["width"], [0] * rows
        if width:
            raw = zstandard.ZstdDecompressor().decompress(stored)
            assert len(raw) == rows * width
            numbers = [sum(raw[plane * rows + row] << (8 * plane) for plane in range(width)) for row in range(rows)]
        numbers = [number + column["base"] for number in numbers]
        if column["coding"] == "differences":
            numbers[0] = column["first"]
            for row in range(1, rows):
                numbers[row] += numbers[row - 1]
        columns[column["name"]] = numbers
    blobs = {}
    for blob in head["blobs"]:
        stored, at = payload[at : at + blob["bytes"]], at + blob["bytes"]
        blobs[blob["name"]] = json.loads(zstandard.ZstdDecompressor().decompress(stored))
    assert payload[at:] == bytes(head["fill_bytes"])
    return head["facts"], columns, blobs


def test_reads_a_tensor() -> None:
    directory = RUN / "checkpoints" / "000000010" / "3-0"
    manifest, tail = open_envelope((directory / "manifest.json").read_bytes(), "manifest")
    assert not tail
    crcs: dict[str, list[int]] = {}
    for ref in manifest["nodes"]:
        raw = (directory / f"node-{ref['node']:05d}.json").read_bytes()
        assert (len(raw), blake3(raw).hexdigest()) == (ref["size_bytes"], ref["blake3"])
        for entry in open_envelope(raw, "node")[0]["packs"]:
            crcs[entry["file"]] = np.frombuffer(base64.b64decode(entry["block_crcs"]), "<u4").tolist()
    raw = (RUN / "plans" / manifest["plan_digest"]).read_bytes()
    assert blake3(raw).hexdigest() == manifest["plan_digest"]
    facts, columns, blobs = open_table(raw, "plan")
    leaves = blobs["leaves"]
    leaf = leaves["names"].index("a.b")
    assert leaves["dtypes"][leaves["dtype"][leaf]] == "float32" and leaves["shapes"][leaf] == [6, 3]
    found = np.zeros((6, 3), np.float32)
    for row, which in enumerate(columns["leaf"]):
        if which != leaf:
            continue
        rank, pack = columns["rank"][row], columns["pack"][row]
        name = f"{blobs['ranks']['nodes'][rank]:05d}-{rank:05d}.{pack}.safetensors"
        data = (directory / name).read_bytes()
        assert len(data) == blobs["ranks"]["pack_sizes"][rank][pack]
        assert [zlib.crc32(data[at : at + 2**20]) for at in range(0, len(data), 2**20)] == crcs[name]
        starts = [columns[f"offsets{dim}"][row] for dim in range(facts["num_dims"])]
        sizes = [columns[f"sizes{dim}"][row] for dim in range(facts["num_dims"])]
        assert (starts[2], sizes[2]) == (0, 1)
        piece = np.frombuffer(data, "<f4", sizes[0] * sizes[1], columns["offset"][row]).reshape(sizes[:2])
        found[starts[0] : starts[0] + sizes[0], starts[1] : starts[1] + sizes[1]] = piece
    # As `make.py` filled them: 4 rows of rank 0, then 2 rows of rank 1.
    rows = [bytes((37 * rank + 3 * at + 1) % 251 for at in range(nbytes)) for rank, nbytes in ((0, 48), (1, 24))]
    assert found.tobytes() == b"".join(rows)
