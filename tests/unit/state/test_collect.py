"""Collecting: names, what becomes which leaf, ties, refusals, and the cache."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safehold.errors import ConfigurationError, StateMismatchError, UnsupportedStateError
from safehold.state.collect import BindingCache, collect
from safehold.state.declare import Parts, PerRank, Sharded
from safehold.state.leaves import Leaves
from safehold.types import Holders, Rect

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from state_checkpoint import MemoryCheckpoint


def leaves_of(state: Any, **kwargs: Any) -> Leaves:
    kwargs = {"rank": 0, "world_size": 1, "random_states": False, **kwargs}
    return collect(state, **kwargs)


def tensor_names(leaves: Leaves) -> list[str]:
    return [leaf.spec.name for leaf in leaves.tensors]


def objects(leaves: Leaves) -> dict[str, Any]:
    found = {leaf.spec.name: leaf.value for leaf in leaves.objects}
    return {name: value for name, value in found.items() if not name.startswith("__safehold__.class.")}


class Counter:
    """Has a state dict whose tensors are made anew each time."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.given: Any = {"n": 1}

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, given: Any) -> None:
        self.loaded.append(given)


def test_plain_subtrees_are_one_object_and_what_holds_tensors_is_split() -> None:
    state = {
        "step": 3,
        "history": [1, 2, {"a": 3}],
        "mixed": {"t": torch.ones(2), "list": [1, 2], "n": None, 5: "five", "5": "text"},
        "nested": [torch.zeros(1), (np.ones(3), 7)],
        "empty": {},
    }
    leaves = leaves_of(state)
    assert tensor_names(leaves) == ["mixed.t", "nested.[0]", "nested.[1].(0)"]
    assert objects(leaves) == {
        "step": 3,
        "history": [1, 2, {"a": 3}],
        "mixed.list": [1, 2],
        "mixed.n": None,
        "mixed.#5": "five",
        "mixed.5": "text",
        "nested.[1].(1)": 7,
        "empty": {},
    }
    assert [leaf.spec.name for leaf in leaves.objects] == sorted(objects(leaves))


def test_names_that_look_alike_stay_apart() -> None:
    leaves = leaves_of({"a": {"b": torch.ones(2)}, "a.b": torch.ones(2, 2)})
    assert len({leaf.spec.name for leaf in leaves.tensors}) == 2
    odd = {"u/é k": torch.ones(1), "..": torch.ones(1), "x" * 300: torch.ones(1), "": torch.ones(1)}
    assert len(set(tensor_names(leaves_of(odd)))) == 4


def test_views_are_live_and_have_the_sizes_of_their_rectangle() -> None:
    weight = torch.arange(12.0).reshape(3, 4).t()
    [leaf] = leaves_of({"w": weight}).tensors
    [(rect, view)] = leaf.pieces
    assert rect == Rect.whole((4, 3))
    weight[0, 0] = 99
    assert view[0, 0] == 99
    assert leaf.holders == Holders() and not leaf.hooked


def test_zero_element_and_zero_dim_tensors_keep_shape_and_dtype() -> None:
    state = {
        "a": torch.tensor(3.5),
        "b": torch.zeros(0, 3),
        "c": torch.zeros(2, 0, dtype=torch.bfloat16),
        "d": np.zeros(()),
    }
    found = {leaf.spec.name: (leaf.spec.shape, leaf.spec.dtype, leaf.spec.kind) for leaf in leaves_of(state).tensors}
    assert found == {
        "a": ((), "float32", "torch"),
        "b": ((0, 3), "float32", "torch"),
        "c": ((2, 0), "bfloat16", "torch"),
        "d": ((), "float64", "numpy"),
    }
    assert leaves_of({}).tensors == [] and leaves_of({}).objects == []


def test_tied_tensors_are_one_leaf_with_aliases() -> None:
    weight = torch.randn(100, 100)
    leaves = leaves_of({"head": weight, "emb": weight, "view": weight.view(100, 100), "part": weight[:50]})
    assert tensor_names(leaves) == ["emb", "part"]
    assert leaves.aliases == {"head": "emb", "view": "emb"}
    assert leaves.inventory(0, 1).aliases == (("head", "emb"), ("view", "emb"))


