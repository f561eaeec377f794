"""Parts and plans: columns come back exactly; contradictions, shared bytes and bombs are refused."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from safehold.errors import ChecksumError, FormatVersionError, IntegrityError, ManifestError, StateMismatchError
from safehold.format import columns, document, leaftable, pack, plan
from safehold.types import ObjectSpec, Rect, TensorSpec

W = TensorSpec(name="w", dtype="float32", shape=(8, 4))
STEP = TensorSpec(name="step", dtype="int64", shape=())
CUBE = TensorSpec(name="cube", dtype="bfloat16", shape=(2, 2, 2))
NONE = TensorSpec(name="none", dtype="float32", shape=(0, 4))


def make_part(
    rank: int,
    world_size: int,
    leaves: Sequence[TensorSpec],
    pieces: Sequence[tuple[str, Rect]],
    **changes: Any,
) -> plan.Part:
    """Build a part by laying out its packs."""
    by_name = {leaf.name: index for index, leaf in enumerate(leaves)}
    specs = [leaves[by_name[name]] for name, _ in pieces]
    inputs = [
        pack.PieceIn(spec.name, spec.dtype, spec.shape, rect) for spec, (_, rect) in zip(specs, pieces, strict=True)
    ]
    layouts = pack.layout(inputs)
    dims = max((len(leaf.shape) for leaf in leaves), default=0)
    offsets, sizes = np.zeros((len(pieces), dims), np.int64), np.ones((len(pieces), dims), np.int64)
    which, offset = np.zeros(len(pieces), np.int32), np.zeros(len(pieces), np.int64)
    for placed in layouts.pieces:
        rect = pieces[placed.index][1]
        offsets[placed.index, : len(rect.sizes)], sizes[placed.index, : len(rect.sizes)] = rect.offsets, rect.sizes
        which[placed.index], offset[placed.index] = placed.pack, placed.offset
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "leaves": tuple(leaves),
        "leaf": np.array([by_name[name] for name, _ in pieces], np.int32),
        "offsets": offsets,
        "sizes": sizes,
        "pack": which,
        "offset": offset,
        "pack_sizes": tuple(entry.size_bytes for entry in layouts.packs),
    }
    return plan.Part(**(fields | changes))


ARRAYS = ("leaf", "offsets", "sizes", "pack", "offset")


def assert_same(a: Any, b: Any) -> None:
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y), field.name
        else:
            assert x == y, field.name


def two_parts() -> list[plan.Part]:
    leaves = sorted((W, STEP, CUBE, NONE), key=lambda leaf: leaf.name)
    objects = (ObjectSpec(name="o"), ObjectSpec(name="rng", policy="derive"))
    return [
        make_part(
            0,
            2,
            leaves,
            [("w", Rect((0, 0), (4, 4))), ("step", Rect((), ())), ("none", Rect((0, 0), (0, 4)))],
            objects=objects,
        ),
        make_part(
            1, 2, leaves, [("w", Rect((4, 0), (4, 4))), ("cube", Rect.whole((2, 2, 2)))], aliases=(("tied", "w"),)
        ),
    ]


def test_parts_come_back() -> None:
    for part in [*two_parts(), make_part(0, 1, (), ()), make_part(0, 1, (STEP,), [("step", Rect((), ()))])]:
        data = plan.encode_part(part)
        assert_same(plan.decode_part(data), part)
        assert plan.encode_part(part) == data
        assert plan.digest(data) == document.digest(data)


def test_merging_sorts_rows_and_keeps_every_column() -> None:
    parts = two_parts()
    for order in (parts, parts[::-1]):
        merged = plan.merge_parts([plan.encode_part(part) for part in order], (0, 7))
        assert [leaf.name for leaf in merged.leaves] == ["cube", "none", "step", "w"]
        assert merged.leaf.tolist() == [0, 1, 2, 3, 3] and merged.rank.tolist() == [1, 0, 0, 0, 1]
        assert merged.offsets.tolist()[-1] == [4, 0, 0] and merged.sizes.tolist()[-1] == [4, 4, 1]
        assert merged.nodes == (0, 7) and merged.aliases == (("tied", "w"),)
        assert merged.objects == (parts[0].objects, ())
        assert merged.pack_sizes == {0: parts[0].pack_sizes, 1: parts[1].pack_sizes}
        data = plan.encode_plan(merged)
        assert_same(plan.decode_plan(data, "p", expected_digest=plan.digest(data)), merged)
        assert plan.encode_plan(merged) == data


def test_ranks_with_other_leaves_share_one_table() -> None:
    parts = [
        make_part(0, 2, (STEP, W), [("w", Rect.whole(W.shape)), ("step", Rect((), ()))]),
        make_part(1, 2, (CUBE, W), [("w", Rect.whole(W.shape)), ("cube", Rect.whole(CUBE.shape))]),
    ]
    merged = plan.merge_parts([plan.encode_part(part) for part in parts], (0, 0))
    assert [merged.leaves[leaf].name for leaf in merged.leaf] == ["cube", "step", "w", "w"]
    assert merged.rank.tolist() == [1, 0, 0, 1]
    assert merged.sizes.tolist() == [[2, 2, 2], [1, 1, 1], [8, 4, 1], [8, 4, 1]]


@pytest.mark.parametrize("shape", [(2**31, 2**27), (2**30, 1, 2**26, 1, 1, 1, 1, 1)])
def test_sorting_does_not_depend_on_how_wide_a_key_would_be(shape: tuple[int, ...]) -> None:
    huge = TensorSpec(name="huge", dtype="int8", shape=shape)
    rng = np.random.default_rng(1)
    starts = rng.permutation(200)
    parts = []
    for rank in range(2):
        rects = [Rect((int(s), *[0] * (len(shape) - 1)), (1,) * len(shape)) for s in starts[rank::2]]
        parts.append(make_part(rank, 2, (huge,), [("huge", rect) for rect in rects]))
    merged = plan.merge_parts([plan.encode_part(part) for part in parts], (0, 0))
    assert merged.offsets[:, 0].tolist() == list(range(200))


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"shape": (4, 8)}, {"kind": "numpy"}])
def test_ranks_that_disagree_about_a_leaf_are_named(change: dict[str, Any]) -> None:
    other = dataclasses.replace(W, **change)
    parts = [make_part(0, 3, (W,), ()), make_part(1, 3, (W,), ()), make_part(2, 3, (other,), ())]
    with pytest.raises(StateMismatchError, match=r"w is .* on rank 0 and .* on rank 2"):
        plan.merge_parts([plan.encode_part(part) for part in parts], (0, 0, 0))


def test_aliases_that_disagree_are_named() -> None:
    def merge(*parts: plan.Part) -> plan.Plan:
        return plan.merge_parts([plan.encode_part(part) for part in parts], (0,) * len(parts))

    with pytest.raises(StateMismatchError, match="tied is tied to w on rank 0 and to step on rank 1"):
        merge(
            make_part(0, 2, (W,), (), aliases=(("tied", "w"),)),
            make_part(1, 2, (STEP,), (), aliases=(("tied", "step"),)),
        )
    with pytest.raises(StateMismatchError, match="w is tied to step on rank 0, and has bytes of its own on another"):
        merge(make_part(0, 2, (STEP,), (), aliases=(("w", "step"),)), make_part(1, 2, (W,), ()))
    with pytest.raises(StateMismatchError, match="tied is tied to gone on rank 0, which no rank has"):
        merge(make_part(0, 1, (W,), (), aliases=(("tied", "gone"),)))


def test_every_rank_is_there_once() -> None:
    one, two = (plan.encode_part(part) for part in two_parts())
    for parts, nodes, match in (
        ([one], (0,), "rank 1 is missing"),
        ([two], (0,), "rank 0 is missing"),
        ([one, one], (0, 0), "rank 0 is there twice"),
        ([one, two, two], (0, 0, 0), "rank 1 is there twice"),
        ([one, two], (0,), "nodes of 1"),
        ([], (), "at least one"),
        ([one, plan.encode_part(make_part(1, 3, (W,), ()))], (0, 0), "disagree about their number"),
    ):
        with pytest.raises(ManifestError, match=match):
            plan.merge_parts(parts, nodes)


BAD_PARTS: list[dict[str, Any]] = [
    {"leaf": np.array([0, 4], np.int32)},
    {"offsets": np.array([[5, 0, 0], [0, 0, 0]])},
    {"sizes": np.array([[9, 4, 1], [2, 2, 2]])},
    {"sizes": np.array([[4, 4, 2], [2, 2, 2]])},
    {"pack": np.array([0, 1], np.int32)},
    {"offset": np.array([4096, 4096])},
    {"offset": np.array([4096, 4159])},
    {"offset": np.array([4096, 8180])},
    {"pack_sizes": (4096,)},
    {"pack_sizes": ()},
]


def blobs_of(part: plan.Part) -> dict[str, bytes]:
    return {
        "leaves": leaftable.encode_leaves(part.leaves),
        "objects": leaftable.encode_objects(part.objects),
        "aliases": leaftable.encode_aliases(part.aliases),
    }


def forge_part(part: plan.Part, **facts: Any) -> bytes:
    """Write a part without the writer's checks."""
    base = {"rank": part.rank, "world_size": part.world_size, "num_dims": 3, "pack_sizes": list(part.pack_sizes)}
    table = {"leaf": part.leaf, "pack": part.pack, "offset": part.offset}
    for dim in range(3):
        table |= {f"offsets{dim}": part.offsets[:, dim], f"sizes{dim}": part.sizes[:, dim]}
    return columns.pack("part", base | facts, table, blobs_of(part))


