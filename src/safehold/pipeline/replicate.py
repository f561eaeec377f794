"""Copies committed checkpoints from one place to another, and back: the copy is a run directory under the same names and bytes.

Invariants: the manifest is written last, when everything that it names was verified on its way and is durable, and only while
the source still believes the checkpoint and the second place will. A manifest, an incarnation or `run.json` is never replaced
by another: what is there and differs is refused by name. Whatever stops a replication, the second place has the checkpoint
whole or not at all, and what was complete is not sent again. Nothing is written at the source.

Must not live here: the halves (`safehold.pipeline.replication_halves`), rules (`safehold.policy.replication`).
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import ConfigurationError
from safehold.pipeline.replication_halves import DataHalf, Documents
from safehold.pipeline.trials import CopySettings, Progress, Trials
from safehold.tiers.base import Tier
from safehold.types import CommitId


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
    own_is_over: bool = False,
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
        own_is_over: What this very process copied before is over.

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
    began = time.monotonic()
    trials = Trials(settings or CopySettings(), cancelled, progress, clock=clock, rng=rng)
    documents = Documents(source, target, commit, trials, restrict=restrict, clock=clock, patience_s=patience_s)
    claim = documents.begin(own_is_over=own_is_over)
    if claim is not None:
        assert documents.checkpoint is not None
        node_records = dict(documents.checkpoint.records)
        data = DataHalf(source, target, commit, node_records=node_records, trials=trials, claim=claim)
        try:
            data.copy()
        except BaseException:
            claim.leave()
            raise
        documents.finish(claim)
    return Replicated(
        commit=commit,
        was_there=claim is None,
        sent_bytes=trials.sent_bytes,
        kept_bytes=trials.kept_bytes,
        seconds=time.monotonic() - began,
    )
