"""The two halves of a replication: the data files, which several nodes may copy side by side, and what makes of them a checkpoint.

Invariants: `Documents.begin` comes first and takes the claim, `DataHalf.copy` ends with what it was given durable, directory
entries included, and `Documents.finish` comes after all of those and writes the manifest last. A manifest, an incarnation
or `run.json` is never replaced by another. Each half may run in another process, and on another host, than the others; whatever
stops one of them leaves the second place without the checkpoint, and what was complete in it.

Must not live here: rules (`safehold.policy.replication`), the transfer itself (`safehold.pipeline.copying`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from safehold.clock import Clock, new_token
from safehold.errors import (
    CheckpointError,
    CommitError,
    ConfigurationError,
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
from safehold.format.records import NodeRecord
from safehold.pipeline import agreement, ledger, replica_claim, replica_room
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Catalog, Checkpoint
from safehold.pipeline.copying import Copier
from safehold.pipeline.leases import Observer
from safehold.pipeline.replica_claim import Claim
from safehold.pipeline.replica_documents import is_complete, same_manifest
from safehold.pipeline.snapshot import Snapshot
from safehold.pipeline.trials import Trials
from safehold.policy import belief, replication
from safehold.policy.replication import DataFile
from safehold.tiers.base import Tier
from safehold.types import CommitId

T = TypeVar("T")


class DataHalf:
    """Packs and objects of some nodes of a checkpoint on their way.

    Args:
        source: The place that has the checkpoint.
        target: The second place.
        commit: Which.
        node_records: Node -> its record, verified, of the nodes whose files are copied here.
        trials: How to copy, and how far it is.
        claim: The right to copy; packs are noted there as they become durable.
    """

    def __init__(
        self,
        source: Tier,
        target: Tier,
        commit: CommitId,
        *,
        node_records: Mapping[int, NodeRecord],
        trials: Trials,
        claim: Claim,
    ) -> None:
        self._source, self._target, self._commit = source, target, commit
        self._records, self._trials, self._claim = node_records, trials, claim
        self._directory = paths.checkpoint_dir(commit)
        self.files = replication.data_files(commit, node_records)
        self._copier = Copier(
            source,
            target,
            dict(node_records),
            trials,
            finished=lambda file: trials.again(lambda: claim.note([file.name])),
            may_abort=claim.holds,
        )

    def copy(self) -> None:
        """Send what is not there, or does not verify there; all of it is durable when this returns.

        Raises:
            CommitError: The checkpoint was un-committed at the source meanwhile.
            IntegrityError: The source is damaged; the file is named.
            StorageError: A place failed, for longer than the retries last.
            SkippedError: It was cancelled.
        """
        self._trials.total_bytes = sum(file.size_bytes for file in self.files)
        try:
            self._copy()
        except (FileNotFoundError, IntegrityError) as exc:
            raise_first_cause(self._source, self._commit, exc)

    def _copy(self) -> None:
        again, claim = self._trials.again, self._claim
        sizes = {e.name: e.size_bytes for e in again(lambda: self._target.list(self._directory)) if not e.is_dir}
        packs = [file for file in self.files if file.pack is not None]
        committed = paths.MANIFEST in sizes
        # Names that nobody vouches for may have been written and not made durable: reading them would not tell.
        vouched = {file.name for file in packs} if committed else claim.finished
        there = [file for file in packs if file.name in vouched and sizes.get(file.name) == file.size_bytes]
        bad = {file.name for file in self._copier.damaged(there)}
        kept = {file.name for file in there} - bad
        todo = [file for file in packs if file.name not in kept]
        if committed:
            self._take_manifest_away(todo, kept)
        needed = replica_room.missing_bytes(todo, sizes)
        again(lambda: replica_room.check(self._target, self._commit, needed))
        again(lambda: claim.forget(file.name for file in todo))
        with replica_room.told(self._target, self._commit, lambda: needed):  # a quota, or what others wrote meanwhile
            self._copier.copy([file for file in self.files if file.name not in kept])
        again(lambda: self._target.sync_tree(self._directory))

    def _take_manifest_away(self, todo: Sequence[DataFile], kept: set[str]) -> None:
        """The old copy cannot be used as it is. It may have what the source has lost, so it stays until that is known to be whole."""
        if todo:
            bad = self._copier.damaged(todo, at_source=True)
            if bad:
                text = "the file is damaged here as well as at the second place"
                hint = "'safehold verify' of both says what is left; nothing was changed"
                raise TornFileError(text, path=bad[0].path, step=self._commit.step, tier=self._source.name, hint=hint)
        self._trials.again(lambda: self._claim.note(kept))
        manifest = f"{self._directory}/{paths.MANIFEST}"
        if todo or not self._trials.again(lambda: self._has_manifest(manifest)):
            self._trials.again(lambda: self._target.delete(manifest))

    def _has_manifest(self, path: str) -> bool:
        data = self._source.get(path, limit_bytes=document.max_file_bytes("manifest"))
        return same_manifest(self._target, self._commit, data)


class Documents:
    """All of a checkpoint but its data files, on their way; used by one thread.

    Args:
        source: The place that has the checkpoint.
        target: The second place.
        commit: Which.
        trials: What is tried again, and how often.
        restrict: See `safehold.pipeline.replicate.replicate`.
        clock: Time.
        patience_s: See `Catalog`.
    """

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
        self.checkpoint: Checkpoint | None = None
        self.mends = False
        self._needed_bytes: int | None = None

    def begin(
        self, *, own_is_over: bool = False, was_full: bool = False, observer: Observer | None = None
    ) -> Claim | None:
        """Look at both places, take the claim, and write what comes before the data; None: it is complete there.

        Afterwards `checkpoint` is what is copied, and `mends` whether the second place has a manifest of it already, so that
        one process alone must copy the data. Where it does not fit, what is no checkpoint there goes first.

        Args:
            own_is_over: See `replica_claim.take`.
            was_full: The trial before found the second place full, whatever it says of free space: a quota.
            observer: See `replica_room.free`.

        Raises:
            CheckpointError: See `safehold.pipeline.replicate.replicate`.
        """
        if was_full:
            self._free(None, own_is_over, observer)
        with replica_room.told(self._target, self._commit, lambda: self._needed_bytes):
            try:
                return self._begin(own_is_over)
            except StorageFullError as exc:
                if exc.tier != self._target.name or not self._free(self._needed_bytes, own_is_over, observer):
                    raise
            return self._begin(own_is_over)

    def _free(self, needed_bytes: int | None, own_is_over: bool, observer: Observer | None) -> int:
        buried = not self._restrict  # what a run has un-committed itself is for its own agents to delete
        return self._again(
            lambda: replica_room.free(
                self._target,
                self._commit,
                needed_bytes,
                own_is_over=own_is_over,
                buried=buried,
                observer=observer,
                clock=self._clock,
            )
        )

    def _begin(self, own_is_over: bool) -> Claim | None:
        here = self._look_here()
        checkpoint = self.checkpoint = self._load()
        files = replication.data_files(self._commit, checkpoint.records)
        self._needed_bytes = replica_room.missing_bytes(files, {}) + replica_room.missing_documents(checkpoint, ())
        there = self._look_there(here)
        complete = self._again(lambda: is_complete(self._target, self._commit, there, checkpoint.manifest_bytes))
        if complete and self._commit not in there.quarantined:
            self._push_incarnations(here, there)
            self._remove_old_claim()
            return None
        self._put_run()  # before the claim: a directory with nothing but a claim is no run directory
        token = new_token()
        claim = self._again(
            lambda: replica_claim.take(self._target, self._commit, token, clock=self._clock, own_is_over=own_is_over)
        )
        try:
            if replication.order(here.listing, there.listing)[0] == "incarnations":
                here, there = self._look_again(claim)
                self._push_incarnations(here, there, always=True)
            self._put_plan(checkpoint)
            self._clear_deleted(here, there, claim)
            sizes = {entry.name: entry.size_bytes for entry in self._again(lambda: self._target.list(self._directory))}
            self.mends = paths.MANIFEST in sizes
            needed = replica_room.missing_bytes(files, sizes) + replica_room.missing_documents(checkpoint, sizes)
            self._needed_bytes = needed
            self._again(lambda: replica_room.check(self._target, self._commit, needed))
        except BaseException:
            claim.leave()
            raise
        return claim

    def finish(self, claim: Claim) -> None:
        """Write node records, incarnations that had to wait, and the manifest: the checkpoint is there when this returns.

        Raises:
            CheckpointError: See `safehold.pipeline.replicate.replicate`; nothing was committed, or it can be finished by a repetition.
        """
        checkpoint = self.checkpoint
        assert checkpoint is not None
        documents = replica_room.missing_documents(checkpoint, ())
        try:
            with replica_room.told(self._target, self._commit, lambda: documents):
                self._put_records(checkpoint)
                self._commit_there(checkpoint, claim)
        except BaseException:
            claim.leave()
            raise
        try:
            self._again(claim.remove)
        except StorageError:
            claim.leave()  # it is committed; the next one removes the record

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

    def _load(self) -> Checkpoint:
        try:
            checkpoint = self._again(lambda: self._catalog.load(self._commit))
            self._again(lambda: self._catalog.check_files(checkpoint))
        except IntegrityError as exc:
            raise_first_cause(self._source, self._commit, exc)
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

    def _clear_deleted(self, here: Snapshot, there: Snapshot, claim: Claim) -> None:
        """Take away what was un-committed at the second place, tombstones included."""
        if replication.holding(replication.merged(here.listing, there.listing), self._commit):
            self._again(lambda: claim.forget(claim.finished))
            self._discard()

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
        missing = sorted(here.listing.incarnations.keys() - there.listing.incarnations.keys())
        if missing and not self._restrict:
            self._again(lambda: replica_room.keep_buried(here, there, self._target, self._commit, clock=self._clock))
        for number in missing:
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
            raise uncommitted(self._source, self._commit)
        there = self._again(lambda: snapshots.take(self._target))
        if there.run is None:
            text = "the second place is gone: nothing there says which run it is"
            hint = "is its directory still where it was? it may have been moved or deleted; the next trial begins anew"
            raise StorageError(text, path=self._target.url, tier=self._target.name, hint=hint)
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


def raise_first_cause(source: Tier, commit: CommitId, exc: FileNotFoundError | IntegrityError) -> NoReturn:
    """Raise what is wrong at the source: files go after the checkpoint was un-committed, and then that is what is told."""
    try:
        gone = commit not in belief.believed(snapshots.take(source).listing)
    except CheckpointError:
        gone = False
    if gone:
        raise uncommitted(source, commit) from exc
    if isinstance(exc, IntegrityError):
        exc.step, exc.tier = commit.step, exc.tier or source.name
        raise exc
    path = str(exc.filename or paths.checkpoint_dir(commit))
    raise TornFileError("the file is missing", path=path, step=commit.step, tier=source.name) from exc


def uncommitted(source: Tier, commit: CommitId) -> CommitError:
    """What a replication fails with whose checkpoint was deleted meanwhile."""
    return CommitError(
        "the checkpoint was un-committed at the source while it was copied",
        step=commit.step,
        path=source.url,
        tier=source.name,
        hint="replicate a newer one; 'safehold pin RUN STEP' keeps a step from being deleted",
    )
