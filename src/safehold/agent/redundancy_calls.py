"""What the flusher does for redundancy: makes this node's share, gives a lost node's files back, and looks what is there.

Invariants: runs beside training at the flusher's pace. Room is made, or refused by name, before a share is written: what the next save
needs is left. Every operation has a deadline and can be given up by its number. Plain values in and out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from safehold.agent.redundancy_wire import set_from_wire, set_to_wire
from safehold.config import Config
from safehold.errors import CheckpointError, IntegrityError, SkippedError, StorageFullError
from safehold.events import EventStream
from safehold.format import document, paths, records
from safehold.format.crc import BLOCK_BYTES, num_blocks
from safehold.format.records import Manifest
from safehold.pipeline import joining
from safehold.pipeline.block_work import Effort
from safehold.pipeline.lost_node import open_lost
from safehold.pipeline.pacing import Pacer
from safehold.pipeline.placed import PlacedMembers
from safehold.pipeline.rebuild import rebuild
from safehold.pipeline.redundancy import check_against, protect, set_of
from safehold.pipeline.symbols import read_redundancy
from safehold.policy.placement import RedundancySet
from safehold.tiers.base import Tier
from safehold.tiers.joined import JoinedTier
from safehold.types import CommitId

MAX_CANCELS = 256
THREADS = 2

MakeRoom = Callable[[dict[str, Any], int], bool]


class RedundancyCalls:
    """See the module.

    Args:
        joined: Returns the disks of all nodes.
        config: Returns the settings in force.
        pacer: Returns what spaces out the work.
        make_room: Frees room for so many bytes: (arguments, bytes); whether it freed any.
    """

    def __init__(
        self,
        *,
        joined: Callable[[], Tier],
        config: Callable[[], Config],
        pacer: Callable[[], Pacer | None],
        make_room: MakeRoom,
        events: EventStream,
    ) -> None:
        self._joined, self._config, self._pacer, self._make_room = joined, config, pacer, make_room
        self._events = events
        self._cancelled: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self.operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "protect": lambda arguments: self._timed(self._protect, arguments),
            "rebuild": lambda arguments: self._timed(self._rebuild, arguments),
            "survey": lambda arguments: self._survey(arguments),
            "stop_protecting": lambda arguments: self._flag(arguments["number"]).set(),
        }

    def _flag(self, number: int) -> threading.Event:
        with self._lock:
            while len(self._cancelled) >= MAX_CANCELS:
                del self._cancelled[next(iter(self._cancelled))]
            return self._cancelled.setdefault(number, threading.Event())

    def _timed(self, work: Callable[[JoinedTier, dict[str, Any], Effort], int], arguments: dict[str, Any]) -> Any:
        tier = self._joined()
        if not isinstance(tier, JoinedTier):
            raise ValueError("redundancy is for disks of the nodes' own")
        started = time.monotonic()
        try:
            num_bytes = work(tier, arguments, self._effort(arguments))
        except FileNotFoundError as exc:
            commit = CommitId(*arguments["commit"])
            text, path = "the checkpoint is not there any more", paths.checkpoint_dir(commit)
            raise SkippedError(text, step=commit.step, path=path) from exc
        return {"bytes": num_bytes, "seconds": time.monotonic() - started}

    def _effort(self, arguments: dict[str, Any]) -> Effort:
        cancelled, deadline_s = self._flag(arguments["number"]), float(arguments["deadline_s"])
        pacer, begun = self._pacer(), threading.local()
        unpaced_from, rate = time.monotonic() + deadline_s / 2, self._config().flush_rate_bytes_s / THREADS

        def pace(num_bytes: int) -> None:
            """Have this thread wait for its turn, and for the rate; not any more once half of the time is used."""
            if time.monotonic() >= unpaced_from:
                return
            if rate:
                cancelled.wait(min(num_bytes / rate, deadline_s / 2))
            if pacer is not None:
                if (began := getattr(begun, "at", None)) is not None:
                    pacer.spent(began)
                begun.at = pacer.wait(cancelled, unpaced_from)

        return Effort(threads=THREADS, deadline_s=deadline_s, cancelled=cancelled.is_set, pace=pace)

    def _protect(self, tier: JoinedTier, arguments: dict[str, Any], effort: Effort) -> int:
        of, node = set_from_wire(arguments["set"]), int(arguments["node"])
        manifest = _manifest(tier, arguments["commit"])
        self._leave_room(tier.own, manifest, node, of, arguments)
        with closing(_members(tier, arguments["at"])) as members:
            record = protect(tier.own, manifest, node, of, members, effort=effort)
        return sum(share.size_bytes for share in record.shares)

    def _rebuild(self, tier: JoinedTier, arguments: dict[str, Any], effort: Effort) -> int:
        node, at = int(arguments["node"]), arguments["at"]
        manifest = _manifest(tier, arguments["commit"])
        with closing(_members(tier, at)) as members:
            lost = open_lost(manifest, node, members, [int(other) for other in at if int(other) != node])
            need = sum(file.size_bytes for file in lost.files)
            self._require(tier.own, need, arguments, f"{need} bytes of node {node} cannot be given back")
            return rebuild(tier.own, lost, effort=effort).num_bytes

    def _leave_room(
        self, own: Tier, manifest: Manifest, node: int, of: RedundancySet, arguments: dict[str, Any]
    ) -> None:
        """See that there is room for the share, and afterwards for another save like this one."""
        directory = paths.checkpoint_dir(manifest.commit)
        try:
            if own.size(f"{directory}/{paths.redundancy_record(node)}", retry_s=0.0):
                return  # made before, as a rule
        except FileNotFoundError:
            pass
        ref = next(ref for ref in manifest.nodes if ref.node == node)
        path = f"{directory}/{paths.node_record(node)}"
        record = records.decode_node_record(own.get(path, limit_bytes=ref.size_bytes), path=path)
        mine = sum(pack.size_bytes for pack in record.packs) + record.objects_size_bytes
        blocks = sum(map(num_blocks, (record.objects_size_bytes, *(pack.size_bytes for pack in record.packs))))
        share = -(-blocks // of.num_data) * of.num_parity * BLOCK_BYTES  # where the others have as much
        older = _older_bytes(own, manifest.commit)  # may go when the next save needs the room
        text = f"{share} bytes of redundancy, and the next save of {mine} bytes, do not fit"
        self._require(own, share + max(0, mine - older), arguments, text)

    def _require(self, own: Tier, need: int, arguments: dict[str, Any], what: str) -> None:
        """See that so many bytes are free, or become free without a checkpoint that is to be kept."""
        free = own.free_bytes()
        if free is None or free >= need:
            return
        keep = {**arguments["keep"], "last": arguments["keep"]["last"] + 1}  # no save is about to let the oldest go
        self._make_room({**arguments, "keep": keep}, need)
        free = own.free_bytes()
        if free is not None and free < need:
            hint = "keep fewer checkpoints, give the disks more room, or use a scheme that holds less"
            raise StorageFullError(f"{what}: {free} bytes are free", path=own.url, tier=own.name, hint=hint)

    def _survey(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Say where the files of a checkpoint are, which nodes are lost, and which sets have redundancy."""
        tier = self._joined()
        if not isinstance(tier, JoinedTier):
            raise ValueError("redundancy is for disks of the nodes' own")
        commit = CommitId(*arguments["commit"])
        manifest = _manifest(tier, arguments["commit"])
        at, redundant = joining.spread(tier, commit)
        sets: dict[tuple[int, ...], dict[str, Any]] = {}
        protected = []
        directory = paths.checkpoint_dir(commit)
        with closing(_members(tier, at)) as members:
            for node in sorted(redundant & at.keys()):
                try:
                    record, _ = read_redundancy(members, node, directory)
                    check_against(record, manifest, node, path=f"{directory}/{paths.redundancy_record(node)}")
                except (FileNotFoundError, IntegrityError):
                    continue
                except CheckpointError as exc:
                    self._events.emit("survey", "failed", node=node, error=str(exc))
                    continue
                protected.append(node)
                sets.setdefault(set_of(record).members, set_to_wire(set_of(record)))
        return {
            "nodes": [ref.node for ref in manifest.nodes],
            "names": list(manifest.own_disks),
            "at": at,
            "sets": list(sets.values()),
            "protected": protected,
        }


def _older_bytes(own: Tier, newest: CommitId) -> int:
    """Return what other checkpoints take on this disk."""
    total = 0
    for step in own.list(paths.CHECKPOINTS):
        for attempt in own.list(f"{paths.CHECKPOINTS}/{step.name}") if step.is_dir else ():
            directory = f"{paths.CHECKPOINTS}/{step.name}/{attempt.name}"
            if attempt.is_dir and directory != paths.checkpoint_dir(newest):
                total += sum(entry.size_bytes for entry in own.list(directory) if not entry.is_dir)
    return total


def _manifest(tier: JoinedTier, commit: Any) -> Manifest:
    path = f"{paths.checkpoint_dir(CommitId(*commit))}/{paths.MANIFEST}"
    data = tier.get(path, limit_bytes=document.max_file_bytes("manifest"), retry_s=0.0)
    return records.decode_manifest(data, path=path)


def _members(tier: JoinedTier, at: Mapping[Any, str]) -> PlacedMembers:
    return PlacedMembers({int(node): tier.members[name] for node, name in at.items() if name in tier.members})
