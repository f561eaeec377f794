"""What an agent says of its own survival: which ends of the job would take it, and the memory it keeps, along.

Invariants: pure; says nothing where nothing is known, and nothing where the agent would outlive its trainers anyhow. docs/survival.md has
the whole table.
"""

from __future__ import annotations

import re

OOM_SCORE_ADJ = -900
"""Trainers go first: their memory comes back with them, while the arenas are there for whoever restarts. Not -1000: the agent may go."""


def notes(
    *,
    group: str,
    trainer_group: str,
    kill_together: str = "",
    trainer_kill_together: str = "",
    in_container: bool = False,
) -> list[str]:
    """Return sentences for the user.

    Args:
        group: The agent's control group; empty: unknown.
        trainer_group: A trainer's; empty: unknown, as that of a process in another container is.
        kill_together: A group above the agent whose processes the out-of-memory killer kills together; empty: none.
        trainer_kill_together: The same of the trainer.
        in_container: Whether the agent ends with the first process of a container.
    """
    if not group or not trainer_group:
        return []
    found = []
    if kill_together and kill_together == trainer_kill_together:
        found.append(
            f"where memory runs out the agent is killed with the trainers ({kill_together}/memory.oom.group is set); "
            "lower memory_budget_bytes, or start the agent ahead in a group of its own"
        )
    if group == trainer_group and (ending := _ending(group, in_container)):
        what, instead = ending
        found.append(f"the agent, and the memory that it keeps for a restart, end {what}; {instead}")
    return [f"{text}: docs/survival.md" for text in found]


def _ending(group: str, in_container: bool) -> tuple[str, str] | None:
    """Return what ends all processes of a group, and what to do about it."""
    unit = next((part for part in reversed(group.split("/")) if part.endswith((".service", ".scope"))), "")
    if re.search(r"/job_\w+/step_\w+", group):
        where = "with the Slurm step of the trainers"
        return where, "start it ahead in a step of its own ('srun --overlap ... safehold agent RUN &')"
    if in_container:
        return "with the container of the trainers", "run 'safehold agent RUN' in a sidecar"
    if unit.endswith(".service") and not unit.startswith("user@"):
        return f"when {unit} stops or is restarted", "run 'safehold agent RUN' in a unit of its own"
    return None
