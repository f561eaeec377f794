"""FSDP1: from flat parameters to pieces of the original parameters.

A flat parameter joins the flattened original parameters of one wrapped module, with padding between and behind; every
rank of the process group has one equal range of it. What a rank has of an original parameter is therefore a flat range
of that parameter, in the order of its memory.

Invariants: everything is learned from the metadata that every rank has (`_fqns`, `_shapes`, `_numels`,
`_shard_param_infos`, ...); nothing is gathered, unsharded or communicated. The shard that counts is `_local_shard`,
whether or not the unsharded parameter exists at the moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

from safehold.policy.resharding import flat_to_rects
from safehold.state import dtensors
from safehold.state.geometry import Ranges, boxes, whole_range
from safehold.state.protocols import TensorBinding
from safehold.state.torch_tensors import dtype_name, memory_key, plain_tensor, refuse
from safehold.types import Holders, Rect


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSlice:
    """What this rank has of one original parameter: a flat range.

    Attributes:
        shape: Global shape of the parameter.
        local_shape: Shape that was flattened; with tensor parallelism that of the DTensor's local tensor.
        order: Dims of `local_shape` from the slowest to the fastest in memory.
        start: First element of the range, in that order.
        numel: Elements in the range; 0 if this rank has nothing.
        offset: Where the range begins in this rank's shard of the flat parameter.
        dims: Global indices of each local dim.
        holders: Ranks that have the same range.
        owners: Ranks that have any elements of the parameter, hence its optimizer state with `use_orig_params=True`.
        group: Ranks that share the flat parameter, hence its optimizer state with `use_orig_params=False`.
        index: Position of the parameter in the flat parameter.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    order: tuple[int, ...]
    start: int
    numel: int
    offset: int
    dims: tuple[Ranges, ...]
    holders: tuple[int, ...]
    owners: tuple[int, ...]
    group: tuple[int, ...]
    index: int

    @property
    def whole(self) -> bool:
        """Whether this rank has the whole parameter, in its own shape."""
        return self.local_shape == self.shape and self.numel == math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatEntry:
    """One original parameter of a wrapped module.

    Attributes:
        module: The module that it belongs to.
        param_name: Its name there.
        param: What an optimizer holds: the original parameter (`use_orig_params=True`) or the flat parameter.
        flat: The flat parameter.
        slice: What this rank has of it.
        shared: Other (module, name) places that show the same parameter.
    """

    module: Any
    param_name: str
    param: Any
    flat: Any
    slice: FlatSlice
    shared: tuple[tuple[Any, str], ...]

    def binding(self, name: str) -> TensorBinding:
        """Bind the parameter to this rank's shard of the flat parameter; `name` is only for errors."""
        shard = getattr(self.flat, "_local_shard", None)
        return slice_binding(
            self.slice,
            plain_tensor(local_shard(self.flat), name),
            offset=self.slice.offset,
            owner=self.flat,
            guard=lambda: getattr(self.flat, "_local_shard", None) is shard,
        )


def local_shard(flat: Any) -> torch.Tensor:
    """Return this rank's shard of a flat parameter, padding included, where it really is."""
    shard: torch.Tensor | None = getattr(flat, "_local_shard", None)
    return flat if shard is None else shard


def entries(module: Any, name: str) -> Iterator[FlatEntry]:
    """Yield the original parameters that an FSDP1 module has flattened itself (not those that its children have).

    Args:
        module: A `FullyShardedDataParallel`.
        name: Its FQN, only for errors.
    """
    handle = module._handle
    if handle is None:
        return
    flat = handle.flat_param
    shared: dict[tuple[int, str], list[tuple[Any, str]]] = {}
    for info in flat._shared_param_infos:
        shared.setdefault((id(info.prim_module), info.prim_param_name), []).append((info.module, info.param_name))
    starts = _param_starts(flat)
    for index, original in enumerate(flat._param_infos):
        yield FlatEntry(
            module=original.module,
            param_name=original.param_name,
            param=flat if flat._params is None else flat._params[index],
            flat=flat,
            slice=_slice(module, handle, index, starts[index], f"{name}.{flat._fqns[index]}"),
            shared=tuple(shared.get((id(original.module), original.param_name), ())),
        )


