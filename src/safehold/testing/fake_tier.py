"""A tier around another one that fails, hangs, is slow, lies and flips bits on demand.

Each call is a numbered operation of a kind: the names of `tiers.base.Tier`'s methods, and `write_at`, `finish`,
`abort`, `read_into` of its packs. Rules are tried in the order in which they were made. Invariant: without rules it
behaves as what it wraps.

    tier = FakeTier(FlashTier(path))
    tier.fail("put", path="*/manifest.json", error=OSError(errno.ENOSPC, "full"))
"""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import StorageError, from_os_error
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import Entry, PackReader, PackWriter, ProbeReport, Tier
from safehold.tiers.flash import FlashTier

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOp:
    """One operation.

    Attributes:
        index: Number among all operations of the tier, from 0.
        nth: Number among those of its kind, from 0.
        kind: The method's name.
        path: The path that it was called with.
        offset: Offset of `write_at` and `read_into`.
        nbytes: Length of a transfer, of the data of `put`, or of a new pack.
    """

    index: int
    nth: int
    kind: str
    path: str
    offset: int = 0
    nbytes: int = 0


class Gate:
    """What operations hang on.

    Attributes:
        reached: Set when an operation has come to hang.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def release(self) -> None:
        """Let what hangs go on, and nothing hang any more."""
        self._open.set()

    def _pass(self) -> None:
        if not self._open.is_set():
            self.reached.set()
            self._open.wait()


@dataclass(slots=True, kw_only=True)
class _Rule:
    kind: str
    at: int | None
    path: str
    times: int
    before: Callable[[TierOp], None] | None = None
    after: Callable[[TierOp], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, op: TierOp) -> bool:
        if self.kind not in ("*", op.kind) or not fnmatch.fnmatchcase(op.path, self.path):
            return False
        if self.at is not None and op.nth != self.at and not (self.kind == "*" and op.index == self.at):
            return False
        with self.lock:
            if self.times == 0:
                return False
            self.times -= self.times > 0
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flip:
    path: str
    offset: int
    mask: int


class FakeTier:
    """See the head of this module and `tiers.base.Tier`.

    Args:
        inner: The tier that does the work; None: a `FlashTier` on a `FakeDisk`.
        clock: Waits where it is slow.
    """

    def __init__(self, inner: Tier | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if inner is None:
            disk = FakeDisk()
            inner = FlashTier(disk.root, disk)
        self.inner = inner
        self.name = inner.name
        self.url = inner.url
        self.log: list[TierOp] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._rules: list[_Rule] = []
        self._flips: list[_Flip] = []
        self._gates: list[Gate] = []

    # Faults. `kind`: a kind of operation or `*`; `at`: which of that kind (of all, with `*`), None for any; `path`: a
    # shell pattern; `times`: how many that match, -1 for all.

    def fail(
        self,
        kind: str,
        *,
        at: int | None = None,
        path: str = "*",
        times: int = 1,
        error: BaseException | None = None,
        applied: bool = False,
    ) -> None:
        """Let operations fail.

        Args:
            kind: See above.
            at: See above.
            path: See above.
            times: See above.
            error: What is raised; None: a `StorageError`. `OSError`s are translated as a tier would.
            applied: Whether the operation is done nevertheless, as when a reply is lost.
        """

        def act(op: TierOp) -> None:
            if error is None:
                raise StorageError(f"injected failure of {op.kind} {op.nth}", tier=self.name, path=op.path)
            if isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, FileExistsError)):
                raise from_os_error(error, op.kind, tier=self.name, path=op.path) from error
            raise error

        self._add(
            _Rule(
                kind=kind,
                at=at,
                path=path,
                times=times,
                before=None if applied else act,
                after=act if applied else None,
            )
        )

    def lie(self, kind: str, *, at: int | None = None, path: str = "*", times: int = 2) -> None:
        """Let reads say that there is nothing, as a network file system does for a while after a commit."""
        self.fail(
            kind, at=at, path=path, times=times, error=FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        )

    def hang(self, kind: str, *, at: int | None = None, path: str = "*", times: int = 1) -> Gate:
        """Let operations hang until the gate that is returned is released."""
        gate = Gate()
        self._gates.append(gate)
        self._add(_Rule(kind=kind, at=at, path=path, times=times, before=lambda op: gate._pass()))
        return gate

    def slow(self, kind: str, seconds: float, *, at: int | None = None, path: str = "*", times: int = -1) -> None:
        """Let operations take longer."""
        self._add(_Rule(kind=kind, at=at, path=path, times=times, before=lambda op: self._clock.sleep(seconds)))

    def flip(self, path: str, offset: int, *, mask: int = 1) -> None:
        """Flip bits of one byte of the files that match `path` whenever they are read; what is stored stays whole."""
        self._flips.append(_Flip(path=path, offset=offset, mask=mask))

    def heal(self) -> None:
        """Forget all rules, release all that hangs."""
        with self._lock:
            self._rules.clear()
            self._flips.clear()
        for gate in self._gates:
            gate.release()
        self._gates.clear()

    def count(self, kind: str) -> int:
        """Return how many operations of a kind there were."""
        with self._lock:
            return self._counts.get(kind, 0)

    # The operations of `Tier`.

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """See `Tier`."""
        writer = self._operate("create_pack", path, lambda: self.inner.create_pack(path, size_bytes), nbytes=size_bytes)
        return FakePackWriter(self, writer, path)

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> PackReader:
        """See `Tier`."""
        reader = self._operate("open_pack", path, lambda: self.inner.open_pack(path, direct=direct, retry_s=retry_s))
        return FakePackReader(self, reader, path)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See `Tier`."""
        self._operate("put", path, lambda: self.inner.put(path, data, exclusive=exclusive), nbytes=len(data))

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        data = bytearray(
            self._operate("get", path, lambda: self.inner.get(path, limit_bytes=limit_bytes, retry_s=retry_s))
        )
        self._spoil(path, 0, memoryview(data))
        return bytes(data)

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """See `Tier`."""
        return self._operate("size", path, lambda: self.inner.size(path, retry_s=retry_s))

    def list(self, directory: str) -> list[Entry]:
        """See `Tier`."""
        return self._operate("list", directory, lambda: self.inner.list(directory))

    def delete(self, path: str) -> None:
        """See `Tier`."""
        self._operate("delete", path, lambda: self.inner.delete(path))

    def delete_tree(self, directory: str) -> None:
        """See `Tier`."""
        self._operate("delete_tree", directory, lambda: self.inner.delete_tree(directory))

    def sync_tree(self, directory: str) -> None:
        """See `Tier`."""
        self._operate("sync_tree", directory, lambda: self.inner.sync_tree(directory))

    def delete_if_empty(self, directory: str) -> None:
        """See `Tier`."""
        self._operate("delete_if_empty", directory, lambda: self.inner.delete_if_empty(directory))

    def make_directory(self, path: str) -> None:
        """See `Tier`."""
        self._operate("make_directory", path, lambda: self.inner.make_directory(path))

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """See `Tier`."""
        return self._operate(
            "sweep_temporaries",
            directory,
            lambda: self.inner.sweep_temporaries(directory, older_than_s=older_than_s),
        )

    def free_bytes(self) -> int | None:
        """See `Tier`."""
        return self._operate("free_bytes", "", self.inner.free_bytes)

    def probe(self) -> ProbeReport:
        """See `Tier`."""
        return self._operate("probe", "", self.inner.probe)

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _operate(self, kind: str, path: str, action: Callable[[], T], *, offset: int = 0, nbytes: int = 0) -> T:
        with self._lock:
            nth = self._counts.get(kind, 0)
            self._counts[kind] = nth + 1
            op = TierOp(index=len(self.log), nth=nth, kind=kind, path=path, offset=offset, nbytes=nbytes)
            self.log.append(op)
            rules = list(self._rules)
        taken = [rule for rule in rules if rule.takes(op)]
        for rule in taken:
            if rule.before is not None:
                rule.before(op)
        result = action()
        for rule in taken:
            if rule.after is not None:
                rule.after(op)
        return result

    def _spoil(self, path: str, offset: int, data: memoryview) -> None:
        for flip in self._flips:
            if fnmatch.fnmatchcase(path, flip.path) and 0 <= flip.offset - offset < data.nbytes:
                data[flip.offset - offset] ^= flip.mask


