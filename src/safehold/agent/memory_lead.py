"""Memory as a tier, beside rank 0: commits saves that stay in memory, and finds what a new start of the job can restore from memory.

A memory save goes through the same phases as any other. Its plan stays with the lead, from where the nodes read it. "Publishing" it is to
tell its manifest to all nodes; each answers that it has it, and the plan. From the first that has it on it may be restored after a crash,
as from a manifest that is visible on storage; it is told to be durable once all have it.

Invariants: used from the dispatcher thread only; nothing here waits. A save is a memory save on all nodes or on none. What was published
and not acknowledged by all is in doubt.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from safehold._version import __version__
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.arenas import Post
from safehold.agent.means import Spawn, in_thread
from safehold.agent.memory_copies import read_held
from safehold.agent.memory_held import MAX_DOCUMENT_BYTES, Held
from safehold.agent.memory_node import NodeMemory, totals
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, CommitError, RankLostError, StepNotFoundError, TornFileError, from_wire
from safehold.events import EventStream
from safehold.format import document, paths, records
from safehold.policy import commit as protocol
from safehold.policy.memory_belief import Believed, HeldTold, choose
from safehold.policy.memory_parity import SetHeld
from safehold.types import CommitId

MAX_SAVES = 64
REMEMBERED = 4096
DIGEST_CHARS = 64
Key = tuple[int, int]
Done = Callable[[CheckpointError | None], None]
Found = Callable[[Any, CheckpointError | None], None]


class Here(Protocol):
    """The session on this node, as this needs it."""

    node: int
    world: m.World
    run_id: str
    incarnation: int
    memory: NodeMemory


class Teller(Protocol):
    """What tells nodes."""

    def tell(self, node: int, word: w.Word) -> None:
        """Tell one."""
        ...

    def tell_all(self, word: w.Word) -> None:
        """Tell all."""
        ...


@dataclass(slots=True)
class _Save:
    """A memory save without a verdict: nodes that began it so, what each keeps and holds, and who has not got the manifest yet."""

    begun: set[int] = field(default_factory=set)
    kept: dict[int, w.ShareKept] = field(default_factory=dict)
    held: dict[int, w.HeldHere] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    manifest: bytes = b""
    done: Done | None = None

    def end(self, error: CheckpointError | None) -> None:
        """Publishing is over."""
        done, self.done = self.done, None
        self.waiting.clear()
        if done is not None:
            done(error)


class MemoryLead:
    """See the module.

    Attributes:
        told: Node -> what it holds, as far as it told since this start of the job.
        believed: The checkpoint in memory that can be restored, if there is one.

    Args:
        here: This node's session.
        teller: Tells nodes.
        config: The run's settings.
        held: What this node holds.
        post: Runs a function in the dispatcher.
        clock: Time, for manifests.
        events: The event stream.
        spawn: Has done beside the dispatcher what takes time.
    """

    def __init__(
        self,
        here: Here,
        teller: Teller,
        *,
        config: Config,
        held: Held,
        post: Post,
        clock: Clock,
        events: EventStream,
        spawn: Spawn = in_thread,
    ) -> None:
        self._spawn = spawn
        self._here, self._config, self._held = here, config, held
        self._tell, self._tell_all = teller.tell, teller.tell_all
        self._post, self._clock, self._events = post, clock, events
        self._nodes = set(here.world.node_of)
        self._saves: OrderedDict[Key, _Save] = OrderedDict()
        self._plans: OrderedDict[tuple[str, ...], tuple[str, int]] = OrderedDict()
        self._were: OrderedDict[Key, None] = OrderedDict()
        self.told: dict[int, list[HeldTold]] = {}
        self.believed: Believed | None = None
        self._words: tuple[str, ...] = ()

    # -- saves -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin an incarnation without saves."""
        self._saves.clear()
        self._were.clear()

    def is_memory(self, step: int, attempt: int) -> bool:
        """Whether a save stays, or stayed, in memory."""
        return (step, attempt) in self._were

    def report(self, node: int, report: w.Report) -> None:
        """Take what a node reports of memory saves.

        Raises:
            msgspec.DecodeError: It makes no sense.
        """
        if not isinstance(report, w.MemoryBegins | w.HeldHere | w.ShareKept | w.HoldsManifest):
            raise msgspec.ValidationError(f"{type(report).__name__} is not about memory")
        if report.incarnation != self._here.incarnation:
            return
        key = (report.step, report.attempt)
        if isinstance(report, w.MemoryBegins):
            self._begins(key, node)
            return
        save = self._saves.get(key)
        if save is None:
            return
        if isinstance(report, w.ShareKept):
            self._kept(save, node, report)
        elif isinstance(report, w.HeldHere):
            at = self._here.world.node_of
            if any(not 0 <= rank < len(at) or at[rank] != node for rank, *_ in report.packs):
                raise msgspec.ValidationError(f"node {node} holds packs of ranks that are not its own")
            save.held[node] = report
        elif report.error is not None:
            save.end(from_wire(report.error))
        elif node in save.waiting:
            save.waiting.discard(node)
            if not save.waiting:
                save.end(None)

    def _kept(self, save: _Save, node: int, report: w.ShareKept) -> None:
        """A node keeps its share; once all of its set do, they protect it."""
        of = self._here.memory.partners.set_of(node)
        if of is None or len(report.blake3) != DIGEST_CHARS or not 0 < report.size_bytes < MAX_DOCUMENT_BYTES:
            raise msgspec.ValidationError(f"node {node} has nothing to tell of a share")
        save.kept[node] = report
        if all(member in save.kept for member in of.members):
            kept = [(member, save.kept[member]) for member in of.members]
            refs = [(member, told.size_bytes, told.blake3) for member, told in kept]
            for member in of.members:
                self._tell(member, w.MakeParity(report.incarnation, report.step, report.attempt, refs))

    def _begins(self, key: Key, node: int) -> None:
        self._saves.setdefault(key, _Save()).begun.add(node)
        self._were[key] = None
        while len(self._saves) > MAX_SAVES:
            self._saves.popitem(last=False)
        while len(self._were) > REMEMBERED:
            self._were.popitem(last=False)

    def disagreement(self, step: int, attempt: int) -> CheckpointError | None:
        """Say so if some nodes keep a save in memory and others flush it."""
        save = self._saves.get((step, attempt))
        begun = save.begun if save is not None else set()
        if begun == self._nodes:
            return None
        names = self._here.world.node_names
        one, other = names[min(begun)] if begun else "none", names[min(self._nodes - begun)]
        text = f"node {one} keeps the save in memory, and node {other} flushes it"
        return CommitError(text, step=step, hint="call save alike on all ranks: the same steps, and flush alike")

    def plan_of(self, digests: tuple[str, ...]) -> tuple[str, int] | None:
        """Return digest and size of the plan to these parts, if it is held here."""
        found = self._plans.get(digests)
        return found if found is not None and self._held.has_plan(found[0]) else None

    def keep_plan(self, digests: tuple[str, ...], digest: str, data: bytes) -> None:
        """Hold a plan; the nodes read it from here."""
        self._plans[digests] = (digest, len(data))
        while len(self._plans) > MAX_SAVES:
            self._plans.popitem(last=False)
        self._held.put_plan(digest, data)

    def publish(self, action: protocol.Publish, metrics: dict[str, float], final: bool, done: Done) -> None:
        """Tell all nodes the manifest; `done` hears once all have it, or of the first that cannot."""
        save = self._saves.get((action.step, action.attempt))
        if save is None or set(save.held) != self._nodes:
            text = "a node has recorded the save and has not said what it holds in memory"
            done(CommitError(text, step=action.step))
            return
        here = self._here
        total, checksum = totals([save.held[node] for node in sorted(save.held)])
        commit = CommitId(action.step, here.incarnation, action.attempt)
        manifest = records.Manifest(
            run_id=here.run_id,
            commit=commit,
            world_size=here.world.world_size,
            nodes=action.nodes,
            plan_digest=action.plan_digest,
            plan_size_bytes=action.plan_size,
            total_bytes=total,
            crc32=checksum,
            created_s=self._clock.wall(),
            library=__version__,
            metrics=metrics,
            final=final,
        )
        save.manifest, save.waiting, save.done = records.encode_manifest(manifest), set(self._nodes), done
        word = w.HoldManifest(
            here.incarnation, action.step, action.attempt, save.manifest, action.plan_digest, action.plan_size
        )
        self._tell_all(word)

    def node_lost(self, node: int) -> None:
        """A node is dead, or cannot be reached: what it had not answered it does not answer."""
        self.told.pop(node, None)
        name = self._here.world.node_names[node]
        for (step, _), save in list(self._saves.items()):
            if node in save.waiting:
                save.end(RankLostError("it was lost before it had the manifest", step=step, node=name))

    def committed(self, step: int, attempt: int) -> bool:
        """A save is durable; returns whether in memory. What was believed before is superseded."""
        save = self._saves.pop((step, attempt), None)
        in_memory = self.is_memory(step, attempt)
        if in_memory and save is not None:
            partners = self._here.memory.partners
            self.believed = Believed(
                commit=CommitId(step, self._here.incarnation, attempt),
                manifest=document.digest(save.manifest),
                knowers=tuple(sorted(self._nodes)),
                holders={node: (node, *partners.of.get(node, ())) for node in sorted(self._nodes)},
                sets=tuple(
                    SetHeld(members=of.members, holders={node: node for node in of.members}) for of in partners.sets
                ),
            )
        elif self.believed is not None and self.believed.commit.step <= step:
            self.believed = None
        return in_memory

    def abandoned(self, step: int, attempt: int) -> bool:
        """A save is given up; returns whether it would have stayed in memory."""
        save = self._saves.pop((step, attempt), None)
        if save is not None:
            save.done = None
        return self.is_memory(step, attempt)

    # -- what a new start finds ------------------------------------------------------------------------------------------

    def choose(self, run_id: str, before: int) -> CommitId | None:
        """Decide, when an incarnation is opened, which checkpoint in memory it believes."""
        self.told[self._here.node] = self._here.memory.told()
        self.believed, self._words = choose(self.told, run_id=run_id, before=before)
        for text in self._words:
            self._events.emit("memory", "failed", error=text)
        return self.believed.commit if self.believed is not None else None

    def rebased(self, commit: CommitId) -> CommitId | None:
        """The job went back to a commit: what is newer in memory is not believed any more."""
        if self.believed is not None and self.believed.commit > commit:
            self.believed = None
        return self.believed.commit if self.believed is not None else None

    def is_believed(self, commit: CommitId) -> bool:
        """Whether a commit is the one in memory."""
        return self.believed is not None and self.believed.commit == commit

    def find(
        self, step: int | None, bad: list[CommitId], value: Any, error: CheckpointError | None, then: Found
    ) -> None:
        """After storage was looked through: call `then` with what it has, or with a newer checkpoint in memory.

        Args:
            step: The step that was asked for; None: the newest.
            bad: What was tried in vain.
            value: As the flusher's `find` gives it.
            error: Its error.
            then: Takes both.
        """
        believed = self.believed
        words = list(self._words) if step is None else []
        if value is not None:
            value["skipped"] = [*words, *value["skipped"]]
        usable = believed is not None and believed.commit not in bad and step in (None, believed.commit.step)
        if believed is None or not usable or not (error is None or isinstance(error, StepNotFoundError)):
            if believed is not None and value is not None:  # it is newer than what is offered, if that is so
                value["newest"] = _wire(max([believed.commit, *_commits(value["newest"])]))
                value["any_commit"] = True
            then(value, error)
            return
        found = value or {"commit": None, "newest": None, "bad": [], "skipped": words}
        if any(commit > believed.commit for commit in _commits(found["commit"])):
            then(value, error)
            return

        # Storage has checkpoints, and none can be used: those that are newer must not stand in the way of the steps to come.
        set_aside = [CommitId(believed.commit.step, self._here.incarnation, 0)] if error is not None else []

        def fetched(manifest: bytes | None, failure: CheckpointError | None) -> None:
            if manifest is None:
                text = f"step {believed.commit.step} is in memory and cannot be had: {failure}"
                self._words, self.believed = (*self._words, text), None
                self.find(step, bad, value, error, then)
                return
            offer = {
                **found,
                "commit": _wire(believed.commit),
                "manifest": manifest,
                "newest": _wire(max([believed.commit, *set_aside, *_commits(found["newest"])])),
                "any_commit": True,
                "tier": "memory",
                "holders": {},
                "in_memory_of": believed.to_wire(),
            }
            then(offer, None)

        self._fetch(believed, fetched)

    def _fetch(self, believed: Believed, then: Callable[[bytes | None, CheckpointError | None], None]) -> None:
        """Get the manifest from whoever has it."""
        own = self._held.manifest(believed.commit)
        if own is not None and document.digest(own) == believed.manifest:
            then(own, None)
            return
        names, network = self._here.world.node_names, self._here.memory.network
        path = f"{paths.checkpoint_dir(believed.commit)}/{paths.MANIFEST}"
        sizes = {node: told.manifest_bytes for node, told in self._told_of(believed).items()}

        found: list[bytes] = []

        def work() -> None:
            error: CheckpointError = TornFileError("no node has the manifest", path=path)
            for node in believed.knowers:
                if node == self._here.node or node not in sizes:
                    continue
                try:
                    limit_s = self._config.request_timeout_s
                    fd = read_held(self._held, network, names[node], path, 0, sizes[node], limit_s)
                    try:
                        data = os.pread(fd, sizes[node], 0)
                    finally:
                        os.close(fd)
                    if document.digest(data) != believed.manifest:
                        raise TornFileError(f"node {names[node]} has another manifest", path=path)
                except CheckpointError as exc:
                    error = exc
                    continue
                except Exception as exc:
                    error = TornFileError(f"reading the manifest failed: {type(exc).__name__}: {exc}", path=path)
                    continue
                found.append(data)
                break
            manifest = found[0] if found else None
            self._post(lambda: then(manifest, error))

        self._spawn("manifest-read", work)

    def _told_of(self, believed: Believed) -> Mapping[int, HeldTold]:
        return {
            node: entry
            for node, entries in self.told.items()
            for entry in entries
            if entry.commit == believed.commit and entry.manifest == believed.manifest
        }


def _wire(commit: CommitId) -> list[int]:
    return [commit.step, commit.incarnation, commit.attempt]


def _commits(wire: Any) -> list[CommitId]:
    return [CommitId(*wire)] if wire is not None else []
