"""The phases of a save as a table: whom each waits for, for how long, and what follows.

Invariants: every phase but the last two has a row, so that no wait is without an end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from safehold.format.records import NodeRef
from safehold.policy.commit_events import Deadlines, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who takes part in every save of the run.

    Attributes:
        ranks: All ranks.
        nodes: All nodes that have a rank.
        lead: The node that plans.
        lead_only: The same as a set.
        publishers: The nodes where a manifest must be durable.
    """

    ranks: frozenset[int]
    nodes: frozenset[int]
    lead: int
    lead_only: frozenset[int]
    publishers: frozenset[int]


@dataclass(slots=True)
class Save:
    """An open save, as far as it is known.

    Attributes:
        step: The step.
        attempt: The attempt.
        phase: Where it is.
        since: When the phase began.
        deadline: When the phase is over at the latest.
        digests: Rank -> digest of the part that it began with.
        staged: Ranks that staged.
        recorded: Node -> its node record.
        plan: Digest and size of the stored plan.
        planned: The lead, once the plan is stored.
        published: Nodes where the manifest is durable.
        settling: The phase is cut short by a `Settle`.
    """

    step: int
    attempt: int
    phase: Phase
    since: float
    deadline: float
    digests: dict[int, str] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    recorded: dict[int, NodeRef] = field(default_factory=dict)
    plan: tuple[str, int] | None = None
    planned: set[int] = field(default_factory=set)
    published: set[int] = field(default_factory=set)
    settling: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """One row of the table above.

    Attributes:
        next: The phase that follows.
        limit_s: How long the wait may take.
        needed: The ranks or nodes waited for.
        heard: Those of them that have done it; never others.
        of: What they are.
        had_not: What they had to do.
    """

    next: Phase
    limit_s: Callable[[Deadlines], float]
    needed: Callable[[Members], frozenset[int]]
    heard: Callable[[Save], Collection[int]]
    of: str
    had_not: str

    def is_over(self, members: Members, save: Save) -> bool:
        """Say whether all have done it."""
        return len(self.heard(save)) == len(self.needed(members))

    def late(self, members: Members, save: Save) -> set[int]:
        """Return who has not."""
        return set(self.needed(members)) - set(self.heard(save))


WAITS: dict[Phase, Wait] = {
    Phase.BEGINNING: Wait(
        Phase.STAGING, lambda d: d.begin_s, lambda m: m.ranks, lambda s: s.digests, "rank", "begun the save"
    ),
    Phase.STAGING: Wait(
        Phase.FLUSHING, lambda d: d.stage_s, lambda m: m.ranks, lambda s: s.staged, "rank", "staged its share"
    ),
    Phase.FLUSHING: Wait(
        Phase.PLANNING, lambda d: d.flush_s, lambda m: m.nodes, lambda s: s.recorded, "node", "written its share"
    ),
    Phase.PLANNING: Wait(
        Phase.PUBLISHING, lambda d: d.plan_s, lambda m: m.lead_only, lambda s: s.planned, "node", "stored the plan"
    ),
    Phase.PUBLISHING: Wait(
        Phase.COMMITTED, lambda d: d.publish_s, lambda m: m.publishers, lambda s: s.published, "node", "published it"
    ),
}