def test_module_and_optimizer_names_and_which_leaves_are_hooked() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    frozen = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    leaves = leaves_of({"optim": optimizer, "model": model, "frozen": frozen})
    hooked = {leaf.spec.name: leaf.hooked for leaf in leaves.tensors}
    assert hooked["model.0.weight"] and hooked["optim.state.model.0.weight.exp_avg"]
    assert not hooked["model.1.running_mean"] and not hooked["frozen.weight"]
    assert leaves.optimizers == [("optim", optimizer)]
    [groups] = [leaf.spec for leaf in leaves.objects if leaf.spec.name == "optim.groups"]
    assert groups.policy == "groups"


def test_collecting_does_not_step_or_create_state() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    before = model.weight.clone()
    leaves_of({"m": model, "o": optimizer})
    assert len(optimizer.state) == 0 and torch.equal(before, model.weight)


def test_stateful_objects_are_walked_under_their_path() -> None:
    stateful = Counter()
    stateful.given = {"t": torch.ones(2), "deep": {"list": [torch.zeros(1), 4]}, "n": 2}
    leaves = leaves_of({"loader": stateful, "plain": Counter()})
    assert tensor_names(leaves) == ["loader.deep.list.[0]", "loader.t"]
    assert objects(leaves) == {"loader.deep.list.[1]": 4, "loader.n": 2, "plain": {"n": 1}}


def test_learning_rate_schedulers_and_loss_scalers_are_objects() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(torch.ones(1))
    leaves = leaves_of({"sched": scheduler, "scaler": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)})
    assert objects(leaves)["sched"]["last_epoch"] == 0
    assert tensor_names(leaves) == ["scaler._growth_tracker", "scaler.scale"]
    assert objects(leaves)["off"] == {}


def test_sharded_declarations() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    fused = torch.cat([whole[1:2], whole[4:5]])
    state = {
        "rows": Sharded(whole[2:4], (6, 4), [((2, 0), (2, 4))], replica_group=[1, 0]),
        "fused": Sharded(fused, (6, 4), [((1, 0), (1, 4)), ((4, 0), (1, 4))]),
        "flat": Sharded(whole.reshape(-1)[3:13].clone(), (6, 4), slice(3, 13)),
        "array": Sharded(np.arange(2), (8,), [((4,), (2,))]),
        "nothing": Sharded(torch.empty(0), (6, 4), []),
    }
    leaves = {leaf.spec.name: leaf for leaf in leaves_of(state, rank=0, world_size=4).tensors}
    assert leaves["rows"].holders == Holders(ranks=(0, 1))
    assert leaves["fused"].holders == Holders(ranks=(0,))
    for name in ("rows", "fused", "flat"):
        for rect, view in leaves[name].pieces:
            slices = tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))
            assert torch.equal(view, whole[slices])
    assert leaves["array"].spec.shape == (8,) and leaves["array"].spec.kind == "numpy"
    assert leaves["nothing"].pieces == ()


def test_per_rank_values_are_objects_with_their_policy() -> None:
    state = {
        "pos": PerRank({"shard": 3, "t": torch.ones(2)}),
        "seed": PerRank(7, policy="first"),
        "loader": PerRank(Counter(), policy="merge", how=max),
    }
    leaves = leaves_of(state)
    assert leaves.tensors == []
    assert {leaf.spec.name: leaf.spec.policy for leaf in leaves.objects} == {
        "pos": "refuse",
        "seed": "first",
        "loader": "merge",
        "__safehold__.class.loader": "first",
    }
    assert objects(leaves)["loader"] == {"n": 1}


def test_parts_join_stages_and_their_optimizers_and_refuse_collisions() -> None:
    stages = [torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)}) for name in ("0", "7")]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9) for stage in stages]
    for stage, optimizer, name in zip(stages, optimizers, ("0", "7"), strict=True):
        stage[name](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    leaves = leaves_of({"model": Parts(stages), "optim": Parts(optimizers)})
    assert "model.0.weight" in tensor_names(leaves) and "model.7.bias" in tensor_names(leaves)
    assert "optim.state.model.7.bias.momentum_buffer" in tensor_names(leaves)
    assert "optim.groups" in objects(leaves)
    with pytest.raises(ConfigurationError, match=r"model\.0\.bias"):
        leaves_of({"model": Parts([stages[0], torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2)})])})
    with pytest.raises(UnsupportedStateError, match="Parts"):
        leaves_of({"model": Parts([torch.ones(1)])})
    joined = leaves_of({"x": Parts([{"a": 1}, {"b": torch.ones(1)}])})
    assert objects(joined) == {"x.a": 1} and tensor_names(joined) == ["x.b"]


