"""A run directory that is the union of several nodes' disks: brings its parts together, and says where what lies.

Why that is safe, in short (docs/design.md has it at length): all nodes have recorded durably before a manifest is begun, so a manifest
on any node vouches for the bytes of all; incarnations, plans, manifests and tombstones are on every node, so a node that has seen a newer
incarnation knows, and refuses; and what two jobs did without each other's nodes is found when their disks are joined, and never merged.

Must not live here: how other nodes are reached (`agent.net.remote_tier`), which checkpoint counts (`policy.belief`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from safehold.errors import ConfigurationError, IntegrityError, StorageError, SupersededError
from safehold.format import document, paths, records
from safehold.format.names import counted
from safehold.format.records import Incarnation, Manifest
from safehold.pipeline import ledger
from safehold.pipeline.reconciling import ChangedMeanwhileError, name_lost, reconcile
from safehold.tiers.base import Tier
from safehold.tiers.joined import MAX_SMALL_FILE_BYTES, JoinedTier, two_of_one_name
from safehold.types import CommitId

MAX_LOOKS = 8
"""So many times the disks are looked at again because another start is at work on some of them."""


@runtime_checkable
class Digesting(Protocol):
    """A tier that can digest files where they are."""

    def digests(self, paths: Sequence[str]) -> dict[str, str]:
        """Return blake3 of the files of these that are there."""
        ...


def digests(tier: Tier, wanted: Iterable[str]) -> dict[str, str]:
    """Return blake3 of the files of these that are there; empty for one that cannot be read whole."""
    names = list(wanted)
    if isinstance(tier, Digesting):
        return tier.digests(names)
    found = {}
    for path in names:
        try:
            found[path] = document.digest(tier.get(path, limit_bytes=MAX_SMALL_FILE_BYTES, retry_s=0.0))
        except FileNotFoundError:
            continue
        except IntegrityError:
            found[path] = ""
    return found


# ---- where what lies ----


def guess(names: Sequence[str]) -> Callable[[str], str | None]:
    """Return where a file most likely is, by its path: at the node of that number."""

    def likely(path: str) -> str | None:
        number = paths.node_of(path.rpartition("/")[2])
        return names[number] if number is not None and number < len(names) else None

    return likely


def guess_for(directory: str, holders: Mapping[int, str]) -> Callable[[str], str | None]:
    """Return where the files of one checkpoint are, whose nodes' files are where `holders` says."""

    def likely(path: str) -> str | None:
        where, _, name = path.rpartition("/")
        number = paths.node_of(name)
        return holders.get(number) if where == directory and number is not None else None

    return likely


def holders(tier: JoinedTier, commit: CommitId) -> dict[int, str]:
    """Return the first of `spread`."""
    return spread(tier, commit)[0]


def spread(tier: JoinedTier, commit: CommitId) -> tuple[dict[int, str], set[int]]:
    """Return at which node the files are that each node of a checkpoint wrote, those without any left out; and who has made redundancy.

    Without its node record a node has nothing. What is missing here has to be given back by redundancy; see `pipeline.recovering`.
    """
    there = tier.holders(paths.checkpoint_dir(commit))
    found: dict[int, dict[str, int]] = {}
    for name in there:
        if (number := paths.parse_node_record(name)) is not None:
            found[number] = dict.fromkeys(there[name], 0)
    for name, nodes in there.items():
        has = found.get(number, {}) if (number := paths.node_of(name)) is not None else {}
        for node in has.keys() & set(nodes):
            has[node] += 1
    redundant = {number for name in there if (number := paths.parse_redundancy_record(name)) is not None}
    return {number: max(sorted(has), key=lambda node: has[node]) for number, has in found.items()}, redundant


