r"""The envelope of every JSON file: one header line that says what follows, how long it is, and its blake3.

    {"safehold":"manifest","format":1,"bytes":123,"blake3":"<64 hex digits>"}\n
    <123 bytes of JSON>\n

Invariants: a file of another kind, of another length, with a flipped bit or with anything behind its end is refused
as a whole; a newer format is refused as such, before anything else is judged. Sizes are bounded per kind, nesting by
`MAX_DEPTH`.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, overload

import msgspec
from blake3 import blake3

from safehold.errors import FormatVersionError, ManifestError
from safehold.format import FORMAT_VERSION
from safehold.format.names import display

MAX_BYTES: Final[dict[str, int]] = {
    "run": 64 << 10,
    "incarnation": 64 << 20,
    "tombstone": 64 << 10,
    "pin": 64 << 10,
    "quarantine": 64 << 10,
    "lease": 4 << 10,
    "node": 256 << 20,
    "manifest": 64 << 20,
    "part": 64 << 20,
    "plan": 64 << 20,
    "objects": 512 << 20,
    "redundancy": 256 << 20,
}
"""Largest body of each kind of document."""

MAX_PAYLOAD_BYTES: Final[dict[str, int]] = {"part": 1 << 30, "plan": 1 << 30, "objects": 8 << 30, "redundancy": 1 << 30}
"""Most bytes behind the document, for the kinds that have some."""

MAX_OTHER_BYTES: Final = 16 << 20
"""Largest body of a kind that is not in `MAX_BYTES`."""

MAX_DEPTH: Final = 32
"""Deepest nesting of a body."""

MAX_HEADER_BYTES: Final = 256
"""Longest header line, its newline included."""

SKIPPED_VERSIONS: Final = (3, 5, 9)
"""No format will have these numbers: one flipped bit makes them of a 1, and damage must not pass for a newer format."""

T = TypeVar("T")


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    safehold: str
    format: int
    bytes: int
    blake3: str


class _AnyHeader(msgspec.Struct):
    """What a header of every version has: enough to tell a newer format from damage."""

    safehold: str
    format: int


_HEADER = msgspec.json.Decoder(_Header)
_ANY_HEADER = msgspec.json.Decoder(_AnyHeader)
_ENCODER = msgspec.json.Encoder()


def digest(data: bytes | memoryview) -> str:
    """Return the blake3 of `data` in lower-case hex."""
    return blake3(data).hexdigest()


def max_file_bytes(kind: str) -> int:
    """Return the size beyond which a file of this kind is refused unread."""
    return MAX_HEADER_BYTES + MAX_BYTES.get(kind, MAX_OTHER_BYTES) + 1 + MAX_PAYLOAD_BYTES.get(kind, 0)


def seal(kind: str, body: dict[str, Any] | msgspec.Struct) -> bytes:
    """Return a body with its header, ready to be stored.

    Args:
        kind: What the document is; `unseal` wants the same.
        body: What msgspec can write as JSON; floats must be finite.

    Raises:
        ValueError: The body is larger than its kind may be.
    """
    data = _ENCODER.encode(body)
    limit = MAX_BYTES.get(kind, MAX_OTHER_BYTES)
    if len(data) > limit:
        raise ValueError(f"a document of kind {kind} has at most {limit} bytes, not {len(data)}")
    return _header(kind, data) + data + b"\n"


@overload
def unseal(kind: str, data: bytes | memoryview, *, path: str, type: None = None) -> dict[str, Any]: ...
@overload
def unseal(kind: str, data: bytes | memoryview, *, path: str, type: type[T]) -> T: ...
def unseal(kind: str, data: bytes | memoryview, *, path: str, type: type[Any] | None = None) -> Any:
    """Check a whole document and return its body.

    Args:
        kind: The kind that the document must have.
        data: The whole file.
        path: The file, for errors.
        type: A msgspec Struct to read the body into; without one the body is a dict.

    Raises:
        ManifestError: The document is not exactly what was sealed, is of another kind, too large or too deep.
        FormatVersionError: A newer version of safehold wrote it.
    """
    body, end = unseal_head(kind, data, path=path, type=type)
    if end != len(data):
        raise ManifestError(f"{len(data) - end} bytes too many behind the document", path=path)
    return body


def unseal_head(kind: str, data: bytes | memoryview, *, path: str, type: type[Any] | None = None) -> tuple[Any, int]:
    """Check the document at the start of `data` and return its body and its end; else as `unseal`."""
    view = memoryview(data)
    start, header = _read_header(kind, view, path)
    limit = MAX_BYTES.get(kind, MAX_OTHER_BYTES)
    if header.bytes > limit:
        raise ManifestError(f"a document of kind {kind} has at most {limit} bytes, not {header.bytes}", path=path)
    end = start + header.bytes
    if len(view) < end + 1:
        raise ManifestError(f"the document is cut off: {end + 1} bytes expected, {len(view)} there", path=path)
    body = view[start:end]
    if view[end] != 0x0A or bytes(view[:start]) != _header(kind, body):
        raise ManifestError("the document does not match its checksum", path=path)
    return _decode(body, type, path), end + 1


def head_bytes(kind: str, data: bytes | memoryview, *, path: str) -> int:
    """Return how long the document at the start of a file says it is, from the file's first `MAX_HEADER_BYTES`; else as `unseal`."""
    start, header = _read_header(kind, memoryview(data), path)
    limit = MAX_BYTES.get(kind, MAX_OTHER_BYTES)
    if header.bytes > limit:
        raise ManifestError(f"a document of kind {kind} has at most {limit} bytes, not {header.bytes}", path=path)
    return start + header.bytes + 1


