"""DTensors to pieces: which global rectangles this rank's local tensor has, and which ranks hold the same.

Invariants: the rectangles follow from shape, mesh, placements and this rank's coordinate alone, by applying the
placements from left to right to an index range per dim, as torch does; they are compared with the local shape that is
really there. Nothing communicates.

`_StridedShard` is how torch writes "sharded by tensor parallelism first, by FSDP2 second" from left to right. For
uneven dims that reading and what FSDP2 really does can differ; the local shape says which one the bytes follow, and
where it does not, the tensor is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from safehold.state.geometry import Ranges, boxes, chunk, strided_chunk, total, whole_range
from safehold.state.protocols import TensorBinding
from safehold.state.torch_tensors import dtype_name, memory_key, plain_tensor, refuse
from safehold.types import Holders, Rect

_PLACES_KEPT = 4096
_places: dict[Any, tuple[tuple[Ranges, ...] | None, Holders]] = {}

Cut: TypeAlias = tuple[int, int]
"""How one mesh axis cuts: (tensor dim, split factor, 1 for a plain `Shard`); (-1, 0) where it replicates."""


def dtensor_pieces(tensor: Any, *, name: str) -> TensorBinding:
    """Bind a DTensor to this rank's memory, as `tensor_pieces` does."""
    local = plain_tensor(tensor._local_tensor, name)
    return spec_pieces(tensor._spec, local, owner=tensor, name=name, guard=_guard(tensor))


def spec_pieces(spec: Any, local: torch.Tensor, *, owner: Any, name: str, guard: Any = None) -> TensorBinding:
    """Bind a plain local tensor that is laid out like the DTensor spec says.

    Args:
        spec: A `DTensorSpec`: mesh, placements, global shape.
        local: This rank's shard.
        owner: Gives the identity of a shard without elements.
        name: Only for errors.
        guard: Passed on into the binding.
    """
    shape, local_shape = tuple(spec.shape), tuple(local.shape)
    dims, holders = _place_of(spec, shape, local_shape, name)
    view = local.detach()
    pieces: tuple[tuple[Rect, Any], ...] = ()
    if dims is not None and 0 in shape:
        pieces = ((Rect.whole(shape), view.new_empty(shape)),)
        holders = Holders(ranks=mesh_ranks(spec.mesh))
    elif dims is not None and 0 not in local_shape:
        pieces = tuple((outer, narrowed(view, inner)) for inner, outer in _boxes(local_shape, dims))
    key = memory_key(local, owner)
    if key[0] >= 0:
        # A local tensor that is also saved as a plain tensor is not tied to the DTensor: their shapes differ.
        key = (-2, *key, *shape)
    return TensorBinding(
        shape=shape,
        dtype=dtype_name(local.dtype),
        pieces=pieces,
        holders=holders,
        memory=key,
        live=local,
        guard=guard,
    )


def _place_of(
    spec: Any, shape: tuple[int, ...], local_shape: tuple[int, ...], name: str
) -> tuple[tuple[Ranges, ...] | None, Holders]:
    """Return `local_ranges` and `holders_of`, which are the same for all the tensors of a model that are cut alike."""
    coordinate = spec.mesh.get_coordinate()
    # Placements of different types can be equal in older torch, hence the types in the key. The rank: see `_replicas`.
    place = None if coordinate is None else (*coordinate, torch.distributed.get_rank())
    key = (spec.mesh, place, tuple(map(type, spec.placements)), tuple(spec.placements), shape, local_shape)
    found = _places.get(key)
    if found is None:
        if len(_places) >= _PLACES_KEPT:
            _places.clear()
        found = _places[key] = (local_ranges(spec, local_shape, name), holders_of(spec, name))
    return found


@lru_cache(maxsize=4096)
def _boxes(local_shape: tuple[int, ...], dims: tuple[Ranges, ...]) -> tuple[tuple[Rect, Rect], ...]:
    return tuple(boxes(Rect.whole(local_shape), dims))


def _guard(tensor: Any) -> Any:
    inner = tensor._local_tensor
    return lambda: tensor._local_tensor is inner


