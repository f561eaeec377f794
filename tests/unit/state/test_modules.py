"""Names of module leaves: wrappers by type, what state_dict would keep, extra state, ties, refusals."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from fake_ranks import as_rank
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from safehold.errors import UnsupportedStateError
from safehold.format.names import join
from safehold.state.modules import ParamNames, after_restore, module_leaves
from safehold.types import Holders

# Warnings of torch about its own older options.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("transient", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Inner()  # a child that only looks like a wrapper's
        self._orig_mod = nn.Linear(3, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1))])


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def names_of(module: Any, prefix: tuple[str, ...] = ()) -> list[str]:
    return sorted(join(tensor.path) for tensor in module_leaves(module, prefix=prefix, names=ParamNames()).tensors)


def test_names_are_those_of_state_dict() -> None:
    assert names_of(Outer()) == sorted(Outer().state_dict())


def test_every_wrapper_is_left_out_because_of_its_type() -> None:
    model = Outer()
    expected = sorted(model.state_dict())
    assert names_of(compiled(model)) == expected
    assert names_of(nn.DataParallel(model)) == expected
    assert names_of(checkpoint_wrapper(model)) == expected
    with as_rank(0, 2):
        assert names_of(nn.parallel.DistributedDataParallel(compiled(model))) == expected
        assert names_of(compiled(nn.parallel.DistributedDataParallel(model))) == expected
    model.layers[0] = compiled(checkpoint_wrapper(model.layers[0]))
    model.layers[1][1] = checkpoint_wrapper(compiled(model.layers[1][1]))
    model.module.compile(backend="eager")
    assert names_of(model) == expected
    assert any("_orig_mod" in name for name in model.state_dict() if name.startswith("layers"))


def test_fsdp2_leaves_names_alone() -> None:
    from torch.distributed.fsdp import fully_shard

    with as_rank(0, 1):
        model = Outer()
        expected = sorted(model.state_dict())
        fully_shard(model.layers[0])
        fully_shard(model)
        assert names_of(model) == expected
        after_restore(model)


def test_parameters_lead_back_to_the_first_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    names = ParamNames()
    tree = module_leaves(model, prefix=("net", "x"), names=names)
    assert [join(t.path) for t in tree.tensors] == ["a.weight", "b.weight"]
    assert tree.tensors[0].binding.memory == tree.tensors[1].binding.memory
    assert all(t.param is model["a"].weight for t in tree.tensors)
    known = names.find(model["a"].weight)
    assert known is not None
    assert [part.fqn for part in known.parts] == [("net", "x", "a", "weight")]
    assert names.find(torch.zeros(1)) is None


def test_a_shared_module_is_named_at_each_place() -> None:
    layer = nn.Linear(2, 2)
    assert names_of(nn.ModuleDict({"a": layer, "b": layer})) == ["a.bias", "a.weight", "b.bias", "b.weight"]


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [None, {"a": 1}, io.BytesIO(b"blob"), torch.arange(3), b""], ids=lambda value: type(value).__name__
)
def test_extra_state_is_an_optional_object(extra: Any) -> None:
    model = nn.Sequential(nn.Linear(1, 1), WithExtra(extra))
    (found,) = module_leaves(model, prefix=("m",), names=ParamNames()).objects
    assert found.path == ("1", "_extra_state")
    assert found.optional
    assert found.policy == "same"
    assert found.read() is extra
    found.write("new")
    assert model[1].extra == "new"


def test_ddp_gives_buffers_an_owner_and_parameters_none() -> None:
    with as_rank(1, 4):
        group = torch.distributed.new_group([1, 3])
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        model._ddp_params_and_buffers_to_ignore = ["0.running_var"]
        tree = module_leaves(
            nn.parallel.DistributedDataParallel(model, process_group=group), prefix=(), names=ParamNames()
        )
        holders = {join(t.path): t.binding.holders for t in tree.tensors}
        assert holders["0.running_mean"] == Holders(ranks=(1, 3), owner=1)
        assert holders["0.running_var"] == Holders()
        assert holders["1.weight"] == Holders()
        free = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
        assert all(t.binding.holders == Holders() for t in module_leaves(free, prefix=(), names=ParamNames()).tensors)


def test_watches_notice_what_changes() -> None:
    model = Outer()
    tree = module_leaves(model, prefix=(), names=ParamNames())
    assert all(watch.holds() for watch in tree.watches)
    model.layers[1][1].weight = nn.Parameter(torch.zeros(1, 2))
    assert not all(watch.holds() for watch in tree.watches)
    tree = module_leaves(model, prefix=(), names=ParamNames())
    model.layers.append(nn.Linear(1, 1))
    assert not all(watch.holds() for watch in tree.watches)


def test_refusals_name_the_leaf() -> None:
    lazy = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(2))
    with pytest.raises(UnsupportedStateError, match=r"net\.1\.weight cannot be saved: .*lazy"):
        module_leaves(lazy, prefix=("net",), names=ParamNames())
    with torch.device("meta"):
        meta = nn.Linear(1, 1)
    with pytest.raises(UnsupportedStateError, match=r"net\.weight cannot be saved: .*meta"):
        module_leaves(meta, prefix=("net",), names=ParamNames())
    loop = nn.Sequential()
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match=r"net\.0 cannot be saved: the module contains itself"):
        module_leaves(loop, prefix=("net",), names=ParamNames())


class OwnStateDict(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"other": torch.zeros(1)}


def test_own_state_dict_and_hooks_are_said() -> None:
    model = nn.Sequential(OwnStateDict(1, 1), nn.Linear(1, 1), nn.BatchNorm1d(1))
    tree = module_leaves(model, prefix=("net",), names=ParamNames())
    assert [note.split(":")[0] for note in tree.notes] == ["net.0"]
    assert len(tree.tensors) == 9
    model[1]._register_state_dict_hook(lambda *args: None)
    notes = module_leaves(model, prefix=("net",), names=ParamNames()).notes
    assert len(notes) == 2
    assert "net.1" in notes[1]
    assert "state_dict_hooks" in notes[1]
    wrapped = compiled(checkpoint_wrapper(nn.BatchNorm1d(1)))
    assert module_leaves(wrapped, prefix=(), names=ParamNames()).notes == []


def test_parametrized_and_scripted_modules() -> None:
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert names_of(model) == sorted(model.state_dict())
    swa = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    assert names_of(swa) == ["module.bias", "module.weight", "n_averaged"]
