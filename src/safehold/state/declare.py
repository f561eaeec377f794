"""What users say about their state when it cannot be seen: shards, values per rank, parts of one namespace.

Invariants: a declaration is checked when it is made, holds the user's own tensor or value and never copies it. Nothing
here imports a framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

from safehold.errors import ConfigurationError
from safehold.policy.resharding import flat_to_rects
from safehold.types import Rect

PerRankPolicy = Literal["refuse", "first", "derive", "merge"]

_POLICIES: Final = ("refuse", "first", "derive", "merge")


class Sharded:
    """Declares that a local tensor is a part of a larger one.

    The elements of `tensor`, in row-major order, are those of the pieces, one piece after the other. One piece of the
    tensor's own shape is the usual case; several describe fused projections and the like; a flat range describes
    optimizers that cut a flattened tensor (Megatron's distributed optimizer, ZeRO, FSDP1).

    Attributes:
        tensor: The local torch tensor or NumPy array; restored in place.
        global_shape: Shape of the whole tensor.
        rects: The pieces as rectangles, in the order of the tensor's elements.
        replica_group: Sorted ranks that hold the very same pieces; None: this rank alone holds them.

    Example:
        >>> Sharded(local, (4096, 1024), [((rank * 512, 0), (512, 1024))], replica_group=data_parallel_group)
        >>> Sharded(flat_part, (4096, 1024), slice(start, stop))
    """

    __slots__ = ("global_shape", "rects", "replica_group", "tensor")

    def __init__(
        self,
        tensor: Any,
        global_shape: Sequence[int],
        pieces: Iterable[tuple[Sequence[int], Sequence[int]]] | slice,
        replica_group: Any = None,
    ) -> None:
        """Declare a shard.

        Args:
            tensor: Local dense tensor or array.
            global_shape: Shape of the whole tensor.
            pieces: `(offsets, sizes)` pairs in elements; or `slice(start, stop)`, a range of the flattened whole
                tensor; or empty.
            replica_group: Ranks (global) or a `ProcessGroup` whose members hold the same pieces of the same values.

        Raises:
            ConfigurationError: Pieces leave the global shape, overlap, or do not have as many elements as the tensor.
        """
        self.tensor = tensor
        self.global_shape = tuple(int(size) for size in global_shape)
        self.rects = _to_rects(pieces, self.global_shape)
        self.replica_group = None if replica_group is None else _ranks_of(replica_group)
        _check_rects(self.rects, self.global_shape, math.prod(tensor.shape))

    @property
    def layout(self) -> tuple[Any, ...]:
        """Everything but the tensor, for comparisons."""
        return self.global_shape, self.rects, self.replica_group

    def __repr__(self) -> str:
        return f"Sharded(global_shape={self.global_shape}, rects={self.rects}, replica_group={self.replica_group})"


class PerRank:
    """Declares that a value is this rank's own: a data loader's position, a buffer of samples, counters.

    The value (plain values, small tensors and arrays in any nesting, or an object with `state_dict` and
    `load_state_dict`) is kept for every rank as object bytes, so it takes no part in sharding; it should be small (at
    most `MAX_TENSOR_BYTES` per tensor, see
    `safehold.state.values`). A tensor on a device is copied to the host when `save` is called, which waits for that
    device. For large tensors that differ between ranks use `Sharded` with the rank as a leading dim.

    On a restore with as many ranks as were saved, every rank gets its own value back: `value` is replaced (containers
    and tensors of the same type and shape are filled in place; an object with `load_state_dict` gets one call).

    Attributes:
        value: The value; the holder is what a restore changes, so keep the holder or read `.value` after a restore.
        policy: What happens on another number of ranks. `refuse`: an error by name. `first`: every rank gets the lowest
            rank's value.
            `derive`: `how(values, rank, world_size)` gives this rank's value from those of all saved ranks. `merge`:
            `how(values)` makes one value that every rank gets. `values` is a list in the order of the saved ranks.
        how: The function for `derive` and `merge`.
    """

    __slots__ = ("how", "policy", "value")

    def __init__(self, value: Any, policy: PerRankPolicy = "refuse", how: Callable[..., Any] | None = None) -> None:
        """Declare a value per rank.

        Raises:
            ConfigurationError: The policy is unknown, or `how` is missing or of no use with it.
        """
        if policy not in _POLICIES:
            raise ConfigurationError(f"PerRank knows no policy {policy!r}", hint=f"one of {', '.join(_POLICIES)}")
        if (policy in ("derive", "merge")) != callable(how):
            need = "needs a function `how`" if policy in ("derive", "merge") else "takes no function `how`"
            raise ConfigurationError(f"PerRank with the policy {policy!r} {need}")
        self.value = value
        self.policy: PerRankPolicy = policy
        self.how = how

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, policy={self.policy!r})"


class Parts:
    """Joins several parts of the state into one namespace: pipeline stages, virtual chunks, and their optimizers.

    Each part is a module, an optimizer, an object with `state_dict`, or a dict; their leaves are named as if there were
    one of them. Two parts with a leaf of the same name are refused when the state is first saved.

    Attributes:
        parts: The parts, in order.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Any]) -> None:
        """Declare the parts.

        Raises:
            ConfigurationError: There are none.
        """
        self.parts = tuple(parts)
        if not self.parts:
            raise ConfigurationError("Parts was given no parts", hint="leave the key out of the state on this rank")

    def __repr__(self) -> str:
        return f"Parts of {len(self.parts)}"


def _to_rects(pieces: Any, global_shape: tuple[int, ...]) -> tuple[Rect, ...]:
    if isinstance(pieces, slice):
        numel = math.prod(global_shape)
        start, stop = pieces.start or 0, numel if pieces.stop is None else pieces.stop
        if pieces.step not in (None, 1) or not 0 <= start <= stop <= numel:
            raise ConfigurationError(f"Sharded: {pieces} is no range of the {numel} elements of {global_shape}")
        return tuple(flat_to_rects(start, stop, global_shape))
    try:
        rects = tuple(Rect(tuple(map(int, offsets)), tuple(map(int, sizes))) for offsets, sizes in pieces)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(
            "Sharded: pieces must be (offsets, sizes) pairs of equal length, or a slice of the flattened tensor"
        ) from exc
    if rects and all(rect.numel == 0 for rect in rects) and math.prod(global_shape) == 0:
        return (Rect.whole(global_shape),)
    return tuple(rect for rect in rects if rect.numel)


def _check_rects(rects: tuple[Rect, ...], global_shape: tuple[int, ...], numel: int) -> None:
    for rect in rects:
        fits = len(rect.offsets) == len(rect.sizes) == len(global_shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(rect.offsets, rect.sizes, global_shape, strict=True)
        )
        if not fits:
            raise ConfigurationError(f"Sharded: the piece {rect} is not inside the global shape {global_shape}")
    for index, rect in enumerate(rects):
        for other in rects[:index]:
            if rect.intersect(other) is not None:
                raise ConfigurationError(f"Sharded: the pieces {other} and {rect} overlap")
    total = sum(rect.numel for rect in rects)
    if total != numel:
        raise ConfigurationError(f"Sharded: the pieces have {total} elements, the tensor has {numel}")


def _ranks_of(group: Any) -> tuple[int, ...]:
    """Return the sorted global ranks of a sequence or a torch `ProcessGroup`."""
    if isinstance(group, Iterable):
        ranks = tuple(sorted({int(rank) for rank in group}))
    else:
        import torch.distributed as dist

        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if not ranks:
        raise ConfigurationError("Sharded: the replica group is empty", hint="leave it out if no rank holds the same")
    return ranks
