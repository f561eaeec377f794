"""Writes the small files on which belief rests: run, incarnations, manifests, tombstones, pins, quarantine records.

Invariants: every write is one atomic, durable put; a process that dies between two of them leaves a run directory that
is whole. An incarnation and a manifest are created exclusively and never replaced. Whoever writes as an incarnation
finds out, before and after, whether a newer one has taken over. Deleting bytes is not done here
(`safehold.pipeline.sweep`).

Must not live here: decisions (`safehold.policy.belief`), reading of checkpoints (`safehold.pipeline.catalog`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import msgspec

from safehold._version import __version__
from safehold.clock import SYSTEM_CLOCK, Clock, new_token
from safehold.errors import (
    ConfigurationError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    StorageError,
    SupersededError,
    TornFileError,
)
from safehold.format import document, paths, records
from safehold.format.records import Incarnation, Manifest, Pin, Quarantine, RunInfo, Tombstone
from safehold.pipeline import agreement
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import belief
from safehold.policy.belief import Listing
from safehold.tiers.base import Tier
from safehold.types import CommitId

Accept = Callable[[Listing], Iterable[CommitId]]
"""Says which commits of earlier incarnations a new one accepts; called again if somebody else took the number."""

OPEN_ATTEMPTS = 64
"""So many others may take the number between our looking and our creating before we give up."""

# What may lie in an otherwise empty directory: file systems and desktops put it there.
_HARMLESS = frozenset({"lost+found", ".snapshot", ".DS_Store", ".Trash-0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedIncarnation:
    """An incarnation that this process holds.

    Attributes:
        record: What its file says.
        accepted: The commits it believes, newest first: those that its file lists, less `withdrawn`.
        withdrawn: Accepted commits that an older incarnation had begun to delete meanwhile; they are tombstoned again.
    """

    record: Incarnation
    accepted: tuple[CommitId, ...]
    withdrawn: tuple[CommitId, ...]


def accept_all(*, up_to_step: int | None = None, exclude: Collection[CommitId] = ()) -> Accept:
    """Return the rule that accepts every believed commit.

    Args:
        up_to_step: Roll back: none above this step.
        exclude: Not these.
    """
    return lambda listing: belief.accepted_for_new(listing, up_to_step=up_to_step, exclude=exclude)


def ensure_run(tier: Tier, *, clock: Clock = SYSTEM_CLOCK, library: str = __version__) -> RunInfo:
    """Return the identity of the run in this directory; make it a run directory if it is empty or absent.

    Raises:
        ConfigurationError: The directory holds something else.
        FormatVersionError: A newer library made this run.
        StorageError: The tier cannot be written.
    """
    run = snapshots.identify(tier)
    if run is not None:
        if all(entry.name != paths.RUN_JSON for entry in tier.list("")):
            _put_new(tier, paths.RUN_JSON, records.encode_run(run))
        return run
    refuse_foreign(tier)
    run = RunInfo(run_id=new_token(), created_s=clock.wall(), library=library)
    _put_new(tier, paths.RUN_JSON, records.encode_run(run))
    found = snapshots.identify(tier)
    return found if found is not None else run


def refuse_foreign(tier: Tier) -> None:
    """Refuse a directory that is no run directory and not empty.

    Raises:
        ConfigurationError: It is.
    """
    if paths.RUN_JSON not in {entry.name for entry in tier.list("")} and not tier.list(paths.INCARNATIONS):
        check_empty(tier)


def check_empty(tier: Tier) -> None:
    """Refuse to make a run directory of one that holds something else.

    Raises:
        ConfigurationError: It does.
    """
    foreign = sorted({entry.name for entry in tier.list("")} - _HARMLESS - {paths.RUN_JSON})
    if foreign:
        shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise ConfigurationError(
            f"the directory is not empty and is no run directory: it holds {shown}",
            path=tier.url,
            hint=f"use a directory that is new, empty, or has a {paths.RUN_JSON}; for example a subdirectory",
        )


def open_incarnation(
    tier: Tier,
    token: str,
    accept: Accept | None = None,
    reason: str = "start",
    *,
    clock: Clock = SYSTEM_CLOCK,
    library: str = __version__,
) -> OpenedIncarnation:
    """Create the next incarnation, exclusively, and with it `run.json` on first use.

    When somebody else takes the number first, everything is looked at again. The same token gets the same incarnation
    again: a call whose answer was lost can be repeated. Afterwards everything is read once more: what an older
    incarnation committed meanwhile is taken in, by one more incarnation; what it un-committed meanwhile is not kept,
    since its bytes may be going already, but un-committed by this one too.

    Args:
        tier: Where the run directory is.
        token: Random word of this start of the job.
        accept: Which earlier commits to accept; default: all that are believed.
        reason: Why, for people.
        clock: Time, for the records.
        library: Version, for `run.json`.

    Returns:
        The incarnation. It is durable.

    Raises:
        ConfigurationError: The directory is no run directory and not empty.
        StorageError: The tier cannot be written, or others take every number.
        FormatVersionError: A newer library made this run.
    """
    run = ensure_run(tier, clock=clock, library=library)
    rule = accept or accept_all()
    for _ in range(OPEN_ATTEMPTS):
        seen = snapshots.take(tier)
        mine = [record for record in seen.listing.incarnations.values() if token and record.token == token]
        if mine:
            record = max(mine, key=lambda found: found.number)
            tier.sync_tree(paths.INCARNATIONS)  # whoever made it may have died before its entry was durable
        else:
            record = Incarnation(
                run_id=run.run_id,
                number=seen.newest + 1,
                token=token,
                accepted=tuple(sorted(set(rule(seen.listing)))),
                created_s=clock.wall(),
                reason=reason,
            )
            try:
                tier.put(paths.incarnation(record.number), records.encode_incarnation(record), exclusive=True)
            except FileExistsError:
                continue
        final, again = _take_in_late(tier, record, rule)
        return _read_again(tier, final, again, clock, first=record.number)
    raise _too_busy(tier)


def _take_in_late(tier: Tier, record: Incarnation, rule: Accept) -> tuple[Incarnation, Listing]:
    """Accept what an older incarnation committed after we had looked and before our file was there.

    Returns what is accepted now, and what was seen after its file was there.

    That one saw nobody newer and told its trainers that the checkpoint is durable. Commits that come after our file
    was there are told that they do not count, and look at our list before; so it does no harm to accept one of them.
    """
    first = record.number
    for _ in range(OPEN_ATTEMPTS):
        seen = snapshots.take(tier)
        # Somebody newer owns the run, and has looked at all this for itself; or this one has been at work already.
        begun = any(commit.incarnation == record.number for commit in seen.listing.attempts)
        if seen.newest != record.number or begun:
            return record, seen.listing
        older = {number: found for number, found in seen.listing.incarnations.items() if number < first}
        wanted = set(rule(replace(seen.listing, incarnations=older)))
        if wanted <= set(record.accepted):
            return record, seen.listing
        again = msgspec.structs.replace(record, number=seen.newest + 1, accepted=tuple(sorted(wanted)))
        try:
            tier.put(paths.incarnation(again.number), records.encode_incarnation(again), exclusive=True)
        except FileExistsError:
            return record, seen.listing
        record = again
    raise _too_busy(tier)


def _too_busy(tier: Tier) -> StorageError:
    return StorageError(
        f"others took the next incarnation {OPEN_ATTEMPTS} times in a row",
        path=tier.url,
        tier=tier.name,
        hint="do several jobs start in this run directory, again and again?",
    )


def newer_incarnation(tier: Tier, incarnation: int) -> int | None:
    """Return the newest incarnation's number if it is newer than `incarnation`, else None. One list."""
    newest = snapshots.newest_incarnation(tier)
    return newest if newest > incarnation else None


