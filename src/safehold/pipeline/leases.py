"""Readers' leases: taken by who reads a checkpoint of a run that lives, honoured by who deletes.

Invariants: a reader takes its lease first and makes sure afterwards that the checkpoint is still committed; who deletes
un-commits first and looks for leases afterwards. So one of the two always sees the other. A lease is one small file, put
atomically, renewed and removed by one thread, so that no late renewal comes after the removal; what a dead reader leaves
expires. Names of leases are made of a number and random hex digits; nothing that was read from one becomes a path. A
reader that cannot write reads without a lease, and says so.

Must not live here: the rule of expiry (`safehold.policy.leases`), deletion of checkpoints (`safehold.pipeline.sweep`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import msgspec

from safehold.clock import SYSTEM_CLOCK, Clock, new_token
from safehold.errors import CheckpointError, DeadlineError, IntegrityError, StorageError
from safehold.format import document, paths, records
from safehold.format.records import Lease
from safehold.pipeline.catalog import Catalog
from safehold.policy import belief
from safehold.policy.leases import MAX_LEASES, UNREADABLE_LEASE_S, LeaseWatch, Sighting
from safehold.tiers.base import Tier
from safehold.types import CommitId

log = logging.getLogger("safehold")

RELEASE_TIMEOUT_S = 10.0
"""A reader waits so long for its lease to be removed; what is not removed expires."""


# Who deletes.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A lease as an observer sees it.

    Attributes:
        step: The step, by the file's name.
        reader: The reader's id, by the file's name.
        lease: What it says; None where that does not verify, is of another file, or was not read.
        expired: Whether it does not count any more.
    """

    step: int
    reader: str
    lease: Lease | None
    expired: bool = False

    @property
    def path(self) -> str:
        """The file."""
        return paths.lease(self.step, self.reader)

    @property
    def holder(self) -> str:
        """Who reads, for people; not to be shown without cleaning."""
        if self.lease is None:
            return f"a reader whose lease cannot be read ({self.path})"
        return f"process {self.lease.pid} on {self.lease.host}"

    def names(self, commit: CommitId) -> bool:
        """Whether it is on this checkpoint; one that cannot be read is on all attempts at its step."""
        return commit.step == self.step if self.lease is None else commit == self.lease.commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """The leases of one look."""

    found: tuple[LeaseView, ...] = ()

    def on(self, commit: CommitId) -> LeaseView | None:
        """Return a lease that holds the checkpoint, if there is one."""
        return next((view for view in self.found if not view.expired and view.names(commit)), None)

    def held(self, commits: Iterable[CommitId]) -> set[CommitId]:
        """Return those of the checkpoints that somebody reads."""
        return {commit for commit in commits if self.found and self.on(commit) is not None}

    def ended(self) -> Leases:
        """Return the same leases as if all had expired: no reader is alive."""
        return Leases(found=tuple(replace(view, expired=True) for view in self.found))

    def useless(self, attempts: Collection[CommitId]) -> list[LeaseView]:
        """Return the leases that have expired, or are on none of the attempts."""
        return [view for view in self.found if view.expired or not any(view.names(commit) for commit in attempts)]


NO_LEASES = Leases()
"""For who deletes under the hands of readers, because somebody said so."""


class Observer:
    """Looks at the leases of a run again and again and knows which have expired; thread-safe.

    One that was just made counts every lease: so does a command that ends before it could look twice.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._watch = LeaseWatch()
        self._lock = threading.Lock()

    def look(self, tier: Tier) -> Leases:
        """Read the leases, at most `MAX_LEASES` of them.

        Raises:
            StorageError: They cannot be listed.
        """
        began_s = self._clock.monotonic()
        names = [paths.parse_lease(entry.name) for entry in tier.list(paths.LEASES)]
        found: list[LeaseView] = []
        seen: dict[str, Sighting] = {}
        for step, reader in (name for name in names if name is not None):
            view = LeaseView(step=step, reader=reader, lease=None)
            if len(seen) < MAX_LEASES:
                try:
                    content, lease = _read(tier, view)
                except FileNotFoundError:
                    continue
                view = LeaseView(step=step, reader=reader, lease=lease)
                lease_s = lease.lease_s if lease is not None else UNREADABLE_LEASE_S
                seen[view.path] = Sighting(content=content, lease_s=lease_s)
            found.append(view)
        with self._lock:
            expired = self._watch.observe(seen, began_s=began_s, ended_s=self._clock.monotonic())
        return Leases(found=tuple(replace(view, expired=view.path in expired) for view in found))


def _read(tier: Tier, view: LeaseView) -> tuple[str, Lease | None]:
    """Return the digest of a lease's content, and what it says; empty and None where it does not verify."""
    try:
        data = tier.get(view.path, limit_bytes=document.max_file_bytes("lease"), retry_s=0.0)
    except (IntegrityError, StorageError):
        return "", None
    try:
        lease = records.decode_lease(data, path=view.path)
    except IntegrityError:
        return document.digest(data), None
    is_own = lease.commit.step == view.step and lease.reader == view.reader
    return document.digest(data), lease if is_own else None


