"""Memory as a tier, on one node: shares of saves that stay in memory, their copies at partners, and what they take of the memory budget.

A memory save is staged and checksummed as any other. Then this node makes its record and objects, which lie in memory beside the arenas,
sends all three to its partners, and tells the lead once they have confirmed it. When all nodes have, the lead tells the manifest to all.
With parity it keeps them, and once all nodes of its redundancy set do, it makes its parity of what the others keep (`memory_protect`).

Invariants: used from the dispatcher thread only; what takes time runs in threads, ends by a deadline, and comes back as an event. A save is
let in only if all that memory saves take fits the budget, in full, on this node. What a checkpoint holds here is dropped when a later one
is committed that is as safe, and not before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.arenas import Arena, ArenaPool, Post
from safehold.agent.means import Spawn, in_thread
from safehold.agent.memory_copies import KIND, Effort, Receiving, provider, read_held
from safehold.agent.memory_protect import Protecting
from safehold.agent.memory_share import share_of
from safehold.agent.net.seam import Network
from safehold.agent.node_save import NodeSave, Peer
from safehold.config import Config
from safehold.errors import CheckpointError, ChecksumError, ConfigurationError, RankLostError, StorageError
from safehold.events import EventStream
from safehold.format import crc, document, paths, records
from safehold.host import memfd
from safehold.host.idle import KernelIdleCores
from safehold.pipeline.pacing import Pacer
from safehold.policy.memory_belief import HeldTold
from safehold.policy.memory_need import Need, Partners, partners
from safehold.policy.memory_parity import padded_bytes
from safehold.types import CommitId

if TYPE_CHECKING:
    from safehold.agent.session import Session

PIECE_BLOCKS = 4
Then = Callable[[Any, CheckpointError | None], None]


@dataclass(frozen=True, slots=True)
class InMemory:
    """A rank whose packs of a checkpoint are in the memory of this node."""

    rank: int
    verified: bool


class NodeMemory:
    """See the module.

    Args:
        here: This node's session.
        config: The run's settings.
        pool: The node's arenas, and what is held.
        post: Runs a function in the dispatcher.
        events: The event stream.
        spawn: Has done beside the dispatcher what takes time.
    """

    def __init__(
        self,
        here: Session,
        *,
        config: Config,
        pool: ArenaPool,
        post: Post,
        events: EventStream,
        spawn: Spawn = in_thread,
    ) -> None:
        self._here, self._config, self._pool, self._post, self._events = here, config, pool, post, events
        self._spawn = spawn
        self._held = pool.held
        self._wanted: dict[int, int] = {}
        self._ward_bytes: dict[int, int] = {}
        self._refusal: CheckpointError | None = None
        self._noted = ""
        self._sendings: dict[CommitId, threading.Event] = {}
        self._pacer: Pacer | None = None
        self.partners = Partners(of={here.node: ()})
        if self.is_used:
            num_nodes, domains = len(here.world.node_names), here.world.domains
            self.partners = partners(num_nodes, domains, config.memory_copies, config.memory_parity)
        self._wards = self.partners.wards(here.node)
        self._speakers = self.partners.speakers(here.node)
        self._protecting: Protecting | None = None
        self._set = self.partners.set_of(here.node)
        if self._set is not None:
            facts: dict[str, Any] = {"config": config, "held": pool.held, "effort": self._effort}
            self._protecting = Protecting(here, self._set, post=post, spawn=spawn, **facts)

    @property
    def is_used(self) -> bool:
        """Whether memory is a tier of this job."""
        return self._config.flush_every > 1

    @property
    def network(self) -> Network | None:
        """The way to other nodes, where there are any."""
        return self._here.nodes.network if self._here.nodes is not None else None

    def connect(self) -> None:
        """Let other nodes read what is held here, and write copies that this node keeps."""
        if (network := self.network) is None:
            return
        names = self._here.world.node_names
        receiving = Receiving(
            self._held,
            index_of=names.index,
            wards=lambda: self._wards,
            incarnation=lambda: -1 if self._here.ended_by else self._here.incarnation,
        )
        network.provide(KIND, provider(self._held))
        network.accept(KIND, receiving.sink)

    # -- what it takes of the budget -------------------------------------------------------------------------------------

    def wanted(self, rank: int, arena_bytes: int) -> None:
        """A rank of this node will need an arena of that size; arenas never shrink."""
        if not self.is_used or self._wanted.get(rank, -1) >= arena_bytes:
            return
        self._wanted[rank] = arena_bytes
        if len(self._wanted) < len(self._here.local_ranks):
            return
        size_bytes = sum(self._wanted.values()) if self._set is None else self._padded_bytes()
        for node in self.partners.listeners(self._here.node):
            self._here.send(node, w.CopyNeeds(size_bytes))
        self._consider()

    def _padded_bytes(self) -> int:
        """What this node's share takes in the stripes of its set, as far as arenas tell."""
        most = max(self._wanted.values(), default=0)
        return padded_bytes(self._wanted.values(), num_files=1 + most // self._config.pack_size_bytes)

    def ward_needs(self, node: int, size_bytes: int) -> None:
        """Another node says what a copy of its share takes, or what its share takes in the stripes of its set."""
        if node in self._speakers:
            self._ward_bytes[node] = size_bytes
            self._consider()

    def _consider(self) -> None:
        """Compare what is needed with the budget, as far as it is known; tell the user once all of it is."""
        names = self._here.world.node_names
        need = Need(
            own_bytes=sum(self._wanted.values()),
            num_ranks=len(self._wanted),
            wards={names[node]: size for node, size in self._ward_bytes.items()},
            of=self._set,
            padded_bytes=self._padded_bytes() if self._set is not None else 0,
        )
        budget = self._pool.usable_bytes()
        node = names[self._here.node]
        self._refusal = None
        self._pool.reserved_bytes = max(0, need.total_bytes - need.own_bytes)
        if need.total_bytes > budget:
            text = f"memory saves take {need.words()} of host memory on this node; the budget is {budget:,} bytes"
            hint = "raise memory_budget_bytes, use more nodes, or set flush_every=1; saves to storage go on"
            self._refusal = ConfigurationError(text, node=node, hint=hint)
            self._pool.reserved_bytes = 0
        elif len(self._wanted) == len(self._here.local_ranks) and len(self._ward_bytes) == len(self._speakers):
            self._note(
                f"memory saves take {need.words()} of host memory on node {node}, of a budget of {budget:,} bytes"
            )

    def _note(self, text: str) -> None:
        if text == self._noted:
            return
        self._noted = text
        self._events.emit("memory", text=text)
        peer = self._here.peers.get(min(self._here.local_ranks))
        if peer is not None:
            peer.reply(m.Note(text, info=True))
            for warning in self.partners.warnings:
                peer.reply(m.Note(f"memory saves: {warning}"))

    def refusal(self, message: m.Begin) -> CheckpointError | None:
        """Say why a save cannot be let in; None if it can."""
        if not message.in_memory:
            return None
        if not self.is_used:
            return ConfigurationError("memory is no tier of this job", step=message.step, hint="set flush_every")
        return self._refusal

    def turn(self, rank: int, arena_bytes: int) -> None:
        """Before a save of a rank: have it use the arena that does not hold the last good snapshot.

        Also where memory is no tier of this job, as long as the job before has left one that is on no storage.
        """
        if self._refusal is None and (self.is_used or self._pool.only_in_memory(rank)):
            self._pool.turn(rank, arena_bytes)

    def begins(self, step: int, attempt: int) -> None:
        """A memory save has begun on this node: the lead hears of it before it hears of its ranks."""
        self._here.report(w.MemoryBegins(self._here.incarnation, step, attempt))

    # -- the share of this node ------------------------------------------------------------------------------------------

    def share(self, save: NodeSave, packs: list[Any], timings: dict[str, float], then: Then) -> None:
        """Make the share of a save that all ranks here have staged, copy it to the partners, and call `then` as a `record` would."""
        here, names = self._here, self._here.world.node_names
        commit = CommitId(save.step, here.incarnation, save.attempt)
        facts = {"run_id": here.run_id, "node": here.node, "node_name": names[here.node], "packs": packs}
        work = share_of(save, commit, timings=timings, **facts)
        partner_names = [names[node] for node in self.partners.of.get(here.node, ())]
        cancelled = self._sendings[commit] = threading.Event()

        def run() -> None:
            error: CheckpointError | None = None
            record = objects = b""
            try:
                record, objects = work.run(self._held, self.network, partner_names, self._effort, cancelled)
            except CheckpointError as exc:
                error = exc
            except Exception as exc:
                error = StorageError(f"keeping a save in memory failed: {type(exc).__name__}: {exc}", tier="memory")
            self._post(lambda: self._shared(commit, record, objects, error, then))

        self._spawn(f"share-{commit.step}", run)

    def _effort(self) -> Effort:
        if self._pacer is None:
            self._pacer = Pacer(KernelIdleCores(), self._config.flush_busy_share)
        return Effort(
            threads=self._config.flush_threads,
            piece_bytes=PIECE_BLOCKS * self._config.flush_block_bytes,
            rate_bytes_s=self._config.flush_rate_bytes_s,
            nice=self._config.flush_nice,
            deadline_s=self._config.flush_timeout_s,
            pacer=self._pacer,
        )

    def _shared(
        self, commit: CommitId, record: bytes, objects: bytes, error: CheckpointError | None, then: Then
    ) -> None:
        cancelled = self._sendings.get(commit)
        if self._protecting is not None and error is None and cancelled is not None and not cancelled.is_set():
            done = lambda error: self._safe(commit, record, objects, error, then)  # noqa: E731
            self._protecting.kept(commit, record, cancelled, done)
            return
        self._safe(commit, record, objects, error, then)

    def _safe(self, commit: CommitId, record: bytes, objects: bytes, error: CheckpointError | None, then: Then) -> None:
        """The share is in memory here, and as safe as it can be; or there was an error on the way."""
        cancelled = self._sendings.pop(commit, None)
        if (
            error is not None or cancelled is None or cancelled.is_set()
        ):  # it may have been put there after it was given up
            self._held.drop(commit)
        if error is not None:
            error.step = error.step if error.step is not None else commit.step
            then(None, error)
            return
        decoded = records.decode_node_record(record, path=paths.node_record(self._here.node))
        packs = [(pack.rank, pack.part, pack.size_bytes, pack.crc32) for pack in decoded.packs]
        if commit.incarnation == self._here.incarnation:
            self._here.report(w.HeldHere(commit.incarnation, commit.step, commit.attempt, packs, len(objects)))
        then({"size_bytes": len(record), "blake3": document.digest(record)}, None)

    def make_parity(self, word: w.MakeParity) -> None:
        """All nodes of the redundancy set keep their shares of a save."""
        if word.incarnation == self._here.incarnation and self._protecting is not None:
            self._protecting.make_parity(word)

    # -- what the lead says ----------------------------------------------------------------------------------------------

    def hold_manifest(self, word: w.HoldManifest) -> None:
        """Keep a manifest, once the plan is here."""
        if word.incarnation != self._here.incarnation:
            return
        if self._held.has_plan(word.plan_digest):
            self._keep(word, None)
            return
        lead = self._here.world.node_names[self._here.lead_node]
        path = paths.plan(word.plan_digest)

        def work() -> None:
            error: CheckpointError | None = None
            try:
                data = self._read(lead, path, word.plan_size)
                if document.digest(data) != word.plan_digest:
                    raise ChecksumError("the plan came damaged from the lead", step=word.step, path=path)
                self._held.put_plan(word.plan_digest, data)
            except CheckpointError as exc:
                error = exc
            except Exception as exc:
                error = StorageError(f"reading the plan failed: {type(exc).__name__}: {exc}", step=word.step, path=path)
            self._post(lambda: self._keep(word, error))

        self._spawn("plan-read", work)

    def _keep(self, word: w.HoldManifest, error: CheckpointError | None) -> None:
        here = self._here
        if word.incarnation != here.incarnation:
            return
        commit = CommitId(word.step, word.incarnation, word.attempt)
        if error is None:
            try:
                self._held.put_manifest(commit, word.manifest, run_id=here.run_id, believed_by=here.incarnation)
            except CheckpointError as exc:
                error = exc
        wire = error.to_wire() if error is not None else None
        self._here.report(w.HoldsManifest(word.incarnation, word.step, word.attempt, wire))

    def _read(self, node: str, path: str, size: int) -> bytes:
        """Read a document of another node; for threads."""
        fd = read_held(self._held, self.network, node, path, 0, size, self._config.request_timeout_s)
        try:
            return os.pread(fd, size, 0)
        finally:
            os.close(fd)

    def committed(self, commit: CommitId, *, in_memory: bool) -> None:
        """A save is durable: what is older in memory is not needed any more.

        Except beside one on the nodes' own disks: that is lost with any node until it has redundancy, if it ever gets any. What has copies
        or parity in memory stays until the next save in memory is durable, as far as arenas are not used again before.
        """
        if in_memory or not (self.is_used and self._here.local_flash):
            self._held.drop_up_to(commit.step, but=commit if in_memory else None)
        self.restored()
        if not self.is_used:
            self._pool.drop_kept()

    def abandoned(self, commit: CommitId, *, in_doubt: bool) -> None:
        """A memory save is given up."""
        cancelled = self._sendings.get(commit)
        if cancelled is not None:
            cancelled.set()
        if self._protecting is not None:
            self._protecting.abandoned(commit)
        if in_doubt:
            self._held.doubt(commit)
        else:
            self._held.drop(commit)

    def told(self) -> list[HeldTold]:
        """Return what this node holds."""
        return self._held.told()

    def accept(self, commit: CommitId | None) -> None:
        """The incarnation that was opened believes this checkpoint in memory, and no other."""
        self._held.accept(commit, self._here.incarnation)
        self._pool.accept(commit)
        if not self.is_used:
            self._held.trim()

    # -- restores --------------------------------------------------------------------------------------------------------

    def here(self, commit: CommitId) -> list[InMemory]:
        """Return the ranks whose packs of a checkpoint are in the memory of this node."""
        found = self._held.ranks(commit)
        for arena in self._pool.holding(commit):
            found[arena.rank] = found.get(arena.rank, False) or arena.verified
        return [InMemory(rank, verified) for rank, verified in sorted(found.items())]

    def lend(self, peer: Peer, message: held_messages.MemoryAsk) -> None:
        """Give a rank the memory of another to restore from.

        Raises:
            RankLostError: It is gone.
        """
        rank = message.rank
        commit = CommitId(*message.commit) if message.commit is not None else None
        arena = self._pool.of(rank) if commit is None else None
        if commit is not None:
            arena = next((found for found in self._pool.holding(commit) if found.rank == rank), None)
            image = self._held.image(commit, rank) if arena is None or not arena.verified else None
            if image is not None:
                try:
                    with memfd.read_only(image.fd) as fd:
                        peer.reply(held_messages.MemorySource(message.id, image.size_bytes, image.packs), (fd,))
                finally:
                    os.close(image.fd)
                return
        if arena is None or arena.content is None:
            raise RankLostError(f"the memory of rank {rank} is gone", rank=rank)
        with memfd.read_only(arena.fd) as fd:
            peer.reply(held_messages.MemorySource(message.id, arena.size_bytes, arena.packs), (fd,))

    def restored(self) -> None:
        """A rank is through with a restore: no rank reads another job's memory any more, but what is on no storage stays."""
        held = {told.commit.step for told in self._held.told()}
        self._pool.drop_idle(set(self._here.local_ranks), self._pool.ranks_with_content(held))

    def prepare_other(
        self,
        peer: Peer,
        message: m.Prepare,
        ready: Callable[[Arena | None, CheckpointError | None], None],
    ) -> None:
        """Have the other generation of a rank's arena populated ahead."""
        if not self.is_used:
            peer.reply(m.Done(message.id))
            return
        if self._refusal is not None:
            peer.refuse(message.id, self._refusal)
            return

        def found(arena: Arena | None, error: CheckpointError | None) -> None:
            if arena is None and error is None:
                peer.reply(m.Done(message.id))
            else:
                ready(arena, error)

        self._pool.acquire_kept(peer.rank, message.arena_bytes, found)

    def ask(self, peer: Peer, message: held_messages.HeldAsk) -> None:
        """A rank wants bytes that a node holds; they are read in a thread."""
        names = self._here.world.node_names
        if not 0 <= message.node < len(names) or not 0 <= message.offset < 1 << 50 or not 0 < message.size < 1 << 40:
            raise ConfigurationError(f"there is no such part of {message.path!r}", rank=peer.rank, path=message.path)
        name = names[message.node] if message.node != self._here.node else None
        if message.whole and (found := self._held.find(message.path)) is not None:
            name = None
            if found.fd >= 0:
                os.close(found.fd)

        def work() -> None:
            try:
                fd = read_held(
                    self._held,
                    self.network,
                    name,
                    message.path,
                    message.offset,
                    message.size,
                    self._config.stall_timeout_s,
                )
                if message.whole and name is not None:
                    self._held.cache(message.path, os.pread(fd, message.size, 0))
            except CheckpointError as exc:
                peer.refuse(message.id, exc)
                return
            except Exception as exc:
                peer.refuse(message.id, StorageError(f"{type(exc).__name__}: {exc}", path=message.path, tier="memory"))
                return
            try:
                peer.reply(held_messages.HeldBytes(message.id, message.size), (fd,))
            finally:
                os.close(fd)

        self._spawn("held-read", work)

    def close(self) -> None:
        """End what is under way."""
        for cancelled in list(self._sendings.values()):
            cancelled.set()

    def facts(self) -> dict[str, Any]:
        """What `safehold agents` shows."""
        names = self._here.world.node_names
        return {
            "is_used": self.is_used,
            "partners": [names[node] for node in self.partners.of.get(self._here.node, ())],
            "keeps_for": [names[node] for node in self._wards],
            "parity": str(self._config.memory_parity) if self._set is not None else None,
            "parity_set": [names[node] for node in self._set.members] if self._set is not None else [],
            "refused": self._refusal.message if self._refusal is not None else None,
        }


def totals(told: list[w.HeldHere]) -> tuple[int, int]:
    """Return a checkpoint's total bytes, and the checksum of its packs in rank and part order; see `agreement.totals`."""
    packs = sorted(pack for entry in told for pack in entry.packs)
    nbytes = sum(size for _, _, size, _ in packs) + sum(entry.objects_bytes for entry in told)
    return nbytes, crc.combine([value for *_, value in packs], [size for _, _, size, _ in packs]) if packs else 0
