"""What a world is like: sizes, times, and how chance may strike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONFIG: dict[str, Any] = {
    "begin_timeout_s": 10.0,
    "stage_timeout_s": 10.0,
    "flush_timeout_s": 30.0,
    "request_timeout_s": 20.0,
    "start_timeout_s": 40.0,
    "restore_timeout_s": 60.0,
    "peer_timeout_s": 8.0,
    "agent_linger_s": 20.0,
    "delete_grace_s": 30.0,
    "memory_budget_bytes": 1 << 30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All times in virtual seconds; pairs are shortest and longest.

    Attributes:
        num_nodes: Nodes of the job.
        ranks_per_node: Ranks on each.
        num_spares: Machines that take the place of dead ones.
        config: Settings of the run that are not the defaults.
        step_s: Time of a training step.
        every_steps: Steps between saves by steps; 0: none.
        every_seconds: Time between announced saves; 0: none.
        keep_last: How many checkpoints retention keeps.
        stage_s: Staging of a rank.
        write_s: Writing a rank's pack.
        sync_s: Making it durable.
        storage_s: One call to storage.
        network_s: One message between agents.
        local_s: One message between processes of a node.
        plan_s: Joining the parts.
        populate_s: Making an arena's pages.
        restart_s: From a failure to the job's next start.
        notice_s: Until the launcher notices that a rank died.
        hang_s: Until it notices that the job stands still.
        interleaved: Whether storage calls of different processes interleave one by one; else an operation happens at once and its
            answer comes later.
        relayout: Chance of a rank to have a new layout at a save.
        undeclared: Whether ranks hold a leaf whose replicas the agents have to find out about.
    """

    num_nodes: int = 2
    ranks_per_node: int = 1
    num_spares: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    step_s: float = 1.0
    every_steps: int = 5
    every_seconds: float = 0.0
    keep_last: int = 3
    stage_s: tuple[float, float] = (0.02, 0.2)
    write_s: tuple[float, float] = (0.1, 1.0)
    sync_s: tuple[float, float] = (0.01, 0.1)
    storage_s: tuple[float, float] = (0.0005, 0.01)
    network_s: tuple[float, float] = (0.0002, 0.003)
    local_s: tuple[float, float] = (0.00005, 0.0005)
    plan_s: tuple[float, float] = (0.01, 0.3)
    populate_s: tuple[float, float] = (0.01, 0.2)
    restart_s: tuple[float, float] = (1.0, 4.0)
    notice_s: tuple[float, float] = (0.1, 2.0)
    hang_s: float = 90.0
    interleaved: bool = True
    relayout: float = 0.05
    undeclared: bool = True

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    @property
    def wire(self) -> dict[str, Any]:
        """Settings of the run, as `Config` takes them."""
        return {**CONFIG, **self.config}
