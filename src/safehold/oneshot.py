"""Saving and loading once, without an agent: the same format, for scripts, exports and evaluation."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from safehold.cli import config_source
from safehold.config import Config
from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FormatVersionError,
    IntegrityError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
)
from safehold.pipeline import direct_save
from safehold.pipeline.apart import differing
from safehold.pipeline.catalog import Catalog, Checkpoint, RestoreCandidate, find_restore_candidate
from safehold.pipeline.direct_load import load_tree, saved_index
from safehold.pipeline.exchange import Exchange, membership
from safehold.pipeline.leases import Reader, is_committed
from safehold.pipeline.restore import Reading
from safehold.pipeline.storage_thread import within
from safehold.pipeline.stored_objects import StoredObjects
from safehold.state.leaves import Destination, RestoreOptions
from safehold.state.restore_binding import bind_for_restore, mismatch_error
from safehold.tiers.base import Tier
from safehold.tiers.open import open_tier
from safehold.trainer.metrics import metric_values
from safehold.trainer.steps import step_number
from safehold.types import CommitId, Store

log = logging.getLogger("safehold")

MAX_MISSED = 16
"""So often a checkpoint may be un-committed just before it is leased; the next one is read all the same."""


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    step: int = 0,
    metrics: dict[str, float] | None = None,
    random_states: bool = False,
    overwrite: bool = False,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> int:
    """Save `state` as one checkpoint of the run directory `path`, and return when it is durable.

    Collective where there are several ranks, over the launcher's store. Opens an incarnation of its own, so it must not be used on the
    directory of a training that is running. No agent is started and no retention is applied. Settings come from the environment and
    from `safehold.toml`, as those of a `Checkpointer` do.

    Args:
        path: The run directory; made if absent.
        state: As for `Checkpointer.save`.
        step: Names the checkpoint.
        metrics: Kept with it.
        random_states: Save random states too.
        overwrite: Replace a committed checkpoint of this step.
        store: See `Checkpointer`.
        rank: See `Checkpointer`.
        world_size: See `Checkpointer`.

    Returns:
        The step.

    Raises:
        ConfigurationError: An argument or a setting is wrong, on some rank; nothing was written.
        CheckpointError: Nothing was committed; the same on all ranks.
    """
    config = _settings()
    member = membership(store, rank, world_size)
    exchange = Exchange(member, "save", config.start_timeout_s)
    error: CheckpointError | None = None
    try:
        step = step_number(step, member.rank)
        metrics = metric_values({} if metrics is None else metrics, step)
    except ConfigurationError as exc:
        error = exc
    with exchange.telling():
        exchange.agree("arguments", error)
    assert metrics is not None
    tier = open_tier(path, direct=config.direct_io)
    direct_save.save(
        tier,
        exchange,
        state,
        config=config,
        member=member,
        step=step,
        metrics=metrics,
        random_states=random_states,
        overwrite=overwrite,
        token=secrets.token_hex(16),
    )
    return step


def load(
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    step: int | None = None,
    names: Sequence[str] | None = None,
    partial: bool | Sequence[str] | None = None,
    rename: dict[str, str] | Callable[[str], str] | None = None,
    cast: bool = False,
    random_states: bool = False,
    lease: bool = True,
) -> Any:
    """Load a checkpoint; no agent, no other rank takes part.

    While it is read, a small file in the run directory (a lease) keeps the retention of a run that goes on from deleting it. Where none
    can be written, the load goes on without, and says so once in the log.

    Args:
        path: The run directory.
        state: A template to fill in place, as for `Checkpointer.restore`; None: build plain values from what was saved.
        step: Which step; None: the newest good one. Newer ones that do not verify are named in the log.
        names: Without a template: a glob pattern over FQNs, or several; only matching leaves are read.
        partial: See `Checkpointer.restore`.
        rename: See `Checkpointer.restore`.
        cast: See `Checkpointer.restore`.
        random_states: With a template: set the random states of rank 0.
        lease: Whether to take a lease; False: nothing is written.

    Returns:
        `state`, or, without a template, nested dicts and lists with full tensors (torch's where torch is importable,
        NumPy arrays elsewhere) and plain values; of what is kept per rank, rank 0's.

    Raises:
        StepNotFoundError: There is no such directory, run or checkpoint, or none that can be used.
        IntegrityError: It does not verify, and there is no older one; the message says if the state was touched.
        StorageError: It cannot be read, and there is no older one.
        StateMismatchError: Template and checkpoint do not fit; nothing was overwritten. Or one of `names` matches no leaf.
        ConfigurationError: `rename` speaks of what is not in the checkpoint, something is given that needs a template, or an argument
            or a setting is wrong.
        DeadlineError: Storage stalled.
    """
    if state is not None and names is not None:
        raise StateMismatchError("names= goes without a template", hint="with a template use partial=")
    if state is None and (partial is not None or rename is not None or cast or random_states):
        raise ConfigurationError(
            "partial=, rename=, cast= and random_states= need a template: they say how it is filled"
        )
    config = _settings()
    step = None if step is None else step_number(step)
    tier = open_tier(path, direct=config.direct_io)
    options = RestoreOptions(partial=partial, rename=rename, cast=cast)

    def read(checkpoint: Checkpoint) -> Any:
        if state is None:
            return load_tree(tier, checkpoint, names, config)
        _fill(tier, checkpoint, state, options, random_states, config)
        return state

    with _reader(path, config, lease) as reader:
        return _load(tier, step, config, reader, read)


def _reader(path: str | os.PathLike[str], config: Config, lease: bool) -> Reader:
    """Return what takes leases; their files can be read by the agent of a run that is another user's."""
    tier = open_tier(path, file_mode=0o644, dir_mode=0o755) if lease else None
    return Reader(
        tier, lease_s=config.lease_s, limit_s=config.stall_timeout_s, host=os.uname().nodename, pid=os.getpid()
    )


