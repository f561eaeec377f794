"""The object that a training loop holds, in one process with its real agent and flusher."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Training, same, steps_in

import safehold
from safehold.errors import (
    AgentUnavailableError,
    ConfigurationError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
    UnsupportedStateError,
)
from safehold.pipeline.catalog import Catalog
from safehold.tiers.open import open_tier

Make = Callable[..., safehold.Checkpointer]


def num_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# -- saving and restoring --------------------------------------------------------------------------------------------------


def test_save_wait_restore(make: Make) -> None:
    training = Training()
    training.step()
    with make() as ckpt:
        assert ckpt.restore(training.state) is None
        handle = ckpt.save(1, training.state)
        wanted = training.digest()
        training.step()
        handle.wait()
        assert handle.durable and handle.figures.bytes > 0 and handle.figures.window_s > 0
        state = training.state
        assert ckpt.restore(state) == 1 and same(training.digest(), wanted) and state["counter"] == 1
        assert ckpt.last_restore is not None and ckpt.last_restore.source == "memory"
    other = Training()
    with make() as ckpt:
        assert ckpt.incarnation == 2
        assert ckpt.restore(other.state) == 1 and same(other.digest(), wanted)


def test_restore_of_an_older_step_goes_on_from_there(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    with make(keep=10) as ckpt:
        for step in range(1, 5):
            state["w"] += 1
            handle = ckpt.save(step, state)
        handle.wait()
        assert ckpt.restore(state, 2) == 2 and state["w"].tolist() == [2.0] * 3 and ckpt.incarnation == 2
        with pytest.raises(StepNotFoundError):
            ckpt.restore(state, 4)
        state["w"] += 10
        ckpt.save(3, state).wait()
        assert steps_in(ckpt) == [1, 2, 3]
        assert ckpt.restore(state) == 3 and state["w"].tolist() == [12.0] * 3


def test_a_restore_finds_what_is_still_being_saved(make: Make) -> None:
    state = {"w": torch.zeros(1 << 20)}
    with make() as ckpt:
        ckpt.save(1, state).wait()
        state["w"] += 1
        ckpt.save(2, state)
        assert ckpt.restore(state) == 2
        assert ckpt.restore(state, 1) == 1 and state["w"].sum() == 0
        ckpt.save(2, state).wait()


def test_what_does_not_fit_is_listed_and_nothing_is_touched(make: Make) -> None:
    with make() as ckpt:
        ckpt.save(1, {"a": torch.zeros(3), "b": torch.zeros(3)}).wait()
        wrong = {"a": torch.ones(4), "c": torch.ones(3)}
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(wrong)
        text = str(caught.value)
        assert all(f"{name}" in text for name in ("a", "b", "c")) and "partly" not in text
        assert wrong["a"].sum() == 4
        right = {"a": torch.ones(3), "b": torch.ones(3)}
        assert ckpt.restore(right) == 1 and right["a"].sum() == 0, "and the next one works"


def test_an_error_that_is_none_of_ours_is_raised_as_it_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from safehold.trainer import restorer

    state = {"w": torch.zeros(3)}
    with make() as ckpt:
        ckpt.save(1, state).wait()
        for name in ("bind_for_restore", "Reading"):
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(restorer, name, lambda *args, **more: 1 / 0)
                ckpt.restore(state)
        assert ckpt.restore(state) == 1


# -- when ------------------------------------------------------------------------------------------------------------------


def test_every_so_many_steps(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    with make(every=3, keep=10) as ckpt:
        handles = {step: ckpt.step(step, state) for step in range(1, 8)}
        assert [step for step, handle in handles.items() if handle is not None] == [3, 6]
        ckpt.wait()
        assert steps_in(ckpt) == [3, 6]
        assert ckpt.step(20, state) is not None, "steps may be left out"
        assert ckpt.step(20, state) is None
    with make(every=3, keep=10) as ckpt:
        assert ckpt.restore(state, 6) == 6
        assert ckpt.step(6, state) is None and ckpt.step(7, state) is None and ckpt.step(9, state) is not None


def test_by_time(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    with make(every="0.4s", keep=50) as ckpt:
        step, handles = 0, []
        deadline = time.monotonic() + 20.0
        while len(handles) < 2:
            assert time.monotonic() < deadline
            step += 3
            if (handle := ckpt.step(step, state)) is not None:
                handles.append(handle)
            time.sleep(0.01)
        for handle in handles:
            handle.wait()
        assert steps_in(ckpt) == [handle.step for handle in handles]


def test_retention_by_count_and_metric(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    keep = safehold.Keep(last=1, best=safehold.Best(metric="loss", mode="min", count=1))
    with make(keep=keep) as ckpt:
        for step, loss in enumerate((3.0, 1.0, 2.0, 5.0), start=1):
            ckpt.save(step, state, metrics={"loss": loss}).wait()
        deadline = time.monotonic() + 10.0
        while steps_in(ckpt) != [2, 4]:
            assert time.monotonic() < deadline, steps_in(ckpt)
            time.sleep(0.02)


def test_final_overwrite_and_wrong_steps(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    with make(keep=1) as ckpt:
        ckpt.save(1, state, final=True).wait()
        with pytest.raises(ConfigurationError, match="committed already"):
            ckpt.save(1, state)
        state["w"] += 1
        ckpt.save(1, state, overwrite=True).wait()
        state["w"] += 1
        assert ckpt.restore(state) == 1 and state["w"].tolist() == [1.0] * 3
        for step in (-1, 1.5, "1", 1 << 41):
            with pytest.raises(ConfigurationError, match="a step is"):
                ckpt.save(step, state)  # type: ignore[arg-type]
    [view] = [view for view in Catalog(open_tier(ckpt.path)).commits() if view.commit.attempt == 0] or [None]
    assert view is None or view.manifest is not None


def test_prepare_settles_everything_ahead(make: Make) -> None:
    training = Training()
    with make() as ckpt:
        ckpt.prepare(training.state)
        assert len(ckpt._run.arenas) == 1
        [arena] = ckpt._run.arenas.values()
        training.step()
        ckpt.save(1, training.state).wait()
        assert list(ckpt._run.arenas.values()) == [arena], "large enough for states that the optimizer had not made yet"


def test_layouts_that_change_at_every_save(make: Make) -> None:
    with make() as ckpt:
        for step in range(1, 12):
            state = {f"w{step}": torch.full((step * 100,), float(step)), "same": torch.ones(10)}
            ckpt.save(step, state).wait()
        back = {"w11": torch.zeros(1100), "same": torch.zeros(10)}
        assert ckpt.restore(back) == 11 and back["w11"].sum() == 12100.0
        before = num_fds()
        for step in range(20, 26):
            ckpt.save(step, {"large": torch.ones(step * 10_000)}).wait()
        assert num_fds() <= before + 1 and len(ckpt._run.retired) == 0


# -- failures --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_named_and_training_goes_on(make: Make) -> None:
    with make() as ckpt:
        with pytest.raises(UnsupportedStateError, match="oops"):
            ckpt.save(1, {"oops": threading.Lock()})
        assert ckpt.num_failed == 1
        ckpt.save(2, {"w": torch.zeros(3)}).wait()


def test_a_background_failure_is_raised_once_at_the_next_call(make: Make, tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    with make() as ckpt:
        run = Path(ckpt.path)
        ckpt.save(1, state).wait()
        (run / "checkpoints").rename(tmp_path / "elsewhere")
        (run / "checkpoints").write_bytes(b"in the way")
        handle = ckpt.save(2, state)
        deadline = time.monotonic() + 20.0
        while not handle.failed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(StorageError):
            ckpt.step(3, state)
        ckpt.step(4, state)
        with pytest.raises(StorageError):
            ckpt.save(5, state).wait()
        ckpt.step(6, state)
        (run / "checkpoints").unlink()
        (tmp_path / "elsewhere").rename(run / "checkpoints")
        ckpt.save(7, state).wait()
        assert ckpt.num_failed == 2


def test_an_interrupted_save_leaves_nothing_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from safehold.trainer import saver

    state = {"w": torch.zeros(3)}
    with make() as ckpt:
        ckpt.save(1, state).wait()
        encode = saver.encode_objects

        def interrupted(leaves: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(saver, "encode_objects", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(2, state)
        monkeypatch.setattr(saver, "encode_objects", encode)
        assert ckpt._saver is not None and ckpt._saver.open_handles() == []
        ckpt.save(2, state).wait()
        assert steps_in(ckpt) == [1, 2]


def test_an_agent_that_dies_is_replaced_and_nothing_is_raised(make: Make) -> None:
    state = {"w": torch.zeros(3)}
    with make() as ckpt:
        ckpt.save(1, state).wait()
        old = ckpt._run.client.agent_pid
        os.kill(old, signal.SIGKILL)
        deadline = time.monotonic() + 20.0
        while ckpt._run.client.agent_pid == old or not ckpt._run.client.alive:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ckpt.step(2, state)
        ckpt.save(3, state).wait()
        assert ckpt.restore(state) == 3 and ckpt.incarnation == 1


def test_too_small_a_budget_stages_in_waves(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.arange(5 << 20, dtype=torch.float32)}
    with make(memory_budget_bytes=8 << 20, flush_block_bytes=1 << 20) as ckpt:
        ckpt.save(1, state).wait()
        ckpt.save(2, state).wait()
        assert caplog.text.count("staged in waves") == 1
        wanted = state["w"].clone()
        state["w"] += 1
        assert ckpt.restore(state) == 2 and torch.equal(state["w"], wanted)
        assert ckpt.last_restore is not None and ckpt.last_restore.source == "flash"


def test_large_objects_travel_whole(make: Make) -> None:
    blob = os.urandom(3 << 20)
    with make() as ckpt:
        ckpt.save(1, {"blob": blob}).wait()
        back: dict[str, Any] = {"blob": b""}
        assert ckpt.restore(back) == 1 and back["blob"] == blob


# -- the end ---------------------------------------------------------------------------------------------------------------


def test_close_drains_and_may_be_called_twice(make: Make) -> None:
    before = num_fds()
    ckpt = make()
    handle = ckpt.save(1, {"w": torch.zeros(1 << 20)})
    ckpt.close()
    assert handle.durable
    ckpt.close()
    for use in (lambda: ckpt.save(2, {}), lambda: ckpt.step(2, {}), lambda: ckpt.restore({}), lambda: ckpt.prepare({})):
        with pytest.raises(ConfigurationError, match="closed"):
            use()
    assert num_fds() <= before


def test_an_error_in_the_block_is_not_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), make() as ckpt:
        handle = ckpt.save(1, {"w": torch.zeros(3)})
        monkeypatch.setattr(ckpt, "wait", lambda *_, **__: (_ for _ in ()).throw(StorageError("no")))
        raise ZeroDivisionError
    assert handle.step == 1 and ckpt._closed


def test_a_constructor_that_fails_late_leaves_the_agent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from safehold import checkpointer

    monkeypatch.setattr(checkpointer, "open_flash", lambda *args, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make()
    monkeypatch.undo()
    threads = [thread for thread in threading.enumerate() if thread.name == "safehold-agent"]
    for thread in threads:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in threads)


def test_a_forked_child_is_refused_and_does_not_close_it(make: Make) -> None:
    with make() as ckpt:
        ckpt.save(1, {"w": torch.zeros(3)}).wait()
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: ckpt.save(2, {}), lambda: ckpt.restore({}), ckpt.wait):
                try:
                    use()
                except ConfigurationError:
                    refused += 1
            ckpt.close()
            ckpt._at_exit()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        ckpt.save(2, {"w": torch.zeros(3)}).wait()


def test_an_agent_that_died_too_often_is_raised(make: Make) -> None:
    with make(max_failures=2) as ckpt:
        for _ in range(2):
            ckpt._failures.add(AgentUnavailableError("died"))
        with pytest.raises(AgentUnavailableError):
            ckpt.step(1, {})
