"""Arbitrary nested states come back exactly, into any template that may take them; caches never lie."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safehold.state.collect import BindingCache, collect
from safehold.state.declare import Sharded
from safehold.state.leaves import Leaves

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from state_checkpoint import MemoryCheckpoint

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
text = st.text(max_size=6)
keys = st.one_of(text, st.integers(-3, 12))
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.binary(max_size=5))


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Small tensors of any dtype, contiguous, transposed, sliced or expanded."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    numel = math.prod(shape)
    base = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=numel, max_size=numel)), dtype=torch.uint8)
    tensor = base.to(torch.float32).reshape(shape).to(dtype)
    how = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    if how == "transposed" and tensor.dim() == 2:
        return tensor.t()
    if how == "sliced" and tensor.dim() and tensor.shape[-1] > 1:
        return tensor[..., ::2]
    if how == "expanded" and tensor.dim() == 1:
        return tensor.expand(2, *tensor.shape)
    return tensor


@st.composite
def arrays(draw: Any) -> np.ndarray:
    shape = draw(shapes)
    dtype = draw(st.sampled_from(["f4", "i8", ">i4", "?", "c16", "M8[ns]", "U3", "f2"]))
    values = np.array(draw(st.lists(st.integers(0, 1), min_size=math.prod(shape), max_size=math.prod(shape))), "i8")
    return values.reshape(shape).astype(dtype)


scalars = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2020-01-01")])
torch_values = st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1, 2])])
leaves = st.one_of(atoms, scalars, torch_values, tensors(), arrays())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)
states = st.dictionaries(keys, trees, max_size=5)


def same(one: Any, other: Any) -> bool:
    """Equal with types and bits; the strides of tensors may differ."""
    if isinstance(one, torch.Tensor):
        other_is = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return other_is and raw(one) == raw(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def scrambled(value: Any) -> Any:
    """The same structure with other values: what a fresh process has."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, dict):
        return {key: scrambled(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([scrambled(item) for item in value])
    return 0


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, held: Any) -> None:
        self.held = held


def saved(state: Any) -> MemoryCheckpoint:
    return MemoryCheckpoint([collect(state, rank=0, world_size=1, random_states=False)])


@SETTINGS
@given(states)
def test_a_state_comes_back_into_one_of_the_same_structure(state: dict[Any, Any]) -> None:
    template = scrambled(state)
    saved(state).restore(template)
    assert same(template, state)


@SETTINGS
@given(states)
def test_a_state_comes_back_where_the_template_has_nothing(state: dict[Any, Any]) -> None:
    template: dict[Any, Any] = dict.fromkeys(state)
    saved(state).restore(template)
    assert same(template, state)


@SETTINGS
@given(trees, trees)
def test_what_a_stateful_object_gave_comes_back_whatever_it_has_now(given_then: Any, has_now: Any) -> None:
    holder = Holder(has_now)
    saved({"x": Holder(given_then)}).restore({"x": holder})
    assert same(holder.held, given_then)


@SETTINGS
@given(states)
def test_names_are_unique_sorted_and_always_the_same(state: dict[Any, Any]) -> None:
    one, two = (collect(state, rank=0, world_size=1, random_states=False) for _ in range(2))
    names = [leaf.spec.name for leaf in one.tensors]
    objects = [leaf.spec.name for leaf in one.objects]
    assert names == sorted(names) and objects == sorted(objects)
    assert len({*names, *objects, *one.aliases}) == len(names) + len(objects) + len(one.aliases)
    assert one.inventory(0, 1) == two.inventory(0, 1)


@SETTINGS
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_flat_ranges_of_any_cut_load_into_any_other_cut(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    whole = torch.arange(float(numel)).reshape(shape)

    def cut() -> list[slice]:
        inner = data.draw(st.lists(st.integers(0, numel), max_size=3))
        marks = [0, *sorted(inner), numel]
        return [slice(start, stop) for start, stop in itertools.pairwise(marks)]

    ranges = cut()
    world_size = len(ranges)
    shards = [
        collect(
            {"w": Sharded(whole.reshape(-1)[part].clone(), shape, part)},
            rank=rank,
            world_size=world_size,
            random_states=False,
        )
        for rank, part in enumerate(ranges)
    ]
    checkpoint = MemoryCheckpoint(shards)
    for part in cut():
        target = Sharded(torch.full((part.stop - part.start,), -1.0), shape, part)
        checkpoint.restore({"w": target})
        assert torch.equal(target.tensor, whole.reshape(-1)[part])


def described(found: Leaves) -> Any:
    return (
        [(leaf.shard, leaf.hooked, leaf.memory) for leaf in found.tensors],
        [(leaf.spec, repr(leaf.value)) for leaf in found.objects],
        found.aliases,
    )


CHANGES = ["step", "data", "buffer", "leaf", "value", "tie", "group", "load", "nothing"]


@settings(SETTINGS, max_examples=40)
@given(st.lists(st.sampled_from(CHANGES), max_size=8))
def test_a_cached_walk_gives_what_a_fresh_walk_gives(changes: list[str]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    state: dict[str, Any] = {"m": model, "o": optimizer, "x": {"t": torch.zeros(2)}, "n": 0}
    cache = BindingCache()
    for change in ["nothing", *changes]:
        if change == "step":
            model(torch.randn(3, 2)).sum().backward()
            optimizer.step()
        elif change == "data":
            model[0].weight.data = model[0].weight.data.clone()
        elif change == "buffer":
            model[1].running_var = torch.ones(2)
        elif change == "leaf":
            state["x"] = {"t": torch.zeros(2), "u": torch.zeros(1)}
        elif change == "value":
            state["n"] += 1
            optimizer.param_groups[0]["lr"] *= 0.5
        elif change == "tie":
            state["x"]["tied"] = model[0].bias
        elif change == "group":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        elif change == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        cached = collect(state, rank=0, world_size=1, random_states=False, cache=cache)
        assert described(cached) == described(collect(state, rank=0, world_size=1, random_states=False))
        again = collect(state, rank=0, world_size=1, random_states=False, cache=cache)
        assert described(again) == described(cached)
    assert cache.hits >= len(changes) + 1
