"""Disks of the nodes' own: power cuts after every operation, and a disk that fails from any operation on."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable

import pytest
from joined_disks import LocalJob, LocalWorld, cut_everywhere
from whole_saves import EVENTS, Promises, believed, check

from safehold.errors import CheckpointError, ConfigurationError, StepNotFoundError, StorageError
from safehold.pipeline import maintenance
from safehold.pipeline.catalog import find_restore_candidate
from safehold.policy.retention import Keep
from safehold.testing.crash_model import Survival
from safehold.tiers import flash_probe, joined

NODES = ["b", "a"]  # the lead's disk is not the one that decides who was first
Scenario = Callable[[LocalWorld, Promises], None]


@pytest.fixture(autouse=True)
def small_and_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node after the other, so that a seed gives the same run again."""
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)
    monkeypatch.setattr(joined, "MAX_THREADS", 1)


def one_save(world: LocalWorld, promises: Promises) -> None:
    job = LocalJob(world, promises)
    job.open()
    job.save(10, 1)


def keep_one(world: LocalWorld, promises: Promises) -> None:
    job = LocalJob(world, promises, keep=Keep(last=1))
    job.open()
    job.save(10, 1)
    job.save(20, 2)
    job.retire()


def roll_back(world: LocalWorld, promises: Promises) -> None:
    job = LocalJob(world, promises)
    job.open()
    first = job.save(10, 1)
    job.save(20, 2)
    job = LocalJob(world, promises)
    job.open(up_to=first)
    job.sweep()
    job.save(20, 3)


SURVIVALS: list[dict[str, Survival]] = [
    {"a": "lost", "b": "lost"},
    {"a": "kept", "b": "kept"},
    {"a": "lost", "b": "kept"},
    {"a": "kept", "b": "lost"},
    {"a": "random", "b": "random"},
]


@pytest.mark.parametrize("scenario", [one_save, keep_one, roll_back])
def test_a_power_cut_anywhere_loses_nothing_promised(scenario: Scenario) -> None:
    """Before and after the disks were brought together again, and the run goes on."""
    num_checked, seen = 0, set()
    for name, promises, world in cut_everywhere(scenario, NODES, SURVIVALS):
        key = hash((tuple(tuple(sorted(disk.tree().items())) for disk in world.disks.values()), repr(promises)))
        if key in seen:
            continue
        seen.add(key)
        num_checked += 1
        try:
            check(world.view(num_checked % 2), promises)
            if num_checked % 4 == 0:
                go_on(world, copy.deepcopy(promises))
        except Exception as exc:
            exc.add_note(f"cut after {name}")
            raise
    assert num_checked > 60


def go_on(world: LocalWorld, promises: Promises) -> None:
    job = LocalJob(world, promises, keep=Keep(last=2))
    job.open()
    there = check(world.view(1), promises)
    for node in (0, 1):  # each knows by itself what counts
        assert believed(world.tiers[world.nodes[node]]) == there
    job.sweep()
    top = max([commit.step for commit in promises.begun], default=0)
    job.save(top + 10, 90)
    job.retire()
    assert check(world.view(), promises)[0].step == top + 10


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_disk_that_fails_from_any_operation_on(bad: str) -> None:
    """The save fails by the node's name or is there; nothing promised is lost, and a new start goes on."""
    number, failed = 0, 0
    while True:
        world, promises = LocalWorld(NODES), Promises()
        job = LocalJob(world, promises)
        job.open()
        job.save(10, 1)
        disk = world.disks[bad]
        at = disk.num_ops + number
        disk.fail_at(lambda op, at=at: op.index >= at, errno.EIO, times=-1)
        commit = None
        try:
            commit = job.save(20, 2)
        except CheckpointError as exc:
            failed += 1
            assert isinstance(exc, StorageError) and (exc.node in (None, bad)), exc
            last = max(promises.begun, default=None)
            if last is not None and last.step == 20:
                job.give_up(last)
        left = LocalWorld(NODES, {node: disk.crash(seed=number, survival="kept") for node, disk in world.disks.items()})
        again = LocalJob(left, promises)
        again.open()
        there = check(left.view(), promises)
        again.save(30, 3)
        assert check(left.view(1), promises)[0].step == 30
        if commit is not None:
            assert commit in there
            break
        number += 5
    assert failed > 5


def test_a_disk_that_fails_while_the_run_is_opened() -> None:
    number, failed = 0, 0
    while True:
        world, promises = LocalWorld(NODES), Promises()
        job = LocalJob(world, promises)
        job.open()
        job.save(10, 1)
        disk = world.disks["a"]
        at = disk.num_ops + number
        disk.fail_at(lambda op, at=at: op.index >= at, errno.EIO, times=-1)
        opened = False
        try:
            LocalJob(world, promises).open()
            opened = True
        except StorageError as exc:
            failed += 1
            assert exc.node in (None, "a")
        left = LocalWorld(NODES, {node: disk.crash(seed=number, survival="kept") for node, disk in world.disks.items()})
        again = LocalJob(left, promises)
        again.open()
        assert [commit.step for commit in check(left.view(), promises)] == [10]
        if opened:
            break
        number += 3
    assert failed > 5


def test_an_empty_disk_in_the_place_of_one_that_was_lost() -> None:
    """The small files come to it; what the lost one had is missing by name, and an older checkpoint is taken; the run goes on."""
    before = LocalWorld(["b", "c"])
    promises = Promises()
    job = LocalJob(before, promises)
    job.open()
    job.save(5, 7)
    world = LocalWorld(["b", "a"], {"b": before.disks["b"]})
    job = LocalJob(world, promises)
    job.open()
    job.save(10, 1)
    with_empty = LocalWorld(["b", "d"], {"b": world.disks["b"]})
    job = LocalJob(with_empty, promises)
    job.open()
    assert believed(with_empty.tiers["d"]) == believed(with_empty.tiers["b"])
    with pytest.raises(StepNotFoundError, match="none of the 2 checkpoints") as caught:
        find_restore_candidate(with_empty.view(), patience_s=0.0)
    assert "node a" in str(caught.value) and "node c" in str(caught.value)
    back = LocalWorld(["c", "b"], {"b": world.disks["b"], "c": before.disks["c"]})
    job = LocalJob(back, promises)
    job.open()
    arguments = {"step": None, "exclude": []}
    found = maintenance.find(back.view(), job.config, arguments, EVENTS)
    assert found["commit"] == [5, 1, 0] and found["holders"] == {0: "b", 1: "c"}
    assert len(found["skipped"]) == 1 and "step 10" in found["skipped"][0] and "node a" in found["skipped"][0]
    job.save(20, 3)
    promises.kept = {commit for commit in promises.kept if commit.step == 20}
    assert believed(back.view())[0].step == 20


def test_what_two_jobs_did_without_each_other_is_not_merged() -> None:
    world = LocalWorld(["a", "b"])
    job = LocalJob(world, Promises())
    job.open()
    job.save(10, 1)
    for node in "ab":  # each alone
        alone = LocalWorld([node], {node: world.disks[node]})
        job = LocalJob(alone, Promises())
        job.open()
        job.save(20, 1)
    with pytest.raises(ConfigurationError, match="incarnation 2 was opened on node a and, without it, on node b"):
        LocalJob(world, Promises()).open()
    other = LocalWorld(["c"])
    job = LocalJob(other, Promises())
    job.open()
    job.save(10, 1)
    with pytest.raises(ConfigurationError, match="nodes a and c hold different runs"):
        LocalJob(LocalWorld(["a", "c"], {**world.disks, **other.disks}), Promises()).open()
