"""The copying of one save: pieces, batches, the threads that pull them, and how far the arena is complete.

Invariants: a piece counts as staged only when its bytes are in the arena; the staged word only grows, and reaches the
end by `tell_end` alone; the first error wins, stops all threads at their next batch, and names the leaf. Which thread
works when is decided in `staging`.
"""

from __future__ import annotations

import bisect
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from safehold.errors import CheckpointError, CommitError, ConfigurationError, DeadlineError, UnsupportedStateError
from safehold.host.device import Copier, Piece, PieceError, Sample
from safehold.host.memfd import Mapping

ADVANCE_BYTES = 8 << 20
BATCH_BYTES = 8 << 20
# Beside training a thread may be preempted in the middle of a batch, and the optimizer waits for that batch.
QUIET_BATCH_BYTES = 2 << 20
# A device copies by itself; what counts is that few calls queue much.
QUEUED_BATCH_BYTES = 32 << 20
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096
_POLL_S = 0.1
# A program that has ended waits for its threads, but not for a device that hangs.
_LEAVING_S = 10.0

Queue = deque[list[int]]


class Control(Protocol):
    """The part of `host.control.RankControl` that staging writes."""

    def advance_staged(self, num_bytes: int) -> None:
        """Tell that the first `num_bytes` of the arena are staged."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageItem:
    """One piece of a pack, still in live memory.

    Attributes:
        view: Live tensor or array of exactly the piece's sizes; any strides, any device.
        offset: Where it goes in the arena, bytes.
        nbytes: Its size there.
        hooked: Whether only a hooked optimizer's step changes it, so that it may be copied beside forward and backward.
        name: The leaf's FQN, for errors.
    """

    view: Any
    offset: int
    nbytes: int
    hooked: bool = False
    name: str = "a tensor"


def translate(exc: BaseException, name: str | None = None) -> CheckpointError:
    """Return the error that tells a user that the leaf `name` could not be staged; None: what it is of was said, or is not known."""
    if isinstance(exc, UnsupportedStateError) and name is not None:
        return UnsupportedStateError(f"{name}: {exc.message}", hint=exc.hint)
    if isinstance(exc, CheckpointError):
        return exc
    error = CommitError(f"staging {name or 'the state'} failed: {exc or type(exc).__name__}")
    error.__cause__ = exc
    return error


def pieces_of(copier: Copier, items: Sequence[StageItem], limit_bytes: int) -> tuple[list[Piece], list[int]]:
    """Cut items into pieces of about `limit_bytes` at most; return them with the index of the item that each is of.

    Raises:
        ConfigurationError: Items overlap or are out of order.
    """
    pieces: list[Piece] = []
    owners: list[int] = []
    end = 0
    for index, item in enumerate(items):
        if item.offset < end:
            raise ConfigurationError(f"{item.name} overlaps what comes before it in the arena, or is out of order")
        end = item.offset + item.nbytes
        if item.nbytes <= limit_bytes:
            pieces.append((item.view, item.offset, item.nbytes))
            owners.append(index)
            continue
        try:
            cut = list(copier.split(item.view, item.offset, item.nbytes, limit_bytes))
        except Exception as exc:
            raise translate(exc, item.name) from exc
        pieces.extend(cut)
        owners.extend([index] * len(cut))
    return pieces, owners


class Work:
    """What is to be copied in one save, and how far that is."""

    def __init__(
        self,
        copier: Copier,
        control: Control,
        items: Sequence[StageItem],
        size_bytes: int,
        *,
        overlap: bool,
        one_at_a_time: bool,
    ) -> None:
        """Cut `items` into batches.

        Args:
            copier: What copies.
            control: Where progress is told.
            items: Sorted by offset.
            size_bytes: What the staged word says at the end.
            overlap: Whether hooked items go into `later`; else all go into `now`.
            one_at_a_time: Whether only one thread may queue copies (asynchronous devices).
        """
        self.copier = copier
        self.items: Sequence[StageItem] = items
        self.size_bytes = size_bytes
        self._limits = {False: BATCH_BYTES, True: QUIET_BATCH_BYTES}
        if one_at_a_time:
            self._limits = {False: QUEUED_BATCH_BYTES, True: QUEUED_BATCH_BYTES}
        self.pieces, self.owners = pieces_of(copier, items, self._limits[overlap])
        self.now: Queue = deque()
        self.later: Queue = deque()
        self._fill_queues(overlap)
        self.num_later_bytes = sum(self.pieces[index][2] for batch in self.later for index in batch)
        self.error: CheckpointError | None = None
        self.condition = threading.Condition()
        self._control = control
        self._queueing = threading.Lock() if one_at_a_time else None
        self._collecting = threading.Lock()
        self._marks: deque[tuple[Any, list[int]]] = deque()
        self._num_busy = 0
        self._done = bytearray(len(self.pieces))
        self._next = 0
        self._told_bytes = 0

    def _fill_queues(self, overlap: bool) -> None:
        open_batches: dict[bool, list[int]] = {False: [], True: []}
        sizes = {False: 0, True: 0}
        queues = {False: self.now, True: self.later}
        for index, owner in enumerate(self.owners):
            later = overlap and self.items[owner].hooked
            open_batches[later].append(index)
            sizes[later] += self.pieces[index][2]
            if sizes[later] >= self._limits[later]:
                queues[later].append(open_batches[later])
                open_batches[later], sizes[later] = [], 0
        for later, batch in open_batches.items():
            if batch:
                queues[later].append(batch)

    def fail(self, error: CheckpointError) -> None:
        """Stop; the first error is the one that counts."""
        with self.condition:
            if self.error is None:
                self.error = error
            self.condition.notify_all()

    def drain(self, queue: Queue) -> None:
        """Copy (or queue the copies of) batches until none is left. Several threads may do this at once; never raises
        an `Exception`.
        """
        while True:
            with self.condition:
                if self.error is not None or not queue:
                    return
                self._num_busy += 1
                batch = queue.popleft()
            try:
                self._copy(batch)
                self.collect(0.0)
            except Exception as exc:
                self.fail(translate(exc))
            finally:
                with self.condition:
                    self._num_busy -= 1
                    self.condition.notify_all()

    def _copy(self, batch: list[int]) -> None:
        pieces = [self.pieces[index] for index in batch]
        try:
            if self._queueing is None:
                self.copier.copy(pieces)
                self._complete(batch)
            else:
                with self._queueing:
                    self.copier.copy(pieces)
                    self._marks.append((self.copier.mark(), batch))
        except PieceError as exc:
            cause = exc.__cause__ or exc
            raise translate(cause, self.items[self.owners[batch[exc.index]]].name) from cause

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no thread is inside a batch; return whether that came."""
        with self.condition:
            return self.condition.wait_for(lambda: self._num_busy == 0, timeout_s)

    def collect(self, timeout_s: float) -> None:
        """Note what the device has copied; with a time, wait until it has copied all that was queued.

        Raises:
            DeadlineError: The device did not get there.
        """
        # Marks are reached in order, so one thread at a time looks; with no time to wait, another's looking will do.
        if self._queueing is None or not self._collecting.acquire(timeout=timeout_s):
            return
        try:
            waited_s, main = 0.0, threading.main_thread()
            while self._marks:
                mark, batch = self._marks[0]
                if self.copier.reached(mark, _POLL_S if timeout_s else 0.0):
                    self._marks.popleft()
                    self._complete(batch)
                elif not timeout_s or self.error is not None:
                    return
                elif (waited_s := waited_s + _POLL_S) > (timeout_s if main.is_alive() else _LEAVING_S):
                    name = self.items[self.owners[batch[0]]].name
                    raise DeadlineError(f"the device did not copy {name} within {waited_s:.0f} s")
        finally:
            self._collecting.release()

    def _complete(self, batch: list[int]) -> None:
        """Note pieces that are in the arena; tells the flusher now and then, never the end."""
        with self.condition:
            for index in batch:
                self._done[index] = 1
            self._next = self._done.find(0, self._next)
            if self._next < 0:
                self._next = len(self._done)
                return
            reached = self.pieces[self._next][1]
            if reached - self._told_bytes >= ADVANCE_BYTES and self.error is None:
                self._told_bytes = reached
                self._control.advance_staged(reached)

    def release(self) -> None:
        """Let go of the live memory; only when no thread is inside a batch and none will be."""
        self.items, self.pieces = (), []
        self.now.clear()
        self.later.clear()

    def tell_end(self) -> None:
        """Tell that all of the arena is staged; only after everything was collected and verified."""
        if self._done.find(0) >= 0:
            raise RuntimeError("staging ended before every piece was copied")
        self._control.advance_staged(self.size_bytes)


