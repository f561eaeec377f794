"""Starts of a job on some of the nodes each, which knew nothing of each other: undone as far as they have done nothing.

On node-local flash an incarnation is opened on the nodes that take part. A start on half of the nodes that found nothing to go on with, and
then one on the other half, leave two files of one incarnation number that contradict each other, or two runs. Where attempts at saves
exist on the nodes of one of them at most, nothing is in dispute. Of one run, one more incarnation is opened on all nodes, which accepts
what counts by the history that has done something (by all of them, where none has), and the others' files are replaced; of two, the one
without attempts is given up.

Invariants: where two have attempts, nothing is touched. No number of a run is used again, so that a process of a start that was undone,
should it wake up, is of an older incarnation wherever it looks. The new incarnation is durable on all nodes before a file is replaced;
who dies in between leaves the contradiction for the next, who does the same. What an undone start commits before the new incarnation
is there is taken in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from safehold.clock import new_token
from safehold.errors import IntegrityError
from safehold.format import document, paths, records
from safehold.format.names import numbered
from safehold.format.records import Incarnation
from safehold.pipeline import ledger
from safehold.pipeline import snapshot as snapshots
from safehold.policy import belief
from safehold.tiers.base import Tier
from safehold.tiers.joined import MAX_SMALL_FILE_BYTES, JoinedTier
from safehold.types import CommitId

REASON = "starts on some of the nodes each were joined"


class ChangedMeanwhileError(Exception):
    """Somebody opened another incarnation meanwhile: what was found does not hold any more. Never shown to a user."""


@dataclass(slots=True, eq=False)
class _Side:
    """Nodes that have one file of the number in dispute.

    Attributes:
        nodes: Their names.
        chain: Number -> the incarnation, from the number in dispute on.
        data: Number -> its file.
        at_work: Whether some of them wrote something for a save under one of these numbers.
        attempts: The attempts of these numbers of which there is anything; manifests may have been brought there.
    """

    nodes: list[str] = field(default_factory=list)
    chain: dict[int, Incarnation] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    at_work: bool = False
    attempts: set[CommitId] = field(default_factory=set)


def reconcile(tier: JoinedTier, where: Mapping[str, Mapping[str, str]]) -> list[str] | None:
    """Undo contradictory starts that have done nothing.

    Args:
        tier: The nodes' disks.
        where: Path -> node -> digest of what all nodes must have; empty for a damaged file.

    Returns:
        Sentences for the user, empty where nothing contradicts; None where there is a contradiction that nobody can decide.

    Raises:
        ChangedMeanwhileError: Look again.
    """
    notes = _one_run(tier, where)
    if notes or notes is None:
        return notes
    numbers = {found: path for path in where if (found := paths.parse_incarnation(path.rpartition("/")[2])) is not None}
    files = {number: _versions(tier, path, where[path]) for number, path in numbers.items() if _is_incarnation(path)}
    disputed = sorted(number for number, versions in files.items() if len(versions) > 1)
    if not disputed:
        return []
    first, newest = disputed[0], files[max(files)]
    nodes, record, _ = next(iter(newest.values()), ([], None, b""))
    if record is not None and record.reason == REASON and set(nodes) == set(tier.members):
        return _finish(tier, {number: files[number] for number in disputed}, record, where)
    before = {number: _only(versions) for number, versions in files.items() if number < first and versions}
    sides = _sides(files, first)
    if sides is None:
        return None
    attempts = tier.on_each(_attempts)
    for side in sides:
        for commit, is_own in (entry for node in side.nodes for entry in attempts[node].items()):
            if commit.incarnation >= first:
                side.at_work |= is_own
                side.attempts.add(commit)
    working = [side for side in sides if side.at_work]
    most = max(working or sides, key=lambda side: len(side.attempts))
    if len(working) > 1 or any(not side.attempts <= most.attempts for side in sides):
        return None
    counting = working or sides

    def accept(listing: belief.Listing) -> list[CommitId]:
        if max(listing.incarnations, default=0) > max(files):
            raise ChangedMeanwhileError
        found: dict[int, CommitId] = {}
        for side in sides:
            for chain in (side.chain, _own(side, sides)):
                for commit in belief.accepted_for_new(replace(listing, incarnations={**before, **chain})):
                    if side in counting or commit.incarnation >= first:
                        found[commit.step] = max(commit, found.get(commit.step, commit))
        return sorted(found.values(), reverse=True)

    opened = ledger.open_incarnation(tier, new_token(), accept, REASON)
    _spread(tier, opened.record, where)
    winner = counting[0]
    for side in sides:
        for number, data in winner.data.items() if side is not winner else ():
            if number in side.data:
                for node in side.nodes:
                    tier.members[node].put(paths.incarnation(number), data)
    undone = [node for side in sides if side is not winner for node in side.nodes]
    text = f"incarnation {first} was opened on {numbered('node', winner.nodes, 8)} and, without them, on {numbered('node', undone, 8)}"
    return [f"{text}; {'nothing was' if not working else 'the latter had'} saved under it, so they were joined"]


def name_lost(tier: JoinedTier) -> None:
    """Give files to incarnations that have none, though they have committed: their manifests came to these nodes, and no more did.

    So numbers have no gaps: who opens the next one here contradicts, and does not outrank, what is known of the lost one elsewhere.
    """
    there = {entry.name for entry in tier.list(paths.INCARNATIONS)}
    for number, record in sorted(snapshots.take(tier).listing.incarnations.items()):
        path = paths.incarnation(number)
        if path.rpartition("/")[2] not in there:
            with suppress(FileExistsError):
                data = records.encode_incarnation(msgspec.structs.replace(record, token=new_token()))
                tier.put(path, data, exclusive=True)


def _own(side: _Side, sides: Sequence[_Side]) -> dict[int, Incarnation]:
    """Return what no other side has: an incarnation of one side, which may know nothing of the others, can come to all by its number."""
    return {
        number: record
        for number, record in side.chain.items()
        if all(other is side or other.data.get(number) != side.data[number] for other in sides)
    }


def _spread(tier: JoinedTier, record: Incarnation, where: Mapping[str, Mapping[str, str]]) -> None:
    """Bring the manifests and plans of what the newest incarnation lists to all nodes, while the contradiction can still be seen.

    Without it, a start on nodes that lack one would open an incarnation that does not list it, and nothing would contradict that.

    Raises:
        ChangedMeanwhileError: A newer incarnation was opened.
    """
    for commit in record.accepted:
        path = f"{paths.checkpoint_dir(commit)}/{paths.MANIFEST}"
        try:
            manifest = tier.get(path, limit_bytes=MAX_SMALL_FILE_BYTES)
            plan = paths.plan(records.decode_manifest(manifest, path=path).plan_digest)
            lacking = [node for node in tier.members if not where.get(plan, {}).get(node)]
            found = [(plan, tier.get(plan, limit_bytes=MAX_SMALL_FILE_BYTES), lacking)] if lacking else []
        except (FileNotFoundError, IntegrityError):
            continue  # deleted, or damaged: as it would be without a contradiction
        for name, data, nodes in (
            *found,
            (path, manifest, [n for n in tier.members if not where.get(path, {}).get(n)]),
        ):
            for node in nodes:
                with suppress(FileExistsError):  # another one is found by whoever compares all files
                    tier.members[node].put(name, data, exclusive=True)
    if snapshots.newest_incarnation(tier) != record.number:
        raise ChangedMeanwhileError


def _finish(
    tier: JoinedTier,
    files: Mapping[int, Mapping[str, tuple[list[str], Incarnation, bytes]]],
    newest: Incarnation,
    where: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Make incarnations the same on all nodes, on which a newer one lies that was opened to settle their dispute."""
    _spread(tier, newest, where)
    for number, versions in files.items():
        (_, _, data), *others = sorted(versions.values(), key=lambda version: version[0])
        for nodes, _, _ in others:
            for node in nodes:
                tier.members[node].put(paths.incarnation(number), data)
    return ["what an earlier start had begun to join was joined"]


