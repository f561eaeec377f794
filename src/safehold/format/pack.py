"""Packs: where each piece lies in a safetensors file, and the header that says so.

Invariants: a pack's bytes before its data are a pure function of its pieces (no step, no time), so that an arena can
be laid out once and staged into again and again. Data starts at a multiple of 4096, the file's size is one, and every
piece is naturally aligned, without holes: pieces whose size is a multiple of 64 come first in the given order, then
the others by falling alignment. The tail is a padding tensor whose key no leaf can have. `parse_header` accepts no
duplicate, overlap, hole or uncovered byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from safehold.errors import TornFileError
from safehold.format import dtypes, names
from safehold.types import Rect

BLOCK: Final = 4096
"""Data starts at, and packs end at, a multiple of this many bytes."""

PACK_SIZE_BYTES: Final = 64 << 30
"""Default for the most bytes of data in one pack, except for a single piece that is larger."""

MAX_HEADER_BYTES: Final = 50_000_000
"""Default for the longest header that is written; safetensors reads at most `SAFETENSORS_HEADER_BYTES`."""

SAFETENSORS_HEADER_BYTES: Final = 100_000_000

_ALIGNED_SIZE: Final = 64
_MAX_BYTES: Final = 2**60
_MAX_DIMS: Final = 64
# "format" names a framework since some readers insist on one; the second entry is the version of safehold's format.
_METADATA: Final = {"format": "pt", "safehold": "1"}


@dataclass(frozen=True, slots=True)
class PieceIn:
    """A rectangle of a tensor leaf that is to be stored.

    Attributes:
        name: The leaf's FQN.
        dtype: The leaf's dtype.
        shape: The leaf's global shape.
        rect: The rectangle.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rect: Rect


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """Where a piece lies.

    Attributes:
        index: Which of the given pieces.
        pack: Which pack.
        offset: First byte, counted from the start of the pack's file.
        nbytes: Its size; 0 for a piece without elements.
        arena_offset: First byte, counted from the start of the first of all packs laid end to end.
    """

    index: int
    pack: int
    offset: int
    nbytes: int
    arena_offset: int


@dataclass(frozen=True, slots=True)
class PackLayout:
    """One pack.

    Attributes:
        header: The bytes before the data, the 8 bytes of length included; a multiple of 4096.
        size_bytes: Size of the file; a multiple of 4096. What no piece covers is zeros.
        arena_offset: Where the pack starts if all packs are laid end to end.
    """

    header: bytes
    size_bytes: int
    arena_offset: int


