"""Reads a run directory through a tier: what is believed, and whether the documents of a checkpoint agree.

Invariants: nothing here writes. Names of files say only where to look; numbers, run id and commit are taken from
verified contents and compared with the names, so that swapped, stale and foreign files are found and named. No path is
ever made from a file's content. Works beside a live agent and on a read-only directory.

Must not live here: decisions (`safehold.policy.belief`), writes (`safehold.pipeline.ledger`), sockets, torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    StepNotFoundError,
    StorageError,
    TornFileError,
)
from safehold.format import document, paths, records
from safehold.format import plan as plans
from safehold.format.names import numbered
from safehold.format.plan import Plan
from safehold.format.records import Manifest, NodeRecord, PackRecord, Quarantine, RunInfo
from safehold.pipeline import agreement
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.giving import Giving
from safehold.pipeline.several import read_of_all
from safehold.pipeline.snapshot import Snapshot
from safehold.policy import belief
from safehold.policy.belief import Listing
from safehold.tiers.base import Tier
from safehold.tiers.open import local_path
from safehold.types import CommitId

T = TypeVar("T")
N = TypeVar("N")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitView:
    """A believed commit as a list shows it.

    Attributes:
        commit: Its name.
        manifest: The verified manifest; None where it does not verify, and `error` says why.
        error: What is wrong with the manifest.
        pinned: Whether retention and `rm` leave it alone.
        quarantine: The advisory record against it, if there is one.
        stored_bytes: Sum of the sizes of all files in its directory.
    """

    commit: CommitId
    manifest: Manifest | None
    error: CheckpointError | None
    pinned: bool
    quarantine: Quarantine | None
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A commit whose manifest, node records and plan are verified and agree with each other; data files are not read.

    Attributes:
        commit: Its name.
        manifest: The commit record.
        manifest_bytes: The same as stored.
        records: Node -> what it wrote; of a lazy load each is read and verified when it is first looked at.
        plan: Where every piece lies.
    """

    commit: CommitId
    manifest: Manifest
    manifest_bytes: bytes
    records: Mapping[int, NodeRecord]
    plan: Plan

    @property
    def directory(self) -> str:
        """The checkpoint's directory inside the run directory."""
        return paths.checkpoint_dir(self.commit)

    def pack_path(self, rank: int, part: int) -> str:
        """Return the path of a rank's pack inside the run directory."""
        return f"{self.directory}/{paths.pack(self.plan.nodes[rank], rank, part)}"

    def objects_path(self, node: int) -> str:
        """Return the path of a node's objects inside the run directory."""
        return f"{self.directory}/{paths.node_objects(node)}"

    def packs(self) -> Mapping[tuple[int, int], PackRecord]:
        """Return (rank, part) -> pack record, in rank and part order; as lazy as `records`."""
        return _Packs(self)

    def expected_files(self) -> dict[str, int]:
        """Return name -> size of every data and record file that the manifest vouches for, itself excluded."""
        files = {paths.node_record(ref.node): ref.size_bytes for ref in self.manifest.nodes}
        for node, record in self.records.items():
            files[paths.node_objects(node)] = record.objects_size_bytes
            files.update({pack.file: pack.size_bytes for pack in record.packs})
        return files


