"""Restoring optimizers: state is bound or created, attached at the end, and training goes on bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import as_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from safehold.errors import StateMismatchError
from safehold.state.modules import ParamNames, module_leaves
from safehold.state.optimizers import bind_optimizer_for_restore, optimizer_leaves
from safehold.state.protocols import OptimizerRestore, Path
from safehold.types import ObjectSpec, TensorSpec

PREFIX: Path = ("opt",)
Saved = tuple[dict[Path, torch.Tensor], dict[Path, Any]]


def named(model: Any) -> ParamNames:
    names = ParamNames()
    module_leaves(model, prefix=("net",), names=names)
    return names


def save(model: Any, optimizer: Any) -> Saved:
    """Return copies of everything, for tensors that this process holds whole."""
    tree = optimizer_leaves(optimizer, prefix=PREFIX, names=named(model))
    tensors = {}
    for tensor in tree.tensors:
        ((_, view),) = tensor.binding.pieces
        tensors[tensor.path] = view.clone()
    return tensors, {item.path: copy.deepcopy(item.read()) for item in tree.objects}


def bind(model: Any, optimizer: Any, saved: Saved) -> OptimizerRestore:
    tensors, objects = saved
    return bind_optimizer_for_restore(
        optimizer,
        prefix=PREFIX,
        names=named(model),
        saved_tensors={
            path: TensorSpec(name="x", dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
            for path, t in tensors.items()
        },
        saved_objects={path: ObjectSpec(name="x") for path in objects},
    )


def restore(model: Any, optimizer: Any, saved: Saved) -> OptimizerRestore:
    bound = bind(model, optimizer, saved)
    assert (bound.missing, bound.foreign, bound.mismatched) == ([], [], [])
    finish(bound, saved)
    return bound


def finish(bound: OptimizerRestore, saved: Saved) -> None:
    tensors, objects = saved
    with torch.no_grad():
        for tensor in bound.tensors:
            for rect, view in tensor.binding.pieces:
                index = tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))
                view.copy_(tensors[tensor.path][index])
    bound.attach()
    for item in bound.objects:
        item.write(copy.deepcopy(objects[item.path]))


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
    return losses


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw single": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stepped_before", [False, True])
def test_training_goes_on_bit_for_bit(name: str, stepped_before: bool) -> None:
    whole = model_of()
    optimizer = OPTIMIZERS[name](whole.parameters())
    losses = train(whole, optimizer, range(6))

    first = model_of()
    optimizer = OPTIMIZERS[name](first.parameters())
    train(first, optimizer, range(3))
    saved = save(first, optimizer)
    second = model_of(seed=1)
    fresh = OPTIMIZERS[name](second.parameters())
    if stepped_before:
        train(second, fresh, range(10, 11))
    second.load_state_dict(first.state_dict())
    before = len(fresh.state)
    bound = bind(second, fresh, saved)
    assert len(fresh.state) == before
    finish(bound, saved)
    again = save(second, fresh)
    assert all(torch.equal(again[0][path], tensor) for path, tensor in saved[0].items())
    assert again[1] == saved[1]
    assert train(second, fresh, range(3, 6)) == losses[3:]
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_existing_tensors_are_filled_in_place() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, range(1))
    saved = save(model, optimizer)
    held = {key: value for state in optimizer.state.values() for key, value in state.items()}
    train(model, optimizer, range(1, 2))
    bound = restore(model, optimizer, saved)
    assert len(bound.tensors) == len(saved[0])
    assert all(
        any(value is kept for state in optimizer.state.values() for value in state.values()) for kept in held.values()
    )


def test_absent_state_is_absent_afterwards() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    saved = save(model, optimizer)
    train(model, optimizer, range(1))
    restore(model, optimizer, saved)
    assert len(optimizer.state) == 0


def test_dtype_is_the_saved_one_and_counters_stay_on_the_host() -> None:
    model = model_of().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    param = model[0].weight
    saved: Saved = (
        {
            ("state", "net", "0", "weight", "exp_avg"): torch.randn(6, 4),
            ("state", "net", "0", "weight", "codes"): torch.randint(0, 255, (6, 4), dtype=torch.uint8),
            ("state", "net", "0", "weight", "step"): torch.tensor(3.0),
        },
        {("groups",): {"groups": [{"params": ["net.0.weight", "net.2.weight"], "values": {"lr": 0.5}}]}},
    )
    restore(model, optimizer, saved)
    state = optimizer.state[param]
    assert state["exp_avg"].dtype is torch.float32
    assert state["codes"].dtype is torch.uint8
    assert state["step"].device.type == "cpu"
    assert list(optimizer.state) == [param]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_where_counters_go() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    from safehold.state.modules import KnownPart
    from safehold.state.optimizer_restore import _Binder
    from safehold.state.optimizer_state import Member
    from safehold.state.protocols import TensorBinding

    part = KnownPart(fqn=("w",), binding=TensorBinding(shape=(2, 2), dtype="float32", pieces=()))
    for group, key, cls, expected in (
        ({}, "step", torch.optim.AdamW, "cpu"),
        ({"capturable": True}, "step", torch.optim.AdamW, "meta"),
        ({"fused": True}, "step", torch.optim.AdamW, "meta"),
        ({}, "mu_product", torch.optim.NAdam, "cpu"),
        ({}, "step", torch.optim.ASGD, "meta"),
        ({}, "eta", torch.optim.ASGD, "meta"),
    ):
        optimizer = cls([nn.Parameter(torch.zeros(1))])
        member = Member(param=model.weight, group=group, parts=(part,), named=True)
        binder = _Binder(optimizer=optimizer, prefix=(), names=ParamNames())
        assert binder._device(member, (key,)).type == expected, (group, key)


def test_order_of_parameters_and_groups_does_not_matter() -> None:
    model = model_of()
    a, b = model[0].weight, model[2].weight
    optimizer = torch.optim.AdamW([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}])
    train(model, optimizer, range(2))
    saved = save(model, optimizer)
    other = model_of(1)
    turned = torch.optim.AdamW([{"params": [other[2].weight], "lr": 1.0}, {"params": [other[0].weight], "lr": 2.0}])
    restore(other, turned, saved)
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.1]
    assert torch.equal(turned.state[other[0].weight]["exp_avg"], optimizer.state[a]["exp_avg"])
    joined = torch.optim.AdamW(other.parameters())
    with pytest.raises(StateMismatchError, match="different lr"):
        finish(bind(other, joined, saved), saved)


def test_how_it_computes_stays_the_templates() -> None:
    model = model_of()
    saved = save(model, torch.optim.AdamW(model.parameters(), foreach=True, lr=0.5, weight_decay=0.3))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    restore(model, optimizer, saved)
    assert optimizer.param_groups[0]["foreach"] is False
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_a_tensor_lr_stays_the_same_object() -> None:
    model = model_of()
    saved = save(model, torch.optim.AdamW(model.parameters(), lr=0.25))
    lr = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    restore(model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


def test_state_of_a_tied_parameter_is_found_under_any_of_its_names() -> None:
    def tied(*order: str) -> nn.ModuleDict:
        layer = nn.Linear(2, 2, bias=False)
        return nn.ModuleDict(dict.fromkeys(order, layer))

    model, other = tied("a", "b"), tied("b", "a")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model["a"].weight.grad = torch.ones(2, 2)
    optimizer.step()
    saved = save(model, optimizer)
    assert all("a" in path for path in saved[0])
    turned = torch.optim.AdamW(other.parameters())
    restore(other, turned, saved)
    assert torch.equal(turned.state[other["b"].weight]["exp_avg"], optimizer.state[model["a"].weight]["exp_avg"])
    assert turned.param_groups[0]["lr"] == 0.5
    both = {**saved[0], **{("state", "net", "b", *path[3:]): t for path, t in saved[0].items()}}
    bound = bind(other, torch.optim.AdamW(other.parameters()), (both, saved[1]))
    assert {path[:3] for path in bound.foreign} == {("state", "net", "a")}


def test_what_does_not_fit_is_said_before_anything_changes() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, range(1))
    tensors, objects = save(model, optimizer)
    tensors[("state", "net", "0", "weight", "exp_avg")] = torch.zeros(7, 4)
    tensors[("state", "net", "9", "weight", "exp_avg")] = torch.zeros(7, 4)
    objects[("state", "net", "9", "weight", "step")] = 1
    kept = {id(value) for state in optimizer.state.values() for value in state.values()}
    bound = bind(model, optimizer, (tensors, {path: value for path, value in objects.items() if path != ("groups",)}))
    assert bound.missing == [("groups",)]
    assert sorted(bound.foreign) == [
        ("state", "net", "9", "weight", "exp_avg"),
        ("state", "net", "9", "weight", "step"),
    ]
    assert bound.mismatched == ["opt.state.net.0.weight.exp_avg has shape (6, 4) here and (7, 4) in the checkpoint"]
    assert {id(value) for state in optimizer.state.values() for value in state.values()} == kept


def test_nothing_saved_changes_nothing() -> None:
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, range(1))
    bound = bind(model, optimizer, ({}, {}))
    assert bound.missing == [("groups",)]
    bound.attach()
    assert len(optimizer.state) == 2


def test_created_state_is_placed_like_a_dtensor_parameter() -> None:
    groups = {("groups",): {"groups": [{"params": ["net.w"], "values": {"lr": 0.5}}]}}
    full = torch.arange(15.0).reshape(5, 3)
    for rank in range(4):
        with as_rank(rank, 4):
            # The names differ because torch caches meshes across the ranks that this process has been.
            mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=(f"rank{rank}",))
            model = nn.Module()
            model.w = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None))
            optimizer = torch.optim.AdamW(model.parameters())
            path = ("state", "net", "w")
            restore(model, optimizer, ({(*path, "exp_avg"): full, (*path, "step"): torch.tensor(2.0)}, groups))
            state = optimizer.state[model.w]
            assert isinstance(state["exp_avg"], DTensor)
            assert state["exp_avg"].placements == model.w.placements
            assert torch.equal(state["exp_avg"]._local_tensor, full[2 * rank : 2 * rank + 2])
            assert type(state["step"]) is torch.Tensor
            assert state["step"].item() == 2.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_created_state_is_placed_like_a_flat_parameter(use_orig_params: bool) -> None:
    """Without `use_orig_params` one tensor serves both parameters; what one of them lacks is zero, and said."""
    groups = {("groups",): {"groups": [{"params": ["net.weight", "net.bias"], "values": {"lr": 0.5}}]}}
    full = torch.arange(1.0, 16.0).reshape(5, 3)
    path = ("state", "net", "weight")
    total = 0
    for rank in range(3):
        with as_rank(rank, 3):
            model = FullyShardedDataParallel(
                nn.Linear(3, 5), use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
            optimizer = torch.optim.AdamW(model.parameters())
            bound = restore(model, optimizer, ({(*path, "exp_avg"): full, (*path, "step"): torch.tensor(2.0)}, groups))
            for param, state in optimizer.state.items():
                assert state["exp_avg"].shape == param.shape
                assert state["step"].item() == 2.0
                total += int(state["exp_avg"].sum())
            assert bool(bound.notes) == (not use_orig_params)
            if use_orig_params:
                assert all(param.numel() for param in optimizer.state)
                assert len(optimizer.state) <= 1
    assert total == int(full.sum())
