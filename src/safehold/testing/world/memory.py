"""Stand-ins for what a node shares between its processes: control words and arenas, by numbers that take the place of descriptors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from safehold.agent.arenas import Arena, ArenaPool
from safehold.host.control import Announcement, NodeControl, RankControl

FIRST_FD = 1 << 24
"""Above every descriptor that a process can have: what is taken for one by mistake is refused by the system."""


@dataclass(slots=True)
class Words:
    """A rank's control words: the last step that it told, and which of its saves it has staged."""

    fd: int
    step: int = 0
    beat_ns: int = 0
    staged: set[int] = field(default_factory=set)
    watching: list[Callable[[], None]] = field(default_factory=list)

    @property
    def fds(self) -> tuple[int, int]:
        """As `RankControl.fds`."""
        return self.fd, self.fd

    def set_progress(self, step: int) -> None:
        """Tell a step."""
        self.step, self.beat_ns = step, 1

    def stage(self, save_seq: int) -> None:
        """All of a save is staged; wakes the flusher."""
        self.staged = {save_seq}
        for look in list(self.watching):
            look()

    def close(self) -> None:
        """Let go of it."""


@dataclass(slots=True)
class NodeWords:
    """A node's control words: what was announced."""

    block_fd: int
    announcement: Announcement = field(default_factory=lambda: Announcement(0, None, 0))

    def announce(self, step: int | None, *, kind: int = 0) -> int:
        """Ask all ranks of the node for a save."""
        self.announcement = Announcement(self.announcement.seq + 1, step, kind)
        return self.announcement.seq

    def beat(self) -> None:
        """Tell that the agent lives."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(slots=True)
class Bytes:
    """What an arena holds: `content` names the state that was staged; None while somebody stages."""

    rank: int
    content: object = None


class Shared:
    """All shared memory of a world, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST_FD)
        self.words: dict[int, Words] = {}
        self.node_words: dict[int, NodeWords] = {}
        self.arenas: dict[int, Bytes] = {}

    def rank_control(self) -> RankControl:
        """Make a rank's control words."""
        fd = next(self._numbers)
        self.words[fd] = Words(fd)
        return cast(RankControl, self.words[fd])

    def node_control(self) -> NodeControl:
        """Make a node's control words."""
        fd = next(self._numbers)
        self.node_words[fd] = NodeWords(fd)
        return cast(NodeControl, self.node_words[fd])

    def arena(self, rank: int) -> int:
        """Make an arena."""
        fd = next(self._numbers)
        self.arenas[fd] = Bytes(rank)
        return fd


class WorldPool(ArenaPool):
    """The real pool over arenas of the world."""

    def __init__(self, shared: Shared, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared

    def _populate(self, arena: Arena) -> None:
        fd = self._shared.arena(arena.rank)
        self._post(lambda: self._populated(arena, fd, None))

    def _close(self, fd: int) -> None:
        pass  # a flusher or a trainer may still have it mapped

    def all_arenas(self) -> list[Arena]:
        """Return what it has."""
        return [*self._all(), *self._parted]
