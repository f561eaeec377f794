"""Optimizer state by parameter name; nothing is stepped, created or copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_ranks import as_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from safehold.errors import UnsupportedStateError
from safehold.format.names import join
from safehold.state.modules import ParamNames, module_leaves
from safehold.state.optimizers import optimizer_leaves, overrides_state_dict
from safehold.state.protocols import Subtree
from safehold.types import Holders


def named(model: Any, prefix: tuple[str, ...] = ("net",)) -> ParamNames:
    names = ParamNames()
    module_leaves(model, prefix=prefix, names=names)
    return names


def stepped(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def tensors_of(tree: Subtree) -> dict[str, Any]:
    return {join(t.path): t.binding for t in tree.tensors}


def objects_of(tree: Subtree) -> dict[str, Any]:
    return {join(o.path): o.read() for o in tree.objects}


def test_adam() -> None:
    model = nn.Linear(3, 2)
    optimizer = stepped(torch.optim.Adam(model.parameters(), lr=0.5))
    tree = optimizer_leaves(optimizer, prefix=("opt",), names=named(model))
    found = tensors_of(tree)
    assert sorted(found) == [
        f"state.net.{name}.{key}" for name in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    exp_avg = optimizer.state[model.weight]["exp_avg"]
    assert found["state.net.weight.exp_avg"].live is exp_avg
    assert found["state.net.weight.exp_avg"].pieces[0][1].data_ptr() == exp_avg.data_ptr()
    assert found["state.net.weight.step"].shape == ()
    assert tree.params == {id(model.weight), id(model.bias)}
    assert all(t.role == "state" for t in tree.tensors)
    (groups,) = [o for o in tree.objects if o.path == ("groups",)]
    assert groups.policy == "groups"
    (group,) = groups.read()["groups"]
    assert group["params"] == ["net.weight", "net.bias"]
    assert group["values"]["lr"] == 0.5
    assert "params" not in group["values"]


def test_an_optimizer_that_has_not_stepped_stays_so() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    tree = optimizer_leaves(optimizer, prefix=("opt",), names=named(model))
    assert tree.tensors == []
    assert len(optimizer.state) == 0
    sgd = stepped(torch.optim.SGD(model.parameters(), lr=0.1))
    before = len(sgd.state)
    assert optimizer_leaves(sgd, prefix=("opt",), names=named(model)).tensors == []
    assert len(sgd.state) == before


def test_parameters_without_gradient_have_no_state() -> None:
    model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "unused": nn.Linear(1, 1, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["used"].weight.grad = torch.ones(1, 1)
    optimizer.step()
    assert all("unused" not in name for name in tensors_of(optimizer_leaves(optimizer, prefix=(), names=named(model))))


def test_a_tied_parameter_has_one_state() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    optimizer = stepped(torch.optim.AdamW(model.parameters()))
    found = tensors_of(optimizer_leaves(optimizer, prefix=(), names=named(model)))
    assert sorted(found) == [f"state.net.a.weight.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]


def test_parameters_of_no_module_are_named_by_group_and_position_and_said() -> None:
    model, loose = nn.Linear(2, 2), nn.Parameter(torch.zeros(4))
    optimizer = stepped(torch.optim.AdamW([{"params": model.parameters()}, {"params": [loose], "lr": 0.1}]))
    tree = optimizer_leaves(optimizer, prefix=("opt",), names=named(model))
    assert "state.#1.#0.exp_avg" in tensors_of(tree)
    assert objects_of(tree)["groups"]["groups"][1]["params"] == ["#1.#0"]
    assert len(tree.notes) == 1
    assert "opt: 1 parameter without a saved module" in tree.notes[0]


class Nested(torch.optim.Optimizer):
    """Keeps its state as second-order optimizers do: nested, with plain values between."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            state["factors"] = {0: torch.eye(2), "deep": [torch.zeros(1), (torch.ones(2), None)]}
            state["history"] = []
            state["none"] = None


