"""A checkpoint in a dict: what the pipelines do with `Leaves` and `RestoreBinding`, without any storage.

Bytes of a tensor leaf are kept as one array of shape `(*global shape, itemsize)`, so pieces of any framework fit together bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from safehold.format import dtypes
from safehold.format.objects import decode, encode
from safehold.state.leaves import Leaves, RestoreBinding, RestoreOptions, SavedIndex
from safehold.state.rank_values import value_for_rank
from safehold.state.restore_binding import bind_for_restore, mismatch_error
from safehold.state.torch_tensors import dtype_from_name
from safehold.types import ObjectSpec, Rect, TensorSpec


class MemoryCheckpoint:
    """Saved by all ranks at once; restored by any number of ranks."""

    def __init__(self, leaves: Sequence[Leaves]) -> None:
        self.world_size = len(leaves)
        self.specs: dict[str, TensorSpec] = {}
        self.data: dict[str, np.ndarray] = {}
        self.covered: dict[str, np.ndarray] = {}
        self.object_specs: dict[str, ObjectSpec] = {}
        self.objects: dict[str, dict[int, bytes]] = {}
        self.aliases: dict[str, str] = {}
        for rank, one in enumerate(leaves):
            self._add(rank, one)
        for name, covered in self.covered.items():
            assert covered.all(), f"{name} is not covered"

    def _add(self, rank: int, leaves: Leaves) -> None:
        self.aliases.update(leaves.aliases)
        for leaf in leaves.tensors:
            spec = leaf.spec
            assert self.specs.setdefault(spec.name, spec) == spec
            itemsize = dtypes.itemsize(spec.dtype)
            data = self.data.setdefault(spec.name, np.zeros((*spec.shape, itemsize), np.uint8))
            covered = self.covered.setdefault(spec.name, np.zeros(spec.shape, bool))
            for rect, view in leaf.pieces:
                data[_slices(rect)] = to_bytes(view, itemsize)
                covered[_slices(rect)] = True
        for entry in leaves.objects:
            assert self.object_specs.setdefault(entry.spec.name, entry.spec) == entry.spec
            data = encode(entry.value, name=entry.spec.name)
            self.objects.setdefault(entry.spec.name, {})[rank] = data

    @property
    def index(self) -> SavedIndex:
        tensors = dict(self.specs)
        for name, target in self.aliases.items():
            spec = self.specs[target]
            tensors[name] = TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape, kind=spec.kind)
        return SavedIndex(tensors=tensors, objects=dict(self.object_specs), aliases=dict(self.aliases))

    def restore(
        self,
        state: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        random_states: bool = True,
        options: RestoreOptions | None = None,
        ignore_unexpected: bool = False,
    ) -> RestoreBinding:
        binding = bind_for_restore(
            state, self.index, rank=rank, world_size=world_size, options=options, random_states=random_states
        )
        unexpected = [] if ignore_unexpected else binding.unexpected
        values = {name: self._value(name, rank, world_size) for name in binding.object_names}
        mismatched = [*binding.mismatched, *binding.check(values), *self._apart(binding)]
        error = mismatch_error(binding.missing, unexpected, mismatched, binding.unused)
        if error is not None:
            raise error
        for destination in binding.destinations:
            name = destination.saved.name
            data = self.data[self.aliases.get(name, name)]
            for rect, view in destination.leaf.pieces:
                fill(view, data[_slices(rect)], destination.saved.dtype)
        binding.apply(values)
        binding.apply_random(values)
        return binding

    def _apart(self, binding: RestoreBinding) -> list[str]:
        """Say which leaves that one memory is to take differ."""
        said = []
        for entry in binding.apart:
            first, second = (self.data[self.aliases.get(spec.name, spec.name)] for spec in entry.saved)
            places = [_slices(rect) for rect, _ in entry.leaf.pieces]
            said += [entry.misfit] if any((first[at] != second[at]).any() for at in places) else []
        return said

    def _value(self, name: str, rank: int, world_size: int) -> Any:
        blobs = self.objects[name]
        return value_for_rank(
            self.object_specs[name],
            {holder: hashlib.sha256(data).hexdigest() for holder, data in blobs.items()},
            lambda holder: decode(blobs[holder]),
            rank=rank,
            world_size=world_size,
            saved_world_size=self.world_size,
        )


def to_bytes(view: Any, itemsize: int) -> np.ndarray:
    """Return the bytes of a view as an array of shape (*sizes, itemsize)."""
    shape = (*view.shape, itemsize)
    if isinstance(view, np.ndarray):
        return np.frombuffer(np.ascontiguousarray(view).tobytes(), np.uint8).reshape(shape)
    flat = view.clone(memory_format=torch.contiguous_format).reshape(-1)
    if not flat.numel():
        return np.empty(shape, np.uint8)
    return flat.view(torch.uint8).numpy().reshape(shape).copy()


def fill(view: Any, data: np.ndarray, dtype: str) -> None:
    """Write bytes of the saved dtype into a view, converted if its dtype is another."""
    if not data.size:
        return
    if isinstance(view, np.ndarray):
        known = dtypes.numpy_dtype(dtype)
        view[...] = np.frombuffer(data.tobytes(), view.dtype if known is None else known).reshape(view.shape)
        return
    raw = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8)
    view.copy_(raw.view(dtype_from_name(dtype)).reshape(view.shape))


def _slices(rect: Rect) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(rect.offsets, rect.sizes, strict=True))