def _header(kind: str, body: bytes | memoryview) -> bytes:
    header = _Header(safehold=kind, format=FORMAT_VERSION, bytes=len(body), blake3=digest(body))
    return bytes(_ENCODER.encode(header)) + b"\n"


def _read_header(kind: str, view: memoryview, path: str) -> tuple[int, _Header]:
    head = bytes(view[:MAX_HEADER_BYTES])
    start = head.find(b"\n") + 1
    if not head:
        raise ManifestError("the file is empty", path=path)
    if not start:
        raise ManifestError("not a document of safehold, or damaged: it has no header line", path=path)
    try:
        version = _ANY_HEADER.decode(head[:start]).format
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ManifestError("not a document of safehold, or damaged: its header cannot be read", path=path) from None
    if version in SKIPPED_VERSIONS:
        raise ManifestError(f"the header of the document is damaged: there is no format {version}", path=path)
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"written in format {version}; this version of safehold reads formats up to {FORMAT_VERSION}",
            path=path,
            hint="read it with the version of safehold that wrote it, or a newer one",
        )
    try:
        header = _HEADER.decode(head[:start])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ManifestError("the header of the document is damaged", path=path) from None
    if header.safehold != kind:
        found = display(header.safehold, 40)
        raise ManifestError(f"a document of kind {kind} was expected, this one is of kind {found}", path=path)
    if header.format != FORMAT_VERSION or header.bytes < 0:
        raise ManifestError("the header of the document is damaged", path=path)
    return start, header


def _decode(body: memoryview, type: type[Any] | None, path: str) -> Any:
    try:
        value = msgspec.json.decode(body, type=dict[str, Any] if type is None else type)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as exc:
        raise ManifestError(f"the body of the document cannot be read: {display(str(exc))}", path=path) from None
    if type is None and _deeper(value, MAX_DEPTH):
        raise ManifestError(f"the body of the document is nested deeper than {MAX_DEPTH}", path=path)
    return value


def _deeper(value: Any, limit: int) -> bool:
    if isinstance(value, dict):
        return limit == 0 or any(_deeper(item, limit - 1) for item in value.values())
    if isinstance(value, list):
        return limit == 0 or any(_deeper(item, limit - 1) for item in value)
    return False
