"""Copies committed checkpoints from one place to another, and back: the copy is a run directory under the same names and bytes.

Invariants: the manifest is written last, when everything that it names was verified on its way and is durable, and only while
the source still believes the checkpoint and the second place will. A manifest, an incarnation or `run.json` is never replaced
by another: what is there and differs is refused by name. Whatever stops a replication, the second place has the checkpoint
whole or not at all, and what was complete is not sent again. Nothing is written at the source.

Must not live here: rules (`safehold.policy.replication`), the transfer itself (`safehold.pipeline.copying`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock, new_token
from safehold.errors import (
    CheckpointError,
    CommitError,
    ConfigurationError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    StepNotFoundError,
    StorageError,
    StorageFullError,
    SupersededError,
    TornFileError,
)
from safehold.format import document, paths, records
from safehold.format.names import numbered
from safehold.pipeline import agreement, ledger, replica_claim
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Catalog, Checkpoint
from safehold.pipeline.copying import Copier
from safehold.pipeline.replica_claim import Claim
from safehold.pipeline.snapshot import Snapshot
from safehold.pipeline.trials import CopySettings, Progress, Trials
from safehold.policy import belief, replication
from safehold.policy.replication import DataFile
from safehold.tiers.base import Tier
from safehold.types import CommitId

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """What was done for one checkpoint.

    Attributes:
        commit: Which.
        was_there: It was complete at the second place already; nothing was read.
        sent_bytes: Bytes of packs and objects that were sent.
        kept_bytes: Bytes of them that an earlier attempt had left there, and that verified.
        seconds: How long it took.
    """

    commit: CommitId
    was_there: bool
    sent_bytes: int
    kept_bytes: int
    seconds: float


def replicate(
    source: Tier,
    target: Tier,
    commit: CommitId,
    *,
    settings: CopySettings | None = None,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
    restrict: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random | None = None,
    patience_s: float = 1.0,
) -> Replicated:
    """Copy one checkpoint; durable at the second place when it returns.

    A copy that is there and lacks a file, or was quarantined there, is read and mended.

    Args:
        source: The place that has it.
        target: The second place; a directory that is new, empty, or belongs to the same run.
        commit: The checkpoint; the source must believe it.
        settings: How to copy.
        progress: Told how far it is, in bytes.
        cancelled: Set by anyone to stop it; nothing is committed then, and what is finished stays for the next time.
        restrict: Refuse where the second place would believe less than before because of the source's incarnations: for
            fetching from a copy into the run itself.
        clock: Time.
        rng: Spreads retries.
        patience_s: See `Catalog`.

    Raises:
        StepNotFoundError: The source does not believe the checkpoint.
        ConfigurationError: The second place is another run's, or not empty and no run; or another process copies this now.
        IntegrityError: The source is damaged (the file is named), or the two places contradict each other.
        SupersededError: A newer incarnation at the second place does not list the checkpoint, or another replication took over.
        CommitError: It was un-committed at the source meanwhile.
        SkippedError: It was cancelled.
        StorageError: A place failed, for longer than the retries last.
    """
    if source.url == target.url:
        raise ConfigurationError("a run cannot be copied onto itself", path=target.url, step=commit.step)
    trials = Trials(settings or CopySettings(), cancelled, progress, clock=clock, rng=rng)
    return _Replication(source, target, commit, trials, restrict=restrict, clock=clock, patience_s=patience_s).run()


def is_complete(target: Tier, commit: CommitId, seen: Snapshot, manifest: bytes) -> bool:
    """Whether a place has a checkpoint as the source has it: the same manifest, documents that verify, all files with their sizes.

    Args:
        target: The place.
        commit: The checkpoint.
        seen: What was seen there.
        manifest: The manifest's bytes at the source.

    Raises:
        ManifestError: It has another manifest that verifies.
    """
    view = seen.listing.attempts.get(commit)
    if view is None or not view.has_manifest or replication.holding(seen.listing, commit):
        return False
    catalog = Catalog(target, patience_s=0.0)
    run_id = seen.run.run_id if seen.run else None
    if not same_manifest(target, commit, manifest):
        return False
    try:
        catalog.check_files(catalog.load(commit, manifest_bytes=manifest, run_id=run_id))
    except FormatVersionError:
        raise
    except IntegrityError:
        return False
    return True


def same_manifest(target: Tier, commit: CommitId, manifest: bytes) -> bool:
    """Whether a place has this manifest; False also where it has none, or a damaged one, which makes no checkpoint.

    Raises:
        ManifestError: It has another one that verifies.
        FormatVersionError: It has one that a newer library wrote.
    """
    path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
    try:
        found = target.get(path, limit_bytes=document.max_file_bytes("manifest"))
        if found == manifest:
            return True
        records.decode_manifest(found, path=path)
    except FormatVersionError:
        raise
    except (FileNotFoundError, IntegrityError):
        return False
    raise ManifestError(
        "another manifest of this checkpoint is there already and is never replaced",
        path=path,
        step=commit.step,
        tier=target.name,
        hint="the two places hold different checkpoints of one name; use another directory",
    )


class _Replication:
    """One checkpoint on its way."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        commit: CommitId,
        trials: Trials,
        *,
        restrict: bool,
        clock: Clock,
        patience_s: float,
    ) -> None:
        self._source, self._target, self._commit = source, target, commit
        self._trials = trials
        self._restrict = restrict
        self._clock = clock
        self._catalog = Catalog(source, clock=clock, patience_s=patience_s)
        self._directory = paths.checkpoint_dir(commit)

    def run(self) -> Replicated:
        began = time.monotonic()
        here = self._look_here()
        checkpoint = self._checkpoint()
        there = self._look_there(here)
        complete = self._again(lambda: is_complete(self._target, self._commit, there, checkpoint.manifest_bytes))
        if complete and self._commit not in there.quarantined:
            self._push_incarnations(here, there)
            self._remove_old_claim()
            return self._result(began, was_there=True)
        self._put_run()  # before the claim: a directory with nothing but a claim is no run directory
        token = new_token()
        claim = self._again(lambda: replica_claim.take(self._target, self._commit, token, clock=self._clock))
        try:
            self._copy(checkpoint, here, there, claim)
        except BaseException:
            claim.leave()
            raise
        try:
            self._again(claim.remove)
        except StorageError:
            claim.leave()  # it is committed; the next one removes the record
        return self._result(began)

    def _result(self, began: float, *, was_there: bool = False) -> Replicated:
        sent, kept, took_s = self._trials.sent_bytes, self._trials.kept_bytes, time.monotonic() - began
        return Replicated(commit=self._commit, was_there=was_there, sent_bytes=sent, kept_bytes=kept, seconds=took_s)

    # Looking.

    def _look_here(self) -> Snapshot:
        seen = self._again(lambda: snapshots.take(self._source))
        if self._commit not in belief.believed(seen.listing):
            raise StepNotFoundError(
                "the source has no such checkpoint that counts",
                step=self._commit.step,
                path=self._source.url,
                tier=self._source.name,
                hint="'safehold ls RUN --all' lists what does not count, and why",
            )
        return seen

    def _checkpoint(self) -> Checkpoint:
        try:
            checkpoint = self._again(lambda: self._catalog.load(self._commit))
            self._again(lambda: self._catalog.check_files(checkpoint))
        except IntegrityError as exc:
            self._raise_first_cause(exc)
        return checkpoint

    def _look_there(self, here: Snapshot) -> Snapshot:
        """Look at the second place, and refuse before anything is written there what would have to be refused later."""
        assert here.run is not None
        found = self._again(lambda: snapshots.identify(self._target))
        if found is not None and found.run_id != here.run.run_id:
            raise ConfigurationError(
                f"this is the directory of another run ({found.run_id}), not of {here.run.run_id}",
                path=self._target.url,
                tier=self._target.name,
                hint="give each run a directory of its own there",
            )
        if found is None:
            self._again(lambda: ledger.check_empty(self._target))
        seen = self._again(lambda: snapshots.take(self._target))
        self._check_belief(here, seen)
        if self._restrict and (lost := replication.dropped(here.listing, seen.listing)):
            steps = numbered("step", sorted(commit.step for commit in lost), 8)
            raise ConfigurationError(
                f"the copy has a newer incarnation, by which {steps} would not count here any more",
                path=self._target.url,
                tier=self._target.name,
                hint="fetch into an empty directory",
            )
        return seen

    def _check_belief(self, here: Snapshot, there: Snapshot) -> None:
        number = replication.conflict(here.listing.incarnations, there.listing.incarnations)
        if number is not None:
            path = paths.incarnation(number)
            damaged = [str(p.message) for p in (*here.problems, *there.problems) if p.path == path]
            text = f"incarnation {number} is not the same here and there, and is never replaced"
            hint = "; ".join(damaged) or "two jobs went on from copies of one run; use another directory"
            raise ManifestError(text, path=path, tier=self._target.name, hint=hint)
        if not replication.would_count(here.listing, there.listing, self._commit):
            newest = max(there.listing.incarnations, default=0)
            raise SupersededError(
                f"incarnation {newest} of the second place does not list this checkpoint, so it would not count there",
                step=self._commit.step,
                path=self._target.url,
                tier=self._target.name,
                hint="a job was started there, or rolled back; use another directory",
            )

    # Writing.

    def _copy(self, checkpoint: Checkpoint, here: Snapshot, there: Snapshot, claim: Claim) -> None:
        files = replication.data_files(checkpoint.manifest, checkpoint.records)
        copier = Copier(
            self._source,
            self._target,
            dict(checkpoint.records),
            self._trials,
            finished=lambda file: self._again(lambda: claim.note([file.name])),
            may_abort=claim.holds,
        )
        self._trials.total_bytes = sum(file.size_bytes for file in files)
        for phase in replication.order(here.listing, there.listing):
            match phase:
                case "incarnations":
                    here, there = self._look_again(claim)
                    self._push_incarnations(here, there, always=True)
                case "plan":
                    self._put_plan(checkpoint)
                case "data":
                    try:
                        self._clear_deleted(here, there, claim)
                        self._data(checkpoint, copier, files, claim)
                    except (FileNotFoundError, IntegrityError) as exc:
                        self._raise_first_cause(exc)
                case "records":
                    self._put_records(checkpoint)
                case "manifest":
                    self._commit_there(checkpoint, claim)

    def _clear_deleted(self, here: Snapshot, there: Snapshot, claim: Claim) -> None:
        """Take away what was un-committed at the second place, tombstones included."""
        if replication.holding(replication.merged(here.listing, there.listing), self._commit):
            self._again(lambda: claim.forget(claim.finished))
            self._discard()

    def _data(self, checkpoint: Checkpoint, copier: Copier, files: list[DataFile], claim: Claim) -> None:
        """Send what is not there, or does not verify there."""
        sizes = {e.name: e.size_bytes for e in self._again(lambda: self._target.list(self._directory)) if not e.is_dir}
        packs = [file for file in files if file.pack is not None]
        committed = paths.MANIFEST in sizes
        # Names that nobody vouches for may have been written and not made durable: reading them would not tell.
        vouched = {file.name for file in packs} if committed else claim.finished
        there = [file for file in packs if file.name in vouched and sizes.get(file.name) == file.size_bytes]
        bad = {file.name for file in copier.damaged(there)}
        kept = {file.name for file in there} - bad
        todo = [file for file in packs if file.name not in kept]
        if committed:
            if todo:
                # The old copy cannot be used as it is. It may have what the source has lost, so it stays until that is known to
                # be whole.
                self._check_source(copier, todo)
            self._again(lambda: claim.note(kept))
            if todo or not self._again(lambda: same_manifest(self._target, self._commit, checkpoint.manifest_bytes)):
                self._again(lambda: self._target.delete(f"{self._directory}/{paths.MANIFEST}"))
        self._check_room(todo, sizes)
        self._again(lambda: claim.forget(file.name for file in todo))
        copier.copy([file for file in files if file.name not in kept])

    def _check_source(self, copier: Copier, files: list[DataFile]) -> None:
        bad = copier.damaged(files, at_source=True)
        if bad:
            text = "the file is damaged here as well as at the second place"
            hint = "'safehold verify' of both says what is left; nothing was changed"
            raise TornFileError(text, path=bad[0].path, step=self._commit.step, tier=self._source.name, hint=hint)

    def _check_room(self, todo: list[DataFile], sizes: dict[str, int]) -> None:
        needed = sum(file.size_bytes - min(sizes.get(file.name, 0), file.size_bytes) for file in todo)
        free = self._again(self._target.free_bytes)
        if free is not None and free < needed:
            raise StorageFullError(
                f"{needed} bytes are to be sent, and {free} are free",
                step=self._commit.step,
                path=self._target.url,
                tier=self._target.name,
                hint="free space there, or keep fewer (--keep); nothing was sent",
            )

    def _put_run(self) -> None:
        try:
            data = self._again(lambda: self._get(paths.RUN_JSON, "run"))
            records.decode_run(data)
        except (FileNotFoundError, IntegrityError):
            found = self._again(lambda: snapshots.identify(self._source))
            if found is None:
                raise
            data = records.encode_run(found)
        try:
            self._again(lambda: self._target.put(paths.RUN_JSON, data, exclusive=True))
        except FileExistsError:
            self._again(lambda: self._target.sync_tree(""))  # whoever made it may have died before its name was durable
        mine, found = records.decode_run(data), self._again(lambda: snapshots.identify(self._target))
        if found is None or found.run_id != mine.run_id:
            raise ConfigurationError("another run has taken this directory meanwhile", path=self._target.url)

    def _push_incarnations(self, here: Snapshot, there: Snapshot, *, always: bool = False) -> None:
        """Copy incarnation files that are not there; a place is not left without anything to believe unless `always`."""
        if not always and replication.order(here.listing, there.listing) == replication.LATE:
            return
        for number in sorted(here.listing.incarnations.keys() - there.listing.incarnations.keys()):
            path = paths.incarnation(number)
            try:
                data = self._again(lambda path=path: self._get(path, "incarnation"))  # type: ignore[misc]
            except FileNotFoundError:
                continue  # it is lost, and what it said is inferred there as it is here
            records.decode_incarnation(data, path=path)
            self._put_new(path, data, "another incarnation of this number is there")

    def _put_plan(self, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        data = self._again(lambda: self._get(paths.plan(manifest.plan_digest), "plan"))
        self._again(lambda: ledger.put_plan(self._target, manifest.plan_digest, data))

    def _put_records(self, checkpoint: Checkpoint) -> None:
        self._again(lambda: self._target.sync_tree(self._directory))
        for ref in checkpoint.manifest.nodes:
            path = f"{self._directory}/{paths.node_record(ref.node)}"
            data = self._again(lambda path=path: self._get(path, "node"))  # type: ignore[misc]
            what = f"the record of node {ref.node}"
            step = self._commit.step
            agreement.check_bytes(data, ref.size_bytes, ref.blake3, path=path, step=step, what=what)
            self._again(lambda path=path, data=data: self._target.put(path, data))  # type: ignore[misc]

    def _look_again(self, claim: Claim) -> tuple[Snapshot, Snapshot]:
        """See that the checkpoint still counts here, will count there, and that nobody has taken over."""
        here = self._again(lambda: snapshots.take(self._source))
        if self._commit not in belief.believed(here.listing):
            if claim.holds():
                self._discard()
                claim.remove()
            raise self._uncommitted()
        there = self._again(lambda: snapshots.take(self._target))
        self._check_belief(here, there)
        return here, there

    def _commit_there(self, checkpoint: Checkpoint, claim: Claim) -> None:
        here, there = self._look_again(claim)
        self._push_incarnations(here, there, always=True)
        self._again(claim.check)
        # After the claim: what somebody else took away before that is seen here.
        self._again(lambda: Catalog(self._target, clock=self._clock, patience_s=0.0).check_files(checkpoint))
        self._trials.check()
        path = f"{self._directory}/{paths.MANIFEST}"
        self._put_new(path, checkpoint.manifest_bytes, "another manifest of this checkpoint is there")
        if self._commit in there.quarantined:
            self._again(lambda: ledger.clear_quarantine(self._target, self._commit))

    def _put_new(self, path: str, data: bytes, what: str) -> None:
        """Create a file that is never replaced; the same bytes may be there already.

        Looked for first: a store that does not refuse to create a file twice may hold a replica all the same.
        """
        if not self._again(lambda: self._holds(path, data, what)):
            try:
                self._again(lambda: self._target.put(path, data, exclusive=True))
                return
            except FileExistsError:
                self._again(lambda: self._holds(path, data, what))
        self._again(lambda: self._target.sync_tree(path.rpartition("/")[0]))

    def _holds(self, path: str, data: bytes, what: str) -> bool:
        """Whether a file is there with these bytes; refuses others."""
        try:
            same = self._target.get(path, limit_bytes=len(data), retry_s=0.0) == data
        except FileNotFoundError:
            return False
        except TornFileError:
            same = False
        if not same:
            text = f"{what} and is never replaced"
            raise ManifestError(text, path=path, step=self._commit.step, tier=self._target.name)
        return True

    def _discard(self) -> None:
        """Take away what is there of the checkpoint; the manifest first, so that it is never there in part."""
        self._again(lambda: self._target.delete(f"{self._directory}/{paths.MANIFEST}"))
        self._again(lambda: self._target.delete_tree(self._directory))

    def _remove_old_claim(self) -> None:
        """A replication may have ended between its commit and the removal of its record."""
        record = self._again(lambda: replica_claim.unfinished(self._target)).get(self._commit)
        if record is not None and not replica_claim.is_at_work(record):
            self._again(Claim(self._target, record).remove)

    # Errors.

    def _get(self, path: str, kind: str) -> bytes:
        return self._source.get(path, limit_bytes=document.max_file_bytes(kind))

    def _again(self, action: Callable[[], T]) -> T:
        return self._trials.again(action)

    def _raise_first_cause(self, exc: FileNotFoundError | IntegrityError) -> NoReturn:
        """Files go after the checkpoint was un-committed: then that is what is told."""
        try:
            gone = self._commit not in belief.believed(snapshots.take(self._source).listing)
        except CheckpointError:
            gone = False
        if gone:
            raise self._uncommitted() from exc
        if isinstance(exc, IntegrityError):
            exc.step, exc.tier = self._commit.step, exc.tier or self._source.name
            raise exc
        path = str(exc.filename or self._directory)
        raise TornFileError("the file is missing", path=path, step=self._commit.step, tier=self._source.name) from exc

    def _uncommitted(self) -> CommitError:
        return CommitError(
            "the checkpoint was un-committed at the source while it was copied",
            step=self._commit.step,
            path=self._source.url,
            tier=self._source.name,
            hint="replicate a newer one; 'safehold pin RUN STEP' keeps a step from being deleted",
        )
