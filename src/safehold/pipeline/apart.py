"""Compares what was saved apart and is one tensor in the template, before a byte of it is overwritten.

Checksums cannot tell: they are of blocks, and two leaves lie differently in theirs. So both are read, verified, into
memory of their own, in parts.

Invariants: nothing of the template is written; the memory used is bounded by `COMPARE_BYTES` and one row of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from safehold.format import dtypes
from safehold.pipeline.leaf_reader import split_rect
from safehold.state.leaves import Destination, SavedApart
from safehold.state.tensor_likes import fresh_tensor, same_bytes

COMPARE_BYTES = 64 << 20

Read = Callable[[Sequence[Destination]], object]
"""Fills destinations from the checkpoint, verified."""

_Pair = tuple[SavedApart, Destination, Destination]


def differing(apart: Sequence[SavedApart], read: Read) -> list[str]:
    """Return what is wrong where two leaves for one memory of this rank have different values.

    Args:
        apart: From the binding.
        read: Raises `CheckpointError` if the checkpoint cannot be read.
    """
    said: dict[str, None] = {}
    pairs: list[_Pair] = []
    size_bytes = 0
    for entry in apart:
        for pair, nbytes in _parts(entry):
            pairs.append(pair)
            size_bytes += nbytes
            if size_bytes >= COMPARE_BYTES:
                said.update(_compare(pairs, read))
                pairs, size_bytes = [], 0
    said.update(_compare(pairs, read))
    return list(said)


def _parts(entry: SavedApart) -> Iterator[tuple[_Pair, int]]:
    """Give destinations in memory of their own for both leaves, part by part."""
    spec = entry.leaf.spec
    itemsize = dtypes.itemsize(spec.dtype)
    for whole, _ in entry.leaf.pieces:
        for rect in split_rect(whole, itemsize, COMPARE_BYTES // 2):
            one, other = (
                Destination(
                    saved=saved,
                    leaf=replace(entry.leaf, pieces=((rect, fresh_tensor(spec.dtype, rect.sizes, spec.kind)),)),
                )
                for saved in entry.saved
            )
            yield (entry, one, other), 2 * rect.numel * itemsize


def _compare(pairs: Sequence[_Pair], read: Read) -> dict[str, None]:
    if not pairs:
        return {}
    read([destination for _, one, other in pairs for destination in (one, other)])
    return {entry.misfit: None for entry, one, other in pairs if not same_bytes(one.leaf.pieces, other.leaf.pieces)}