def slice_binding(part: FlatSlice, local: torch.Tensor, *, offset: int, owner: Any, guard: Any = None) -> TensorBinding:
    """Bind the elements that one slice has in a one-dim local tensor.

    Args:
        part: The slice.
        local: A tensor that is laid out like this rank's shard of the flat parameter, or holds just the slice.
        offset: Where the slice begins in `local`.
        owner: Gives the identity of a slice without elements.
        guard: Passed on into the binding.
    """
    pieces: list[tuple[Rect, Any]] = []
    holders = Holders(ranks=part.holders)
    used = local.detach().reshape(-1)[offset : offset + part.numel]
    if 0 in part.shape:
        pieces.append((Rect.whole(part.shape), used.new_empty(part.shape)))
        holders = Holders(ranks=part.owners)
    position = 0
    for box in flat_to_rects(part.start, part.start + part.numel, [part.local_shape[dim] for dim in part.order]):
        view = used[position : position + box.numel].view(box.sizes)
        position += box.numel
        inverse = [part.order.index(dim) for dim in range(len(part.order))]
        view = view.permute(inverse)
        inner = Rect(tuple(box.offsets[at] for at in inverse), tuple(box.sizes[at] for at in inverse))
        for cut, outer in boxes(inner, part.dims):
            moved = Rect(tuple(a - b for a, b in zip(cut.offsets, inner.offsets, strict=True)), cut.sizes)
            pieces.append((outer, dtensors.narrowed(view, moved)))
    key = memory_key(used, owner)
    key = (*key, part.index) if key[0] == -1 else (-3, *key, part.start, *part.shape)
    return TensorBinding(
        shape=part.shape,
        dtype=dtype_name(local.dtype),
        pieces=tuple(pieces),
        holders=holders,
        memory=key,
        live=local,
        guard=guard,
    )


def flat_pieces(flat: Any, *, name: str) -> TensorBinding:
    """Bind a flat parameter that is met without its module, as the one-dim tensor that its ranks hold together."""
    local = plain_tensor(local_shard(flat), name)
    numel = int(flat._unpadded_unsharded_size.numel())
    begins = _param_starts(flat)
    known = [
        begins[index] + info.intra_param_start_idx - info.offset_in_shard
        for index, info in enumerate(flat._shard_param_infos)
        if info.in_shard
    ]
    start = min(known[0] if known else numel, numel)
    size = min(local.numel(), numel - start)
    shard = getattr(flat, "_local_shard", None)
    return TensorBinding(
        shape=(numel,),
        dtype=dtype_name(local.dtype),
        pieces=((Rect((start,), (size,)), local.detach()[:size]),) if size else (),
        holders=Holders(ranks=(dist.get_rank(),)),
        memory=memory_key(local, flat) if size else (-1, id(flat)),
        live=local,
        guard=lambda: getattr(flat, "_local_shard", None) is shard,
    )


def _slice(module: Any, handle: Any, index: int, begin: int, name: str) -> FlatSlice:
    flat = handle.flat_param
    info = flat._shard_param_infos[index]
    local_shape = tuple(flat._shapes[index])
    group = tuple(sorted(dist.get_process_group_ranks(handle.process_group)))
    owners, holders = group, group
    if handle._sharding_strategy != HandleShardingStrategy.NO_SHARD:
        owners = _owners(handle, begin, begin + flat._numels[index])
        hybrid = handle._sharding_strategy in (
            HandleShardingStrategy.HYBRID_SHARD,
            HandleShardingStrategy._HYBRID_SHARD_ZERO2,
        )
        same = dist.get_process_group_ranks(module._inter_node_pg) if hybrid else [dist.get_rank()]
        holders = tuple(sorted(same))
    shape, dims = local_shape, tuple(whole_range(size) for size in local_shape)
    spec = flat._param_extensions[index]
    if spec is not None:
        if not hasattr(spec, "placements"):
            refuse(name, f"FSDP keeps it by an extension of an unknown kind ({type(spec).__name__})")
        shape = tuple(spec.shape)
        dims = dtensors.local_ranges(spec, local_shape, name) or dims
        replicas = dtensors.holders_of(spec, name).ranks or ()
        holders = replicas if len(replicas) > 1 else holders
    return FlatSlice(
        shape=shape,
        local_shape=local_shape,
        order=_memory_order(flat, index, name),
        start=info.intra_param_start_idx or 0,
        numel=info.numel_in_shard or 0,
        offset=info.offset_in_shard or 0,
        dims=dims,
        holders=holders,
        owners=owners,
        group=group,
        index=index,
    )


def _param_starts(flat: Any) -> list[int]:
    """Return where each original parameter begins in the unsharded flat parameter."""
    starts, position = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            starts.append(position)
        position += numel
    return starts


def _owners(handle: Any, start: int, stop: int) -> tuple[int, ...]:
    """Return the ranks whose shards have elements `start` to `stop` of the unsharded flat parameter."""
    per_rank = handle.flat_param._sharded_size.numel()
    ranks = dist.get_process_group_ranks(handle.process_group)
    if start == stop:
        return tuple(sorted(ranks))
    return tuple(sorted(ranks[at] for at in range(start // per_rank, -(-stop // per_rank))))


def _memory_order(flat: Any, index: int, name: str) -> tuple[int, ...]:
    """Return the dims of a parameter from slowest to fastest in the flattened memory."""
    shape = flat._shapes[index]
    order = tuple(range(len(shape)))
    strides = getattr(flat, "_strides", None)
    if strides is None or flat._contiguities[index]:
        return order
    order = tuple(sorted(order, key=lambda dim: -strides[index][dim]))
    expected = 1
    for dim in reversed(order):
        if shape[dim] > 1 and strides[index][dim] != expected:
            refuse(name, f"FSDP flattened it with strides {tuple(strides[index])}, which skip or share elements")
        expected *= shape[dim]
    return order
