"""The arenas of a node: one per rank, owned by the agent, outliving trainers.

Invariants: at most `budget_bytes` are allocated at any time; one generation per rank, or two where memory is a tier (`turn`): the one that
saves use next, and the one with the last good snapshot, which is never used as long as it is that. What an
arena holds (`content`) is set after a
commit, by the save that used it last, and cleared before the next byte may be staged, so that a restore never reads a mixture. An
arena that a flusher may still be reading is never handed out. Whoever waits for an arena is called exactly once, whatever becomes of
it. Used from the dispatcher thread only; pages are populated in threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field, replace
from typing import Any

from safehold.agent.means import Spawn, in_thread
from safehold.agent.memory_held import Held
from safehold.errors import CheckpointError, ConfigurationError, StorageFullError
from safehold.host import memfd, memory, numa
from safehold.host.process import lower_priority
from safehold.types import CommitId

Post = Callable[[Callable[[], None]], None]
Ready = Callable[["Arena | None", CheckpointError | None], None]
PAGE_BYTES = 4096
TRIM_BYTES = 64 << 20


@dataclass(slots=True)
class Arena:
    """One rank's host memory.

    Attributes:
        arena_id: Counts up, also from one agent to the next; never reused.
        rank: Whose.
        size_bytes: Capacity.
        fd: The sealed memfd; -1 until allocated.
        busy: A save is staging into it or flushing from it.
        num_uses: How many saves it was given to; tells the last of them from earlier ones.
        content: The commit whose bytes it holds whole, if it does.
        packs: (arena offset, size) of the packs of `content`.
        in_memory: `content` is on no storage.
        verified: Its bytes matched their checksums since the last process that could write to it ended.
        waiting: Who wants it once it is populated, or free.
    """

    arena_id: int
    rank: int
    size_bytes: int
    fd: int = -1
    busy: bool = False
    num_uses: int = 0
    content: CommitId | None = None
    packs: list[tuple[int, int]] = field(default_factory=list)
    verified: bool = False
    in_memory: bool = False
    waiting: list[Ready] = field(default_factory=list)

    def use(self) -> int:
        """A save takes it: nothing that it held counts any more. Returns the number of this use."""
        self.busy, self.content, self.packs, self.verified = True, None, [], False
        self.num_uses += 1
        return self.num_uses


class ArenaPool:
    """All arenas of this agent.

    Attributes:
        held: What is held of checkpoints that are in memory only, copies for other nodes among it.
        reserved_bytes: Part of the budget that further generations, and copies for other nodes, will take.

    Args:
        post: Runs a function in the dispatcher.
        budget_bytes: Upper bound, but never more than there is at the first allocation; 0: a share of that.
        released: Told the id of each arena that is let go, so that nobody else keeps its pages.
        nice: Niceness of the threads that populate.
        spawn: Starts those threads.
    """

    def __init__(
        self,
        post: Post,
        budget_bytes: int,
        released: Callable[[int], None] = lambda _: None,
        *,
        nice: int = 0,
        spawn: Spawn = in_thread,
    ) -> None:
        self._nice, self._spawn = nice, spawn
        self._post, self._released = post, released
        self._configured_budget = budget_bytes
        self._budget = 0
        self._arenas: dict[int, Arena] = {}
        self._lost_bytes = self._lent_bytes = 0
        self._kept: dict[int, Arena] = {}
        self.reserved_bytes = 0
        self.held = Held(self._room_for_copies)
        self._wanted: dict[int, int] = {}
        self._parted: list[Arena] = []
        self._ranks: set[int] | None = None
        self._next_id = time.monotonic_ns()  # no agent gives an id that one before it gave
        self._numa_nodes: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes allocated, those given up to stuck flushers, those lent and those held for other nodes included."""
        return self._arena_bytes() + self.held.total_bytes

    def _arena_bytes(self) -> int:
        """Asked from any thread."""
        arenas = [*self._arenas.values(), *self._kept.values(), *self._parted]
        return sum(arena.size_bytes for arena in arenas) + self._lost_bytes + self._lent_bytes

    def _room_for_copies(self) -> int:
        """Bytes that copies for other nodes may take; asked from any thread."""
        self._set_budget()
        return max(0, self._budget - self._arena_bytes())

    @property
    def budget_bytes(self) -> int:
        """The bound in force; 0 before the first allocation."""
        return self._budget

    def of(self, rank: int) -> Arena | None:
        """Return a rank's arena, if it has one whose pages exist."""
        arena = self._arenas.get(rank)
        return arena if arena is not None and arena.fd >= 0 else None

    def holding(self, commit: CommitId) -> list[Arena]:
        """Return the arenas that hold this commit."""
        return [arena for arena in self._all() if arena.fd >= 0 and arena.content == commit]

    def _all(self) -> list[Arena]:
        return [*self._arenas.values(), *self._kept.values()]

    def of_all(self, rank: int) -> list[Arena]:
        """Return a rank's arenas, of all generations, whose pages exist."""
        return [
            arena for arena in (self._arenas.get(rank), self._kept.get(rank)) if arena is not None and arena.fd >= 0
        ]

    def turn(self, rank: int, size_bytes: int) -> None:
        """Have the next save of a rank use another arena than the one that holds the last good snapshot, if the current one does.

        Not where another of `size_bytes` is not within the budget: then the snapshot goes.
        """
        arena, older = self._arenas.get(rank), self._kept.get(rank)
        if arena is None or arena.fd < 0 or arena.busy or arena.content is None:
            return
        free = older.size_bytes if older is not None else 0
        if (
            (older is None or free < size_bytes)
            and self._budget
            and self.total_bytes - free + size_bytes > self._budget
        ):
            return
        self._kept[rank] = arena
        del self._arenas[rank]
        if older is not None:
            self._arenas[rank] = older

    def only_in_memory(self, rank: int) -> bool:
        """Whether a rank's arena holds a checkpoint that is on no storage."""
        return any(arena.content is not None and arena.in_memory for arena in self.of_all(rank))

    def drop_kept(self) -> None:
        """From now on one generation of arenas will do."""
        for rank in list(self._kept):
            self._release_kept(rank)

    def acquire_kept(self, rank: int, size_bytes: int, ready: Ready) -> None:
        """Have the other generation of a rank's arena populated ahead; `ready` gets none where it holds something, or is on its way."""
        size_bytes = _rounded(size_bytes)
        kept = self._kept.get(rank)
        if kept is not None and (kept.fd < 0 or kept.content is not None or kept.size_bytes >= size_bytes):
            ready(kept if kept.fd >= 0 and kept.content is None else None, None)
            return
        if kept is not None:
            self._let_go(self._kept.pop(rank))
        self._allocate(rank, size_bytes, ready, self._kept)

    def facts(self) -> dict[str, Any]:
        """What is held: rank -> step, and the ranks of whom it is verified."""
        held = [arena for arena in self._all() if arena.fd >= 0 and arena.content is not None]
        newest = {arena.rank: arena for arena in sorted(held, key=lambda arena: arena.content or CommitId(0, 0, 0))}
        return {
            "steps": {str(rank): arena.content.step for rank, arena in sorted(newest.items()) if arena.content},
            "verified": sorted(rank for rank, arena in newest.items() if arena.verified),
            **self.held.facts(),
        }

    def ranks_with_content(self, steps: set[int]) -> set[int]:
        """Return the ranks whose arenas hold a commit of one of these steps."""
        return {arena.rank for arena in self._all() if arena.content and arena.content.step in steps}

    def fitting(self, rank: int, size_bytes: int, ranks: Collection[int], smallest_ring_bytes: int) -> int:
        """Return how much of `size_bytes` a rank gets within the budget: all of it, or a ring.

        All of it where what all ranks of the node have asked for fits together, or where it is no more than a rank's equal share. A ring
        is a multiple of `smallest_ring_bytes`, of an equal share at most; where not even the smallest fits, the whole is returned, and
        refused by `acquire` by name.

        Args:
            rank: Who asks.
            size_bytes: For how much.
            ranks: All ranks of the node.
            smallest_ring_bytes: See above.
        """
        self._set_budget()
        self._wanted[rank] = size_bytes
        usable = max(0, self._budget - self._lost_bytes - self.reserved_bytes)
        share = usable // max(1, len(ranks))
        asked = [self._wanted.get(other) for other in ranks]
        all_fit = sum(size or 0 for size in asked) <= usable if None not in asked else False
        others = [arena for other, arena in self._arenas.items() if other != rank and other in ranks]
        left = usable - sum(arena.size_bytes for arena in (*others, *self._parted))
        room = left if all_fit or size_bytes <= share else min(left, share)
        ring = room // smallest_ring_bytes * smallest_ring_bytes
        if size_bytes <= room or ring <= 0:
            return size_bytes
        arena = self.of(rank)
        if arena is not None and not arena.busy and arena.size_bytes > ring:
            self.release(rank)  # others need what it has had beyond that
        return ring

    def usable_bytes(self) -> int:
        """Return the budget, without what stuck flushers still have."""
        self._set_budget()
        return max(0, self._budget - self._lost_bytes)

    def _set_budget(self) -> None:
        if not self._budget:
            found = memory.available_memory()
            found = replace(found, available_bytes=found.available_bytes + self.total_bytes)
            limit = self._configured_budget or None
            self._budget = memory.budget_bytes(found, limit_bytes=limit)

    def lend(self, at_most_bytes: int, multiple_bytes: int) -> int:
        """Set memory of the budget aside for something else than arenas, as much as is left of it; returns how much."""
        self._set_budget()
        left = max(0, min(at_most_bytes, self._budget - self.total_bytes))
        lent = left // multiple_bytes * multiple_bytes
        self._lent_bytes += lent
        return lent

    def take_back(self, size_bytes: int) -> None:
        """What was lent is free again."""
        self._lent_bytes -= size_bytes

    def prefer(self, rank: int, numa_node: int) -> None:
        """From now on have the pages of new arenas of `rank` come from this NUMA node, if it is one (-1: from anywhere)."""
        self._numa_nodes[rank] = numa_node

    def acquire(self, rank: int, size_bytes: int, ready: Ready) -> None:
        """Give `rank` an arena of at least `size_bytes`; `ready` runs in the dispatcher, at once where it exists already."""
        size_bytes = _rounded(size_bytes)
        arena = self._arenas.get(rank)
        if arena is not None and (arena.fd < 0 or arena.busy):
            # Asked for again then: the arena that was waited for may be too small, or taken by somebody before us.
            arena.waiting.append(
                lambda _, error: ready(None, error) if error else self.acquire(rank, size_bytes, ready)
            )
            return
        if arena is not None and arena.size_bytes >= size_bytes:
            ready(arena, None)
            return
        if arena is not None:
            self.release(rank)
        self._allocate(rank, size_bytes, ready, self._arenas)

    def _allocate(self, rank: int, size_bytes: int, ready: Ready, slots: dict[int, Arena]) -> None:
        if self._budget and self.total_bytes + size_bytes > self._budget:
            self._drop_strangers()
            self.held.trim()
        if self._budget and self.total_bytes + size_bytes > self._budget:
            hint = "raise memory_budget_bytes, or use more nodes; training goes on without this save"
            text = (
                f"staging needs {size_bytes:,} bytes of host memory for this rank; {self.total_bytes:,} of the budget of "
                f"{self._budget:,} bytes are taken"
            )
            ready(None, ConfigurationError(text, rank=rank, hint=hint))
            return
        arena = Arena(self._next_id, rank, size_bytes, waiting=[ready])
        self._next_id += 1
        slots[rank] = arena
        try:
            self._spawn(f"populate-{rank}", lambda: self._populate(arena))
        except RuntimeError as exc:
            self._populated(arena, -1, StorageFullError(f"no thread for populating: {exc}", rank=rank, tier="memory"))

    def _populate(self, arena: Arena) -> None:
        fd = -1
        error: CheckpointError | None = None
        hint = "lower memory_budget_bytes or the state"
        try:
            fd = memfd.create(arena.size_bytes, f"arena-{arena.rank}", alignable=True)
            lower_priority(self._nice, lower_io=False)
            with memfd.Mapping(fd, arena.size_bytes) as mapping:
                numa.prefer(mapping, self._numa_nodes.get(arena.rank, -1))
                memfd.populate(mapping, cancelled=lambda: self._slots_of(arena) is None)
        except CheckpointError as exc:
            error = exc
        except Exception as exc:
            text = f"cannot allocate {arena.size_bytes:,} bytes of host memory: {exc or type(exc).__name__}"
            error = StorageFullError(text, rank=arena.rank, tier="memory", hint=hint)
        self._post(lambda: self._populated(arena, fd, error))

    def _populated(self, arena: Arena, fd: int, error: CheckpointError | None) -> None:
        slots = self._slots_of(arena)
        if slots is None:
            error = error or ConfigurationError("the arena was given up while it was allocated", rank=arena.rank)
        elif error is not None:
            del slots[arena.rank]
        if error is None:
            arena.fd = fd
        elif fd >= 0:
            self._close(fd)
        self._tell_waiting(arena, error)

    def _slots_of(self, arena: Arena) -> dict[int, Arena] | None:
        """Return where an arena is kept, None if it was let go; asked from any thread."""
        return next((slots for slots in (self._arenas, self._kept) if slots.get(arena.rank) is arena), None)

    @staticmethod
    def _tell_waiting(arena: Arena, error: CheckpointError | None) -> None:
        waiting, arena.waiting = arena.waiting, []
        for ready in waiting:
            ready(None if error else arena, error)

    def free(self, arena: Arena) -> None:
        """A save has let go of its arena: whoever waits for it is next."""
        arena.busy = False
        if arena in self._parted:
            self._parted.remove(arena)
            self._let_go(arena)
        self._tell_waiting(arena, None)

    def hold(
        self, arena: Arena, use: int, commit: CommitId, packs: list[tuple[int, int]], *, in_memory: bool = False
    ) -> None:
        """Note that an arena holds a commit whole, unless it went, or somebody used it since."""
        if arena in self.of_all(arena.rank) and arena.num_uses == use:
            arena.content, arena.packs, arena.in_memory = commit, list(packs), in_memory

    def accept(self, commit: CommitId | None) -> None:
        """Of what is on no storage, this checkpoint counts and no other: arenas that hold another hold nothing any more."""
        own = dict(self.held.arenas(commit)) if commit is not None else {}
        for arena in self._all():
            if arena.arena_id in own and not arena.busy:
                arena.content, arena.packs, arena.in_memory = commit, own[arena.arena_id], True
            elif arena.in_memory and arena.content != commit:
                arena.content, arena.packs = None, []

    def let_in(self, arena: Arena) -> int:
        """A save takes an arena: nothing that it held counts any more. Returns the number of this use."""
        self.held.forget_arena(arena.arena_id)
        return arena.use()

    def release(self, rank: int) -> None:
        """Free a rank's arena."""
        arena = self._arenas.pop(rank, None)
        if arena is not None:
            self._let_go(arena)

    def _let_go(self, arena: Arena) -> None:
        if arena.fd >= 0:
            self._close(arena.fd)
            arena.fd = -1
            self.held.forget_arena(arena.arena_id)
            self._released(arena.arena_id)

    def _close(self, fd: int) -> None:
        os.close(fd)

    def part_with(self, rank: int) -> None:
        """Never hand out a rank's arena again: a process that lives on may still write to it. A flush that reads it goes on."""
        arena = self._arenas.get(rank)
        self._release_kept(rank)
        if arena is not None and arena.busy:
            del self._arenas[rank]
            self._parted.append(arena)
        else:
            self.release(rank)

    def _release_kept(self, rank: int) -> None:
        kept = self._kept.pop(rank, None)
        if kept is not None:
            self._let_go(kept)

    def give_up(self, arena: Arena) -> None:
        """Abandon an arena that a stuck flusher may still be reading; its bytes keep counting against the budget."""
        if self._arenas.get(arena.rank) is arena:
            self._lost_bytes += arena.size_bytes
            self.release(arena.rank)
        self.free(arena)

    def recovered(self) -> None:
        """All stuck flushers have ended: the pages given up are free again."""
        self._lost_bytes = 0

    def trim(self, rank: int, keep_bytes: int) -> None:
        """Give the pages above `keep_bytes` back to the machine (the area that only a first comparison needs)."""
        arena = self.of(rank)
        keep_bytes = -(-keep_bytes // PAGE_BYTES) * PAGE_BYTES
        if arena is not None and arena.size_bytes - keep_bytes > TRIM_BYTES:
            memfd.punch_hole(arena.fd, keep_bytes, arena.size_bytes - keep_bytes)
            arena.size_bytes = keep_bytes

    def drop_idle(self, ranks: Set[int], keep: Set[int]) -> None:
        """From now on `ranks` save here; of other ranks' arenas only those of `keep` stay, until their memory is needed."""
        self._ranks = set(ranks)
        self._drop_strangers(keep)

    def _drop_strangers(self, keep: Set[int] = frozenset()) -> None:
        known = self._ranks
        if known is not None:
            for rank in [rank for rank, arena in self._arenas.items() if rank not in known | keep and not arena.busy]:
                self.release(rank)
            for rank in [rank for rank in self._kept if rank not in known | keep]:
                self._release_kept(rank)

    def configure(self, budget_bytes: int) -> None:
        """Another job has another budget, and asks anew; idle arenas go if they take more than that."""
        self._wanted.clear()
        if budget_bytes != self._configured_budget:
            self._configured_budget, self._budget = budget_bytes, 0
            self._set_budget()
        if self._budget and self.total_bytes > self._budget:
            self.held.trim()
            self.release_idle()

    def release_idle(self) -> None:
        """Free whatever no save is using."""
        for rank in [rank for rank, arena in self._arenas.items() if arena.fd >= 0 and not arena.busy]:
            self.release(rank)
        self.drop_kept()

    def rest(self) -> None:
        """No job is left: free what no save uses, and look anew at what there is when the next one comes."""
        self._wanted.clear()
        self.held.accept(None, 0)
        self.held.trim()
        self.release_idle()
        if not self.total_bytes:
            self._budget = 0

    def forget(self) -> None:
        """The run directory holds another run by now: what arenas hold is nobody's."""
        for arena in self._all():
            arena.content, arena.packs, arena.verified = None, [], False
        self.held.accept(None, 0)

    def close(self) -> None:
        """Free everything."""
        for rank in list(self._arenas):
            self.release(rank)
        self.drop_kept()
        self.held.close()


def _rounded(size_bytes: int) -> int:
    return max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