class _Packs(Mapping[tuple[int, int], PackRecord]):
    """The packs of a checkpoint; looks only at the records of those that are asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._by_node: dict[int, dict[tuple[int, int], PackRecord]] = {}

    def __getitem__(self, key: tuple[int, int]) -> PackRecord:
        rank, part = key
        node = self._checkpoint.plan.nodes[rank] if 0 <= rank < self._checkpoint.plan.world_size else -1
        if node < 0 or part >= len(self._checkpoint.plan.pack_sizes.get(rank, ())):
            raise KeyError(key)
        found = self._by_node.get(node)
        if found is None:
            packs = self._checkpoint.records[node].packs
            found = self._by_node[node] = {(pack.rank, pack.part): pack for pack in packs}
        return found[key]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for rank, sizes in sorted(self._checkpoint.plan.pack_sizes.items()):
            yield from ((rank, part) for part in range(len(sizes)))

    def __len__(self) -> int:
        return sum(len(sizes) for sizes in self._checkpoint.plan.pack_sizes.values())


class _LazyRecords(Mapping[int, NodeRecord]):
    """Node records that are read and verified when they are first looked at; thread-safe."""

    def __init__(self, catalog: Catalog, manifest: Manifest, plan: Plan) -> None:
        self._catalog, self._manifest, self._plan = catalog, manifest, plan
        self._nodes = {ref.node for ref in manifest.nodes}
        self._found: dict[int, NodeRecord] = {}
        self._lock = threading.Lock()

    def __getitem__(self, node: int) -> NodeRecord:
        if node not in self._nodes:
            raise KeyError(node)
        with self._lock:
            if node not in self._found:
                record = self._catalog.read_record(self._manifest, node)
                path = f"{paths.checkpoint_dir(self._manifest.commit)}/{paths.node_record(node)}"
                agreement.check_placement(record, self._plan, path=path)
                self._found[node] = record
            return self._found[node]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._nodes))

    def __len__(self) -> int:
        return len(self._nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCandidate:
    """What can be restored.

    Attributes:
        checkpoint: The newest commit that can be used; None only where the run has no commit at all.
        rejected: Newer commits that could not be used, newest first, and what was wrong with each.
        problems: Other things that did not verify on the way.
    """

    checkpoint: Checkpoint | None
    rejected: tuple[tuple[CommitId, CheckpointError], ...]
    problems: tuple[CheckpointError, ...]


class Catalog:
    """Reads one run directory.

    Thread-safe as far as its tier is: it keeps no state between calls.
    """

    def __init__(self, tier: Tier, *, clock: Clock = SYSTEM_CLOCK, patience_s: float = 1.0) -> None:
        """Wrap a tier.

        Args:
            tier: Where the run directory is.
            clock: Time, for the patience.
            patience_s: How long a file that must be there, or a read that may pass, is tried again before it counts as
                missing: on network file systems a file can stay invisible for a while after another host made it.
        """
        self.tier = tier
        self._clock = clock
        self._patience_s = patience_s

    def run_info(self) -> RunInfo | None:
        """Return the run's identity, or None where there is none; see `safehold.pipeline.snapshot.identify`."""
        return snapshots.identify(self.tier)

    def require_run(self) -> RunInfo:
        """Return the run's identity; where there is none, say what was looked at.

        Raises:
            ConfigurationError: This is no run directory.
        """
        self.tier.list("")
        run = self.run_info()
        if run is not None:
            return run
        names = sorted(entry.name + ("/" if entry.is_dir else "") for entry in self.tier.list(""))
        if names:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            hint = f"looked for {paths.RUN_JSON} and {paths.INCARNATIONS}/ and found: {shown}"
        elif _is_missing(self.tier.url):
            raise ConfigurationError("this directory does not exist", path=self.tier.url, hint="is the path right?")
        else:
            hint = f"looked for {paths.RUN_JSON}; the directory is empty"
        raise ConfigurationError("this is no run directory", path=self.tier.url, hint=hint)

    def snapshot(self) -> Snapshot:
        """Look at the whole run directory once; errors as for `safehold.pipeline.snapshot.take`."""
        return snapshots.take(self.tier)

    def listing(self) -> Listing:
        """Return what the rules of belief need."""
        return self.snapshot().listing

    def commits(self, snapshot: Snapshot | None = None) -> list[CommitView]:
        """Return the believed commits, newest first, with their manifests read and verified."""
        seen = snapshot or self.snapshot()
        views = []
        for commit in belief.believed(seen.listing):
            manifest, error = None, None
            try:
                _, manifest = self.read_manifest(commit, run_id=seen.run.run_id if seen.run else None)
            except (IntegrityError, StorageError) as exc:
                error = exc
            views.append(
                CommitView(
                    commit=commit,
                    manifest=manifest,
                    error=error,
                    pinned=commit.step in seen.pins,
                    quarantine=seen.quarantined.get(commit),
                    stored_bytes=sum(seen.files.get(commit, {}).values()),
                )
            )
        return views

    def read_manifest(self, commit: CommitId, *, run_id: str | None = None) -> tuple[bytes, Manifest]:
        """Read the manifest of a commit and verify it.

        Args:
            commit: Which one.
            run_id: The run it must belong to; None: read from `run.json`.

        Returns:
            Its bytes as stored, and the same decoded.

        Raises:
            ManifestError: It does not verify, or is that of another commit or run.
            TornFileError: It is missing.
            FormatVersionError: A newer library wrote it.
        """
        path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
        data = self._must_get(path, document.max_file_bytes("manifest"), commit)
        return data, self.decode_manifest(commit, data, run_id=run_id)

    def decode_manifest(self, commit: CommitId, data: bytes, *, run_id: str | None = None) -> Manifest:
        """Verify a manifest's bytes, wherever they came from; arguments and errors as for `read_manifest`."""
        path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
        manifest = records.decode_manifest(data, path=path)
        wanted = run_id if run_id is not None else self.require_run().run_id
        agreement.check_manifest(manifest, commit=commit, run_id=wanted, path=path)
        return manifest

    def read_record(self, manifest: Manifest, node: int) -> NodeRecord:
        """Read a node's record and verify it against the manifest.

        Raises:
            IntegrityError: It is missing, is not the one that the manifest names, or contradicts itself.
        """
        commit = manifest.commit
        path = f"{paths.checkpoint_dir(commit)}/{paths.node_record(node)}"
        ref = next((ref for ref in manifest.nodes if ref.node == node), None)
        if ref is None:
            raise ManifestError(f"the manifest has no node {node}", path=path, step=commit.step)
        try:
            data = self._get_patiently(path, ref.size_bytes)
        except FileNotFoundError as exc:
            raise agreement.missing_record(manifest, node, path=path, tier=self.tier.name) from exc
        agreement.check_bytes(
            data, ref.size_bytes, ref.blake3, path=path, step=commit.step, what=f"the record of node {node}"
        )
        record = records.decode_node_record(data, path=path)
        agreement.check_record(record, manifest, node, path=path)
        return record

    def read_plan(self, manifest: Manifest) -> Plan:
        """Read the plan that a manifest names and verify it.

        Raises:
            IntegrityError: It is missing or is not the one that the manifest names.
        """
        path = paths.plan(manifest.plan_digest)
        data = self._must_get(path, manifest.plan_size_bytes, manifest.commit)
        agreement.check_bytes(
            data, manifest.plan_size_bytes, manifest.plan_digest, path=path, step=manifest.commit.step, what="the plan"
        )
        plan = plans.decode_plan(data, path=path)
        agreement.check_nodes(manifest, plan, path=path)
        return plan

    def load(
        self,
        commit: CommitId,
        *,
        manifest_bytes: bytes | None = None,
        run_id: str | None = None,
        lazy: bool = False,
    ) -> Checkpoint:
        """Read and verify the documents of a commit: manifest, node records, plan, each against the others.

        Args:
            commit: Which one.
            manifest_bytes: The manifest, where it was handed out; else it is read.
            run_id: The run it must belong to; None: read from `run.json`.
            lazy: Read and verify a node's record only when it is first looked at. For a rank of many, which needs few of
                them, after somebody else has checked them all.

        Raises:
            IntegrityError: Something is missing, damaged, swapped, or contradicts something else; the file is named.
            StorageError: The tier cannot be read.
        """
        if manifest_bytes is None:
            manifest_bytes, manifest = self.read_manifest(commit, run_id=run_id)
        else:
            manifest = self.decode_manifest(commit, manifest_bytes, run_id=run_id)
        plan = self.read_plan(manifest)
        records: Mapping[int, NodeRecord] = _LazyRecords(self, manifest, plan)
        if not lazy:
            records = self._read_all(manifest)
            agreement.cross_check(manifest, records, plan, path=paths.checkpoint_dir(commit))
        return Checkpoint(commit=commit, manifest=manifest, manifest_bytes=manifest_bytes, records=records, plan=plan)

    def _read_all(self, manifest: Manifest) -> dict[int, NodeRecord]:
        nodes = [ref.node for ref in manifest.nodes]

        def read(node: int) -> NodeRecord:
            return self.read_record(manifest, node)

        return dict(zip(nodes, read_of_all(read, nodes), strict=True))

    def check_files(self, checkpoint: Checkpoint) -> None:
        """Check that every file of a checkpoint is there with its size; one list of its directory.

        Raises:
            TornFileError: The first that is missing or has another size, by name; a missing one is looked for again for
                a while.
        """
        give_up = self._clock.monotonic() + self._patience_s
        delay = 0.02
        while True:
            there = {entry.name: entry.size_bytes for entry in self.tier.list(checkpoint.directory) if not entry.is_dir}
            wrong = [(n, size) for n, size in checkpoint.expected_files().items() if there.get(n) != size]
            if wrong and isinstance(self.tier, Giving):
                given = self.tier.gives(checkpoint.manifest, [name for name, _ in wrong])
                wrong = [entry for entry in wrong if entry[0] not in given]
            if not wrong:
                return
            if self._clock.monotonic() >= give_up:
                break
            self._clock.sleep(delay)
            delay *= 2
        name, size = wrong[0]
        state = f"has {there[name]} bytes instead of {size}" if name in there else f"({size} bytes) is missing"
        more = f", and {len(wrong) - 1} more files are missing or of another size" if len(wrong) > 1 else ""
        raise TornFileError(
            f"{name} {state}{more}",
            path=f"{checkpoint.directory}/{name}",
            step=checkpoint.commit.step,
            tier=self.tier.name,
        )

    def _must_get(self, path: str, limit_bytes: int, commit: CommitId) -> bytes:
        try:
            return self._get_patiently(path, limit_bytes)
        except FileNotFoundError as exc:
            raise TornFileError("the file is missing", path=path, step=commit.step, tier=self.tier.name) from exc

    def _get_patiently(self, path: str, limit_bytes: int) -> bytes:
        return self._patiently(lambda: self.tier.get(path, limit_bytes=limit_bytes, retry_s=0.0))

    def _patiently(self, read: Callable[[], T]) -> T:
        give_up = self._clock.monotonic() + self._patience_s
        delay = 0.02
        while True:
            try:
                return read()
            except (FileNotFoundError, StorageError) as exc:
                passes = isinstance(exc, FileNotFoundError) or exc.retry
                if not passes or self._clock.monotonic() >= give_up:
                    raise
            self._clock.sleep(delay)
            delay *= 2


