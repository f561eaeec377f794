"""The documents of a checkpoint in one piece: manifest, plan, records and objects of all nodes, as they lie on storage.

A restore needs all of them on every rank. One flusher reads them, and all ranks take them out of memory instead of storage. The bytes are
the same whoever makes them: an index (path and size of each, msgpack, behind its length in 8 bytes, little-endian), then the files in
the index's order.

Invariants: nothing here is believed. A piece is compared with the digest that the lead has named, and every document in it with what names
it, by whoever reads it, as if it came from storage. Where it is not what it must be, storage itself is read.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from safehold.errors import TornFileError
from safehold.format import document, paths, records
from safehold.pipeline.several import read_of_all
from safehold.tiers.base import Tier
from safehold.types import CommitId

_LENGTH_BYTES = 8
_DOCUMENTS = re.compile(r"manifest\.json|node-\d+\.json")


class Remembering:
    """A tier that keeps the documents that are read through it; everything else is the tier's own.

    Attributes:
        found: Path -> what was read there last.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.found: dict[str, bytes] = {}

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        data = self._tier.get(path, limit_bytes=limit_bytes, retry_s=retry_s)
        if path.startswith(f"{paths.PLANS}/") or _DOCUMENTS.fullmatch(posixpath.basename(path)):
            self.found[path] = data
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    @property
    def tier(self) -> Tier:
        """The same, as what reads takes it."""
        return cast(Tier, self)


class Bundled:
    """A tier whose documents are taken out of a bundle, where it has them.

    Args:
        tier: Has the rest.
        bundle: As `unpack` gives it; empty once nothing is to be taken any more.
    """

    def __init__(self, tier: Tier, bundle: dict[str, memoryview]) -> None:
        self._tier, self._bundle = tier, bundle

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        found = self._bundle.get(path)
        if found is None or len(found) > limit_bytes:
            return self._tier.get(path, limit_bytes=limit_bytes, retry_s=retry_s)
        return bytes(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    @property
    def tier(self) -> Tier:
        """The same, as what reads takes it."""
        return cast(Tier, self)


def collect(
    tier: Tier, commit: CommitId, found: Mapping[str, bytes], limit_bytes: int, least_bytes: int = 0
) -> bytes | None:
    """Return the bundle of a checkpoint; None where it would be larger than `limit_bytes` even without the objects.

    Args:
        tier: Where the checkpoint is.
        commit: Which one.
        found: What has been read already; it is not read again.
        limit_bytes: Objects, of which users may have any amount, are left out where they do not fit, all of them.
        least_bytes: Where there are fewer bytes it is None, too.

    Raises:
        IntegrityError: A document is damaged, as far as that is seen here.
        StorageError: One cannot be read.
        TornFileError: One is missing.
    """
    directory = paths.checkpoint_dir(commit)

    def get(path: str, size: int) -> bytes:
        known = found.get(path)
        if known is not None:
            return known
        try:
            return tier.get(path, limit_bytes=size)
        except FileNotFoundError as exc:
            raise TornFileError("the file is missing", path=path, step=commit.step, tier=tier.name) from exc

    path = f"{directory}/{paths.MANIFEST}"
    files = {path: get(path, document.max_file_bytes("manifest"))}
    manifest = records.decode_manifest(files[path], path=path)
    total = len(files[path]) + manifest.plan_size_bytes + sum(ref.size_bytes for ref in manifest.nodes)
    if total > limit_bytes:
        return None
    path = paths.plan(manifest.plan_digest)
    files[path] = get(path, manifest.plan_size_bytes)
    sizes = {f"{directory}/{paths.node_record(ref.node)}": ref.size_bytes for ref in manifest.nodes}
    files.update(_get_all(get, sizes))
    objects: dict[str, int] = {}
    for ref in manifest.nodes:
        path = f"{directory}/{paths.node_record(ref.node)}"
        size = records.decode_node_record(files[path], path=path).objects_size_bytes
        if size:
            objects[f"{directory}/{paths.node_objects(ref.node)}"] = size
    if total + sum(objects.values()) < least_bytes:
        return None
    if total + sum(objects.values()) <= limit_bytes:
        files.update(_get_all(get, objects))
    made = pack(files)
    return made if len(made) <= limit_bytes else None


def _get_all(get: Callable[[str, int], bytes], sizes: dict[str, int]) -> dict[str, bytes]:
    return dict(zip(sizes, read_of_all(lambda path: get(path, sizes[path]), list(sizes)), strict=True))


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return files in one piece."""
    index = msgspec.msgpack.encode([(path, len(data)) for path, data in files.items()])
    return b"".join([len(index).to_bytes(_LENGTH_BYTES, "little"), index, *files.values()])


def unpack(data: memoryview) -> dict[str, memoryview]:
    """Return the files of a bundle by path, without copying them.

    Raises:
        TornFileError: It is none.
    """
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        index = msgspec.msgpack.decode(data[_LENGTH_BYTES:begin], type=list[tuple[str, int]])
    except msgspec.DecodeError as exc:
        raise TornFileError(f"the documents that were handed out have no index: {exc}") from exc
    files: dict[str, memoryview] = {}
    for path, size in index:
        if not 0 <= size <= len(data) - begin:
            raise TornFileError("the documents that were handed out are cut short", path=path)
        files[path] = data[begin : begin + size]
        begin += size
    return files
