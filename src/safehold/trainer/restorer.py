"""The trainer's side of a restore: ask, bind, vote, read, vote, apply.

Invariants: nothing is overwritten before all ranks have said that the checkpoint fits their state; objects and `load_state_dict` come
after all ranks have said that all their tensors verified; random states come last. All ranks restore the same step or raise. An error
says whether the state was touched.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    IntegrityError,
    StateMismatchError,
    StorageError,
    from_wire,
)
from safehold.events import EventStream
from safehold.format import paths
from safehold.host.memfd import Mapping
from safehold.pipeline.apart import differing
from safehold.pipeline.catalog import Catalog, Checkpoint
from safehold.pipeline.direct_load import saved_index
from safehold.pipeline.joining import guess_for
from safehold.pipeline.recovering import RecoveringTier, RedundancySource
from safehold.pipeline.restore import Reading, RestoreFigures
from safehold.pipeline.storage_thread import within
from safehold.pipeline.stored_objects import StoredObjects
from safehold.policy import passing_on
from safehold.state.leaves import Destination, RestoreBinding, RestoreOptions, TensorLeaf
from safehold.state.restore_binding import bind_for_restore, mismatch_error
from safehold.tiers.base import Tier
from safehold.tiers.joined import JoinedTier
from safehold.trainer import collector
from safehold.trainer.connection import Reconnector, Run
from safehold.trainer.held_tier import HeldTier
from safehold.trainer.passing import Passing
from safehold.types import CommitId

log = logging.getLogger("safehold")
MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        step: The step restored.
        seconds: From the call to its return.
        read_s: Of that, reading and verifying tensors.
        bytes: Bytes that this rank read.
        source: Where they came from: `memory`, `partner` (memory of other nodes), `flash` (`remote` if it was fetched from there first),
            `peers` (passed on by another node), `copy` or `parity` (of a node that was lost), joined by `+`.
        bytes_by_source: The bytes from each.
        storage_bytes: Bytes that this rank has read from storage, for itself and for others.
        node_storage_bytes: The same of all ranks of this node, where bytes are passed on between nodes; else 0.
        left_out: With `partial`: what was not restored.
        skipped: Newer checkpoints that could not be used, and why.
        tier: Where the checkpoint is: `flash`, or `memory`: on no storage.
        replaced: Sources that failed for some bytes, which came from another.
    """

    step: int
    seconds: float
    read_s: float
    bytes: int
    source: str
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    storage_bytes: int = 0
    node_storage_bytes: int = 0
    left_out: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    tier: str = "flash"
    replaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        read = f"{self.bytes / 1e9:.3f} GB read by this rank"
        read += "; the step is on no storage yet, and the next save is flushed" if self.tier == "memory" else ""
        return f"restored step {self.step} from {self.source} in {self.seconds:.3f} s ({read})"


@dataclass(slots=True)
class _Attempt:
    """One offer being tried."""

    offer: m.RestoreOffer
    touched: bool = False
    unused: list[str] = field(default_factory=list)
    held: HeldTier | None = None
    memory: dict[int, tuple[Mapping, list[memoryview]]] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    passing: Passing | None = None
    node_storage_bytes: int = 0


