"""DTensors: for every rank of a mesh, the pieces are exactly what the placements put there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import as_rank, counting, rebuilt, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from safehold.errors import UnsupportedStateError
from safehold.state.torch_tensors import tensor_pieces
from safehold.types import Holders


def distributed(full: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Any], rank: int) -> Any:
    mesh = DeviceMesh("cpu", torch.arange(int(np.prod(mesh_shape))).reshape(mesh_shape))
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def all_ranks(full: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Any]) -> list[Any]:
    found = []
    world_size = int(np.prod(mesh_shape))
    for rank in range(world_size):
        with as_rank(rank, world_size):
            tensor = distributed(full, mesh_shape, placements, rank)
            binding = tensor_pieces(tensor, name="x")
            assert binding.shape == tuple(full.shape)
            found.append((binding, values(binding)))
    return found


SHAPES = [(10, 3), (6,), (1, 2), (3, 7), (5, 4, 3), (0, 3), (2, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_shard_on_every_dim(shape: tuple[int, ...], num_ranks: int) -> None:
    full = counting(*shape)
    for dim in range(len(shape)):
        ranks = all_ranks(full, (num_ranks,), [Shard(dim)])
        assert np.array_equal(rebuilt(shape, [pieces for _, pieces in ranks]), full.numpy())
        for rank, (binding, pieces) in enumerate(ranks):
            assert len(pieces) <= 1
            expected = tuple(range(num_ranks)) if 0 in shape else (rank,)
            assert binding.holders == Holders(ranks=expected)


@pytest.mark.parametrize("mesh_shape", [(2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_every_mix_of_placements(mesh_shape: tuple[int, ...]) -> None:
    full = counting(5, 4)
    kinds = [Replicate(), Shard(0), Shard(1)]
    mesh = np.arange(np.prod(mesh_shape)).reshape(mesh_shape)
    for placements in itertools.product(kinds, repeat=len(mesh_shape)):
        ranks = all_ranks(full, mesh_shape, list(placements))
        assert np.array_equal(rebuilt((5, 4), [pieces for _, pieces in ranks]), full.numpy())
        for rank, (binding, _) in enumerate(ranks):
            at = np.argwhere(mesh == rank)[0]
            index = tuple(slice(None) if p.is_replicate() else int(i) for p, i in zip(placements, at, strict=True))
            assert binding.holders.ranks == tuple(sorted(mesh[index].flatten().tolist()))


@pytest.mark.parametrize(("rows", "split"), [(8, 2), (9, 2), (7, 3), (13, 4), (5, 4), (3, 4), (12, 6)])
def test_strided_shard_as_torch_distributes_it(rows: int, split: int) -> None:
    full = counting(rows, 2)
    for num_ranks in (2, 3):
        ranks = all_ranks(full, (num_ranks,), [_StridedShard(0, split_factor=split)])
        assert np.array_equal(rebuilt((rows, 2), [pieces for _, pieces in ranks]), full.numpy())


def test_first_offset_is_torchs_own() -> None:
    for rank in range(6):
        with as_rank(rank, 6):
            tensor = distributed(counting(13, 5), (2, 3), [_StridedShard(0, split_factor=3), Shard(0)], rank)
            local, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            binding = tensor_pieces(tensor, name="x")
            assert sum(rect.numel for rect, _ in binding.pieces) == np.prod(local)
            if binding.pieces:
                assert binding.pieces[0][0].offsets == offset


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 12, 13, 19, 24, 25])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 4)])
def test_tensor_parallel_under_fsdp2(rows: int, dp: int, tp: int) -> None:
    """Ground truth: every rank's local rows, which are really there, say which rows they are."""
    full = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    ranks = []
    for rank in range(dp * tp):
        with as_rank(rank, dp * tp):
            # The names differ because torch caches meshes and takes the sub-meshes of two ranks for equal.
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=(f"dp{rank}", f"tp{rank}"))
            layer = nn.Linear(3, rows, bias=False)
            with torch.no_grad():
                layer.weight.copy_(full)
            parallelize_module(layer, mesh[f"tp{rank}"], ColwiseParallel(), src_data_rank=None)
            fully_shard(layer, mesh=mesh[f"dp{rank}"])
            binding = tensor_pieces(layer.weight, name="w")
            assert binding.shape == (rows, 3)
            for index, array in (found := values(binding)):
                assert np.array_equal(array, full.numpy()[index])
            ranks.append(found)
    assert np.array_equal(rebuilt((rows, 3), ranks), full.numpy())


def test_hybrid_sharding_with_tensor_parallelism() -> None:
    ranks = []
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(f"copy{rank}", f"shard{rank}", f"tp{rank}"))
            layer = nn.Linear(3, 11)
            with torch.no_grad():
                layer.weight.copy_(counting(11, 3))
            parallelize_module(layer, mesh[f"tp{rank}"], ColwiseParallel(), src_data_rank=None)
            fully_shard(layer, mesh=mesh[f"copy{rank}", f"shard{rank}"])
            binding = tensor_pieces(layer.weight, name="w")
            assert binding.holders.ranks == tuple(sorted({rank, (rank + 4) % 8}))
            ranks.append(values(binding))
    assert np.array_equal(rebuilt((11, 3), ranks), counting(11, 3).numpy())


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with as_rank(3, 4):
        tensor = distribute_tensor(counting(4, 2), DeviceMesh("cpu", torch.arange(2)), [Shard(0)], src_data_rank=None)
        binding = tensor_pieces(tensor, name="x")
        assert binding.shape == (4, 2)
        assert binding.pieces == ()
        assert binding.holders.ranks == (3,)


def test_partial_and_wrong_local_shapes_are_refused_by_name() -> None:
    with as_rank(0, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(UnsupportedStateError, match=r"a\.b cannot be saved: placement .*Partial"):
            tensor_pieces(partial, name="a.b")
        crooked = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,))
        with pytest.raises(UnsupportedStateError, match=r"a\.b cannot be saved: its local shape \(3,\)"):
            tensor_pieces(crooked, name="a.b")


def test_identity_and_guard() -> None:
    with as_rank(1, 2):
        mesh = DeviceMesh("cpu", torch.arange(2))
        local = torch.ones(2, 2)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        again = DTensor.from_local(tensor._local_tensor, mesh, [Shard(0)], run_check=False)
        whole = DTensor.from_local(tensor._local_tensor, mesh, [Replicate()], run_check=False)
        binding = tensor_pieces(tensor, name="x")
        assert binding.memory == tensor_pieces(again, name="x").memory
        assert binding.memory != tensor_pieces(whole, name="x").memory
        assert binding.memory != tensor_pieces(tensor._local_tensor, name="x").memory
        assert binding.guard is not None
        assert binding.guard()
        tensor._local_tensor = torch.zeros(2, 2)
        assert not binding.guard()
        empty = distribute_tensor(counting(1, 2), mesh, [Shard(0)], src_data_rank=None)
        other = distribute_tensor(counting(1, 2), mesh, [Shard(0)], src_data_rank=None)
        assert tensor_pieces(empty, name="x").memory == tensor_pieces(empty, name="x").memory
        assert tensor_pieces(empty, name="x").memory != tensor_pieces(other, name="x").memory
