"""Staging: from live tensors into a rank's arena.

Invariants: the memory behind an item is read between `stage` and the moment its ticket lets the optimizer go on, and
never after; the staged word reaches the end only if all was copied and nothing was seen to change meanwhile; a fault
in a thread fails the ticket and is raised by `finish`, never lost; what the optimizer's hook calls never raises.
Header and padding bytes are the caller's, written before `stage`. No storage, no sockets, no framework here.

With `overlap=True` three things cannot be seen and are therefore not allowed: writes to hooked tensors by something
else than the step of a hooked optimizer (found only where they hit a sampled block), steps that are replayed from a
captured graph (a replay calls no hooks), and steps whose optimizer was made or exchanged after `hook_optimizers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.errors import CheckpointError, CommitError, ConfigurationError, DeadlineError
from safehold.events import EventStream
from safehold.format.names import counted
from safehold.host.device import Device
from safehold.host.memfd import Mapping
from safehold.pipeline.optimizer_hooks import hook_optimizers
from safehold.pipeline.stage_waves import Ring, stage_through
from safehold.pipeline.stage_work import Control, Samples, StageItem, Work, translate

__all__ = ["Control", "StageFigures", "StageItem", "Stager", "Ticket", "hook_optimizers"]

_THREADS_WORTH_BYTES = 32 << 20
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What staging cost.

    Attributes:
        size_bytes: Tensor bytes copied.
        pause_s: How long the trainer's threads were kept: in `stage` and before optimizer steps.
        seconds: From the start of `stage` until the last byte was in the arena.
        overlapped_bytes: Of `size_bytes`, those that were left to be copied beside training.
    """

    size_bytes: int
    pause_s: float
    seconds: float
    overlapped_bytes: int


