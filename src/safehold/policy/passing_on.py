"""Who reads what from storage for others in a restore, where nodes want the same bytes: decisions only.

Packs are counted in chunks: `CHUNK_BYTES` at borders of that size, numbered over all packs in order. Nodes are dealt into neighbourhoods
of at most `MAX_NODES`, of nodes that want alike where that is possible. In a neighbourhood each chunk that several nodes want is read from
storage by one of them, its reader, which passes it on to the others; so N nodes that want the same read it N / `MAX_NODES` times, and not N
times.

Invariants: a chunk's reader wants it; a node has one neighbourhood, so fewer than `MAX_NODES` peers; the nodes that want a set of chunks
share its reading evenly, one chunk more or less, the larger shares going to who has the least so far.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CHUNK_BYTES: Final = 4 << 20
"""What is read, kept and passed on at a time."""

MAX_NODES: Final = 32
"""Nodes of a neighbourhood: each reads 1/32 of what all want, and has 31 peers."""

MAX_GROUPS: Final = 256
"""Sets of nodes with chunks in common, per neighbourhood; chunks of further ones, the smallest, are read by everybody who wants them."""

MIN_SAVED_BYTES: Final = 8 << 20
"""What a neighbourhood must save its storage per node; less (the borders of shards, say) is not worth the messages."""

MAX_CHUNKS: Final = 1 << 24

Bits = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Chunks that the same nodes of a neighbourhood want.

    Attributes:
        members: The nodes, in the order in which they are dealt the chunks.
        chunks: Numbers of the chunks, ascending.
    """

    members: tuple[int, ...]
    chunks: Numbers

    def readers(self) -> npt.NDArray[np.int64]:
        """Return the reader of each chunk."""
        turns = np.arange(len(self.chunks)) % len(self.members)
        return np.asarray(self.members, np.int64)[turns]


def group_of(members: Sequence[int], chunks: bytes, num_chunks: int) -> Group:
    """Return a group as it travels.

    Raises:
        ValueError: It is none.
    """
    if len(set(members)) != len(members) or len(members) < 2:
        raise ValueError(f"nodes {list(members)[:8]} are no group")
    return Group(tuple(members), np.flatnonzero(decode(chunks, num_chunks)))


def deal(wants: Mapping[int, bytes], num_chunks: int) -> list[Group]:
    """Deal out the chunks that several nodes want.

    Args:
        wants: Node -> the chunks that it wants, as `encode` gives them.
        num_chunks: Of all packs.

    Returns:
        The groups, but for neighbourhoods that would save too little. Chunks in none of them are read by whoever wants them.

    Raises:
        ValueError: What a node wants is malformed.
    """
    classes: dict[bytes, list[int]] = {}
    for node in sorted(wants):
        classes.setdefault(wants[node], []).append(node)
    bits = {key: decode(key, num_chunks) for key in classes}
    wanting = [key for key in classes if bits[key].any()]
    wanting.sort(key=lambda key: (int(np.argmax(bits[key])), classes[key]))
    groups: list[Group] = []
    load: dict[int, int] = dict.fromkeys(wants, 0)
    for hood in _neighbourhoods([(key, classes[key]) for key in wanting]):
        dealt = _deal_within(hood, bits, load)
        saved = sum((len(group.members) - 1) * len(group.chunks) for group in dealt)
        if saved * CHUNK_BYTES >= MIN_SAVED_BYTES * sum(map(len, hood.values())):
            groups.extend(dealt)
    return groups