def check_newest(tier: Tier, incarnation: int) -> None:
    """Refuse if a newer incarnation owns the run.

    Raises:
        SupersededError: One does.
    """
    newer = newer_incarnation(tier, incarnation)
    if newer is not None:
        raise SupersededError(
            f"incarnation {newer} owns the run now, this is {incarnation}",
            path=tier.url,
            tier=tier.name,
            hint="another job was started in this run directory; end this one",
        )


def publish(tier: Tier, commit: CommitId, manifest: bytes) -> None:
    """Commit: make the manifest visible and durable. Repeating it with the same bytes is harmless.

    Data, directory entries, node records and the plan must be durable before.

    Args:
        tier: Where the run directory is.
        commit: The checkpoint; written by its own incarnation.
        manifest: The manifest's bytes.

    Raises:
        SupersededError: A newer incarnation owns the run and does not list this checkpoint; nobody will believe it.
        ManifestError: The bytes do not verify or name another checkpoint; the plan that they name is not there whole
            (`path` is the plan's); or another manifest is there already.
        StorageError: The tier failed; whether the manifest is there is not known, and repeating the call tells.
    """
    path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
    decoded = records.decode_manifest(manifest, path=path)
    if decoded.commit != commit:
        raise ManifestError("is the manifest of another checkpoint", path=path, step=commit.step)
    check_newest(tier, commit.incarnation)
    _check_plan(tier, decoded)
    _put_new(tier, path, manifest, step=commit.step)
    newer = newer_incarnation(tier, commit.incarnation)
    if newer is not None and not lists(tier, newer, commit):
        raise SupersededError(
            f"incarnation {newer} took over while step {commit.step} was being committed, and does not list it",
            step=commit.step,
            path=path,
            tier=tier.name,
        )


