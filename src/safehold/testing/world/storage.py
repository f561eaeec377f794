"""Shared storage in memory: what is durable there, how it fails, and one machine's view of it.

Invariants: small files are atomic and durable at once, as `Tier.put` promises. A pack is one record (its size and what was in the arena)
and becomes durable by a step of its own; what a machine had not made durable when it died is gone. What is found wrong while it happens
(a manifest that is replaced by another) is a violation at once.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from safehold.errors import ConfigurationError, StorageError
from safehold.format import paths, records
from safehold.pipeline.several import RECORD_READERS
from safehold.testing.world import fibers
from safehold.testing.world.timeline import Timeline, Work
from safehold.tiers.base import TEMPORARY_PREFIX, Entry, PackReader, PackWriter, ProbeReport
from safehold.types import CommitId

T = TypeVar("T")
URL = "world:///run"


@dataclass(slots=True)
class Pack:
    """A pack: who wrote it, what was in the arena then (None: not whole), and whether it is durable."""

    machine: str
    size_bytes: int
    content: object = None
    durable: bool = False


class Storage:
    """The storage of all machines.

    Attributes:
        files: Path -> bytes, or a pack.
        version: Counts changes of what decides about belief.
        failing: Machines whose calls fail.
        hanging: Machines whose calls hang.
        slow: Machine -> how many times longer its calls take.
        num_calls: Calls so far.
        read_bytes: Bytes of small files that were read so far.
        thread: The one that the world runs in.
    """

    def __init__(self, timeline: Timeline, call_s: tuple[float, float]) -> None:
        self.timeline, self.call_s = timeline, call_s
        self.thread, self.lock = threading.current_thread(), threading.Lock()
        self.files: dict[str, bytes | Pack] = {}
        self._children: dict[str, dict[str, None]] = {"": {}}
        self._manifests: dict[str, bytes] = {}
        self.version = self.num_calls = self.read_bytes = 0
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.slow: dict[str, float] = {}
        self._waiting: list[tuple[str, Work]] = []

    # -- faults ----------------------------------------------------------------------------------------------------------

    def when_healed(self, machine: str, work: Work) -> None:
        """Call `work` once calls of a machine do not hang any more."""
        self._waiting.append((machine, work))

    def heal(self, machine: str | None = None) -> None:
        """Let calls of a machine (None: of all) succeed again."""
        machines = {machine} if machine is not None else self.failing | self.hanging | set(self.slow)
        self.failing -= machines
        self.hanging -= machines
        for name in machines:
            self.slow.pop(name, None)
        due = [work for name, work in self._waiting if name not in self.hanging]
        self._waiting = [entry for entry in self._waiting if entry[0] in self.hanging]
        for work in due:
            work()

    def machine_died(self, machine: str) -> None:
        """What it had not made durable is gone."""
        self._waiting = [entry for entry in self._waiting if entry[0] != machine]
        for found in self.files.values():
            if isinstance(found, Pack) and found.machine == machine and not found.durable:
                found.content = None

    # -- files -------------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes | Pack) -> None:
        """Store a file."""
        self._changed(path)
        if posixpath.basename(path) == paths.MANIFEST and isinstance(data, bytes):
            if self._manifests.setdefault(path, data) != data:
                raise self.timeline.violation(f"{path} was committed twice, and not alike")
            self.timeline.note("manifest", path)
        self.files[path] = data
        while True:
            parent, _, name = path.rpartition("/")
            children = self._children.setdefault(parent, {})
            if name in children:
                return
            children[name] = None
            if not parent:
                return
            path = parent

    def delete(self, path: str) -> None:
        """Remove a file or an empty directory."""
        self._changed(path)
        self.files.pop(path, None)
        self._children.pop(path, None)
        parent, _, name = path.rpartition("/")
        self._children.get(parent, {}).pop(name, None)

    def delete_tree(self, directory: str) -> None:
        """Remove it and all below."""
        for name in list(self._children.get(directory, ())):
            self.delete_tree(f"{directory}/{name}")
        if directory:
            self.delete(directory)

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it."""
        self._children.setdefault(path, {})
        while path:
            parent, _, name = path.rpartition("/")
            self._children.setdefault(parent, {})[name] = None
            path = parent

    def entries(self, directory: str) -> list[Entry]:
        """Return what is in it."""
        found = []
        for name in sorted(self._children.get(directory, ())):
            path = f"{directory}/{name}" if directory else name
            data = self.files.get(path)
            size = 0 if data is None else data.size_bytes if isinstance(data, Pack) else len(data)
            found.append(Entry(name=name, is_dir=data is None, size_bytes=size))
        return found

    def names(self, directory: str) -> list[str]:
        """Return the names in it."""
        return list(self._children.get(directory, ()))

    def get(self, path: str) -> bytes | Pack:
        """Return a file."""
        found = self.files.get(path)
        if found is None:
            raise FileNotFoundError(path)
        return found

    def documents_bytes(self, commit: CommitId) -> int:
        """Return what a rank reads that reads the documents of a checkpoint itself: manifest, plan, records and objects of all nodes."""
        directory = paths.checkpoint_dir(commit)
        found = [self.files.get(f"{directory}/{name}") for name in self.names(directory)]
        manifest = self._manifests.get(f"{directory}/{paths.MANIFEST}")
        plan = records.decode_manifest(manifest, path=directory).plan_size_bytes if manifest is not None else 0
        return plan + sum(len(data) for data in found if isinstance(data, bytes))

    def _changed(self, path: str) -> None:
        name = posixpath.basename(path)
        decides = name == paths.MANIFEST or paths.parse_tombstone(name) is not None
        if decides or path.startswith(paths.INCARNATIONS) or paths.parse_attempt_dir(name) is not None:
            self.version += 1


