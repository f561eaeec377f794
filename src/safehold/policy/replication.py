"""Which checkpoints go to a second place, what of each in which order, and whether they would be believed there.

Invariants: pure. The manifest is last, so that the second place has a checkpoint as a whole or not at all. What is not
believed at the source is never chosen. A place that believes something is not left without anything to believe by
incarnation files that come before the checkpoint that they are for.

Must not live here: I/O (`safehold.pipeline.replicate`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from safehold.format import paths
from safehold.format.records import Incarnation, NodeRecord, PackRecord
from safehold.policy import belief, retention
from safehold.policy.belief import AttemptView, Listing
from safehold.policy.retention import CommitFacts, Keep
from safehold.types import CommitId

Phase = Literal["incarnations", "plan", "data", "records", "manifest"]
"""What is written one after the other, once `run.json` is there: each phase is durable before the next begins."""

EARLY: tuple[Phase, ...] = ("incarnations", "plan", "data", "records", "manifest")
LATE: tuple[Phase, ...] = ("plan", "data", "records", "incarnations", "manifest")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of the phase `data`.

    Attributes:
        path: Inside the run directory, the same on both sides.
        size_bytes: Its size.
        node: The node that wrote it.
        pack: Its record; None: the objects of the node.
    """

    path: str
    size_bytes: int
    node: int
    pack: PackRecord | None

    @property
    def name(self) -> str:
        """Its name in the checkpoint's directory."""
        return self.path.rpartition("/")[2]


def data_files(commit: CommitId, records: Mapping[int, NodeRecord]) -> list[DataFile]:
    """Return packs and objects of some nodes of a checkpoint, the largest first, since several are copied at a time."""
    directory = paths.checkpoint_dir(commit)
    found = []
    for node, record in records.items():
        for pack in record.packs:
            path = f"{directory}/{paths.pack(node, pack.rank, pack.part)}"
            found.append(DataFile(path=path, size_bytes=pack.size_bytes, node=node, pack=pack))
        if record.objects_size_bytes:
            path = f"{directory}/{paths.node_objects(node)}"
            found.append(DataFile(path=path, size_bytes=record.objects_size_bytes, node=node, pack=None))
    return sorted(found, key=lambda file: (-file.size_bytes, file.path))


def order(here: Listing, there: Listing) -> tuple[Phase, ...]:
    """Return the phases in their order.

    The incarnations come first, unless with them the second place would believe nothing of what it has: a job that was
    restarted lists only what it still has itself, and until the new checkpoint is complete the old one is the only one there.
    """
    before, after = belief.believed(there), belief.believed(merged(here, there))
    return LATE if before and not after else EARLY


def merged(here: Listing, there: Listing, commit: CommitId | None = None) -> Listing:
    """Return the second place as it will be with the source's incarnations, and with `commit` complete and free of tombstones."""
    attempts = dict(there.attempts)
    if commit is not None:
        attempts[commit] = AttemptView(has_manifest=True)
    return Listing(incarnations={**here.incarnations, **there.incarnations}, attempts=attempts)


def conflict(here: Mapping[int, Incarnation], there: Mapping[int, Incarnation]) -> int | None:
    """Return the first incarnation that is not the same on both sides, or None. They are immutable: two jobs went apart there."""
    return next((number for number in sorted(here.keys() & there.keys()) if here[number] != there[number]), None)


def would_count(here: Listing, there: Listing, commit: CommitId) -> bool:
    """Whether a checkpoint will exist at the second place once it is there; a higher attempt of its step may hide it."""
    after = merged(here, there, commit)
    return commit in belief.believed(after) or commit in belief.shadowed(after)


def dropped(here: Listing, there: Listing) -> list[CommitId]:
    """Return what the second place believes now and will not with the source's incarnations, newest first."""
    after = set(belief.believed(merged(here, there)))
    return [commit for commit in belief.believed(there) if commit not in after]


def holding(listing: Listing, commit: CommitId) -> bool:
    """Whether a tombstone holds against an attempt."""
    view = listing.attempts.get(commit)
    return view is not None and any(not belief.is_void(listing, stone, commit) for stone in view.tombstones)


def counting(here: Listing, there: Listing) -> list[CommitId]:
    """Return what the second place has and this run has committed, newest first, whether it is still at the source or not.

    That is what counts there by the source's incarnations, which are the newer ones: a job that was restarted has listed in
    them what it went on from. The source's tombstones say nothing of the copies; what was un-committed there stays so.
    """
    found = belief.believed(Listing(incarnations={**there.incarnations, **here.incarnations}, attempts=there.attempts))
    return [commit for commit in found if not holding(there, commit)]


