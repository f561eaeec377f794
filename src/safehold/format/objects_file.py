"""`node-<n>.objects`: the encoded objects of a node's ranks in one small file, equal bytes stored once.

A sealed head lists the objects (size, CRC32, blake3) and which name of which rank is which object; the objects
follow, end to end.

Invariants: a file is checked as a whole before anything of it is handed out: length, checksums, indices, names. It is
read whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from safehold.errors import ChecksumError, ManifestError, StateMismatchError, TornFileError
from safehold.format import crc, document, names

MAX_OBJECT_BYTES: Final = 1 << 30
"""Largest single object."""

_Rank = Annotated[int, Meta(ge=0, lt=2**31)]
_Index = Annotated[int, Meta(ge=0, lt=2**31)]


class _Object(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    nbytes: Annotated[int, Meta(ge=0, le=MAX_OBJECT_BYTES)]
    crc32: Annotated[int, Meta(ge=0, lt=2**32)]
    blake3: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class _OfRank(msgspec.Struct, forbid_unknown_fields=True):
    rank: _Rank
    names: _Index
    objects: list[_Index]


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    names: list[list[str]]
    objects: list[_Object]
    ranks: list[_OfRank]


class ObjectsFile:
    """The objects of a node's ranks, verified."""

    def __init__(
        self, path: str, ranks: dict[int, dict[str, int]], blobs: list[memoryview], digests: list[str]
    ) -> None:
        self._path = path
        self._ranks = ranks
        self._blobs = blobs
        self._digests = digests

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks, ascending."""
        return tuple(self._ranks)

    def names(self, rank: int) -> tuple[str, ...]:
        """Return the names of a rank's objects, in the order as given; empty for a rank that is not here."""
        return tuple(self._ranks.get(rank, {}))

    def get(self, rank: int, name: str) -> bytes:
        """Return the encoded object, as `safehold.format.objects.decode` reads it.

        Raises:
            StateMismatchError: There is none.
        """
        return bytes(self._blobs[self._index(rank, name)])

    def digest(self, rank: int, name: str) -> str:
        """Return the blake3 of the encoded object; raises as `get`."""
        return self._digests[self._index(rank, name)]

    def _index(self, rank: int, name: str) -> int:
        try:
            return self._ranks[rank][name]
        except KeyError:
            shown = names.display(name)
            raise StateMismatchError(f"there is no object {shown} of rank {rank}", rank=rank, path=self._path) from None


def encode_objects(ranks: Mapping[int, Mapping[str, bytes]]) -> bytes:
    """Write the objects of some ranks; the same objects give the same bytes.

    Args:
        ranks: By rank and name the encoded object.

    Raises:
        ValueError: A name is bad, or an object too large.
    """
    tables: dict[tuple[str, ...], int] = {}
    known: dict[bytes, int] = {}
    of_ranks = []
    for rank in sorted(ranks):
        table = tables.setdefault(tuple(ranks[rank]), len(tables))
        of_ranks.append(_OfRank(rank, table, [known.setdefault(blob, len(known)) for blob in ranks[rank].values()]))
    for table_names in tables:
        for name in table_names:
            names.check_name(name)
    if any(len(blob) > MAX_OBJECT_BYTES for blob in known):
        raise ValueError(f"an object has at most {MAX_OBJECT_BYTES} bytes")
    objects = [_Object(len(blob), crc.crc(blob), document.digest(blob)) for blob in known]
    head = _Head([list(table_names) for table_names in tables], objects, of_ranks)
    return b"".join([document.seal("objects", head), *known])


def parse(data: bytes, path: str) -> ObjectsFile:
    """Read and verify a whole file of objects.

    Raises:
        ManifestError: Its head is damaged or contradicts itself.
        TornFileError: It is shorter or longer than its head says.
        ChecksumError: An object does not match its checksum.
        FormatVersionError: A newer version of safehold wrote it.
    """
    head: _Head
    head, at = document.unseal_head("objects", data, path=path, type=_Head)
    view = memoryview(data)
    end = at + sum(entry.nbytes for entry in head.objects)
    if end != len(view):
        raise TornFileError(f"{end} bytes of objects expected, {len(view)} there", path=path)
    ranks = _check_head(head, path)
    blobs = []
    for index, entry in enumerate(head.objects):
        blob = view[at : at + entry.nbytes]
        at += entry.nbytes
        if crc.crc(blob) != entry.crc32 or document.digest(blob) != entry.blake3:
            raise ChecksumError(f"{_whose(ranks, index)} does not match its checksum", path=path)
        blobs.append(blob)
    return ObjectsFile(path, ranks, blobs, [entry.blake3 for entry in head.objects])


def _check_head(head: _Head, path: str) -> dict[int, dict[str, int]]:
    """Return by rank and name which object it is."""
    try:
        for table in head.names:
            if len(set(table)) != len(table):
                raise ValueError("a name occurs twice")
            for name in table:
                names.check_name(name)
        ranks: dict[int, dict[str, int]] = {}
        for entry in head.ranks:
            if entry.names >= len(head.names) or any(index >= len(head.objects) for index in entry.objects):
                raise ValueError("an index is out of bounds")
            if ranks and entry.rank <= next(reversed(ranks)):
                raise ValueError("ranks are not ascending")
            ranks[entry.rank] = dict(zip(head.names[entry.names], entry.objects, strict=True))
    except ValueError as exc:
        raise ManifestError(
            f"the head of the objects contradicts itself: {names.display(str(exc))}", path=path
        ) from None
    return ranks


def _whose(ranks: dict[int, dict[str, int]], index: int) -> str:
    for rank, objects in ranks.items():
        for name, at in objects.items():
            if at == index:
                return f"the object {names.display(name)} of rank {rank}"
    return f"object {index}"
