"""Classes of schedules, loaders and other objects with `state_dict`: saved by name, compared before anything is filled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as sched

from safehold.errors import StateMismatchError
from safehold.state.class_names import class_of
from safehold.state.collect import collect
from safehold.state.declare import Parts, PerRank
from safehold.state.leaves import RestoreOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from state_checkpoint import MemoryCheckpoint


def saved(*states: Any, classes: bool = True) -> MemoryCheckpoint:
    leaves = [collect(s, rank=r, world_size=len(states), random_states=False) for r, s in enumerate(states)]
    for one in leaves:
        one.objects = [leaf for leaf in one.objects if classes or not leaf.spec.name.startswith("__safehold__")]
    return MemoryCheckpoint(leaves)


class Loader:
    """An object with a state dict."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, given: Any) -> None:
        self.given = given


class Wrapped(Loader):
    """Another one."""


def training(kind: Any, **options: Any) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return {"w": parameter, "optimizer": optimizer, "schedule": kind(optimizer, **options)}


def test_another_schedule_is_refused_by_name_before_anything_is_filled() -> None:
    source = training(sched.StepLR, step_size=2)
    with torch.no_grad():
        source["w"].fill_(5)
    target = training(sched.CosineAnnealingLR, T_max=7)
    words = r"different \(1\):\n\s+schedule: saved from the class StepLR, the state has the class CosineAnnealingLR"
    with pytest.raises(StateMismatchError, match=words):
        saved(source).restore(target)
    assert not target["w"].any() and not hasattr(target["schedule"], "step_size")
    same = training(sched.StepLR, step_size=9)
    saved(source).restore(same)
    assert same["w"].all() and same["schedule"].step_size == 2


def test_the_schedules_inside_of_a_schedule_count() -> None:
    def two(second: Any, **options: Any) -> Any:
        return training(lambda o: sched.SequentialLR(o, [sched.ConstantLR(o), second(o, **options)], milestones=[3]))

    source = two(sched.ExponentialLR, gamma=0.9)
    assert class_of(source["schedule"]) == "SequentialLR(ConstantLR, ExponentialLR)"
    with pytest.raises(StateMismatchError, match=r"the class SequentialLR\(ConstantLR, StepLR\)"):
        saved(source).restore(two(sched.StepLR, step_size=4))
    saved(source).restore(two(sched.ExponentialLR, gamma=0.5))


@pytest.mark.parametrize("partial", [True, "data", ["other", "dat?"]])
def test_a_class_that_was_renamed_or_wrapped_is_let_in_by_partial(partial: Any) -> None:
    checkpoint = saved({"data": Loader({"at": 3, "t": torch.ones(1)})})
    target = Wrapped({"at": 0, "t": torch.zeros(1)})
    with pytest.raises(StateMismatchError, match="class Loader, the state has the class Wrapped"):
        checkpoint.restore({"data": target}, options=RestoreOptions(partial=["data.*"]))
    checkpoint.restore({"data": target}, options=RestoreOptions(partial=partial))
    assert target.given["at"] == 3 and target.given["t"] == 1


def test_the_class_goes_with_its_object_when_that_is_renamed() -> None:
    checkpoint = saved({"train": {"data": Loader({"n": [1], "t": torch.ones(1)})}})

    def only_leaves(name: str) -> str:
        return {"train.data.n": "data.n", "train.data.t": "data.t"}[name]

    for rename in ({"train": ""}, {"train.data": "data"}, only_leaves):
        options = RestoreOptions(rename=rename)
        checkpoint.restore({"data": Loader({"t": torch.zeros(1)})}, options=options)
        with pytest.raises(StateMismatchError, match="class Loader"):
            checkpoint.restore({"data": Wrapped({"t": torch.zeros(1)})}, options=options)


def test_per_rank_objects_have_their_classes_on_any_number_of_ranks() -> None:
    checkpoint = saved(*({"data": PerRank(Loader({"at": rank}), policy="first")} for rank in range(3)))
    for rank, world_size in ((1, 3), (0, 1), (3, 4)):
        target = Loader(None)
        checkpoint.restore({"data": PerRank(target, policy="first")}, rank=rank, world_size=world_size)
        assert target.given == {"at": rank if world_size == 3 else 0}
        with pytest.raises(StateMismatchError, match="class Loader"):
            checkpoint.restore({"data": PerRank(Wrapped(None), policy="first")}, rank=rank, world_size=world_size)
    plain = PerRank(None, policy="first")
    checkpoint.restore({"data": plain}, rank=2, world_size=3)
    assert plain.value == {"at": 2}


def test_checkpoints_without_classes_load() -> None:
    checkpoint = saved(training(sched.StepLR, step_size=2), classes=False)
    target = training(sched.CosineAnnealingLR, T_max=7)
    checkpoint.restore(target)
    assert target["schedule"].step_size == 2


def test_parts_of_one_name_and_of_several_classes_have_none() -> None:
    parts = Parts([Loader({"a": torch.ones(1)}), Wrapped({"b": torch.ones(1)})])
    leaves = collect({"data": parts}, rank=0, world_size=1, random_states=False)
    assert [leaf.spec.name for leaf in leaves.objects] == []
    leaves = collect({"data": Parts([Loader({"a": torch.ones(1)})])}, rank=0, world_size=1, random_states=False)
    assert [(leaf.spec.name, leaf.value) for leaf in leaves.objects] == [("__safehold__.class.data", "Loader")]


@pytest.mark.parametrize("partial", [True, "optimizer", "optimizer.groups"])
def test_partial_lets_another_optimizer_in_but_not_groups_that_fit_nowhere(partial: Any) -> None:
    def state(kind: Any, *sizes: int) -> dict[str, Any]:
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        return {"optimizer": kind([{"params": [p]} for p in parameters], lr=0.5), "w": torch.zeros(1)}

    checkpoint = saved(state(torch.optim.SGD, 1, 2) | {"w": torch.ones(1)})
    options = RestoreOptions(partial=partial)
    target = state(torch.optim.Adam, 1, 2)
    with pytest.raises(
        StateMismatchError, match=r"optimizer\.groups: saved from the optimizer SGD, the state has Adam"
    ):
        checkpoint.restore(target)
    checkpoint.restore(target, options=options)
    assert target["w"] == 1 and target["optimizer"].param_groups[0]["lr"] == 0.5
    module = torch.nn.Linear(1, 1)
    unlike = {"m": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "w": torch.zeros(1)}
    with pytest.raises(StateMismatchError, match="the optimizer has 1 parameter group, the checkpoint has 2"):
        checkpoint.restore(unlike, options=options)
    assert unlike["w"] == 0