def _one_run(tier: JoinedTier, where: Mapping[str, Mapping[str, str]]) -> list[str] | None:
    """Give up runs in which nothing was saved, where nodes are of different runs; returns as `reconcile` does."""
    runs: dict[str, tuple[list[str], bytes]] = {}
    for node, digest in sorted(where.get(paths.RUN_JSON, {}).items()):
        try:
            data = (
                tier.members[node].get(paths.RUN_JSON, limit_bytes=MAX_SMALL_FILE_BYTES, retry_s=0.0) if digest else b""
            )
            run_id = records.decode_run(data, path=paths.RUN_JSON).run_id
        except (FileNotFoundError, IntegrityError):
            continue
        runs.setdefault(run_id, ([], data))[0].append(node)
    if len(runs) < 2:
        return []
    attempts = tier.on_each(_attempts)
    working = [run_id for run_id, (nodes, _) in runs.items() if any(attempts[node] for node in nodes)]
    if len(working) > 1:
        return None
    kept = working[0] if working else min(runs)
    undone = [node for run_id, (nodes, _) in runs.items() if run_id != kept for node in nodes]
    for node in undone:
        member = tier.members[node]
        numbers = [paths.parse_incarnation(entry.name) for entry in member.list(paths.INCARNATIONS)]
        for number in sorted((number for number in numbers if number is not None), reverse=True):
            member.delete(paths.incarnation(number))
        member.put(paths.RUN_JSON, runs[kept][1])
    return [
        f"on {numbered('node', undone, 8)} another run was begun under this path, and nothing saved: they take part in run {kept} now"
    ]


