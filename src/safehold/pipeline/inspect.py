"""What is in a checkpoint, and how two of them differ.

Invariants: nothing here writes. Where two checkpoints store a leaf in the same places, their checksums are compared and
hardly anything is read; else values are, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from safehold.format import crc, dtypes
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.leaf_reader import LeafReader, split_rect
from safehold.policy import coverage
from safehold.policy.resharding import PlanIndex
from safehold.tiers.base import Tier
from safehold.types import Rect

COMPARE_BYTES = 64 << 20
"""Values are compared in parts of about this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """One name in a checkpoint.

    Attributes:
        name: The FQN.
        kind: `tensor`, `object`, or `alias` of a tensor.
        dtype: Of a tensor.
        shape: Of a tensor, global.
        nbytes: Of a tensor.
        framework: `torch` or `numpy`, of a tensor.
        num_ranks: How many ranks store pieces of the tensor, or have the object.
        policy: Of an object.
        target: Of an alias: the leaf that has its bytes.
    """

    name: str
    kind: Literal["tensor", "object", "alias"]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = None
    framework: str | None = None
    num_ranks: int | None = None
    policy: str | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A leaf that both checkpoints have and that differs.

    Attributes:
        name: The FQN.
        what: What differs: `kind`, `shape`, `dtype`, `target`, `policy`, `ranks` or `content`.
        before: As it was, where that can be said in a word.
        after: As it is.
    """

    name: str
    what: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a checkpoint differs from an earlier one.

    Attributes:
        added: Leaves that only the later has.
        removed: Leaves that only the earlier has.
        changed: Leaves that differ, by name.
        num_same: Leaves that are equal.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    num_same: int

    @property
    def is_empty(self) -> bool:
        """Whether the two are equal."""
        return not (self.added or self.removed or self.changed)


def leaves(checkpoint: Checkpoint) -> list[LeafInfo]:
    """Return all names in a checkpoint, sorted."""
    plan = checkpoint.plan
    index = PlanIndex(plan)
    found = []
    for number, spec in enumerate(plan.leaves):
        found.append(
            LeafInfo(
                name=spec.name,
                kind="tensor",
                dtype=spec.dtype,
                shape=spec.shape,
                nbytes=Rect.whole(spec.shape).numel * dtypes.itemsize(spec.dtype),
                framework=spec.kind,
                num_ranks=len(np.unique(plan.rank[index.rows(number)])),
            )
        )
    found += [LeafInfo(name=name, kind="alias", target=target) for name, target in plan.aliases]
    policies: dict[str, str] = {}
    counts: dict[str, int] = {}
    for specs in plan.objects:
        for entry in specs:
            policies[entry.name] = entry.policy
            counts[entry.name] = counts.get(entry.name, 0) + 1
    found += [
        LeafInfo(name=name, kind="object", policy=policy, num_ranks=counts[name]) for name, policy in policies.items()
    ]
    return sorted(found, key=lambda info: info.name)


def compare(
    tier: Tier, before: Checkpoint, after: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> Difference:
    """Compare two checkpoints of a run leaf by leaf, whatever their world sizes and layouts.

    Args:
        tier: Where the run directory is.
        before: The earlier one.
        after: The later one.
        progress: Told (leaves compared, leaves in all).

    Raises:
        IntegrityError: What has to be read does not verify.
    """
    old = {info.name: info for info in leaves(before)}
    new = {info.name: info for info in leaves(after)}
    common = sorted(old.keys() & new.keys())
    changed = []
    with LeafReader(tier, before) as left, LeafReader(tier, after) as right:
        comparer = _Comparer(left, right)
        for done, name in enumerate(common):
            change = comparer.change(old[name], new[name])
            if change is not None:
                changed.append(change)
            if progress is not None:
                progress(done + 1, len(common))
    return Difference(
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        changed=tuple(changed),
        num_same=len(common) - len(changed),
    )


class _Side:
    """One of the two checkpoints, made ready for look-ups."""

    def __init__(self, reader: LeafReader) -> None:
        self.reader = reader
        self.plan = reader.checkpoint.plan
        self.index = PlanIndex(self.plan)
        self.counts = coverage.check(self.plan)
        self.packs = reader.checkpoint.packs()
        self._checksums: dict[tuple[int, int], npt.NDArray[np.uint32]] = {}

    def rows(self, name: str) -> npt.NDArray[np.intp]:
        """Rows of a leaf that count."""
        span = self.index.rows(self.index.leaf_of[name])
        rows: npt.NDArray[np.intp] = span.start + np.flatnonzero(self.counts[span])
        return rows

    def layout(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """What must be equal for checksums to be comparable."""
        plan = self.plan
        columns = [plan.rank, plan.pack, plan.offset, *plan.offsets.T, *plan.sizes.T]
        return np.stack([column[rows].astype(np.int64) for column in columns])

    def checksums(self, rank: int, part: int) -> npt.NDArray[np.uint32]:
        key = (rank, part)
        if key not in self._checksums:
            self._checksums[key] = crc.decode_crcs(self.packs[key].block_crcs)
        return self._checksums[key]


class _Comparer:
    """Says of one leaf after the other whether it changed."""

    def __init__(self, left: LeafReader, right: LeafReader) -> None:
        self._left, self._right = _Side(left), _Side(right)

    def change(self, old: LeafInfo, new: LeafInfo) -> Change | None:
        facts = (
            ("kind", old.kind, new.kind),
            ("target", old.target, new.target),
            ("shape", old.shape, new.shape),
            ("dtype", old.dtype, new.dtype),
            ("framework", old.framework, new.framework),
            ("policy", old.policy, new.policy),
        )
        for what, before, after in facts:
            if before != after:
                return Change(name=old.name, what=what, before=_word(before), after=_word(after))
        if old.kind == "object":
            return self._object(old.name)
        if old.kind == "tensor" and not self._same(old):
            return Change(name=old.name, what="content")
        return None

    def _object(self, name: str) -> Change | None:
        before, after = self._left.reader.object_digests(name), self._right.reader.object_digests(name)
        if any(before[rank] != after[rank] for rank in before.keys() & after.keys()):
            return Change(name=name, what="content")
        if len(set(before.values()) | set(after.values())) == 1:
            return None
        if before.keys() != after.keys():
            return Change(name=name, what="ranks", before=str(len(before)), after=str(len(after)))
        return None

    def _same(self, info: LeafInfo) -> bool:
        left, right = self._left, self._right
        rows, others = left.rows(info.name), right.rows(info.name)
        whole = Rect.whole(info.shape or ())
        assert info.dtype is not None
        itemsize = dtypes.itemsize(info.dtype)
        if len(rows) != len(others) or not np.array_equal(left.layout(rows), right.layout(others)):
            return self._same_values(info.name, whole, itemsize)
        doubtful = []
        for row in rows.tolist():
            verdict = self._same_blocks(row, itemsize)
            if verdict is False:
                return False
            if verdict is None:
                doubtful.append(row)
        ndim = len(whole.sizes)
        for row in doubtful:
            rect = Rect(tuple(left.plan.offsets[row, :ndim].tolist()), tuple(left.plan.sizes[row, :ndim].tolist()))
            if not self._same_values(info.name, rect, itemsize):
                return False
        return True

    def _same_blocks(self, row: int, itemsize: int) -> bool | None:
        """Compare the checksums of the blocks that a piece touches; None where only shared blocks differ."""
        plan = self._left.plan
        rank, part, start = int(plan.rank[row]), int(plan.pack[row]), int(plan.offset[row])
        stop = start + int(np.prod(plan.sizes[row])) * itemsize
        if start == stop:
            return True
        if self._left.packs[rank, part].size_bytes != self._right.packs[rank, part].size_bytes:
            return None
        first, last = start // crc.BLOCK_BYTES, (stop - 1) // crc.BLOCK_BYTES
        same = self._left.checksums(rank, part)[first : last + 1] == self._right.checksums(rank, part)[first : last + 1]
        if same.all():
            return True
        inner = same[(1 if start % crc.BLOCK_BYTES else 0) : len(same) - (1 if stop % crc.BLOCK_BYTES else 0)]
        return None if inner.all() else False

    def _same_values(self, name: str, rect: Rect, itemsize: int) -> bool:
        for part in split_rect(rect, itemsize, COMPARE_BYTES):
            left = self._left.reader.read_bytes(name, part)
            if not np.array_equal(left, self._right.reader.read_bytes(name, part)):
                return False
        return True


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return "" if value is None else str(value)
