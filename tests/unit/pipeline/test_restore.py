"""Reading a checkpoint into live memory, against NumPy: any plan into any destinations, any source, any trouble."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from any_plans import (
    DTYPES,
    as_array,
    bytes_of,
    destination,
    make,
    make_numpy,
    make_torch,
    one_leaf,
    random_items,
    reading,
    split_randomly,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from run_dirs import RunDir, Typed

from safehold.format import crc, dtypes
from safehold.pipeline import restore
from safehold.pipeline.catalog import Catalog
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.flash import FlashTier
from safehold.types import Rect


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Checksum blocks, reads and gaps so small that little tensors have many."""
    patch = pytest.MonkeyPatch()
    patch.setattr(crc, "BLOCK_BYTES", 64)
    patch.setattr(restore, "CHUNK_BYTES", 256)
    patch.setattr(restore, "GAP_BYTES", 64)
    yield
    patch.undo()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_plan_into_any_destination(seed: int) -> None:
    any_plan_into_any_destination(seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_plans_into_any_destination() -> None:
    for seed in range(5000):
        try:
            any_plan_into_any_destination(seed)
        except Exception as exc:
            exc.add_note(f"seed {seed}")
            raise


def any_plan_into_any_destination(seed: int) -> None:
    rng = np.random.default_rng(seed)
    raw = {}
    for number in range(rng.integers(1, 5)):
        shape = tuple(rng.integers(0 if rng.random() < 0.1 else 1, 12, size=rng.integers(0, 4)).tolist())
        dtype = str(rng.choice(DTYPES))
        raw[f"leaf{number}"] = dtype, random_items(dtype, shape, rng)
    made = make(raw, int(rng.integers(1, 4)), int(rng.choice([4096, 256, 1 << 30])), rng)
    destinations, expected = [], []
    for name in rng.permutation([*raw, *raw] if rng.random() < 0.3 else [*raw]):
        spec, pieces = made.spec(str(name)), []
        use_numpy = spec.kind == "numpy" or (dtypes.numpy_dtype(spec.dtype) is not None and rng.random() < 0.5)
        for rect in split_randomly(Rect.whole(spec.shape), rng, depth=2):
            if rng.random() < 0.8:
                view = (make_numpy if use_numpy else make_torch)(spec.dtype, rect.sizes, rng)
                pieces.append((rect, view))
                expected.append((view, made.part(spec.name, rect).tobytes()))
        destinations.append(destination("x", spec, pieces))
    figures = reading(made.tier, made.checkpoint, destinations, num_threads=int(rng.integers(1, 4))).run()
    for view, wanted in expected:
        assert bytes_of(view) == wanted
    assert not figures.replaced
    assert (figures.bytes > 0) == any(wanted for _, wanted in expected)


def test_one_leaf_into_two_destinations_that_span_many_reads() -> None:
    made = one_leaf()
    first, second = np.zeros(400), torch.zeros(400, dtype=torch.float64)
    whole = Rect.whole((400,))
    reading(
        made.tier,
        made.checkpoint,
        [destination(n, made.spec("w"), [(whole, v)]) for n, v in zip("ab", (first, second))],
    ).run()
    assert first.tobytes() == bytes_of(second) == made.raw["w"].tobytes()


def test_column_shards_into_row_shards_and_back() -> None:
    rng = np.random.default_rng(1)
    raw = random_items("float64", (24, 36), rng)
    columns = lambda spec, rank, world: [Rect((0, rank * 9), (24, 9))]  # noqa: E731
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    run = RunDir(Path(disk.root), tier)
    commit = run.save(10, {"w": as_array("float64", raw)}, {}, world_size=4, rects=columns)
    checkpoint = Catalog(tier).load(commit)
    (spec,) = checkpoint.plan.leaves
    for rows in (5, 24):
        for start in range(0, 24, rows):
            rect = Rect((start, 0), (min(rows, 24 - start), 36))
            view = np.zeros(rect.sizes)
            reading(tier, checkpoint, [destination("w", spec, [(rect, view)])]).run()
            assert view.tobytes() == raw[start : start + rect.sizes[0]].tobytes()


@pytest.mark.parametrize("make_view", ["numpy", "torch", "torch strided"])
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("float64", "float32"),
        ("float32", "float64"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("int8", "int64"),
    ],
)
def test_casts(saved: str, wanted: str, make_view: str) -> None:
    if make_view == "numpy" and wanted == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    values = torch.arange(-40, 40).reshape(8, 10).to(getattr(torch, saved))
    items = torch.empty(values.shape, dtype=values.dtype).copy_(values).view(torch.uint8).numpy().reshape(8, 10, -1)
    made = make({"w": (saved, items)}, 2, 1 << 30, np.random.default_rng(5))
    spec = made.spec("w")
    if make_view == "numpy":
        view: Any = np.zeros((8, 10), dtypes.numpy_dtype(wanted))
    else:
        view = (
            torch.zeros((10, 8), dtype=getattr(torch, wanted)).T
            if "strided" in make_view
            else torch.zeros((8, 10), dtype=getattr(torch, wanted))
        )
    reading(made.tier, made.checkpoint, [destination("w", spec, [(Rect.whole((8, 10)), view)], dtype=wanted)]).run()
    expected = values.to(getattr(torch, wanted))
    found = torch.from_numpy(view) if make_view == "numpy" else view
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def every_dtype() -> list[str]:
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(name for name in names if dtypes.is_known(name) and not name.startswith(("qint", "quint")))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", every_dtype())
def test_every_dtype_into_contiguous_and_strided_memory(dtype: str) -> None:
    rng = np.random.default_rng(3)
    raw = random_items(dtype, (6, 5), rng)
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    run = RunDir(Path(disk.root), tier)
    bits = np.ascontiguousarray(raw).view(f"V{raw.shape[-1]}")[..., 0]
    checkpoint = Catalog(tier).load(run.save(10, {"w": Typed(dtype, bits)}, {}, world_size=2))
    (spec,) = checkpoint.plan.leaves
    kind = getattr(torch, dtype)
    views = [
        torch.empty((6, 5), dtype=kind),
        torch.empty((6, 10), dtype=kind)[:, ::2],
        torch.empty((5, 6), dtype=kind).T,
    ]
    reading(
        tier, checkpoint, [destination(f"w{i}", spec, [(Rect.whole((6, 5)), view)]) for i, view in enumerate(views)]
    ).run()
    for view in views:
        size = view.element_size()
        memory = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
        items = torch.as_strided(memory, (6, 5, size), (view.stride(0) * size, view.stride(1) * size, 1))
        assert items.numpy().tobytes() == raw.tobytes()