def _load(tier: Tier, step: int | None, config: Config, reader: Reader, read: Callable[[Checkpoint], Any]) -> Any:
    """Find a checkpoint and read it under a lease; where it does not verify, the next one."""
    failed: list[tuple[CommitId, CheckpointError]] = []
    missed = 0
    while True:
        found = _candidate(tier, step, failed, config)
        assert found.checkpoint is not None
        commit = found.checkpoint.commit
        if reader.hold(commit) and missed < MAX_MISSED and not _is_committed(tier, commit, config):
            missed += 1  # it was un-committed before the lease was there: what was found is of no use
            continue
        rejected = [*failed, *found.rejected]
        try:
            loaded = read(found.checkpoint)
        except (IntegrityError, StorageError) as exc:
            if isinstance(exc, FormatVersionError):
                raise
            failed.append((commit, exc))
            continue
        except CheckpointError as exc:
            _note(exc, rejected)
            raise
        for other, error in rejected:
            log.warning("safehold: step %d cannot be used: %s", other.step, error)
        return loaded


def _is_committed(tier: Tier, commit: CommitId, config: Config) -> bool:
    """Look again, after the lease was taken."""
    return within(config.stall_timeout_s, "looking for a checkpoint", lambda: is_committed(tier, commit), path=tier.url)


def _settings() -> Config:
    """Return the settings of `safehold.toml` and the environment, as a `Checkpointer` without arguments has them."""
    return config_source.build(Config, config_source.load(Config))


def _candidate(
    tier: Tier, step: int | None, failed: list[tuple[CommitId, CheckpointError]], config: Config
) -> RestoreCandidate:
    """Return the next checkpoint to try; where there is none any more, raise what was wrong with the first."""
    tried = [commit for commit, _ in failed]
    try:
        found = within(
            config.stall_timeout_s,
            "looking for a checkpoint",
            lambda: find_restore_candidate(tier, step, exclude=tried),
            path=tier.url,
        )
    except DeadlineError:
        raise
    except CheckpointError as exc:
        if failed:
            first = failed[0][1]
            _note(first, failed[1:])
            first.add_note(f"safehold: {exc}")
            raise first from first.__cause__
        if isinstance(exc, StepNotFoundError | ConfigurationError):
            _require_run(tier, step)
        raise
    for problem in () if failed else found.problems:
        log.warning("safehold: %s", problem)
    if found.checkpoint is None:
        _require_run(tier, step)
        hint = "nothing was saved to it yet, or nothing was finished; look with 'safehold ls --all'"
        raise StepNotFoundError("the run has no checkpoint", step=step, path=tier.url, hint=hint)
    return found


def _note(error: CheckpointError, rejected: Sequence[tuple[CommitId, CheckpointError]]) -> None:
    """Have an error tell what came before it."""
    for commit, why in rejected:
        error.add_note(f"safehold: step {commit.step} cannot be used: {why}")


def _require_run(tier: Tier, step: int | None) -> None:
    """Say so where there is no run at all."""
    try:
        Catalog(tier).require_run()
    except ConfigurationError as exc:
        raise StepNotFoundError(exc.message, step=step, path=exc.path, hint=exc.hint) from exc


def _fill(
    tier: Tier, checkpoint: Checkpoint, state: Any, options: RestoreOptions, random_states: bool, config: Config
) -> None:
    binding = bind_for_restore(
        state, saved_index(checkpoint), rank=0, world_size=1, options=options, random_states=random_states
    )
    stored = within(
        config.stall_timeout_s, "reading the objects", lambda: StoredObjects(tier, checkpoint), path=tier.url
    )
    values = stored.values(binding.object_names, rank=0, world_size=1)

    def reading(destinations: Sequence[Destination]) -> Reading:
        return Reading(
            tier,
            checkpoint,
            destinations,
            rank=0,
            memory=lambda _: None,
            num_threads=config.restore_threads,
            stall_s=config.stall_timeout_s,
        )

    apart = differing(binding.apart, lambda both: reading(both).run())
    mismatched = [*binding.mismatched, *binding.check(values), *apart]
    error = mismatch_error(binding.missing, binding.unexpected, mismatched, binding.unused)
    if error is not None:
        raise error
    for text in binding.unused:
        log.warning("safehold: of no use: %s", text)
    try:
        reading(binding.destinations).run()
    except CheckpointError as exc:
        exc.message += "; the state was partly overwritten"
        raise
    except BaseException as exc:
        exc.add_note("safehold: the state was partly overwritten")
        raise
    binding.apply(values)
    if random_states:
        binding.apply_random(values)