class Hangs(BaseException):
    """An operation that happens at once hangs; it is begun anew once storage answers."""


class View:
    """One flusher's tier: a `tiers.base.Tier` whose calls take time, fail and hang as storage does for this machine."""

    name = "flash"
    url = URL

    def __init__(
        self, storage: Storage, machine: str, *, stuck: Callable[[int], None], is_killed: Callable[[], bool]
    ) -> None:
        self._storage, self._machine, self._stuck, self._is_killed = storage, machine, stuck, is_killed

    def _call(self, path: str, action: Callable[[], T]) -> T:
        storage = self._storage
        timeline, fiber = storage.timeline, fibers.current()
        storage.num_calls += 1
        if self._is_killed():
            raise fibers.Killed
        if self._machine in storage.failing:
            raise StorageError("injected failure", tier=self.name, path=path)
        if fiber is None and threading.current_thread() is not storage.thread:
            return self._one_of_several(action)
        took_s = timeline.between(*storage.call_s) * storage.slow.get(self._machine, 1.0)
        if self._machine in storage.hanging:
            self._hang(fiber)
            if self._is_killed() and timeline.chance.random() < 0.5:
                raise fibers.Killed
            return action()
        if fiber is None:
            timeline.ahead_s += took_s
            return action()
        if timeline.chance.random() < 0.5:
            fiber.pause(took_s)
            if self._is_killed():
                raise fibers.Killed
            return action()
        result = action()
        fiber.pause(took_s)
        return result

    def _one_of_several(self, action: Callable[[], T]) -> T:
        """One of the reads that the catalog makes at a time, in threads of its own: without chance, since their order is the system's."""
        storage = self._storage
        if self._machine in storage.hanging:
            raise Hangs
        took_s = sum(storage.call_s) / 2 * storage.slow.get(self._machine, 1.0) / RECORD_READERS
        with storage.lock:
            storage.timeline.ahead_s += took_s
        return action()

    def _hang(self, fiber: fibers.Fiber | None) -> None:
        self._stuck(1)
        if fiber is None:
            self._stuck(-1)
            raise Hangs
        self._storage.when_healed(self._machine, fiber.resume)
        try:
            fiber.park()
        finally:
            self._stuck(-1)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See `Tier`."""

        def work() -> None:
            if exclusive and path in self._storage.files:
                raise FileExistsError(path)
            self._storage.put(path, data)

        self._call(path, work)

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        data = self._call(path, lambda: self._storage.get(path))
        if isinstance(data, Pack):
            raise ConfigurationError("the world's storage keeps no bytes of packs", path=path)
        with self._storage.lock:
            self._storage.read_bytes += len(data)
        return data

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """See `Tier`."""
        data = self._call(path, lambda: self._storage.get(path))
        return data.size_bytes if isinstance(data, Pack) else len(data)

    def list(self, directory: str) -> list[Entry]:
        """See `Tier`."""
        found = self._call(directory, lambda: self._storage.entries(directory))
        return [entry for entry in found if not entry.name.startswith(TEMPORARY_PREFIX)]

    def delete(self, path: str) -> None:
        """See `Tier`."""
        self._call(path, lambda: self._storage.delete(path))

    def delete_tree(self, directory: str) -> None:
        """See `Tier`."""
        self._call(directory, lambda: self._storage.delete_tree(directory))

    def delete_if_empty(self, directory: str) -> None:
        """See `Tier`."""
        self._call(directory, lambda: None if self._storage.entries(directory) else self._storage.delete(directory))

    def sync_tree(self, directory: str) -> None:
        """See `Tier`; everything but packs is durable at once."""
        self._call(directory, lambda: None)

    def make_directory(self, path: str) -> None:
        """See `Tier`."""
        self._call(path, lambda: self._storage.make_directory(path))

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """See `Tier`; there are none here."""
        return self._call(directory, lambda: ())

    def free_bytes(self) -> int | None:
        """See `Tier`; it cannot tell."""
        return None

    def probe(self) -> ProbeReport:
        """See `Tier`."""
        return self._call(
            "", lambda: ProbeReport(writable=True, exclusive_create=True, exclusive_by="model", fsync_works=True)
        )

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """Packs are modelled by `flushers`."""
        raise ConfigurationError("the world's storage keeps no bytes of packs", path=path)

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> PackReader:
        """As `create_pack`."""
        raise ConfigurationError("the world's storage keeps no bytes of packs", path=path)
