"""Words in shared memory that trainer, agent and flusher of a node look at without asking each other.

Invariants: a word is 8 aligned bytes, written by one side and stored whole; words that belong together are packed
into one. Data that a word speaks of is visible to whoever sees the word: the writer fences before it stores, the
reader after it loaded. Blocks are sealed memfds; a block of another layout is refused. Times are `CLOCK_MONOTONIC`,
which all processes of a host share.

Fences matter on ARM, where stores may be seen out of order. Python has no fence, so `_fence` writes to an eventfd of
its own: inside the kernel and around the call, locks are released and taken, and on ARM64 a release followed by an
acquire orders everything before with everything after. It costs under a microsecond.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import Self

from safehold.errors import AgentUnavailableError
from safehold.host import memfd

BLOCK_BYTES = 4096
_RANK_MAGIC = 0x3152_444C_4F48_4653
_NODE_MAGIC = 0x3145_444F_4E48_4653
_COUNT_BITS = 48
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_SEQ_MASK = 0xFFFF
_STEP_BITS = 40
_STEP_MASK = (1 << _STEP_BITS) - 1

IDLE, STAGING, STAGED, TRAINING, RESTORING, CLOSING = range(6)
"""Phases of a trainer."""


class _Words:
    """A block of 512 words."""

    def __init__(self, block_fd: int, magic: int, *, new: bool) -> None:
        self._mapping = memfd.Mapping(block_fd, BLOCK_BYTES)
        self._words = self._mapping.view.cast("Q")
        if new:
            self._words[0] = magic
        elif self._words[0] != magic:
            self.close()
            raise AgentUnavailableError(
                "the control block passed has another layout", hint="trainer and agent must run one version"
            )
        self._fence_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def _fence(self) -> None:
        os.eventfd_write(self._fence_fd, 1)

    def close(self) -> None:
        if hasattr(self, "_words"):
            self._words.release()
            self._mapping.close()
        fence, self._fence_fd = getattr(self, "_fence_fd", -1), -1
        if fence >= 0:
            os.close(fence)

    def __del__(self) -> None:
        # With the last reference, so that no thread can be about to use a descriptor whose number is somebody else's
        # now.
        self.close()


# Words of a rank's block; each has one writer.
_STEP, _PHASE, _BEAT_NS, _SAVE_SEQ, _STAGED = 8, 9, 10, 11, 12  # trainer
_FLUSHED = 64  # flusher, on a cache line of its own


class RankControl(_Words):
    """One rank's progress: written by its trainer, and by the flusher where said so; read by agent and flusher."""

    def __init__(self, block_fd: int, wake_fd: int, *, new: bool = False) -> None:
        """Take ownership of both descriptors; use `create` or `attach`."""
        self.block_fd = block_fd
        self.wake_fd = wake_fd
        super().__init__(block_fd, _RANK_MAGIC, new=new)

    @classmethod
    def create(cls, name: str = "rank") -> Self:
        """Make a block and its eventfd."""
        block_fd = memfd.create(BLOCK_BYTES, f"control-{name}")
        try:
            wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(block_fd)
            raise
        return cls(block_fd, wake_fd, new=True)

    @classmethod
    def attach(cls, block_fd: int, wake_fd: int) -> Self:
        """Use a block that came through a socket; takes ownership of the descriptors.

        Raises:
            AgentUnavailableError: It is none.
        """
        return cls(block_fd, wake_fd)

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors to pass to another process: block and eventfd, in the order of `attach`."""
        return self.block_fd, self.wake_fd

    @property
    def step(self) -> int:
        """The last step that the trainer said it reached."""
        return self._words[_STEP]

    @property
    def phase(self) -> int:
        """What the trainer is doing."""
        return self._words[_PHASE]

    @property
    def beat_ns(self) -> int:
        """When the trainer was last heard of; 0 if never."""
        return self._words[_BEAT_NS]

    @property
    def save_seq(self) -> int:
        """Counts this rank's saves; 0 before the first."""
        return self._words[_SAVE_SEQ]

    def set_progress(self, *, step: int | None = None, phase: int | None = None) -> None:
        """Tell step or phase, and that the trainer lives."""
        if step is not None:
            self._words[_STEP] = step
        if phase is not None:
            self._words[_PHASE] = phase
        self.beat()

    def beat(self) -> None:
        """Tell that the trainer lives."""
        self._words[_BEAT_NS] = time.monotonic_ns()

    def begin_save(self, save_seq: int) -> None:
        """Start a save: nothing is staged of it. The arena belongs to the trainer from here until the last byte is
        staged.
        """
        self._words[_STAGED] = (save_seq & _SEQ_MASK) << _COUNT_BITS
        self._fence()
        self._words[_SAVE_SEQ] = save_seq

    def advance_staged(self, num_bytes: int) -> None:
        """Tell that the first `num_bytes` of the arena are staged; wakes the flusher."""
        self._fence()
        self._words[_STAGED] = (self._words[_SAVE_SEQ] & _SEQ_MASK) << _COUNT_BITS | num_bytes
        self.wake()

    def wake(self) -> None:
        """Have whoever waits in `wait_staged` look again."""
        try:
            os.eventfd_write(self.wake_fd, 1)
        except BlockingIOError:
            pass  # the counter is full: the waiter is awake

    def staged_of(self, save_seq: int) -> int | None:
        """Return the prefix of the arena that is staged of a save, which may be read; None if the trainer is at another."""
        word = self._words[_STAGED]
        self._fence()
        return word & _COUNT_MASK if word >> _COUNT_BITS == save_seq & _SEQ_MASK else None

    def wait_staged(self, save_seq: int, more_than: int, timeout_s: float) -> int | None:
        """Wait until more than `more_than` bytes are staged of a save; for the one flusher of this rank.

        Returns:
            The staged bytes, which are at most `more_than` if the time was over; None if the trainer is at another
            save.
        """
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self.wake_fd, select.POLLIN)
        while True:
            staged = self.staged_of(save_seq)
            left_s = deadline - time.monotonic()
            if staged is None or staged > more_than or left_s <= 0:
                return staged
            if poller.poll(left_s * 1000):
                try:
                    os.eventfd_read(self.wake_fd)
                except BlockingIOError:
                    pass

    def begin_flush(self, save_seq: int) -> None:
        """Flusher: nothing is flushed of this save."""
        self._words[_FLUSHED] = (save_seq & _SEQ_MASK) << _COUNT_BITS

    def advance_flushed(self, save_seq: int, num_bytes: int) -> None:
        """Flusher: the first `num_bytes` of the save are written, their place in the arena may be used again."""
        self._fence()
        self._words[_FLUSHED] = (save_seq & _SEQ_MASK) << _COUNT_BITS | num_bytes

    def wait_flushed(self, save_seq: int, at_least: int, timeout_s: float) -> bool:
        """Trainer: wait until the flusher has written that much of a save; return whether it has."""
        deadline = time.monotonic() + timeout_s
        while True:
            word = self._words[_FLUSHED]
            self._fence()
            if word >> _COUNT_BITS == save_seq & _SEQ_MASK and word & _COUNT_MASK >= at_least:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)

    def close(self) -> None:
        """Let go of the block and the descriptors."""
        super().close()
        for fd in (self.block_fd, self.wake_fd):
            if fd >= 0:
                os.close(fd)
        self.block_fd = self.wake_fd = -1


