"""The arenas of dead trainers are compared with their checksums once, and believed until somebody can write to them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from agent_fakes import FakeFlusher, Work

from safehold.agent import memory_checks
from safehold.agent.arenas import Arena, ArenaPool
from safehold.agent.memory_checks import MemoryChecks
from safehold.errors import StorageError
from safehold.types import CommitId

COMMIT = CommitId(10, 1, 0)
PACKS = [(0, 4096)]


class World:
    """One rank, its arena with a checkpoint, and its process."""

    def __init__(self) -> None:
        self.work = Work()
        self.flusher = FakeFlusher()
        self.pool = ArenaPool(self.work.post, 1 << 20)
        self.checks = MemoryChecks(self.pool, self.flusher, self.work.post, timeout_s=10.0)  # type: ignore[arg-type]
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.checks.rank_back(0)

    def arena(self) -> Arena:
        found: list[Arena | None] = []
        self.pool.acquire(0, 4096, lambda arena, _: found.append(arena))
        self.work.run_until(lambda: found)
        assert found[0] is not None
        return found[0]

    def saved(self) -> Arena:
        arena = self.arena()
        self.pool.hold(arena, arena.use(), COMMIT, PACKS)
        arena.busy = False
        return arena

    def die(self) -> None:
        self.process.kill()
        self.process.wait()

    def checked(self) -> None:
        self.work.run_until(lambda: self.flusher.open("check_memory"))


@pytest.fixture
def w() -> Iterator[World]:
    world = World()
    yield world
    world.die()
    assert world.process.stdin is not None
    world.process.stdin.close()
    world.pool.close()


def test_a_dead_trainers_arena_is_checked_once(w: World) -> None:
    arena = w.saved()
    w.checks.rank_gone(0, w.process.pid)
    w.work.run_for(0.1)
    assert not w.flusher.log  # its process lives on, and may still write
    w.die()
    w.checked()
    (asked,) = w.flusher.open("check_memory")
    assert asked["commit"] == [10, 1, 0] and asked["packs"] == PACKS and asked["rank"] == 0
    w.checks.consider()
    w.flusher.answer("check_memory", True)
    assert arena.verified
    w.checks.consider()
    assert len(w.flusher.log) == 1


@pytest.mark.parametrize("answer", [False, None, StorageError("gone", path="x")])
def test_what_does_not_match_or_cannot_be_told_is_not_verified(w: World, answer: object) -> None:
    arena = w.saved()
    w.die()
    w.checks.rank_gone(0, w.process.pid)
    w.checked()
    if isinstance(answer, StorageError):
        w.flusher.answer("check_memory", None, answer)
    else:
        w.flusher.answer("check_memory", answer)
    assert not arena.verified and arena.content == COMMIT


def test_a_trainer_that_came_back_meanwhile_can_write_again(w: World) -> None:
    arena = w.saved()
    w.die()
    w.checks.rank_gone(0, w.process.pid)
    w.checked()
    w.checks.rank_back(0)
    w.flusher.answer("check_memory", True)
    assert not arena.verified
    w.checks.consider()
    assert not w.flusher.open("check_memory")


def test_an_end_that_is_told_late_is_that_of_an_earlier_process(w: World) -> None:
    w.saved()
    w.checks.rank_gone(0, w.process.pid)
    w.checks.rank_back(0)
    w.die()
    w.work.run_for(0.2)
    assert not w.flusher.log


def test_an_arena_that_a_save_took_meanwhile_is_another(w: World) -> None:
    arena = w.saved()
    w.die()
    w.checks.rank_gone(0, w.process.pid)
    w.checked()
    arena.use()
    w.flusher.answer("check_memory", True)
    assert not arena.verified


def test_what_is_committed_after_the_death_is_checked_then(w: World) -> None:
    w.die()
    arena = w.arena()
    use = arena.use()
    w.checks.rank_gone(0, w.process.pid)
    w.work.run_for(0.1)
    w.checks.consider()
    assert not w.flusher.log
    w.pool.hold(arena, use, COMMIT, PACKS)
    arena.busy = False
    w.checks.consider()
    assert w.flusher.open("check_memory")


def test_a_trainer_that_goes_again_and_again_costs_one_thread_and_one_descriptor(w: World) -> None:
    def num_watchers() -> int:
        return sum(thread.name == "process-ends" for thread in threading.enumerate())

    before, watchers = len(os.listdir("/proc/self/fd")), num_watchers()
    for _ in range(20):
        w.checks.rank_gone(0, w.process.pid)
        w.checks.rank_back(0)
        w.checks.rank_gone(1, os.getpid())
    assert len(os.listdir("/proc/self/fd")) == before + 2 and num_watchers() == watchers + 1
    w.checks.close()
    assert len(os.listdir("/proc/self/fd")) == before
    w.work.run_for(0.2)
    assert num_watchers() == watchers
    arena = w.saved()
    w.checks.rank_gone(0, w.process.pid)
    w.die()
    w.checked()
    w.flusher.answer("check_memory", True)
    assert arena.verified


def test_a_process_that_never_ends_is_not_waited_for_for_ever(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_checks, "LEAVING_S", 0.05)
    before = len(os.listdir("/proc/self/fd"))
    w.saved()
    w.checks.rank_gone(0, w.process.pid)
    w.work.run_for(0.3)
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "the arena has one"
    w.die()
    w.work.run_for(0.1)
    assert not w.flusher.log


def test_a_process_that_cannot_be_seen_is_never_dead(w: World) -> None:
    w.saved()
    w.checks.rank_gone(0, 0)
    w.work.run_for(0.1)
    assert not w.flusher.log and os.getpid()


def test_a_process_without_a_number_here_is_followed_by_its_pidfd(w: World) -> None:
    """A trainer in another container than the agent."""
    w.saved()
    w.checks.rank_gone(0, 0)
    assert not w.checks._leaving, "there is nothing to follow"
    pidfd = os.pidfd_open(w.process.pid)
    w.checks.rank_gone(0, 0, pidfd)
    os.close(pidfd)  # the connection's end; what is followed is a duplicate
    w.work.run_for(0.1)
    assert not w.flusher.log
    w.die()
    w.checked()
