"""FSDP1 flat parameters: for every rank, the flat ranges of the original parameters, without any communication."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import as_rank, counting, rebuilt, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from safehold.format.names import join
from safehold.state.modules import ParamNames, module_leaves
from safehold.state.torch_tensors import tensor_pieces

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.cube = nn.Parameter(torch.zeros(2, 3, 4))
        self.image = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        self.one = nn.Parameter(torch.zeros(1))
        start = 0.0
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(counting(*parameter.shape) + start)
            start += 1000


def wrapped(use_orig_params: bool, strategy: str = "FULL_SHARD", **how: Any) -> Any:
    return FullyShardedDataParallel(
        Model(),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        **how,
    )


def expected() -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in Model().state_dict().items()}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_rank_has_its_flat_ranges(use_orig_params: bool, num_ranks: int) -> None:
    ranks: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        with as_rank(rank, num_ranks):
            tree = module_leaves(wrapped(use_orig_params), prefix=(), names=ParamNames())
            ranks.append({join(t.path): t.binding for t in tree.tensors})
            memory = {join(t.path): t.binding.memory for t in tree.tensors}
            assert memory["first.weight"] == memory["tied.weight"]
            assert len(set(memory.values())) == len(memory) - 1
    for name, full in expected().items():
        shape = ranks[0][name].shape
        assert shape == full.shape
        assert np.array_equal(rebuilt(shape, [values(leaves[name]) for leaves in ranks]), full), name
        for rank, leaves in enumerate(ranks):
            assert leaves[name].holders.ranks == (rank,)


def test_pieces_are_live() -> None:
    with as_rank(0, 2):
        model = wrapped(True)
        tree = module_leaves(model, prefix=(), names=ParamNames())
        for tensor in tree.tensors:
            for _, view in tensor.binding.pieces:
                view.fill_(7.0)
        held = model._handle.flat_param
        assert (held.detach() == 7.0).sum() >= held.numel() - 8  # all but the padding


def test_whole_and_hybrid_sharding_say_who_holds_the_same() -> None:
    with as_rank(2, 4):
        tree = module_leaves(wrapped(True, "NO_SHARD"), prefix=(), names=ParamNames())
        assert all(t.binding.holders.ranks == (0, 1, 2, 3) for t in tree.tensors)
        assert all(sum(rect.numel for rect, _ in t.binding.pieces) == np.prod(t.binding.shape) for t in tree.tensors)
    with as_rank(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        tree = module_leaves(wrapped(True, "HYBRID_SHARD", device_mesh=mesh), prefix=(), names=ParamNames())
        assert {t.binding.holders.ranks for t in tree.tensors} == {(1, 3)}


def test_parameters_lead_back_to_their_names() -> None:
    with as_rank(0, 2):
        model = wrapped(False)
        names = ParamNames()
        module_leaves(model, prefix=("net",), names=names)
        (flat,) = model.parameters()
        known = names.find(flat)
        assert known is not None
        assert [join(part.fqn) for part in known.parts] == [
            "net.cube",
            "net.image",
            "net.one",
            "net.first.weight",
            "net.first.bias",
        ]
        model = wrapped(True)
        names = ParamNames()
        module_leaves(model, prefix=("net",), names=names)
        found = [names.find(parameter) for parameter in model.parameters()]
        assert all(known is not None and len(known.parts) == 1 for known in found)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_flat_parameter_alone_is_one_long_tensor(num_ranks: int) -> None:
    ranks = []
    for rank in range(num_ranks):
        with as_rank(rank, num_ranks):
            (flat,) = wrapped(False).parameters()
            binding = tensor_pieces(flat, name="p")
            ranks.append(values(binding))
            shape = binding.shape
    full = rebuilt(shape, ranks)
    assert np.array_equal(full[:24], expected()["cube"].flatten())


def test_tensor_parallel_under_fsdp1() -> None:
    ranks = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"d{rank}", f"t{rank}"))
            layer = nn.Linear(3, 7)
            with torch.no_grad():
                layer.weight.copy_(counting(7, 3))
            parallelize_module(layer, mesh[f"t{rank}"], ColwiseParallel(), src_data_rank=None)
            model = FullyShardedDataParallel(
                layer, device_mesh=mesh[f"d{rank}"], use_orig_params=True, device_id=torch.device("cpu")
            )
            tree = module_leaves(model, prefix=(), names=ParamNames())
            binding = {join(t.path): t.binding for t in tree.tensors}["weight"]
            assert binding.shape == (7, 3)
            ranks.append(values(binding))
    assert np.array_equal(rebuilt((7, 3), ranks), counting(7, 3).numpy())