def test_nested_state_and_plain_values() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = stepped(Nested(model.parameters()))
    tree = optimizer_leaves(optimizer, prefix=(), names=named(model))
    assert sorted(tensors_of(tree)) == [
        "state.net.weight.factors.#0",
        "state.net.weight.factors.deep.[0]",
        "state.net.weight.factors.deep.[1].(0)",
    ]
    objects = objects_of(tree)
    assert objects["state.net.weight.step"] == 1
    assert objects["state.net.weight.history"] == []
    assert objects["state.net.weight.none"] is None
    assert objects["state.net.weight.factors.deep.[1].(1)"] is None
    optimizer.step()
    assert objects_of(tree)["state.net.weight.step"] == 2


def test_watches_let_counters_change_and_notice_new_tensors() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = stepped(Nested(model.parameters()))
    tree = optimizer_leaves(optimizer, prefix=(), names=named(model))
    assert all(watch.holds() for watch in tree.watches)
    optimizer.state[model.weight]["step"] += 1
    assert all(watch.holds() for watch in tree.watches)
    optimizer.state[model.weight]["history"].append(torch.zeros(1))
    assert not all(watch.holds() for watch in tree.watches)
    adam = torch.optim.Adam(model.parameters())
    tree = optimizer_leaves(adam, prefix=(), names=named(model))
    assert all(watch.holds() for watch in tree.watches)
    stepped(adam)
    assert not all(watch.holds() for watch in tree.watches)
    tree = optimizer_leaves(adam, prefix=(), names=named(model))
    stepped(adam)
    assert all(watch.holds() for watch in tree.watches)


def test_lbfgs_keeps_its_lists() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    tree = optimizer_leaves(optimizer, prefix=(), names=named(model))
    assert "state.net.weight.old_dirs.[0]" in tensors_of(tree)
    assert objects_of(tree)["state.net.weight.n_iter"] >= 1


def test_states_of_a_dtensor() -> None:
    with as_rank(1, 4):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        model = nn.Module()
        model.w = nn.Parameter(distribute_tensor(torch.zeros(6, 3), mesh, [Replicate(), Shard(0)], src_data_rank=None))
        model.b = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate(), Shard(0)], src_data_rank=None))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.w] = {
            "own": torch.zeros_like(model.w),
            "local": torch.zeros(3, 3),
            "count": torch.zeros(1),
            "step": torch.tensor(1.0),
            "other": torch.zeros(3, 2),
        }
        optimizer.state[model.b] = {"local": torch.zeros(1), "count": torch.zeros(1), "step": torch.tensor(1.0)}
        found = tensors_of(optimizer_leaves(optimizer, prefix=(), names=named(model)))
        for key in ("own", "local"):
            assert found[f"state.net.w.{key}"].shape == (6, 3)
            assert found[f"state.net.w.{key}"].pieces[0][0].offsets == (3, 0)
            assert found[f"state.net.w.{key}"].holders == Holders(ranks=(1, 3))
        for name in ("w.count", "w.step", "b.count", "b.step"):
            assert found[f"state.net.{name}"].holders == Holders(ranks=(0, 1, 2, 3))
        assert found["state.net.w.other"].shape == (3, 2)
        assert found["state.net.w.other"].holders == Holders()
        assert found["state.net.b.local"].shape == (2,)
        assert found["state.net.b.count"].shape == (1,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_own_state_dict_is_said_and_partitioned_state_refused() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {}

    class OwnLoad(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise AssertionError

    model = nn.Linear(1, 1)
    for cls, word in ((Own, "state_dict"), (OwnLoad, "load_state_dict")):
        optimizer = cls(model.parameters(), lr=0.1)
        assert overrides_state_dict(optimizer) == (cls is Own)
        (note,) = optimizer_leaves(optimizer, prefix=("opt",), names=named(model)).notes
        assert f"has its own {word}" in note
    with as_rank(0, 1):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(UnsupportedStateError, match=r"opt cannot be saved: ZeroRedundancyOptimizer"):
            optimizer_leaves(zero, prefix=("opt",), names=named(model))


def test_unusual_keys_are_refused_by_name() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {(1, 2): torch.zeros(1)}
    with pytest.raises(UnsupportedStateError, match=r"opt\.state\.net\.weight has the key \(1, 2\)"):
        optimizer_leaves(optimizer, prefix=("opt",), names=named(model))
