"""What an agent asks of its copying process: one function per operation, plain values in and out.

Invariants: nothing here is on the way of a save: this is another process than the one that flushes, so that a second place that
does not answer holds up nothing else. One replication of a job at a time is begun, by the lead; what other nodes copy is
copied under its claim. What is cancelled ends within a nap, between two transfers, and leaves what the next trial goes on from.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from safehold.clock import SYSTEM_CLOCK
from safehold.config import Config
from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    FormatVersionError,
    IntegrityError,
    StepNotFoundError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
)
from safehold.format import document, paths, records
from safehold.pipeline import ledger, replica_claim, replicas
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.leases import Observer, Reader
from safehold.pipeline.pacing import Pacer
from safehold.pipeline.recovering import RecoveringTier
from safehold.pipeline.replica_claim import Claim
from safehold.pipeline.replicate import replicate
from safehold.pipeline.replication_halves import DataHalf, Documents
from safehold.pipeline.snapshot import Snapshot
from safehold.pipeline.trials import CopySettings, Trials
from safehold.policy import belief, replication
from safehold.policy.retention import Keep
from safehold.tiers.base import Tier
from safehold.tiers.joined import JoinedTier
from safehold.types import CommitId

MAX_STALL_S = 300.0
CANCELS_KEPT = 64


@dataclass(slots=True)
class _Begun:
    """A replication that this process has begun for all nodes."""

    documents: Documents
    claim: Claim
    trials: Trials


class RemoteCalls:
    """See the module.

    Args:
        here: The run's tier.
        there: The second place.
        config: The run's settings.
        pacer: Keeps copies from taking time of training.
    """

    def __init__(self, here: Tier, there: Tier, config: Config, pacer: Pacer | None) -> None:
        self._here, self._there, self._config, self._pacer = here, there, config, pacer
        self._begun: dict[str, _Begun] = {}
        self._cancelled: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        # Remembers from one replication to the next which readers' leases at the second place are renewed.
        self._observer = Observer()
        self.operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "remote_look": self._look,
            "remote_newer": self._newer,
            "fetch": self._fetch,
            "copy_begin": self._begin,
            "copy_data": self._data,
            "copy_finish": self._finish,
            "copy_leave": self._leave,
        }

    @property
    def there(self) -> Tier:
        """The second place."""
        return self._there

    def cancel(self, key: str) -> None:
        """End what is copied under this key, and what will be."""
        self._flag(key).set()

    def _flag(self, key: str) -> threading.Event:
        with self._lock:
            while len(self._cancelled) >= CANCELS_KEPT:
                del self._cancelled[next(iter(self._cancelled))]
            return self._cancelled.setdefault(key, threading.Event())

    def _trials(self, key: str, *, paced: bool = True) -> Trials:
        config = self._config
        settings = CopySettings(
            rate_bytes_s=config.remote_rate_bytes_s if paced else 0,
            stall_s=min(MAX_STALL_S, config.remote_timeout_s),
            direct=config.direct_io,
        )
        return Trials(settings, self._flag(key), pacer=self._pacer if paced else None)

    # -- when a run is opened --------------------------------------------------------------------------------------------

    def _look(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """See whether the second place fits this run; an empty run directory becomes that of the run that it holds.

        Returns:
            `held`: checkpoints that it has and this run has committed. `notes` and `warnings`: for the user.

        Raises:
            ConfigurationError: It is another run's, holds something else, or cannot be written.
            StorageError: It does not answer as it should, and may later.
        """
        warnings: list[str] = []
        try:
            self._there.probe()
        except StorageReadOnlyError as exc:
            raise self._refused(f"the remote cannot be written: {exc.message}") from exc
        except StorageFullError:  # what it holds can be read all the same
            warnings.append(self._full())
        theirs = snapshots.identify(self._there)
        if theirs is None:
            ledger.check_empty(self._there)
            return {"held": [], "notes": [], "warnings": warnings}
        notes = []
        ours = snapshots.identify(self._here)
        if ours is None:
            ledger.check_empty(self._here)
            notes.append(f"the run directory was empty: the run goes on from its copy at {self._there.url}")
        elif ours.run_id != theirs.run_id:
            raise self._refused(f"the remote is the directory of another run ({theirs.run_id})")
        here, there = snapshots.take(self._here), snapshots.take(self._there)
        if not here.listing.attempts:  # also where seeding it was cut short
            self._seed()
            here = snapshots.take(self._here)
        problem = self._contradiction(here, there)
        if problem:
            return {"held": [], "notes": notes, "warnings": [*warnings, problem]}
        held = replication.counting(here.listing, there.listing)
        return {"held": [_wire(commit) for commit in held], "notes": notes, "warnings": warnings}

    def _full(self) -> str:
        """Say that nothing can be written there, how much is free, and how much a checkpoint needs."""
        free, needed = self._there.free_bytes(), ""
        try:
            newest = find_restore_candidate(self._here, None).checkpoint
            if newest is not None:
                needed = f", and a checkpoint needs about {newest.manifest.total_bytes}"
        except CheckpointError:
            pass  # told where it matters
        free_text = "" if free is None else f": {free} bytes are free"
        hint = "free space there, or have it keep fewer (remote_keep)"
        return f"the remote {self._there.url} is full{free_text}{needed}; nothing is replicated until there is room ({hint})"

    def _refused(self, text: str) -> ConfigurationError:
        hint = "give each run a second place of its own, one that its agents can write, or none"
        return ConfigurationError(text, path=self._there.url, tier=self._there.name, hint=hint)

    def _seed(self) -> None:
        """Make an empty directory that of the run that the second place has: who it is, and its incarnations."""
        data = self._there.get(paths.RUN_JSON, limit_bytes=document.max_file_bytes("run"))
        records.decode_run(data)
        numbers = [paths.parse_incarnation(entry.name) for entry in self._there.list(paths.INCARNATIONS)]
        for number in sorted(number for number in numbers if number is not None):
            path = paths.incarnation(number)
            found = self._there.get(path, limit_bytes=document.max_file_bytes("incarnation"))
            _put_new(self._here, path, found)
        _put_new(self._here, paths.RUN_JSON, data)

    def _contradiction(self, here: Snapshot, there: Snapshot) -> str:
        number = replication.conflict(here.listing.incarnations, there.listing.incarnations)
        if number is not None:
            return f"nothing can be replicated: incarnation {number} is another one at {self._there.url}"
        if there.newest > here.newest:
            text = (
                f"incarnation {there.newest}, which this run directory does not know, has written to {self._there.url}"
            )
            return f"nothing can be replicated: {text}"
        return ""

    # -- for a restore ---------------------------------------------------------------------------------------------------

    def _newer(self, arguments: dict[str, Any]) -> list[list[int]]:
        """Return what the second place has and is newer than anything usable here, newest first.

        What was deleted here and is still there is returned where its step is asked for, or where nothing here can be used.
        """
        step, bad = arguments["step"], {_commit(entry) for entry in arguments["bad"]}
        tried = {_commit(entry) for entry in arguments["tried"]}
        try:
            with self._reading() as tier:
                usable = find_restore_candidate(tier, step, exclude=bad).checkpoint
        except FormatVersionError:
            raise
        except (IntegrityError, StepNotFoundError):
            usable = None
        here, there = snapshots.take(self._here), snapshots.take(self._there)
        if here.run is None or there.run is None or here.run.run_id != there.run.run_id:
            return []
        if self._contradiction(here, there):
            return []
        found = replication.counting(here.listing, there.listing)
        deleted = {commit for commit in found if replication.holding(here.listing, commit)}
        wanted = [c for c in found if c not in tried and (step is None or c.step == step)]
        if usable is not None:
            wanted = [c for c in wanted if c > usable.commit and (c not in deleted or step is not None)]
        return [_wire(c) for c in sorted(wanted, key=lambda c: (c in there.quarantined, c in deleted))]

    @contextmanager
    def _reading(self) -> Iterator[Tier]:
        """Yield the run's tier as a restore reads it: with what redundancy gives back."""
        if not isinstance(self._here, JoinedTier):
            yield self._here
            return
        with closing(RecoveringTier(self._here)) as recovering:
            yield recovering

    def _fetch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Copy a checkpoint back, at full speed: everybody waits for it. A lease keeps it there as long as that takes."""
        config = self._config
        settings = CopySettings(stall_s=min(MAX_STALL_S, config.restore_timeout_s), direct=config.direct_io)
        commit = _commit(arguments["commit"])
        host, pid = os.uname().nodename, os.getpid()
        with Reader(self._there, lease_s=config.lease_s, limit_s=settings.stall_s, host=host, pid=pid) as reader:
            reader.hold(commit)
            done = replicate(
                self._there,
                self._here,
                commit,
                settings=settings,
                cancelled=self._flag(arguments["key"]),
                restrict=True,
                own_is_over=True,
            )
        return {"bytes": done.sent_bytes, "seconds": done.seconds}

    # -- after a commit --------------------------------------------------------------------------------------------------

    def _begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take the claim on a checkpoint (None: the newest good one here) and write what comes before its data.

        Returns:
            `commit`: None if there is nothing to copy. `complete`: the second place has it. `claim`: for the nodes that copy. `nodes`:
            those of the checkpoint whose files are to be copied. `bytes`: of all its files.
        """
        key = arguments["key"]
        commit = _commit(arguments["commit"]) if arguments["commit"] is not None else self._newest()
        if commit is None:
            return {"commit": None, "complete": True, "created_s": 0.0}
        trials = self._trials(key)
        documents = Documents(
            self._here, self._there, commit, trials, restrict=False, clock=SYSTEM_CLOCK, patience_s=1.0
        )
        claim = self._make_way(documents, was_full=bool(arguments.get("full")))
        assert documents.checkpoint is not None
        manifest = documents.checkpoint.manifest
        answer = {"commit": _wire(commit), "complete": claim is None, "created_s": manifest.created_s}
        answer["bytes"] = manifest.total_bytes
        if claim is None:
            return answer
        with self._lock:
            self._begun = {key: _Begun(documents, claim, trials)}
        nodes = [ref.node for ref in manifest.nodes]
        if documents.mends:
            nodes = []
            with _leaving(claim):
                data = DataHalf(
                    self._here,
                    self._there,
                    commit,
                    node_records=dict(documents.checkpoint.records),
                    trials=trials,
                    claim=claim,
                )
                data.copy()
        return {**answer, "claim": records.encode_replication(claim.record), "nodes": nodes, **_sent(trials)}

    def _make_way(self, documents: Documents, *, was_full: bool) -> Claim | None:
        """Begin; where what is no checkpoint there leaves too little room, the second place's keep rule is applied first."""
        try:
            return documents.begin(own_is_over=True, was_full=was_full, observer=self._observer)
        except StorageFullError as exc:
            if exc.tier != self._there.name:
                raise
            pins, keep = snapshots.take(self._here).pins, Keep(last=self._config.remote_keep)
            if not replicas.let_go(pins, self._there, keep, grace_s=0.0, observer=self._observer).deleted:
                raise
        return documents.begin(own_is_over=True)

    def _newest(self) -> CommitId | None:
        seen = Catalog(self._here).snapshot()
        believed = belief.believed(seen.listing)
        good = [commit for commit in believed if commit not in seen.quarantined]
        return next(iter(good or believed), None)

    def _data(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Copy the data of some nodes, under the claim that the lead has taken."""
        commit, key = _commit(arguments["commit"]), arguments["key"]
        record = records.decode_replication(arguments["claim"], path="claim")
        catalog = Catalog(self._here)
        _, manifest = catalog.read_manifest(commit)
        trials = self._trials(key)
        share = DataHalf(
            self._here,
            self._there,
            commit,
            node_records={node: catalog.read_record(manifest, node) for node in arguments["nodes"]},
            trials=trials,
            claim=replica_claim.share(self._there, record, arguments["node"]),
        )
        share.copy()
        return _sent(trials)

    def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Make a checkpoint of what all nodes have copied, and let go of what the second place does not keep.

        Returns:
            `problem`: what kept older ones from being let go, or None.
        """
        with self._lock:
            begun = self._begun.pop(arguments["key"], None)
        if begun is None:
            raise StorageError("the process that had begun this replication is gone", tier=self._there.name)
        begun.documents.finish(begun.claim)
        try:
            seen = snapshots.take(self._here)
            believed = {*belief.believed(seen.listing), *belief.shadowed(seen.listing)}
            replicas.sweep_left(believed, snapshots.take(self._there), self._there, own_is_over=True)
            swept = replicas.let_go(
                seen.pins,
                self._there,
                Keep(last=arguments["keep"]),
                grace_s=self._config.delete_grace_s,
                observer=self._observer,
            )
        except CheckpointError as exc:
            return {"problem": str(exc)}
        return {"problem": None if swept.problem is None else str(swept.problem)}

    def _leave(self, arguments: dict[str, Any]) -> None:
        """Let somebody else go on with a replication at once."""
        with self._lock:
            begun = self._begun.pop(arguments["key"], None)
        if begun is not None:
            begun.claim.leave()


class _leaving:
    """Leaves a claim if something goes wrong."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: object, where: object) -> None:
        if kind is not None:
            self._claim.leave()


def _put_new(tier: Tier, path: str, data: bytes) -> None:
    try:
        tier.put(path, data, exclusive=True)
    except FileExistsError:
        if tier.get(path, limit_bytes=len(data)) != data:
            raise ConfigurationError("another run has taken this directory meanwhile", path=tier.url) from None
        tier.sync_tree(path.rpartition("/")[0])


def _sent(trials: Trials) -> dict[str, int]:
    return {"sent_bytes": trials.sent_bytes, "kept_bytes": trials.kept_bytes}


def _commit(numbers: Any) -> CommitId:
    step, incarnation, attempt = numbers
    return CommitId(step, incarnation, attempt)


def _wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]
