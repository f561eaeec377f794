"""The saves of one node: grants arenas to ranks, has them flushed, compares replicas, and writes the node record.

Invariants: used from the dispatcher thread only; nothing here waits. An arena is busy from its grant until the flusher has answered for
it, whatever became of the save. A decision of the overlap policy is made once per save, by the first rank that asks, and holds for all
ranks of the node. What is told to the lead is facts (begun, staged, recorded, failed); the lead alone decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safehold.agent.arenas import Arena, ArenaPool
from safehold.agent.flusher_client import ANSWER_SLACK_S, Flusher
from safehold.agent.known import Known
from safehold.agent.memory_node import NodeMemory
from safehold.agent.messages import Begin, Granted, PartWanted, Skipped, Staged
from safehold.agent.node_save import NodeSave, Peer, RankSave, agreed, check, given_up
from safehold.agent.parts import PartStore
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, CommitError, ConfigurationError, SkippedError
from safehold.policy import commit as protocol
from safehold.policy.compare import disagreements, mismatch
from safehold.types import CommitId

COMPARE_AREA_BYTES = 4 << 20
CLOSED_KEPT = 64


class NodeSaves:
    """All saves of one incarnation on one node.

    Args:
        node: Index of this node; `local_ranks` are its ranks.
        incarnation: The incarnation.
        config: The run's settings.
        pool: The node's arenas.
        flusher: For tier work.
        clock: Time.
        control_of: Descriptors of a rank's control words: (memfd, eventfd).
        tell_lead: Takes the protocol's events.
        compared: Takes (step, attempt, CRC32 by rank and key) of the ranges that this node's ranks agree about.
        several_nodes: Whether there are others, who must hear of a save that is skipped here.
        run_id: The run's id.
        node_name: This node's name.
        parts: The ranks' encoded parts; filled here, read by the lead.
        keep: Wire form of the retention rules.
        memory: For saves that stay in memory.
        known: What the incarnation has on storage.
    """

    def __init__(
        self,
        *,
        node: int,
        local_ranks: list[int],
        incarnation: int,
        config: Config,
        keep: dict[str, Any],
        pool: ArenaPool,
        flusher: Flusher,
        clock: Clock,
        control_of: Callable[[int], tuple[int, int]],
        tell_lead: Callable[[Any], None],
        compared: Callable[[int, int, dict[int, dict[str, int]]], None],
        several_nodes: bool,
        run_id: str,
        node_name: str,
        parts: PartStore,
        known: Known,
        memory: NodeMemory,
    ) -> None:
        self.node, self.local_ranks, self.incarnation = node, local_ranks, incarnation
        self._config, self._keep, self._pool, self._flusher, self._clock = config, keep, pool, flusher, clock
        self._control_of, self._tell_lead = control_of, tell_lead
        self._compared, self._several_nodes = compared, several_nodes
        self._run_id, self._node_name = run_id, node_name
        self._saves: dict[tuple[int, int], NodeSave] = {}
        self._held: list[tuple[Peer, Begin]] = []
        self._parts, self._memory = parts, memory
        self.known = known
        known.told = self._let_in

    # -- what trainers say ----------------------------------------------------------------------------------------

    def begin(self, peer: Peer, message: Begin) -> None:
        """A rank asks to save."""
        check(message)
        if self.known.pending:
            self._held.append((peer, message))
        else:
            self._begin(peer, message)

    def hold(self, held: list[tuple[Peer, Begin]]) -> None:
        """Take over who waits to be let in."""
        self._held += held
        if not self.known.pending:
            self._let_in()

    def take_held(self) -> list[tuple[Peer, Begin]]:
        """Return who waits to be let in, and forget them."""
        held, self._held = self._held, []
        return held

    def _let_in(self) -> None:
        """What is committed is known now, or cannot be."""
        for peer, message in self.take_held():
            if peer.closed:
                continue
            try:
                self._begin(peer, message)
            except CheckpointError as exc:
                peer.refuse(message.id, exc)

    def _begin(self, peer: Peer, message: Begin) -> None:
        key = (message.step, message.attempt)
        save = self._saves.get(key)
        if save is not None and (peer.rank in save.ranks or any(other.rank == peer.rank for other, _ in save.waiting)):
            raise ConfigurationError("this rank has begun this save before", step=message.step, rank=peer.rank)
        if not self._parts.use(peer.rank, message.part_digest, message.part):
            peer.reply(PartWanted(message.id))
            return
        self._left_behind(peer.rank, message)
        if save is None:
            error = None if message.overwrite else self.known.refusal(message.step, message.attempt)
            error = error or self._memory.refusal(message)
            if error is not None:
                error.rank = peer.rank
                peer.refuse(message.id, error)
                return
            save = self._open(message)
        if save.in_memory != message.in_memory:
            text = "some ranks of the node keep the save in memory, and others flush it"
            raise CommitError(text, step=save.step, rank=peer.rank, hint="call save alike on all ranks")
        if save.skipped:
            peer.reply(Skipped(message.id, save.skipped))
        elif save.closed:
            peer.refuse(message.id, save.error or given_up(save))
        elif save.blocked:
            save.waiting.append((peer, message))
        else:
            self._grant(save, peer, message)

    def _left_behind(self, rank: int, message: Begin) -> None:
        """Give up saves that others began before this one and that this rank has passed over: nobody need wait for it."""
        for save in list(self._saves.values()):
            if save.key == (message.step, message.attempt):
                return
            began = rank in save.ranks or any(peer.rank == rank for peer, _ in save.waiting)
            if save.closed or began:
                continue
            text = f"rank {rank} went on to save step {message.step} without this one"
            error = CommitError(text, step=save.step, rank=rank, hint="call save for the same steps on every rank")
            self._tell_lead(protocol.RankFailed(step=save.step, attempt=save.attempt, rank=rank, error=error))

    def staged(self, peer: Peer, message: Staged, objects: dict[str, bytes]) -> None:
        """A rank's arena is complete."""
        rank = self._rank(message.step, message.attempt, peer.rank)
        if rank is None:
            return
        rank.staged, rank.objects, rank.stage_s = True, objects, message.stage_s
        self._tell_lead(protocol.Staged(step=message.step, attempt=message.attempt, rank=peer.rank))
        self._maybe_record(self._saves[message.step, message.attempt])

    def stage_failed(self, step: int, attempt: int, rank: int, error: CheckpointError) -> None:
        """A rank could not stage, or not even begin."""
        save = self._saves.get((step, attempt))
        if save is None or not save.closed:
            self._tell_lead(protocol.RankFailed(step=step, attempt=attempt, rank=rank, error=error))

    def rank_gone(self, rank: int) -> None:
        """A trainer's connection ended: what it waited for is moot."""
        for save in list(self._saves.values()):
            save.waiting = [(peer, begin) for peer, begin in save.waiting if peer.rank != rank]
            if save.blocked and not save.waiting and not save.ranks:
                save.closed = True
                self._settle(save)
            mine = save.ranks.get(rank)
            if mine is not None and not mine.staged and mine.flushing:
                self._cancel(save)

    def drop_announced(self, error: CheckpointError) -> None:
        """Not all ranks follow an announcement: those that did need not wait for the others."""
        for save in [entry for entry in self._saves.values() if entry.announced and not entry.closed]:
            for rank in [*save.ranks, *(peer.rank for peer, _ in save.waiting)][:1]:
                self._tell_lead(protocol.RankFailed(step=save.step, attempt=save.attempt, rank=rank, error=error))

    def end(self, error: CheckpointError) -> None:
        """No save of this incarnation counts any more; refuse those that the lead has not heard of."""
        for peer, begin in self.take_held():
            peer.refuse(begin.id, error)
        for save in [entry for entry in self._saves.values() if not entry.closed and not entry.ranks]:
            save.closed = True
            waiting, save.waiting = save.waiting, []
            for peer, begin in waiting:
                peer.refuse(begin.id, error)

    # -- what the lead decides -------------------------------------------------------------------------------------

    def committed(self, step: int, attempt: int, *, in_memory: bool = False) -> dict[str, float]:
        """The save is durable: mark what the arenas hold; returns figures."""
        save = self._saves.get((step, attempt))
        if in_memory:
            self.known.steps.add(step)  # and nothing that storage has
        else:
            self.known.committed(step, attempt)
        if save is None or save.committed:
            return {}
        save.closed = save.committed = True
        try:
            self._keep_memory(save)
            return self._figures(save)
        finally:  # the next save is let in whatever happens
            self._settle(save)

    def _keep_memory(self, save: NodeSave) -> None:
        """Note what the arenas of a save hold."""
        commit = CommitId(save.step, self.incarnation, save.attempt)
        for rank in save.ranks.values():
            if rank.arena.size_bytes >= rank.begin.arena_bytes:
                self._pool.hold(rank.arena, rank.use, commit, rank.begin.packs, in_memory=save.in_memory)
            if rank.arena.content == commit:
                self._pool.trim(rank.arena.rank, sum(size for _, size in rank.begin.packs) + COMPARE_AREA_BYTES)

    def _figures(self, save: NodeSave) -> dict[str, float]:
        nbytes = sum(size for rank in save.ranks.values() for _, size in rank.begin.packs)
        window = self._clock.monotonic() - save.opened_at
        figures = {"bytes": float(nbytes), "window_s": window, "num_files": float(self._num_files(save))}
        return figures | save.timings

    def abandoned(self, step: int, attempt: int, error: CheckpointError, *, in_doubt: bool = False) -> None:
        """The save will not be committed: stop its flushes and sweep its files, unless its manifest may yet become visible."""
        save = self._saves.get((step, attempt))
        if save is None or save.committed:
            return
        save.swept = save.swept or in_doubt
        save.closed, save.error = True, error
        if save.in_memory:
            save.swept = True  # nothing of it is on storage
            self._memory.abandoned(CommitId(step, self.incarnation, attempt), in_doubt=in_doubt)
        for peer, begin in save.waiting:
            peer.refuse(begin.id, error)
        save.waiting.clear()
        self._cancel(save)
        self._settle(save)

    def facts(self, step: int, attempt: int) -> tuple[dict[str, float], bool]:
        """Metrics and whether it is the final save."""
        save = self._saves.get((step, attempt))
        return (save.metrics, save.final) if save else ({}, False)

    def is_open(self, step: int, attempt: int) -> bool:
        """Whether a save has begun here whose fate is not known."""
        save = self._saves.get((step, attempt))
        return save is not None and not save.closed

    def tell_again(self) -> None:
        """Tell the lead of the saves that are open here; where it has a verdict, it answers with that."""
        for save in [entry for entry in self._saves.values() if not entry.closed]:
            for rank, mine in list(save.ranks.items()):
                digest = mine.begin.part_digest
                if save.in_memory:
                    self._memory.begins(save.step, save.attempt)
                self._tell_lead(protocol.Begun(step=save.step, attempt=save.attempt, rank=rank, digest=digest))

    def open_saves(self) -> list[tuple[int, int]]:
        """Return the saves (step, attempt) that have begun here and whose fate is not known."""
        return [key for key, save in self._saves.items() if not save.closed]

    @property
    def num_open(self) -> int:
        """Saves that still hold arenas."""
        return sum(save.holds_arenas for save in self._saves.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _commit(self, save: NodeSave) -> list[int]:
        return [save.step, self.incarnation, save.attempt]

    def _cancel(self, save: NodeSave) -> None:
        if any(rank.flushing for rank in save.ranks.values()):
            self._flusher.call("cancel", {"commit": self._commit(save)}, lambda *_: None, timeout_s=60.0)

    def _num_files(self, save: NodeSave) -> int:
        return 0 if save.in_memory else sum(len(rank.begin.packs) for rank in save.ranks.values()) + 3

    def _rank(self, step: int, attempt: int, rank: int) -> RankSave | None:
        save = self._saves.get((step, attempt))
        return save.ranks.get(rank) if save is not None and not save.closed else None

    def _open(self, message: Begin) -> NodeSave:
        active = [save for save in self._saves.values() if save.holds_arenas]
        save = NodeSave(message.step, message.attempt, self._clock.monotonic())
        save.metrics, save.final, save.announced = message.metrics, message.final, message.announced
        save.in_memory = message.in_memory
        self._saves[save.key] = save
        if not active:
            return save
        policy = self._config.overlap_policy
        if policy == "skip" and not message.final:
            save.skipped = f"step {active[-1].step} is still being flushed"
            save.closed = True
            if self._several_nodes:  # which must not wait for this one
                error = SkippedError(f"skipped: {save.skipped}", step=save.step, node=self._node_name)
                failed = protocol.NodeFailed(step=save.step, attempt=save.attempt, node=self.node, error=error)
                self._tell_lead(failed)
        else:
            save.blocked = True
            if policy == "replace":
                self._replace(active, message.step)
        return save

    def _replace(self, active: list[NodeSave], by: int) -> None:
        for save in active:
            if save.closed or save.recording:
                continue
            text = f"replaced by the save of step {by}"
            error = SkippedError(text, step=save.step, hint="overlap_policy is 'replace'")
            for rank in list(save.ranks) or self.local_ranks[:1]:
                self._tell_lead(protocol.RankFailed(step=save.step, attempt=save.attempt, rank=rank, error=error))
                break
            if not save.ranks:
                self.abandoned(save.step, save.attempt, error)

    def _grant(self, save: NodeSave, peer: Peer, message: Begin) -> None:
        self._memory.wanted(peer.rank, message.arena_bytes)
        self._memory.turn(peer.rank, message.arena_bytes)
        arena = self._pool.of(peer.rank)
        if arena is not None and not arena.busy:
            arena.content = None

        def ready(arena: Arena | None, error: CheckpointError | None) -> None:
            if error is not None or arena is None:
                failure = error or ConfigurationError("no arena")
                failure.step = message.step
                peer.refuse(message.id, failure)
                self._tell_lead(protocol.Begun(step=save.step, attempt=save.attempt, rank=peer.rank, digest=""))
                self._tell_lead(
                    protocol.RankFailed(step=save.step, attempt=save.attempt, rank=peer.rank, error=failure)
                )
            elif save.in_memory and arena.size_bytes < message.arena_bytes:
                text = "the memory budget does not hold the whole state, so that no save can stay in memory"
                ready(None, ConfigurationError(text, rank=peer.rank, hint="raise memory_budget_bytes"))
            elif save.closed or peer.closed:
                peer.refuse(message.id, save.error or given_up(save))
                if not save.ranks:
                    save.closed = True
                    self._settle(save)
            else:
                self._granted(save, peer, message, arena)

        self._pool.prefer(peer.rank, message.numa_node)
        self._pool.acquire(peer.rank, self.arena_size(peer.rank, message.arena_bytes), ready)

    def arena_size(self, rank: int, wanted_bytes: int) -> int:
        """Return what a rank gets of the arena it wants: all of it, or a ring where the memory budget is too small."""
        return self._pool.fitting(rank, wanted_bytes, self.local_ranks, 4 * self._config.flush_block_bytes)

    def _granted(self, save: NodeSave, peer: Peer, message: Begin, arena: Arena) -> None:
        if not save.ranks:
            save.opened_at = self._clock.monotonic()
        control_fds = self._control_of(peer.rank)
        mine = save.ranks[peer.rank] = RankSave(peer, message, arena, self._pool.let_in(arena))
        pack_bytes = sum(size for _, size in message.packs)
        ring = arena.size_bytes < message.arena_bytes
        arguments = {
            "commit": self._commit(save),
            "node": self.node,
            "rank": peer.rank,
            "num_ranks": len(self.local_ranks),
            "packs": message.packs,
            "compare": [] if ring else message.compare,
            "staged_total": pack_bytes if ring else message.arena_bytes,
            "ring_bytes": arena.size_bytes if ring else 0,
            "beside_training": message.beside_training,
            "save_seq": message.save_seq,
            "arena_id": arena.arena_id,
            "arena_bytes": arena.size_bytes,
            "deadline_s": self._config.flush_timeout_s,
            "keep": self._keep,
            "incarnation": self.incarnation,
            "given_up": self.known.given_up(),
        }
        # The trainer waits for this word, so it comes first; the flush waits for staging anyway.
        peer.reply(Granted(message.id, arena.arena_id, arena.size_bytes), (arena.fd,))
        if save.in_memory and len(save.ranks) == 1:
            self._memory.begins(save.step, save.attempt)
        self._flusher.call(
            "hold" if save.in_memory else "flush",
            arguments,
            lambda value, error: self._flushed(save, mine, value, error),
            timeout_s=self._config.flush_timeout_s + ANSWER_SLACK_S,
            fds=(arena.fd, *control_fds),
        )
        self._tell_lead(
            protocol.Begun(step=save.step, attempt=save.attempt, rank=peer.rank, digest=message.part_digest)
        )

    def _flushed(self, save: NodeSave, mine: RankSave, value: Any, error: CheckpointError | None) -> None:
        mine.flushing = False
        if error is not None and self._flusher.may_still_run:
            self._pool.give_up(mine.arena)
            if not save.in_memory:
                self.known.give_up(*save.key)  # what that process still makes is not there to be swept now
        else:
            self._pool.free(mine.arena)
        if error is not None:
            if not save.closed:
                failed = protocol.NodeFailed(step=save.step, attempt=save.attempt, node=self.node, error=error)
                self._tell_lead(failed)
        else:
            mine.flush = value
            self._maybe_record(save)
        self._settle(save)

    def _maybe_record(self, save: NodeSave) -> None:
        complete = len(save.ranks) == len(self.local_ranks) and all(
            rank.staged and rank.flush is not None for rank in save.ranks.values()
        )
        if not complete or save.closed or save.recording:
            return
        save.recording = True
        compared = {rank: share.flush["compare"] for rank, share in save.ranks.items() if share.flush}
        error = mismatch(disagreements(compared), step=save.step)
        if error is not None:
            self._tell_lead(protocol.NodeFailed(step=save.step, attempt=save.attempt, node=self.node, error=error))
            return
        if self._several_nodes and any(compared.values()):
            self._compared(save.step, save.attempt, agreed(compared))
        self._write_record(save)

    def _write_record(self, save: NodeSave) -> None:
        packs = [record for rank in sorted(save.ranks) for record in (save.ranks[rank].flush or {})["packs"]]
        digests = {rank: share.begin.part_digest for rank, share in save.ranks.items()}
        timings = {**save.timings, "recorded_s": self._clock.monotonic() - save.opened_at}
        arguments = {
            "commit": self._commit(save),
            "run_id": self._run_id,
            "node": self.node,
            "node_name": self._node_name,
            "packs": packs,
            "objects": {rank: share.objects for rank, share in save.ranks.items()},
            "part_digests": digests,
            "timings": timings,
        }

        def recorded(value: Any, error: CheckpointError | None) -> None:
            if save.closed:
                return
            key = {"step": save.step, "attempt": save.attempt, "node": self.node}
            if error is not None:
                self._tell_lead(protocol.NodeFailed(**key, error=error))
            else:
                self._tell_lead(
                    protocol.NodeRecorded(
                        **key, size_bytes=value["size_bytes"], blake3=value["blake3"], part_digests=digests
                    )
                )

        if save.in_memory:
            self._memory.share(save, packs, timings, recorded)
            return
        self._flusher.call("record", arguments, recorded, timeout_s=self._config.flush_timeout_s)

    def _settle(self, save: NodeSave) -> None:
        """Free what a closed save held, sweep what an abandoned one wrote, and let the next one in."""
        if not save.closed or any(rank.flushing for rank in save.ranks.values()):
            return
        if not save.committed and save.ranks and not save.swept:
            save.swept = True
            self._flusher.call(
                "abandon",
                {"commit": self._commit(save), "node": self.node if self._several_nodes else None},
                lambda _, error: self.known.give_up(*save.key) if error is not None else None,
                timeout_s=120.0,
            )
            if self._several_nodes:  # what others leave there goes with the next retirement, if they do not see to it
                self.known.give_up(*save.key)
        save.ranks.clear()  # the objects of all ranks among it; only the verdict is of interest from here on
        for old in [entry for entry in self._saves.values() if not entry.holds_arenas][:-CLOSED_KEPT]:
            del self._saves[old.key]
        if any(entry.holds_arenas and not entry.blocked for entry in self._saves.values()):
            return
        blocked = next((entry for entry in self._saves.values() if entry.blocked and not entry.closed), None)
        if blocked is not None:
            blocked.blocked = False
            waiting, blocked.waiting = blocked.waiting, []
            for peer, begin in waiting:
                self._grant(blocked, peer, begin)