@pytest.mark.parametrize("changes", BAD_PARTS, ids=range(len(BAD_PARTS)))
def test_rows_outside_leaf_or_pack_or_overlapping_are_refused(changes: dict[str, Any]) -> None:
    part = dataclasses.replace(two_parts()[1], **changes)
    with pytest.raises(ManifestError, match=r"a piece|two pieces"):
        plan.decode_part(forge_part(part), path="p")
    with pytest.raises(ValueError):
        plan.encode_part(part)


@pytest.mark.parametrize(
    "facts",
    [
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0},
        {"num_dims": 2},
        {"num_dims": 1000},
        {"pack_sizes": [2**60]},
        {"x": 1},
        {"rank": "0"},
    ],
)
def test_heads_that_contradict_their_tables_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        plan.decode_part(forge_part(two_parts()[1], **facts), path="p")


def test_plans_check_ranks_packs_and_overlaps() -> None:
    merged = plan.merge_parts([plan.encode_part(part) for part in two_parts()], (0, 0))
    for changes in (
        {"rank": np.array([2, 0, 0, 0, 1], np.int32)},
        {"pack": np.array([1, 0, 0, 0, 0], np.int32)},
        {"offset": np.full(5, 4096)},
        {"leaf": np.array([0, 1, 2, 3, 4], np.int32)},
        {"leaf": np.array([3, 0, 1, 2, 3], np.int32)},
        {name: getattr(merged, name)[[0, 1, 3, 4, 2]] for name in ("rank", *ARRAYS)}
        | {"leaves": merged.leaves[:2] + merged.leaves[:1:-1], "leaf": np.array([0, 1, 2, 2, 3], np.int32)},
        {name: getattr(merged, name)[::-1] for name in ("rank", *ARRAYS)},
        {name: getattr(merged, name)[[0, 1, 2, 4, 3]] for name in ("rank", *ARRAYS)},
        {"pack_sizes": {0: merged.pack_sizes[0], 1: ()}},
    ):
        with pytest.raises(ManifestError) as caught:
            plan.decode_plan(plan.encode_plan(dataclasses.replace(merged, **changes)), "plans/x")
        assert caught.value.path == "plans/x"


