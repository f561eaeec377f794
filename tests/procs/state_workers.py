"""What the ranks of `test_state_procs` run: models of every parallel kind, read by the state floor and rebuilt.

`Case` builds a model and an optimizer on every rank; `truth` gives the full tensors by torch's own (collective) means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from safehold.state.collect import collect
from safehold.state.declare import Parts
from safehold.state.leaves import Leaves, SavedIndex, TensorLeaf
from safehold.state.rank_values import value_for_rank
from safehold.state.restore_binding import bind_for_restore
from safehold.state.torch_tensors import tensor_pieces
from safehold.types import ObjectSpec, TensorSpec


class Mlp(nn.Module):
    """Uneven sizes, a buffer, a tied weight and a parameter that never gets a gradient."""

    def __init__(self, width: int = 10, hidden: int = 14) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.unused = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def ddp(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(Mlp(), find_unused_parameters=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp1(seed: int, *, use_orig_params: bool, strategy: str = "FULL_SHARD") -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Mlp()
    how: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
        "device_id": torch.device("cpu"),
    }
    model.up = FullyShardedDataParallel(model.up, **how)
    model = FullyShardedDataParallel(model, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp1_hybrid(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        Mlp(),
        device_mesh=mesh,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp2(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.up, model.norm, model.down, model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def tp_fsdp2(seed: int, *, width: int = 10, hidden: int = 14) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def hsdp2(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Mlp()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_pair(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


CASES: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp1_flat": lambda seed: fsdp1(seed, use_orig_params=False),
    "fsdp1_orig": lambda seed: fsdp1(seed, use_orig_params=True),
    "fsdp1_whole": lambda seed: fsdp1(seed, use_orig_params=True, strategy="NO_SHARD"),
    "fsdp1_grad_op": lambda seed: fsdp1(seed, use_orig_params=True, strategy="SHARD_GRAD_OP"),
    "fsdp1_hybrid": fsdp1_hybrid,
    "fsdp2": fsdp2,
    "hsdp2": hsdp2,
    "tp_fsdp2": tp_fsdp2,
    "plain_pair": plain_pair,
}


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    replicated = isinstance(model, nn.parallel.DistributedDataParallel)
    torch.manual_seed(100 + dist.get_rank() if replicated else 100)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
    if not replicated:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


@dataclass
class Saved:
    """What a checkpoint would have: full tensors, and the objects of every rank."""

    tensors: dict[str, np.ndarray]
    aliases: dict[str, str]
    objects: list[dict[str, Any]]
    specs: dict[str, ObjectSpec]

    @property
    def by_name(self) -> dict[str, np.ndarray]:
        """The tensors under all their names."""
        return {**self.tensors, **{other: self.tensors[name] for other, name in self.aliases.items()}}


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": Parts(model) if isinstance(model, list) else model, "optim": optimizer}


def read(model: Any, optimizer: Any) -> Any:
    return collect(
        state_of(model, optimizer), rank=dist.get_rank(), world_size=dist.get_world_size(), random_states=False
    )


def saved_from(model: Any, optimizer: Any) -> Saved:
    """Read on every rank, and put together what all of them have."""
    leaves = read(model, optimizer)
    ranks = gather(
        (portable(leaves), leaves.aliases, {leaf.spec.name: (leaf.spec, leaf.value) for leaf in leaves.objects})
    )
    return Saved(
        tensors=assemble([tensors for tensors, _, _ in ranks]),
        aliases={other: name for _, aliases, _ in ranks for other, name in aliases.items()},
        objects=[{name: value for name, (_, value) in objects.items()} for _, _, objects in ranks],
        specs={name: spec for _, _, objects in ranks for name, (spec, _) in objects.items()},
    )


def portable(leaves: Any) -> dict[str, Any]:
    """Return the tensor leaves as plain data that can be sent to another rank."""
    return {
        leaf.spec.name: {
            "shape": leaf.spec.shape,
            "dtype": leaf.spec.dtype,
            "holders": leaf.holders,
            "pieces": [(rect.offsets, rect.sizes, view.numpy().copy()) for rect, view in leaf.pieces],
        }
        for leaf in leaves.tensors
    }


def assemble(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Rebuild every leaf from the pieces of all ranks; holes, disagreement and overlap inside a rank are errors."""
    full: dict[str, np.ndarray] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        known = [(rank, leaves[name]) for rank, leaves in enumerate(ranks) if name in leaves]
        shape, dtype = known[0][1]["shape"], known[0][1]["dtype"]
        array = np.zeros(shape, dtype=dtype)
        covered = np.zeros(shape, dtype=np.int64)
        for rank, leaf in known:
            assert (leaf["shape"], leaf["dtype"]) == (shape, dtype), name
            mine = np.zeros(shape, dtype=np.int64)
            owner = leaf["holders"].owner
            for offsets, sizes, values in leaf["pieces"]:
                at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                assert values.shape == tuple(sizes), name
                if owner is None or owner == rank:
                    both = covered[at] > 0
                    assert np.array_equal(array[at][both], values[both]), f"{name}: replicas differ"
                    array[at] = values
                mine[at] += 1
            assert mine.max(initial=0) <= 1, f"{name}: pieces of rank {rank} overlap"
            covered += mine
        assert covered.min(initial=1) >= 1, f"{name}: not covered"
        _check_holders(name, shape, known)
        full[name] = array
    return full


