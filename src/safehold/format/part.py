"""Parts: which rectangles one rank writes, and where in its packs. Columns of NumPy integers, one row per stored piece.

Dims beyond a leaf's own have offset 0 and size 1.

Invariants: what is decoded lies inside its leaf and inside its pack, and no two pieces share a byte of a pack. Arrays
are never changed after they were handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from safehold.errors import ManifestError
from safehold.format import columns, dtypes, leaftable
from safehold.types import ObjectSpec, TensorSpec

MAX_RANKS: Final = 2**20
MAX_PACKS: Final = 2**16

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

PackSizes = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**60)], ...], Meta(max_length=MAX_PACKS)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One rank's share of a plan.

    Attributes:
        rank: The rank that writes it.
        world_size: Number of ranks of the run.
        leaves: All tensor leaves that the rank knows, sorted by name; also those of which it writes nothing.
        leaf: int32 [n]; index into `leaves`.
        offsets: int64 [n, dims]; first element of the piece in its leaf.
        sizes: int64 [n, dims].
        pack: int32 [n]; which of the rank's packs.
        offset: int64 [n]; first byte, counted from the start of the pack's file.
        pack_sizes: Bytes of each pack's file.
        objects: The rank's object leaves.
        aliases: Pairs (other name, leaf) of tied tensors.
    """

    rank: int
    world_size: int
    leaves: tuple[TensorSpec, ...]
    leaf: Int32s
    offsets: Int64s
    sizes: Int64s
    pack: Int32s
    offset: Int64s
    pack_sizes: tuple[int, ...]
    objects: tuple[ObjectSpec, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


class _PartFacts(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    num_dims: Annotated[int, Meta(ge=0, le=leaftable.MAX_DIMS)]
    pack_sizes: PackSizes


class Shapes:
    """What the checks need of a table of leaves, as arrays.

    Attributes:
        num_leaves: Number of leaves.
        num_dims: Most dims of a leaf.
        shape: int64 [leaves, dims]; 1 beyond a leaf's own dims.
        itemsize: int64 [leaves].
    """

    def __init__(self, leaves: Sequence[TensorSpec]) -> None:
        self.num_leaves = len(leaves)
        self.num_dims = max((len(leaf.shape) for leaf in leaves), default=0)
        filled = [leaf.shape + (1,) * (self.num_dims - len(leaf.shape)) for leaf in leaves]
        self.shape: Int64s = np.array(filled, dtype=np.int64).reshape(len(leaves), self.num_dims)
        self.itemsize: Int64s = np.array([dtypes.itemsize(leaf.dtype) for leaf in leaves], dtype=np.int64)


def encode_part(part: Part) -> bytes:
    """Write a part; the same part gives the same bytes.

    Raises:
        ValueError: The part contradicts itself.
    """
    shapes = Shapes(part.leaves)
    part_columns: dict[str, npt.NDArray[Any]] = {
        "leaf": part.leaf,
        "pack": part.pack,
        "offset": part.offset,
        **dim_columns(part.offsets, part.sizes),
    }
    if part.offsets.shape != (len(part.leaf), shapes.num_dims) or part.offsets.shape != part.sizes.shape:
        raise ValueError(f"offsets and sizes must have {shapes.num_dims} dims")
    if not part.rank < part.world_size:
        raise ValueError(f"rank {part.rank} is not one of {part.world_size}")
    refuse(check_rows(shapes, part.leaf, part.offsets, part.sizes))
    bases = pack_bases([part.pack_sizes], None)
    refuse(check_packs(shapes, part.leaf, part.sizes, None, part.pack, part.offset, bases))
    facts = _PartFacts(part.rank, part.world_size, shapes.num_dims, tuple(part.pack_sizes))
    blobs = {
        "leaves": leaftable.encode_leaves(part.leaves),
        "objects": leaftable.encode_objects(part.objects),
        "aliases": leaftable.encode_aliases(part.aliases),
    }
    return columns.pack("part", msgspec.to_builtins(facts), part_columns, blobs)


def decode_part(data: bytes, *, path: str = "part") -> Part:
    """Read a part.

    Raises:
        ManifestError: The bytes are not exactly those of a part, or contradict themselves.
        FormatVersionError: A newer version of safehold wrote it.
    """
    return PartReader().read(data, path=path)


class PartReader:
    """Reads many parts, unfolding equal tables once; the tables of equal parts are the same objects.

    Attributes:
        shapes: By identity of `Part.leaves`, see `Shapes`.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, Shapes] = {}
        self._leaves: dict[bytes, tuple[TensorSpec, ...]] = {}
        self._objects: dict[bytes, tuple[ObjectSpec, ...]] = {}
        self._aliases: dict[bytes, tuple[tuple[str, str], ...]] = {}

    def read(self, data: bytes, *, path: str) -> Part:
        """Read one part; errors as `decode_part`."""
        packed = columns.unpack("part", data, path=path)
        facts = convert_facts(packed, _PartFacts)
        leaves = _cached(self._leaves, packed, "leaves", leaftable.decode_leaves)
        shapes = self.shapes.get(id(leaves))
        if shapes is None:
            shapes = self.shapes[id(leaves)] = Shapes(leaves)
        if facts.num_dims != shapes.num_dims or facts.rank >= facts.world_size:
            raise ManifestError("the part contradicts its leaves", path=path)
        leaf, offsets, sizes = read_rows(packed, facts.num_dims, shapes)
        pack, offset = packed.column("pack"), packed.column("offset")
        bases = pack_bases([facts.pack_sizes], path)
        refuse(check_packs(shapes, leaf, sizes, None, pack, offset, bases), path)
        return Part(
            rank=facts.rank,
            world_size=facts.world_size,
            leaves=leaves,
            leaf=leaf,
            offsets=offsets,
            sizes=sizes,
            pack=pack,
            offset=offset,
            pack_sizes=facts.pack_sizes,
            objects=_cached(self._objects, packed, "objects", leaftable.decode_objects),
            aliases=_cached(self._aliases, packed, "aliases", leaftable.decode_aliases),
        )


def dim_columns(offsets: Int64s, sizes: Int64s) -> dict[str, Int64s]:
    """Return the columns of `offsets` and `sizes`, by the names that they have in a file."""
    dims = range(offsets.shape[1])
    return {f"offsets{dim}": offsets[:, dim] for dim in dims} | {f"sizes{dim}": sizes[:, dim] for dim in dims}


def read_rows(packed: columns.Packed, num_dims: int, shapes: Shapes) -> tuple[Int32s, Int64s, Int64s]:
    """Return (leaf, offsets, sizes) of all rows, checked; raises `ManifestError`."""
    for name in (f"{what}{dim}" for dim in range(num_dims) for what in ("offsets", "sizes")):
        if name not in packed.columns:  # before anything is allocated for it: only what is there was paid for
            raise ManifestError(f"the column {name} is missing", path=packed.path)
    leaf = packed.column("leaf")
    offsets = np.empty((packed.rows, num_dims), dtype=np.int64)
    sizes = np.empty((packed.rows, num_dims), dtype=np.int64)
    for dim in range(num_dims):
        offsets[:, dim] = packed.column(f"offsets{dim}")
        sizes[:, dim] = packed.column(f"sizes{dim}")
    refuse(check_rows(shapes, leaf, offsets, sizes), packed.path)
    return leaf, offsets, sizes


def check_rows(shapes: Shapes, leaf: Int32s, offsets: Int64s, sizes: Int64s) -> str | None:
    """Return what is wrong with rows that do not lie inside their leaves, or None."""
    if not len(leaf):
        return None
    if int(leaf.min()) < 0 or int(leaf.max()) >= shapes.num_leaves:
        return "a piece has a leaf that is not there"
    for dim in range(shapes.num_dims):
        start, size = offsets[:, dim], sizes[:, dim]
        if int(start.min()) < 0 or int(size.min()) < 0 or np.any(start + size > shapes.shape[leaf, dim]):
            return "a piece lies outside its leaf"
    return None


def pack_bases(pack_sizes: Sequence[Sequence[int]], path: str | None) -> tuple[Int64s, Int64s]:
    """Return the first pack of each rank [ranks + 1] and the start of each pack, laid end to end [packs + 1]; raises as `refuse`."""
    first = np.zeros(len(pack_sizes) + 1, dtype=np.int64)
    np.cumsum([len(packs) for packs in pack_sizes], out=first[1:])
    starts = [0]
    for packs in pack_sizes:
        for size in packs:
            starts.append(starts[-1] + size)
    if starts[-1] >= 2**62:
        refuse("the packs are larger than any storage", path)
    return first, np.array(starts, dtype=np.int64)


def check_packs(
    shapes: Shapes,
    leaf: Int32s,
    sizes: Int64s,
    rank: Int32s | None,
    pack: Int32s,
    offset: Int64s,
    bases: tuple[Int64s, Int64s],
) -> str | None:
    """Return what is wrong with rows that do not lie inside their packs or share bytes, or None."""
    if not len(leaf):
        return None
    first, starts = bases
    if int(pack.min()) < 0 or int(offset.min()) < 0:
        return "a piece has a pack that is not there"
    which = pack.astype(np.int64)
    if rank is not None:
        which += first[rank]
        beyond = np.any(which >= first[1:][rank])
    else:
        beyond = int(pack.max()) >= first[1]
    if beyond:
        return "a piece has a pack that is not there"
    begin = starts[which] + offset
    end = begin + np.prod(sizes, axis=1) * shapes.itemsize[leaf]
    if np.any(end > starts[which + 1]):
        return "a piece lies outside its pack"
    # Disjoint if and only if, both sorted, no piece begins before the one before it ends; sorting them apart is far
    # cheaper than sorting rows.
    filled = end > begin
    begin, end = np.sort(begin[filled]), np.sort(end[filled])
    if np.any(end[:-1] > begin[1:]):
        return "two pieces overlap in a pack"
    return None


F = TypeVar("F")
V = TypeVar("V")


def convert_facts(packed: columns.Packed, type: type[F]) -> F:
    """Read the small values of a head as a Struct; raises `ManifestError`."""
    try:
        return msgspec.convert(packed.facts, type, strict=True)
    except (msgspec.MsgspecError, RecursionError):
        raise ManifestError("the head contradicts itself", path=packed.path) from None


def _cached(cache: dict[bytes, V], packed: columns.Packed, name: str, decode: Callable[..., V]) -> V:
    stored: Any = packed.blobs.get(name)
    if stored is None or stored[1] not in cache:
        value = decode(packed.blob(name), path=packed.path)
        cache[packed.blobs[name][1]] = value
        return value
    return cache[stored[1]]


def refuse(reason: str | None, path: str | None = None) -> None:
    """Raise `reason`, if there is one: of a file as `ManifestError`, else as `ValueError`."""
    if reason is not None:
        raise ManifestError(reason, path=path) if path is not None else ValueError(reason)