def test_every_flipped_bit_and_cut_is_refused() -> None:
    data = plan.encode_part(two_parts()[0])
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        for damaged in (bytes(bad), data[:at]):
            with pytest.raises(IntegrityError, match="p"):
                plan.decode_part(damaged, path="p")
    with pytest.raises(ManifestError):
        plan.decode_part(data + b"\0", path="p")
    with pytest.raises(FormatVersionError):
        plan.decode_part(data.replace(b'"format":1', b'"format":2', 1), path="p")
    with pytest.raises(ChecksumError):
        plan.decode_plan(data, "p", expected_digest="0" * 64)


def hostile_heads() -> list[bytes]:
    """Well sealed files that lie about what they unfold to."""

    def forge(
        rows: int, stored: bytes, *, width: int = 8, num: int = 1, fill: int = 0, raw: int | None = None
    ) -> bytes:
        column = {"dtype": "int64", "coding": "values", "first": 0, "base": 0, "width": width, "bytes": len(stored)}
        payload = stored * num + bytes(fill)
        head: dict[str, Any] = {
            "rows": rows,
            "columns": [column | {"name": f"c{index}"} for index in range(num)],
            "blobs": [],
            "fill_bytes": fill,
            "payload_blake3": document.digest(payload),
            "facts": {"rank": 0, "world_size": 1, "num_dims": 0, "pack_sizes": []},
        }
        if raw is not None:
            head["columns"] = []
            head["blobs"] = [{"name": "leaves", "raw_bytes": raw, "bytes": len(payload)}]
        return document.seal("part", head) + payload

    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 20))
    return [
        forge(8 << 20, bomb),
        forge(2**31 - 1, b"", width=0),
        forge(2**40, b"", width=0),
        forge(-1, b"", width=0),
        forge(1 << 17, b"", width=0, num=64),
        forge(1, b"", width=0, num=2000),
        forge(1 << 17, unsized),
        forge(100, bomb),
        forge(1, b"xxxxxxxx"),
        forge(1, b"", width=8),
        forge(1, b"x", width=3),
        forge(0, bomb, raw=64 << 20),
        forge(0, bomb, raw=100),
        forge(0, bomb, raw=2**62),
        forge(0, unsized, raw=1 << 20),
        forge(0, b"", width=0, num=0) + b"tail",
    ]