def find_restore_candidate(
    tier: Tier,
    step: int | None = None,
    *,
    exclude: Collection[CommitId] = (),
    clock: Clock = SYSTEM_CLOCK,
    patience_s: float = 1.0,
) -> RestoreCandidate:
    """Find the newest believed commit whose documents verify and whose files are there with the right sizes.

    Quarantined commits are tried last. Where an attempt at a step cannot be used, an earlier attempt at it is tried
    before an older step.

    Args:
        tier: Where the run directory is.
        step: This step and no other.
        exclude: Commits that were tried in vain already.
        clock: Time.
        patience_s: See `Catalog`.

    Returns:
        The candidate, and what was wrong with newer ones. It has no checkpoint only where the run has no commit at all.

    Raises:
        StepNotFoundError: There are commits, but none that can be used; or `step` is not there.
        IntegrityError: `step` is there and cannot be used.
        FormatVersionError: A newer library wrote the newest commit; an older one is not taken in its place.
    """
    catalog = Catalog(tier, clock=clock, patience_s=patience_s)
    seen = catalog.snapshot()
    rejected: list[tuple[CommitId, CheckpointError]] = []
    run_id = seen.run.run_id if seen.run is not None else None
    for commit in _in_order(seen, step, exclude):
        try:
            checkpoint = catalog.load(commit, run_id=run_id)
            catalog.check_files(checkpoint)
            return RestoreCandidate(checkpoint=checkpoint, rejected=tuple(rejected), problems=seen.problems)
        except FormatVersionError:
            raise
        except IntegrityError as exc:
            exc.step, exc.tier = commit.step, exc.tier or tier.name
            rejected.append((commit, exc))
    if step is not None and rejected:
        raise rejected[0][1]
    believed = belief.believed(seen.listing)
    if step is None and not believed:
        return RestoreCandidate(checkpoint=None, rejected=(), problems=seen.problems)
    raise _not_found(catalog, step, believed, rejected)


