"""Tables of integers and small texts in one compact file: a sealed JSON head, then compressed columns.

Each column is kept as values or as differences, whichever is narrower, less its smallest, in 0, 1, 2, 4 or 8 bytes a
row, in planes of bytes, under zstandard. Each blob is text or JSON under zstandard.

Invariants: `unpack` allocates nothing before the head verified and all sizes in it were found to fit each other, the
file, and `MAX_UNFOLDED_BYTES`. What a file unfolds to is at most `FLOOR_BYTES` and `RATIO` bytes for each byte
stored; a file that would be smaller than that is filled up with zeros, so that a small file can never ask for much
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from safehold.errors import ManifestError
from safehold.format import document

FLOOR_BYTES: Final = 8 << 20
RATIO: Final = 256
MAX_UNFOLDED_BYTES: Final = 8 << 30
MAX_VALUE: Final = 2**60
"""Every value is at least 0 and below this."""

_LEVEL: Final = 1
_WINDOW_BYTES: Final = 1 << 27
_SAMPLE: Final = 1 << 16
_WIDTHS: Final = (0, 1, 2, 4, 8)
_MAX_COLUMNS: Final = 1024
_MAX_BLOBS: Final = 1 << 16

Ints = npt.NDArray[Any]


class _Column(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    dtype: Literal["int32", "int64"]
    coding: Literal["values", "differences"]
    first: int
    base: int
    width: int
    bytes: int


class _Blob(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    raw_bytes: int
    bytes: int


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    rows: int
    columns: list[_Column]
    blobs: list[_Blob]
    fill_bytes: int
    payload_blake3: str
    facts: dict[str, Any]


class Packed(msgspec.Struct):
    """A file whose head verified and whose payload matches its checksum; nothing is unfolded yet.

    Attributes:
        facts: The small values of the head.
        rows: Length of every column.
        columns: Dtype and stored form of each column.
        blobs: Stored form of each blob; equal bytes mean equal content, so that many files' blobs can be unfolded once.
        path: The file, for errors.
    """

    facts: dict[str, Any]
    rows: int
    columns: dict[str, tuple[_Column, memoryview]]
    blobs: dict[str, tuple[int, bytes]]
    path: str

    def column(self, name: str) -> Ints:
        """Unfold a column; raises `ManifestError` if it is not there or does not unfold to what the head says."""
        if name not in self.columns:
            raise ManifestError(f"the column {name} is missing", path=self.path)
        column, stored = self.columns[name]
        return _unfold(column, stored, self.rows, self.path)

    def blob(self, name: str) -> bytes:
        """Unfold a blob; errors as `column`."""
        if name not in self.blobs:
            raise ManifestError(f"the table {name} is missing", path=self.path)
        raw_bytes, stored = self.blobs[name]
        return _decompress(stored, raw_bytes, self.path)

    def json(self, name: str, type: Any) -> Any:
        """Unfold a blob and read it as JSON of a msgspec type; errors as `column`."""
        try:
            return msgspec.json.decode(self.blob(name), type=type)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise ManifestError(f"the table {name} cannot be read", path=self.path) from None


def pack(kind: str, facts: dict[str, Any], columns: Mapping[str, Ints], blobs: Mapping[str, bytes]) -> bytes:
    """Write a table.

    Args:
        kind: Kind of the sealed head.
        facts: Small values, as JSON.
        columns: int32 or int64, all of one length, values in 0 to `MAX_VALUE`.
        blobs: Any bytes.

    Raises:
        ValueError: A value is out of bounds, or there is more of it than `unpack` takes.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    rows = len(next(iter(columns.values()))) if columns else 0
    payload: list[bytes] = []
    heads: list[_Column] = []
    unfolded = 0
    for name, values in columns.items():
        if len(values) != rows:
            raise ValueError(f"the column {name} has {len(values)} rows, not {rows}")
        head, stored = _fold(name, values, compressor)
        heads.append(head)
        payload.append(stored)
        unfolded += values.nbytes
    tables: list[_Blob] = []
    for name, raw in blobs.items():
        stored = compressor.compress(raw)
        tables.append(_Blob(name, len(raw), len(stored)))
        payload.append(stored)
        unfolded += len(raw)
    fill = max(0, -(-(unfolded - FLOOR_BYTES) // RATIO) - sum(map(len, payload)))
    payload.append(bytes(fill))
    body = b"".join(payload)
    top = _Head(rows, heads, tables, fill, document.digest(body), facts)
    if (reason := _check_sizes(top, len(body), document.MAX_PAYLOAD_BYTES.get(kind))) is not None:
        raise ValueError(reason)
    return document.seal(kind, top) + body


def unpack(kind: str, data: bytes | memoryview, *, path: str) -> Packed:
    """Check a table as a whole, without unfolding it.

    Raises:
        ManifestError: It is not exactly what was written, or unfolds to more than it may.
        FormatVersionError: A newer version of safehold wrote it.
    """
    head, start = document.unseal_head(kind, data, path=path, type=_Head)
    payload = memoryview(data)[start:]
    if (reason := _check_sizes(head, len(payload), document.MAX_PAYLOAD_BYTES.get(kind))) is not None:
        raise ManifestError(reason, path=path)
    if document.digest(payload) != head.payload_blake3:
        raise ManifestError("the columns do not match their checksum", path=path)
    at = 0
    columns: dict[str, tuple[_Column, memoryview]] = {}
    for column in head.columns:
        columns[column.name] = (column, payload[at : at + column.bytes])
        at += column.bytes
    blobs: dict[str, tuple[int, bytes]] = {}
    for blob in head.blobs:
        blobs[blob.name] = (blob.raw_bytes, bytes(payload[at : at + blob.bytes]))
        at += blob.bytes
    if len(columns) != len(head.columns) or len(blobs) != len(head.blobs):
        raise ManifestError("two columns have the same name", path=path)
    if any(payload[at:]):
        raise ManifestError("there are bytes that belong to no column", path=path)
    return Packed(head.facts, head.rows, columns, blobs, path)


def _check_sizes(head: _Head, payload_bytes: int, max_payload_bytes: int | None) -> str | None:
    """Return what is wrong with the sizes that a head gives, or None."""
    if not 0 <= head.rows < 2**31 or len(head.columns) > _MAX_COLUMNS or len(head.blobs) > _MAX_BLOBS:
        return "the table has more rows, columns or blobs than it may"
    unfolded, stored = 0, head.fill_bytes
    for column in head.columns:
        if column.width not in _WIDTHS or column.bytes < 0 or (column.width == 0) != (column.bytes == 0):
            return "a column has a width that it cannot have"
        if not 0 <= column.first < MAX_VALUE or not -MAX_VALUE < column.base < MAX_VALUE:
            return "a column has values out of bounds"
        unfolded += head.rows * (4 if column.dtype == "int32" else 8)
        stored += column.bytes
    for blob in head.blobs:
        if blob.raw_bytes < 0 or blob.bytes < 0:
            return "a table has a negative size"
        unfolded += blob.raw_bytes
        stored += blob.bytes
    if head.fill_bytes < 0 or stored != payload_bytes:
        return f"{stored} bytes of columns expected, {payload_bytes} there"
    if max_payload_bytes is not None and payload_bytes > max_payload_bytes:
        return f"the columns have {payload_bytes} bytes; at most {max_payload_bytes} are allowed"
    if unfolded > MAX_UNFOLDED_BYTES or unfolded > FLOOR_BYTES + RATIO * payload_bytes:
        return f"{payload_bytes} bytes of columns unfold to {unfolded}, more than they may"
    return None


def _fold(name: str, values: Ints, compressor: zstandard.ZstdCompressor) -> tuple[_Column, bytes]:
    dtype: Literal["int32", "int64"] = "int32" if values.dtype == np.int32 else "int64"
    if values.dtype not in (np.int32, np.int64):
        raise ValueError(f"the column {name} has the dtype {values.dtype}")
    if not len(values):
        return _Column(name, dtype, "values", 0, 0, 0, 0), b""
    first, low, high = int(values[0]), int(values.min()), int(values.max())
    if low < 0 or high >= MAX_VALUE:
        raise ValueError(f"the column {name} has values out of bounds")
    width = _width(high - low)
    if width == 0:
        return _Column(name, dtype, "values", first, low, 0, 0), b""
    steps = np.diff(values.astype(np.int64, copy=False), prepend=np.int64(first))
    step_low = int(steps[1:].min())
    steps[0] = step_low
    step_width = _width(int(steps.max()) - step_low)
    folded = _planes(values, low, width)
    if step_width < width or (step_width == width and _is_shorter(steps, step_low, values, low, width, compressor)):
        stored = compressor.compress(_planes(steps, step_low, step_width)) if step_width else b""
        return _Column(name, dtype, "differences", first, step_low, step_width, len(stored)), stored
    stored = compressor.compress(folded)
    return _Column(name, dtype, "values", first, low, width, len(stored)), stored


def _is_shorter(
    steps: Ints, step_low: int, values: Ints, low: int, width: int, compressor: zstandard.ZstdCompressor
) -> bool:
    """Whether differences compress better than values, judged by a sample from the middle."""
    start = max(0, (len(values) - _SAMPLE) // 2)
    window = slice(start, start + _SAMPLE)
    differences = compressor.compress(_planes(steps[window], step_low, width))
    return len(differences) < len(compressor.compress(_planes(values[window], low, width)))


def _width(span: int) -> int:
    if span == 0:
        return 0
    return 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8


def _planes(values: Ints, low: int, width: int) -> bytes:
    """Return the values less `low`, little-endian, all first bytes before all second ones."""
    narrow = (values - values.dtype.type(low)).astype(f"<u{width}" if width > 1 else "u1")
    if width == 1:
        return bytes(narrow.tobytes())
    return bytes(np.ascontiguousarray(narrow.view(np.uint8).reshape(-1, width).T).tobytes())


def _unfold(column: _Column, stored: memoryview, rows: int, path: str) -> Ints:
    dtype = np.dtype(column.dtype)
    if column.width == 0:
        wide = np.full(rows, column.base, dtype=np.int64)
    else:
        planes = np.frombuffer(_decompress(stored, rows * column.width, path), dtype=np.uint8)
        narrow = np.ascontiguousarray(planes.reshape(column.width, rows).T).view(f"<u{column.width}").reshape(rows)
        wide = narrow.astype(np.int64)
        wide += column.base
    if column.coding == "differences" and rows:
        wide[0] = column.first
        np.cumsum(wide, out=wide)
    if rows and (int(wide.min()) < 0 or int(wide.max()) > min(np.iinfo(dtype).max, MAX_VALUE - 1)):
        raise ManifestError(f"the column {column.name} has values out of bounds", path=path)
    return wide if dtype == np.int64 else wide.astype(dtype)


def _decompress(stored: bytes | memoryview, raw_bytes: int, path: str) -> bytes:
    """Unfold a zstandard frame, after its own header was found to promise exactly `raw_bytes`."""
    try:
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise ManifestError("a column unfolds to another size than its head says", path=path)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        raw = decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError):
        raise ManifestError("a column is damaged", path=path) from None
    if len(raw) != raw_bytes:
        raise ManifestError("a column unfolds to another size than its head says", path=path)
    return bytes(raw)
