"""The trainer's side of a save: walk, lay out, ask, stage, tell.

Invariants: no collective. Without overlap, `save` returns once everything is in the arena; with overlap, once what could change before
the optimizer's step is. What the background learns afterwards reaches the handle, and through `Failures` the next call. A save that fails
here fails for all ranks, and training goes on unless the policy says otherwise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import partial
from typing import Any

import msgspec

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    SkippedError,
    StateMismatchError,
    StorageFullError,
    SupersededError,
    from_wire,
)
from safehold.events import EventStream
from safehold.host.memfd import Mapping
from safehold.pipeline.layout import Comparison, Planner, SaveLayout
from safehold.pipeline.staging import Ticket
from safehold.policy import settlement as settlements
from safehold.policy.settlement import Settlement
from safehold.state.collect import BindingCache, collect
from safehold.state.leaves import Leaves, TensorLeaf
from safehold.tiers.base import in_object_store
from safehold.trainer import collector
from safehold.trainer.alone import Alone
from safehold.trainer.arena import ArenaWriter
from safehold.trainer.connection import COME_BACK_PAUSE_S, Reconnector, Run
from safehold.trainer.failures import Failures, interrupted
from safehold.trainer.handles import SaveHandle, SaveOptions
from safehold.trainer.preparing import Preparing, encode_objects, headroom_bytes, leaves_of
from safehold.trainer.remote import RemoteWaits, new_handle
from safehold.types import TensorSpec

log = logging.getLogger("safehold")
INLINE_OBJECT_BYTES = 256 << 10
KNOWN_PARTS_KEPT = 256


class Saver:
    """All saves of one rank.

    Attributes:
        newest_tier: Where the newest durable save of this object is, or what was restored; empty if there is none.

    Args:
        run: The run that was joined.
        rank: This rank.
        world_size: Number of ranks.
        config: Settings.
        failures: Where failures of the background go.
        events: The event stream.
        random_states: Whether random states are saved.
    """

    def __init__(
        self,
        run: Run,
        *,
        rank: int,
        world_size: int,
        config: Config,
        failures: Failures,
        events: EventStream,
        random_states: bool,
    ) -> None:
        self._run, self._rank, self._world_size, self._config = run, rank, world_size, config
        self._failures, self._events, self._random_states = failures, events, random_states
        self._reconnector = Reconnector(run, config)
        self._planner = self._new_planner()
        self._cache = BindingCache()
        self._attempts: dict[int, int] = {}
        self._open: dict[tuple[int, int], SaveHandle] = {}
        self._registered: list[TensorSpec] | None = None
        self._settled = threading.Event()
        self._settlement: Settlement | None = None
        self._known_parts: set[str] = set()
        self._connection = 0
        self._seq = self._num_until_flush = 0
        self.alone, self.newest_tier = Alone(), ""
        self.remote = RemoteWaits(config, rank=rank, events=events)
        self._arena = ArenaWriter(run, config)
        self._preparing = Preparing(run, self._arena, config)
        self._registering = threading.Lock()
        self._lock = threading.Lock()
        self._noted: set[str] = set()

    def _new_planner(self) -> Planner:
        pack, split = self._config.pack_size_bytes, self._config.split_bytes
        return Planner(self._rank, self._world_size, pack_size_bytes=pack, split_bytes=split)

    # -- notifications, in the receiving thread ---------------------------------------------------------------------------

    def notify(self, reply: m.Reply) -> None:
        """Take a notification of the agent."""
        match reply:
            case m.Durable(tier="remote") | m.LeftOut():
                self.remote.take(reply)
            case m.Durable():
                self._durable(reply)
            case m.SaveFailed():
                self._save_failed(reply.step, reply.attempt, from_wire(reply.error))
            case m.Settled():
                self._take_settlement(reply)
            case m.Superseded():
                self._superseded(reply)
            case m.Protected():
                self._events.emit("protect", "done" if reply.done else "failed", step=reply.step)
            case m.Note():
                log.log(logging.INFO if reply.info else logging.WARNING, "safehold: %s", reply.text)

    def lost(self, why: str) -> None:
        """The agent is gone, and with it every save that was not durable."""
        error = AgentUnavailableError(
            f"the agent of this node died ({why or 'connection closed'}); saves in flight are lost",
            rank=self._rank,
            hint="it is started again at the next save; training goes on",
        )
        with self._lock:
            pending = list(self._open)
        for step, attempt in pending:
            self._save_failed(step, attempt, error)
        threading.Thread(target=self._come_back, args=(pending, error), name="safehold-reconnect", daemon=True).start()

    def _come_back(self, lost: list[tuple[int, int]], error: CheckpointError) -> None:
        """Get another agent, as soon as one can be had, so that saves by time go on being announced.

        The agent is told which saves this rank lost with the old one, so that no other rank begins one of them and waits for this one.
        """
        told = ""
        while not self._run.client.closed:
            try:
                self._reconnector.ensure()
                for step, attempt in lost:
                    self._run.client.tell(m.StageFailed(-1, step, attempt, error.to_wire()))
                return
            except SupersededError as exc:
                self._failures.superseded(exc)
                return
            except CheckpointError as exc:
                if not self._run.client.closed and str(exc) != told:
                    told = str(exc)
                    log.warning("safehold: no agent yet, it is tried again: %s", exc)
            time.sleep(COME_BACK_PAUSE_S)

    def _superseded(self, reply: m.Superseded) -> None:
        error = SupersededError(
            f"incarnation {reply.incarnation} owns the run now; this job's saves are not believed any more",
            rank=self._rank,
            hint="another job was started in this run directory; stop this one",
        )
        self._failures.superseded(error)
        log.info("safehold: %s", error)  # every call raises it
        for handle in self.open_handles():
            self._save_failed(handle.step, handle.attempt, error)

    def _durable(self, reply: m.Durable) -> None:
        with self._lock:
            handle = self._open.pop((reply.step, reply.attempt), None)
        self._failures.committed()
        figures, self.newest_tier = reply.figures, reply.tier
        if handle is None:
            return
        handle._advance(
            "durable",
            window_s=figures.get("window_s", 0.0),
            bytes=int(figures.get("bytes", 0)),
            num_files=int(figures.get("num_files", 0)),
            write_s=figures.get("write_s", 0.0),
            sync_s=figures.get("sync_s", 0.0),
            allocate_s=figures.get("allocate_s", 0.0),
        )
        self._events.emit("save", "done", step=reply.step, rank=self._rank, tier=reply.tier, **figures)
        if self._rank == 0:
            window = max(figures.get("window_s", 0.0), 1e-9)
            elsewhere = reply.tier == "flash" and in_object_store(self._run.client.url)
            log.info(
                "safehold: step %d durable on %s: %.3f GB, pause %.3f s, window %.3f s, %.2f GB/s",
                reply.step,
                "the object store" if elsewhere else reply.tier,
                figures.get("bytes", 0.0) / 1e9,
                handle.figures.pause_s,
                window,
                figures.get("bytes", 0.0) / 1e9 / window,
            )

    def _save_failed(self, step: int, attempt: int, error: CheckpointError, *, raised: bool = False) -> None:
        handle = self._open.get((step, attempt))
        noted = lambda: self._failures.add(error, raised=raised)  # noqa: E731
        if handle is not None and handle._advance("failed", error=error, before=noted):
            self.remote.failed(handle)
            self._events.emit("save", "failed", step=step, rank=self._rank, error=str(error))
        self._open.pop((step, attempt), None)  # only now: whoever closes waits for those that are here

    def _take_settlement(self, reply: m.Settled) -> None:
        self._settlement = settlements.from_wire(reply.settlement)
        self._settled.set()

    # -- what the facade calls ------------------------------------------------------------------------------------------------

    def prepare(self, state: Any, *, wait: bool) -> None:
        """Lay out the state and get the arena populated, pinned and mapped, before the first save."""
        with self._events.span("prepare", rank=self._rank):
            self._reconnect()
            leaves = self._collect(state)
            layout = self._lay_out(leaves)
            self._register(layout)
            if wait and self._planner.undeclared(layout) and self._world_size > 1:
                self._settled.wait(self._config.request_timeout_s)
                layout = self._lay_out(leaves)
            comparison = self._planner.comparison(layout, leaves, 0)
            size = comparison.arena_bytes + headroom_bytes(leaves)
            self._preparing.start(lambda: self._preparing.arena(leaves, size))
            if wait:
                self._preparing.wait(self._config.start_timeout_s)

    def prepare_restored(self, tensors: list[TensorLeaf]) -> None:
        """As `prepare`, in the background, for what a restore has bound: training need not wait for another walk of the state."""
        leaves = leaves_of(tensors)

        def work() -> None:
            with self._events.span("prepare", rank=self._rank):
                planner = self._new_planner()
                layout = planner.layout(leaves)
                self._register(layout)
                self._preparing.arena(leaves, planner.comparison(layout, leaves, 0).arena_bytes)

        self._preparing.start(work)

    def save(self, step: int, state: Any, options: SaveOptions, *, metrics: dict[str, float]) -> SaveHandle:
        """Save; see `Checkpointer.save`."""
        started = time.perf_counter()
        attempt = self._attempts[step] = self._attempts.get(step, -1) + 1
        tier = self._next_tier(flush=options.flush or options.final)
        handle = self.remote.follow(new_handle(step, attempt, self._config, tier))
        handle._on_raised = self._failures.forget
        with self._lock:
            self._open[step, attempt] = handle
        try:
            with collector.paused(), self._arena.saving(), self._events.span("save_call", step=step, rank=self._rank):
                self._save(handle, state, metrics, options, started)
        except SkippedError as exc:
            self._save_failed(step, attempt, exc)
        except CheckpointError as exc:
            exc.step = exc.step if exc.step is not None else step
            exc.rank = exc.rank if exc.rank is not None else self._rank
            self._give_up(handle, exc, raised=isinstance(exc, StateMismatchError))
            if isinstance(exc, StateMismatchError) or self._failures.raises(exc):
                self._failures.forget(exc)
                self._failures.forget(handle.error)  # the same, if the agent told it first
                raise
        except BaseException as exc:
            self._give_up(handle, interrupted(exc, step, self._rank), raised=True)
            raise
        return handle

    def _next_tier(self, *, flush: bool) -> str:
        """Say where the next save goes: counted by calls, so that all ranks agree without asking, whatever becomes of saves."""
        if flush or self._num_until_flush <= 0:
            self._num_until_flush = self._config.flush_every - 1
            return "flash"
        self._num_until_flush -= 1
        return "memory"

    def restored(self, tier: str) -> None:
        """A checkpoint was restored: the next save is flushed, since what was restored may be in memory only, with fewer copies."""
        self._num_until_flush, self.newest_tier = 0, tier

    def _give_up(self, handle: SaveHandle, error: CheckpointError, *, raised: bool = False) -> None:
        # Before the agent tells the same to all ranks.
        self._save_failed(handle.step, handle.attempt, error, raised=raised)
        try:
            self._run.client.tell(m.StageFailed(-1, handle.step, handle.attempt, error.to_wire()))
        except CheckpointError:
            pass  # the agent is gone, and the save with it

    def _save(
        self,
        handle: SaveHandle,
        state: Any,
        metrics: dict[str, float],
        options: SaveOptions,
        started: float,
    ) -> None:
        step = handle.step
        with self._events.span("walk", step=step, rank=self._rank):
            self._reconnect()
            leaves = self._collect(state)
        with self._events.span("layout", step=step, rank=self._rank):
            layout = self._lay_out(leaves)
            self._register(layout)
            comparison = self._planner.comparison(layout, leaves, step)
        granted, arena = self._begin(handle, leaves, layout, comparison, metrics, options)
        control = self._run.client.control
        assert control is not None
        control.begin_save(self._seq)
        # What the agent granted counts: a mapping may be larger than what is left of its arena.
        if granted.arena_bytes < comparison.arena_bytes:
            self._save_in_waves(handle, layout, leaves, arena, granted.arena_bytes, started)
            return
        self._arena.write_headers(layout, arena)
        encoded = encode_objects(leaves)
        with self._events.span("stage", step=step, rank=self._rank):
            ticket = self._arena.stage(handle, layout, comparison, leaves, arena, overlap=options.overlap)
        handle._on_durable = partial(self._planner.compared, comparison)
        if (
            not self._arena.is_ready(arena) and self._preparing.idle
        ):  # the agent or the state is another than was prepared for
            self._preparing.start(lambda: self._arena.make_ready(arena, leaves))
        handle._advance("staging", rank_bytes=layout.pack_bytes)
        if not ticket.settled:
            self._follow(handle, ticket, encoded, started)
            handle._add_pause(time.perf_counter() - started)
            return
        ticket.finish(0.0)
        self._tell_staged(handle, encoded, time.perf_counter() - started)
        handle._advance("staged", pause_s=time.perf_counter() - started, stage_s=time.perf_counter() - started)

    def _save_in_waves(
        self, handle: SaveHandle, layout: SaveLayout, leaves: Leaves, arena: Mapping, ring_bytes: int, started: float
    ) -> None:
        """Stage through an arena that is smaller than the state, as fast as it is flushed."""
        if "waves" not in self._noted:
            self._noted.add("waves")
            log.warning(
                "safehold: the memory budget holds %d of %d bytes of this rank: saves are staged in waves, as fast as storage",
                ring_bytes,
                layout.pack_bytes,
            )
        encoded = encode_objects(leaves)
        with self._events.span("stage", step=handle.step, rank=self._rank, waves=True):
            self._arena.stage_in_waves(handle, layout, leaves, arena, ring_bytes=ring_bytes, save_seq=self._seq)
        took = time.perf_counter() - started
        self._tell_staged(handle, encoded, took)
        handle._advance("staged", pause_s=took, stage_s=took, rank_bytes=layout.pack_bytes)

    def _begin(
        self,
        handle: SaveHandle,
        leaves: Leaves,
        layout: SaveLayout,
        comparison: Comparison,
        metrics: dict[str, float],
        options: SaveOptions,
    ) -> tuple[m.Granted, Mapping]:
        self._seq += 1
        known = layout.digest in self._known_parts
        message = m.Begin(
            id=0,
            step=handle.step,
            attempt=handle.attempt,
            part_digest=layout.digest,
            part=b"" if known else layout.part,
            packs=list(layout.packs),
            arena_bytes=comparison.arena_bytes,
            compare=comparison.ranges,
            metrics=metrics,
            save_seq=self._seq,
            final=options.final,
            announced=options.announced,
            overwrite=options.overwrite,
            beside_training=options.overlap,
            numa_node=self._arena.numa_node(leaves),
            in_memory=handle.tier == "memory",
        )
        self._arena.make_room(comparison.arena_bytes, saving=True)
        with self._events.span("begin", step=handle.step, rank=self._rank):
            reply, fds = self._run.client.ask(message, self._config.flush_timeout_s, "the start of a save")
            if isinstance(reply, m.PartWanted):
                message = msgspec.structs.replace(message, part=layout.part)
                reply, fds = self._run.client.ask(message, self._config.flush_timeout_s, "the start of a save")
        if isinstance(reply, m.Skipped):
            raise SkippedError(f"the save was skipped: {reply.reason}", step=handle.step, rank=self._rank)
        if not isinstance(reply, m.Granted):
            raise AgentUnavailableError("the agent answered with something else", rank=self._rank)
        if len(self._known_parts) >= KNOWN_PARTS_KEPT:
            self._known_parts.clear()  # the agent asks for what it does not have
        self._known_parts.add(layout.digest)
        return reply, self._arena.map(reply, fds)

    def _tell_staged(self, handle: SaveHandle, encoded: dict[str, bytes], stage_s: float) -> None:
        message = m.Staged(-1, handle.step, handle.attempt, encoded, stage_s=stage_s)
        if sum(map(len, encoded.values())) <= INLINE_OBJECT_BYTES:
            self._run.client.tell(message)
            return
        try:
            fd = os.memfd_create("safehold-objects", os.MFD_CLOEXEC)
        except OSError as exc:
            raise StorageFullError(f"no memory for the objects: {exc.strerror}", tier="memory") from exc
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(msgspec.msgpack.encode(encoded))
            self._run.client.tell(msgspec.structs.replace(message, objects={}, objects_fd=True), (fd,))
        finally:
            os.close(fd)

    # -- overlap -------------------------------------------------------------------------------------------------------------

    def _follow(self, handle: SaveHandle, ticket: Ticket, encoded: dict[str, bytes], started: float) -> None:
        """Tell the agent once an overlapped staging is complete."""

        def staged() -> None:
            self._tell_staged(handle, encoded, time.perf_counter() - started)
            handle._advance("staged", stage_s=time.perf_counter() - started)

        def failed(error: CheckpointError) -> None:
            error.step = error.step if error.step is not None else handle.step
            error.rank = error.rank if error.rank is not None else self._rank
            self._give_up(handle, error)

        self._arena.follow(ticket, staged, failed)

    def before_optimizer_step(self) -> None:
        """Called by optimizers' hooks: wait until what they are about to change has been copied."""
        self._arena.before_optimizer_step()

    def finish_staging(self) -> None:
        """Wait for an overlapped staging, if one is under way; its failure reaches its handle."""
        self._arena.finish()

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def collect(self, state: Any) -> Leaves:
        """Walk the state."""
        return self._collect(state)

    def _collect(self, state: Any) -> Leaves:
        leaves = collect(
            state,
            rank=self._rank,
            world_size=self._world_size,
            random_states=self._random_states,
            cache=self._cache,
        )
        for note in leaves.notes:
            if note not in self._noted:
                self._noted.add(note)
                log.warning("safehold: %s", note)
        return leaves

    def _lay_out(self, leaves: Leaves) -> SaveLayout:
        """Lay out by the newest settlement; it changes here only, so that a save is of one piece."""
        settlement, self._settlement = self._settlement, None
        if settlement is not None and settlement != self._planner.settlement:  # what says the same changes no layout
            self._planner.settlement = settlement
        return self._planner.layout(leaves)

    def _register(self, layout: SaveLayout) -> None:
        """Tell the agent which undeclared leaves this rank has, if they changed."""
        if self._world_size == 1:
            return
        mine = self._planner.undeclared(layout)
        leaves: list[tuple[str, str, list[int], str]] = [
            (spec.name, spec.dtype, list(spec.shape), spec.kind) for spec in mine
        ]
        with self._registering:
            if mine == self._registered:
                return
            self._settled.clear()
            request = m.Register(0, leaves)
            self._run.client.request(request, m.Done, self._config.request_timeout_s, "registering leaves")
            self._registered = mine

    def _reconnect(self) -> None:
        self._reconnector.ensure()
        if self._connection != self._run.client.generation:
            self._connection = self._run.client.generation
            self._known_parts.clear()
            self._registered = None
            self._arena.reset()

    def forget_bindings(self) -> None:
        """Drop what is cached of the state; a restore may have replaced tensors."""
        self._cache.clear()

    def open_handles(self) -> list[SaveHandle]:
        """Saves whose fate is not known yet."""
        with self._lock:
            return list(self._open.values())

    def close(self, timeout_s: float) -> None:
        """Let go of the arena, once nothing prepares it any more (a thread must not outlive the interpreter), within the timeout."""
        deadline = time.monotonic() + timeout_s
        self._preparing.join(min(timeout_s, self._config.start_timeout_s))
        self._arena.close(max(0.0, deadline - time.monotonic()))