class Restorer:
    """All restores of one rank.

    Args:
        run: The run that was joined.
        tier: The run's tier, for reading.
        rank: This rank.
        world_size: Number of ranks.
        config: Settings.
        events: The event stream.
        random_states: Whether random states are restored.
        progress: Shows progress: (bytes done, bytes in all).
    """

    def __init__(
        self,
        run: Run,
        tier: Tier,
        *,
        rank: int,
        world_size: int,
        config: Config,
        events: EventStream,
        random_states: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._run, self._tier, self._rank, self._world_size = run, tier, rank, world_size
        self._config, self._events, self._random_states = config, events, random_states
        self._progress = progress
        self._reconnector = Reconnector(run, config)
        self._bound: list[TensorLeaf] = []

    def close(self) -> None:
        """Close the ways to other nodes' disks, where there are any."""
        if isinstance(self._tier, JoinedTier):
            from safehold.agent import joined_flash

            joined_flash.close(self._tier)

    def take_bound(self) -> list[TensorLeaf]:
        """Return the leaves that the last restore has filled, once."""
        bound, self._bound = self._bound, []
        return bound

    def restore(self, state: Any, step: int | None, options: RestoreOptions) -> RestoreReport | None:
        """Restore; None only if the run has no commit at all. See `Checkpointer.restore`."""
        started = time.perf_counter()
        touched, told = False, list[str]()
        while True:
            self._reconnector.ensure()
            offer, _ = self._run.client.request(
                m.RestoreAsk(0, step), m.RestoreOffer, self._config.restore_timeout_s, "what to restore"
            )
            for text in [text for text in offer.skipped if text not in told]:
                told.append(text)  # the next offer says it again
                log.warning("safehold: %s", text)
            if offer.step is None:
                return None
            attempt = _Attempt(offer, touched)
            try:
                with self._events.span("restore", step=offer.step, rank=self._rank):
                    report = self._try(attempt, state, options, started)
            except CheckpointError as exc:
                if attempt.touched and "state was" not in exc.message:
                    exc.message += "; the state was partly overwritten"
                raise
            except BaseException as exc:
                if attempt.touched:
                    exc.add_note("safehold: the state was partly overwritten")
                raise
            finally:
                if attempt.passing is not None:
                    attempt.passing.end(done=False)
                for mapping, views in attempt.memory.values():
                    views.clear()
                    mapping.close()
            touched = attempt.touched
            if report is not None:
                return report

    def _try(self, attempt: _Attempt, state: Any, options: RestoreOptions, started: float) -> RestoreReport | None:
        """Try one offer; None: it was bad, ask for the next."""
        offer = attempt.offer
        try:
            values, binding, reading = self._bind(attempt, state, options)
        except CheckpointError as exc:
            self._no(attempt, "planned", exc)
            return None
        except Exception as exc:
            self._no_of_others(attempt, "planned", exc)
            raise
        num_chunks, chunks = reading.wants
        vote = m.Vote(
            0,
            offer.round,
            "planned",
            missing=binding.missing,
            unexpected=binding.unexpected,
            mismatched=binding.mismatched,
            num_chunks=num_chunks,
            wants=passing_on.encode(chunks, num_chunks) if chunks else b"",
        )
        if not self._goes_on(self._vote(vote), attempt.unused):
            return None
        if chunks:
            self._pass_on(attempt, reading)
        attempt.touched = bool(binding.destinations) or attempt.touched
        try:
            with self._events.span("read", step=offer.step, rank=self._rank):
                figures = reading.run()
        except CheckpointError as exc:
            self._no(attempt, "verified", exc)
            return None
        except Exception as exc:
            self._no_of_others(attempt, "verified", exc)
            raise
        if not self._goes_on(self._vote(m.Vote(0, offer.round, "verified", storage_bytes=figures.storage_bytes))):
            return None
        if attempt.passing is not None:
            attempt.node_storage_bytes = attempt.passing.end(done=True)
        binding.apply(values)
        binding.apply_random(values)
        assert offer.step is not None
        with suppress(CheckpointError):  # it is restored, whatever became of the agent
            self._run.client.tell(m.RestoreDone(-1, offer.step))
        self._bound = [entry.leaf for entry in binding.destinations]
        return self._report(attempt, binding, figures, started)

    def _bind(
        self, attempt: _Attempt, state: Any, options: RestoreOptions
    ) -> tuple[dict[str, Any], RestoreBinding, Reading]:
        offer = attempt.offer
        assert offer.step is not None
        commit = CommitId(offer.step, offer.incarnation, offer.attempt)
        if offer.tier == "memory":
            attempt.held = HeldTier(self._run, self._config, commit, offer.in_memory_of)
        with self._events.span("documents", step=offer.step, rank=self._rank):
            checkpoint, stored = within(
                self._config.stall_timeout_s,
                "reading the documents of a checkpoint",
                lambda: self._documents(commit, offer, attempt.held),
                path=attempt.held.url if attempt.held is not None else self._tier.url,
            )
        with collector.paused(), self._events.span("bind", step=offer.step, rank=self._rank):
            binding = bind_for_restore(
                state,
                saved_index(checkpoint),
                rank=self._rank,
                world_size=self._world_size,
                options=options,
                random_states=self._random_states,
            )
            shared = self._shares(binding) and not offer.memory
            reading = self._reading(attempt, checkpoint, binding.destinations, shared=shared, progress=self._progress)
            values = stored.values(binding.object_names, rank=self._rank, world_size=self._world_size)
            binding.mismatched.extend(binding.check(values))
            binding.mismatched.extend(
                differing(binding.apart, lambda both: self._reading(attempt, checkpoint, both, shared=shared).run())
            )
            attempt.unused, attempt.checkpoint = binding.unused, checkpoint
        return values, binding, reading

    def _pass_on(self, attempt: _Attempt, reading: Reading) -> None:
        assert attempt.checkpoint is not None
        attempt.passing = Passing(self._run.client, self._config, self._run.world.node_names, attempt.offer.round)
        attempt.passing.begin(reading, self._tier, attempt.checkpoint)

    def _documents(
        self, commit: CommitId, offer: m.RestoreOffer, held: HeldTier | None
    ) -> tuple[Checkpoint, StoredObjects]:
        tier: Any = held or self._tier
        if isinstance(tier, JoinedTier):
            tier.look_first(guess_for(paths.checkpoint_dir(commit), offer.holders))
        if isinstance(tier, RecoveringTier):
            tier.forget()
        catalog, run_id = Catalog(tier, patience_s=5.0 if held is None else 0.0), self._run.run_id
        checkpoint = catalog.load(commit, manifest_bytes=offer.manifest, run_id=run_id, lazy=True)
        return checkpoint, StoredObjects(tier, checkpoint)  # which looks at the records, too

    def _reading(
        self,
        attempt: _Attempt,
        checkpoint: Checkpoint,
        destinations: Sequence[Destination],
        *,
        shared: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> Reading:
        in_memory, held = bool(attempt.offer.memory), attempt.held
        return Reading(
            self._tier,
            checkpoint,
            destinations,
            rank=self._rank,
            memory=lambda rank: self._memory(attempt, rank),
            num_threads=self._num_threads(in_memory=in_memory),
            stall_s=self._config.stall_timeout_s,
            shared=shared,
            in_memory=in_memory,
            verified=attempt.offer.verified,
            passing=held is None and not in_memory and self._passes_on(),
            redundancy=lambda node, file: self._redundancy(checkpoint, node, file),
            progress=progress,
            elsewhere=(lambda rank, part: held.sources(checkpoint, rank, part)) if held is not None else None,
        )

    def _passes_on(self) -> bool:
        """Whether nodes read from one storage what many of them want, each a share; own disks are no such thing."""
        several = len(self._run.world.node_names) > 1
        return several and self._config.restore_pass_on != "off" and not isinstance(self._tier, JoinedTier)

    def _redundancy(self, checkpoint: Checkpoint, node: int, file: str) -> RedundancySource | None:
        if not isinstance(self._tier, RecoveringTier):
            return None
        return RedundancySource(self._tier, checkpoint.manifest, node, file)

    def _num_threads(self, *, in_memory: bool) -> int:
        """Threads that read; copies from memory are bound by cores, which the ranks of the node share."""
        if not in_memory:
            return self._config.restore_threads
        cores = len(os.sched_getaffinity(0))
        world = self._run.world
        beside = len(world.ranks_of(world.node_of[self._rank]))
        return max(1, min(self._config.restore_threads, cores // beside))

    def _shares(self, binding: RestoreBinding) -> bool:
        """Whether most of what this rank reads is wanted by other ranks of the node too."""
        if self._world_size == 1:
            return False
        world = self._run.world
        here = set(world.ranks_of(world.node_of[self._rank]))
        common = own = 0
        for entry in binding.destinations:
            holders = entry.leaf.holders
            numel = sum(rect.numel for rect, _ in entry.leaf.pieces)
            if len(here if holders.ranks is None else here.intersection(holders.ranks)) > 1:
                common += numel
            else:
                own += numel
        return common > own

    def _memory(self, attempt: _Attempt, rank: int) -> list[memoryview] | None:
        if rank not in attempt.offer.memory:
            return None
        found = attempt.memory.get(rank)
        if found is None:
            offer = attempt.offer
            commit = (offer.step or 0, offer.incarnation, offer.attempt)
            try:
                reply, fds = self._run.client.request(
                    held_messages.MemoryAsk(0, rank, commit),
                    held_messages.MemorySource,
                    self._config.request_timeout_s,
                    "the memory of a rank",
                )
            except CheckpointError:
                return None
            try:
                mapping = Mapping(fds[0], reply.arena_bytes, writable=False)
            except (CheckpointError, IndexError):
                return None
            finally:
                for fd in fds:
                    os.close(fd)
            views = [mapping.view[start : start + size] for start, size in reply.packs]
            found = attempt.memory[rank] = (mapping, views)
        return found[1]

    # -- votes -----------------------------------------------------------------------------------------------------------------

    def _vote(self, vote: m.Vote) -> m.Verdict:
        verdict, _ = self._run.client.request(
            vote, m.Verdict, self._config.restore_timeout_s, "the ranks' vote on a restore"
        )
        return verdict

    def _no(self, attempt: _Attempt, phase: str, error: CheckpointError) -> None:
        bad = _speaks_of_the_checkpoint(error)
        if error.rank is None:
            error.rank = self._rank
        if isinstance(error, AgentUnavailableError):
            raise error
        offer = attempt.offer
        directory = paths.checkpoint_dir(CommitId(offer.step or 0, offer.incarnation, offer.attempt))
        path = (error.path or directory) if bad else ""
        self._goes_on(self._vote(m.Vote(0, attempt.offer.round, phase, error.to_wire(), path)))

    def _no_of_others(self, attempt: _Attempt, phase: str, exc: Exception) -> None:
        """Something that is no error of ours was raised, and will be; the other ranks must not wait for this one."""
        error = StateMismatchError(f"{type(exc).__name__}: {exc}", step=attempt.offer.step, rank=self._rank)
        with suppress(CheckpointError):
            self._vote(m.Vote(0, attempt.offer.round, phase, error.to_wire()))

    def _goes_on(self, verdict: m.Verdict, unused: Sequence[str] = ()) -> bool:
        """Return True to go on, False to ask for the next offer; raises where the restore stops."""
        if verdict.incarnation:
            self._run.client.incarnation = verdict.incarnation
        if verdict.outcome == "go":
            return True
        if verdict.outcome == "again":
            return False
        if verdict.misfit is not None:
            error = mismatch_error(*verdict.misfit, unused)
            raise error if error is not None else StateMismatchError("the state does not fit")
        raise from_wire(verdict.error or {"class": "IntegrityError", "message": "the restore was stopped"})

    def _report(
        self, attempt: _Attempt, binding: RestoreBinding, figures: RestoreFigures, started: float
    ) -> RestoreReport:
        for text in binding.left_out[:MAX_LISTED]:
            log.warning("safehold: not restored: %s", text)
        if len(binding.left_out) > MAX_LISTED:
            log.warning("safehold: and %d more; all are in last_restore.left_out", len(binding.left_out) - MAX_LISTED)
        for text in binding.unused:
            log.warning("safehold: of no use: %s", text)
        for text in figures.replaced:
            log.warning("safehold: replaced by another source: %s", text)
        assert attempt.offer.step is not None
        names, fetched = figures.bytes_by_source, attempt.offer.fetched
        return RestoreReport(
            step=attempt.offer.step,
            seconds=time.perf_counter() - started,
            read_s=figures.seconds,
            bytes=figures.bytes,
            source="+".join(sorted("remote" if name == "flash" and fetched else name for name in names)) or "none",
            bytes_by_source=dict(figures.bytes_by_source),
            storage_bytes=figures.storage_bytes,
            node_storage_bytes=attempt.node_storage_bytes,
            left_out=tuple(binding.left_out),
            skipped=tuple(attempt.offer.skipped),
            tier=attempt.offer.tier,
            replaced=tuple(figures.replaced),
        )


def _speaks_of_the_checkpoint(error: CheckpointError) -> bool:
    """Whether an error means that stored bytes are lost, and not that this rank has a trouble of its own (no descriptors, no memory)."""
    lost = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
    return isinstance(error, IntegrityError) or (isinstance(error, StorageError) and lost)