@pytest.mark.parametrize("data", hostile_heads())
def test_bombs_are_refused_without_large_allocations(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError) as caught:
            packed = columns.unpack("part", data, path="p")
            for name in packed.columns:
                packed.column(name)
            for name in packed.blobs:
                packed.blob(name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == "p"
    assert peak < 24 << 20


def test_a_file_pays_for_what_it_unfolds_to() -> None:
    rows = 4 << 20
    data = columns.pack("part", {}, {"a": np.zeros(rows, np.int64)}, {})
    assert len(data) >= (rows * 8 - columns.FLOOR_BYTES) // columns.RATIO
    assert not columns.unpack("part", data, path="p").column("a").any()


@pytest.mark.parametrize(
    "leaves",
    [
        [W, W],
        [dataclasses.replace(W, name="a..b")],
        [dataclasses.replace(W, dtype="float33")],
        [dataclasses.replace(W, shape=(2**40, 2**40))],
        [dataclasses.replace(W, shape=(0, 2**60))],
        [dataclasses.replace(W, shape=(1,) * 65)],
    ],
)
def test_bad_leaves_are_refused(leaves: list[TensorSpec]) -> None:
    with pytest.raises(ValueError):
        leaftable.encode_leaves(tuple(leaves))
    table = {
        "names": [leaf.name for leaf in leaves],
        "dtypes": [leaves[0].dtype],
        "dtype": [0] * len(leaves),
        "kinds": ["torch"],
        "kind": [0] * len(leaves),
        "shapes": [leaf.shape for leaf in leaves],
    }
    with pytest.raises(ManifestError, match="table of leaves"):
        leaftable.decode_leaves(msgspec.json.encode(table), path="p")
    table["kind"] = [1] * len(leaves)
    with pytest.raises(ManifestError, match="table of leaves"):
        leaftable.decode_leaves(msgspec.json.encode(table | {"names": ["ok"], "dtypes": ["int8"]}), path="p")


def test_missing_columns_of_many_dims_are_refused_without_large_allocations() -> None:
    part = make_part(0, 1, (TensorSpec(name="deep", dtype="int8", shape=(1,) * 64),), ())
    facts = {"rank": 0, "world_size": 1, "num_dims": 64, "pack_sizes": []}
    data = columns.pack("part", facts, {"leaf": np.zeros(1 << 20, np.int32)}, blobs_of(part))
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match="offsets0 is missing"):
            plan.decode_part(data, path="p")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


def test_what_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="more rows, columns or blobs"):
        columns.pack("part", {}, {}, {f"b{index}": b"" for index in range((1 << 16) + 1)})
    monkeypatch.setitem(document.MAX_PAYLOAD_BYTES, "part", 10)
    with pytest.raises(ValueError, match="at most 10"):
        columns.pack("part", {}, {}, {"b": bytes(range(100))})


def test_thousands_of_ranks_may_each_have_objects_of_their_own() -> None:
    parts = [
        make_part(rank, 1500, (), (), objects=(ObjectSpec(name=f"layers.{rank}._extra_state"),)) for rank in range(1500)
    ]
    merged = plan.merge_parts([plan.encode_part(part) for part in parts], [0] * 1500)
    assert_same(plan.decode_plan(plan.encode_plan(merged)), merged)


def test_packs_larger_than_any_storage_are_refused_by_name() -> None:
    part = two_parts()[1]
    sizes = [2**60 - 4096] * 5
    with pytest.raises(ValueError, match="larger than any storage"):
        plan.encode_part(dataclasses.replace(part, pack_sizes=tuple(sizes)))
    with pytest.raises(ManifestError, match="larger than any storage") as caught:
        plan.decode_part(forge_part(part, pack_sizes=sizes), path="p")
    assert caught.value.path == "p"


def test_many_dims_times_many_leaves_are_refused() -> None:
    leaves = [TensorSpec(name=f"l{index}", dtype="int8", shape=()) for index in range(300_000)]
    leaves.append(TensorSpec(name="z", dtype="int8", shape=(1,) * 64))
    with pytest.raises(ValueError, match="leaves times dims"):
        leaftable.encode_leaves(tuple(leaves))


def test_a_new_inventory_is_encoded_in_milliseconds() -> None:
    leaves = [
        TensorSpec(name=f"model.layers.{index}.weight", dtype="float32", shape=(8192, 8192)) for index in range(3000)
    ]
    leaves.sort(key=lambda leaf: leaf.name)
    part = make_part(3, 64, leaves, [(leaf.name, Rect((24, 0), (8, 8192))) for leaf in leaves])
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        data = plan.encode_part(part)
        middle = time.process_time()
        plan.decode_part(data)
        best = min(best, max(middle - start, time.process_time() - middle))
    assert best < 0.05