def test_lists_of_model_parts_are_indexed() -> None:
    leaves = leaves_of({"model": [torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)]})
    assert tensor_names(leaves) == ["model.[0].weight", "model.[1].weight"]


def test_random_states_live_under_a_root_that_users_cannot_take() -> None:
    names = [leaf.spec.name for leaf in leaves_of({}, random_states=True).objects]
    assert names == ["__safehold__.random.numpy", "__safehold__.random.python", "__safehold__.random.torch"]
    with pytest.raises(ConfigurationError, match="reserved"):
        leaves_of({"__safehold__": 1})


class Custom:
    pass


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": Custom()}}, r"a \(inside it: \['b'\]\).*Custom"),
        ({"f": print}, "builtin_function"),
        ({"cls": torch.nn.Linear}, "type"),
        ({"a": np.array([object()])}, "^a: .*object"),
        ({"a": np.ma.masked_array([1], [True])}, "^a: .*Masked"),
        ({"q": torch.zeros(2, 2).to_sparse()}, "q .*sparse"),
        ({"m": torch.empty(2, device="meta")}, "m .*meta"),
        ({"t": {(1, 2): torch.ones(1)}}, r"t: the key \(1, 2\)"),
        ({"t": {True: torch.ones(1)}}, "t: the key True"),
        ({(1, 2): 3}, "the state: the key"),
        ({"d": collections.UserDict()}, "UserDict"),
        ({"big": {"x": PerRank(1), "set": {Custom}}}, r"big\.set"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(state: Any, words: str) -> None:
    with pytest.raises(UnsupportedStateError, match=words):
        leaves_of(state)


def test_cycles_and_depth_are_refused_by_name() -> None:
    plain: list[Any] = [1]
    plain.append(plain)
    with pytest.raises(UnsupportedStateError, match=r"^loop.*contains itself"):
        leaves_of({"loop": plain})
    with_tensor: dict[str, Any] = {"t": torch.ones(1)}
    with_tensor["again"] = {"x": with_tensor}
    with pytest.raises(UnsupportedStateError, match=r"^d\.again\.x.*contains itself"):
        leaves_of({"d": with_tensor})
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="deep"):
        leaves_of({"deep": deep})
    shared = [1]
    assert objects(leaves_of({"a": shared, "b": [shared, shared]})) == {"a": [1], "b": [[1], [1]]}


def test_a_failing_state_dict_is_named_and_nothing_special_may_be_inside_one() -> None:
    broken = Counter()
    broken.state_dict = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(UnsupportedStateError, match=r"^x: state_dict\(\) of .*Counter failed.*ZeroDivision"):
        leaves_of({"x": broken})
    outer = Counter()
    outer.given = {"model": torch.nn.Linear(1, 1)}
    with pytest.raises(UnsupportedStateError, match=r"outer\.model: .*Linear"):
        leaves_of({"outer": outer})


def test_the_state_must_be_a_dict_and_the_rank_one_of_the_ranks() -> None:
    with pytest.raises(ConfigurationError, match="dict"):
        leaves_of(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="rank 2"):
        leaves_of({}, rank=2, world_size=2)


def test_namedtuples_are_split_by_field() -> None:
    leaves = leaves_of({"p": Pair(1, torch.ones(1)), "plain": [Pair(1, 2)]})
    assert tensor_names(leaves) == ["p.right"]
    assert objects(leaves) == {"p.left": 1, "plain.[0].left": 1, "plain.[0].right": 2}


def test_objects_are_snapshots() -> None:
    history = [1, [2]]
    leaves = leaves_of({"h": history})
    history[1].append(3)  # type: ignore[union-attr]
    history.append(4)
    assert objects(leaves) == {"h": [1, [2]]}


# The cache.


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optim": optimizer, "step": 0, "ema": {"w": torch.zeros(3, 3)}}
    return model, optimizer, state


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same_leaves(one: Leaves, other: Leaves) -> bool:
    def key(leaves: Leaves) -> Any:
        return [(leaf.spec, leaf.hooked, leaf.memory, leaf.holders) for leaf in leaves.tensors], leaves.aliases

    return bool(key(one) == key(other))


