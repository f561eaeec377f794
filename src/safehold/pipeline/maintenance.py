"""What the agent asks of its flusher besides writing packs: one function per operation, plain values in and out.

Invariants: each operation is complete in itself and can be repeated after a lost answer. Arguments and results are what msgpack carries.
Errors are those of `safehold.errors`, with the path concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from blake3 import blake3

from safehold._version import __version__
from safehold.clock import SYSTEM_CLOCK
from safehold.config import Config
from safehold.errors import ConfigurationError, StorageError, SupersededError, TornFileError
from safehold.events import EventStream
from safehold.format import paths, records
from safehold.format.names import numbered
from safehold.pipeline import agreement, joining, ledger, leftovers, sweep
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Catalog, find_restore_candidate
from safehold.pipeline.leases import Observer
from safehold.pipeline.node_records import make_record
from safehold.pipeline.several import read_of_all
from safehold.policy import belief
from safehold.policy.retention import Best, Keep
from safehold.tiers.base import Tier
from safehold.tiers.joined import JoinedTier
from safehold.types import CommitId

Operation = Callable[[Tier, Config, dict[str, Any], EventStream], Any]


def keep_to_wire(keep: Keep) -> dict[str, Any]:
    """Return plain values for the agent."""
    best = keep.best
    return {
        "last": keep.last,
        "every_steps": keep.every_steps,
        "every_hours": keep.every_hours,
        "best": None if best is None else {"metric": best.metric, "mode": best.mode, "count": best.count},
    }


def keep_from_wire(wire: dict[str, Any]) -> Keep:
    """Rebuild a keep rule."""
    best = wire.get("best")
    return Keep(
        last=wire["last"],
        every_steps=wire["every_steps"],
        every_hours=wire["every_hours"],
        best=None if best is None else Best(**best),
    )


def _commit(numbers: Any) -> CommitId:
    step, incarnation, attempt = numbers
    return CommitId(step, incarnation, attempt)


def _wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def open_run(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> dict[str, Any]:
    """Open the next incarnation; `up_to` (a commit, with `in_memory` one that is not here) rolls back to it, `exclude` leaves commits out.

    Returns, beside what is open now, the newest incarnation of another start of the job (`before`), 0 if there is none.
    """
    report = tier.probe()
    if not report.exclusive_create:
        text = "this storage does not refuse to create a file twice, so two jobs could not be kept apart"
        raise ConfigurationError(text, path=tier.url, hint="use another place for the run directory")
    up_to = _commit(arguments["up_to"]) if arguments["up_to"] else None
    exclude = {_commit(entry) for entry in arguments["exclude"]}
    held = _held_afar(tier, arguments, up_to, exclude)

    before: list[int] = []
    there: set[CommitId] = set()
    notes = list(report.notes)

    def accept(listing: belief.Listing) -> list[CommitId]:
        before.append(_before(listing, arguments["token"]))
        chosen = belief.accepted_for_new(listing, up_to_step=up_to.step if up_to is not None else None, exclude=exclude)
        if up_to is not None and up_to not in chosen and not arguments.get("in_memory"):
            chosen = [up_to if commit.step == up_to.step else commit for commit in chosen]
        if isinstance(tier, JoinedTier) and not there.issuperset(chosen):
            with suppress(SupersededError):  # a node knows this incarnation already, and not that the next one lists it
                notes.extend(joining.heal(tier, there))
        steps = {commit.step for commit in chosen}
        return chosen + [commit for commit in held if commit.step not in steps]

    if isinstance(tier, JoinedTier):
        notes += joining.heal(tier, there)
    opened = ledger.open_incarnation(tier, arguments["token"], accept, arguments["reason"])
    if isinstance(tier, JoinedTier) and not there.issuperset(opened.accepted):  # committed in the meantime
        notes += joining.heal(tier, there)
    withdrawn = [commit for commit in opened.withdrawn if commit not in held]
    if withdrawn:
        steps = numbered("step", [commit.step for commit in withdrawn])
        notes.append(f"not used: {steps}, which an older incarnation was deleting")
    if not before:  # asked once more, after a lost answer: nothing was chosen now
        before.append(_before(Catalog(tier).listing(), arguments["token"]))
    return {
        "run_id": opened.record.run_id,
        "incarnation": opened.record.number,
        "steps": sorted({commit.step for commit in opened.accepted}),
        "steps_afar": sorted({commit.step for commit in held}),
        "before": before[-1],
        "notes": notes,
    }


def _before(listing: belief.Listing, token: str) -> int:
    """Return the newest incarnation that another start of the job, or this one before it rolled back, has opened."""
    return max((number for number, found in listing.incarnations.items() if found.token != token), default=0)


def _held_afar(tier: Tier, arguments: dict[str, Any], up_to: CommitId | None, exclude: set[CommitId]) -> list[CommitId]:
    """Return what the second place holds of this run: listed, so that it goes on to count there; absent here, so nothing else.

    What retention is deleting here is un-committed again by the new incarnation, as whatever it lists and an older one was deleting.
    """
    held = arguments.get("held", [])
    if held is None:  # there is a second place, and it gave no answer
        if snapshots.identify(tier) is None:
            raise StorageError(
                "the run directory is empty, and the remote, which may hold this run, gives no answer",
                path=tier.url,
                tier=tier.name,
                hint="start again once it answers; to begin a new run without its copy, leave out 'remote'",
            )
        return []
    commits = [_commit(entry) for entry in held]
    return [c for c in commits if c not in exclude and (up_to is None or c.step <= up_to.step)]


def known(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> dict[str, Any]:
    """Say what an incarnation has here, to an agent that came in the place of one that died.

    Returns:
        `steps`: those that are committed. `commits`: this incarnation's own checkpoints among them; they are durable now.
        `left`: its attempts without a manifest.
    """
    incarnation = arguments["incarnation"]
    ledger.check_newest(tier, incarnation)
    listing = Catalog(tier).listing()
    believed = belief.believed(listing)
    own = [commit for commit in believed if commit.incarnation == incarnation]
    for commit in own:  # seen is not durable: whoever made it may have died before
        tier.sync_tree(paths.checkpoint_dir(commit))
    left = [c for c, view in listing.attempts.items() if c.incarnation == incarnation and not view.has_manifest]
    return {
        "steps": sorted({commit.step for commit in believed}),
        "commits": [_wire(commit) for commit in own],
        "left": [_wire(commit) for commit in sorted(left)],
    }


def store_plan(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> None:
    """Make a plan durable under its digest."""
    ledger.put_plan(tier, arguments["digest"], arguments["plan"])


def record(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> dict[str, Any]:
    """Write a node's objects and its record; both and all directory entries are durable when it returns."""
    commit = _commit(arguments["commit"])
    node = arguments["node"]
    directory = paths.checkpoint_dir(commit)
    data, objects = make_record(
        commit,
        run_id=arguments["run_id"],
        node=node,
        node_name=arguments["node_name"],
        packs=arguments["packs"],
        objects={int(rank): blobs for rank, blobs in arguments["objects"].items()},
        part_digests={int(rank): digest for rank, digest in arguments["part_digests"].items()},
        timings=arguments["timings"],
    )
    tier.put(f"{directory}/{paths.node_objects(node)}", objects)
    tier.sync_tree(directory)
    tier.put(f"{directory}/{paths.node_record(node)}", data)
    return {"size_bytes": len(data), "blake3": blake3(data).hexdigest()}


