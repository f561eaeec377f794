"""Staging beside training, with real optimizers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import Training, same, steps_in

import safehold
from safehold.errors import ConfigurationError, UnsupportedStateError

Make = Callable[..., safehold.Checkpointer]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("num_optimizers", [1, 3])
def test_overlap_saves_what_was_there_at_the_call(make: Make, num_optimizers: int, accumulate: int) -> None:
    training = Training(num_optimizers=num_optimizers, size=256)
    training.step()
    with make(overlap=True, keep=20) as ckpt:
        digests = {}
        for step in range(1, 6):
            ckpt.save(step, training.state)
            digests[step] = training.digest()
            training.step(accumulate=accumulate)
        ckpt.wait()
        for step in (5, 2):
            assert ckpt.restore(training.state, step) == step and same(training.digest(), digests[step])


def test_overlap_with_steps_inside_backward(make: Make) -> None:
    training = Training(size=128)
    [linear] = training.model
    training.optimizers = [torch.optim.AdamW([parameter], lr=0.1) for parameter in linear.parameters()]
    for optimizer, parameter in zip(training.optimizers, linear.parameters(), strict=True):

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    training.backward()
    with make(overlap=True) as ckpt:
        for number in range(1, 5):
            handle = ckpt.save(number, training.state)
            wanted = training.digest()
            training.backward()
            handle.wait()
            assert not same(training.digest(), wanted)
            training.backward()
        assert ckpt.restore(training.state) == 4 and same(training.digest(), wanted)


def test_overlap_without_another_step_ends_all_the_same(make: Make) -> None:
    training = Training(size=256)
    training.step()
    ckpt = make(overlap=True)
    handle = ckpt.save(1, training.state)
    ckpt.close()
    assert handle.durable and handle.figures.stage_s > 0


def test_overlap_needs_hooks_and_names_what_has_none(make: Make) -> None:
    class Plain:
        param_groups: list[Any] = []  # noqa: RUF012
        state: dict[Any, Any] = {}  # noqa: RUF012

        def step(self) -> None:
            pass

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Unhooked(torch.optim.SGD):
        step = Plain.step

    training = Training()
    with make(overlap=True) as ckpt:
        unhooked = Unhooked(training.model.parameters(), lr=0.1)
        if getattr(type(unhooked).step, "hooked", False):
            del type(unhooked).step.hooked
        with pytest.raises(ConfigurationError, match="Unhooked"):
            ckpt.save(1, {"model": training.model, "optimizer": unhooked})
        ckpt.save(1, training.state).wait()


def test_overlap_finds_what_changed_behind_the_optimizers_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from safehold.host.device_torch import TorchCopier

    training = Training(size=256)
    training.step()
    gate = threading.Event()
    copy = TorchCopier.copy

    def late(self: Any, pieces: Any) -> None:
        if threading.current_thread().name == "safehold-stage":
            gate.wait(10.0)
        copy(self, pieces)

    monkeypatch.setattr(TorchCopier, "copy", late)
    with make(overlap=True) as ckpt:
        handle = ckpt.save(1, training.state)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(2.0)
        gate.set()
        with pytest.raises(UnsupportedStateError, match="changed while"):
            handle.wait()
        assert steps_in(ckpt) == []
        ckpt.save(2, training.state).wait()
        assert steps_in(ckpt) == [2]


def test_a_second_save_waits_for_the_staging_of_the_first(make: Make) -> None:
    training = Training(size=512)
    training.step()
    with make(overlap=True) as ckpt:
        first, second = ckpt.save(1, training.state), ckpt.save(2, training.state)
        assert first.staged
        training.step()
        first.wait()
        second.wait()


def test_optimizers_that_are_exchanged_are_hooked_again(make: Make) -> None:
    training = Training()
    with make(overlap=True) as ckpt:
        ckpt.save(1, training.state).wait()
        old = training.optimizers[0]
        training.optimizers = [torch.optim.AdamW(training.model.parameters())]
        ckpt.save(2, training.state).wait()
        assert len(old._optimizer_step_pre_hooks) == 0
        assert len(training.optimizers[0]._optimizer_step_pre_hooks) == 1
    assert len(training.optimizers[0]._optimizer_step_pre_hooks) == 0
