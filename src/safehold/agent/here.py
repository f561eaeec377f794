"""What a head needs of the session on its own node."""

from __future__ import annotations

from typing import Protocol

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.memory_node import NodeMemory
from safehold.types import CommitId


class Here(Protocol):
    """The session on this node, as its head needs it."""

    node: int
    world: m.World
    run_id: str
    incarnation: int
    ended_by: int
    memory: NodeMemory

    def hear(self, word: w.Word) -> None:
        """Take a word of the lead."""
        ...

    def opened(
        self, run_id: str, incarnation: int, steps: list[int] | None, memory: CommitId | None = None
    ) -> list[int]:
        """A new incarnation is open."""
        ...

    def end(self, by: int) -> None:
        """A newer incarnation owns the run."""
        ...

    def steps(self) -> dict[int, int]:
        """The last step of each of its ranks, as far as known."""
        ...

    def facts_of(self, step: int, attempt: int) -> tuple[dict[str, float], bool]:
        """Metrics of a save, and whether it is the final one."""
        ...