class FakePackWriter:
    """See `tiers.base.PackWriter`."""

    def __init__(self, tier: FakeTier, inner: PackWriter, path: str) -> None:
        self.alignment = inner.alignment
        self._tier = tier
        self._inner = inner
        self._path = path
        self._spoilt = False

    def write_at(self, offset: int, data: memoryview) -> None:
        """See `PackWriter`."""
        try:
            self._tier._operate(
                "write_at", self._path, lambda: self._inner.write_at(offset, data), offset=offset, nbytes=data.nbytes
            )
        except ValueError:
            raise
        except BaseException:
            self._spoilt = True
            raise

    def finish(self) -> None:
        """See `PackWriter`."""
        if self._spoilt:
            raise StorageError("an earlier write of this pack failed", tier=self._tier.name, path=self._path)
        self._tier._operate("finish", self._path, self._inner.finish)

    def abort(self) -> None:
        """See `PackWriter`."""
        self._tier._operate("abort", self._path, self._inner.abort)


class FakePackReader:
    """See `tiers.base.PackReader`."""

    def __init__(self, tier: FakeTier, inner: PackReader, path: str) -> None:
        self.alignment = inner.alignment
        self.size_bytes = inner.size_bytes
        self._tier = tier
        self._inner = inner
        self._path = path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `PackReader`."""
        view = memoryview(buffer).cast("B")
        self._tier._operate(
            "read_into", self._path, lambda: self._inner.read_into(offset, view), offset=offset, nbytes=view.nbytes
        )
        self._tier._spoil(self._path, offset, view)

    def close(self) -> None:
        """See `PackReader`."""
        self._inner.close()
