"""Where the tensors of a state live, and how their bytes get into an arena.

Invariants: a copy into the arena is the value's exact bytes, row-major, in its own dtype, whatever its strides;
sources are only read; nothing here tracks gradients or knows what a leaf is called. A device may be asynchronous:
`copy` then only queues, and the arena has the bytes when `reached` says so. The four calls that order things
(`begin`, `mark`, `reached`, `hold`) are the whole contract between staging and a device, so that a fake device can
stand in for a GPU and be as unkind as one.

This module knows NumPy only; `device_torch` and `cuda` add frameworks and are imported late, by `open_device`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as Environment
from typing import Any, Protocol

import numpy as np

from safehold.errors import UnsupportedStateError
from safehold.host import numa
from safehold.host.memfd import Mapping

Piece = tuple[Any, int, int]
"""(view, offset in the arena, bytes)."""


_SMALL_BYTES = 64 << 10
_move_small = ctypes.PyDLL(None).memmove
_move_small.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_small.restype = ctypes.c_void_p


class PieceError(Exception):
    """The piece at `index` could not be copied; its cause is the reason."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Sample(Protocol):
    """Bytes of a few live blocks, as they were when `Copier.sample` was called."""

    def get(self) -> list[bytes]:
        """Return them, waiting if need be."""
        ...


class Copier(Protocol):
    """Copies into one arena.

    On a device that is not asynchronous, any number of threads may copy at once; on one that is, one thread at a time
    queues copies, marks and samples. `hold` and `reached` may come from any thread at any time.
    """

    def begin(self, views: Iterable[Any]) -> None:
        """Order all copies that follow after the work that this thread has queued so far (which makes the values of
        `views`).
        """
        ...

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copy views to their offsets, or queue that; uses one core at most.

        Raises:
            PieceError: One of them could not be copied; says which.
        """
        ...

    def split(self, view: Any, offset: int, nbytes: int, limit_bytes: int) -> Iterable[Piece]:
        """Cut into pieces of about `limit_bytes` at most, in arena order; each is a view and costs no memory."""
        ...

    def mark(self) -> Any:
        """Return a mark behind all copies queued so far."""
        ...

    def reached(self, mark: Any, timeout_s: float) -> bool:
        """Wait until the arena has everything before the mark; return whether it does."""
        ...

    def check_hold(self) -> None:
        """See whether the calling thread can be held at all.

        Raises:
            UnsupportedStateError: It cannot.
        """
        ...

    def hold(self, mark: Any) -> None:
        """Have what the calling thread queues from now on start only behind the mark, without waiting here."""
        ...

    def sample(self, views: Sequence[Any]) -> Sample:
        """Take the bytes of small views as they are behind the copies queued so far.

        Raises:
            PieceError: As for `copy`.
        """
        ...

    def block(self, view: Any, at_byte: int, limit_bytes: int) -> tuple[Any, int, int] | None:
        """Return a small run of `view` from the element that has byte `at_byte`: (view, byte offset in the value,
        bytes).

        None if there is none whose bytes can be compared.
        """
        ...

    def close(self) -> None:
        """Drop all views of the arena, so that it can be unmapped."""
        ...


class Device(Protocol):
    """A kind of memory that state lives in.

    Attributes:
        name: For people: `cpu`, `cuda`.
        asynchronous: Whether copies are only queued by `Copier.copy`.
    """

    name: str
    asynchronous: bool

    def prepare_host(self, mapping: Mapping) -> bool:
        """Make a populated arena fit for fast copies (pin it); return whether that was done. Slow: off the critical
        path.
        """
        ...

    def release_host(self, mapping: Mapping) -> None:
        """Undo `prepare_host`; must come before the mapping is closed."""
        ...

    def copier(self, mapping: Mapping) -> Copier:
        """Return what copies into this arena."""
        ...

    def num_threads(self) -> int:
        """How many threads may copy while the trainer waits."""
        ...

    def numa_node(self) -> int | None:
        """Return the NUMA node that host memory for this rank should be on; None if it does not matter, or is not known."""
        ...


class NumpyCopier:
    """Copies NumPy arrays, at once; the base of what copies other values of host memory so."""

    def __init__(self, mapping: Mapping) -> None:
        """Copy into a writable mapping."""
        self._mapping = mapping

    def begin(self, views: Iterable[Any]) -> None:
        """See `Copier`; nothing is ever queued."""

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `Copier`."""
        index = 0
        try:
            for index, (view, offset, nbytes) in enumerate(pieces):  # noqa: B007 - read where it fails
                self.copy_one(view, offset, nbytes)
        except Exception as exc:
            raise PieceError(index) from exc

    def copy_one(self, view: Any, offset: int, nbytes: int) -> None:
        """Copy one array."""
        array = _as_array(view)
        check_place(array.nbytes, offset, nbytes, self._mapping)
        if nbytes == 0:
            return
        if not array.flags.c_contiguous and offset % array.dtype.alignment == 0:
            target = np.frombuffer(self._mapping.view, array.dtype, count=array.size, offset=offset)
            np.copyto(target.reshape(array.shape), array)
            return
        array = np.ascontiguousarray(array)
        move(self._mapping.address + offset, array.__array_interface__["data"][0], nbytes)

    def split(self, view: Any, offset: int, nbytes: int, limit_bytes: int) -> Iterable[Piece]:
        """See `Copier`."""
        if nbytes <= limit_bytes:
            return [(view, offset, nbytes)]
        return list(split_rows(self.flat(view), offset, nbytes, limit_bytes))

    def flat(self, view: Any) -> Any:
        """Return a contiguous view as one row, others as they are."""
        array = _as_array(view)
        return array.reshape(-1) if array.flags.c_contiguous else array

    def mark(self) -> Any:
        """See `Copier`."""
        return None

    def reached(self, mark: Any, timeout_s: float) -> bool:
        """See `Copier`; always true."""
        return True

    def check_hold(self) -> None:
        """See `Copier`."""

    def hold(self, mark: Any) -> None:
        """See `Copier`; nothing to hold."""

    def sample(self, views: Sequence[Any]) -> Sample:
        """See `Copier`."""
        return Taken.of(views, lambda view: _as_array(view).tobytes())

    def block(self, view: Any, at_byte: int, limit_bytes: int) -> tuple[Any, int, int] | None:
        """See `Copier`."""
        array = _as_array(view)
        if array.dtype.fields is not None or array.dtype.itemsize > limit_bytes:
            return None  # bytes between fields are nobody's, and may differ
        return run_at(array, array.shape, at_byte, array.dtype.itemsize, limit_bytes)

    def close(self) -> None:
        """See `Copier`."""