def _is_missing(url: str) -> bool:
    """Whether it is the URL of a file system's directory that is not there (a store without directories cannot tell)."""
    return url.startswith("file://") and not os.path.lexists(local_path(url))


def _in_order(seen: Snapshot, step: int | None, exclude: Collection[CommitId]) -> list[CommitId]:
    """All commits that exist, newest first; of one step the attempt that counts first; quarantined ones last."""
    left = dict(seen.listing.attempts)
    order: list[CommitId] = []
    while found := belief.believed(replace(seen.listing, attempts=left)):
        for commit in found:
            order.append(commit)
            del left[commit]
    wanted = [c for c in order if c not in exclude and (step is None or c.step == step)]
    return sorted(wanted, key=lambda c: (c not in seen.quarantined, c), reverse=True)


def _not_found(
    catalog: Catalog,
    step: int | None,
    believed: list[CommitId],
    rejected: list[tuple[CommitId, CheckpointError]],
) -> StepNotFoundError:
    url = catalog.tier.url
    if step is None:
        text = f"none of the {len(believed)} checkpoints can be used"
        if len(believed) == 1:
            text = "the only checkpoint cannot be used"
        why = "; ".join(f"step {commit.step}: {error.path}: {error.message}" for commit, error in rejected[:3])
        hint = f"{why}; 'safehold verify RUN --all' reads them all" if why else "'safehold verify RUN --all' says why"
        return StepNotFoundError(text, path=url, hint=hint)
    steps = [commit.step for commit in believed]
    if not steps:
        catalog.require_run()
        return StepNotFoundError("the run has no checkpoint", step=step, path=url)
    hint = f"there {'is' if len(steps) == 1 else 'are'} {numbered('step', steps, 8)}"
    return StepNotFoundError("there is no such checkpoint", step=step, path=url, hint=hint)
