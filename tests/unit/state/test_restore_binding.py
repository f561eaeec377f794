"""Binding a template to a checkpoint: strictness, renaming, creation, and what `apply` puts where."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safehold.errors import ConfigurationError, ManifestError, StateMismatchError
from safehold.state.collect import collect
from safehold.state.declare import Parts, PerRank, Sharded
from safehold.state.leaves import RestoreOptions, SavedIndex
from safehold.state.restore_binding import bind_for_restore, mismatch_error
from safehold.types import ObjectSpec, TensorSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from state_checkpoint import MemoryCheckpoint


def saved(*states: Any) -> MemoryCheckpoint:
    world_size = len(states)
    return MemoryCheckpoint(
        [collect(state, rank=rank, world_size=world_size, random_states=False) for rank, state in enumerate(states)]
    )


def model(seed: int = 0, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 2, bias=bias), torch.nn.BatchNorm1d(2))


class Holder:
    """Any object with a state dict."""

    def __init__(self, given: Any = None) -> None:
        self.given = given
        self.loaded: list[Any] = []

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, given: Any) -> None:
        self.loaded.append(given)


Pair = collections.namedtuple("Pair", "left right")


def test_tensors_are_filled_and_plain_values_written_into_the_users_containers() -> None:
    metrics = {"best": 9.0, "seen": [1, 2, 3]}
    checkpoint = saved(
        {"w": torch.arange(4.0), "step": 7, "pair": (torch.ones(2), 3), "metrics": metrics, "t": Pair(1, np.ones(2))}
    )
    weight, best = torch.zeros(4), {"best": 0.0, "old": 1}
    state = {"w": weight, "step": 0, "pair": (torch.zeros(2), 0), "metrics": best, "t": Pair(0, np.zeros(2))}
    inside = state["pair"][0]
    checkpoint.restore(state)
    assert torch.equal(weight, torch.arange(4.0)) and state["w"] is weight
    assert state["step"] == 7
    assert state["pair"][0] is inside and state["pair"][1] == 3 and inside[0] == 1
    assert state["metrics"] is best == metrics
    assert type(state["t"]) is Pair and state["t"].left == 1 and state["t"].right[0] == 1


def test_parameters_are_filled_without_touching_the_graph() -> None:
    checkpoint = saved({"m": model(1)})
    template = model(2)
    checkpoint.restore({"m": template})
    assert template[0].weight.requires_grad and template[0].weight.grad_fn is None
    assert torch.equal(template[0].weight, model(1)[0].weight)


def test_empty_and_plain_containers_take_whatever_was_saved() -> None:
    full = {
        "h": [{"k": 1}, {"k": 2}],
        "ema": {"a": torch.ones(2), "n": 3},
        "ts": [torch.zeros(1), torch.ones(1)],
        "none": {"x": np.ones(2)},
    }
    checkpoint = saved(full)
    kept: list[Any] = []
    state = {"h": kept, "ema": {}, "ts": [], "none": None}
    checkpoint.restore(state)
    assert kept == [{"k": 1}, {"k": 2}]
    assert torch.equal(state["ema"]["a"], torch.ones(2)) and state["ema"]["n"] == 3
    assert [t.item() for t in state["ts"]] == [0, 1]
    assert isinstance(state["none"]["x"], np.ndarray)
    with pytest.raises(StateMismatchError, match=r"missing.*\n\s+ts\b"):
        saved({"a": 1}).restore({"a": 0, "ts": []})


def test_a_number_does_not_take_a_tensor_and_a_tensor_no_number() -> None:
    for one, other, words in (
        ({"x": torch.ones(1)}, {"x": 3}, "x: no tensor in this state, a tensor in the checkpoint"),
        ({"x": 3}, {"x": torch.ones(1)}, "x: a tensor in this state, no tensor in the checkpoint"),
    ):
        with pytest.raises(StateMismatchError, match=words):
            saved(one).restore(other)


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_was_touched() -> None:
    checkpoint = saved({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "n": 1, "x": torch.ones(1)})
    state = {
        "a": torch.zeros(3),
        "b": torch.zeros(2, dtype=torch.int8),
        "c": torch.zeros(2),
        "d": torch.zeros(1),
        "o": 5,
    }
    with pytest.raises(StateMismatchError) as caught:
        checkpoint.restore(state)
    text = str(caught.value)
    assert "missing in the checkpoint (2):\n    d\n    o" in text
    assert "not in this state (2):\n    n\n    x" in text
    assert "a: shape (3,) in this state, (2,) in the checkpoint" in text
    assert "b: dtype int8 in this state, float32 in the checkpoint" in text
    assert not state["c"].any() and state["o"] == 5
    assert mismatch_error([], [], []) is None
    assert "... and 5 more" in str(mismatch_error([str(n) for n in range(25)], [], []))


def test_partial_leaves_out_and_lists() -> None:
    checkpoint = saved({"a": torch.ones(1), "old.x": 1})
    options = RestoreOptions(partial=True)
    state = {"a": torch.zeros(1), "new": 5}
    binding = checkpoint.restore(state, options=options)
    assert state["a"] == 1 and state["new"] == 5
    assert binding.left_out == ["new: not in the checkpoint", "old\\.x: not in this state"]
    with pytest.raises(StateMismatchError, match="new"):
        checkpoint.restore(state, options=RestoreOptions(partial=["old*"]))
    checkpoint.restore(state, options=RestoreOptions(partial=["old*", "ne?"]))
    with pytest.raises(StateMismatchError, match="shape"):
        checkpoint.restore({"a": torch.zeros(2)}, options=options)


def test_cast_is_asked_for() -> None:
    checkpoint = saved({"w": torch.tensor([1.5, 2.5])})
    state = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    binding = checkpoint.restore(state, options=RestoreOptions(cast=True))
    assert state["w"].tolist() == [1.5, 2.5]
    [destination] = binding.destinations
    assert (destination.saved.dtype, destination.leaf.spec.dtype) == ("float32", "bfloat16")
    with pytest.raises(StateMismatchError, match="complex64"):
        saved({"w": torch.ones(1, dtype=torch.complex64)}).restore(
            {"w": torch.ones(1)}, options=RestoreOptions(cast=True)
        )


def trained(seed: int, name: str = "model") -> dict[str, Any]:
    module = model(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        module(torch.randn(4, 3)).sum().backward()
        optimizer.step(), scheduler.step()
    return {name: module, "optim": optimizer, "sched": scheduler, "step": seed}


def same_training(one: Any, other: Any, name: str = "model") -> bool:
    left, right = one["model"].state_dict(), other[name].state_dict()
    states = [list(state["optim"].state.values()) for state in (one, other)]
    return (
        all(torch.equal(left[key], right[key]) for key in left)
        and len(states[0]) == len(states[1])
        and all(torch.equal(a[k], b[k]) for a, b in zip(*states, strict=True) for k in a)
        and one["optim"].param_groups[0]["lr"] == other["optim"].param_groups[0]["lr"]
        and one["sched"].state_dict() == other["sched"].state_dict()
    )


def test_a_fresh_optimizer_gets_its_state_without_a_step() -> None:
    source = trained(1)
    checkpoint = saved(source)
    module = model(5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=9.0)
    fresh = {"model": module, "optim": optimizer, "sched": torch.optim.lr_scheduler.StepLR(optimizer, 2), "step": 0}
    checkpoint.restore(fresh)
    assert same_training(source, fresh) and fresh["step"] == 1
    again = trained(3)
    checkpoint.restore(again)
    assert same_training(source, again)


def test_renaming_reaches_optimizer_state_and_groups() -> None:
    source = trained(1)
    checkpoint = saved(source)
    for rename in (
        {"model": "net"},
        lambda name: name.replace("model.", "net.", 1) if name.startswith("model") else name,
    ):
        target = trained(2, name="net")
        checkpoint.restore(target, options=RestoreOptions(rename=rename))
        assert same_training(source, target, name="net")


def test_rename_tables() -> None:
    state = {"a": {"b": torch.ones(1), "c": torch.ones(2)}, "ab": torch.ones(3), "x": {"y": {"z": 4}}}
    checkpoint = saved(state)
    target = {"n": {"b": torch.zeros(1)}, "c": torch.zeros(2), "ab": torch.zeros(3), "x": {"y": {"z": 0}}}
    checkpoint.restore(target, options=RestoreOptions(rename={"a": "n", "a.c": "c"}))
    assert target["c"].all() and target["n"]["b"].all()
    with pytest.raises(ConfigurationError, match=r"both a\.b and a\.c"):
        checkpoint.restore(state, options=RestoreOptions(rename=lambda name: "q" if name.startswith("a.") else name))
    with pytest.raises(ConfigurationError, match="without a name"):
        checkpoint.restore(state, options=RestoreOptions(rename={"ab": ""}))
    with pytest.raises(ConfigurationError, match="not the name of a leaf"):
        checkpoint.restore(state, options=RestoreOptions(rename={"a..b": "x"}))
    with pytest.raises(ConfigurationError, match="NoneType"):
        checkpoint.restore(state, options=RestoreOptions(rename=lambda name: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(ManifestError):
        bind_for_restore({}, SavedIndex(tensors={}, objects={"a..b": ObjectSpec(name="a..b")}), rank=0, world_size=1)


def test_tied_template_stays_tied_and_needs_one_of_the_names() -> None:
    weight = torch.randn(3, 3)
    tied = torch.zeros(3, 3)
    state = {"emb": tied, "head": tied}
    saved({"emb": weight, "head": weight}).restore(state)
    assert torch.equal(tied, weight) and state["emb"] is state["head"]
    for name in ("emb", "head"):
        tied.zero_()
        saved({name: weight}).restore(state)
        assert torch.equal(tied, weight)
    apart = {"emb": torch.zeros(3, 3), "head": torch.zeros(3, 3)}
    saved({"emb": weight, "head": weight}).restore(apart)
    assert torch.equal(apart["emb"], weight) and torch.equal(apart["head"], weight)
    with pytest.raises(StateMismatchError, match="emb"):
        saved({"x": 1}).restore({"x": 1, **state})


def test_untied_leaves_come_back_apart() -> None:
    checkpoint = saved({"emb": torch.ones(2), "head": torch.zeros(2)})
    state = {"emb": torch.empty(2), "head": torch.empty(2)}
    checkpoint.restore(state)
    assert state["emb"].all() and not state["head"].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([1.0, 2.0]).expand(3, 2),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.zeros(0, 3),
        torch.tensor(7),
    ],
)
def test_any_strides_come_back(tensor: torch.Tensor) -> None:
    checkpoint = saved({"t": tensor})
    for template in (torch.empty(tensor.shape, dtype=tensor.dtype), torch.zeros_like(tensor), tensor):
        state = {"t": template}
        checkpoint.restore(state)
        assert torch.equal(state["t"], tensor)


def test_read_only_arrays_and_numpy_scalars_are_replaced() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    state = {"r": read_only, "s": np.float32(0), "deep": (np.broadcast_to(np.zeros(1), (2,)),)}
    saved({"r": np.arange(3.0), "s": np.float32(2.5), "deep": (np.ones(2),)}).restore(state)
    assert state["r"].tolist() == [0, 1, 2] and state["s"] == np.float32(2.5) and type(state["s"]) is np.float32
    assert state["deep"][0].tolist() == [1, 1] and not read_only.any()


def test_per_rank_values() -> None:
    def state(rank: int) -> dict[str, Any]:
        return {
            "own": PerRank({"at": rank, "t": torch.full((2,), rank)}),
            "first": PerRank(rank, policy="first"),
            "sum": PerRank(rank, policy="merge", how=sum),
            "mine": PerRank(rank, policy="derive", how=lambda values, rank, world: (values, rank, world)),
            "loader": PerRank(Holder(rank), policy="first"),
        }

    checkpoint = saved(state(0), state(1), state(2))
    target = state(9)
    kept, tensor = target["own"].value, target["own"].value["t"]
    checkpoint.restore(target, rank=2, world_size=3)
    assert target["own"].value is kept and kept["at"] == 2 and kept["t"] is tensor and tensor.tolist() == [2, 2]
    assert [target[key].value for key in ("first", "sum", "mine")] == [2, 2, 2]
    assert target["loader"].value.loaded == [2]
    with pytest.raises(StateMismatchError, match="own"):
        checkpoint.restore(state(9), rank=0, world_size=2)
    other = {key: value for key, value in state(9).items() if key != "own"}
    checkpoint.restore(other, rank=1, world_size=2, options=RestoreOptions(partial=["own"]))
    assert [other[key].value for key in ("first", "sum")] == [0, 3]
    assert other["mine"].value == ([0, 1, 2], 1, 2)
    wrong = {"sum": PerRank(0, policy="first"), "mine": 5}
    with pytest.raises(StateMismatchError, match=r"mine|sum"):
        checkpoint.restore(wrong, rank=1, world_size=2, options=RestoreOptions(partial=True))


def test_a_failing_function_of_per_rank_is_named() -> None:
    ones = torch.ones(1)
    checkpoint = saved(
        {"p": PerRank(0, policy="merge", how=sum), "w": ones}, {"p": PerRank("x", policy="merge", how=sum), "w": ones}
    )
    state = {"p": PerRank(0, policy="merge", how=sum), "w": torch.zeros(1)}
    with pytest.raises(
        StateMismatchError, match=r"nothing was overwritten[^$]*p: the function of PerRank failed: TypeError"
    ):
        checkpoint.restore(state)
    assert not state["w"].any()


def test_undeclared_objects_that_differ_between_ranks() -> None:
    checkpoint = saved({"n": 1, "same": 5}, {"n": 2, "same": 5})
    state = {"n": 0, "same": 0}
    checkpoint.restore(state, rank=1, world_size=2)
    assert state == {"n": 2, "same": 5}
    with pytest.raises(StateMismatchError, match=r"^n: was not declared and differs"):
        checkpoint.restore(state, rank=0, world_size=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_sharded_leaves_load_on_any_number_of_ranks(world_size: int) -> None:
    whole = torch.randn(10, 3)

    def shard(rank: int, ranks: int, source: torch.Tensor) -> Sharded:
        rows = -(-10 // ranks)
        start, stop = min(10, rank * rows), min(10, (rank + 1) * rows)
        return Sharded(source[start:stop].clone(), (10, 3), [((start, 0), (stop - start, 3))])

    checkpoint = saved(*({"w": shard(rank, 4, whole)} for rank in range(4)))
    for rank in range(world_size):
        target = shard(rank, world_size, torch.zeros(10, 3))
        checkpoint.restore({"w": target}, rank=rank, world_size=world_size)
        rects = target.rects
        assert all(torch.equal(target.tensor, whole[r.offsets[0] : r.offsets[0] + r.sizes[0]]) for r in rects)
    flat = Sharded(torch.zeros(11), (10, 3), slice(4, 15))
    checkpoint.restore({"w": flat})
    assert torch.equal(flat.tensor, whole.reshape(-1)[4:15])
    dense = torch.zeros(10, 3)
    checkpoint.restore({"w": dense})
    assert torch.equal(dense, whole)


def stage(names: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})


def pipeline(stages: list[str], seed: int, lr: float = 0.1) -> dict[str, Any]:
    modules = [stage(names, seed) for names in stages]
    optimizers = [torch.optim.Adam(module.parameters(), lr=lr) for module in modules]
    for module, optimizer in zip(modules, optimizers, strict=True):
        for layer in module.values():
            layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": Parts(modules), "optim": Parts(optimizers)}


def test_pipeline_stages_move_between_ranks() -> None:
    checkpoint = saved(pipeline(["a", "d"], 1), pipeline(["b", "c"], 2))
    target = pipeline(["abcd"], 3)
    checkpoint.restore(target)
    reference = {**dict(pipeline(["a", "d"], 1)["model"].parts[0]), **dict(pipeline(["b", "c"], 2)["model"].parts[0])}
    [module] = target["model"].parts
    for name, layer in reference.items():
        assert torch.equal(layer.weight, module[name].weight)
    alone = pipeline(["c"], 4, lr=9.0)
    binding = checkpoint.restore(alone, rank=1, world_size=3, ignore_unexpected=True)
    assert "model.a.weight" in binding.unexpected and "optim.state.model.a.weight.exp_avg" in binding.unexpected
    assert not any(".c." in name for name in binding.unexpected)
    assert alone["optim"].parts[0].param_groups[0]["lr"] == 0.1


def test_a_tie_of_leaves_that_were_saved_apart_needs_equal_values() -> None:
    tied = torch.zeros(2)
    state = {"emb": tied, "head": tied, "out": tied}
    weight = torch.tensor([1.0, float("nan")])
    checkpoint = saved({"emb": weight, "head": weight, "out": weight.clone()})
    binding = checkpoint.restore(state)
    assert tied[0] == 1 and len(binding.destinations) == 1
    [apart] = binding.apart
    assert apart.names == ("emb", "out") and [spec.name for spec in apart.saved] == ["emb", "out"]
    checkpoint = saved({"emb": torch.ones(2), "head": torch.ones(2), "out": torch.zeros(2)})
    tied.fill_(7)
    with pytest.raises(StateMismatchError, match="emb and out: one tensor in this state, two in the checkpoint"):
        checkpoint.restore(state)
    assert tied.tolist() == [7, 7]
    array = np.zeros(2)
    saved({"a": np.ones(2), "b": np.ones(2)}).restore({"a": array, "b": array})
    assert array.all()


def test_apply_wants_every_value() -> None:
    index = SavedIndex(tensors={}, objects={"a": ObjectSpec(name="a")})
    binding = bind_for_restore({"a": 1}, index, rank=0, world_size=1)
    assert binding.object_names == ["a"]
    with pytest.raises(StateMismatchError, match=r"^a: "):
        binding.apply({})


def test_ranks_that_saved_different_kinds_under_one_name_are_not_mixed_silently() -> None:
    index = SavedIndex(
        tensors={"e.t": TensorSpec(name="e.t", dtype="float32", shape=(1,))}, objects={"e": ObjectSpec(name="e")}
    )
    binding = bind_for_restore({"e": {"t": torch.ones(1)}}, index, rank=0, world_size=1)
    assert binding.unexpected == ["e"]
    binding = bind_for_restore({"e": None}, index, rank=0, world_size=1)
    assert binding.unexpected == ["e.t"]