class NumpyDevice:
    """Host memory, NumPy arrays only, for programs that never import a framework; the base of others of host memory."""

    name = "cpu"
    asynchronous = False

    def prepare_host(self, mapping: Mapping) -> bool:
        """See `Device`; host memory needs nothing."""
        return False

    def release_host(self, mapping: Mapping) -> None:
        """See `Device`."""

    def copier(self, mapping: Mapping) -> Copier:
        """See `Device`."""
        return NumpyCopier(mapping)

    def num_threads(self) -> int:
        """See `Device`."""
        return idle_cores()

    def numa_node(self) -> int | None:
        """See `Device`: where this process runs, if that is on one node only."""
        return numa.node_of_cpus()


class Taken:
    """A sample that is here already."""

    def __init__(self, blocks: list[bytes]) -> None:
        """Keep the blocks."""
        self._blocks = blocks

    @classmethod
    def of(cls, views: Sequence[Any], read: Callable[[Any], bytes]) -> Taken:
        """Read all views now."""
        blocks: list[bytes] = []
        try:
            for view in views:
                blocks.append(read(view))
        except Exception as exc:
            raise PieceError(len(blocks)) from exc
        return cls(blocks)

    def get(self) -> list[bytes]:
        """See `Sample`."""
        return self._blocks


def idle_cores(env: Environment[str, str] | None = None) -> int:
    """Return how many cores are this rank's while it waits for its own save: its share of the node's, 8 at most.

    More do not make a copy faster. Launchers set OMP_NUM_THREADS=1 for every rank, so the number of threads that
    computations use says nothing here.

    Args:
        env: Where `LOCAL_WORLD_SIZE` is looked for, the ranks of this node as launchers tell it; None: the environment.
    """
    told = (os.environ if env is None else env).get("LOCAL_WORLD_SIZE", "1")
    num_ranks = int(told) if told.isdigit() else 1
    return max(1, min(8, len(os.sched_getaffinity(0)) // max(1, num_ranks)))


def move(target: int, source: int, nbytes: int) -> None:
    """Copy memory; the interpreter lock is released where that pays (giving it up costs as much as copying 64 KiB)."""
    if nbytes <= _SMALL_BYTES:
        _move_small(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)


def check_place(actual: int, offset: int, nbytes: int, mapping: Mapping) -> None:
    """Keep a wrong plan from writing outside its place."""
    if actual != nbytes or offset < 0 or offset + nbytes > mapping.size_bytes:
        raise ValueError(f"{actual} bytes do not fit at {offset}..{offset + nbytes} of {mapping.size_bytes}")


def _as_array(view: Any) -> np.ndarray[Any, Any]:
    if not isinstance(view, np.ndarray) or view.dtype.hasobject:
        raise UnsupportedStateError(f"a {type(view).__name__} cannot be copied from host memory as it is")
    return view


def run_at(view: Any, shape: Sequence[int], at_byte: int, itemsize: int, limit_bytes: int) -> tuple[Any, int, int]:
    """Return the run along the last dim that begins with the element at `at_byte`: (view, byte offset, bytes)."""
    start = at_byte // itemsize
    if not shape:
        return view, 0, itemsize
    index = []
    rest = start
    for size in reversed(shape):
        rest, place = divmod(rest, size)
        index.append(place)
    index.reverse()
    last = index.pop()
    count = min(shape[-1] - last, max(1, limit_bytes // itemsize))
    return view[(*index, slice(last, last + count))], start * itemsize, count * itemsize


def split_rows(view: Any, offset: int, nbytes: int, limit_bytes: int) -> Iterator[Piece]:
    """Cut along the first dim, and inside a row where a row alone is too long."""
    rows = view.shape[0] if view.ndim else 1
    if nbytes <= limit_bytes or not view.ndim:
        yield view, offset, nbytes
        return
    row_bytes = nbytes // rows
    if row_bytes > limit_bytes and view.ndim > 1:
        for row in range(rows):
            yield from split_rows(view[row], offset + row * row_bytes, row_bytes, limit_bytes)
        return
    step = max(1, limit_bytes // row_bytes)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        yield view[row : row + count], offset + row * row_bytes, count * row_bytes


def open_device(views: Iterable[Any]) -> Device:
    """Return the device for a state: CUDA if one of its views is there, else host memory.

    Args:
        views: Live tensors and arrays, all of the state or a few that are like the rest.
    """
    if "torch" not in sys.modules:
        return NumpyDevice()
    from safehold.host.device_torch import TorchDevice

    if any(getattr(getattr(view, "device", None), "type", "") == "cuda" for view in views):
        from safehold.host.cuda import CudaDevice

        return CudaDevice()
    return TorchDevice()
