"""What the agent finds out of its own survival beside its trainers; see `policy.survival`."""

from __future__ import annotations

from safehold.host import cgroups
from safehold.policy import survival


def survival_notes(trainer_pid: int) -> list[str]:
    """Return sentences for the user of a trainer (0: its process cannot be seen from here)."""
    if trainer_pid <= 0:
        return []
    own, trainer = cgroups.surroundings(), cgroups.surroundings(trainer_pid)
    return survival.notes(
        group=own.group,
        trainer_group=trainer.group,
        kill_together=own.kill_together,
        trainer_kill_together=trainer.kill_together,
        in_container=own.in_container,
    )