def remove_useless(tier: Tier, useless: Iterable[LeaseView]) -> list[str]:
    """Delete the files of leases that hold nothing, and return which; what cannot be deleted is of no account.

    A checkpoint may have been committed, and leased, since the attempts were listed that the leases were held against.
    """
    gone = []
    for view in useless:
        try:
            if not view.expired and any(view.names(commit) for commit in _attempts(tier, view.step)):
                continue
            tier.delete(view.path)
        except StorageError:
            continue
        gone.append(view.path)
    return gone


def _attempts(tier: Tier, step: int) -> list[CommitId]:
    numbers = [paths.parse_attempt_dir(entry.name) for entry in tier.list(paths.step_dir(step))]
    return [CommitId(step, *found) for found in numbers if found is not None]


# Who reads.


def is_committed(tier: Tier, commit: CommitId) -> bool:
    """Whether a checkpoint counts, or would if no newer attempt at its step did; for a reader that has just taken its lease."""
    listing = Catalog(tier).listing()
    return commit in belief.believed(listing) or commit in belief.shadowed(listing)


class ReaderLease:
    """One lease on one checkpoint, renewed by a thread of its own until it is released."""

    def __init__(self, tier: Tier, lease: Lease) -> None:
        self._tier, self._lease = tier, lease
        self._path = paths.lease(lease.commit.step, lease.reader)
        self._error: BaseException | None = None
        self._is_begun = False
        self._taken, self._stop, self._ended = threading.Event(), threading.Event(), threading.Event()

    def take(self, limit_s: float) -> None:
        """Put the file; it is durable when this returns. Call `release` whatever comes of it.

        Raises:
            StorageError: It cannot be written.
            DeadlineError: The storage does not answer.
        """
        self._is_begun = True
        threading.Thread(target=self._work, name="safehold-lease", daemon=True).start()
        if not self._taken.wait(limit_s):
            hint = "the storage does not answer; its thread was left behind"
            raise DeadlineError(f"taking a lease did not end within {limit_s:g} s", path=self._tier.url, hint=hint)
        if self._error is not None:
            raise self._error

    def release(self, limit_s: float = RELEASE_TIMEOUT_S) -> None:
        """Have the file removed, and wait a while for that; nothing is raised, since it expires if it stays."""
        self._stop.set()
        if self._is_begun:
            self._ended.wait(limit_s)

    def _work(self) -> None:
        try:
            self._put(exclusive=True)
        except BaseException as exc:
            self._error = exc
        self._taken.set()
        told = False
        while self._error is None and not self._stop.wait(self._lease.lease_s / 3):
            self._lease = msgspec.structs.replace(self._lease, renewals=self._lease.renewals + 1)
            try:
                self._put(exclusive=False)
            except CheckpointError as exc:
                if not told:
                    log.warning("safehold: the lease on step %d is not renewed: %s", self._lease.commit.step, exc)
                told = True
        try:
            self._tier.delete(self._path)  # after an error, too: the file may be there or not
        except (CheckpointError, OSError):
            pass
        self._ended.set()

    def _put(self, *, exclusive: bool) -> None:
        self._tier.put(self._path, records.encode_lease(self._lease), exclusive=exclusive)


_told: set[str] = set()
_told_lock = threading.Lock()


class Reader:
    """Holds a lease on one checkpoint at a time, or goes without where none can be written; for one thread.

    Args:
        tier: Where the run directory is; None: without leases.
        lease_s: How long a lease outlives this process.
        limit_s: How long the storage may take for one.
        host: Where this is, for people.
        pid: Which process, for people.
        clock: Time, for the record.
    """

    def __init__(
        self, tier: Tier | None, *, lease_s: float, limit_s: float, host: str, pid: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._tier, self._lease_s, self._limit_s = tier, lease_s, limit_s
        self._host, self._pid, self._clock = host, pid, clock
        self._own: ReaderLease | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, where: TracebackType | None
    ) -> None:
        self.let_go()

    def hold(self, commit: CommitId) -> bool:
        """Take a lease on a checkpoint, in the place of the one before; afterwards look if it is still committed.

        Returns:
            Whether there is a lease.

        Raises:
            DeadlineError: The storage does not answer.
        """
        self.let_go()
        if self._tier is None:
            return False
        lease = Lease(
            commit=commit,
            reader=new_token(),
            host=self._host[:255].encode(errors="replace").decode(),
            pid=self._pid,
            lease_s=self._lease_s,
            renewals=0,
            created_s=self._clock.wall(),
        )
        self._own = ReaderLease(self._tier, lease)
        try:
            self._own.take(self._limit_s)
        except StorageError as exc:
            self.let_go()
            self._tell(self._tier.url, exc)
            self._tier = None
            return False
        return True

    def let_go(self) -> None:
        """Release the lease, if there is one."""
        own, self._own = self._own, None
        if own is not None:
            own.release()

    def _tell(self, url: str, exc: StorageError) -> None:
        """Say once for each run that its checkpoints are read without a lease."""
        with _told_lock:
            if url in _told:
                return
            _told.add(url)
        log.warning(
            "safehold: reading without a lease: a run that goes on may delete the checkpoint while it is read (%s)", exc
        )
