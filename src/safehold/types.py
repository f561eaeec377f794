"""The data that every floor speaks of: rectangles, tensor leaves, shards, inventories.

Invariants: everything here is immutable, plain, and free of frameworks and I/O. Offsets and sizes count elements, never bytes;
what counts bytes ends in `_bytes` or is called `nbytes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["torch", "numpy"]


@dataclass(frozen=True, slots=True)
class Rect:
    """An axis-aligned box of elements inside a tensor's global shape; 0-dim tensors have empty tuples.

    Attributes:
        offsets: First element along each dim.
        sizes: Number of elements along each dim; a zero makes the rectangle empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-dim rectangle)."""
        return math.prod(self.sizes)

    def intersect(self, other: Rect) -> Rect | None:
        """Return the common part, or None if there is none (an empty rectangle shares nothing)."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            lo, hi = max(a, b), min(a + n, b + m)
            if hi <= lo:
                return None
            offsets.append(lo)
            sizes.append(hi - lo)
        return Rect(tuple(offsets), tuple(sizes))

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Rect:
        """Return the rectangle that covers `shape`."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor leaf is, globally: the same on every rank that holds a shard of it.

    Attributes:
        name: The FQN, as `safehold.format.names` writes it.
        dtype: Canonical dtype name: torch's own without `torch.` (`float32`, `bfloat16`, `complex64`, `float8_e4m3fn`), also for
            NumPy arrays where torch has the dtype; else `numpy:` and NumPy's dtype string (`numpy:<M8[ns]`).
        shape: Global shape.
        kind: The framework that the leaf came from; decides what a load without a template gives.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Which ranks hold the very same bytes of a shard.

    Attributes:
        ranks: The ranks, sorted, own rank included; None where nobody declared them (a plain tensor): then they are settled by the
            agents and compared.
        owner: The rank whose value counts where the others' may differ (buffers that DDP broadcasts); never compared.
    """

    ranks: tuple[int, ...] | None = None
    owner: int | None = None


UNDECLARED = Holders()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a rank holds of one tensor leaf.

    Attributes:
        spec: The leaf.
        rects: Disjoint rectangles that this rank holds, in an order that the same state always gives; empty for a rank that knows
            the leaf and holds nothing of it. Flat ranges are decomposed into rectangles before they come here.
        holders: Who else holds the same.
    """

    spec: TensorSpec
    rects: tuple[Rect, ...]
    holders: Holders = UNDECLARED


RankPolicy = Literal["same", "refuse", "first", "derive", "merge", "groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSpec:
    """The name of a leaf that is no tensor, and what happens to it on another world size.

    Attributes:
        name: The FQN.
        policy: `same`: kept per rank; on another world size only if all ranks' bytes were equal. The others are those of
            `safehold.PerRank`; `groups`: optimizer parameter groups, merged by the FQN of the parameter.
    """

    name: str
    policy: RankPolicy = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one rank holds: its shards and the names of its objects, without the bytes.

    Attributes:
        rank: The global rank.
        world_size: Number of ranks of the run.
        shards: One per tensor leaf, sorted by name; names are unique.
        objects: One per object leaf, sorted by name.
        aliases: Pairs (other name, name of the leaf that has the bytes) of tied tensors, sorted.
    """

    rank: int
    world_size: int
    shards: tuple[Shard, ...]
    objects: tuple[ObjectSpec, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class CommitId:
    """Names one committed (or attempted) checkpoint: order is by step, then incarnation, then attempt."""

    step: int
    incarnation: int
    attempt: int


class Store(Protocol):
    """The launcher's key-value store, as torch's `Store` has it."""

    def set(self, key: str, value: bytes) -> Any:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read; waits for the key."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; does not wait."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a process knows of its job before any exchange; `store` is None in a world of one."""

    rank: int
    world_size: int
    store: Store | None