def _check_plan(tier: Tier, manifest: Manifest) -> None:
    """Read the plan that a manifest names: it may have been stored long ago, for another checkpoint."""
    path, step = paths.plan(manifest.plan_digest), manifest.commit.step
    try:
        data = tier.get(path, limit_bytes=manifest.plan_size_bytes)
        agreement.check_bytes(
            data, manifest.plan_size_bytes, manifest.plan_digest, path=path, step=step, what="the plan"
        )
    except FileNotFoundError as exc:
        raise ManifestError("the plan that the manifest names is missing", path=path, step=step) from exc
    except IntegrityError as exc:
        raise ManifestError(
            f"the plan that the manifest names is damaged: {exc.message}", path=path, step=step
        ) from exc


def withdraw(tier: Tier, commit: CommitId, *, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Make sure that a checkpoint whose publishing failed does not count; it must not be published again.

    For use when `publish` has raised, not while it may still be running. A manifest that became visible all the same
    is un-committed by a tombstone of its own incarnation; its bytes go as those of any un-committed checkpoint.

    Returns:
        True: it is certain that nobody will believe the checkpoint. False: it may be believed; if it is, it is whole.
    """
    try:
        if all(entry.name != paths.MANIFEST for entry in tier.list(paths.checkpoint_dir(commit))):
            return True
        bury(tier, commit, incarnation=commit.incarnation, reason="its commit failed half way", clock=clock)
        newer = newer_incarnation(tier, commit.incarnation)
        return newer is None or not lists(tier, newer, commit)
    except StorageError:
        return False


def put_plan(tier: Tier, digest: str, data: bytes) -> None:
    """Store a plan under its digest; durable when it returns. One that is there and damaged is replaced.

    Raises:
        ManifestError: The bytes do not have the digest.
        StorageError: The tier failed.
    """
    path = paths.plan(digest)
    if document.digest(data) != digest:
        raise ManifestError("the plan's bytes do not have the digest", path=path)
    try:
        tier.put(path, data, exclusive=True)
        return
    except FileExistsError:
        pass
    try:
        whole = _holds(tier, path, data)
    except StorageError:
        whole = False  # what cannot be read is as good as damaged
    if whole:
        tier.sync_tree(paths.PLANS)  # whoever made it may have died before its entry was durable
    else:
        tier.put(path, data)


def uncommit(
    tier: Tier,
    step: int,
    *,
    incarnation: int,
    reason: str,
    snapshot: Snapshot | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> list[CommitId]:
    """Un-commit a step by tombstones: from then on it is not believed. No byte is deleted.

    All attempts at the step that have a manifest get one, the one that counts last, so that no older attempt comes to
    light, at no time.

    Args:
        tier: Where the run directory is.
        step: The step.
        incarnation: Who decides; void where a newer incarnation lists the checkpoint.
        reason: Why, for people.
        snapshot: What was seen; None: looked at now.
        clock: Time, for the record.

    Returns:
        The commits that were un-committed.
    """
    seen = snapshot or snapshots.take(tier)
    done = []
    for commit in sorted(commit for commit, view in seen.listing.attempts.items() if view.has_manifest):
        if commit.step != step:
            continue
        bury(tier, commit, incarnation=incarnation, reason=reason, clock=clock)
        done.append(commit)
    return done


def bury(tier: Tier, commit: CommitId, *, incarnation: int, reason: str, clock: Clock = SYSTEM_CLOCK) -> None:
    """Un-commit one attempt by a tombstone, whether it has a manifest or may still get one. No byte is deleted.

    For attempts that do not count: those that failed, and those that a newer one of their step has replaced (which must be
    durable itself). Whoever takes away a step uses `uncommit`.

    Args:
        tier: Where the run directory is.
        commit: The attempt.
        incarnation: Who decides; void where a newer incarnation lists the checkpoint.
        reason: Why, for people.
        clock: Time, for the record.
    """
    stone = Tombstone(commit=commit, incarnation=incarnation, created_s=clock.wall(), reason=reason)
    path = f"{paths.checkpoint_dir(commit)}/{paths.tombstone(incarnation)}"
    try:
        tier.put(path, records.encode_tombstone(stone), exclusive=True)
    except FileExistsError:
        tier.sync_tree(paths.checkpoint_dir(commit))


def put_pin(tier: Tier, step: int, *, note: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
    """Pin a step: retention leaves it alone from now on."""
    tier.put(paths.pin(step), records.encode_pin(Pin(step=step, created_s=clock.wall(), note=note)))


def remove_pin(tier: Tier, step: int) -> None:
    """Unpin a step; fine if it is not pinned."""
    tier.delete(paths.pin(step))


def put_quarantine(
    tier: Tier, commit: CommitId, *, incarnation: int, reason: str, path: str = "", clock: Clock = SYSTEM_CLOCK
) -> None:
    """Leave word that a checkpoint did not verify; advisory: others are tried first.

    Args:
        tier: Where the run directory is.
        commit: The checkpoint.
        incarnation: Who says so.
        reason: What was found.
        path: The file that did not verify.
        clock: Time, for the record.
    """
    record = Quarantine(commit=commit, incarnation=incarnation, created_s=clock.wall(), reason=reason, path=path)
    tier.put(paths.quarantine(commit), records.encode_quarantine(record))


def clear_quarantine(tier: Tier, commit: CommitId) -> None:
    """Remove the word against a checkpoint; fine if there is none."""
    tier.delete(paths.quarantine(commit))


def _read_again(tier: Tier, record: Incarnation, seen: Listing, clock: Clock, *, first: int) -> OpenedIncarnation:
    """Un-commit for good what an older incarnation un-committed without knowing of this one, whose first number is given."""
    accepted, withdrawn = [], []
    for commit in sorted(record.accepted, reverse=True):
        view = seen.attempts.get(commit)
        if view is None:
            continue
        older = [stone for stone in view.tombstones if stone.incarnation < record.number]
        raced = [stone for stone in older if not _was_void(seen, stone, commit, first)]
        if raced:
            reason = f"was being deleted by incarnation {raced[0].incarnation} when this one was opened"
            bury(tier, commit, incarnation=record.number, reason=reason, clock=clock)
            withdrawn.append(commit)
        elif view.has_manifest and len(older) == len(view.tombstones):
            accepted.append(commit)
    return OpenedIncarnation(record=record, accepted=tuple(accepted), withdrawn=tuple(withdrawn))


def _was_void(seen: Listing, stone: Tombstone, commit: CommitId, before: int) -> bool:
    """Whether the tombstone had no force already before incarnation `before`: nothing is being deleted then."""
    earlier = {number: found for number, found in seen.incarnations.items() if number < before}
    return belief.is_void(replace(seen, incarnations=earlier), stone, commit)


def lists(tier: Tier, incarnation: int, commit: CommitId) -> bool:
    """Whether an incarnation's file is whole and lists a checkpoint."""
    path = paths.incarnation(incarnation)
    try:
        data = tier.get(path, limit_bytes=document.max_file_bytes("incarnation"))
        record = records.decode_incarnation(data, path=path)
    except FormatVersionError:
        raise
    except (FileNotFoundError, IntegrityError):
        return False
    return commit in record.accepted


def _put_new(tier: Tier, path: str, data: bytes, *, step: int | None = None) -> None:
    """Create a file that is never replaced; one with the same bytes may be there already."""
    try:
        tier.put(path, data, exclusive=True)
    except FileExistsError as exc:
        if path == paths.RUN_JSON:
            return
        if not _holds(tier, path, data):
            text = "another one is there already and is never replaced"
            raise ManifestError(text, path=path, step=step) from exc
        tier.sync_tree(path.rpartition("/")[0])  # the call that made it may have failed before its entry was durable


def _holds(tier: Tier, path: str, data: bytes) -> bool:
    """Say whether a file has exactly these bytes."""
    try:
        return tier.get(path, limit_bytes=len(data)) == data
    except (TornFileError, FileNotFoundError):
        return False
