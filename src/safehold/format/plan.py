"""Plans: the parts of all ranks together, rows sorted by leaf, offsets and rank.

Invariants: what is decoded lies inside its leaf and inside its pack, and no two pieces share a byte of a pack. Arrays
are never changed after they were handed out. Merging is vectorised, so that a thousand ranks with thousands of leaves
each take seconds; tables that are equal between ranks are decoded, compared and mapped once. Whether the pieces cover
every leaf, and which of several copies counts, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from safehold.errors import ChecksumError, ManifestError, StateMismatchError
from safehold.format import columns, leaftable, names
from safehold.format.document import digest
from safehold.format.part import (
    MAX_RANKS,
    Int32s,
    Int64s,
    PackSizes,
    Part,
    PartReader,
    Shapes,
    check_packs,
    convert_facts,
    decode_part,
    dim_columns,
    encode_part,
    pack_bases,
    read_rows,
    refuse,
)
from safehold.types import ObjectSpec, TensorSpec

__all__ = ["Part", "Plan", "decode_part", "decode_plan", "digest", "encode_part", "encode_plan", "merge_parts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What all ranks write together.

    Attributes:
        world_size: Number of ranks.
        nodes: The node of each rank.
        leaves: All tensor leaves, sorted by name.
        rank: int32 [n]; who writes the piece. Rows are sorted by leaf, offsets, rank.
        leaf: int32 [n]; index into `leaves`.
        offsets: int64 [n, dims].
        sizes: int64 [n, dims].
        pack: int32 [n]; which of the packs of `rank`.
        offset: int64 [n]; first byte, counted from the start of the pack's file.
        pack_sizes: For every rank the bytes of each of its packs.
        objects: For every rank its object leaves; equal ones are one object.
        aliases: Pairs (other name, leaf) of tied tensors, sorted.
    """

    world_size: int
    nodes: tuple[int, ...]
    leaves: tuple[TensorSpec, ...]
    rank: Int32s
    leaf: Int32s
    offsets: Int64s
    sizes: Int64s
    pack: Int32s
    offset: Int64s
    pack_sizes: dict[int, tuple[int, ...]]
    objects: tuple[tuple[ObjectSpec, ...], ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of stored pieces."""
        return len(self.leaf)

    @property
    def num_dims(self) -> int:
        """Number of columns of `offsets` and `sizes`."""
        return int(self.offsets.shape[1])


class _PlanFacts(msgspec.Struct, forbid_unknown_fields=True):
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    num_dims: Annotated[int, Meta(ge=0, le=leaftable.MAX_DIMS)]
    num_objects: Annotated[int, Meta(ge=0, le=MAX_RANKS)]


class _Ranks(msgspec.Struct, forbid_unknown_fields=True):
    """By rank: its node, its packs, and which of the tables of objects is its own."""

    nodes: list[Annotated[int, Meta(ge=0, lt=MAX_RANKS)]]
    pack_sizes: list[PackSizes]
    objects: list[Annotated[int, Meta(ge=0, lt=MAX_RANKS)]]


def encode_plan(plan: Plan) -> bytes:
    """Write a plan; the same plan gives the same bytes.

    Raises:
        ValueError: A value is out of bounds.
    """
    tables: dict[tuple[ObjectSpec, ...], int] = {}
    known: dict[int, int] = {}
    for specs in plan.objects:
        if id(specs) not in known:
            known[id(specs)] = tables.setdefault(specs, len(tables))
    ranks = _Ranks(
        list(plan.nodes),
        [plan.pack_sizes.get(rank, ()) for rank in range(plan.world_size)],
        [known[id(specs)] for specs in plan.objects],
    )
    facts = _PlanFacts(plan.world_size, plan.num_dims, len(tables))
    plan_columns: dict[str, npt.NDArray[Any]] = {
        "leaf": plan.leaf,
        "rank": plan.rank,
        "pack": plan.pack,
        "offset": plan.offset,
        **dim_columns(plan.offsets, plan.sizes),
    }
    blobs = {
        "leaves": leaftable.encode_leaves(plan.leaves),
        "ranks": msgspec.json.encode(ranks),
        "aliases": leaftable.encode_aliases(plan.aliases),
        **{f"objects{index}": leaftable.encode_objects(specs) for specs, index in tables.items()},
    }
    return columns.pack("plan", msgspec.to_builtins(facts), plan_columns, blobs)


def decode_plan(data: bytes, path: str = "plan", *, expected_digest: str | None = None) -> Plan:
    """Read a plan.

    Args:
        data: The whole file.
        path: The file, for errors.
        expected_digest: If given, the digest that `data` must have.

    Raises:
        ChecksumError: The digest is another one.
        ManifestError: The bytes are not exactly those of a plan, or contradict themselves.
        FormatVersionError: A newer version of safehold wrote it.
    """
    if expected_digest is not None and digest(data) != expected_digest:
        raise ChecksumError("the plan does not match the digest that the manifest gives", path=path)
    packed = columns.unpack("plan", data, path=path)
    facts = convert_facts(packed, _PlanFacts)
    leaves = leaftable.decode_leaves(packed.blob("leaves"), path=path)
    _check_sorted(leaves, path)
    shapes = Shapes(leaves)
    ranks: _Ranks = packed.json("ranks", _Ranks)
    _check_ranks(facts, shapes, ranks, path)
    leaf, offsets, sizes = read_rows(packed, facts.num_dims, shapes)
    rank, pack, offset = packed.column("rank"), packed.column("pack"), packed.column("offset")
    if len(rank) and int(rank.max()) >= facts.world_size:
        raise ManifestError("a piece has a rank that is not there", path=path)
    if not _is_ordered(shapes, leaf, offsets, rank):
        raise ManifestError("the rows of the plan are not sorted", path=path)
    refuse(check_packs(shapes, leaf, sizes, rank, pack, offset, pack_bases(ranks.pack_sizes, path)), path)
    tables = [leaftable.decode_objects(packed.blob(f"objects{index}"), path=path) for index in range(facts.num_objects)]
    return Plan(
        world_size=facts.world_size,
        nodes=tuple(ranks.nodes),
        leaves=leaves,
        rank=rank,
        leaf=leaf,
        offsets=offsets,
        sizes=sizes,
        pack=pack,
        offset=offset,
        pack_sizes=dict(enumerate(ranks.pack_sizes)),
        objects=tuple(tables[index] for index in ranks.objects),
        aliases=leaftable.decode_aliases(packed.blob("aliases"), path=path),
    )


def _check_ranks(facts: _PlanFacts, shapes: Shapes, ranks: _Ranks, path: str) -> None:
    if not facts.world_size == len(ranks.nodes) == len(ranks.pack_sizes) == len(ranks.objects):
        raise ManifestError("the tables of the plan have not one row for each rank", path=path)
    if facts.num_dims != shapes.num_dims or any(index >= facts.num_objects for index in ranks.objects):
        raise ManifestError("the plan contradicts its tables", path=path)


def _check_sorted(leaves: Sequence[TensorSpec], path: str) -> None:
    if any(one.name >= other.name for one, other in pairwise(leaves)):
        raise ManifestError("the leaves of the plan are not sorted", path=path)


def merge_parts(encoded: Sequence[bytes], nodes: Sequence[int]) -> Plan:
    """Merge the parts of all ranks, given in any order, into a plan.

    Args:
        encoded: One part for each rank, as `encode_part` wrote it.
        nodes: The node of each rank.

    Raises:
        ManifestError: A part does not verify, a rank is missing or there twice, or world sizes differ.
        StateMismatchError: Ranks disagree about a leaf or an alias; names it and both ranks.
    """
    reader = PartReader()
    parts = [reader.read(data, path=f"part {index}") for index, data in enumerate(encoded)]
    parts.sort(key=lambda part: part.rank)
    _check_all_there(parts, nodes)
    leaves, maps = _merge_leaves(parts)
    num_dims = max((len(leaf.shape) for leaf in leaves), default=0)
    counts = [len(part.leaf) for part in parts]
    total = sum(counts)
    rank = np.repeat(np.array([part.rank for part in parts], dtype=np.int32), counts)
    leaf = np.empty(total, dtype=np.int32)
    pack = np.empty(total, dtype=np.int32)
    offset = np.empty(total, dtype=np.int64)
    offsets = np.zeros((total, num_dims), dtype=np.int64)
    sizes = np.ones((total, num_dims), dtype=np.int64)
    at = 0
    for part, count in zip(parts, counts, strict=True):
        rows, dims = slice(at, at + count), part.offsets.shape[1]
        leaf[rows] = maps[id(part.leaves)][part.leaf]
        pack[rows] = part.pack
        offset[rows] = part.offset
        offsets[rows, :dims] = part.offsets
        sizes[rows, :dims] = part.sizes
        at += count
    order = _order(Shapes(leaves), leaf, offsets, rank)
    return Plan(
        world_size=len(parts),
        nodes=tuple(nodes),
        leaves=leaves,
        rank=rank[order],
        leaf=leaf[order],
        offsets=offsets[order],
        sizes=sizes[order],
        pack=pack[order],
        offset=offset[order],
        pack_sizes={part.rank: part.pack_sizes for part in parts},
        objects=_merge_objects(parts),
        aliases=_merge_aliases(parts, leaves),
    )


def _check_all_there(parts: Sequence[Part], nodes: Sequence[int]) -> None:
    if not parts:
        raise ManifestError("a plan needs the part of at least one rank")
    world_size = parts[0].world_size
    for part in parts:
        if part.world_size != world_size:
            raise ManifestError(
                f"ranks disagree about their number: {world_size} and {part.world_size}", rank=part.rank
            )
    for expected, part in enumerate(parts):
        if part.rank != expected:
            what = "there twice" if part.rank < expected else "missing"
            rank = min(part.rank, expected)
            raise ManifestError(f"the part of rank {rank} is {what}", rank=rank)
    if len(parts) != world_size:
        raise ManifestError(f"the part of rank {len(parts)} is missing", rank=len(parts))
    if len(nodes) != world_size:
        raise ManifestError(f"there are {world_size} ranks, but the nodes of {len(nodes)} are known")


def _merge_leaves(parts: Sequence[Part]) -> tuple[tuple[TensorSpec, ...], dict[int, Int32s]]:
    """Return all leaves sorted by name and, by identity of a part's leaves, the map from its indices to theirs."""
    tables: dict[int, tuple[tuple[TensorSpec, ...], int]] = {}
    for part in parts:
        tables.setdefault(id(part.leaves), (part.leaves, part.rank))
    found: dict[str, tuple[TensorSpec, int]] = {}
    for table, rank in tables.values():
        for spec in table:
            other, other_rank = found.setdefault(spec.name, (spec, rank))
            if other is not spec and other != spec:
                raise StateMismatchError(_disagreement(other, other_rank, spec, rank), rank=rank)
    ordered = sorted(found)
    index = {name: i for i, name in enumerate(ordered)}
    maps = {key: np.array([index[spec.name] for spec in table], dtype=np.int32) for key, (table, _) in tables.items()}
    return tuple(found[name][0] for name in ordered), maps


def _disagreement(a: TensorSpec, rank_a: int, b: TensorSpec, rank_b: int) -> str:
    def say(spec: TensorSpec) -> str:
        return f"{spec.kind} {spec.dtype} of shape {list(spec.shape)}"

    return f"{names.display(a.name)} is {say(a)} on rank {rank_a} and {say(b)} on rank {rank_b}"


def _merge_objects(parts: Sequence[Part]) -> tuple[tuple[ObjectSpec, ...], ...]:
    one: dict[tuple[ObjectSpec, ...], tuple[ObjectSpec, ...]] = {}
    by_identity: dict[int, tuple[ObjectSpec, ...]] = {}
    for part in parts:
        if id(part.objects) not in by_identity:
            by_identity[id(part.objects)] = one.setdefault(part.objects, part.objects)
    return tuple(by_identity[id(part.objects)] for part in parts)


def _merge_aliases(parts: Sequence[Part], leaves: Sequence[TensorSpec]) -> tuple[tuple[str, str], ...]:
    found: dict[str, tuple[str, int]] = {}
    seen: set[int] = set()
    for part in parts:
        if id(part.aliases) in seen:
            continue
        seen.add(id(part.aliases))
        for alias, target in part.aliases:
            other, rank = found.setdefault(alias, (target, part.rank))
            if other != target:
                raise StateMismatchError(
                    f"{names.display(alias)} is tied to {names.display(other)} on rank {rank} "
                    f"and to {names.display(target)} on rank {part.rank}",
                    rank=part.rank,
                )
    own = {leaf.name for leaf in leaves}
    for alias, (target, rank) in found.items():
        if alias in own or target not in own:
            reason = "and has bytes of its own on another" if alias in own else "which no rank has"
            raise StateMismatchError(
                f"{names.display(alias)} is tied to {names.display(target)} on rank {rank}, {reason}", rank=rank
            )
    return tuple(sorted((alias, target) for alias, (target, _) in found.items()))


def _order(shapes: Shapes, leaf: Int32s, offsets: Int64s, rank: Int32s) -> Int64s:
    """Return the order of rows by leaf, offsets and rank."""
    key = _key(shapes, leaf, offsets, rank)
    if key is not None:
        return np.argsort(key, kind="stable")
    keys: list[npt.NDArray[Any]] = [rank, *(offsets[:, dim] for dim in reversed(range(shapes.num_dims))), leaf]
    return np.lexsort(keys)


def _is_ordered(shapes: Shapes, leaf: Int32s, offsets: Int64s, rank: Int32s) -> bool:
    key = _key(shapes, leaf, offsets, rank)
    if key is None:
        order = _order(shapes, leaf, offsets, rank)
        return bool(np.array_equal(order, np.arange(len(order))))
    return bool(np.all(key[:-1] <= key[1:]))


def _key(shapes: Shapes, leaf: Int32s, offsets: Int64s, rank: Int32s) -> Int64s | None:
    """Return one number for each row that sorts as (leaf, offsets, rank) do, or None where 63 bits are too few.

    Offsets inside a shape sort as the index of the element in row-major order does.
    """
    num_ranks = int(rank.max()) + 1 if len(rank) else 1
    strides = np.empty_like(shapes.shape)
    widest = 1
    for row, shape in enumerate(shapes.shape.tolist()):
        stride = 1
        for dim in range(shapes.num_dims - 1, -1, -1):
            if stride >= 2**62:
                return None
            strides[row, dim] = stride
            stride *= shape[dim] + 1
        widest = max(widest, stride)
    if widest * num_ranks * max(1, shapes.num_leaves) >= 2**63:
        return None
    key = leaf.astype(np.int64) * widest
    for dim in range(shapes.num_dims):
        key += offsets[:, dim] * strides[leaf, dim]
    key *= num_ranks
    key += rank
    return key