# Words of a node's block; all written by the agent.
_ANNOUNCED, _AGENT_BEAT_NS = 8, 9


@dataclass(frozen=True, slots=True)
class Announcement:
    """A save that the lead asks for.

    Attributes:
        seq: Changes with every announcement (modulo 65536); 0 before the first.
        step: The step to save at; None if there is none, or it was withdrawn.
        kind: Why, a number below 128 that the agent floor gives a meaning.
    """

    seq: int
    step: int | None
    kind: int


class NodeControl(_Words):
    """What the agent tells all ranks of its node; written by the agent only."""

    def __init__(self, block_fd: int, *, new: bool = False) -> None:
        """Take ownership of the descriptor; use `create` or `attach`."""
        self.block_fd = block_fd
        super().__init__(block_fd, _NODE_MAGIC, new=new)

    @classmethod
    def create(cls, name: str = "node") -> Self:
        """Make a block."""
        return cls(memfd.create(BLOCK_BYTES, f"control-{name}"), new=True)

    @classmethod
    def attach(cls, block_fd: int) -> Self:
        """Use a block that came through a socket; takes ownership of the descriptor.

        Raises:
            AgentUnavailableError: It is none.
        """
        return cls(block_fd)

    def announce(self, step: int | None, *, kind: int = 0) -> int:
        """Ask all ranks of the node for a save at `step`, or withdraw (None); return the announcement's number."""
        seq = (self.announcement.seq + 1) & _SEQ_MASK or 1
        present = 0 if step is None else 1
        self._words[_ANNOUNCED] = seq << 48 | present << 47 | kind << _STEP_BITS | (step or 0)
        return seq

    @property
    def announcement(self) -> Announcement:
        """The present announcement; one load, meant to be read at every step."""
        word = self._words[_ANNOUNCED]
        step = word & _STEP_MASK if word >> 47 & 1 else None
        return Announcement(word >> 48, step, word >> _STEP_BITS & 0x7F)

    def beat(self) -> None:
        """Tell that the agent lives."""
        self._words[_AGENT_BEAT_NS] = time.monotonic_ns()

    @property
    def agent_beat_ns(self) -> int:
        """When the agent was last heard of; 0 if never."""
        return self._words[_AGENT_BEAT_NS]

    def close(self) -> None:
        """Let go of the block and the descriptor."""
        super().close()
        if self.block_fd >= 0:
            os.close(self.block_fd)
        self.block_fd = -1
