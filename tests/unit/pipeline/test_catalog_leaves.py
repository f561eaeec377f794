"""Reading single leaves without a framework, and comparing checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from run_dirs import PerRank, RunDir, Typed, flip

from safehold.errors import ChecksumError, StepNotFoundError, TornFileError
from safehold.pipeline import inspect
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.leaf_reader import LeafReader, split_rect, typed
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId, Rect

MIB = 1 << 20


def reader(run: RunDir, commit: CommitId) -> LeafReader:
    return LeafReader(run.tier, Catalog(run.tier).load(commit))


RNG = np.random.default_rng(1)
TENSORS = {
    "f4": RNG.normal(size=(11, 5)).astype(np.float32),
    "i8": RNG.integers(-128, 127, size=(6, 2, 3), dtype=np.int8),
    "bool": RNG.integers(0, 2, size=(9,)).astype(bool),
    "c8": (RNG.normal(size=(4, 2)) + 1j).astype(np.complex64),
    "scalar": np.array(7, np.int64),
    "none": np.zeros((0, 4), np.float64),
    "none2": np.zeros((4, 0), np.float64),
    "bf": Typed("bfloat16", RNG.integers(0, 2**16, size=(5, 3), dtype=np.uint16)),
    "fp8": Typed("float8_e4m3fn", RNG.integers(0, 256, size=(10,), dtype=np.uint8)),
    "when": RNG.integers(0, 9, size=(5,)).astype("datetime64[s]"),
}


def read_array(leaves: LeafReader, name: str, rect: Rect | None = None) -> np.ndarray:
    raw = leaves.read_bytes(name, rect)
    spec = leaves.tensor_spec(name)
    assert spec is not None
    return typed(raw, spec.dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_any_dtype_from_any_world_size(run: RunDir, world_size: int):
    with reader(run, run.save(10, TENSORS, world_size=world_size, pack_size_bytes=64)) as leaves:
        for name, value in TENSORS.items():
            if isinstance(value, Typed):
                got = leaves.read_bytes(name)
                assert got.shape == (*value.items.shape, value.items.itemsize)
                assert got.tobytes() == value.items.tobytes()
                assert np.array_equal(read_array(leaves, name), got)
            else:
                array = read_array(leaves, name)
                assert array.dtype == value.dtype and array.shape == value.shape
                assert np.array_equal(array, value)


def test_rectangles(run: RunDir):
    whole = np.arange(7 * 6 * 4).reshape(7, 6, 4)
    with reader(run, run.save(10, {"w": whole}, world_size=3)) as leaves:
        for offsets in ((0, 0, 0), (1, 2, 3), (2, 0, 1), (6, 5, 3)):
            sizes = tuple(min(3, n - o) for o, n in zip(offsets, whole.shape, strict=True))
            part = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            assert np.array_equal(read_array(leaves, "w", Rect(offsets, sizes)), whole[part])


def test_a_rectangle_reads_and_verifies_only_its_blocks(run: RunDir):
    value = np.arange(4 * MIB, dtype=np.int8).reshape(4, MIB)
    commit = run.save(10, {"w": value}, world_size=1)
    flip(run.path(commit, "00000-00000.0.safetensors"), 3 * MIB + MIB // 2)
    tier = FakeTier(run.tier)
    with LeafReader(tier, Catalog(run.tier).load(commit)) as leaves:
        assert np.array_equal(read_array(leaves, "w", Rect((1, 0), (1, MIB)))[0], value[1])
        assert sum(op.nbytes for op in tier.log if op.kind == "read_into") <= 2 * MIB
        with pytest.raises(ChecksumError) as caught:
            read_array(leaves, "w")
    assert "block 3" in caught.value.message and "w" in caught.value.message
    assert caught.value.path.endswith("00000-00000.0.safetensors") and caught.value.step == 10


def test_aliases_and_unknown_names(run: RunDir):
    with reader(run, run.save(10, {"emb.weight": np.ones((3, 2))}, aliases={"head.weight": "emb.weight"})) as leaves:
        assert np.array_equal(read_array(leaves, "head.weight"), np.ones((3, 2)))
        with pytest.raises(StepNotFoundError, match="no leaf other") as caught:
            read_array(leaves, "other.weight")
        assert "emb.weight" in caught.value.hint
        with pytest.raises(StepNotFoundError):
            leaves.read_object("emb.weight")


def test_objects_per_rank(run: RunDir):
    state = {"same": {"a": [1, (2,)]}, "own": PerRank((b"x", b"y", b"z"))}
    with reader(run, run.save(10, {}, state, world_size=3, ranks_per_node=2)) as leaves:
        assert leaves.read_object("same") == {"a": [1, (2,)]}
        assert [leaves.read_object("own", rank) for rank in range(3)] == [b"x", b"y", b"z"]
        assert len(set(leaves.object_digests("own").values())) == 3
        with pytest.raises(StepNotFoundError, match="different values"):
            leaves.read_object("own")
        with pytest.raises(StepNotFoundError, match="rank 3 has no"):
            leaves.read_object("own", 3)


def test_damaged_files_are_named(run: RunDir):
    commit = run.save(10)
    flip(run.path(commit, "node-00000.objects"))
    with reader(run, commit) as leaves, pytest.raises(ChecksumError, match="objects do not match"):
        leaves.read_object("rng", 0)
    run.path(commit, "00000-00000.0.safetensors").unlink()
    with reader(run, commit) as leaves, pytest.raises(TornFileError, match="missing"):
        read_array(leaves, "model.emb.weight")


@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (3, 2, 4), (1, 1, 1), (5,), ()])
@pytest.mark.parametrize("limit", [1, 8, 40, 1000])
def test_split_rect_tiles(shape, limit):
    seen = np.zeros(shape, int)
    for rect in split_rect(Rect.whole(shape), 4, limit):
        assert rect.numel * 4 <= max(limit, 4)
        seen[tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))] += 1
    assert (seen == 1).all()


def compare(run: RunDir, before: CommitId, after: CommitId, tier=None) -> inspect.Difference:
    catalog = Catalog(run.tier)
    return inspect.compare(tier or run.tier, catalog.load(before), catalog.load(after))


def test_leaves_of_a_checkpoint(run: RunDir):
    commit = run.save(10, {"w": np.ones((4, 3), np.float32)}, {"o": 1}, aliases={"tied": "w"}, world_size=2)
    infos = {info.name: info for info in inspect.leaves(Catalog(run.tier).load(commit))}
    assert infos["w"].shape == (4, 3) and infos["w"].nbytes == 48 and infos["w"].num_ranks == 2
    assert infos["tied"].target == "w" and infos["o"].policy == "same" and infos["o"].num_ranks == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_differences(run: RunDir, world_size: int):
    old = {
        "same": np.arange(40.0),
        "value": np.arange(40.0),
        "shape": np.ones(3),
        "dtype": np.ones(3),
        "gone": np.ones(2),
    }
    new = {**old, "value": np.arange(40.0) + (np.arange(40) == 39), "shape": np.ones(4), "new": np.ones(2)}
    new["dtype"] = np.ones(3, np.float32)
    del new["gone"]
    first = run.save(10, old, {"o": 1, "p": 2}, world_size=2, aliases={"tied": "same"})
    second = run.save(20, new, {"o": 1, "p": 3}, world_size=world_size, aliases={"tied": "value"})
    found = compare(run, first, second)
    assert found.added == ("new",) and found.removed == ("gone",)
    assert {(c.name, c.what, c.before, c.after) for c in found.changed} == {
        ("dtype", "dtype", "float64", "float32"),
        ("p", "content", "", ""),
        ("shape", "shape", "[3]", "[4]"),
        ("tied", "target", "same", "value"),
        ("value", "content", "", ""),
    }
    assert found.num_same == 2 and not found.is_empty
    assert compare(run, first, first).is_empty


def test_equal_layouts_are_compared_by_checksums(run: RunDir):
    big = np.zeros((8, MIB // 2), np.int16)
    changed = big.copy()
    changed[3, 5] = 1
    first = run.save(10, {"a": big, "b": big}, {}, world_size=1)
    second = run.save(20, {"a": big, "b": changed}, {}, world_size=1)
    tier = FakeTier(run.tier)
    found = compare(run, first, second, tier)
    assert [change.name for change in found.changed] == ["b"] and found.num_same == 1
    assert sum(op.nbytes for op in tier.log if op.kind == "read_into") == 0


def test_leaves_that_share_a_block_are_told_apart(run: RunDir):
    first = run.save(10, {"a": np.zeros(64), "b": np.zeros(64)}, {}, world_size=1)
    second = run.save(20, {"a": np.zeros(64), "b": np.ones(64)}, {}, world_size=1)
    assert [change.name for change in compare(run, first, second).changed] == ["b"]