def _check_holders(name: str, shape: Any, known: list[Any]) -> None:
    """Declared holders must be exactly the ranks that have the same rectangles."""
    leaves = dict(known)
    rects = {rank: sorted((piece[0], piece[1]) for piece in leaf["pieces"]) for rank, leaf in known}
    for rank, leaf in known:
        holders = leaf["holders"].ranks
        if holders is None or not rects[rank]:
            continue
        assert rank in holders, name
        for other in holders:
            assert rects[other] == rects[rank], (name, rank, other)
            assert leaves[other]["holders"].ranks == holders, (name, rank, other)
        if not name.endswith(".step"):  # under FSDP1 with hybrid sharding, each shard group writes the counters
            assert set(holders) == {other for other in rects if rects[other] == rects[rank]}, (name, rank, holders)


def gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def full_of(tensor: Any) -> np.ndarray:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().numpy().copy()


def fsdp1_full(model: Any) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def fsdp1_states(model: Any, optimizer: Any, params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Put each state where the parameters are and let torch gather that: its own gathering mixes them up on the CPU."""
    states: dict[str, dict[str, Any]] = {}
    kept = {param: param.detach().clone() for param in optimizer.state}
    for key in ("exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for param, state in optimizer.state.items():
                param.copy_(state[key])
        gathered = fsdp1_full(model)
        with torch.no_grad():
            for param, value in kept.items():
                param.copy_(value)
        for name, value in gathered.items():
            if not torch.equal(value, params[name]):
                states.setdefault(name, {})[key] = value
    step = next(iter(optimizer.state.values()))["step"]
    for name in states:
        states[name]["step"] = step
    return states


def truth(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """Return the full tensors as torch's own collective functions give them."""
    found: dict[str, np.ndarray] = {}
    if isinstance(model, FullyShardedDataParallel):
        params = fsdp1_full(model)
        states = fsdp1_states(model, optimizer, params)
    else:
        params = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        by_param = {id(param): name.removeprefix("module.") for name, param in model.named_parameters()}
        states = {by_param[id(param)]: state for param, state in optimizer.state.items()}
    for name, value in params.items():
        found[f"model.{name}"] = full_of(value)
    for name, state in states.items():
        for key, value in state.items():
            found[f"optim.state.model.{name}.{key}"] = full_of(value)
    return found


def compare(full: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> int:
    assert sorted(full) == sorted(expected), sorted(set(full) ^ set(expected))
    for name, value in expected.items():
        assert full[name].shape == value.shape, (name, full[name].shape, value.shape)
        if "running" in name or "num_batches" in name:
            continue
        assert full[name].tobytes() == value.astype(full[name].dtype).tobytes(), name
    return len(expected)


def restore(model: Any, optimizer: Any, saved: Saved, *, foreign: bool = False) -> None:
    """Restore from full arrays, as the pipelines do from packs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    index = SavedIndex(
        tensors={
            name: TensorSpec(name=name, dtype=str(value.dtype), shape=tuple(value.shape))
            for name, value in saved.by_name.items()
        },
        objects=saved.specs,
        aliases=saved.aliases,
    )
    bound = bind_for_restore(state_of(model, optimizer), index, rank=rank, world_size=world_size)
    assert not bound.missing and not bound.mismatched, (bound.missing, bound.mismatched)
    assert bool(bound.unexpected) == foreign, bound.unexpected
    assert not set.intersection(*(set(names) for names in gather(bound.unexpected)))
    for destination in bound.destinations:
        fill(destination.leaf.pieces, saved.by_name[destination.saved.name])
    values = {}
    for name in bound.object_names:
        of_rank = {at: objects[name] for at, objects in enumerate(saved.objects) if name in objects}
        values[name] = value_for_rank(
            saved.specs[name],
            {at: repr(value) for at, value in of_rank.items()},
            of_rank.__getitem__,
            rank=rank,
            world_size=world_size,
            saved_world_size=len(saved.objects),
        )
    bound.apply(values)


def fill(pieces: Any, array: np.ndarray) -> None:
    with torch.no_grad():
        for rect, view in pieces:
            at = tuple(slice(o, o + n) for o, n in zip(rect.offsets, rect.sizes, strict=True))
            view.copy_(torch.from_numpy(np.ascontiguousarray(array[at]).reshape(rect.sizes)))


def round_trips(rank: int, world_size: int, args: dict[str, Any]) -> list[int]:
    return [round_trip(save, load) for save, load in args["pairs"]]


def round_trip(save: str, load: str) -> int:
    """Train, read, rebuild, compare with torch's own; then restore into another kind of model and compare again."""
    model, optimizer = CASES[save](1)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    saved = saved_from(model, optimizer)
    count = compare(saved.by_name, truth(model, optimizer))
    for stepped in (0, 1):
        other, other_optimizer = CASES[load](2)
        train(other, other_optimizer, steps=stepped)
        restore(other, other_optimizer, saved)
        again = saved_from(other, other_optimizer).by_name
        if load == "fsdp1_flat":  # what had no state has zeros there
            again = {name: value for name, value in again.items() if name in saved.by_name or ".unused." not in name}
        compare(again, saved.by_name)
        assert other_optimizer.param_groups[0]["lr"] == 0.125
        train(other, other_optimizer, steps=1)
    return count


def unsharded(rank: int, world_size: int, args: dict[str, Any]) -> list[str]:
    """What is read while FSDP has the parameters unsharded is the shard; what is restored reaches the next forward."""
    kinds = []
    for kind in ("fsdp2", "fsdp1_grad_op"):
        model, optimizer = CASES[kind](1)
        train(model, optimizer)
        saved = saved_from(model, optimizer)
        before = portable(read(model, optimizer))
        x = torch.ones(4, 10)
        model.eval()
        if kind == "fsdp2":
            for child in model.modules():
                if hasattr(child, "unshard"):
                    child.unshard()
        out = model(x)
        during = portable(read(model, optimizer))
        for name, leaf in before.items():
            assert all(np.array_equal(a[2], b[2]) for a, b in zip(leaf["pieces"], during[name]["pieces"], strict=True))
            assert (leaf["shape"], len(leaf["pieces"])) == (during[name]["shape"], len(during[name]["pieces"])), name
        for name, value in saved.tensors.items():
            if name.startswith("model."):
                saved.tensors[name] = np.zeros_like(value)
        restore(model, optimizer, saved)
        assert out.abs().sum() > 0 and model(x).abs().sum() == 0, kind
        kinds.append(kind)
    return kinds


def pipeline(rank: int, world_size: int, args: dict[str, Any]) -> list[str]:
    """Two stages with two chunks each, interleaved: layers 0 and 2 on rank 0, 1 and 3 on rank 1."""

    def chunks(seed: int) -> tuple[list[Any], Any]:
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 4) for _ in range(4)]
        mine = [nn.ModuleDict({"layers": nn.ModuleDict({str(i): layers[i]})}) for i in range(rank, 4, 2)]
        return mine, torch.optim.AdamW([p for chunk in mine for p in chunk.parameters()], lr=0.1)

    def step(mine: list[Any], optimizer: Any) -> None:
        for chunk in mine:
            for layer in chunk["layers"].values():
                layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    mine, optimizer = chunks(1)
    step(mine, optimizer)
    assert all(leaf.holders.ranks is None for leaf in read(mine, optimizer).tensors)
    saved = saved_from(mine, optimizer)
    whole = nn.ModuleDict({"layers": nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})})
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.3)
    restore(whole, whole_optimizer, saved)
    compare({leaf.spec.name: leaf.pieces[0][1].numpy() for leaf in read(whole, whole_optimizer).tensors}, saved.tensors)
    assert whole_optimizer.param_groups[0]["lr"] == 0.1
    again, again_optimizer = chunks(2)
    restore(again, again_optimizer, saved, foreign=True)
    compare(saved_from(again, again_optimizer).tensors, saved.tensors)
    step(again, again_optimizer)
    return sorted(saved.tensors)


