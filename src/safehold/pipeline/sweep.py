"""Takes things away from a run directory: retention, debris of dead attempts, room for a save.

Invariants: a checkpoint is un-committed (tombstone, durable) before a byte of it goes, and its bytes go later, only if
no newer incarnation has appeared and no reader's lease, looked for after that, holds it; of its files the manifest goes
first. Only what `safehold.policy` names goes, and only by names that this library makes. Nothing goes while the newest
checkpoint that would stay lacks a document or a file. Deciding and doing are apart: every function here makes its plan
from one snapshot, and `dry_run` returns the plan.

Must not live here: rules (`safehold.policy.retention`, `safehold.policy.belief`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import CheckpointError, IntegrityError, StorageFullError
from safehold.format import paths
from safehold.pipeline import leases, ledger, leftovers
from safehold.pipeline.catalog import Catalog, CommitView
from safehold.pipeline.leases import NO_LEASES, Leases, Observer
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import belief, retention
from safehold.policy.retention import CommitFacts, Keep
from safehold.tiers.base import Tier
from safehold.types import CommitId


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What was taken away, or would be.

    Attributes:
        uncommitted: Checkpoints that were un-committed, oldest first.
        deleted: Attempts whose bytes went.
        freed_bytes: Sum of the sizes of their files.
        plans: Digests of plans that went.
        files: Other files that went: temporaries, records about checkpoints that are gone.
        problem: Why retention left everything alone, if it did.
    """

    uncommitted: tuple[CommitId, ...] = ()
    deleted: tuple[CommitId, ...] = ()
    freed_bytes: int = 0
    plans: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    problem: CheckpointError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What `make_room` achieved.

    Attributes:
        needed_bytes: What was asked for.
        free_bytes: What is free now; None if the tier cannot tell.
        swept: What went for it.
    """

    needed_bytes: int
    free_bytes: int | None
    swept: Swept

    @property
    def enough(self) -> bool:
        """Whether the save fits now, as far as the tier can tell."""
        return self.free_bytes is None or self.free_bytes >= self.needed_bytes


def facts_of(views: Iterable[CommitView], *, leased: Collection[CommitId] = ()) -> list[CommitFacts]:
    """Return what retention judges: believed commits whose manifests verify; the others are left for people."""
    return [
        CommitFacts(
            commit=view.commit,
            created_s=view.manifest.created_s,
            metrics=dict(view.manifest.metrics),
            pinned=view.pinned,
            final=view.manifest.final,
            leased=view.commit in leased,
            quarantined=view.quarantine is not None,
        )
        for view in views
        if view.manifest is not None
    ]


def retire(
    tier: Tier,
    keep: Keep,
    *,
    incarnation: int,
    grace_s: float,
    leased: Collection[CommitId] = (),
    observer: Observer | None = None,
    acknowledged: Collection[CommitId] | None = None,
    given_up: Collection[CommitId] = (),
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Swept:
    """Apply a keep rule, and let go of attempts that do not count: first un-committed, their bytes deleted a grace time later.

    Those are, besides what the rule does not name, attempts that a newer one of the same step has replaced, once that one is
    found whole, and attempts of this incarnation that were given up.

    Args:
        tier: Where the run directory is.
        keep: The rule.
        incarnation: Who does it; only the newest may.
        grace_s: Seconds between un-committing a checkpoint and deleting its bytes.
        leased: Checkpoints that are being read or replicated, besides those that readers' leases name.
        observer: Who looks at readers' leases, and has looked before; None: nobody, so every lease counts.
        acknowledged: Attempts of this incarnation that were told to be committed. Others may be visible already and withdrawn
            yet, so nothing goes on their account, and they do not go. None: all that are there.
        given_up: Attempts of this incarnation that failed and that nobody works at any more. One that got its manifest all the
            same is a checkpoint as any other.
        dry_run: Only say what would go.
        clock: Time, for tombstones and their age.

    Returns:
        What went. Where the newest checkpoint that stays is not whole, the rule un-commits nothing and `problem` says why.

    Raises:
        SupersededError: A newer incarnation owns the run.
        StorageError: The tier failed.
    """
    ledger.check_newest(tier, incarnation)
    catalog = Catalog(tier, clock=clock)
    seen = catalog.snapshot()
    observer = observer or Observer(clock)
    held = observer.look(tier)
    leased = {*leased, *held.held(seen.listing.attempts)}
    facts = facts_of(_acknowledged(catalog.commits(seen), incarnation, acknowledged), leased=leased)
    doomed = retention.to_delete(facts, keep)
    problem = _check_newest_good(catalog, seen, facts, doomed) if doomed else None
    doomed = doomed if problem is None else []
    replaced = _replaced(catalog, seen, [f.commit for f in facts if f.commit not in doomed], leased)
    gone: tuple[CommitId, ...] = ()
    freed = 0
    failed = _failed(seen, given_up, incarnation)
    if not dry_run and (doomed or replaced or failed):
        gone, freed = _bury_all(tier, doomed, replaced, failed, incarnation, seen, observer, clock)
        seen, held = catalog.snapshot(), observer.look(tier)
    due = belief.debris(seen.listing, own_incarnation=incarnation, now_s=clock.wall(), grace_s=grace_s)
    stones = [commit for commit in due if seen.listing.attempts[commit].tombstones]
    deleted, size = _delete_all(tier, seen, stones, incarnation, held, dry_run=dry_run)
    useless = held.useless(set(seen.listing.attempts) - set(deleted))
    files = [] if dry_run else leases.remove_useless(tier, useless)
    if not dry_run:
        leftovers.remove_empty_steps(tier, seen)
    return Swept(
        uncommitted=tuple(sorted({*doomed, *replaced})),
        deleted=gone + deleted,
        freed_bytes=freed + size,
        files=tuple(files),
        problem=problem,
    )


def _acknowledged(
    views: Iterable[CommitView], incarnation: int, acknowledged: Collection[CommitId] | None
) -> list[CommitView]:
    """Leave out those of the own incarnation that nobody was told of."""
    if acknowledged is None:
        return list(views)
    return [view for view in views if view.commit.incarnation < incarnation or view.commit in acknowledged]


def _bury_all(
    tier: Tier,
    doomed: Iterable[CommitId],
    replaced: dict[CommitId, CommitId],
    failed: Iterable[CommitId],
    incarnation: int,
    seen: Snapshot,
    observer: Observer,
    clock: Clock,
) -> tuple[tuple[CommitId, ...], int]:
    """Un-commit what the rule does not name, what a newer attempt has replaced, and what was given up; as `take_away`."""
    gone: tuple[CommitId, ...] = ()
    freed = 0
    for commit in doomed:
        taken, size = take_away(tier, commit, incarnation, "retention", seen, observer, clock)
        gone, freed = gone + taken, freed + size
    for commit, by in replaced.items():
        tier.sync_tree(paths.checkpoint_dir(by))  # seen is not durable: a power cut must not take both
        _bury(tier, commit, incarnation, "a newer attempt at the step has replaced it", clock)
    for commit in failed:
        _bury(tier, commit, incarnation, "it was given up", clock)
    return gone, freed


def _replaced(
    catalog: Catalog, seen: Snapshot, newest: Iterable[CommitId], leased: Collection[CommitId]
) -> dict[CommitId, CommitId]:
    """Return the attempts that a newer one of their step hides, and by which: one of `newest`, found whole."""
    by_step = {commit.step: commit for commit in newest}
    hidden: dict[CommitId, list[CommitId]] = {}
    for commit in belief.shadowed(seen.listing):
        if commit.step in by_step and commit not in leased:
            hidden.setdefault(by_step[commit.step], []).append(commit)
    whole = [by for by in hidden if by not in seen.quarantined and _what_is_wrong(catalog, seen, by) is None]
    return {commit: by for by in sorted(whole) for commit in sorted(hidden[by])}


def _failed(seen: Snapshot, given_up: Collection[CommitId], incarnation: int) -> list[CommitId]:
    """Attempts of the own incarnation that were given up, are still there, and have no manifest."""
    there = seen.listing.attempts
    own = (commit for commit in given_up if commit.incarnation == incarnation and commit in there)
    return sorted(commit for commit in own if not there[commit].has_manifest and not there[commit].tombstones)


def sweep(
    tier: Tier,
    *,
    incarnation: int,
    live: Collection[CommitId] | None = None,
    grace_s: float = 0.0,
    set_aside: bool = False,
    plans_in_use: Collection[str] | None = None,
    observer: Observer | None = None,
    ignore_leases: bool = False,
    dry_run: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Swept:
    """Take away debris: dead attempts, un-committed checkpoints past their grace time, our own stale temporaries.

    Args:
        tier: Where the run directory is.
        incarnation: Who does it; only the newest may.
        live: Attempts of this incarnation that are in flight. None: not known; then no uncommitted attempt of this
            incarnation goes.
        grace_s: See `retire`.
        set_aside: Also whole checkpoints that a rollback set aside; else they stay, for whoever wants them back.
        plans_in_use: Digests of plans that will be used again without being stored again. None: not known; then no plan
            goes.
        observer: See `retire`.
        ignore_leases: No reader is alive: their leases hold nothing, and go.
        dry_run: Only say what would go.
        clock: Time.

    Raises:
        SupersededError: A newer incarnation owns the run.
        StorageError: The tier failed.
    """
    ledger.check_newest(tier, incarnation)
    catalog = Catalog(tier, clock=clock)
    seen = catalog.snapshot()
    due = belief.debris(
        seen.listing,
        own_incarnation=incarnation,
        live=live,
        now_s=clock.wall(),
        grace_s=grace_s,
        set_aside=set_aside,
    )
    held = (observer or Observer(clock)).look(tier)
    held = held.ended() if ignore_leases else held
    deleted, freed = _delete_all(tier, seen, due, incarnation, held, dry_run=dry_run)
    left = set(seen.listing.attempts) - set(deleted)
    useless = held.useless(left)
    forgotten = [view.path for view in useless]
    gone_plans = leftovers.unused_plans(catalog, seen, left, plans_in_use) if plans_in_use is not None else []
    orphans = [paths.quarantine(commit) for commit in seen.quarantined if commit not in left]
    temporaries: list[str] = []
    if not dry_run:
        for digest in gone_plans:
            tier.delete(paths.plan(digest))
        for path in orphans:
            tier.delete(path)
        forgotten = leases.remove_useless(tier, useless)
        temporaries = leftovers.sweep_temporaries(tier, left)
        leftovers.remove_empty_steps(tier, seen)
    files = (*orphans, *forgotten, *temporaries)
    return Swept(deleted=deleted, freed_bytes=freed, plans=tuple(gone_plans), files=files)


def discard(tier: Tier, commit: CommitId) -> None:
    """Delete what an attempt that was given up has written; refuses one that is committed.

    Raises:
        IntegrityError: It has a manifest.
        StorageError: The tier failed.
    """
    directory = paths.checkpoint_dir(commit)
    if any(entry.name == paths.MANIFEST for entry in tier.list(directory)):
        raise IntegrityError("the attempt is committed and is not discarded", path=directory, step=commit.step)
    tier.delete_tree(directory)


def make_room(
    tier: Tier,
    needed_bytes: int,
    *,
    keep: Keep,
    incarnation: int,
    live: Collection[CommitId] | None = None,
    leased: Collection[CommitId] = (),
    observer: Observer | None = None,
    given_up: Collection[CommitId] = (),
    clock: Clock = SYSTEM_CLOCK,
) -> Room:
    """Free space for a save that does not fit.

    First debris goes, and what was given up or un-committed, its grace time notwithstanding; then, oldest first and only as far as
    needed, what the keep rule would let go once the new save is committed. The newest good checkpoint always stays, and
    so do pinned ones, and those that somebody reads.

    Args:
        tier: Where the run directory is.
        needed_bytes: What must be free; more than the tier has frees all that may go.
        keep: The rule.
        incarnation: Who does it; only the newest may.
        live: See `sweep`; the attempt that needs the room is among them.
        leased: See `retire`.
        observer: See `retire`.
        given_up: See `retire`.
        clock: Time.

    Raises:
        SupersededError: A newer incarnation owns the run.
        StorageError: The tier failed.
    """
    ledger.check_newest(tier, incarnation)
    if _fits(tier, needed_bytes):
        return Room(needed_bytes=needed_bytes, free_bytes=tier.free_bytes(), swept=Swept())
    failed, freed = _delete_given_up(tier, given_up, incarnation, clock)
    observer = observer or Observer(clock)
    swept = sweep(tier, incarnation=incarnation, live=live, grace_s=0.0, set_aside=True, observer=observer, clock=clock)
    catalog = Catalog(tier, clock=clock)
    seen = catalog.snapshot()
    leased = {*leased, *observer.look(tier).held(seen.listing.attempts)}
    facts = facts_of(catalog.commits(seen), leased=leased)
    coming = CommitFacts(
        commit=CommitId(max((f.commit.step for f in facts), default=0) + 1, incarnation, 0), created_s=clock.wall()
    )
    doomed = [commit for commit in retention.to_delete([*facts, coming], keep) if commit != _newest_good(facts)]
    problem = _check_newest_good(catalog, seen, facts, doomed) if doomed else None
    uncommitted: list[CommitId] = []
    deleted, freed = [*failed, *swept.deleted], freed + swept.freed_bytes
    for commit in doomed if problem is None else ():
        if _fits(tier, needed_bytes):
            break
        for buried in _uncommit_for_room(tier, commit, incarnation, seen, clock):
            gone, size = _delete_all(tier, seen, [buried], incarnation, observer.look(tier), dry_run=False)
            deleted.extend(gone)
            freed += size
        uncommitted.append(commit)
    return Room(
        needed_bytes=needed_bytes,
        free_bytes=tier.free_bytes(),
        swept=Swept(
            uncommitted=tuple(uncommitted),
            deleted=tuple(deleted),
            freed_bytes=freed,
            files=swept.files,
            problem=problem,
        ),
    )


def _delete_given_up(
    tier: Tier, given_up: Collection[CommitId], incarnation: int, clock: Clock
) -> tuple[tuple[CommitId, ...], int]:
    """Delete attempts that were given up without waiting; a tombstone comes first, where there is room for one."""
    seen = Catalog(tier, clock=clock).snapshot()
    failed = _failed(seen, given_up, incarnation)
    for commit in failed:
        try:
            _bury(tier, commit, incarnation, "it was given up", clock)
        except StorageFullError:
            break  # a manifest that comes late cannot be written either
    return _delete_all(tier, seen, failed, incarnation, NO_LEASES, dry_run=False)  # nobody reads what has no manifest


def delete_bytes(
    tier: Tier, commits: Iterable[CommitId], *, incarnation: int, observer: Observer | None
) -> tuple[tuple[CommitId, ...], int]:
    """Delete the bytes of un-committed checkpoints at once, as long as no newer incarnation appears.

    Args:
        tier: Where the run directory is.
        commits: Which.
        incarnation: Who does it; only the newest may.
        observer: See `retire`; but None: also under the hands of readers.

    Returns:
        What went, and how many bytes that freed.

    Raises:
        SupersededError: A newer incarnation owns the run; what was left may be listed by it.
    """
    seen = Catalog(tier).snapshot()
    believed = set(belief.believed(seen.listing)) | set(belief.shadowed(seen.listing))
    doomed = [commit for commit in commits if commit in seen.listing.attempts and commit not in believed]
    held = NO_LEASES if observer is None else observer.look(tier)
    return _delete_all(tier, seen, doomed, incarnation, held, dry_run=False)


def _uncommit(
    tier: Tier, commit: CommitId, incarnation: int, reason: str, seen: Snapshot, clock: Clock
) -> list[CommitId]:
    ledger.check_newest(tier, incarnation)
    return ledger.uncommit(tier, commit.step, incarnation=incarnation, reason=reason, snapshot=seen, clock=clock)


def _bury(tier: Tier, commit: CommitId, incarnation: int, reason: str, clock: Clock) -> None:
    ledger.check_newest(tier, incarnation)
    ledger.bury(tier, commit, incarnation=incarnation, reason=reason, clock=clock)


def take_away(
    tier: Tier,
    commit: CommitId,
    incarnation: int,
    reason: str,
    seen: Snapshot,
    observer: Observer | None,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[tuple[CommitId, ...], int]:
    """Un-commit a step; where storage is so full that not even a tombstone fits, delete it at once.

    `observer` as for `delete_bytes`; where a tombstone does not fit, no new lease does.

    Returns:
        What was deleted, and how many bytes that freed.
    """
    try:
        _uncommit(tier, commit, incarnation, reason, seen, clock)
    except StorageFullError:
        held = NO_LEASES if observer is None else observer.look(tier)
        return _delete_all(tier, seen, _with_manifest(seen, commit.step), incarnation, held, dry_run=False)
    return (), 0


def _with_manifest(seen: Snapshot, step: int) -> list[CommitId]:
    there = seen.listing.attempts.items()
    return sorted(commit for commit, view in there if commit.step == step and view.has_manifest)


def _uncommit_for_room(tier: Tier, commit: CommitId, incarnation: int, seen: Snapshot, clock: Clock) -> list[CommitId]:
    """As `_uncommit`. Where not even a tombstone fits, deleting the manifests is what un-commits.

    A newer incarnation that could list the checkpoint meanwhile is not to be feared then: its file would not fit.
    """
    try:
        return _uncommit(tier, commit, incarnation, "room for a save", seen, clock)
    except StorageFullError:
        return _with_manifest(seen, commit.step)


def _delete_all(
    tier: Tier, seen: Snapshot, commits: Iterable[CommitId], incarnation: int, held: Leases, *, dry_run: bool
) -> tuple[tuple[CommitId, ...], int]:
    """Delete attempts, except those that leases hold which were seen after the attempts were un-committed."""
    gone, freed = [], 0
    newest = max((commit.step for commit in belief.believed(seen.listing)), default=-1)
    for commit in commits:
        if held.on(commit) is not None:
            continue
        if not dry_run:
            ledger.check_newest(tier, incarnation)
            # The manifest first, durably: a deletion that is cut short must not leave something that is believed.
            tier.delete(f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}")
            tier.delete_tree(paths.checkpoint_dir(commit))
            if commit.step < newest:  # steps only grow within an incarnation: nobody makes an attempt there now
                tier.delete_if_empty(paths.step_dir(commit.step))
        gone.append(commit)
        freed += sum(seen.files.get(commit, {}).values())
    return tuple(gone), freed


def _newest_good(facts: Iterable[CommitFacts]) -> CommitId | None:
    return max((f.commit for f in facts if not f.quarantined), default=None)


def _check_newest_good(
    catalog: Catalog, seen: Snapshot, facts: Iterable[CommitFacts], doomed: Collection[CommitId]
) -> CheckpointError | None:
    """Say what is wrong with the newest checkpoint that is to stay; deleting others on its account would be rash."""
    newest = _newest_good(f for f in facts if f.commit not in doomed)
    if newest is None:
        return IntegrityError("no checkpoint that stays is free of a quarantine record")
    return _what_is_wrong(catalog, seen, newest)


def _what_is_wrong(catalog: Catalog, seen: Snapshot, commit: CommitId) -> CheckpointError | None:
    """Verify the documents of a checkpoint, and that its files are there with their sizes."""
    try:
        checkpoint = catalog.load(commit, run_id=seen.run.run_id if seen.run is not None else None)
        catalog.check_files(checkpoint)
    except IntegrityError as exc:
        return exc
    return None


def _fits(tier: Tier, needed_bytes: int) -> bool:
    free = tier.free_bytes()
    return free is not None and free >= needed_bytes
