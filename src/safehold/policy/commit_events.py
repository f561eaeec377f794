"""What the commit machine is told (events) and what it asks for (actions).

Invariants: plain immutable data; no behaviour. Times are monotonic seconds of the process that runs the machine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from safehold.errors import CheckpointError
from safehold.format.records import NodeRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each wait of a save may take; each counts from the end of the one before.

    Attributes:
        begin_s: From the first rank's beginning until every rank has begun.
        stage_s: Until every rank has staged.
        flush_s: Until every node has recorded what it wrote.
        plan_s: Until the plan is stored, once every node has recorded.
        publish_s: Until the manifest is durable.
    """

    begin_s: float = 30.0
    stage_s: float = 300.0
    flush_s: float = 1800.0
    plan_s: float = 120.0
    publish_s: float = 120.0


class Phase(enum.Enum):
    """Where a save is."""

    BEGINNING = "beginning"
    STAGING = "staging"
    FLUSHING = "flushing"
    PLANNING = "planning"
    PUBLISHING = "publishing"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """An open save, for people: its phase, since when, until when, and the ranks or nodes waited for."""

    step: int
    attempt: int
    phase: Phase
    since: float
    deadline: float
    waiting_for: str


# ---- events ----


@dataclass(frozen=True, slots=True)
class Begun:
    """A rank began a save and will write by the part with this digest."""

    step: int
    attempt: int
    rank: int
    digest: str


@dataclass(frozen=True, slots=True)
class Staged:
    """All that a rank writes is in its arena; the trainer is no longer needed for this save."""

    step: int
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank cannot do its share."""

    step: int
    attempt: int
    rank: int
    error: CheckpointError


@dataclass(frozen=True, slots=True)
class NodeRecorded:
    """A node's packs, objects and record are durable; implies that its ranks began with these digests and staged."""

    step: int
    attempt: int
    node: int
    size_bytes: int
    blake3: str
    part_digests: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A node cannot do its share."""

    step: int
    attempt: int
    node: int
    error: CheckpointError


@dataclass(frozen=True, slots=True)
class PlanReady:
    """The plan covers every leaf and is stored durably."""

    step: int
    attempt: int
    plan_digest: str
    plan_size: int


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """The parts do not make a plan, or it could not be stored."""

    step: int
    attempt: int
    error: CheckpointError


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest is durable: in the one place for all, or (with `node`) on that node's disk."""

    step: int
    attempt: int
    node: int | None = None


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """Publishing failed; `certain` only if the manifest surely is not visible and never will be."""

    step: int
    attempt: int
    error: CheckpointError
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The lead gives a save up before it is publishing (an announcement that a rank missed, a save that was replaced)."""

    step: int
    attempt: int
    error: CheckpointError


@dataclass(frozen=True, slots=True)
class RankGone:
    """A trainer's process ended or left. It is taken to be back when it says so, or begins another save."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankBack:
    """A trainer has connected again: saves that others begin need not wait for it in vain."""

    rank: int


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node's agent is unreachable or dead. It is taken to be back when anything is heard from it or its ranks."""

    node: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer incarnation of the run was seen."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see `CommitMachine.next_deadline`."""


@dataclass(frozen=True, slots=True)
class Settle:
    """No new saves: finish until `deadline` (monotonic) what all ranks have staged, abandon the rest.

    `grace_s`: a save that all ranks have begun may still become staged for so long, for news that is under way.
    """

    deadline: float
    grace_s: float = 0.0


Event: TypeAlias = (
    Begun
    | Staged
    | RankFailed
    | NodeRecorded
    | NodeFailed
    | PlanReady
    | PlanFailed
    | Published
    | PublishFailed
    | Cancel
    | RankGone
    | RankBack
    | NodeGone
    | Superseded
    | Tick
    | Settle
)

# ---- actions ----


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Merge the parts (by rank), check coverage, store the plan; answered by `PlanReady` or `PlanFailed`."""

    step: int
    attempt: int
    part_digests: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Publish:
    """Make the manifest visible and durable; answered by `Published`, `PublishFailed`. Asked for once for a save."""

    step: int
    attempt: int
    plan_digest: str
    plan_size: int
    nodes: tuple[NodeRef, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint exists.

    Attributes:
        late: It had been given up in doubt, and its manifest became visible after all.
        to_node: Given again to this node, which spoke of the save after the verdict; None for news that is for all.
    """

    step: int
    attempt: int
    late: bool = False
    to_node: int | None = None


@dataclass(frozen=True, slots=True)
class Abandon:
    """The save failed; everybody is told `error` and may drop what it has.

    Attributes:
        in_doubt: Publishing had been asked for and may still take effect: the attempt's files must stay (a visible
            manifest must never lack its bytes) unless a tombstone is laid first.
        to_node: Given again to this node, which spoke of the save after the verdict; None for news that is for all.
    """

    step: int
    attempt: int
    error: CheckpointError
    in_doubt: bool = False
    to_node: int | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """After `Settle`: no save is open any more."""


Action: TypeAlias = BuildPlan | Publish | Committed | Abandon | Settled
