"""Checkpoints of any leaves cut in any way, and destinations of any strides: for tests of reading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_dirs import RunDir, Typed

from safehold.format import dtypes
from safehold.pipeline.catalog import Catalog, Checkpoint
from safehold.pipeline.restore import Reading
from safehold.state.leaves import Destination, TensorLeaf
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.flash import FlashTier
from safehold.types import UNDECLARED, Rect, TensorSpec


def split_randomly(rect: Rect, rng: np.random.Generator, depth: int = 4) -> list[Rect]:
    """Cut a rectangle by random planes: rows, columns, or both."""
    dims = [d for d, size in enumerate(rect.sizes) if size > 1]
    if not dims or depth == 0 or rng.random() < 0.25:
        return [rect]
    dim = int(rng.choice(dims))
    at = int(rng.integers(1, rect.sizes[dim]))
    low, high = list(rect.sizes), list(rect.sizes)
    low[dim], high[dim] = at, rect.sizes[dim] - at
    start = list(rect.offsets)
    start[dim] += at
    return [
        *split_randomly(Rect(rect.offsets, tuple(low)), rng, depth - 1),
        *split_randomly(Rect(tuple(start), tuple(high)), rng, depth - 1),
    ]


DTYPES = ["float32", "float64", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "numpy:<M8[ns]"]


def random_items(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random items as unsigned bytes with one more dim; of bools 0 and 1."""
    raw = rng.integers(0, 2 if dtype == "bool" else 256, size=(*shape, dtypes.itemsize(dtype)), dtype=np.uint8)
    if dtype == "float32":  # no signalling NaNs where values are converted
        raw = rng.integers(-1000, 1000, size=shape).astype(np.float32)[..., None].view(np.uint8)
    return raw


def as_array(dtype: str, raw: np.ndarray) -> Any:
    if dtype == "bfloat16":
        return Typed(dtype, np.ascontiguousarray(raw).view(np.uint16)[..., 0])
    if dtype == "float8_e4m3fn":
        return Typed(dtype, raw[..., 0])
    found = dtypes.numpy_dtype(dtype)
    assert found is not None
    return Typed(
        dtype, np.ascontiguousarray(raw).view(found)[..., 0], kind="numpy" if dtype[:5] == "numpy" else "torch"
    )


def make_numpy(dtype: str, sizes: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """An array of any strides: contiguous, transposed, every other element, part of a larger one, reversed."""
    found = np.dtype(dtypes.numpy_dtype(dtype))
    how = rng.integers(0, 5)
    if how == 0 or not sizes:
        return np.zeros(sizes, found)
    if how == 1:
        return np.zeros(sizes[::-1], found).T
    if how == 2:
        return np.zeros((*sizes[:-1], sizes[-1] * 2), found)[..., ::2]
    if how == 3:
        return np.zeros(tuple(size + 2 for size in sizes), found)[tuple(slice(1, size + 1) for size in sizes)]
    return np.zeros(sizes, found)[::-1]


def make_torch(dtype: str, sizes: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    kind = getattr(torch, dtype)
    how = rng.integers(0, 4)
    if how == 0 or not sizes:
        made = torch.zeros(sizes, dtype=kind)
    elif how == 1:
        made = torch.zeros(sizes[::-1], dtype=kind).permute(*range(len(sizes) - 1, -1, -1))
    elif how == 2:
        made = torch.zeros((*sizes[:-1], sizes[-1] * 2), dtype=kind)[..., ::2]
    else:
        made = torch.zeros([size + 2 for size in sizes], dtype=kind)[tuple(slice(1, size + 1) for size in sizes)]
    if made.is_leaf and made.dtype.is_floating_point and made.dtype != torch.float8_e4m3fn and rng.random() < 0.3:
        made.requires_grad_(True)
    return made


def bytes_of(view: Any) -> bytes:
    if isinstance(view, np.ndarray):
        return view.tobytes()
    plain = torch.empty(view.shape, dtype=view.dtype).copy_(view.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def destination(name: str, saved: TensorSpec, pieces: list[tuple[Rect, Any]], dtype: str | None = None) -> Destination:
    spec = TensorSpec(name=name, dtype=dtype or saved.dtype, shape=saved.shape, kind=saved.kind)
    return Destination(saved=saved, leaf=TensorLeaf(spec=spec, pieces=tuple(pieces), holders=UNDECLARED))


def reading(tier: Any, checkpoint: Checkpoint, destinations: list[Destination], **options: Any) -> Reading:
    defaults: dict[str, Any] = {"rank": 0, "memory": lambda _: None, "num_threads": 2, "stall_s": 30.0}
    return Reading(tier, checkpoint, destinations, **(defaults | options))


@dataclass
class Made:
    tier: FlashTier
    disk: FakeDisk
    checkpoint: Checkpoint
    raw: dict[str, np.ndarray]

    def spec(self, name: str) -> TensorSpec:
        return next(spec for spec in self.checkpoint.plan.leaves if spec.name == name)

    def part(self, name: str, rect: Rect) -> np.ndarray:
        return self.raw[name][tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))]


def make(
    raw: dict[str, tuple[str, np.ndarray]], world_size: int, pack_size_bytes: int, rng: np.random.Generator | None
) -> Made:
    """Write a checkpoint of these leaves, cut at random and dealt to ranks, some pieces to two (None: by rows)."""
    disk = FakeDisk()
    tier = FlashTier(disk.root, disk)
    run = RunDir(Path(disk.root), tier)
    dealt: dict[tuple[str, int], list[Rect]] = {}
    if rng is not None:
        for name, (dtype, items) in raw.items():
            for rect in split_randomly(Rect.whole(items.shape[:-1]), rng):
                for rank in set(rng.integers(0, world_size, size=1 + (rng.random() < 0.2)).tolist()):
                    dealt.setdefault((name, rank), []).append(rect)
    commit = run.save(
        10,
        {name: as_array(dtype, items) for name, (dtype, items) in raw.items()},
        {},
        world_size=world_size,
        pack_size_bytes=pack_size_bytes,
        rects=None if rng is None else lambda spec, rank, _: [r for r in dealt.get((spec.name, rank), []) if r.numel],
    )
    return Made(tier, disk, Catalog(tier).load(commit), {name: items for name, (_, items) in raw.items()})


def one_leaf(num: int = 400, *, world_size: int = 1, dtype: str = "float64") -> Made:
    rng = np.random.default_rng(num)
    return make({"w": (dtype, random_items(dtype, (num,), rng))}, world_size, 1 << 30, None)
