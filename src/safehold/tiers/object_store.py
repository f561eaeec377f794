"""The tier of an object store: checkpoints below a prefix of a bucket (S3 and what speaks like it, GCS, Azure).

Invariants: a put is one request and visible as a whole or not at all; an exclusive put carries a condition that the
store enforces, and is not repeated when it may have been done. What the store has acknowledged is durable, so that there
is nothing to sync. Directories are prefixes: they exist while something lies below them. What must not live here: which
checkpoint counts.

Some stores show a prefix for a while after the last object below it has gone: at most an attempt without a manifest.
Unfinished uploads of crashed writers cannot be listed through obstore: the bucket's own lifecycle rule has to take them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import CheckpointError, ConfigurationError, StorageError, TornFileError
from safehold.format.paths import MANIFEST
from safehold.host.disk import components, join
from safehold.tiers.base import TEMPORARY_PREFIX, Entry, ProbeReport
from safehold.tiers.object_errors import Failure, StoreFailure
from safehold.tiers.object_pack import ObjectPackReader, ObjectPackWriter, part_size
from safehold.tiers.object_requests import Patience, Requests, Store, Stores

DELETE_BATCH = 1000
DELETE_ROUNDS = 20
_LIST_CHUNK = 1000


class ObjectStoreTier:
    """See `tiers.base.Tier`.

    Args:
        stores: The bucket, as `open_stores` gives it; the prefix is theirs.
        url: Where the run directory is, as `open_tier` takes it.
        name: The word for messages.
        retry_s: How long reads look again for an object that is not there, for stores that are slow to show one.
        patience: How long requests may take.
        part_bytes: Size of the parts of packs; None: as their size asks for.
        clock: Time for retries and for the age of temporaries.
    """

    def __init__(
        self,
        stores: Stores,
        url: str,
        *,
        name: str = "remote",
        retry_s: float = 0.0,
        patience: Patience | None = None,
        part_bytes: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self.url = url
        self._store: Store = stores.steady
        self._once: Store = stores.once
        self._retry_s = retry_s
        self._part_bytes = part_bytes
        self._clock = clock
        self._requests = Requests(patience or Patience(), tier=name, clock=clock)

    def create_pack(self, path: str, size_bytes: int) -> ObjectPackWriter:
        """See `Tier`. Nothing is reserved: a quota is met in mid-write."""
        key = _key(path)
        if size_bytes < 0:
            raise ValueError(f"size {size_bytes} is negative")
        try:
            part_size(size_bytes)
        except ValueError as exc:
            raise ConfigurationError(str(exc), tier=self.name, path=self._full(path)) from exc
        try:
            self._requests.run("creating a pack", self._full(path), lambda: self._store.head(key))
        except FileNotFoundError:
            return ObjectPackWriter(
                self._store,
                self._requests,
                key,
                size_bytes,
                url=self._full(path),
                tier=self.name,
                clock=self._clock,
                part_bytes=self._part_bytes,
            )
        raise FileExistsError(17, os.strerror(17), self._full(path))

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> ObjectPackReader:
        """See `Tier`; `direct` means nothing here."""
        found = self._head(path, "opening a pack", retry_s)
        return ObjectPackReader(
            self._store,
            self._requests,
            path,
            size_bytes=int(found["size"]),
            e_tag=found["e_tag"],
            url=self._full(path),
            tier=self.name,
        )

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See `Tier`.

        An exclusive put whose answer is lost is an error that says so, at once. Only what surely had no effect is tried again.
        """
        key = _key(path)
        if exclusive:
            self._put_new(key, path, data)
            return

        def write() -> None:
            self._store.put(key, bytes(data), use_multipart=False)

        self._writing("writing a file", path, write)

    def _put_new(self, key: str, path: str, data: bytes) -> None:
        def write() -> None:
            self._once.put(key, bytes(data), mode="create", use_multipart=False)

        try:
            self._writing("writing a new file", path, write, once=True)
        except StorageError as exc:
            if isinstance(exc.__cause__, StoreFailure) and exc.retry:
                exc.hint = "it may have been written nevertheless; read it back to see whose it is, then try again"
            raise

    def _writing(self, doing: str, path: str, action: Any, *, once: bool = False) -> None:
        def again(failure: Failure) -> bool:
            return failure.done_is_ruled_out if once else failure.passes

        try:
            self._requests.run(doing, self._full(path), action, again=again)
        except FileNotFoundError as exc:
            text = f"{doing} failed: the store says that there is no such place"
            raise self._missing_place(text, path) from exc

    def _missing_place(self, text: str, path: str) -> ConfigurationError:
        hint = "does the bucket exist, and is the endpoint that of the store?"
        return ConfigurationError(text, tier=self.name, path=self._full(path), hint=hint)

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        key = _key(path)

        def read() -> bytes:
            found = self._store.get(key)
            size = int(found.meta["size"])
            if size > limit_bytes:
                raise self._torn(path, f"a file of {size} bytes is larger than the {limit_bytes} that it may have")
            data = bytes(found.bytes())
            if len(data) != size:
                raise self._torn(path, f"a file of {size} bytes gave {len(data)} when it was read")
            return data

        return bytes(self._read("reading a file", path, read, retry_s))

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """See `Tier`."""
        return int(self._head(path, "looking at a file", retry_s)["size"])

    def _head(self, path: str, doing: str, retry_s: float | None) -> Any:
        key = _key(path)
        return self._read(doing, path, lambda: self._store.head(key), retry_s)

    def _read(self, doing: str, path: str, action: Any, retry_s: float | None) -> Any:
        """Run `action`, again while the object is not seen and there is time for it."""
        begun = self._clock.monotonic()
        patience = self._retry_s if retry_s is None else retry_s
        for pause in self._requests.pauses():
            try:
                return self._requests.run(doing, self._full(path), action)
            except FileNotFoundError:
                if self._clock.monotonic() - begun + pause > patience:
                    raise
            self._clock.sleep(pause)
        raise AssertionError("pauses do not end")

    def list(self, directory: str) -> list[Entry]:
        """See `Tier`."""
        found = self._listed(directory)
        entries = {}
        for prefix in found["common_prefixes"]:
            name = _last(prefix)
            entries[name] = Entry(name=name, is_dir=True, size_bytes=0)
        for meta in _inside(found["objects"], directory):
            name = _last(meta["path"])
            entries[name] = Entry(name=name, is_dir=False, size_bytes=int(meta["size"]))
        return [entries[name] for name in sorted(entries) if name and not name.startswith(TEMPORARY_PREFIX)]

    def _listed(self, directory: str) -> Any:
        components(directory)
        try:
            return self._requests.run(
                "listing a directory",
                self._full(directory),
                lambda: self._store.list_with_delimiter(directory or None),
            )
        except FileNotFoundError:
            return {"common_prefixes": [], "objects": []}

    def delete(self, path: str) -> None:
        """See `Tier`."""
        self._delete([_key(path)], "removing a file", path)

    def _delete(self, keys: Sequence[str], doing: str, path: str) -> None:
        try:
            self._requests.run(doing, self._full(path), lambda: self._store.delete(list(keys)))
        except FileNotFoundError:
            if len(keys) > 1:  # one of them was gone, and it is not said what became of the others
                for key in keys:
                    self._delete([key], doing, path)

    def delete_tree(self, directory: str) -> None:
        """See `Tier`.

        Not as one: the manifests go first, in a request of their own, then the other small files, then the packs. So a
        checkpoint is none any more before any other byte of it goes, its tombstone included.
        """
        if not components(directory):
            raise ValueError("the run directory itself is not removed")
        for _ in range(DELETE_ROUNDS):
            found = [meta["path"] for meta in self._below(directory, "removing a directory")]
            if not found:
                return
            for keys in _in_turn(found):
                for at in range(0, len(keys), DELETE_BATCH):
                    self._delete(keys[at : at + DELETE_BATCH], "removing a directory", directory)
        text = "a directory is not empty after it was removed again and again"
        hint = "does another job write there?"
        raise StorageError(text, tier=self.name, path=self._full(directory), hint=hint)

    def _below(self, directory: str, doing: str) -> Sequence[Any]:
        """Return all objects below a prefix."""

        def collect() -> Sequence[Any]:
            chunks = self._store.list(directory, chunk_size=_LIST_CHUNK)
            return [meta for chunk in chunks for meta in _inside(chunk, directory)]

        try:
            return self._requests.run(doing, self._full(directory), collect)
        except FileNotFoundError:
            return ()

    def delete_if_empty(self, directory: str) -> None:
        """See `Tier`; a prefix with nothing below it is no more."""
        components(directory)

    def sync_tree(self, directory: str) -> None:
        """See `Tier`; what was acknowledged is durable."""
        components(directory)

    def make_directory(self, path: str) -> None:
        """See `Tier`; a prefix need not be made."""
        components(path)

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """See `Tier`; age is that of the newest object, by the store's clock."""
        found = self._listed(directory)
        now = self._clock.wall()
        removed = []
        for meta in _inside(found["objects"], directory):
            name = _last(meta["path"])
            if name.startswith(TEMPORARY_PREFIX) and now - meta["last_modified"].timestamp() >= older_than_s:
                self.delete(join(directory, name))
                removed.append(name)
        for prefix in found["common_prefixes"]:
            name = _last(prefix)
            if not name.startswith(TEMPORARY_PREFIX):
                continue
            inside = self._below(join(directory, name), "sweeping temporaries")
            if inside and now - max(meta["last_modified"].timestamp() for meta in inside) >= older_than_s:
                self.delete_tree(join(directory, name))
                removed.append(name)
        return tuple(sorted(removed))

    def free_bytes(self) -> int | None:
        """See `Tier`; a store does not tell."""
        return None

    def probe(self) -> ProbeReport:
        """See `Tier`: writes an object twice under a condition, and looks which of the two is there."""
        directory = f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            exclusive, notes = self._try_exclusive(f"{directory}/record")
        finally:
            try:
                self.delete_tree(directory)
            except (CheckpointError, OSError):  # beside a failure already, or debris that the sweep takes
                pass
        return ProbeReport(
            writable=True,
            exclusive_create=exclusive,
            exclusive_by="condition" if exclusive else "",
            fsync_works=True,
            shared=True,
            kind=self.url.partition("://")[0],
            notes=notes,
        )

    def _try_exclusive(self, path: str) -> tuple[bool, tuple[str, ...]]:
        unfit = "unfit as the place of a run"
        try:
            self.put(path, b"first", exclusive=True)
        except ConfigurationError:
            self.put(path, b"first")  # where this is refused as well, the reason is another
            self._expect(path, b"first")
            return False, (f"the store does not take conditions: {unfit}",)
        self._expect(path, b"first")
        try:
            self.put(path, b"second", exclusive=True)
        except FileExistsError:
            self._expect(path, b"first")
            return True, ()
        note = f"the store ignored a condition, and a file that must be created exclusively was overwritten: {unfit}"
        return False, (note,)

    def _expect(self, path: str, data: bytes) -> None:
        try:
            found = self.get(path, limit_bytes=100, retry_s=max(self._retry_s, 1.0))
        except FileNotFoundError:
            found = b""
        if found != data:
            text = "a trial file did not read back as it was written"
            raise StorageError(text, tier=self.name, path=self._full(path), hint="check the store, then try again")

    def _torn(self, path: str, message: str) -> TornFileError:
        return TornFileError(message, tier=self.name, path=self._full(path))

    def _full(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url


def _key(path: str) -> str:
    """Return the key of a file, below the stores' prefix."""
    if not components(path):
        raise ValueError("the run directory itself is no file")
    return path


def _last(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]


def _inside(objects: Iterable[Any], directory: str) -> Iterator[Any]:
    """Leave out the objects with which consoles mark a prefix as a folder: they look like the directory itself."""
    for meta in objects:
        if not directory or meta["path"].startswith(f"{directory}/"):
            yield meta


def _in_turn(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield keys in the order in which they must go: what makes checkpoints of them, small files, the rest."""
    manifests = [key for key in keys if _last(key) == MANIFEST]
    small = [key for key in keys if key.endswith(".json") and _last(key) != MANIFEST]
    rest = [key for key in keys if not key.endswith(".json")]
    for group in (manifests, small, rest):
        if group:
            yield group
