"""Who copies a checkpoint into a place: one replication at a time, and what an earlier one has left complete.

Invariants: the record with the highest number is at work. Whoever takes over creates the next number exclusively before it
looks at a pack, and whoever commits asks for the highest number after all its packs are durable: so what was complete when a
replication was allowed to commit is complete still, and is found so by who takes over. A pack is named as finished only once
its bytes are durable, and never while it is being written. Where several nodes copy, each names its own packs in a file of its own,
so that no file has two writers; whoever takes over reads them all.

Must not live here: what is copied (`safehold.pipeline.replicate`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import closing

import msgspec

from safehold.clock import Clock
from safehold.errors import ConfigurationError, FormatVersionError, IntegrityError, StorageError, SupersededError
from safehold.format import document, paths, records
from safehold.format.records import Replication
from safehold.host import process
from safehold.tiers.base import Tier
from safehold.types import CommitId

TAKE_ATTEMPTS = 16
"""So many others may take the number between our looking and our creating."""


class Claim:
    """The right to copy one checkpoint into one place; thread-safe. Made by `take`, and for other nodes by `share`."""

    def __init__(self, tier: Tier, record: Replication, *, node: int | None = None) -> None:
        self._tier = tier
        self._record = record
        self._node = node
        self._lock = threading.Lock()
        self._removed = False

    @property
    def record(self) -> Replication:
        """What its file says."""
        return self._record

    @property
    def finished(self) -> frozenset[str]:
        """Names of packs that are complete and durable."""
        return frozenset(self._record.finished)

    def note(self, names: Iterable[str]) -> None:
        """Add packs that are complete and durable; durable when it returns."""
        with self._lock:
            self._write(finished=tuple(sorted({*self._record.finished, *names})))

    def forget(self, names: Iterable[str]) -> None:
        """Take packs off the list before they are replaced; durable when it returns."""
        gone = set(names)
        with self._lock:
            if gone & set(self._record.finished):
                self._write(finished=tuple(name for name in self._record.finished if name not in gone))

    def holds(self) -> bool:
        """Whether nobody has taken over. One list."""
        return max(_numbers(self._tier, self._record.commit), default=0) <= self._record.number

    def check(self) -> None:
        """Refuse if somebody has taken over.

        Raises:
            SupersededError: Somebody has.
        """
        if not self.holds():
            raise SupersededError(
                "another replication of this checkpoint has taken over",
                step=self._record.commit.step,
                path=self._tier.url,
                tier=self._tier.name,
                hint="let the other one finish; run one replication into a place at a time",
            )

    def leave(self) -> None:
        """Let somebody else go on from here at once; never raises a storage error."""
        try:
            with self._lock:
                if not self._removed and self.holds():
                    self._write(ended=True)
        except StorageError:
            pass

    def remove(self) -> None:
        """Remove the records of this checkpoint up to the own one: it is committed, or discarded."""
        _delete(self._tier, self._record.commit, self._record.number)
        self._removed = True

    def _write(self, *, finished: tuple[str, ...] | None = None, ended: bool = False) -> None:
        changed = self._record.finished if finished is None else finished
        record = msgspec.structs.replace(self._record, finished=changed, ended=ended)
        self._tier.put(_path(record, self._node), records.encode_replication(record))
        self._record = record


def share(tier: Tier, record: Replication, node: int) -> Claim:
    """Return what a node needs to copy its packs under a claim that another process has taken: it names them in a file of its own.

    Args:
        tier: The place.
        record: The claim's record.
        node: Which node of the job; no two copy under one claim with the same number.
    """
    return Claim(tier, record, node=node)


def take(
    tier: Tier,
    commit: CommitId,
    token: str,
    *,
    clock: Clock,
    host: str | None = None,
    pid: int | None = None,
    own_is_over: bool = False,
) -> Claim:
    """Become the one that copies a checkpoint into a place; durable when it returns.

    Args:
        tier: The place.
        commit: The checkpoint.
        token: Random word of this replication; a call whose answer was lost can be repeated with it.
        clock: Time, for the record.
        host: Name of this host; for tests.
        pid: Number of this process; for tests.
        own_is_over: What this very process has claimed before is over.

    Raises:
        ConfigurationError: Another process of this host is at it, and alive. One of another host is superseded instead, since
            nothing tells whether it lives; what it has finished is not lost.
        StorageError: The place failed.
    """
    host = os.uname().nodename if host is None else host
    pid = os.getpid() if pid is None else pid
    for _ in range(TAKE_ATTEMPTS):
        number, before = _highest(tier, commit)
        if before is not None and before.token == token:
            return _alone(tier, before)
        own = own_is_over and before is not None and before.pid == pid and before.pid_ticks == process.start_ticks(pid)
        if before is not None and not own and not before.ended and before.host == host and _is_alive(before):
            raise ConfigurationError(
                f"process {before.pid} of this host is copying this checkpoint there",
                step=commit.step,
                path=tier.url,
                tier=tier.name,
                hint="wait until it has finished, or end it",
            )
        record = Replication(
            commit=commit,
            number=number + 1,
            token=token,
            host=host,
            pid=pid,
            pid_ticks=process.start_ticks(pid),
            created_s=clock.wall(),
            finished=_finished(tier, commit, number) if before is not None else (),
        )
        try:
            tier.put(_path(record), records.encode_replication(record), exclusive=True)
        except FileExistsError:
            if not _is_ours(tier, record):
                continue
        # Read back: a store that does not refuse to create a file twice may hold a replica all the same.
        if not _is_ours(tier, record):
            continue
        return _alone(tier, record)
    raise StorageError(
        f"others took the next number {TAKE_ATTEMPTS} times in a row",
        step=commit.step,
        path=tier.url,
        tier=tier.name,
        hint="run one replication into a place at a time",
    )


def _alone(tier: Tier, record: Replication) -> Claim:
    """Return a claim after the records that it replaces have gone."""
    _delete(tier, record.commit, record.number - 1)
    return Claim(tier, record)


def _delete(tier: Tier, commit: CommitId, up_to: int) -> None:
    """Delete the records of a checkpoint up to a number, what single nodes noted first."""
    names = [entry.name for entry in tier.list(paths.REPLICATIONS)]
    shares = [parsed for name in names if (parsed := paths.parse_replication_share(name)) is not None]
    for of, number, node in shares:
        if of == commit and number <= up_to:
            tier.delete(paths.replication_share(commit, number, node))
    for number in _numbers(tier, commit):
        if number <= up_to:
            tier.delete(paths.replication(commit, number))


def _finished(tier: Tier, commit: CommitId, number: int) -> tuple[str, ...]:
    """Return the packs that are complete and durable by the record of a number, or by what nodes noted under it."""
    nodes = [
        parsed[2]
        for entry in tier.list(paths.REPLICATIONS)
        if (parsed := paths.parse_replication_share(entry.name)) is not None and parsed[:2] == (commit, number)
    ]
    found = [_read(tier, commit, number, node) for node in (None, *nodes)]
    return tuple(sorted({name for record in found if record is not None for name in record.finished}))


def unfinished(tier: Tier) -> dict[CommitId, Replication | None]:
    """Return the checkpoints that somebody copies here, or was stopped copying, with the newest record of each (None: damaged)."""
    found = {}
    for entry in tier.list(paths.REPLICATIONS):
        parsed = paths.parse_replication(entry.name)
        if parsed is not None:
            found[parsed[0]] = parsed[1]
    return {commit: _highest(tier, commit)[1] for commit in sorted(found)}


def is_at_work(record: Replication | None, *, host: str | None = None, own_is_over: bool = False) -> bool:
    """Whether a replication may still be at work; of another host's nothing tells. `own_is_over` as for `take`."""
    if record is None or record.ended:
        return False
    if record.host != (os.uname().nodename if host is None else host):
        return True
    pid = os.getpid()
    own = record.pid == pid and record.pid_ticks == process.start_ticks(pid)
    return _is_alive(record) and not (own_is_over and own)