def publish(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> None:
    """Commit: write the manifest over node records that are read back and verified."""
    commit = _commit(arguments["commit"])
    directory = paths.checkpoint_dir(commit)

    def read(ref: dict[str, Any]) -> records.NodeRecord:
        path = f"{directory}/{paths.node_record(ref['node'])}"
        what = f"the record of node {ref['node']}"
        try:
            data = tier.get(path, limit_bytes=ref["size_bytes"])
        except FileNotFoundError as exc:
            ledger.check_newest(tier, commit.incarnation)  # a newer one sweeps what it finds uncommitted
            raise TornFileError(f"{what} is gone", path=path, step=commit.step, tier=tier.name) from exc
        agreement.check_bytes(data, ref["size_bytes"], ref["blake3"], path=path, step=commit.step, what=what)
        return records.decode_node_record(data, path=path)

    found = read_of_all(read, arguments["nodes"])
    total, checksum = agreement.totals(found)
    manifest = records.Manifest(
        run_id=arguments["run_id"],
        commit=commit,
        world_size=arguments["world_size"],
        nodes=tuple(records.NodeRef(**ref) for ref in arguments["nodes"]),
        plan_digest=arguments["plan_digest"],
        plan_size_bytes=arguments["plan_size"],
        total_bytes=total,
        crc32=checksum,
        created_s=SYSTEM_CLOCK.wall(),
        library=__version__,
        metrics=arguments["metrics"],
        final=arguments["final"],
        own_disks=tuple(arguments.get("own_disks", ())),
    )
    ledger.publish(tier, commit, records.encode_manifest(manifest))


def withdraw(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> bool:
    """Make sure that a save whose `publish` has failed does not count; True if that is certain."""
    return ledger.withdraw(tier, _commit(arguments["commit"]))


def abandon(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> None:
    """Delete what an attempt that was given up has written: all of it, or with `node` only that node's share."""
    commit, node = _commit(arguments["commit"]), arguments.get("node")
    if node is None:
        sweep.discard(tier, commit)
    else:
        leftovers.discard_share(tier, commit, node)


def find(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> dict[str, Any]:
    """Find what can be restored."""
    exclude = {_commit(entry) for entry in arguments["exclude"]}
    found = find_restore_candidate(tier, arguments["step"], exclude=exclude)
    believed = belief.believed(Catalog(tier).listing())
    checkpoint = found.checkpoint
    return {
        "commit": None if checkpoint is None else _wire(checkpoint.commit),
        "manifest": b"" if checkpoint is None else checkpoint.manifest_bytes,
        "holders": {} if checkpoint is None else _holders(tier, checkpoint.commit),
        "newest": _wire(believed[0]) if believed else None,
        "any_commit": bool(believed),
        "bad": [_wire(commit) for commit, _ in found.rejected],
        "skipped": [f"step {commit.step} cannot be used: {error}" for commit, error in found.rejected],
    }


def _holders(tier: Tier, commit: CommitId) -> dict[int, str]:
    return joining.holders(tier, commit) if isinstance(tier, JoinedTier) else {}


def quarantine(tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> None:
    """Leave word that a checkpoint did not verify."""
    ledger.put_quarantine(
        tier,
        _commit(arguments["commit"]),
        incarnation=arguments["incarnation"],
        reason=arguments["reason"],
        path=arguments["path"],
    )


def retire(
    tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream, observer: Observer | None = None
) -> dict[str, Any]:
    """Apply the keep rule after a commit, and let go of attempts that failed or were replaced; see `sweep.retire`."""
    swept = sweep.retire(
        tier,
        keep_from_wire(arguments["keep"]),
        incarnation=arguments["incarnation"],
        grace_s=config.delete_grace_s,
        observer=observer,
        acknowledged={_commit(entry) for entry in arguments["acknowledged"]},
        given_up={_commit(entry) for entry in arguments["given_up"]},
        leased={_commit(entry) for entry in arguments.get("leased", ())},
    )
    return {
        "uncommitted": [_wire(commit) for commit in swept.uncommitted],
        "deleted": [_wire(commit) for commit in swept.deleted],
        "problem": str(swept.problem) if swept.problem else None,
    }


def sweep_debris(
    tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream, observer: Observer | None = None
) -> dict[str, Any]:
    """Delete what dead attempts of older incarnations left.

    Those of this one are none of its business: while it looks around, a save may begin, and even be committed.
    """
    incarnation = arguments["incarnation"]
    swept = sweep.sweep(tier, incarnation=incarnation, grace_s=config.delete_grace_s, observer=observer)
    return {"deleted": [_wire(commit) for commit in swept.deleted], "freed_bytes": swept.freed_bytes}


def make_room(
    tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream, observer: Observer | None = None
) -> bool:
    """Free space for a save that does not fit; True if something was freed or has become free.

    With `quota` it was a quota that refused, which the tier's free space does not show.
    """
    needed = sum(size for _, size in arguments["packs"]) * max(1, arguments["num_ranks"])

    def ask(needed_bytes: int) -> sweep.Room:
        return sweep.make_room(
            tier,
            needed_bytes,
            keep=keep_from_wire(arguments["keep"]),
            incarnation=arguments["incarnation"],
            observer=observer,
            given_up={_commit(entry) for entry in arguments["given_up"]},
        )

    room = ask(needed)
    if room.enough and not room.swept.deleted and room.free_bytes is not None and arguments.get("quota"):
        # The tier shows free space and gives none: a quota is used up. So much must become free as the save needs.
        room = ask(room.free_bytes + needed)
        return bool(room.swept.deleted)
    return room.enough or bool(room.swept.deleted)


OPERATIONS: dict[str, Operation] = {
    "open_run": open_run,
    "known": known,
    "plan": store_plan,
    "record": record,
    "publish": publish,
    "withdraw": withdraw,
    "abandon": abandon,
    "find": find,
    "quarantine": quarantine,
    "retire": retire,
    "sweep": sweep_debris,
}