class Ticket:
    """A save that is being staged; `Stager.stage` makes it.

    `wait_before_step` may be called from any thread, the rest from the trainer's.
    """

    def __init__(self, stager: Stager, work: Work, *, step: int | None) -> None:
        """Hold `work` until all of it is in the arena."""
        self._stager = stager
        self._work = work
        self._step = step
        self._samples: Samples | None = None
        self._closing = threading.Lock()
        self._last_mark: Any = None
        self._closed = False
        self._settled = False
        self._begun_s = stager.clock.monotonic()
        self._ended_s = self._begun_s
        self._pause_s = 0.0
        self._size_bytes = sum(item.nbytes for item in work.items)

    @property
    def error(self) -> CheckpointError | None:
        """Why it failed; None while it has not."""
        return self._work.error

    @property
    def settled(self) -> bool:
        """Whether it is over: all in the arena, or failed."""
        return self._settled

    def _run(self) -> None:
        """Stage what cannot wait, and start a thread for the rest."""
        work = self._work
        try:
            work.copier.begin([item.view for item in work.items])
            if work.later:
                self._samples = Samples(work, self._stager.num_tickets)
                self._samples.take()
            self._copy_now()
            if not work.later:
                self._complete()
            elif work.error is None:
                threading.Thread(target=self._beside, name="safehold-stage").start()
        except Exception as exc:
            self._fail(translate(exc))
        finally:
            self._pause_s += self._stager.clock.monotonic() - self._begun_s
            if work.error is not None:
                self._settle()

    def _copy_now(self) -> None:
        work, device = self._work, self._stager.device
        size = sum(work.pieces[index][2] for batch in work.now for index in batch)
        if size >= _THREADS_WORTH_BYTES and not device.asynchronous:
            for _ in range(device.num_threads() - 1):
                helper = threading.Thread(target=work.drain, args=(work.now,), name="safehold-copy")
                try:
                    helper.start()
                except RuntimeError:  # no more threads: then this one does it alone
                    break
        work.drain(work.now)
        if not work.wait_idle(_LIMIT_S):
            raise DeadlineError("a copy from host memory did not end")
        work.collect(_LIMIT_S)

    def _beside(self) -> None:
        try:
            self._work.drain(self._work.later)
            if not self._work.wait_idle(_LIMIT_S):
                raise DeadlineError("a copy beside training did not end")
            self._complete()
        except Exception as exc:
            self._fail(translate(exc))

    def _close(self) -> None:
        """Once all copies are queued: take the blocks again, and the mark behind which the optimizer may change
        things.
        """
        with self._closing:
            if not self._closed and self._work.error is None:
                if self._samples is not None:
                    self._samples.take()
                self._last_mark = self._work.copier.mark()
                self._closed = True

    def _complete(self) -> None:
        """Wait until the device has copied everything, verify, and tell the flusher."""
        self._close()
        self._work.collect(_LIMIT_S)
        if self._work.error is None and self._samples is not None:
            self._samples.verify(self._stager.mapping)
        with self._work.condition:
            if self._work.error is None:
                self._work.tell_end()
        self._settle()

    def _fail(self, error: CheckpointError) -> None:
        self._work.fail(error)
        self._settle()

    def _settle(self) -> None:
        with self._work.condition:
            if self._settled:
                return
            self._settled = True
            self._ended_s = self._stager.clock.monotonic()
            self._work.condition.notify_all()
        seconds, error = self._ended_s - self._begun_s, self._work.error
        if error is None:
            self._stager.events.emit("stage", "done", step=self._step, seconds=seconds, size_bytes=self._size_bytes)
            self._samples = None
            self._work.release()
        else:
            self._stager.events.emit("stage", "failed", step=self._step, seconds=seconds, error=str(error))

    def wait_before_step(self) -> None:
        """Keep the optimizer from changing what is still to be copied; what its step pre-hook calls. Never raises an
        `Exception`.

        On CPU the calling thread helps to copy and waits until all is copied. On CUDA it waits only until all copies
        are queued (a thread does that meanwhile), and makes its current stream wait for them; the host goes on. Then
        sampled live blocks, taken when the copies were queued and again behind the last of them, are compared with
        the arena (on CUDA when the copies are done, beside the step); what differs fails the ticket.
        """
        if self._settled:
            return
        begun_s = self._stager.clock.monotonic()
        work = self._work
        try:
            work.copier.check_hold()
            work.drain(work.later)
            if not work.wait_idle(_LIMIT_S):
                raise DeadlineError("a copy beside training did not end")
            self._close()
            if self._closed:
                work.copier.hold(self._last_mark)
        except Exception as exc:
            self._fail(translate(exc))
        finally:
            with work.condition:
                self._pause_s += self._stager.clock.monotonic() - begun_s

    def finish(self, deadline_s: float) -> StageFigures:
        """Wait until everything is in the arena.

        Args:
            deadline_s: How long to wait at most, from now.

        Raises:
            CheckpointError: Staging failed; the first cause.
            DeadlineError: It is not done yet; it goes on, and `finish` can be called again.
        """
        with self._work.condition:
            if not self._work.condition.wait_for(lambda: self._settled, deadline_s):
                left = sum(len(batch) for batch in self._work.later)
                raise DeadlineError(
                    f"staging did not end within {deadline_s:.1f} s; {counted(left, 'piece')} not copied yet"
                )
        if self._work.error is not None:
            raise self._work.error
        return StageFigures(
            size_bytes=self._size_bytes,
            pause_s=self._pause_s,
            seconds=self._ended_s - self._begun_s,
            overlapped_bytes=self._work.num_later_bytes,
        )

    def cancel(self, error: CheckpointError | None = None, *, timeout_s: float = 30.0) -> bool:
        """Give up, and wait until nothing writes to the arena any more; return whether that is so.

        A ticket that is complete stays so.
        """
        if not self._settled:
            self._fail(error or CommitError("staging was cancelled", step=self._step))
        return self._quiesce(timeout_s)

    def _quiesce(self, timeout_s: float) -> bool:
        if not self._work.wait_idle(timeout_s):
            return False
        self._samples = None
        self._work.release()
        return self._work.error is None or self._work.copier.reached(self._work.copier.mark(), timeout_s)