def test_the_cache_serves_repeated_saves_and_objects_are_read_anew() -> None:
    model, optimizer, state = trained()
    step(model, optimizer)
    cache = BindingCache()
    first = leaves_of(state, cache=cache)
    step(model, optimizer)
    state["step"] = 5
    optimizer.param_groups[0]["lr"] = 0.25
    second = leaves_of(state, cache=cache)
    assert (cache.hits, cache.misses) == (1, 1)
    assert same_leaves(first, second) and same_leaves(second, leaves_of(state))
    assert objects(second)["step"] == 5
    assert "0.25" in repr(objects(second)["optim.groups"])


def change_first_step(model: Any, optimizer: Any, state: Any) -> None:
    step(model, optimizer)


def change_data(model: Any, optimizer: Any, state: Any) -> None:
    model[0].weight.data = torch.ones(3, 3)


def change_strides(model: Any, optimizer: Any, state: Any) -> None:
    model[0].weight.data = model[0].weight.data.t()


def change_parameter(model: Any, optimizer: Any, state: Any) -> None:
    model[0].weight = torch.nn.Parameter(torch.ones(3, 3))


def change_buffer(model: Any, optimizer: Any, state: Any) -> None:
    model[1].running_mean = torch.ones(3)


def change_child(model: Any, optimizer: Any, state: Any) -> None:
    model.append(torch.nn.Linear(1, 1))


def change_leaf(model: Any, optimizer: Any, state: Any) -> None:
    state["ema"]["w"] = torch.ones(3, 3)


def change_key(model: Any, optimizer: Any, state: Any) -> None:
    state["ema"]["other"] = torch.ones(1)


def change_group(model: Any, optimizer: Any, state: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


CHANGES = [
    change_first_step,
    change_data,
    change_strides,
    change_parameter,
    change_buffer,
    change_child,
    change_leaf,
    change_key,
    change_group,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_makes_the_cache_stale(change: Any) -> None:
    model, optimizer, state = trained()
    cache = BindingCache()
    leaves_of(state, cache=cache)
    leaves_of(state, cache=cache)
    change(model, optimizer, state)
    fresh = leaves_of(state, cache=cache)
    assert (cache.hits, cache.misses) == (1, 2)
    assert same_leaves(fresh, leaves_of(state))
    MemoryCheckpoint([fresh])


def test_loading_an_optimizer_makes_the_cache_stale() -> None:
    model, optimizer, state = trained()
    step(model, optimizer)
    cache = BindingCache()
    leaves_of(state, cache=cache)
    optimizer.load_state_dict(optimizer.state_dict())
    assert same_leaves(leaves_of(state, cache=cache), leaves_of(state))


def test_a_sharded_made_anew_for_the_same_tensor_is_known_and_another_is_not() -> None:
    tensor, other, cache = torch.ones(2), torch.ones(2), BindingCache()
    for known, declared in (
        (0, Sharded(tensor, (4,), [((0,), (2,))])),
        (1, Sharded(tensor, (4,), [((0,), (2,))])),
        (1, Sharded(tensor, (4,), [((2,), (2,))])),
        (1, Sharded(other, (4,), [((2,), (2,))])),
    ):
        [leaf] = leaves_of({"s": declared}, cache=cache).tensors
        assert leaf.pieces[0][0] == declared.rects[0] and leaf.pieces[0][1].data_ptr() == declared.tensor.data_ptr()
        assert cache.hits == known
    declared.tensor = tensor
    assert leaves_of({"s": declared}, cache=cache).tensors[0].pieces[0][1].data_ptr() == tensor.data_ptr()


def test_arrays_alone_do_not_import_torch() -> None:
    code = (
        "import sys, numpy, safehold.state.restore_binding, safehold.state.collect as c;"
        "c.collect({'a': numpy.ones(2), 'n': 1}, rank=0, world_size=1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fresh_tensors_of_stateful_objects_are_bound_at_every_call() -> None:
    stateful = Counter()
    model = torch.nn.Linear(2, 2)
    cache = BindingCache()
    for value in (1.0, 2.0):
        stateful.given = {"a": torch.full((2,), value), "tied": model.weight}
        leaves = leaves_of({"s": stateful, "z": model}, cache=cache)
        assert leaves.tensors[0].pieces[0][1][0] == value
        assert leaves.aliases == {"s.tied": "z.weight"}
    assert cache.hits == 1


def test_what_parts_disagree_about_is_an_error() -> None:
    model = torch.nn.Linear(2, 2)
    one, two = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.2)
    with pytest.raises(StateMismatchError, match=r"o\.groups"):
        leaves_of({"m": model, "o": Parts([one, two])})