def not_here(manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the nodes of a checkpoint that keep what they wrote on disks of their own, which are not at hand.

    Args:
        manifest: The checkpoint's.
        names: The files that are there, in the checkpoint's directory.
    """
    if not manifest.own_disks:
        return []
    there = {paths.node_of(name) for name in names}
    return [manifest.own_disks[ref.node] for ref in manifest.nodes if ref.node not in there]


# ---- writing for an incarnation ----


def refuse_stale(tier: Tier, path: str) -> None:
    """Refuse a manifest or tombstone of an incarnation that is over, as far as this node knows.

    Raises:
        SupersededError: A newer one was opened here, and does not list the checkpoint.
    """
    directory, _, name = path.rpartition("/")
    commit = paths.parse_checkpoint_dir(directory)
    if commit is None:
        return
    stone = paths.parse_tombstone(name)
    if name != paths.MANIFEST and stone is None:
        return
    writer = commit.incarnation if stone is None else stone
    newer = ledger.newer_incarnation(tier, writer)
    if newer is not None and (stone is not None or not ledger.lists(tier, newer, commit)):
        raise SupersededError(
            f"incarnation {newer} owns the run now, this is {writer}",
            step=commit.step,
            path=path,
            hint="another job was started in this run directory; end this one",
        )


# ---- bringing the parts together ----


def heal(tier: JoinedTier, there: set[CommitId] | None = None) -> list[str]:
    """Bring to every node what all must have: run, incarnations, plans, manifests, tombstones, quarantine records.

    A node may have been replaced, or away, or have died before a file had come to it. To be called before an incarnation is opened,
    and afterwards again if that lists what was committed meanwhile. A manifest comes to a node before the incarnation that made or
    lists it: a start on that node alone, should this one be cut short, must not open a newer one in ignorance of it.

    Args:
        tier: The nodes' disks.
        there: Takes the checkpoints whose manifests are on all nodes now.

    Returns:
        Sentences for the user.

    Raises:
        ConfigurationError: The disks hold different runs, or one of them something else than a run; the nodes are named.
        StorageError: A node cannot be reached, or its disk fails.
    """
    where, notes = _reconciled(tier)
    known: dict[int, Incarnation] = {}
    wanted: list[tuple[str, bytes]] = []
    for path in sorted(where, key=_order):
        data = _the_one(tier, path, where[path], everywhere=len(where[path]) == len(tier.members), known=known)
        if data is not None and _matters(path, known):
            wanted.append((path, data))
    incarnations = [one for one in wanted if one[0].startswith(f"{paths.INCARNATIONS}/")]
    late: list[tuple[str, bytes]] = []
    brought: dict[str, int] = {}
    for path, data in [*(one for one in wanted if one not in incarnations), *incarnations]:
        try:
            _bring_to_all(tier, path, data, where[path], brought)
        except (
            SupersededError
        ):  # a node knows a newer incarnation than the one that made it, but not yet one that lists it
            late.append((path, data))
    for path, data in late:
        _bring_to_all(tier, path, data, where[path], brought)
    if max(map(_made_by, where), default=0) > max(known, default=0):
        name_lost(tier)
    if there is not None:
        there.update(_on_all(tier, where, wanted))
    return notes + [
        f"node {node} lacked {counted(count, 'small file')} of the run; brought there"
        for node, count in sorted(brought.items())
    ]


def _reconciled(tier: JoinedTier) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return what is where once nothing contradicts that can be undone, and sentences for the user."""
    notes: list[str] = []
    for _ in range(MAX_LOOKS):  # first the runs, then the incarnations of the one that is left
        where = _where(tier.on_each(_survey))
        try:
            more = reconcile(tier, where)
        except ChangedMeanwhileError:
            continue
        if not more:
            return where, notes
        notes += more
    raise _raced(paths.INCARNATIONS)


def _raced(path: str) -> StorageError:
    text = "another start of the job on some of these nodes changed this meanwhile"
    return StorageError(text, path=path, hint="end the other job, and start this one again")


def _made_by(path: str) -> int:
    """Return the incarnation that a manifest is of; 0 for other files."""
    directory, _, name = path.rpartition("/")
    commit = paths.parse_checkpoint_dir(directory)
    return commit.incarnation if commit is not None and name == paths.MANIFEST else 0


def _on_all(
    tier: JoinedTier, where: Mapping[str, Mapping[str, str]], brought: Iterable[tuple[str, bytes]]
) -> set[CommitId]:
    """Return the checkpoints whose manifests were on all nodes, or were brought there."""
    found = {path for path, by_node in where.items() if len(by_node) == len(tier.members)} | {
        path for path, _ in brought
    }
    directories = [path.rpartition("/")[0] for path in found if path.endswith(f"/{paths.MANIFEST}")]
    return {commit for directory in directories if (commit := paths.parse_checkpoint_dir(directory)) is not None}


def _bring_to_all(
    tier: JoinedTier, path: str, data: bytes, by_node: Mapping[str, str], brought: dict[str, int]
) -> None:
    """Bring a file to the nodes that lack it, and count it for them; one that was refused can be brought again."""
    good = document.digest(data)
    for node in tier.members:
        if by_node.get(node) != good:
            _bring(tier.members[node], path, data, damaged=node in by_node)
            brought[node] = brought.get(node, 0) + 1


def _where(parts: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return path -> node -> digest."""
    where: dict[str, dict[str, str]] = {}
    for node, files in parts.items():
        for path, digest in files.items():
            where.setdefault(path, {})[node] = digest
    return where


def _survey(member: Tier) -> dict[str, str]:
    """Return what a node has of what all must have: path -> blake3, empty for what is damaged."""
    ledger.refuse_foreign(member)
    wanted = [paths.RUN_JSON]
    for directory in (paths.INCARNATIONS, paths.PLANS, paths.QUARANTINES):
        wanted += [f"{directory}/{entry.name}" for entry in member.list(directory)]
    for step in member.list(paths.CHECKPOINTS):
        for attempt in member.list(f"{paths.CHECKPOINTS}/{step.name}") if step.is_dir else ():
            directory = f"{paths.CHECKPOINTS}/{step.name}/{attempt.name}"
            if paths.parse_checkpoint_dir(directory) is not None and attempt.is_dir:
                names = [entry.name for entry in member.list(directory)]
                common = [n for n in names if n == paths.MANIFEST or paths.parse_tombstone(n) is not None]
                wanted += [f"{directory}/{name}" for name in common]
    return digests(member, [path for path in wanted if paths.is_file(path)])


def _order(path: str) -> tuple[int, int, str]:
    """Run and incarnations first: a manifest is brought only to where its incarnation is known."""
    directory, _, name = path.rpartition("/")
    places = (paths.RUN_JSON, paths.INCARNATIONS, paths.PLANS, paths.QUARANTINES)
    at = places.index(directory or path) if (directory or path) in places else len(places)
    return at + (name == paths.MANIFEST), paths.parse_incarnation(name) or 0, path


def _the_one(
    tier: JoinedTier, path: str, by_node: Mapping[str, str], *, everywhere: bool, known: dict[int, Incarnation]
) -> bytes | None:
    """Return the one version of a file that verifies; None where there is nothing to do, or none verifies."""
    incarnation = path.startswith(f"{paths.INCARNATIONS}/")
    if everywhere and len(set(by_node.values())) == 1 and not incarnation:
        return None
    good: dict[str, tuple[str, bytes]] = {}
    for node, digest in by_node.items():
        if digest and digest not in good:
            try:
                data = tier.members[node].get(path, limit_bytes=MAX_SMALL_FILE_BYTES, retry_s=0.0)
                record = _decode(path, data)
            except (FileNotFoundError, IntegrityError):
                continue
            if isinstance(record, Incarnation):
                known[record.number] = record
            good[digest] = (node, data)
    if len(good) > 1 and not path.startswith(f"{paths.QUARANTINES}/"):
        (one, _), (other, _) = sorted(good.values())[:2]
        if paths.parse_tombstone(path.rpartition("/")[2]) is None:  # two that take the same away say the same
            raise _conflict(path, one, other)
    return min(good.values())[1] if good else None


def _conflict(path: str, one: str, other: str) -> ConfigurationError:
    error = two_of_one_name(path, one, other)
    if path == paths.RUN_JSON:
        error.message = f"nodes {one} and {other} hold different runs under this path"
    elif path.startswith(f"{paths.INCARNATIONS}/"):
        number = paths.parse_incarnation(path.rpartition("/")[2])
        error.message = f"incarnation {number} was opened on node {one} and, without it, on node {other}"
    return ConfigurationError(error.message, node=other, path=path, hint=error.hint)


def _decode(path: str, data: bytes) -> object:
    """Verify a file on its own; returns its record.

    Raises:
        IntegrityError: It does not.
    """
    directory, _, name = path.rpartition("/")
    if directory == paths.PLANS:
        if document.digest(data) != name:
            raise IntegrityError("the plan does not have the digest of its name", path=path)
        return None
    if path == paths.RUN_JSON:
        return records.decode_run(data, path=path)
    if directory == paths.INCARNATIONS:
        return records.decode_incarnation(data, path=path)
    if directory == paths.QUARANTINES:
        return records.decode_quarantine(data, path=path)
    if name == paths.MANIFEST:
        return records.decode_manifest(data, path=path)
    return records.decode_tombstone(data, path=path)


def _matters(path: str, known: Mapping[int, Incarnation]) -> bool:
    """Whether a file is of any consequence: what the newest incarnation does not count is left where it is."""
    directory, _, name = path.rpartition("/")
    commit = paths.parse_checkpoint_dir(directory)
    newest = max(known, default=0)
    if commit is None or not newest:
        return True
    stone = paths.parse_tombstone(name)
    if stone is not None:
        return stone >= newest
    return commit.incarnation >= newest or commit in known[newest].accepted


def _bring(member: Tier, path: str, data: bytes, *, damaged: bool) -> None:
    if damaged:
        member.put(path, data)
        return
    try:
        member.put(path, data, exclusive=True)
    except FileExistsError:
        if digests(member, [path]).get(path) != document.digest(data):
            raise _raced(path) from None
