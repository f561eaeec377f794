"""Which checkpoints exist, decided from what was listed in a run directory; and what may be swept there.

The rule: a checkpoint exists if its manifest exists and verifies, its incarnation is the newest or the newest
incarnation's file lists it, and no tombstone holds. A tombstone is void if an incarnation newer than its writer
lists, or made, the checkpoint: so a stopped process that wakes up late can neither add a checkpoint nor take one
away. Of one step, only the highest (incarnation, attempt) counts.

Invariants: nothing depends on names' order, mtimes or pointers. What is not known is not swept: attempts of an
incarnation newer than any listed file, attempts of the newest incarnation unless its own lead says which are live,
and what the newest incarnation lists. A listing must hold every incarnation file that exists; one that cannot be
read is an error of the caller, since leaving it out would make an older incarnation believe itself the newest. It is
read in the order: incarnations, attempts, incarnations again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from safehold.format.records import Incarnation, Tombstone
from safehold.types import CommitId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """What was found in the directory of one attempt.

    Attributes:
        has_manifest: A manifest is there and verifies.
        tombstones: Those that verify; one that does not is no tombstone.
    """

    has_manifest: bool
    tombstones: Sequence[Tombstone] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What was found in a run directory.

    Attributes:
        incarnations: Number -> its file, all of them.
        attempts: Every attempt directory, committed or not.
    """

    incarnations: Mapping[int, Incarnation] = field(default_factory=dict)
    attempts: Mapping[CommitId, AttemptView] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """Number of the newest incarnation."""
        return max(self.incarnations, default=None)


def is_void(listing: Listing, tombstone: Tombstone, commit: CommitId) -> bool:
    """Say whether a tombstone has no force.

    So it is if it names another checkpoint, or if an incarnation newer than its writer made or lists this one.
    """
    if tombstone.commit != commit or tombstone.incarnation < commit.incarnation:
        return True
    return any(
        number > tombstone.incarnation and commit in incarnation.accepted
        for number, incarnation in listing.incarnations.items()
    )


def _holding(listing: Listing, commit: CommitId) -> list[Tombstone]:
    return [stone for stone in listing.attempts[commit].tombstones if not is_void(listing, stone, commit)]


def _eligible(listing: Listing) -> set[CommitId]:
    """Return the attempts that the newest incarnation made or lists, manifest or not."""
    newest = listing.newest
    if newest is None:
        return set()
    listed = set(listing.incarnations[newest].accepted)
    return {commit for commit in listing.attempts if commit.incarnation == newest or commit in listed}


def _valid(listing: Listing) -> list[CommitId]:
    """Return all commits that exist by the rule, several of a step too, newest first."""
    found = (
        commit
        for commit in _eligible(listing)
        if listing.attempts[commit].has_manifest and not _holding(listing, commit)
    )
    return sorted(found, reverse=True)


def believed(listing: Listing) -> list[CommitId]:
    """Return the checkpoints that exist, newest first, one for each step."""
    top: dict[int, CommitId] = {}
    for commit in _valid(listing):
        top.setdefault(commit.step, commit)
    return list(top.values())


def shadowed(listing: Listing) -> list[CommitId]:
    """Return commits that exist but that a higher attempt of the same step hides.

    Whoever deletes a step tombstones these first: else one of them would take the place of the deleted one.
    """
    top = set(believed(listing))
    return [commit for commit in _valid(listing) if commit not in top]


def accepted_for_new(
    listing: Listing, up_to_step: int | None = None, exclude: Collection[CommitId] = ()
) -> list[CommitId]:
    """Return what a new incarnation lists as accepted, newest first.

    Args:
        listing: The run directory, read after the old incarnation was settled.
        up_to_step: Leave out later ones (rolling or falling back).
        exclude: Leave these out; an earlier attempt of the same step may then take the place.
    """
    top: dict[int, CommitId] = {}
    for commit in _valid(listing):
        if commit not in exclude and (up_to_step is None or commit.step <= up_to_step):
            top.setdefault(commit.step, commit)
    return list(top.values())


def debris(
    listing: Listing,
    *,
    own_incarnation: int | None,
    live: Collection[CommitId] | None = None,
    now_s: float,
    grace_s: float,
    set_aside: bool = False,
) -> list[CommitId]:
    """Return the attempts whose bytes may be swept, oldest first.

    Whoever sweeps takes the manifest away first and the tombstones last, so that a sweep cut short un-commits and
    never revives.

    Args:
        listing: The run directory.
        own_incarnation: The incarnation of the process that sweeps; unless it is the newest, nothing may be swept.
        live: Attempts of the own incarnation that are in flight or in doubt (a manifest may still become visible);
            None if they are not known: then none of the own incarnation goes without a tombstone.
        now_s: Wall time. A tombstone or incarnation dated later than this is not past its grace time.
        grace_s: How long a tombstone must have stood, so that whoever accepts or reads the checkpoint has noticed;
            and how long the newest incarnation must have existed before a manifest that it does not list goes.
        set_aside: Whether whole checkpoints that the newest incarnation does not list go too: what a rollback set aside,
            and what a superseded job committed late. Nobody believes them, and people may still want them.
    """
    newest = listing.newest
    if newest is None or own_incarnation != newest:
        return []
    eligible = _eligible(listing)
    age_s = now_s - listing.incarnations[newest].created_s
    out = []
    for commit, attempt in listing.attempts.items():
        stones = _holding(listing, commit)
        if commit.incarnation > newest:
            continue
        if live is not None and commit in live:
            continue
        if commit in eligible and (attempt.has_manifest or stones or commit.incarnation < newest):
            # It is, or was, a checkpoint of this run: only a tombstone that holds, and has stood, lets it go.
            goes = any(now_s - stone.created_s >= grace_s for stone in stones)
        elif commit.incarnation == newest:
            goes = live is not None
        else:
            old_stones = any(now_s - stone.created_s >= grace_s for stone in stones)
            goes = not attempt.has_manifest or old_stones or (set_aside and age_s >= grace_s)
        if goes:
            out.append(commit)
    return sorted(out)


def combine(
    listings: Mapping[int, Listing], nodes_of: Mapping[CommitId, Collection[int]], nodes: Collection[int]
) -> Listing:
    """Make one listing of those of node-local disks, where nothing can be created for all at once.

    A manifest counts once every node of its plan has it, an incarnation once every node of the run has its file, a
    tombstone as soon as one node has it.

    Args:
        listings: Node -> what its disk has. A node without a disk (a replacement) gives an empty listing.
        nodes_of: Attempt -> the nodes that its manifest names; as found in any copy of the manifest.
        nodes: The nodes of the run that must know an incarnation.
    """
    incarnations: dict[int, Incarnation] = {}
    for number in sorted({number for listing in listings.values() for number in listing.incarnations}):
        having = {node for node, listing in listings.items() if number in listing.incarnations}
        if set(nodes) <= having:
            incarnations[number] = listings[min(having)].incarnations[number]
    attempts: dict[CommitId, AttemptView] = {}
    for commit in sorted({commit for listing in listings.values() for commit in listing.attempts}):
        views = {node: listing.attempts[commit] for node, listing in listings.items() if commit in listing.attempts}
        need = set(nodes_of.get(commit, ()))
        whole = bool(need) and all(node in views and views[node].has_manifest for node in need)
        stones = tuple(stone for view in views.values() for stone in view.tombstones)
        attempts[commit] = AttemptView(has_manifest=whole, tombstones=stones)
    return Listing(incarnations=incarnations, attempts=attempts)
