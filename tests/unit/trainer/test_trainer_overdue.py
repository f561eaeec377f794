"""Saves by time that have stopped are told of, and nothing else is; an agent that is lost is looked for until it is had."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import safehold
from safehold.agent import client as client_module
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CommitError, DeadlineError
from safehold.host.control import NodeControl
from safehold.trainer import saver as saver_module
from safehold.trainer.failures import Failures
from safehold.trainer.overdue import Overdue

Make = Callable[..., safehold.Checkpointer]


class Training:
    """A rank that steps once a second beside an agent; saves every 10 s are to be durable 20 s later."""

    def __init__(self, every_seconds: float | None = 10.0) -> None:
        config = Config(flush_timeout_s=20.0)
        self.failures = Failures(config)
        self.node_control = NodeControl.create()
        self.client: Any = SimpleNamespace(generation=1, node_control=self.node_control, rank=3)
        self.now, self.step = 100.0, 0
        self.overdue = Overdue(every_seconds, config, self.failures, monotonic=lambda: self.now)

    def train(self, seconds: int, then: Callable[[], object] = lambda: None) -> list[str]:
        """Train for so long; returns what was raised."""
        raised = []
        for _ in range(seconds):
            self.now, self.step = self.now + 1.0, self.step + 1
            then()
            self.overdue.look(self.client, self.step)
            try:
                self.failures.raise_pending()
            except DeadlineError as exc:
                assert exc.rank == 3 and exc.step == self.step
                raised.append(exc.message)
        return raised


def test_silence_is_told_once_for_each_time_that_it_lasts() -> None:
    training = Training()
    assert training.train(30) == []
    [text] = training.train(2)
    assert text == "no save by time was announced or became durable for 30 s"
    assert training.train(29) == [] and len(training.train(4)) == 1
    assert training.failures.num_failed == 2


def test_without_an_agent_it_is_told_too() -> None:
    training = Training()
    training.client.node_control = None
    assert len(training.train(35)) == 1

    def crash() -> None:  # one comes, and goes before it announces anything
        training.client.generation += 1
        training.client.node_control = NodeControl.create()

    assert len(training.train(35, crash)) == 1


def test_without_saves_by_time_it_is_quiet() -> None:
    assert Training(every_seconds=None).train(1000) == []


def test_news_of_saves_are_no_silence() -> None:
    training = Training()
    assert training.train(25) == []
    training.node_control.announce(training.step + 2)
    assert training.train(30) == []
    training.failures.committed()
    assert training.train(29) == []
    training.client.generation += 1  # another agent, which announces its first one
    training.client.node_control = NodeControl.create()
    training.client.node_control.announce(training.step + 1)
    assert training.train(29) == []
    training.failures.add(CommitError("a save failed"), raised=True)
    assert training.train(29) == [] and len(training.train(3)) == 1


def test_an_announcement_that_lies_ahead_is_the_trainers_turn() -> None:
    training = Training()
    training.node_control.announce(200)
    assert training.train(200) == []


def test_a_pause_of_training_and_long_steps_are_no_silence() -> None:
    training = Training()
    assert training.train(29) == []
    training.now += 3600.0  # stopped, and the agent perhaps with it
    assert training.train(29) == []
    for _ in range(10):
        training.now += 20.0
        assert training.train(1) == []


def test_saves_go_on_as_soon_as_an_agent_can_be_had(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "COME_BACK_PAUSE_S", 0.02)
    real, refusals = client_module.connect_or_start, iter(range(3))

    def connect(*args: Any, **more: Any) -> Any:
        if next(refusals, None) is not None:
            raise AgentUnavailableError("no agent can be started now")
        return real(*args, **more)

    state = {"w": torch.zeros(3)}
    with make(every="0.1s") as ckpt:
        ckpt.save(1, state).wait()
        monkeypatch.setattr(client_module, "connect_or_start", connect)
        old = ckpt._run.client.agent_pid
        os.kill(old, signal.SIGKILL)
        deadline, step, handle = time.monotonic() + 20.0, 1, None
        while handle is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            step += 1
            handle = ckpt.step(step, state) if ckpt._run.client.agent_pid != old else None
        handle.wait()
        assert next(refusals, None) is None


def test_a_hanging_agent_is_told_of(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    with make(every="0.1s", flush_timeout_s=0.5, request_timeout_s=0.3) as ckpt:
        ckpt.step(1, state)
        os.kill(ckpt._run.client.agent_pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError):
                for step in range(2, 500):
                    ckpt.step(step, state)
                    time.sleep(0.01)
        finally:
            os.kill(ckpt._run.client.agent_pid, signal.SIGCONT)


def test_closed_while_another_agent_is_looked_for_nothing_stays_connected(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reached, go = client_module.connect_or_start, threading.Event(), threading.Event()

    def connect(*args: Any, **more: Any) -> Any:
        reached.set()
        assert go.wait(10.0)
        return real(*args, **more)

    ckpt = make()
    ckpt.save(1, {"w": torch.zeros(3)}).wait()
    monkeypatch.setattr(client_module, "connect_or_start", connect)
    os.kill(ckpt._run.client.agent_pid, signal.SIGKILL)
    assert reached.wait(10.0)
    ckpt.close()
    go.set()
    for thread in threading.enumerate():
        if thread.name in ("safehold-reconnect", "safehold-agent"):
            thread.join(10.0)
            assert not thread.is_alive()
    assert not ckpt._run.client.alive
