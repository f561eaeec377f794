"""The disks of several nodes as one tier: the union of their run directories.

Invariants: a small file is put on all nodes, and is there on all of them when `put` returns; a pack is written to the own disk only. Of
several that create one file exclusively the node whose name sorts lowest decides, since all of them go there first; whoever is told that
the file exists may rely on it, as it was brought to all nodes before. What decides about belief (`list`, `put`, deletions) needs every
node, and fails by the name of one that cannot be reached; a read goes on as long as one node has the file. Two files of one name that
differ are never chosen between. What must not live here: which checkpoint counts, how other nodes are reached.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import CheckpointError, IntegrityError, StorageError
from safehold.host.disk import components
from safehold.tiers.base import Entry, PackReader, PackWriter, ProbeReport, Tier

T = TypeVar("T")
Outcome = tuple[T | None, BaseException | None]

MAX_THREADS = 32
"""So many nodes are asked at a time."""
HOLDERS_KEPT = 1 << 16
MAX_SMALL_FILE_BYTES = 1 << 30
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5


class JoinedTier:
    """See the module and `tiers.base.Tier`.

    Args:
        own: The disk of this node.
        others: The disks of the other nodes, by the nodes' names.
        node: The name of this node.
        guess: Says at which node a file is most likely that is not on the own disk, by its path; None: no idea.
        clock: Time for retries.
    """

    def __init__(
        self,
        own: Tier,
        others: Mapping[str, Tier],
        *,
        node: str,
        guess: Callable[[str], str | None] = lambda path: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if node in others:
            raise ValueError(f"node {node} is its own other")
        self.name, self.url, self.node, self.own = own.name, own.url, node, own
        self.members: dict[str, Tier] = {node: own, **{name: others[name] for name in sorted(others)}}
        self._order = sorted(self.members)
        self._guess, self._clock = guess, clock
        self._lock = threading.Lock()
        self._holders: OrderedDict[str, str] = OrderedDict()

    @property
    def guess(self) -> Callable[[str], str | None]:
        """What is asked at which node a file is most likely."""
        return self._guess

    def look_first(self, guess: Callable[[str], str | None]) -> None:
        """Ask this from now on at which node a file is most likely."""
        with self._lock:
            self._guess = guess
            self._holders.clear()

    # -- packs -----------------------------------------------------------------------------------------------------------

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """See `Tier`; on the own disk."""
        return self.own.create_pack(path, size_bytes)

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> PackReader:
        """See `Tier`."""
        return self._read(path, lambda tier: tier.open_pack(path, direct=direct, retry_s=0.0), retry_s)

    # -- small files -----------------------------------------------------------------------------------------------------

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        return self._read(path, lambda tier: tier.get(path, limit_bytes=limit_bytes, retry_s=0.0), retry_s)

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """See `Tier`."""
        return self._read(path, lambda tier: tier.size(path, retry_s=0.0), retry_s)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See `Tier`; on all nodes.

        Raises:
            IntegrityError: With `exclusive`: two nodes have different files of this name already.
        """
        components(path)
        if exclusive:
            self._put_exclusively(path, data)
        else:
            self.on_each(lambda tier: tier.put(path, data))

    def _put_exclusively(self, path: str, data: bytes) -> None:
        first, rest = self._order[0], self._order[1:]

        def create(tier: Tier) -> None:
            tier.put(path, data, exclusive=True)

        _, error = self._on([first], create)[first]
        if isinstance(error, FileExistsError):
            self._bring_to_all(path, first)
            raise error
        if error is not None:
            raise error
        outcomes = self._on(rest, create)
        there = [node for node, (_, exc) in outcomes.items() if isinstance(exc, FileExistsError)]
        other = [node for node in there if not self._holds(node, path, data)]
        if other:  # somebody was first there, and never came to the node that decides: that one's counts, as it was there before
            ours = [first, *(node for node, (_, exc) in outcomes.items() if exc is None)]
            _raise_first(self._on(ours, lambda tier: tier.delete(path)))
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{path} (node {other[0]})")
        _raise_first({node: outcome for node, outcome in outcomes.items() if node not in there})

    def _bring_to_all(self, path: str, holder: str) -> None:
        """Somebody else made this file, and may have died before it was on all nodes."""
        try:
            data = self.members[holder].get(path, limit_bytes=MAX_SMALL_FILE_BYTES, retry_s=0.0)
        except (FileNotFoundError, IntegrityError):
            return  # it went again, or is no file
        rest = [node for node in self._order if node != holder]
        outcomes = self._on(rest, lambda tier: tier.put(path, data, exclusive=True))
        there = [node for node, (_, exc) in outcomes.items() if isinstance(exc, FileExistsError)]
        for node in there:
            if not self._holds(node, path, data):
                raise two_of_one_name(path, holder, node)
        _raise_first({node: outcome for node, outcome in outcomes.items() if node not in there})

    def _holds(self, node: str, path: str, data: bytes) -> bool:
        try:
            return self.members[node].get(path, limit_bytes=len(data), retry_s=0.0) == data
        except (FileNotFoundError, IntegrityError):
            return False

    # -- directories -----------------------------------------------------------------------------------------------------

    def list(self, directory: str) -> list[Entry]:
        """See `Tier`: what is on any node; of a file that is on several, the own or the first one's size."""
        found: dict[str, Entry] = {}
        prefix = f"{directory}/" if directory else ""
        for node, entries in self.on_each(lambda tier: tier.list(directory)).items():
            for entry in entries:
                if entry.name not in found:
                    found[entry.name] = entry
                    if node != self.node and not entry.is_dir:
                        self._remember(f"{prefix}{entry.name}", node)
        return [found[name] for name in sorted(found)]

    def holders(self, directory: str) -> dict[str, tuple[str, ...]]:
        """Return which nodes have each file of a directory."""
        found: dict[str, list[str]] = {}
        for node, entries in self.on_each(lambda tier: tier.list(directory)).items():
            for entry in entries:
                if not entry.is_dir:
                    found.setdefault(entry.name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def delete(self, path: str) -> None:
        """See `Tier`; on all nodes."""
        self.on_each(lambda tier: tier.delete(path))

    def delete_tree(self, directory: str) -> None:
        """See `Tier`; on all nodes."""
        self.on_each(lambda tier: tier.delete_tree(directory))

    def delete_if_empty(self, directory: str) -> None:
        """See `Tier`; on all nodes."""
        self.on_each(lambda tier: tier.delete_if_empty(directory))

    def sync_tree(self, directory: str) -> None:
        """See `Tier`; on all nodes that have the directory, of which there must be one."""
        outcomes = self._on(self.members, lambda tier: tier.sync_tree(directory))
        absent = {node for node, (_, exc) in outcomes.items() if exc is not None and _is_absent(exc)}
        if len(absent) < len(outcomes):
            outcomes = {node: outcome for node, outcome in outcomes.items() if node not in absent}
        _raise_first(outcomes)

    def make_directory(self, path: str) -> None:
        """See `Tier`; on all nodes."""
        self.on_each(lambda tier: tier.make_directory(path))

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """See `Tier`; on all nodes."""
        swept = self.on_each(lambda tier: tier.sweep_temporaries(directory, older_than_s=older_than_s))
        return tuple(name for names in swept.values() for name in names)

    # -- the place -------------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int | None:
        """See `Tier`; of the own disk, where this node's packs go."""
        return self.own.free_bytes()

    def probe(self) -> ProbeReport:
        """See `Tier`; what all disks can do, with the notes of each."""
        reports = self.on_each(lambda tier: tier.probe())
        own = reports[self.node]
        notes = list(own.notes)
        for node, report in reports.items():
            notes += [f"node {node}: {note}" for note in report.notes if note not in own.notes]
        return replace(
            own,
            writable=all(report.writable for report in reports.values()),
            exclusive_create=all(report.exclusive_create for report in reports.values()),
            fsync_works=all(report.fsync_works for report in reports.values()),
            shared=False,
            notes=tuple(notes),
        )

    # -- asking several --------------------------------------------------------------------------------------------------

    def on_each(self, action: Callable[[Tier], T]) -> dict[str, T]:
        """Do something on all nodes at once; returns what came of it by node.

        Raises:
            Exception: What was wrong on one of them.
        """
        outcomes = self._on(self.members, action)
        _raise_first(outcomes)
        return {node: value for node, (value, _) in outcomes.items()}  # type: ignore[misc]

    def _read(self, path: str, read: Callable[[Tier], T], retry_s: float | None) -> T:
        """Read from the own disk, else from wherever it is; look again while it is nowhere and there is time for it."""
        components(path)
        begun, pause = self._clock.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return self._read_once(path, read)
            except FileNotFoundError:
                if self._clock.monotonic() - begun + pause > (retry_s or 0.0):
                    raise
            self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _read_once(self, path: str, read: Callable[[Tier], T]) -> T:
        with self._lock:
            likely = self._holders.get(path) or self._guess(path)
        asked = [self.node, likely] if likely in self.members and likely != self.node else [self.node]
        failure: CheckpointError | None = None
        absent: FileNotFoundError | None = None
        rest = [node for node in self.members if node not in asked]
        for nodes in (*([node] for node in asked), rest):
            for node, (value, error) in self._ask(nodes, read):  # who finds it does not wait for the others
                if error is None:
                    if node != self.node:
                        self._remember(path, node)
                    return value  # type: ignore[return-value]
                if isinstance(error, FileNotFoundError):
                    absent = error if node == self.node else absent or error
                elif isinstance(error, CheckpointError):
                    failure = failure or error
                else:
                    raise error
        if failure is not None:
            raise failure
        assert absent is not None
        raise absent

    def _remember(self, path: str, node: str) -> None:
        with self._lock:
            self._holders[path] = node
            self._holders.move_to_end(path)
            while len(self._holders) > HOLDERS_KEPT:
                self._holders.popitem(last=False)

    def _on(self, nodes: Iterable[str], action: Callable[[Tier], T]) -> dict[str, Outcome[T]]:
        """Do something on several nodes at once; returns what came of it, in the order of `members`."""
        wanted = list(nodes)
        found = dict(self._ask(wanted, action))
        return {node: found[node] for node in self.members if node in found}

    def _ask(self, nodes: Sequence[str], action: Callable[[Tier], T]) -> Iterable[tuple[str, Outcome[T]]]:
        """Yield (node, outcome) as they come. Threads, as tiers block; each ends by its own node's deadline."""
        if len(nodes) == 1:
            yield nodes[0], self._attempt(nodes[0], action)
            return
        todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[str, Outcome[T]]] = queue.SimpleQueue()
        for node in nodes:
            todo.put(node)

        def work() -> None:
            while True:
                try:
                    node = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((node, self._attempt(node, action)))
                except BaseException as exc:  # whoever waits must hear of it
                    done.put((node, (None, exc)))

        for _ in range(min(MAX_THREADS, len(nodes))):
            threading.Thread(target=work, name="joined", daemon=True).start()
        for _ in nodes:
            yield done.get()

    def _attempt(self, node: str, action: Callable[[Tier], T]) -> Outcome[T]:
        try:
            return action(self.members[node]), None
        except CheckpointError as exc:
            exc.node = exc.node or node
            return None, exc
        except Exception as exc:
            return None, exc


def two_of_one_name(path: str, one: str, other: str) -> IntegrityError:
    """Return the error for two files of one name, of which neither can be preferred."""
    text = (
        f"nodes {one} and {other} have different files of this name: two jobs have run, each without the other's nodes"
    )
    hint = "start the job on the nodes of one of them, or move the run directory away on the nodes whose part is not wanted"
    return IntegrityError(text, node=other, path=path, hint=hint)


def _is_absent(exc: BaseException) -> bool:
    return isinstance(exc, FileNotFoundError) or (
        isinstance(exc, StorageError) and isinstance(exc.__cause__, FileNotFoundError)
    )


def _raise_first(outcomes: Mapping[str, Outcome[T]]) -> None:
    """Raise what weighs most of what was wrong: first what is no storage's trouble, then what does not pass by itself."""
    errors = [error for _, error in outcomes.values() if error is not None]
    if errors:
        raise min(errors, key=lambda exc: (isinstance(exc, StorageError), getattr(exc, "retry", False)))
