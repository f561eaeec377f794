"""A save without an agent: stage, flush and commit inside the calling process, the same steps and the same format.

Invariants: collective over the given exchange; either all ranks return after the commit or all raise the same error. A private arena of
this rank's size is used and freed. Undeclared tensors are settled and compared as in any first save.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from safehold.config import Config
from safehold.errors import CheckpointError, CommitError, ConfigurationError, DeadlineError, from_os_error
from safehold.events import EventStream
from safehold.format import objects
from safehold.format import plan as plans
from safehold.host import memfd
from safehold.host.device import open_device
from safehold.pipeline import ledger, maintenance, sweep
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.exchange import Exchange, node_name
from safehold.pipeline.flush import FlushJob, StagedWord, flush_rank
from safehold.pipeline.layout import Planner
from safehold.pipeline.staging import Stager
from safehold.pipeline.storage_thread import within
from safehold.policy import belief
from safehold.policy import settlement as settlements
from safehold.policy.compare import disagreements, mismatch
from safehold.policy.coverage import check as check_coverage
from safehold.state.collect import collect
from safehold.state.leaves import Leaves
from safehold.tiers.base import Tier
from safehold.types import CommitId, Membership, TensorSpec

log = logging.getLogger("safehold")
INTERRUPT_GRACE_S = 10.0


class _Word:
    """Staging progress of a save that flushes only after staging."""

    def __init__(self) -> None:
        self.staged = 0

    def advance_staged(self, num_bytes: int) -> None:
        self.staged = num_bytes


def save(
    tier: Tier,
    exchange: Exchange,
    state: Any,
    *,
    config: Config,
    member: Membership,
    step: int,
    metrics: dict[str, float],
    random_states: bool,
    overwrite: bool,
    token: str,
) -> None:
    """Save one checkpoint; see `safehold.save`.

    Raises:
        CheckpointError: Nothing was committed, or the message says that this is not known; the same on all ranks.
    """
    with exchange.telling():
        _save(tier, exchange, state, config, member, step, metrics, random_states, overwrite, token)


def _save(
    tier: Tier,
    exchange: Exchange,
    state: Any,
    config: Config,
    member: Membership,
    step: int,
    metrics: dict[str, float],
    random_states: bool,
    overwrite: bool,
    token: str,
) -> None:
    limit_s = config.stage_timeout_s + config.flush_timeout_s
    collected = _try("collecting the state", lambda: _collect(state, member, random_states))
    _agree(exchange, "collected", collected.error)
    leaves: Leaves = collected.value
    opened = exchange.decide(
        "opened",
        lambda: _within(config, "opening the run", lambda: _open(tier, config, token, step, overwrite)),
        limit_s,
    )
    commit = CommitId(step, opened["incarnation"], opened["attempt"])
    try:
        _save_opened(tier, exchange, leaves, config, member, commit, opened, metrics)
    except Exception:
        raise
    except BaseException:  # Ctrl-C: what is not committed shall not lie about
        if member.rank == 0:
            _discard(tier, config, commit)
        raise


def _save_opened(
    tier: Tier,
    exchange: Exchange,
    leaves: Leaves,
    config: Config,
    member: Membership,
    commit: CommitId,
    opened: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    limit_s = config.stage_timeout_s + config.flush_timeout_s
    planner = Planner(
        member.rank, member.world_size, pack_size_bytes=config.pack_size_bytes, split_bytes=config.split_bytes
    )
    planned = _try("planning", lambda: planner.undeclared(planner.layout(leaves)))
    _agree(exchange, "planned", planned.error)
    planner.settlement = _settle(exchange, planned.value)
    written = _try("writing", lambda: _write(tier, commit, planner, leaves, member, config))
    try:
        _agree(exchange, "written", written.error, limit_s)
    except CheckpointError:
        if member.rank == 0:
            _discard(tier, config, commit)
        raise
    shares = exchange.gather("shares", written.value) or []

    def commit_it() -> None:
        try:
            _within(config, "committing", lambda: _commit(tier, config, commit, shares, opened, metrics))
        except CheckpointError as exc:
            if isinstance(exc, DeadlineError) or not _withdraw(tier, config, commit):
                exc.message += "; whether the checkpoint is committed is not known"
            raise

    try:
        exchange.decide("committed", commit_it, limit_s)
    finally:
        with suppress(CheckpointError):
            exchange.part()


@dataclass(frozen=True, slots=True)
class _Tried:
    """What became of something that may fail."""

    value: Any
    error: CheckpointError | None


def _try(doing: str, action: Callable[[], Any]) -> _Tried:
    """Do something of which the other ranks must be told if it fails, whatever the reason."""
    try:
        return _Tried(action(), None)
    except CheckpointError as exc:
        return _Tried(None, exc)
    except OSError as exc:
        error: CheckpointError = from_os_error(exc, doing)
        error.__cause__ = exc
    except Exception as exc:
        error = CommitError(f"{doing} failed: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
    return _Tried(None, error)


def _agree(exchange: Exchange, key: str, error: CheckpointError | None, timeout_s: float | None = None) -> None:
    """As `Exchange.agree`; where it was this rank's error that all raise, it keeps its cause."""
    try:
        exchange.agree(key, error, timeout_s)
    except CheckpointError as exc:
        if error is not None and error.to_wire() == exc.to_wire():
            raise error from error.__cause__
        raise