class LocalMomentum(torch.optim.Optimizer):
    """Keeps plain tensors of the local shape and a one-element counter, as many optimizers outside torch do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            local = param.to_local() if isinstance(param, DTensor) else param
            state = self.state[param]
            state.setdefault("momentum", torch.zeros_like(local)).add_(torch.ones_like(local))
            state.setdefault("count", torch.zeros(1)).add_(1)
            state["rate"] = 0.5
            local.sub_(state["momentum"] * self.param_groups[0]["lr"])


def experts(rank: int, world_size: int, args: dict[str, Any]) -> int:
    """Five experts over three ranks (2, 2, 1) and over a 2-D mesh with replicas."""

    def model_of(mesh: Any, placements: Any, value: torch.Tensor) -> Any:
        model = nn.Module()
        model.experts = nn.Parameter(distribute_tensor(value, mesh, placements))
        model.one = nn.Parameter(distribute_tensor(value[:1, :1, 0], mesh, placements))
        return model

    torch.manual_seed(3)
    value = torch.randn(5, 3, 2)
    mesh = init_device_mesh("cpu", (world_size,))
    model = model_of(mesh, [Shard(0)], value)
    optimizer = LocalMomentum(model.parameters())
    optimizer.step()
    saved = saved_from(model, optimizer)
    assert np.array_equal(saved.tensors["model.experts"], (value - 0.1).numpy())
    assert np.array_equal(saved.tensors["optim.state.model.experts.momentum"], np.ones((5, 3, 2), np.float32))
    assert saved.tensors["optim.state.model.experts.count"].tolist() == [1.0]
    assert saved.specs["optim.state.model.experts.rate"].policy == "same"
    plain = nn.Module()
    plain.experts = nn.Parameter(torch.zeros(5, 3, 2))
    plain.one = nn.Parameter(torch.zeros(1, 1))
    plain_optimizer = LocalMomentum(plain.parameters())
    restore(plain, plain_optimizer, saved)
    assert torch.equal(plain.experts, value - 0.1)
    assert plain_optimizer.state[plain.experts]["momentum"].shape == (5, 3, 2)
    assert plain_optimizer.state[plain.experts]["rate"] == 0.5
    return len(saved.tensors)


def placements(rank: int, world_size: int, args: dict[str, Any]) -> int:
    """Every pair of placements on a 2-D mesh, with uneven and empty shards: the pieces rebuild what was distributed."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    wanted: dict[str, Any] = {}
    mine: list[TensorLeaf] = []
    for shape in ((10, 3), (6,), (1, 2), (3, 7), (5, 4, 3), (0, 3), (2, 0)):
        full = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for first in kinds:
            for second in kinds:
                name = f"{shape} {first} {second}"
                wanted[name] = full.numpy()
                binding = tensor_pieces(distribute_tensor(full, mesh, [first, second]), name=name)
                spec = TensorSpec(name=name, dtype=binding.dtype, shape=binding.shape)
                mine.append(TensorLeaf(spec=spec, pieces=binding.pieces, holders=binding.holders))
    rebuilt = assemble(gather(portable(Leaves(tensors=mine))))
    for name, value in wanted.items():
        assert np.array_equal(rebuilt[name], value), name
    return len(wanted)
