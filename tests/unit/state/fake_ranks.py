"""Any rank of any world in this process: torch's fake process group, which never communicates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of `world_size`."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def values(binding: Any) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """Return what one rank holds as (index, copied values)."""
    found = []
    for rect, view in binding.pieces:
        assert tuple(view.shape) == rect.sizes
        index = tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))
        found.append((index, view.numpy().copy()))
    return found


def rebuilt(shape: tuple[int, ...], ranks: list[list[tuple[tuple[slice, ...], np.ndarray]]]) -> np.ndarray:
    """Put the pieces of all ranks together; a hole, or overlap within a rank, fails."""
    full = np.full(shape, np.nan)
    covered = np.zeros(shape, dtype=int)
    for pieces in ranks:
        mine = np.zeros(shape, dtype=int)
        for index, array in pieces:
            full[index] = array
            mine[index] += 1
        assert mine.max(initial=0) <= 1
        covered += mine
    assert covered.min(initial=1) >= 1
    return full


def counting(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a tensor whose every element is its own position."""
    numel = int(np.prod(shape)) if shape else 1
    return torch.arange(numel, dtype=dtype).reshape(shape)