def _within(config: Config, doing: str, action: Callable[[], Any], cancelled: threading.Event | None = None) -> Any:
    """Do what touches storage, in a thread of its own; see `storage_thread`.

    Raises:
        DeadlineError: It did not end in time.
        CheckpointError: Why it failed.
    """
    limit_s = config.flush_timeout_s
    tried = within(limit_s, doing, lambda: _try(doing, action), cancelled=cancelled, grace_s=INTERRUPT_GRACE_S)
    if tried.error is not None:
        raise tried.error
    return tried.value


def _withdraw(tier: Tier, config: Config, commit: CommitId) -> bool:
    """Take back a checkpoint whose commit failed; return whether it is certain that nobody will believe it."""
    certain = _try("giving up", lambda: _within(config, "giving up", lambda: ledger.withdraw(tier, commit))).value
    if certain:
        _discard(tier, config, commit)
    return bool(certain)


def _discard(tier: Tier, config: Config, commit: CommitId) -> None:
    """Delete what a save that failed has written, as far as the storage lets us; the next one sweeps the rest."""
    _try("giving up", lambda: _within(config, "giving up", lambda: sweep.discard(tier, commit)))


def _collect(state: Any, member: Membership, random_states: bool) -> Leaves:
    return collect(state, rank=member.rank, world_size=member.world_size, random_states=random_states)


def _wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def _open(tier: Tier, config: Config, token: str, step: int, overwrite: bool) -> dict[str, Any]:
    known = belief.believed(Catalog(tier).listing()) if tier.list("") else []
    if not overwrite and any(commit.step == step for commit in known):
        hint = "pass overwrite=True to replace it, or another step"
        raise ConfigurationError(f"step {step} is committed already", step=step, path=tier.url, hint=hint)
    arguments: dict[str, Any] = {"token": token, "up_to": None, "exclude": [], "reason": "one save"}
    opened = maintenance.open_run(tier, config, arguments, EventStream("trainer"))
    try:
        sweep.sweep(tier, incarnation=opened["incarnation"], live=(), grace_s=config.delete_grace_s)
    except CheckpointError as exc:
        log.warning("safehold: what dead saves have left in %s could not be swept: %s", tier.url, exc)
    return {"run_id": opened["run_id"], "incarnation": opened["incarnation"], "attempt": 0}


def _settle(exchange: Exchange, undeclared: Sequence[TensorSpec]) -> settlements.Settlement:
    mine = [(spec.name, spec.dtype, list(spec.shape), spec.kind) for spec in undeclared]
    said = exchange.gather("undeclared", mine)

    def decide() -> Any:
        assert said is not None
        specs = {
            rank: [TensorSpec(name=n, dtype=d, shape=tuple(s), kind=k) for n, d, s, k in entries]
            for rank, entries in enumerate(said)
        }
        return settlements.to_wire(settlements.settle(specs))

    return settlements.from_wire(exchange.decide("settled", decide))