def to_send(
    here: Sequence[CommitFacts],
    there: Collection[CommitId],
    *,
    all_steps: bool = False,
    keep: Keep | None = None,
    there_facts: Sequence[CommitFacts] = (),
) -> list[CommitId]:
    """Return what is to be replicated, newest first.

    Args:
        here: What is believed at the source and has a manifest that verifies.
        there: What the second place has complete.
        all_steps: All of them; else the newest that is not quarantined, or the newest if all are.
        keep: What the second place keeps: what it would let go at once is not sent.
        there_facts: What is believed there, for `keep`.
    """
    newest_first = sorted(here, key=lambda facts: facts.commit, reverse=True)
    if not all_steps:
        good = [facts for facts in newest_first if not facts.quarantined]
        newest_first = (good or newest_first)[:1]
    wanted = [facts.commit for facts in newest_first]
    if keep is not None and wanted:
        both = {facts.commit: facts for facts in there_facts}
        both |= {facts.commit: replace(facts, quarantined=False) for facts in newest_first}
        stay = retention.keep_set(list(both.values()), keep)
        wanted = [commit for commit in wanted if commit in stay]
    return [commit for commit in wanted if commit not in there]


def shares(nodes: Collection[int], num_nodes: int) -> list[list[int]]:
    """Return which nodes' files each node of a job copies: its own; those of a larger job before it are spread over all.

    Args:
        nodes: The nodes of the checkpoint.
        num_nodes: Nodes of the job that copies.
    """
    return [[node for node in sorted(nodes) if node % num_nodes == here] for here in range(num_nodes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far a second place is behind.

    Attributes:
        steps: Steps between the newest checkpoints here and there; None: there is none there.
        seconds: Seconds between their commits.
        num_checkpoints: How many checkpoints here are newer than the newest there.
        num_bytes: What these have in all, as far as it was told.
    """

    steps: int | None
    seconds: float | None
    num_checkpoints: int
    num_bytes: int = 0


def lag(
    here: Mapping[CommitId, float],
    there: Collection[CommitId],
    sizes: Mapping[CommitId, int] | None = None,
    gone: Mapping[CommitId, float] | None = None,
) -> Lag:
    """Compare two places.

    Args:
        here: Believed checkpoint of the source -> when it was committed, seconds since the epoch.
        there: Those that the second place has complete; what the source does not know is left out of account.
        sizes: Bytes of the source's checkpoints.
        gone: Checkpoints of the run that the source has let go, and when they were committed.
    """
    sizes = sizes or {}
    times = {**(gone or {}), **here}
    if not here:
        return Lag(steps=0, seconds=0.0, num_checkpoints=0)
    newest = max(here)
    common = [commit for commit in there if commit in times]
    if not common:
        return Lag(steps=None, seconds=None, num_checkpoints=len(here), num_bytes=sum(sizes.get(c, 0) for c in here))
    last = max(common)
    behind = [commit for commit in here if commit > last]
    return Lag(
        steps=max(0, newest.step - last.step) if behind else 0,
        seconds=max(0.0, times[newest] - times[last]) if behind else 0.0,
        num_checkpoints=len(behind),
        num_bytes=sum(sizes.get(commit, 0) for commit in behind),
    )


class Allowance:
    """Spaces out transfers so that all together stay below a rate; the caller holds the lock and waits.

    Args:
        rate_bytes_s: The rate; 0: none.
    """

    def __init__(self, rate_bytes_s: int) -> None:
        self._rate = rate_bytes_s
        self._free_at_s = float("-inf")

    def pause_s(self, now_s: float, num_bytes: int) -> float:
        """Take so many bytes; return how long to wait before they are sent, so that never more was sent than the rate allows."""
        if not self._rate:
            return 0.0
        self._free_at_s = max(now_s, self._free_at_s) + num_bytes / self._rate
        return self._free_at_s - now_s


def backoff_s(attempt: int, chance: float) -> float:
    """Return how long to wait before trial `attempt` (from 1) after a failure that may pass; `chance` in 0 to 1 spreads it."""
    return float(min(10.0, 0.1 * 2 ** min(attempt - 1, 10)) * (0.5 + 0.5 * chance))
