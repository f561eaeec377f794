"""Starts of a job on some of the nodes each, at the same time, and such that are cut short: no commit is shadowed by any of them.

Where a start goes through, it believes every checkpoint that was told to be durable and whose manifest is on one of its nodes. Else it is
refused, or fails.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from joined_disks import LocalJob, LocalWorld
from whole_saves import Promises

from safehold.errors import CheckpointError
from safehold.policy.retention import Keep
from safehold.testing.disk_faults import Op
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers import flash_probe
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

OPERATIONS = {"list", "get", "size", "put", "delete", "delete_tree", "sync_tree"}
STRIDE = 7
"""Every so many operations a start is interrupted."""


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)


class Interruption:
    """Does something once, before the operation of some number on any disk."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.done, self._left, self._action = False, number, action
        self._lock = threading.Lock()

    def before(self) -> None:
        """An operation is about to be carried out."""
        with self._lock:
            self._left -= 1
            due = self._left < 0 and not self.done
            self.done |= due
        if due:
            self._action()


class InterruptedTier(FlashTier):
    """One process's way to a disk."""

    interruption: Interruption | None = None

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name in OPERATIONS and (interruption := object.__getattribute__(self, "interruption")) is not None:
            interruption.before()
        return found


class Run:
    """Jobs on some of the nodes each, and what they were told to be durable."""

    def __init__(self, nodes: str) -> None:
        self.nodes = nodes
        self.disks = {node: FakeDisk(seed=number) for number, node in enumerate(nodes)}
        self.acknowledged: set[CommitId] = set()

    def start(self, nodes: str, *steps: int, interruption: Interruption | None = None) -> LocalJob | None:
        """Start a job and save; None where it is refused, or fails."""
        world = LocalWorld(list(nodes), {node: self.disks[node] for node in nodes})
        if interruption is not None:
            ways = {node: InterruptedTier(self.disks[node].root, self.disks[node]) for node in nodes}
            for way in ways.values():
                way.interruption = interruption
            world.tiers = dict(ways)
        job = LocalJob(world, Promises(), keep=Keep(last=50))
        try:
            job.open()
        except CheckpointError:
            return None
        self.save(job, *steps)
        return job

    def save(self, job: LocalJob | None, *steps: int) -> None:
        """Save, as far as that goes."""
        for step in steps if job is not None else ():
            try:
                self.acknowledged.add(job.save(step, 1))  # type: ignore[union-attr]
            except CheckpointError:
                return

    def shadowed(self) -> set[int]:
        """Start on all nodes; return the steps that were durable and are not believed, though nobody was refused."""
        job = self.start(self.nodes)
        return set() if job is None else {commit.step for commit in self.acknowledged} - set(job.steps)


def late_save(number: int) -> tuple[Run, bool]:
    """A job on one node commits while another one is started on both; then only the other node is there."""
    run = Run("ab")
    run.start("ab", 10)
    old = run.start("b", 20)
    interruption = Interruption(number, lambda: run.save(old, 30))
    run.start("ab", 40, interruption=interruption)
    run.start("a", 50)
    return run, interruption.done


def start_beside(number: int) -> tuple[Run, bool]:
    """Contradictory starts are joined, of which one has saved; meanwhile somebody starts on the nodes of the other one."""
    run = Run("abc")
    run.start("abc", 10)
    run.start("c", 20)
    run.start("ab")
    interruption = Interruption(number, lambda: run.start("ab"))
    run.start("abc", 30, interruption=interruption)
    return run, interruption.done


def save_beside(number: int) -> tuple[Run, bool]:
    """Contradictory starts that have saved nothing are joined; meanwhile somebody starts on some of the nodes, and saves."""
    run = Run("abc")
    run.start("abc", 10)
    run.start("c")
    run.start("ab")
    interruption = Interruption(number, lambda: run.start("ab", 20))
    run.start("abc", 30, interruption=interruption)
    run.start("a", 40)
    return run, interruption.done


@pytest.mark.parametrize("scenario", [late_save, start_beside, save_beside])
def test_whoever_interrupts_a_start_shadows_nothing(scenario: Callable[[int], tuple[Run, bool]]) -> None:
    for number in range(0, 1000, STRIDE):
        run, done = scenario(number)
        assert not run.shadowed(), f"interrupted at operation {number}"
        if not done:
            break
    assert number > 60


def failing(disks: Mapping[str, FakeDisk], changes: int) -> list[int]:
    """Have all disks fail after so many changes; returns what is left of them."""
    left = [changes]

    def due(op: Op) -> bool:
        left[0] -= op.changes
        return op.changes and left[0] < 0

    for disk in disks.values():
        disk.fail_at(due, errno.EIO, times=-1)
    return left


@pytest.mark.parametrize("third", ["b", "bc"])
def test_a_start_that_is_cut_short_anywhere_shadows_nothing(third: str) -> None:
    """Node b, which was away, has got a part of what it lacked when the start ends; the next is without the node that has it all."""
    for changes in range(1000):
        run = Run("abc")
        run.start("abc", 10)
        run.start("a", 20, 30)
        left = failing(run.disks, changes)
        run.start("ab")
        for disk in run.disks.values():
            disk.heal()
        run.start(third, 40)
        assert not run.shadowed(), f"cut short at change {changes}"
        if left[0] >= 0:
            break
    assert changes > 15
