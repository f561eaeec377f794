"""A run and its copy at a second place, side by side: what is where, what is to be sent, what the second place lets go.

Invariants: looking writes nothing. The second place lets go by its own keep rule, by tombstones of its own, and never of what the
source has pinned or what was just asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import ConfigurationError, FormatVersionError, IntegrityError
from safehold.pipeline import replica_claim, sweep
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Catalog, CommitView
from safehold.pipeline.leases import Observer
from safehold.pipeline.replica_documents import is_complete
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import replication
from safehold.policy.replication import Lag
from safehold.policy.retention import Keep
from safehold.tiers.base import Tier
from safehold.types import CommitId

State = Literal["complete", "missing", "partial", "uncommitted", "damaged", "extra"]
"""At the second place it is: complete; absent; being copied, or left half copied; un-committed there, its bytes not yet deleted;
committed and not as it was written; there only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint.

    Attributes:
        commit: Which.
        here: What the source has; None: only the second place believes it.
        there: What the second place believes; None: nothing.
        state: See `State`.
        there_bytes: Sum of the sizes of its files there.
        at_work: Somebody copies it, or may.
        reason: What is wrong.
    """

    commit: CommitId
    here: CommitView | None
    there: CommitView | None
    state: State
    there_bytes: int
    at_work: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Both places.

    Attributes:
        here: What was seen at the source.
        there: What was seen at the second place.
        rows: The checkpoints, newest first.
        num_set_aside: Whole checkpoints at the second place that do not count there.
    """

    here: Snapshot
    there: Snapshot
    rows: tuple[Row, ...]
    num_set_aside: int

    @property
    def complete(self) -> set[CommitId]:
        """What the second place has complete, of what the source has."""
        return {row.commit for row in self.rows if row.state == "complete"}

    @property
    def lag(self) -> Lag:
        """How far the second place is behind."""
        views = [row.here for row in self.rows if row.here is not None]
        here = {view.commit: view.manifest.created_s for view in views if view.manifest is not None}
        sizes = {view.commit: view.manifest.total_bytes for view in views if view.manifest is not None}
        # What the run has let go and the second place keeps counts there; what was rolled back does not.
        count = set(replication.counting(self.here.listing, self.there.listing))
        extra = [row.there for row in self.rows if row.state == "extra" and row.commit in count]
        gone = {
            view.commit: view.manifest.created_s for view in extra if view is not None and view.manifest is not None
        }
        return replication.lag(here, {*self.complete, *gone}, sizes, gone)


def survey(source: Tier, target: Tier, *, patience_s: float = 0.2) -> Survey:
    """Compare a run with its copy: documents are verified, and files are looked for with their sizes; data is not read.

    Args:
        source: The run.
        target: The second place; need not exist yet.
        patience_s: See `Catalog`.

    Raises:
        ConfigurationError: The second place is another run's.
        IntegrityError: One of the places cannot be understood.
        StorageError: One of them cannot be read.
    """
    catalog, other = Catalog(source, patience_s=patience_s), Catalog(target, patience_s=0.0)
    run = catalog.require_run()
    here, there = catalog.snapshot(), other.snapshot()
    if there.run is not None and there.run.run_id != run.run_id:
        raise ConfigurationError(
            f"this is the directory of another run ({there.run.run_id}), not of {run.run_id}",
            path=target.url,
            tier=target.name,
            hint="give each run a directory of its own there",
        )
    here_views = {view.commit: view for view in catalog.commits(here)}
    there_views = {view.commit: view for view in other.commits(there)}
    unfinished = replica_claim.unfinished(target)
    rows = []
    for commit in sorted({*here_views, *there_views}, reverse=True):
        view, twin = here_views.get(commit), there_views.get(commit)
        state, reason = _state(catalog, other, commit, view, twin, there)
        size = sum(there.files.get(commit, {}).values())
        if state == "missing" and replication.holding(there.listing, commit):
            state, reason = "uncommitted", "un-committed there; its bytes go later"
        elif state == "missing" and (commit in unfinished or size > 0):
            state = "partial"
        rows.append(
            Row(
                commit=commit,
                here=view,
                there=twin,
                state=state,
                there_bytes=size,
                at_work=replica_claim.is_at_work(unfinished.get(commit)),
                reason=reason,
            )
        )
    known = {*there_views, *here_views}
    aside = sum(v.has_manifest and not v.tombstones and c not in known for c, v in there.listing.attempts.items())
    return Survey(here=here, there=there, rows=tuple(rows), num_set_aside=aside)


