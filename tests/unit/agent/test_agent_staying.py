"""An agent that was started ahead of its trainers: it outlives them, frees what they leave, and says whom it shares its fate with."""

from __future__ import annotations

import math
import os
import time

import pytest
from agent_fakes import hello, world_of
from agent_sockets import Agent, Trainer

from safehold.agent import messages as m
from safehold.agent import server as server_module
from safehold.agent import survival
from safehold.host.cgroups import Surroundings


@pytest.fixture
def quick(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(server_module, "ORDERLY_LINGER_S", 0.05)
    monkeypatch.setattr(server_module, "MAX_WAIT_S", 0.02)
    agent.server._linger_until = 0.0
    agent.server._stay_s = math.inf
    agent.idle()
    return agent


def save(trainer: Trainer, agent: Agent, step: int) -> None:
    assert isinstance(trainer.ask(trainer.begin(0, step)), m.Granted)
    trainer.ask(m.Staged(11, step, 0, {}))
    trainer.wait_for(m.Durable)


def test_it_stays_and_frees_what_a_job_left(quick: Agent) -> None:
    for name in ("first", "second"):
        [trainer] = quick.join(world_of(1, name), agent_linger_s=0.3)
        save(trainer, quick, 5)
        pool = quick.server._pool
        assert pool is not None and pool.total_bytes > 0
        trainer.channel.close()
        gone = time.monotonic()
        quick.until(lambda: not pool.total_bytes)
        assert time.monotonic() - gone >= 0.25, "as long as an agent of its own would have stayed"
        quick.until(lambda: pool.budget_bytes == 0)
        assert quick.thread.is_alive()


def test_it_leaves_when_it_has_been_alone_for_long_enough(quick: Agent) -> None:
    [trainer] = quick.join(world_of(1))
    quick.server._stay_s = 0.3
    time.sleep(0.4)
    assert quick.thread.is_alive(), "its trainer is there"
    trainer.channel.close()
    gone = time.monotonic()
    quick.thread.join(5.0)
    assert not quick.thread.is_alive() and time.monotonic() - gone >= 0.25


def test_it_leaves_when_it_is_told_to(quick: Agent) -> None:
    quick.server.terminate()
    quick.thread.join(5.0)
    assert not quick.thread.is_alive()


def test_rank_0_is_told_what_ends_agent_and_trainers_together(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def look(pid: int | None = None) -> Surroundings:
        asked.append(pid)
        return Surroundings(groups={"": "/job_1/step_0"})

    monkeypatch.setattr(survival.cgroups, "surroundings", look)
    trainer = agent.trainer()
    trainer.ask(hello(0, world_of(1)))
    opened = trainer.ask(m.OpenRun(2))
    assert asked == [None, os.getpid()]
    assert ["Slurm" in note for note in opened.notes] == [True]
    assert survival.survival_notes(0) == [], "a process of another container"
