"""Restoring objects with `state_dict`: one call, the saved structure, the template's tensors and types."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.optim.lr_scheduler as sched

from safehold.errors import StateMismatchError
from safehold.state.collect import collect

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from state_checkpoint import MemoryCheckpoint

Pair = collections.namedtuple("Pair", "left right")


def saved(*states: Any) -> MemoryCheckpoint:
    world_size = len(states)
    return MemoryCheckpoint(
        [collect(state, rank=rank, world_size=world_size, random_states=False) for rank, state in enumerate(states)]
    )


class Holder:
    """Any object with a state dict."""

    def __init__(self, given: Any = None) -> None:
        self.given = given
        self.loaded: list[Any] = []

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, given: Any) -> None:
        self.loaded.append(given)


def test_stateful_objects_get_the_saved_structure_in_one_call() -> None:
    given = {
        "b": {"list": [torch.ones(2), 3, {"x": np.arange(2)}], "t": (torch.zeros(1),), "empty": {}},
        "a": 1,
        5: "five",
    }
    checkpoint = saved({"s": Holder(given)})
    mine = torch.zeros(2)
    template = Holder({"b": {"list": [mine]}, "other": torch.ones(9)})
    checkpoint.restore({"s": template})
    [found] = template.loaded
    assert found["b"]["list"][0] is mine and mine.all()
    assert found["b"]["list"][1] == 3 and found["b"]["list"][2]["x"].tolist() == [0, 1]
    assert type(found["b"]["t"]) is tuple and found["b"]["empty"] == {} and found[5] == "five" and found["a"] == 1
    plain = Holder(None)
    saved({"s": Holder({"n": [1, 2]})}).restore({"s": plain})
    assert plain.loaded == [{"n": [1, 2]}]
    with pytest.raises(StateMismatchError, match=r"missing.*\n\s+s\b"):
        saved({}).restore({"s": Holder({"t": torch.ones(1)})})


def test_data_loaders_are_not_asked_for_their_state_before_it_is_restored() -> None:
    class Loader(Holder):
        def state_dict(self) -> Any:
            if self.given is None:
                raise AssertionError("started its workers")
            return self.given

    class Iterable(Loader):
        def __iter__(self) -> Any:
            return iter(())

    for template, given in ((Loader(), {"at": 3}), (Iterable(), {"at": 3, "rng": torch.ones(2)})):
        source = type(template)(given)
        saved({"data": source}).restore({"data": template})
        assert template.loaded[0]["at"] == 3


def test_template_types_are_kept_where_bytes_cannot_say_them() -> None:
    def given(value: float) -> Any:
        return collections.OrderedDict(z=torch.full((1,), value), a=Pair(torch.full((1,), value), 2))

    template = Holder(given(0))
    saved({"s": Holder(given(3))}).restore({"s": template})
    [found] = template.loaded
    assert list(found) == ["z", "a"] and type(found) is collections.OrderedDict
    assert type(found["a"]) is Pair and found["a"].left == 3


def test_a_refusing_load_state_dict_is_named() -> None:
    class Refuses(Holder):
        def load_state_dict(self, given: Any) -> None:
            raise KeyError("epoch")

    with pytest.raises(StateMismatchError, match=r"^s: load_state_dict\(\) of .*Refuses.*epoch"):
        saved({"s": Refuses({"n": 1})}).restore({"s": Refuses({"n": 0})})


def test_loss_scalers_are_restored_from_device_tensors() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler._growth_tracker.fill_(3)
    for used in (True, False):
        target = torch.amp.GradScaler("cpu", init_scale=2.0)
        if used:
            target.scale(torch.ones(1))
        saved({"s": scaler}).restore({"s": target})
        assert target.get_scale() == 8.0
        target.scale(torch.ones(1))
        assert target.state_dict() == scaler.state_dict()
    unused, target = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    target.scale(torch.ones(1))
    saved({"s": unused}).restore({"s": target})
    assert target.get_scale() == 8.0


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: sched.LambdaLR(o, lambda step: 1 / (step + 1)),
    "multistep": lambda o: sched.MultiStepLR(o, [1, 3]),
    "one cycle": lambda o: sched.OneCycleLR(o, max_lr=1.0, total_steps=10),
    "cyclic": lambda o: sched.CyclicLR(o, 0.1, 0.5),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=0),
    "warm restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: sched.SequentialLR(o, [sched.ConstantLR(o), sched.ExponentialLR(o, 0.9)], [2]),
    "chained": lambda o: sched.ChainedScheduler([sched.ConstantLR(o), sched.PolynomialLR(o)]),
    "averages": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_if_nothing_had_happened(name: str) -> None:
    def run(state: Any, steps: int) -> list[float]:
        rates = []
        for step in range(steps):
            state["o"].step()
            state["s"].step(*([float(step)] if name == "plateau" else []))
            rates.append(state["o"].param_groups[0]["lr"])
        return rates

    def fresh() -> dict[str, Any]:
        module = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return {"m": module, "o": optimizer, "s": SCHEDULERS[name](optimizer)}

    source, target = fresh(), fresh()
    run(source, 3)
    checkpoint = saved(source)
    expected = run(source, 4)
    checkpoint.restore(target)
    assert run(target, 4) == expected
