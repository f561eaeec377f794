"""Several nodes that run out of room at once: together they let go what the keep rule lets go, and no more than is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from joined_disks import LocalJob, LocalWorld
from whole_saves import Promises, believed

from safehold.pipeline import sweep
from safehold.policy.retention import Keep
from safehold.tiers import flash_probe
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.tiers.joined import JoinedTier

STEPS = [10, 20, 30]
KEEP = Keep(last=2)
OPERATIONS = {"list", "get", "size", "put", "delete", "delete_tree", "delete_if_empty", "sync_tree", "free_bytes"}


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)


class Full(FlashTier):
    """A disk on which some number of checkpoints fits, and one is to be freed for the next save."""

    def free_bytes(self) -> int | None:
        gone = len(STEPS) - sum(bool(self.list(f"checkpoints/{step:09d}")) for step in STEPS)
        return 100 * gone


class Still:
    """A clock that goes on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1e9

    def monotonic(self) -> float:
        return self.now

    wall = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Interrupted(Full):
    """A node's way to a disk, which does something once, before its next operation but some."""

    action: Callable[[], object] | None = None
    left = 0

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            self.left -= 1
            if self.left < 0 and self.action is not None:
                action, self.action = self.action, None
                action()
        return super().__getattribute__(name)


def full_world() -> LocalWorld:
    world = LocalWorld(["a", "b"])
    job = LocalJob(world, Promises())
    job.open()
    for number, step in enumerate(STEPS):
        job.save(step, number + 1)
    world.tiers = {node: Full(disk.root, disk) for node, disk in world.disks.items()}
    return world


def make_room(view: Tier, needed: int) -> sweep.Room:
    return sweep.make_room(view, needed, keep=KEEP, incarnation=1, clock=Still())


@pytest.mark.parametrize(("needed", "left"), [(100, [20, 30]), (1000, [30])])
def test_two_nodes_at_once_let_go_what_one_alone_would(needed: int, left: list[int]) -> None:
    """The other node makes room in the middle of this one's doing so, at every point of it."""
    alone = full_world()
    assert make_room(alone.view(), needed).enough == (needed == 100)
    assert sorted(commit.step for commit in believed(alone.view())) == left
    for number in range(0, 1000, 2):
        world = full_world()
        way = Interrupted(world.disks["a"].root, world.disks["a"])
        way.left, way.action = number, lambda world=world: make_room(world.view(1), needed)  # type: ignore[misc]
        make_room(JoinedTier(way, {"b": world.tiers["b"]}, node="a"), needed)
        assert sorted(commit.step for commit in believed(world.view())) == left, f"at operation {number}"
        if way.action is not None:
            break
    assert number > 20