def _state(
    catalog: Catalog,
    other: Catalog,
    commit: CommitId,
    view: CommitView | None,
    twin: CommitView | None,
    there: Snapshot,
) -> tuple[State, str]:
    target = other.tier
    if twin is None:
        return "missing", ""
    if view is not None and view.manifest is None:
        return "damaged", f"here: {view.error.message}" if view.error is not None else "here"
    try:
        if view is None or view.manifest is None:
            other.check_files(other.load(commit, run_id=there.run.run_id if there.run is not None else None))
            return "extra", ""
        data, _ = catalog.read_manifest(commit, run_id=view.manifest.run_id)
        if is_complete(target, commit, there, data):
            quarantine = there.quarantined.get(commit)
            return ("complete", "") if quarantine is None else ("damaged", quarantine.reason)
    except FormatVersionError:
        raise
    except IntegrityError as exc:
        return "damaged", exc.message
    return "damaged", "a document or a file is missing or damaged there"


def choose(seen: Survey, *, all_steps: bool = False, keep: Keep | None = None) -> list[CommitId]:
    """Return what is to be sent, newest first; where nothing is, what the newest is that there is already.

    Args:
        seen: Both places.
        all_steps: All; else the newest that is not quarantined.
        keep: What the second place keeps: what it would let go at once is not sent.
    """
    here = sweep.facts_of(row.here for row in seen.rows if row.here is not None)
    there = sweep.facts_of(row.there for row in seen.rows if row.there is not None)
    missing = replication.to_send(here, seen.complete, all_steps=all_steps, keep=keep, there_facts=there)
    # Looking at it once more brings what the source's newer incarnations say, such as that it was rolled back.
    return missing or replication.to_send(here, (), all_steps=False)


def let_go(
    source_pins: Collection[int],
    target: Tier,
    keep: Keep,
    *,
    asked_for: Collection[CommitId] = (),
    grace_s: float = 30.0,
    observer: Observer | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> sweep.Swept:
    """Apply the second place's own keep rule: un-commit there what it does not name; bytes go a grace time later, at the next call.

    Args:
        source_pins: Steps that the source has pinned; they stay.
        target: The second place.
        keep: Its rule.
        asked_for: Checkpoints that were just sent by name; they stay for now.
        grace_s: Seconds between un-committing a checkpoint and deleting its bytes.
        observer: See `sweep.retire`.
        clock: Time.

    Raises:
        SupersededError: A job was started there meanwhile.
        StorageError: The place failed.
    """
    seen = snapshots.take(target)
    leased = {commit for commit in seen.listing.attempts if commit.step in source_pins} | set(asked_for)
    return sweep.retire(
        target, keep, incarnation=seen.newest, grace_s=grace_s, leased=leased, observer=observer, clock=clock
    )


def sweep_partial(seen: Survey, target: Tier) -> list[CommitId]:
    """Delete what was left half copied of checkpoints that the source does not believe any more; return them.

    What somebody may still be copying stays, and so does everything that no replication has begun.
    """
    believed = {row.commit for row in seen.rows if row.here is not None}
    return sweep_left(believed, seen.there, target)


def sweep_left(
    believed: Collection[CommitId], there: Snapshot, target: Tier, *, own_is_over: bool = False
) -> list[CommitId]:
    """As `sweep_partial`, with what the source believes, and what was seen at the second place; see `replica_claim.take`."""
    gone = []
    for commit, record in replica_claim.unfinished(target).items():
        view = there.listing.attempts.get(commit)
        if commit in believed or replica_claim.is_at_work(record, own_is_over=own_is_over) or record is None:
            continue
        if view is not None and not view.has_manifest:
            sweep.discard(target, commit)
        replica_claim.Claim(target, record).remove()
        gone.append(commit)
    return gone