class Stager:
    """Stages the saves of one rank into one arena.

    Attributes:
        device: Where the state lives.
        mapping: The arena, populated and writable.
        copier: What copies into it.
    """

    def __init__(
        self,
        device: Device,
        mapping: Mapping,
        control: Control,
        events: EventStream | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Use an arena that was populated (`memfd.populate`) and prepared (`device.prepare_host`)."""
        self.device = device
        self.mapping = mapping
        self.copier = device.copier(mapping)
        self.events = EventStream() if events is None else events
        self.clock = clock
        self.num_tickets = 0
        self._control = control
        self._current: Ticket | None = None

    def stage(
        self, items: Sequence[StageItem], *, overlap: bool, size_bytes: int | None = None, step: int | None = None
    ) -> Ticket:
        """Stage `items`, or begin to.

        Without `overlap`, everything is in the arena at return. With it, items that are not hooked are; the others
        are copied by a thread until `Ticket.wait_before_step`. Faults of copying do not raise here, they fail the
        ticket.

        Args:
            items: Sorted by offset; gaps between them are the caller's.
            overlap: Whether hooked items may be copied beside training.
            size_bytes: What the staged word says at the end; None: the size of the arena.
            step: For events.

        Raises:
            ConfigurationError: Items overlap or leave the arena, or the last ticket is not settled.
        """
        size_bytes = self.mapping.size_bytes if size_bytes is None else size_bytes
        if items and items[-1].offset + items[-1].nbytes > size_bytes:
            raise ConfigurationError(f"{items[-1].name} ends behind the arena's {size_bytes} bytes")
        self._take_over()
        begun_s = self.clock.monotonic()
        self.events.emit("stage", "started", step=step, overlap=overlap)
        work = Work(
            self.copier,
            self._control,
            items,
            size_bytes,
            overlap=overlap,
            one_at_a_time=self.device.asynchronous,
        )
        ticket = Ticket(self, work, step=step)
        ticket._begun_s = begun_s
        self.num_tickets += 1
        self._current = ticket
        ticket._run()
        return ticket

    def _take_over(self) -> None:
        """Make sure that nothing of an earlier save still writes to the arena."""
        if self._current is None:
            return
        if not self._current.settled:
            raise ConfigurationError("the save before is still being staged", hint="finish or cancel its ticket first")
        if not self._current._quiesce(_LIMIT_S):
            raise DeadlineError("a copy of the save before does not end")
        self._current = None

    def stage_in_waves(
        self,
        items: Iterable[StageItem],
        ring_bytes: int,
        wait_flushed: Callable[[int], None],
        *,
        size_bytes: int,
        step: int | None = None,
    ) -> StageFigures:
        """Stage a save that is larger than the arena, using it as a ring; keeps the trainer until all is staged.

        Byte `n` of the packs goes to `n % ring_bytes`. Header and padding bytes cannot be written before, so they are
        items too (byte arrays), and the items leave no gaps.

        Args:
            items: Sorted by offset, without gaps.
            ring_bytes: Size of the ring: a multiple of 4096 bytes, at most the arena's size, at least a block of the
                flusher and 8 MiB.
            wait_flushed: Returns when the flusher has written that many bytes of the save, or raises.
            size_bytes: Size of all packs together.
            step: For events.

        Raises:
            CheckpointError: A copy failed, or what `wait_flushed` raised.
        """
        self._take_over()
        begun_s = self.clock.monotonic()
        ring = Ring(self.device, self.copier, self.mapping, ring_bytes)
        try:
            with self.events.span("stage", step=step, waves=True):
                staged = stage_through(ring, self.copier, self._control, items, wait_flushed)
                if staged != size_bytes:
                    raise ConfigurationError(f"the items end at {staged}, not at {size_bytes}")
                self._control.advance_staged(staged)
        finally:
            ring.close()
        seconds = self.clock.monotonic() - begun_s
        return StageFigures(size_bytes=staged, pause_s=seconds, seconds=seconds, overlapped_bytes=0)

    def close(self) -> bool:
        """Let go of the arena; the last ticket is cancelled if it is not settled. Returns whether nothing copies any
        more.
        """
        quiet = self._current is None or self._current.cancel()
        self._current = None
        self.copier.close()
        return quiet