class Samples:
    """Live blocks of what is copied beside training, to see whether something changed it meanwhile.

    Taken before and after the copy and compared with the arena. A change of a whole tensor is found; a change of less
    than one part in a few dozen of the state, or one that was undone, may not be.
    """

    def __init__(self, work: Work, seed: int) -> None:
        """Choose blocks, evenly by bytes."""
        self._work = work
        self._places: list[tuple[int, int, int]] = []
        self._views: list[Any] = []
        self._taken: list[Sample] = []
        indices = [index for batch in work.later for index in batch if work.pieces[index][2]]
        ends: list[int] = []
        for index in indices:
            ends.append(work.pieces[index][2] + (ends[-1] if ends else 0))
        chooser = random.Random(seed)
        for _ in range(_NUM_SAMPLES if ends else 0):
            at = chooser.randrange(ends[-1])
            place = bisect.bisect_right(ends, at)
            view, offset, nbytes = work.pieces[indices[place]]
            try:
                block = work.copier.block(view, at - (ends[place] - nbytes), _SAMPLE_BYTES)
            except Exception as exc:
                raise translate(exc, work.items[work.owners[indices[place]]].name) from exc
            if block is not None:
                self._views.append(block[0])
                self._places.append((work.owners[indices[place]], offset + block[1], block[2]))

    def take(self) -> None:
        """Take the blocks as they are behind the copies queued so far."""
        if not self._views:
            return
        try:
            self._taken.append(self._work.copier.sample(self._views))
        except PieceError as exc:
            cause = exc.__cause__ or exc
            raise translate(cause, self._work.items[self._places[exc.index][0]].name) from cause

    def verify(self, mapping: Mapping) -> None:
        """Compare what was taken with the arena.

        Raises:
            UnsupportedStateError: Something changed; names the leaf.
        """
        for taken in self._taken:
            for (owner, offset, nbytes), block in zip(self._places, taken.get(), strict=True):
                if mapping.view[offset : offset + nbytes] != block:
                    raise UnsupportedStateError(
                        f"{self._work.items[owner].name} changed while it was copied beside training",
                        hint="something besides an optimizer's step writes to it; save with overlap=False",
                    )