def _write(
    tier: Tier, commit: CommitId, planner: Planner, leaves: Leaves, member: Membership, config: Config
) -> dict[str, Any]:
    """Stage and flush this rank's share; returns what the commit needs of it."""
    began = time.monotonic()
    layout = planner.layout(leaves)
    comparison = planner.comparison(layout, leaves, commit.step)
    word = _Word()
    with _private_arena(comparison.arena_bytes) as arena:
        for offset, data in layout.headers:
            arena.view[offset : offset + len(data)] = data
        stager = Stager(open_device([view for leaf in leaves.tensors for _, view in leaf.pieces]), arena, word)
        try:
            items = [*layout.items, *comparison.items]
            ticket = stager.stage(items, overlap=False, size_bytes=comparison.arena_bytes, step=commit.step)
            staged_s = ticket.finish(config.stage_timeout_s).seconds
            encoded = {leaf.spec.name: objects.encode(leaf.value, name=leaf.spec.name) for leaf in leaves.objects}
            job = FlushJob(
                commit=commit,
                node=0,
                rank=member.rank,
                packs=layout.packs,
                compare=tuple(comparison.ranges),
                staged_total=comparison.arena_bytes,
                block_bytes=config.flush_block_bytes,
                threads=config.flush_threads,
                rate_bytes_s=0,
                deadline_s=config.flush_timeout_s,
            )
            staged, cancelled = StagedWord(lambda: word.staged, lambda *_: None), threading.Event()
            flushed = _within(
                config, "writing", lambda: flush_rank(tier, job, arena.view, staged, cancelled), cancelled
            )
        finally:
            stager.close()
    return {
        "rank": member.rank,
        "part": layout.part,
        "digest": layout.digest,
        "packs": [msgspec.to_builtins(entry) for entry in flushed.packs],
        "compare": flushed.compare,
        "objects": encoded,
        "timings": {
            "stage_s": staged_s,
            "allocate_s": flushed.allocate_s,
            "write_s": flushed.write_s,
            "sync_s": flushed.sync_s,
            "recorded_s": time.monotonic() - began,
        },
    }


@contextmanager
def _private_arena(size_bytes: int) -> Iterator[memfd.Mapping]:
    fd = memfd.create(max(4096, size_bytes), "save")
    try:
        arena = memfd.Mapping(fd)
    finally:
        os.close(fd)
    with arena:
        memfd.populate(arena)
        yield arena


def _commit(
    tier: Tier,
    config: Config,
    commit: CommitId,
    shares: list[dict[str, Any]],
    opened: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    """Rank 0: check, record, publish."""
    error = mismatch(disagreements({share["rank"]: share["compare"] for share in shares}), step=commit.step)
    if error is not None:
        raise error
    if len({share["rank"] for share in shares}) != len(shares):
        raise CommitError("two ranks wrote under one number", step=commit.step)
    plan = plans.merge_parts([share["part"] for share in shares], [0] * len(shares))
    check_coverage(plan)
    data = plans.encode_plan(plan)
    ledger.put_plan(tier, plans.digest(data), data)
    events = EventStream("trainer")
    recorded = maintenance.record(
        tier,
        config,
        {
            "commit": _wire(commit),
            "run_id": opened["run_id"],
            "node": 0,
            "node_name": node_name(),
            "packs": [entry for share in shares for entry in share["packs"]],
            "objects": {share["rank"]: share["objects"] for share in shares},
            "part_digests": {share["rank"]: share["digest"] for share in shares},
            "timings": {name: max(share["timings"][name] for share in shares) for name in shares[0]["timings"]},
        },
        events,
    )
    maintenance.publish(
        tier,
        config,
        {
            "commit": _wire(commit),
            "run_id": opened["run_id"],
            "world_size": len(shares),
            "nodes": [{"node": 0, **recorded}],
            "plan_digest": plans.digest(data),
            "plan_size": len(data),
            "metrics": metrics,
            "final": False,
        },
        events,
    )
