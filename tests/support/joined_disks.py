"""Whole saves on disks of the nodes' own: each rank's packs go to its node, what all must have to all.

world = LocalWorld(["a", "b", "c"])
job = LocalJob(world, promises)
job.open(); job.save(10, 1)
world.crash(seed=3)             # what is left after all lost power
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from whole_saves import EVENTS, Job, Promises, wire

from safehold.pipeline import maintenance
from safehold.testing.crash_model import Survival
from safehold.testing.disk_faults import Op
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.tiers.joined import JoinedTier
from safehold.types import CommitId

T = TypeVar("T")


class LocalWorld:
    """Nodes and their disks; the lead is the first.

    Args:
        nodes: Their names, by number.
        disks: The disks, by name; fresh ones where there is none.
    """

    def __init__(self, nodes: list[str], disks: Mapping[str, FakeDisk] | None = None) -> None:
        self.nodes = nodes
        given = disks or {}
        self.disks = {
            node: given[node] if node in given else FakeDisk(seed=number) for number, node in enumerate(nodes)
        }
        self.tiers: dict[str, Tier] = {node: FlashTier(disk.root, disk) for node, disk in self.disks.items()}

    def view(self, node: int = 0) -> JoinedTier:
        """What a node sees."""
        name = self.nodes[node]
        return JoinedTier(self.tiers[name], {n: t for n, t in self.tiers.items() if n != name}, node=name)

    def crash(self, survival: Mapping[str, Survival], seed: int = 0) -> LocalWorld:
        """Return the nodes after a loss of power, each with its own survival."""
        left = {
            node: disk.crash(seed=seed * 10 + number, survival=survival[node])
            for number, (node, disk) in enumerate(self.disks.items())
        }
        return LocalWorld(self.nodes, left)


class LocalJob(Job):
    """One incarnation on several nodes, one rank on each."""

    def __init__(self, world: LocalWorld, promises: Promises, **options: Any) -> None:
        super().__init__(world.view(), promises, world_size=len(world.nodes), **options)
        self.world = world

    def node_of(self, rank: int) -> int:
        return rank

    def disk_of(self, node: int) -> Tier:
        return self.world.tiers[self.world.nodes[node]]

    def publish(self, commit: CommitId, digest: str, size: int, nodes: list[dict[str, Any]]) -> None:
        arguments = {
            "commit": wire(commit),
            "run_id": self._run_id,
            "world_size": self.world_size,
            "nodes": nodes,
            "plan_digest": digest,
            "plan_size": size,
            "metrics": {},
            "final": False,
            "own_disks": self.world.nodes,
        }
        maintenance.publish(self.tier, self.config, arguments, EVENTS)


Moment = tuple[str, Promises, LocalWorld]


class _NotingDisk(FakeDisk):
    """Tells after every operation that changes something."""

    def __init__(self, tell: Callable[[Op], None], **options: Any) -> None:
        super().__init__(**options)
        self._tell = tell

    def _operate(self, kind: str, path: str, action: Callable[[], T], offset: int = 0, nbytes: int = 0) -> T:
        result = super()._operate(kind, path, action, offset, nbytes)
        op = Op(index=self.num_ops, kind=kind, path=path, offset=offset, nbytes=nbytes)
        if op.changes:
            self._tell(op)
        return result


def cut_everywhere(
    scenario: Callable[[LocalWorld, Promises], None], nodes: list[str], survivals: list[Mapping[str, Survival]]
) -> Iterator[Moment]:
    """Run a scenario once; give what a loss of power after each operation on any disk would leave, in each of the ways."""
    promises, moments = Promises(), list[Moment]()
    disks: dict[str, FakeDisk] = {}

    def note(node: str, op: Op) -> None:
        for number, survival in enumerate(survivals):
            left = LocalWorld(nodes, disks).crash(survival, seed=op.index + 1000 * number)
            for disk in disks.values():
                disk._power = True
            moments.append((f"{op.kind} {op.path} on {node}, {survival}", copy.deepcopy(promises), left))

    for number, node in enumerate(nodes):
        disks[node] = _NotingDisk(lambda op, node=node: note(node, op), seed=number)  # type: ignore[misc]
    scenario(LocalWorld(nodes, disks), promises)
    yield from moments
