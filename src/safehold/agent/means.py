"""What an agent takes from its host besides time: threads for what is slow, memory, control words. A simulation hands in its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from safehold.agent.shared_memory import Memory, SharedMemory
from safehold.host.control import NodeControl, RankControl

Spawn = Callable[[str, Callable[[], None]], None]
"""(name, work): has work that may take long done beside the dispatcher; RuntimeError where that cannot be."""


def in_thread(name: str, work: Callable[[], None]) -> None:
    """Have it done in a thread of its own, which the process does not wait for.

    Raises:
        RuntimeError: There can be no more threads.
    """
    threading.Thread(target=work, name=name, daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """See the module.

    Attributes:
        spawn: For planning, populating arenas, fetching documents, and closing networks.
        rank_control: Makes the control words of a rank.
        node_control: Makes those of a node.
        memory: Makes memory of (size, name) that is not an arena.
    """

    spawn: Spawn = in_thread
    rank_control: Callable[[], RankControl] = RankControl.create
    node_control: Callable[[], NodeControl] = NodeControl.create
    memory: Callable[[int, str], Memory] = SharedMemory


REAL = Means()