def test_nothing_to_read() -> None:
    made = make({"e": ("float64", np.zeros((0, 3, 8), np.uint8))}, 2, 1 << 30, None)
    figures = reading(made.tier, made.checkpoint, []).run()
    assert figures.bytes == 0
    view = np.zeros((0, 3))
    assert reading(made.tier, made.checkpoint, [destination("e", made.spec("e"), [(Rect.whole((0, 3)), view)])]).run()


def test_a_rank_reads_no_more_than_it_needs() -> None:
    made = one_leaf(4000)
    view = np.zeros(10)
    figures = reading(
        made.tier, made.checkpoint, [destination("w", made.spec("w"), [(Rect((2000,), (10,)), view)])]
    ).run()
    assert view.tobytes() == made.part("w", Rect((2000,), (10,))).tobytes()
    assert figures.bytes <= 4 * 64


def test_progress_and_figures() -> None:
    made = one_leaf(4000)
    seen: list[tuple[int, int]] = []
    view = np.zeros(4000)
    task = reading(
        made.tier,
        made.checkpoint,
        [destination("w", made.spec("w"), [(Rect.whole((4000,)), view)])],
        progress=lambda done, total: seen.append((done, total)),
    )
    figures = task.run()
    assert seen[-1] == (task.total_bytes, task.total_bytes) and figures.bytes == task.total_bytes
    assert figures.bytes_by_source == {"flash": figures.bytes} and figures.seconds > 0
