"""What a save that failed must not leave behind, and how long waiting for one takes at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import steps_in

import safehold
from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import CheckpointError, CommitError, ConfigurationError, DeadlineError, StorageError
from safehold.policy import settlement
from safehold.trainer.failures import Failures
from safehold.trainer.handles import SaveHandle, wait_all

Make = Callable[..., safehold.Checkpointer]


def failed(ckpt: safehold.Checkpointer, step: int) -> SaveHandle:
    """Have a save fail: something is in the way of its directory."""
    directory = Path(ckpt.path) / "checkpoints"
    directory.mkdir(exist_ok=True)
    in_the_way = directory / f"{step:09d}"
    in_the_way.write_bytes(b"")
    handle = ckpt.save(step, {"w": torch.zeros(3)})
    deadline = time.monotonic() + 20.0
    while not handle.failed:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    in_the_way.unlink()
    return handle


def test_a_failed_save_is_not_the_newest(make: Make) -> None:
    with make(on_failure="warn") as ckpt:
        ckpt.save(90, {"w": torch.zeros(3)}).wait()
        handle = failed(ckpt, 101)
        ckpt.save(95, {"w": torch.zeros(3)}).wait()
        with pytest.raises(ConfigurationError, match="step 94 comes before step 95"):
            ckpt.save(94, {"w": torch.zeros(3)})
        with pytest.raises(CheckpointError):
            handle.wait()


def test_steps_in_flight_count(make: Make) -> None:
    with make() as ckpt:
        handle = ckpt.save(9, {"w": torch.zeros(1 << 20)})
        with pytest.raises(ConfigurationError, match="step 8 comes before step 9"):
            ckpt.save(8, {"w": torch.zeros(3)})
        handle.wait()


def test_the_last_save_is_done_before_an_older_failure_is_raised(make: Make) -> None:
    with make() as ckpt:
        failed(ckpt, 1)
        with pytest.raises(StorageError):
            ckpt.save(2, {"w": torch.zeros(3)}, final=True)
        ckpt.wait()
        assert steps_in(ckpt) == [2]


def test_only_what_is_durable_counts_as_compared(make: Make) -> None:
    with make(on_failure="warn") as ckpt:
        assert ckpt._saver is not None
        handle = failed(ckpt, 1)
        assert ckpt._saver._planner._compared_with is None
        ckpt.save(2, {"w": torch.zeros(3)}).wait()
        assert ckpt._saver._planner._compared_with is not None
        with pytest.raises(CheckpointError):
            handle.wait()


def test_what_is_staged_in_waves_is_not_compared(make: Make) -> None:
    with make(memory_budget_bytes=8 << 20, flush_block_bytes=1 << 20) as ckpt:
        assert ckpt._saver is not None
        ckpt.save(1, {"w": torch.zeros(5 << 20)}).wait()
        assert ckpt._saver._planner._compared_with is None


class StuckTicket:
    """A staging beside training that does not end."""

    settled = False
    cancelled = False

    def finish(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 5.0))
        raise DeadlineError("staging did not end")

    def cancel(self, error: CheckpointError) -> bool:
        self.cancelled = True
        return True


def test_wait_and_close_take_no_longer_than_they_were_given(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = make(stage_timeout_s=60.0)
    assert ckpt._saver is not None
    joined: list[float] = []
    monkeypatch.setattr(ckpt._saver._preparing, "join", lambda timeout_s: joined.append(timeout_s) or True)
    ticket: Any = StuckTicket()
    ckpt._saver._arena._open = (ticket, SaveHandle(1, 0, flush_timeout_s=1.0))
    begun = time.monotonic()
    ckpt.wait(0.1)
    assert not ticket.cancelled, "nor is it given up by somebody who only waits"
    ckpt.close(0.3)
    assert time.monotonic() - begun < 3.0 and ticket.cancelled
    assert all(timeout_s <= 0.3 for timeout_s in joined)


def test_all_are_waited_for_within_one_limit() -> None:
    handles = [SaveHandle(step, 0, flush_timeout_s=60.0) for step in range(3)]
    handles[2]._advance("durable")
    begun = time.monotonic()
    late = wait_all(handles, 0.1)
    assert late is not None and late.step == 0 and time.monotonic() - begun < 2.0
    assert wait_all(handles[2:], 0.0) is None


def test_a_settlement_that_says_the_same_changes_no_layout(make: Make) -> None:
    """It comes between `prepare` and the first save, which would lay out anew while training waits."""
    with make() as ckpt:
        saver = ckpt._saver
        assert saver is not None
        leaves = saver.collect({"w": torch.zeros(3)})
        prepared = saver._lay_out(leaves)
        saver._take_settlement(m.Settled(settlement.to_wire(settlement.Settlement())))
        assert saver._lay_out(leaves) is prepared
        spec = leaves.tensors[0].spec
        saver._take_settlement(m.Settled(settlement.to_wire(settlement.Settlement(((0,),), {spec: 0}))))
        assert saver._lay_out(leaves) is not prepared


class SavesInside:
    """Its `state_dict` is where a signal arrives, or another thread saves too."""

    def __init__(self, save: Callable[[], Any]) -> None:
        self.save, self.raised = save, list[Exception]()

    def state_dict(self) -> dict[str, int]:
        try:
            self.save()
        except CheckpointError as exc:
            self.raised.append(exc)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_save_in_the_middle_of_another_is_refused_at_once(make: Make, in_thread: bool) -> None:
    with make() as ckpt:

        def save() -> None:
            ckpt.save(2, {"w": torch.zeros(3)})

        def save_in_thread() -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(save).result(10.0)

        inside = SavesInside(save_in_thread if in_thread else save)
        ckpt.save(1, {"w": torch.zeros(3), "inside": inside}).wait()
        (error,) = inside.raised
        assert isinstance(error, ConfigurationError) and "in a signal handler set a flag" in str(error)
        save()
        ckpt.wait()
        assert steps_in(ckpt) == [1, 2]


def test_a_save_that_was_interrupted_keeps_no_other_out(make: Make) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with make() as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, {"w": torch.zeros(3), "inside": SavesInside(interrupt)})
        ckpt.save(2, {"w": torch.zeros(3)}).wait()
        assert steps_in(ckpt) == [2]


def test_a_failure_is_noted_before_anybody_who_waits_for_the_save_wakes_up() -> None:
    """Else `close` could pass between the two, and say nothing."""
    seen: list[tuple[str, int]] = []
    failures = Failures(Config())
    handle = SaveHandle(3, 0, flush_timeout_s=1.0)
    error = CommitError("lost", step=3)

    def noted() -> None:
        failures.add(error)
        seen.append((handle.state, failures.num_failed))

    assert handle._advance("failed", error=error, before=noted)
    assert not handle._advance("failed", error=error, before=noted), "once"
    assert seen == [("staging", 1)] and handle.state == "failed"