def _path(record: Replication, node: int | None = None) -> str:
    if node is not None:
        return paths.replication_share(record.commit, record.number, node)
    return paths.replication(record.commit, record.number)


def _numbers(tier: Tier, commit: CommitId) -> list[int]:
    found = [paths.parse_replication(entry.name) for entry in tier.list(paths.REPLICATIONS)]
    return sorted(parsed[1] for parsed in found if parsed is not None and parsed[0] == commit)


def _highest(tier: Tier, commit: CommitId) -> tuple[int, Replication | None]:
    """Return the highest number that is taken, and its record if that can be read; a damaged one vouches for nothing."""
    number = max(_numbers(tier, commit), default=0)
    return number, _read(tier, commit, number) if number else None


def _read(tier: Tier, commit: CommitId, number: int, node: int | None = None) -> Replication | None:
    path = paths.replication(commit, number) if node is None else paths.replication_share(commit, number, node)
    try:
        record = records.decode_replication(
            tier.get(path, limit_bytes=document.max_file_bytes("replication")), path=path
        )
    except FormatVersionError:
        raise
    except (FileNotFoundError, IntegrityError):
        return None
    return record if record.commit == commit and record.number == number else None


def _is_ours(tier: Tier, record: Replication) -> bool:
    found = _read(tier, record.commit, record.number)
    return found is not None and found.token == record.token


def _is_alive(record: Replication) -> bool:
    found = process.find(record.pid, record.pid_ticks)
    if found is None:
        return False
    with closing(found):
        return True
