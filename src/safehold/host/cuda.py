"""CUDA tensors: pinned arenas, a copying stream beside the training stream.

Invariants: a copy is queued behind all work that the training stream had when `begin` was called, and never on the
training stream; its source is not reused by the allocator before it ran (`record_stream`); a strided source is made
contiguous on the device in pieces of at most `TEMPORARY_BYTES`, one after the other on the copying stream, so that
their memory is used again; the host trusts bytes in the arena only behind an event. A pinned arena is unregistered
before it is unmapped.

While copies are queued, another thread asks for their events; a graph must not be captured meanwhile in CUDA's mode
`global`, in which no thread may ask for anything.

What is on the host (scalars of optimizers, NumPy arrays) is copied at once by `device_torch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from safehold.errors import ConfigurationError, UnsupportedStateError
from safehold.host import numa
from safehold.host.device import Copier, Piece, PieceError, Sample, check_place
from safehold.host.device_torch import TorchCopier, exact_bytes, flat_bytes, is_plain, resolved
from safehold.host.memfd import Mapping

TEMPORARY_BYTES = 32 << 20
_REGISTER_PORTABLE = 1  # for all devices of the process
_POLL_S = 0.0002

Mark = list[tuple[torch.device, "torch.cuda.Event"]]


class CudaCopier:
    """Queues copies on a stream of its own per GPU."""

    def __init__(self, mapping: Mapping) -> None:
        """Copy into a writable mapping; asynchronous in earnest only if `CudaDevice.prepare_host` has pinned it."""
        self._mapping = mapping
        self._host = TorchCopier(mapping)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, views: Iterable[Any]) -> None:
        """See `Copier`: the copying streams wait for the current streams of the calling thread."""
        for device in {view.device for view in views if isinstance(view, torch.Tensor) and view.is_cuda}:
            self._stream(device).wait_stream(torch.cuda.current_stream(device))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        return stream

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `Copier`."""
        index = 0
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for index, piece in enumerate(pieces):  # noqa: B007 - read where it fails
                    view, offset, nbytes = piece
                    if not (isinstance(view, torch.Tensor) and view.is_cuda):
                        self._host.copy([piece])
                        continue
                    check_place(view.nbytes, offset, nbytes, self._mapping)
                    if nbytes:
                        self._queue(view, offset, nbytes)
        except PieceError as exc:
            raise PieceError(index) from exc.__cause__
        except Exception as exc:
            raise PieceError(index) from exc

    def _queue(self, view: torch.Tensor, offset: int, nbytes: int) -> None:
        stream = self._stream(view.device)
        with torch.cuda.stream(stream):
            if is_plain(view):
                source = flat_bytes(view)
                self._host.target(offset, torch.uint8, source.shape).copy_(source, non_blocking=True)
            else:
                for piece, place, size in self.split(view, offset, nbytes, TEMPORARY_BYTES):
                    # Resolved on the device: `copy_` would conjugate the host memory before the bytes have come.
                    source = flat_bytes(resolved(piece).contiguous())
                    self._host.target(place, torch.uint8, torch.Size((size,))).copy_(source, non_blocking=True)
        view.record_stream(stream)

    def split(self, view: Any, offset: int, nbytes: int, limit_bytes: int) -> Iterable[Piece]:
        """See `Copier`."""
        return self._host.split(view, offset, nbytes, limit_bytes)

    def mark(self) -> Any:
        """See `Copier`."""
        marks: Mark = []
        for device, stream in self._streams.items():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            marks.append((device, event))
        return marks

    def reached(self, mark: Any, timeout_s: float) -> bool:
        """See `Copier`. Asks instead of blocking in the driver, where nothing could interrupt it."""
        deadline = time.monotonic() + timeout_s
        for _, event in mark:
            while not event.query():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
        return True

    def check_hold(self) -> None:
        """See `Copier`: not in a thread that captures a graph, which foreign events and queries would spoil."""
        if self._streams and torch.cuda.is_current_stream_capturing():
            raise UnsupportedStateError(
                "an optimizer's step was captured as a graph while a save was staged beside it",
                hint="capture graphs before the first save, and save with overlap=False where a replay steps",
            )

    def hold(self, mark: Any) -> None:
        """See `Copier`: the current streams of the calling thread wait; the host does not."""
        for device, event in mark:
            torch.cuda.current_stream(device).wait_event(event)

    def sample(self, views: Sequence[Any]) -> Sample:
        """See `Copier`: the blocks are brought to pinned memory by the copying streams; `get` waits for them."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return _CudaSample(self, views)

    def block(self, view: Any, at_byte: int, limit_bytes: int) -> tuple[Any, int, int] | None:
        """See `Copier`."""
        return self._host.block(view, at_byte, limit_bytes)

    def close(self) -> None:
        """See `Copier`; waits for what is queued."""
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()
        self._host.close()


class _CudaSample:
    """Blocks on their way from the device."""

    def __init__(self, copier: CudaCopier, views: Sequence[Any]) -> None:
        self._copier = copier
        self._blocks: list[torch.Tensor | bytes] = []
        try:
            for view in views:
                self._blocks.append(self._take(view))
        except Exception as exc:
            raise PieceError(len(self._blocks)) from exc
        self._mark = copier.mark()

    def _take(self, view: Any) -> torch.Tensor | bytes:
        if not (isinstance(view, torch.Tensor) and view.is_cuda):
            return exact_bytes(view)
        stream = self._copier._stream(view.device)
        with torch.cuda.stream(stream):
            source = flat_bytes(resolved(view).contiguous())
            host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(source, non_blocking=True)
        view.record_stream(stream)
        return host

    def get(self) -> list[bytes]:
        if not self._copier.reached(self._mark, 60.0):
            raise TimeoutError("the device did not copy sampled blocks within 60 s")
        return [block if isinstance(block, bytes) else block.numpy().tobytes() for block in self._blocks]


class CudaDevice:
    """One or more GPUs of this process, and host memory."""

    name = "cuda"
    asynchronous = True

    def __init__(self) -> None:
        """Nothing is allocated before it is used."""
        self._registered: set[int] = set()

    def prepare_host(self, mapping: Mapping) -> bool:
        """Pin an arena (`cudaHostRegister`); False if the driver refuses, then copies go through its own buffers,
        slower.
        """
        if mapping.size_bytes == 0 or mapping.address in self._registered:
            return mapping.size_bytes > 0
        torch.cuda.init()  # type: ignore[no-untyped-call]
        result = int(_cudart().cudaHostRegister(mapping.address, mapping.size_bytes, _REGISTER_PORTABLE))
        if result != 0:
            _forget_error()
            return False
        self._registered.add(mapping.address)
        return True

    def release_host(self, mapping: Mapping) -> None:
        """Unpin.

        Raises:
            ConfigurationError: The driver refuses; unmapping the arena then would be a fault waiting to happen.
        """
        if mapping.address not in self._registered:
            return
        result = int(_cudart().cudaHostUnregister(mapping.address))
        if result != 0:
            raise ConfigurationError(f"unpinning an arena failed: CUDA error {result}")
        self._registered.remove(mapping.address)

    def copier(self, mapping: Mapping) -> Copier:
        """See `Device`."""
        return CudaCopier(mapping)

    def num_threads(self) -> int:
        """See `Device`; one thread keeps the copy engines busy."""
        return 1

    def numa_node(self) -> int | None:
        """See `Device`: the one that the current GPU hangs on."""
        return numa_node()


def numa_node(device: int | None = None) -> int | None:
    """Return the NUMA node that a GPU (None: the current one) hangs on; None if the machine does not say."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    place: list[int | None] = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return None
    domain, bus, slot = (int(part or 0) for part in place)
    return numa.node_of_pci(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """Clear the error of a refused registration, which the next kernel would report as its own; torch has no call for
    it.
    """
    major = (torch.version.cuda or "").split(".")[0]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()
