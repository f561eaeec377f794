"""Getting an arena ready in the background: what fails is told, nothing is done twice, and nothing waits for ever."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError, StorageFullError
from safehold.host import memfd
from safehold.state.collect import collect
from safehold.state.leaves import Leaves
from safehold.trainer import arena as arena_module
from safehold.trainer import collector
from safehold.trainer.arena import ArenaWriter
from safehold.trainer.connection import Run
from safehold.trainer.preparing import Preparing, leaves_of

SIZE = 64 << 10


@pytest.fixture
def run() -> Run:
    client: Any = SimpleNamespace(generation=1, rank=0, control=None, closed=False)
    return Run(client=client, world=None, run_id="run", newest_step=None, notes=[])  # type: ignore[arg-type]


@pytest.fixture
def writer(run: Run) -> ArenaWriter:
    return ArenaWriter(run, Config())


@pytest.fixture
def preparing(run: Run, writer: ArenaWriter) -> Preparing:
    return Preparing(run, writer, Config(start_timeout_s=5.0))


def some_leaves() -> Leaves:
    return collect({"w": np.arange(1000.0), "a": np.zeros(3)}, rank=0, world_size=1, random_states=False)


@pytest.mark.parametrize(
    "error", [StorageFullError("no memory"), OSError(12, "Cannot allocate memory"), ValueError("x")]
)
def test_a_failure_is_raised_to_who_waits_and_logged(
    preparing: Preparing, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        raise error

    preparing.start(work)
    with pytest.raises(CheckpointError, match=str(getattr(error, "message", error)).replace("[", r"\[")):
        preparing.wait(5.0)
    assert "preparing for saves failed" in caplog.text
    preparing.start(lambda: None)
    preparing.wait(5.0)


def test_waiting_has_an_end(preparing: Preparing) -> None:
    go_on = threading.Event()
    preparing.start(lambda: go_on.wait(10) and None)
    assert not preparing.idle
    with pytest.raises(ConfigurationError, match=r"longer than 0[.]05 s"):
        preparing.wait(0.05)
    go_on.set()
    assert preparing.join(5.0) and preparing.idle


def test_one_after_the_other(preparing: Preparing) -> None:
    order: list[str] = []
    go_on = threading.Event()
    preparing.start(lambda: (go_on.wait(10), order.append("first"))[1])
    preparing.start(lambda: order.append("second"))
    time.sleep(0.05)
    assert order == []
    go_on.set()
    preparing.wait(5.0)
    assert order == ["first", "second"]


def test_an_arena_is_ready_once_it_is_populated_unless_it_is_on_its_way_out(run: Run, writer: ArenaWriter) -> None:
    first = writer.map(m.Granted(1, 1, SIZE), [memfd.create(SIZE, "arena")])
    assert not writer.is_ready(first)
    writer.make_ready(first, some_leaves())
    assert writer.is_ready(first)
    second = writer.map(m.Granted(2, 2, SIZE), [memfd.create(SIZE, "arena")])
    assert first in run.retired and not writer.is_ready(second)
    run.retired.append(second)
    writer.make_ready(second, some_leaves())
    assert not writer.is_ready(second)
    writer.close()


def test_two_threads_get_one_device(writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = arena_module.open_device

    def slow(views: Any) -> Any:
        time.sleep(0.05)
        made.append(real(views))
        return made[-1]

    monkeypatch.setattr(arena_module, "open_device", slow)
    leaves = some_leaves()
    threads = [threading.Thread(target=writer.numa_node, args=(leaves,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(made) == 1


def test_what_a_restore_bound_stands_for_the_state(preparing: Preparing) -> None:
    leaves = some_leaves()
    found = leaves_of([*reversed(leaves.tensors), leaves.tensors[0]])
    assert [leaf.spec.name for leaf in found.tensors] == ["a", "w"]


def test_the_collector_is_as_it_was() -> None:
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()