def _neighbourhoods(classes: Sequence[tuple[bytes, list[int]]]) -> list[dict[bytes, list[int]]]:
    """Gather nodes that want alike; the others join the neighbourhood before, as long as all of them fit."""
    hoods: list[dict[bytes, list[int]]] = []
    room = 0
    for key, nodes in classes:
        if len(nodes) <= room:
            hoods[-1][key] = nodes
            room -= len(nodes)
            continue
        parts = math.ceil(len(nodes) / MAX_NODES)
        borders = [len(nodes) * part // parts for part in range(parts + 1)]
        hoods.extend({key: nodes[start:stop]} for start, stop in pairwise(borders))
        room = MAX_NODES - (borders[-1] - borders[-2])
    return hoods


def _deal_within(hood: Mapping[bytes, list[int]], bits: Mapping[bytes, Bits], load: dict[int, int]) -> list[Group]:
    """Sort chunks by who wants them, and deal each set of chunks to its nodes; `load` counts the chunks of each."""
    keys = list(hood)
    count: Any = np.zeros(len(bits[keys[0]]), np.uint8)
    sign: Any = np.zeros(len(count), np.uint64)
    for index, key in enumerate(keys):
        count += bits[key].astype(np.uint8) * np.uint8(len(hood[key]))
        sign ^= np.where(bits[key], np.uint64(1) << np.uint64(index), np.uint64(0))  # at most MAX_NODES classes
    common = np.flatnonzero(count >= 2)
    if not len(common):
        return []
    signs, inverse, sizes = np.unique(sign[common], return_inverse=True, return_counts=True)
    kept = sorted(np.argsort(-sizes, kind="stable")[:MAX_GROUPS], key=lambda at: int(np.argmax(inverse == at)))
    groups: list[Group] = []
    for at in kept:
        chunks = common[inverse == at]
        nodes = [node for index, key in enumerate(keys) if int(signs[at]) >> index & 1 for node in hood[key]]
        members = tuple(sorted(nodes, key=lambda node: (load[node], node)))
        for place, node in enumerate(members):
            load[node] += len(range(place, len(chunks), len(members)))
        groups.append(Group(members, chunks))
    return groups


def encode(chunks: Iterable[int] | Numbers, num_chunks: int) -> bytes:
    """Return a set of chunks in few bytes: a packed bitmap, compressed; empty for the empty set."""
    bits = np.zeros(num_chunks, np.bool_)
    bits[np.fromiter(chunks, np.int64)] = True
    return encode_bits(bits)


def encode_bits(bits: Bits) -> bytes:
    """Return the same for a bitmap."""
    return zlib.compress(np.packbits(bits).tobytes(), 1) if bits.any() else b""


def decode(data: bytes, num_chunks: int) -> Bits:
    """Return the bitmap of a set of chunks.

    Raises:
        ValueError: It is none.
    """
    if not 0 <= num_chunks <= MAX_CHUNKS:
        raise ValueError(f"{num_chunks} chunks are more than there can be")
    if not data:
        return np.zeros(num_chunks, np.bool_)
    size = -(-num_chunks // 8)
    try:
        raw = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as exc:
        raise ValueError(f"no set of chunks: {exc}") from exc
    if len(raw) != size:
        raise ValueError(f"a set of {num_chunks} chunks has {size} bytes, not {len(raw)} or more")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=num_chunks).astype(np.bool_)


class Numbering:
    """The numbers of all chunks of a checkpoint.

    Args:
        pack_sizes: Rank -> sizes of its packs, as in the plan.
    """

    def __init__(self, pack_sizes: Mapping[int, Sequence[int]]) -> None:
        self._keys = [(rank, part) for rank in sorted(pack_sizes) for part in range(len(pack_sizes[rank]))]
        self._sizes = [pack_sizes[rank][part] for rank, part in self._keys]
        self._starts = np.cumsum([0, *(-(-size // CHUNK_BYTES) for size in self._sizes)])
        self._start_of = dict(zip(self._keys, self._starts.tolist(), strict=False))

    @property
    def num_chunks(self) -> int:
        """How many there are."""
        return int(self._starts[-1])

    def of(self, rank: int, part: int, start: int, stop: int) -> int:
        """Return the number of the chunk that a range of a pack lies in; -1 if it crosses a border."""
        first = start // CHUNK_BYTES
        return self._start_of[rank, part] + first if (stop - 1) // CHUNK_BYTES == first else -1

    def locate(self, number: int) -> tuple[int, int, int, int]:
        """Return rank, part, offset and size of a chunk."""
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        offset = (number - int(self._starts[at])) * CHUNK_BYTES
        return (*self._keys[at], offset, min(CHUNK_BYTES, self._sizes[at] - offset))


def worth_passing(covered: Mapping[int, int], size_of: Numbering) -> list[int]:
    """Return the chunks of which a rank wants at least half: of others less is read than would have to be passed on.

    Args:
        covered: Number -> bytes of the chunk that are wanted.
        size_of: Tells the sizes.
    """
    return sorted(number for number, wanted in covered.items() if 2 * wanted >= size_of.locate(number)[3])