def narrowed(view: torch.Tensor, box: Rect) -> torch.Tensor:
    """Return the part of `view` that `box` covers, as a view."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, start, size)
    return view


def local_ranges(spec: Any, local_shape: tuple[int, ...], name: str) -> tuple[Ranges, ...] | None:
    """Return the global indices that each dim of this rank's local tensor has; None outside the mesh.

    Args:
        spec: A `DTensorSpec`.
        local_shape: Shape of the local tensor as it really is.
        name: Only for errors.

    Raises:
        UnsupportedStateError: A placement is `Partial` or of an unknown kind, or the layout is ambiguous.
    """
    shape = tuple(int(size) for size in spec.shape)
    cuts = _cuts(spec.placements, len(shape), name)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    arguments = (shape, tuple(spec.mesh.shape), tuple(coordinate), cuts)
    readings = [_left_to_right(*arguments)]
    if any(split > 1 for _, split in cuts) and (other := _right_to_left(*arguments)) not in (None, readings[0]):
        readings.append(other)
    fitting = [dims for dims in readings if _fits(local_shape, tuple(map(total, dims)))]
    if len(fitting) == 1:
        return fitting[0]
    what = "does not tell" if fitting else "is not what"
    return refuse(
        name,
        f"its local shape {local_shape} {what} global shape {shape} and placements {tuple(spec.placements)} give",
        "use sizes that the product of the mesh axes divides, or declare it with safehold.Sharded",
    )


def _fits(actual: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return actual == expected or (0 in actual and 0 in expected)


def holders_of(spec: Any, name: str) -> Holders:
    """Return the ranks that hold the same shard: those that differ from this one only along replicating mesh axes."""
    cuts = _cuts(spec.placements, len(spec.shape), name)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return Holders(ranks=(torch.distributed.get_rank(),))
    free = tuple(dim < 0 for dim, _ in cuts)
    return Holders(ranks=_replicas(spec.mesh, torch.distributed.get_rank(), tuple(coordinate), free))


@lru_cache(maxsize=1024)
def _replicas(mesh: Any, rank: int, coordinate: tuple[int, ...], replicates: tuple[bool, ...]) -> tuple[int, ...]:
    # The rank is in the key because a sub-mesh is equal to that of another rank, but has other members.
    index = tuple(slice(None) if free else at for free, at in zip(replicates, coordinate, strict=True))
    return tuple(sorted(int(rank) for rank in mesh.mesh[index].flatten().tolist()))


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """Return all global ranks of `mesh`, sorted."""
    return _all_ranks(mesh, torch.distributed.get_rank())


@lru_cache(maxsize=256)
def _all_ranks(mesh: Any, rank: int) -> tuple[int, ...]:
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))


def _cuts(placements: Sequence[Any], ndim: int, name: str) -> tuple[Cut, ...]:
    # Placements of different types can be equal in older torch, hence the types in the key.
    cuts = _cached_cuts(tuple((type(placement), placement) for placement in placements), ndim)
    if isinstance(cuts, tuple):
        return cuts
    if isinstance(cuts, Partial):
        refuse(name, f"placement {cuts} is Partial: no rank has its value", "redistribute it to Shard or Replicate")
    return refuse(name, f"placement {cuts} is of an unknown kind ({type(cuts).__name__})")


@lru_cache(maxsize=4096)
def _cached_cuts(placements: tuple[tuple[type, Any], ...], ndim: int) -> Any:
    """Return the cuts, or the placement that cannot be one."""
    cuts: list[Cut] = []
    for _, placement in placements:
        if isinstance(placement, Replicate):
            cuts.append((-1, 0))
        elif isinstance(placement, _StridedShard):  # before Shard: older torch derives it from that
            cuts.append((placement.dim % ndim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts.append((placement.dim % ndim, 1))
        else:
            return placement
    return tuple(cuts)


@lru_cache(maxsize=4096)
def _left_to_right(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[Ranges, ...]:
    dims = [whole_range(size) for size in shape]
    for axis, (dim, split) in enumerate(cuts):
        if dim >= 0:
            dims[dim] = strided_chunk(dims[dim], mesh_shape[axis], coordinate[axis], split_factor=split)
    return tuple(dims)


@lru_cache(maxsize=4096)
def _right_to_left(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[Ranges, ...] | None:
    """Read strided cuts as they are made: after those further right that make up their split factor, if some do."""
    dims = [whole_range(size) for size in shape]
    for dim in range(len(shape)):
        order: list[int] = []
        for axis in reversed(range(len(cuts))):
            if cuts[axis][0] != dim:
                continue
            after, product = 0, 1
            while product < cuts[axis][1] and after < len(order):
                product *= mesh_shape[order[after]]
                after += 1
            if product != cuts[axis][1]:
                return None
            order.insert(after, axis)
        for axis in order:
            dims[dim] = chunk(dims[dim], mesh_shape[axis], coordinate[axis])
    return tuple(dims)
