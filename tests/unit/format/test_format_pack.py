"""Packs: any safetensors reader reads them; our own accepts nothing else."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from safehold.errors import TornFileError
from safehold.format import dtypes, pack
from safehold.types import Rect


def piece(name: str, dtype: str, shape: tuple[int, ...], rect: Rect | None = None) -> pack.PieceIn:
    return pack.PieceIn(name, dtype, shape, rect or Rect.whole(shape))


def fill(layouts: pack.PackLayouts, contents: dict[int, bytes]) -> list[bytes]:
    """Return the files, as an arena would have them."""
    arena = bytearray(layouts.size_bytes)
    for entry in layouts.packs:
        arena[entry.arena_offset : entry.arena_offset + len(entry.header)] = entry.header
    for placed in layouts.pieces:
        assert len(contents[placed.index]) == placed.nbytes
        arena[placed.arena_offset : placed.arena_offset + placed.nbytes] = contents[placed.index]
        assert placed.arena_offset == layouts.packs[placed.pack].arena_offset + placed.offset
    return [bytes(arena[entry.arena_offset :][: entry.size_bytes]) for entry in layouts.packs]


def test_safetensors_reads_what_was_laid_out() -> None:
    tensors = {
        "w": torch.randn(8, 16),
        "h": torch.randn(3, 5).to(torch.bfloat16),
        "f8": torch.randn(7).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "Größe": torch.arange(3, dtype=torch.int16),
    }
    pieces = [
        piece(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in tensors.items()
    ]
    raw = {
        index: value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for index, value in enumerate(tensors.values())
    }
    (data,) = fill(pack.layout(pieces), raw)
    loaded = safetensors.torch.load(data)
    assert set(loaded) == {*tensors, "@pad.0"}
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    header = pack.parse_header(data, len(data), path="p")
    assert header.metadata == {"format": "pt", "safehold": "1"}
    for placed in pack.layout(pieces).pieces:
        tensor = header.tensors[pieces[placed.index].name]
        assert (tensor.start, tensor.end) == (placed.offset, placed.offset + placed.nbytes)


def test_dtypes_that_safetensors_lacks_are_bytes() -> None:
    values = {"c": np.array([[1 + 2j, 3]], np.complex64), "when": np.array(5, "<M8[ns]"), "s": np.array(["é", "abc"])}
    pieces = [piece(name, dtypes.from_numpy(value.dtype), value.shape) for name, value in values.items()]
    (data,) = fill(pack.layout(pieces), {index: value.tobytes() for index, value in enumerate(values.values())})
    loaded = safetensors.numpy.load(data)
    for name, value in values.items():
        assert loaded[name].dtype == np.uint8
        assert np.array_equal(loaded[name].reshape(-1).view(value.dtype).reshape(value.shape), value)
    assert loaded["c"].shape == (1, 16) and loaded["when"].shape == (8,)


def test_order_alignment_and_size() -> None:
    pieces = [
        piece("a", "int8", (3,)),
        piece("b", "float32", (16,)),
        piece("c", "float64", ()),
        piece("d", "bfloat16", (5,)),
        piece("e", "int8", (64,)),
        piece("f", "complex128", (1,)),
        piece("g", "float32", (0,)),
        piece("h", "numpy:<U3", (1,)),
    ]
    layouts = pack.layout(pieces)
    assert [pieces[placed.index].name for placed in layouts.pieces] == ["b", "e", "g", "f", "c", "h", "d", "a"]
    for placed in layouts.pieces:
        assert placed.offset % dtypes.alignment(pieces[placed.index].dtype) == 0 or not placed.nbytes
    (only,) = layouts.packs
    assert only.size_bytes % 4096 == 0 and len(only.header) % 4096 == 0
    assert layouts.pieces[0].offset == len(only.header)


def test_the_header_is_a_pure_function_of_the_pieces() -> None:
    pieces = [piece("w", "float32", (10, 10), Rect((row, 0), (1, 10))) for row in range(10)]
    assert pack.layout(pieces) == pack.layout(list(pieces))
    assert b'"w@3,0":{"dtype":"F32","shape":[1,10],"data_offsets":[' in pack.layout(pieces).packs[0].header


def test_packs_are_split_by_size_and_by_header() -> None:
    pieces = [piece(f"w{index}", "uint8", (4096,)) for index in range(10)] + [piece("big", "uint8", (100_000,))]
    pieces += [piece(f"s{index}", "int8", (1,)) for index in range(3)]
    layouts = pack.layout(pieces, pack_size_bytes=3 * 4096)
    sizes: dict[int, int] = {}
    for placed in layouts.pieces:
        sizes[placed.pack] = sizes.get(placed.pack, 0) + placed.nbytes
    assert sorted(sizes) == list(range(len(layouts.packs)))
    assert [size for size in sizes.values() if size > 3 * 4096] == [100_000]
    for data in fill(layouts, {index: bytes(entry.rect.numel) for index, entry in enumerate(pieces)}):
        assert safetensors.numpy.load(data)
    many = pack.layout([piece(f"layer.{index}", "float32", (16,)) for index in range(1000)], max_header_bytes=20_000)
    assert len(many.packs) > 5 and all(len(entry.header) <= 20_000 + 4096 for entry in many.packs)


def test_no_pieces_no_packs() -> None:
    assert pack.layout([]) == pack.PackLayouts((), ())
    (only,) = pack.layout([piece("empty", "float32", (0,))]).packs
    assert safetensors.numpy.load(only.header)["empty"].shape == (0,)


@pytest.mark.parametrize(
    "bad",
    [
        [piece("a", "float32", (2,)), piece("a", "float32", (2,))],
        [piece("a..b", "float32", (2,))],
        [piece("@pad.0", "uint8", (2,))],
        [piece("a", "float33", (2,))],
        [piece("a", "float32", (2,), Rect((1,), (2,)))],
        [piece("a", "float32", (2,), Rect((-1,), (2,)))],
        [piece("a", "float32", (2,), Rect((0, 0), (1, 1)))],
        [piece("a", "float32", (2**59,))],
    ],
)
def test_bad_pieces_are_refused(bad: list[pack.PieceIn]) -> None:
    with pytest.raises(ValueError):
        pack.layout(bad)


def forge(header: Any, data_bytes: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(begin: Any, end: Any, shape: Any = None, dtype: Any = "U8", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end], **more}


def test_the_strict_reader_takes_others_files() -> None:
    data = safetensors.numpy.save({"b": np.zeros((2, 3), np.float32), "a": np.zeros(0)}, metadata={"x": "y"})
    header = pack.parse_header(data, len(data), path="p")
    assert header.tensors["b"].shape == (2, 3) and header.metadata == {"x": "y"}
    assert header.data_start == pack.header_bytes(data[:8], len(data), path="p")
    assert pack.parse_header(data[: header.data_start], len(data), path="p") == header


HOSTILE: list[bytes] = [
    b"",
    b"1234567",
    forge({"a": entry(0, 8)}, length=2**63),
    forge({"a": entry(0, 8)}, length=10**9),
    forge({"a": entry(0, 8)}, length=1),
    forge({"a": entry(0, 8)}, length=3),
    forge(b"[]"),
    forge(b" {}"),
    forge(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    forge(b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'),
    forge(b'{"a":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}'),
    forge({"a": entry(0, 8), "b": entry(0, 8)}),
    forge({"a": entry(0, 5), "b": entry(4, 8)}),
    forge({"a": entry(0, 3), "b": entry(4, 8)}),
    forge({"a": entry(1, 8)}),
    forge({"a": entry(0, 7)}),
    forge({"a": entry(0, 8)}, data_bytes=9),
    forge({"a": entry(0, 16)}),
    forge({"a": entry(8, 0, [8])}),
    forge({"a": entry(0, 8, [-8])}),
    forge({"a": entry(0, 8, [8.0])}),
    forge({"a": entry(0, 8, [True])}),
    forge({"a": entry(0, 8, [2**59, 2**59, 2**59])}),
    forge({"a": entry(0, 8, [1] * 65 + [8])}),
    forge({"a": entry(0, 8, [2**70])}),
    forge(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
    forge({"a": entry(0, 8, dtype="Q8")}),
    forge({"a": entry(0, 8, dtype=["U8"])}),
    forge({"a": entry(0, 8, dtype=None)}),
    forge({"a": entry(0, 8, extra=1)}),
    forge({"a": {"dtype": "U8", "shape": [8]}}),
    forge({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}),
    forge({"a": None}),
    forge({"__metadata__": {"x": 1}, "a": entry(0, 8)}),
    forge({"__metadata__": "x", "a": entry(0, 8)}),
    forge(b'{"a":NaN}'),
    forge(b"{\xff}"),
    forge({}),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_headers_are_refused_by_name_and_without_large_allocations(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TornFileError) as caught:
            pack.parse_header(data, len(data), path="p")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == "p" and len(str(caught.value)) < 600
    assert peak < 8 << 20


def test_three_thousand_pieces_are_laid_out_quickly() -> None:
    import time

    pieces = [
        piece(f"model.layers.{index}.weight", "bfloat16", (8192, 64), Rect((64, 0), (64, 64))) for index in range(3000)
    ]
    start = time.process_time()
    layouts = pack.layout(pieces)
    pack.parse_header(layouts.packs[0].header, layouts.packs[0].size_bytes, path="p")
    assert time.process_time() - start < 5.0, "some 0.1 s where it is linear, minutes where it is not"
