"""Room at a second place: whether a checkpoint fits, and what goes for it.

Invariants: only what is no checkpoint there goes: copies that nobody goes on with, and what was un-committed there (a grace time is not
waited for). Never what counts, what a reader's lease names, or what another process may still be copying. It is freed without
a byte being written, since a place that is full takes none.

Must not live here: what a place keeps (`safehold.policy.retention`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import StorageFullError
from safehold.format import paths
from safehold.pipeline import ledger, replica_claim, sweep
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.leases import Observer
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import replication
from safehold.policy.replication import DataFile
from safehold.tiers.base import Tier
from safehold.types import CommitId

FULL = "the place is full"


def missing_bytes(files: Iterable[DataFile], sizes: Mapping[str, int]) -> int:
    """Return how many bytes are to be sent, by names and sizes of what is there."""
    return sum(file.size_bytes - min(sizes.get(file.name, 0), file.size_bytes) for file in files)


def missing_documents(checkpoint: Checkpoint, names: Container[str]) -> int:
    """Return how many bytes of node records and manifest are to be written, by the names of what is there."""
    manifest = checkpoint.manifest
    sizes = {paths.node_record(ref.node): ref.size_bytes for ref in manifest.nodes}
    sizes[paths.MANIFEST] = len(checkpoint.manifest_bytes)
    return sum(size for name, size in sizes.items() if name not in names)


def check(target: Tier, commit: CommitId, needed_bytes: int) -> None:
    """Refuse what does not fit.

    Raises:
        StorageFullError: It does not, as far as the place can tell.
    """
    free = target.free_bytes()
    if free is not None and free < needed_bytes:
        raise full(target, commit, needed_bytes, free)


def full(target: Tier, commit: CommitId, needed_bytes: int, free_bytes: int | None) -> StorageFullError:
    """What a replication fails with that does not fit."""
    free = "it does not tell how many are free" if free_bytes is None else f"{free_bytes} are free"
    return StorageFullError(
        f"{FULL}: {needed_bytes} bytes are to be sent, and {free}",
        step=commit.step,
        path=target.url,
        tier=target.name,
        hint="free space there, or have it keep fewer (remote_keep, --keep); its checkpoints are untouched",
    )


@contextmanager
def told(target: Tier, commit: CommitId, needed_bytes: Callable[[], int | None]) -> Iterator[None]:
    """Say of a place that takes no more how much is needed, and how much is free, whatever was being written."""
    try:
        yield
    except StorageFullError as exc:
        needed = needed_bytes()
        if exc.tier != target.name or FULL in exc.message or needed is None:
            raise
        raise full(target, commit, needed, target.free_bytes()) from exc


def free(
    target: Tier,
    commit: CommitId,
    needed_bytes: int | None,
    *,
    own_is_over: bool,
    buried: bool = True,
    observer: Observer | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Take away what is no checkpoint there, oldest first, until enough is free; return the number of attempts that went.

    Args:
        target: The place.
        commit: What is to be copied; what there is of it stays.
        needed_bytes: How many bytes must become free; None: that does not tell, so all that may goes.
        own_is_over: What this very process has copied before is over.
        buried: Also what was un-committed there.
        observer: Who looks at readers' leases, and has looked before; None: nobody, so every lease counts.
        clock: Time.

    Raises:
        SupersededError: A job was started there meanwhile.
        StorageError: The place failed.
    """

    def enough() -> bool:
        found = target.free_bytes() if needed_bytes is not None else None
        return found is not None and needed_bytes is not None and found >= needed_bytes

    seen = snapshots.take(target)
    num_gone = 0
    observer = observer or Observer(clock)
    if buried:
        for stale in _buried(seen, commit):
            if enough():
                return num_gone
            gone, _ = sweep.delete_bytes(target, [stale], incarnation=seen.newest, observer=observer)
            num_gone += len(gone)
    for stale, record in replica_claim.unfinished(target).items():
        view = seen.listing.attempts.get(stale)
        if record is None or stale == commit or (view is not None and view.has_manifest):
            continue
        if replica_claim.is_at_work(record, own_is_over=own_is_over):
            continue
        if enough():
            break
        claim = replica_claim.Claim(target, record)
        if claim.holds():  # nobody has taken it up meanwhile
            sweep.discard(target, stale)
            claim.remove()
            num_gone += 1
    return num_gone


def _buried(seen: Snapshot, commit: CommitId) -> list[CommitId]:
    return sorted(c for c in seen.listing.attempts if c != commit and replication.holding(seen.listing, c))


def keep_buried(
    here: Snapshot, there: Snapshot, target: Tier, commit: CommitId, *, clock: Clock = SYSTEM_CLOCK
) -> None:
    """See that what was un-committed at a second place does not count again by the incarnations that are about to be written there.

    A job that is started again lists all that the run has itself; a tombstone of an older incarnation would be void. Where a new one does
    not fit, the bytes go at once, unless a reader's lease names them.

    Args:
        here: The run, whose incarnations are to be copied.
        there: The second place.
        target: Its tier.
        commit: What is to be copied, and to count.
        clock: Time.

    Raises:
        SupersededError: A job was started there meanwhile.
        StorageError: The place failed.
    """
    merged = replication.merged(here.listing, there.listing)
    back = [stale for stale in _buried(there, commit) if not replication.holding(merged, stale)]
    newest = max(merged.incarnations, default=0)
    for stale in back:
        try:
            ledger.bury(target, stale, incarnation=newest, reason="it was un-committed before", clock=clock)
        except StorageFullError:
            sweep.delete_bytes(target, [stale], incarnation=there.newest, observer=Observer(clock))
