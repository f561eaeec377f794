"""The arena of this rank: mapped, filled by the stager, at once, in waves, or beside training.

Invariants: an arena is unmapped (and unpinned before) only while nothing copies into it; what copies into one is over, or cancelled, before
the next save begins. Headers and padding are written again unless the arena is known to have them. `save`s come from one thread;
hooks of optimizers, and `prepare`, from any.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import CheckpointError, CommitError, DeadlineError, SkippedError
from safehold.host.device import Device, open_device
from safehold.host.memfd import Mapping, populate
from safehold.pipeline.layout import Comparison, SaveLayout
from safehold.pipeline.staging import StageItem, Stager, Ticket
from safehold.state.leaves import Leaves
from safehold.tiers.base import tier_word
from safehold.trainer.connection import Run, map_arena
from safehold.trainer.handles import SaveHandle

log = logging.getLogger("safehold")


class ArenaWriter:
    """See the module.

    Args:
        run: The run that was joined.
        config: Settings.
    """

    def __init__(self, run: Run, config: Config) -> None:
        self._run, self._config = run, config
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._device_lock = threading.Lock()
        self._ready: list[Mapping] = []
        self._numa_node: int | None = None
        self._stagers: list[Stager] = []
        self._written: list[tuple[str, Mapping]] = []
        self._open: tuple[Ticket, SaveHandle] | None = None
        self._saving = False
        self._preparing: Mapping | None = None
        self._hung = False
        self._asked_bytes = 0
        self._pid = os.getpid()

    # -- the arena itself ------------------------------------------------------------------------------------------------

    def map(self, reply: m.Granted | m.Prepared, fds: list[int]) -> Mapping:
        """Map the arena that the agent gave, unless it is mapped already; takes the descriptors."""
        with self._lock:
            return map_arena(self._run, reply.arena_id, reply.arena_bytes, fds)

    def make_room(self, size_bytes: int, *, saving: bool = False) -> None:
        """Unmap the arena before a larger one is asked for: it counts against the memory budget as long as it is mapped here.

        What was asked for once in vain is not asked for again: where the budget holds a part of the state only, that is what is mapped.
        """
        with self._lock:
            busy = self._hung or self._open is not None or self._preparing is not None or (self._saving and not saving)
            held = [mapping for mapping in self._run.arenas.values() if mapping.size_bytes < size_bytes]
            if busy or size_bytes <= self._asked_bytes:
                return
            self._asked_bytes = size_bytes
            for mapping in held:
                self._run.arenas = {at: kept for at, kept in self._run.arenas.items() if kept is not mapping}
            self._run.retired += held
        if held:
            self._let_go(now=saving)

    def prepare(self, reply: m.Prepared, fds: list[int], leaves: Leaves) -> None:
        """Get an arena's pages into this process, and pinned."""
        self.make_ready(self.map(reply, fds), leaves)

    def make_ready(self, arena: Mapping, leaves: Leaves) -> None:
        """Populate and pin an arena that is mapped already, unless it is on its way out."""
        with self._lock:
            if arena in self._run.retired or arena not in self._run.arenas.values():
                return
            self._preparing = arena
        try:
            populate(arena)
            self._device_for(leaves).prepare_host(arena)
            self._ready.append(arena)
        finally:
            self._preparing = None
        self._let_go()

    def is_ready(self, arena: Mapping) -> bool:
        """Whether `prepare` has been through with an arena."""
        return any(ready is arena for ready in self._ready)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save: finishes the staging before it, and keeps arenas from being unmapped meanwhile."""
        self.finish()
        with self._lock:
            self._saving = True
        try:
            yield
        except SkippedError:
            raise
        except BaseException:
            self._drop_stager()
            raise
        finally:
            self._saving = False

    def reset(self) -> None:
        """Another agent has other arenas."""
        self._asked_bytes = 0
        self._written.clear()

    def _let_go(self, *, now: bool = False) -> None:
        """Unmap arenas that were replaced, unless something may still copy into one: then the next save does it (`now`)."""
        with self._lock:
            if self._hung or not (now or (not self._saving and self._open is None)):
                return
            retired = [mapping for mapping in self._run.retired if mapping is not self._preparing]
            self._run.retired = [mapping for mapping in self._run.retired if mapping is self._preparing]
            if any(stager.mapping in retired for stager in self._stagers):
                self._drop_stager()
            self._written = [entry for entry in self._written if entry[1] not in retired]
            self._ready = [mapping for mapping in self._ready if mapping not in retired]
        for mapping in retired:
            try:
                if self._device is not None:
                    self._device.release_host(mapping)
                mapping.close()
            except CheckpointError as exc:
                log.warning("safehold: an arena stays mapped: %s", exc)

    def _device_for(self, leaves: Leaves) -> Device:
        with self._device_lock:
            if self._device is None:
                self._device = open_device([view for leaf in leaves.tensors for _, view in leaf.pieces])
            return self._device

    def numa_node(self, leaves: Leaves) -> int:
        """Return the NUMA node that this rank's arena should be on, or -1."""
        if self._numa_node is None:
            found = self._device_for(leaves).numa_node()
            self._numa_node = -1 if found is None else found
        return self._numa_node

    def _stager_for(self, leaves: Leaves, arena: Mapping) -> Stager:
        self._let_go(now=True)
        control = self._run.client.control
        assert control is not None
        found = next((stager for stager in self._stagers if stager.mapping is arena), None)
        if found is None:
            found = Stager(self._device_for(leaves), arena, control)
            self._stagers.append(found)
            while len(self._stagers) > self._run.generations:
                stager = self._stagers.pop(0)
                self._hung = not stager.close() or self._hung
        return found

    # -- staging ---------------------------------------------------------------------------------------------------------

    def write_headers(self, layout: SaveLayout, arena: Mapping) -> None:
        """Write pack headers and padding, unless this very layout was staged into this arena last time."""
        if any(digest == layout.digest and mapping is arena for digest, mapping in self._written):
            return
        self._written = [entry for entry in self._written if entry[1] is not arena]
        for offset, data in layout.headers:
            arena.view[offset : offset + len(data)] = data
        self._written.append((layout.digest, arena))

    def stage(
        self,
        handle: SaveHandle,
        layout: SaveLayout,
        comparison: Comparison,
        leaves: Leaves,
        arena: Mapping,
        *,
        overlap: bool,
    ) -> Ticket:
        """Stage a save, or begin to; a ticket that is not settled is waited for by `before_optimizer_step`."""
        stager = self._stager_for(leaves, arena)
        items = [*layout.items, *comparison.items]
        ticket = stager.stage(items, overlap=overlap, size_bytes=comparison.arena_bytes, step=handle.step)
        if ticket.settled:
            ticket.finish(0.0)
        else:
            self._open = (ticket, handle)
        return ticket

    def stage_in_waves(
        self, handle: SaveHandle, layout: SaveLayout, leaves: Leaves, arena: Mapping, *, ring_bytes: int, save_seq: int
    ) -> None:
        """Stage through an arena that is smaller than the state, as fast as it is flushed."""
        control = self._run.client.control
        assert control is not None
        deadline = time.monotonic() + self._config.flush_timeout_s

        def wait_flushed(num_bytes: int) -> None:
            while not control.wait_flushed(save_seq, num_bytes, 0.5):
                if handle.error is not None:
                    raise handle.error
                if time.monotonic() > deadline:
                    text, tier = "the flush does not keep up with staging", tier_word(self._run.client.url)
                    raise DeadlineError(text, step=handle.step, tier=tier)

        self._written.clear()
        heads = [
            StageItem(view=np.frombuffer(data, np.uint8), offset=offset, nbytes=len(data))
            for offset, data in layout.headers
        ]
        items = sorted([*heads, *layout.items], key=lambda item: item.offset)
        self._stager_for(leaves, arena).stage_in_waves(
            items, ring_bytes, wait_flushed, size_bytes=layout.pack_bytes, step=handle.step
        )

    def follow(self, ticket: Ticket, staged: Callable[[], None], failed: Callable[[CheckpointError], None]) -> None:
        """Wait in a thread until an overlapped staging is over, then call one of the two."""

        def finish() -> None:
            try:
                ticket.finish(self._config.stage_timeout_s)
                staged()
            except Exception as exc:
                error = exc if isinstance(exc, CheckpointError) else CommitError(f"{type(exc).__name__}: {exc}")
                ticket.cancel(error)
                failed(error)

        threading.Thread(target=finish, name="safehold-overlap", daemon=True).start()

    def before_optimizer_step(self) -> None:
        """Called by optimizers' hooks: wait until what they are about to change has been copied."""
        entry = self._open
        if entry is None or os.getpid() != self._pid:
            return
        ticket, handle = entry
        started = time.perf_counter()
        ticket.wait_before_step()
        handle._add_pause(time.perf_counter() - started)
        if ticket.settled and self._open is entry:
            self._open = None

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for an overlapped staging, if one is under way; its failure reaches its handle. One that does not end is cancelled."""
        entry = self._open
        if entry is None:
            return
        try:
            limit_s = self._config.stage_timeout_s
            entry[0].finish(limit_s if timeout_s is None else min(timeout_s, limit_s))
        except CheckpointError as exc:
            self._hung = not entry[0].cancel(exc) or self._hung
        self._open = None

    def _drop_stager(self) -> None:
        """Nothing that was begun may go on copying, and what is in the arena is not known."""
        self._open = None
        self._written.clear()
        stagers, self._stagers = self._stagers, []
        for stager in stagers:
            self._hung = not stager.close() or self._hung

    def close(self, timeout_s: float | None = None) -> None:
        """Let go of everything; what still copies has that long to end."""
        self.finish(timeout_s)
        self._run.retired += self._run.arenas.values()
        self._run.arenas.clear()
        self._let_go(now=True)
