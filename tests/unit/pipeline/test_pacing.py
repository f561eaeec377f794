"""Waiting for a turn: naps, and what ends them."""

from __future__ import annotations

import threading

import pytest

from safehold.pipeline.pacing import NAP_S, SAMPLE_S, Pacer


class Clock:
    """Time that passes by waiting only."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Cancelled(threading.Event):
    """Lets the clock pass instead of waiting."""

    def __init__(self, clock: Clock, at: float = float("inf")) -> None:
        super().__init__()
        self.clock, self.at, self.naps = clock, at, []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.naps.append(timeout)
        self.clock.now += timeout
        return self.clock.now >= self.at


class Cores:
    """As many idle cores as the test says."""

    num_cores = 2

    def __init__(self) -> None:
        self.idle: float | None = 0.0
        self.asked = 0

    def sample(self) -> float | None:
        self.asked += 1
        return self.idle


class World:
    def __init__(self, share: float = 0.05) -> None:
        self.clock, self.cores, self.cpu = Clock(), Cores(), 0.0
        self.pacer = Pacer(self.cores, share, clock=self.clock, cpu_time=lambda: self.cpu)
        self.clock.now += 2 * SAMPLE_S

    def work(self, cpu_s: float, cancelled: threading.Event | None = None, until_s: float = 1e9) -> float:
        begun = self.clock.now
        began = self.pacer.wait(cancelled or Cancelled(self.clock), until_s)
        waited = self.clock.now - begun
        self.cpu += cpu_s
        self.pacer.spent(began)
        return waited


def test_work_is_spaced_out_by_its_cpu_time_in_naps() -> None:
    w = World()
    assert w.work(0.01) == 0.0
    cancelled = Cancelled(w.clock)
    assert w.work(0.02, cancelled) == pytest.approx(0.09)
    assert max(cancelled.naps) <= NAP_S
    assert w.work(0.0) == pytest.approx(0.2)


def test_a_core_that_becomes_idle_ends_the_wait() -> None:
    w = World()
    w.work(1.0)  # ten seconds' worth
    w.cores.idle = 1.0
    assert w.work(0.0) <= SAMPLE_S + NAP_S


def test_cancelling_and_the_time_limit_end_the_wait() -> None:
    w = World()
    w.work(1.0)
    assert w.work(0.0, Cancelled(w.clock, at=w.clock.now + 0.1)) <= 0.1 + NAP_S
    w = World()
    w.work(1.0)
    assert w.work(0.0, until_s=w.clock.now + 0.5) <= 0.5 + NAP_S
    assert w.work(0.0, until_s=w.clock.now - 1) == 0.0


def test_the_kernel_is_asked_only_now_and_then() -> None:
    w = World(share=0.0)
    for _ in range(100):
        w.work(0.001)
    assert w.cores.asked == 1