@dataclass(frozen=True, slots=True)
class PackLayouts:
    """All packs of a rank.

    Attributes:
        pieces: In the order of their bytes.
        packs: In order; none if there are no pieces.
    """

    pieces: tuple[PlacedPiece, ...]
    packs: tuple[PackLayout, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all packs laid end to end."""
        return sum(pack.size_bytes for pack in self.packs)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An entry of a pack's header.

    Attributes:
        dtype: As safetensors names it.
        shape: As the header has it: the last dim counts bytes where the true dtype is stored as U8.
        start: First byte, counted from the start of the file.
        end: First byte behind it.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What a pack's header says.

    Attributes:
        data_start: Where the data starts in the file.
        tensors: By key, padding included.
        metadata: What the writer said about itself.
    """

    data_start: int
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def layout(
    pieces: Sequence[PieceIn], *, pack_size_bytes: int = PACK_SIZE_BYTES, max_header_bytes: int = MAX_HEADER_BYTES
) -> PackLayouts:
    """Lay out the packs of a rank.

    Args:
        pieces: Pieces with distinct keys (name and offsets).
        pack_size_bytes: A new pack is begun rather than exceed this with more than one piece.
        max_header_bytes: Likewise for the header.

    Raises:
        ValueError: A piece lies outside its tensor, has an unknown dtype or a bad name, or two have the same key.
    """
    builder = _Builder(pack_size_bytes, max_header_bytes)
    for index, nbytes in _order(pieces):
        builder.add(index, pieces[index], nbytes)
    builder.close()
    return PackLayouts(tuple(builder.placed), tuple(builder.packs))


def _order(pieces: Sequence[PieceIn]) -> list[tuple[int, int]]:
    """Return (index, nbytes) in the order of storage."""
    first: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for index, piece in enumerate(pieces):
        _check_piece(piece)
        nbytes = piece.rect.numel * dtypes.itemsize(piece.dtype)
        if nbytes >= _MAX_BYTES:
            raise ValueError(f"{names.display(piece.name)} has {nbytes} bytes, too many to store")
        (rest if nbytes % _ALIGNED_SIZE else first).append((index, nbytes))
    rest.sort(key=lambda item: -dtypes.alignment(pieces[item[0]].dtype))
    return first + rest


def _check_piece(piece: PieceIn) -> None:
    names.check_name(piece.name)
    offsets, sizes, shape = piece.rect.offsets, piece.rect.sizes, piece.shape
    if len(shape) > _MAX_DIMS or not len(offsets) == len(sizes) == len(shape):
        raise ValueError(f"{names.display(piece.name)}: {piece.rect} does not fit the shape {shape}")
    for offset, size, extent in zip(offsets, sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > extent:
            raise ValueError(f"{names.display(piece.name)}: {piece.rect} does not fit the shape {shape}")


class _Builder:
    """Fills packs one after the other."""

    def __init__(self, pack_size_bytes: int, max_header_bytes: int) -> None:
        self.pack_size_bytes = pack_size_bytes
        self.max_header_bytes = max_header_bytes
        self.placed: list[PlacedPiece] = []
        self.packs: list[PackLayout] = []
        self._keys: set[str] = set()
        self._arena_offset = 0
        self._begin()

    def _begin(self) -> None:
        self._entries: dict[str, Any] = {"__metadata__": _METADATA}
        self._pending: list[tuple[int, int, int]] = []
        self._data_bytes = 0
        self._header_bytes = 2 * BLOCK

    def add(self, index: int, piece: PieceIn, nbytes: int) -> None:
        key = names.piece_key(piece.name, piece.rect, piece.shape)
        if key in self._keys:
            raise ValueError(f"{names.display(key)} is stored twice")
        self._keys.add(key)
        shape = dtypes.safetensors_shape(piece.dtype, piece.rect.sizes)
        # A bound from above: escaping at most doubles a key, numbers have at most 19 digits.
        entry_bytes = 2 * len(key.encode()) + 20 * len(shape) + 96
        full = self._data_bytes + nbytes > self.pack_size_bytes
        if self._pending and (full or self._header_bytes + entry_bytes > self.max_header_bytes):
            self.close()
        start = self._data_bytes
        self._entries[key] = _Entry(dtypes.safetensors_name(piece.dtype), shape, (start, start + nbytes))
        self._pending.append((index, start, nbytes))
        self._data_bytes += nbytes
        self._header_bytes += entry_bytes

    def close(self) -> None:
        if not self._pending:
            return
        padding = -self._data_bytes % BLOCK
        if padding:
            span = (self._data_bytes, self._data_bytes + padding)
            self._entries[f"{names.PAD_PREFIX}0"] = _Entry("U8", (padding,), span)
        text = msgspec.json.encode(self._entries)
        text += b" " * (-(8 + len(text)) % BLOCK)
        if len(text) > SAFETENSORS_HEADER_BYTES:
            raise ValueError("the header of a pack is too long")
        header = len(text).to_bytes(8, "little") + text
        size_bytes = len(header) + self._data_bytes + padding
        for index, start, nbytes in self._pending:
            offset = len(header) + start
            self.placed.append(PlacedPiece(index, len(self.packs), offset, nbytes, self._arena_offset + offset))
        self.packs.append(PackLayout(header, size_bytes, self._arena_offset))
        self._arena_offset += size_bytes
        self._begin()


def header_bytes(head: bytes | memoryview, file_size: int, *, path: str) -> int:
    """Return how many bytes `parse_header` needs, from the first 8 of a file.

    Raises:
        TornFileError: The file cannot be a pack.
    """
    if file_size < 10 or len(head) < 8:
        raise TornFileError(f"a pack has at least 10 bytes, not {file_size}", path=path)
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(SAFETENSORS_HEADER_BYTES, file_size - 8):
        raise TornFileError(f"the header of the pack says that it has {length} bytes", path=path)
    return 8 + length


def parse_header(head: bytes | memoryview, file_size: int, *, path: str) -> PackHeader:
    """Read and check the header of a safetensors file, whoever wrote it.

    Args:
        head: At least the first `header_bytes` bytes of the file.
        file_size: Size of the whole file.
        path: The file, for errors.

    Raises:
        TornFileError: The header is not exactly what safetensors allows, or does not fit the file's size.
    """
    end = header_bytes(head, file_size, path=path)
    if len(head) < end:
        raise TornFileError(f"the header of the pack is cut off: {end} bytes expected, {len(head)} there", path=path)
    try:
        text = bytes(head[8:end]).decode("utf-8")
        if not text.startswith("{"):
            raise ValueError("it does not start with a brace")
        top = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_bounded_int)
        metadata = _check_metadata(top.pop("__metadata__", {}))
        tensors = {key: _check_entry(key, entry, end) for key, entry in top.items()}
        _check_cover(tensors, end, file_size)
    except (ValueError, RecursionError) as exc:
        reason = names.display(str(exc))
        raise TornFileError(f"the header of the pack is damaged: {reason}", path=path) from None
    return PackHeader(end, tensors, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _bounded_int(text: str) -> int:
    if len(text) > 19:
        raise ValueError("a number is too large")
    return int(text)


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not strings")
    return metadata


def _check_entry(key: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {key[:200]} has other fields than dtype, shape and data_offsets")
    shape, span = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > _MAX_DIMS or not _are_counts(span) or len(span) != 2:
        raise ValueError(f"the entry of {key[:200]} has numbers out of bounds")
    size = math.prod(shape) * dtypes.safetensors_itemsize(entry["dtype"])
    if span[1] - span[0] != size:
        raise ValueError(f"{key[:200]} has {size} bytes by its shape and {span[1] - span[0]} by its offsets")
    return StoredTensor(entry["dtype"], tuple(shape), data_start + span[0], data_start + span[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MAX_BYTES for value in values)


def _check_cover(tensors: dict[str, StoredTensor], data_start: int, file_size: int) -> None:
    at = data_start
    for start, end, key in sorted((tensor.start, tensor.end, key) for key, tensor in tensors.items()):
        if start != at:
            raise ValueError(f"{key[:200]} {'overlaps what is' if start < at else 'leaves a hole'} before it")
        at = end
    if at != file_size:
        raise ValueError(f"its tensors end at byte {at}, the file at {file_size}")