def _is_incarnation(path: str) -> bool:
    return path.startswith(f"{paths.INCARNATIONS}/")


def _versions(
    tier: JoinedTier, path: str, by_node: Mapping[str, str]
) -> dict[str, tuple[list[str], Incarnation, bytes]]:
    """Return the versions of an incarnation's file that verify: digest -> (nodes, record, bytes)."""
    found: dict[str, tuple[list[str], Incarnation, bytes]] = {}
    for node, digest in sorted(by_node.items()):
        if digest in found:
            found[digest][0].append(node)
        elif digest:
            try:
                data = tier.members[node].get(path, limit_bytes=MAX_SMALL_FILE_BYTES, retry_s=0.0)
                if document.digest(data) == digest:
                    found[digest] = ([node], records.decode_incarnation(data, path=path), data)
            except (FileNotFoundError, IntegrityError):
                continue
    return found


def _only(versions: Mapping[str, tuple[list[str], Incarnation, bytes]]) -> Incarnation:
    return next(iter(versions.values()))[1]


def _sides(
    files: Mapping[int, Mapping[str, tuple[list[str], Incarnation, bytes]]], first: int
) -> Sequence[_Side] | None:
    """Return the sides of the dispute; None where one of them contradicts itself further on."""
    sides: list[_Side] = []
    for nodes, _, _ in files[first].values():
        side = _Side(nodes=list(nodes))
        for number in sorted(number for number in files if number >= first):
            here = [(record, data) for at, record, data in files[number].values() if set(at) & set(nodes)]
            if len(here) > 1:
                return None
            if here:
                side.chain[number], side.data[number] = here[0]
        sides.append(side)
    return sides


def _attempts(member: Tier) -> dict[CommitId, bool]:
    """Return the attempts of which a node has anything, and whether it is more than what is brought to all nodes."""
    found = {}
    for step in member.list(paths.CHECKPOINTS):
        for attempt in member.list(f"{paths.CHECKPOINTS}/{step.name}") if step.is_dir else ():
            commit = paths.parse_checkpoint_dir(f"{paths.CHECKPOINTS}/{step.name}/{attempt.name}")
            names = [] if commit is None else [entry.name for entry in member.list(paths.checkpoint_dir(commit))]
            if commit is not None and names:
                found[commit] = any(name != paths.MANIFEST and paths.parse_tombstone(name) is None for name in names)
    return found
