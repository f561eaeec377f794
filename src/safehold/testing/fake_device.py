"""A device as unkind as a GPU, on CPU and without chance.

Invariants: a queued copy reads its source when its stream runs, not when it was queued; a stream runs only as far as
its events allow. The training stream runs as early as it may, and the copying stream as late as it may
(`eager_copies=False`), or the other way round, so that every order that was not asked for by an event goes wrong.
Nothing depends on time or on scheduling, save that `reached` in another thread than the one that made the device
waits until `run_copies` is called, as a host waits for hardware.

`without` leaves out one of the ordering calls, to show that a test would notice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from safehold.errors import UnsupportedStateError
from safehold.host.device import Copier, NumpyCopier, Piece, PieceError, Sample, run_at, split_rows
from safehold.host.memfd import Mapping

Call = Literal["begin", "reached", "hold"]


class FakeTensor:
    """An array in the fake device's memory; only kernels may touch it."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        """Use `data` as device memory."""
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes along each dim."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.data.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.data.nbytes

    def __getitem__(self, index: Any) -> FakeTensor:
        """Return a view."""
        return FakeTensor(self.data[index])


@dataclass(slots=True)
class _Event:
    done: bool = False


@dataclass(slots=True)
class _Stream:
    """Work in order: functions to run, events to wait for, events to set."""

    todo: deque[Callable[[], None] | _Event] = field(default_factory=deque)

    def run(self) -> bool:
        """Run up to the first event that is not there; return whether anything ran."""
        ran = False
        while self.todo:
            entry = self.todo[0]
            if isinstance(entry, _Event):
                if not entry.done:
                    return ran
            else:
                entry()
            self.todo.popleft()
            ran = True
        return ran


class FakeDevice:
    """A device with a training stream and a copying stream.

    Attributes:
        fail_at: Number of the piece (counted from 0 over the device's life) whose copy raises; None: none does.
        capturing: Whether the trainer captures a graph, so that its stream cannot be made to wait.
    """

    name = "fake"
    asynchronous = True

    def __init__(self, *, eager_copies: bool = False, without: Iterable[Call] = (), fail_at: int | None = None) -> None:
        """Make a device; the thread that does is its trainer.

        Args:
            eager_copies: Run the copying stream as early as possible and the training stream as late, instead of the
                reverse.
            without: Ordering calls that do nothing.
            fail_at: See the attribute.
        """
        self.eager_copies = eager_copies
        self.without = frozenset(without)
        self.fail_at = fail_at
        self.capturing = False
        self.num_pieces = 0
        self.prepared: list[int] = []
        self._training = _Stream()
        self._copying = _Stream()
        self._condition = threading.Condition()
        self._trainer = threading.current_thread()

    def tensor(self, values: Any) -> FakeTensor:
        """Return device memory with these values."""
        return FakeTensor(np.array(values))

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel on the training stream."""
        self._queue(self._training, kernel)

    def synchronize(self) -> None:
        """Trainer: wait until the training stream is empty; the copying stream runs only where that is waited for."""
        with self._condition:
            while self._training.todo:
                if not self._training.run() and not self._copying.run():
                    raise RuntimeError("the streams wait for each other")
            self._condition.notify_all()

    def run_copies(self) -> None:
        """Let the copying stream run until it is empty; the training stream runs only where that is waited for."""
        with self._condition:
            while self._copying.todo:
                if not self._copying.run() and not self._training.run():
                    raise RuntimeError("the streams wait for each other")
            self._condition.notify_all()

    def _queue(self, stream: _Stream, entry: Callable[[], None] | _Event) -> None:
        with self._condition:
            stream.todo.append(entry)
            eager = self._copying if self.eager_copies else self._training
            eager.run()
            self._condition.notify_all()

    def _record(self, stream: _Stream) -> _Event:
        event = _Event()

        def set_event() -> None:
            event.done = True

        self._queue(stream, set_event)
        return event

    def prepare_host(self, mapping: Mapping) -> bool:
        """See `Device`."""
        self.prepared.append(mapping.address)
        return True

    def release_host(self, mapping: Mapping) -> None:
        """See `Device`."""
        self.prepared.remove(mapping.address)

    def copier(self, mapping: Mapping) -> Copier:
        """See `Device`."""
        return FakeCopier(self, mapping)

    def num_threads(self) -> int:
        """See `Device`."""
        return 1

    def numa_node(self) -> int | None:
        """See `Device`."""
        return None


class FakeCopier:
    """Queues copies on the copying stream of a `FakeDevice`; NumPy arrays are host memory and are copied at once."""

    def __init__(self, device: FakeDevice, mapping: Mapping) -> None:
        """Copy into a mapping."""
        self._device = device
        self._host = NumpyCopier(mapping)

    def begin(self, views: Iterable[Any]) -> None:
        """See `Copier`."""
        if "begin" not in self._device.without:
            event = self._device._record(self._device._training)
            self._device._queue(self._device._copying, event)

    def copy(self, pieces: Sequence[Piece]) -> None:
        """See `Copier`."""
        for index, piece in enumerate(pieces):
            number, self._device.num_pieces = self._device.num_pieces, self._device.num_pieces + 1
            if number == self._device.fail_at:
                raise PieceError(index) from RuntimeError("the fake device fails")
            self._queue_copy(piece)

    def _queue_copy(self, piece: Piece) -> None:
        view, offset, nbytes = piece
        if isinstance(view, FakeTensor):
            data = view.data
            self._device._queue(self._device._copying, lambda: self._host.copy_one(data, offset, nbytes))
        else:
            self._host.copy_one(view, offset, nbytes)

    def split(self, view: Any, offset: int, nbytes: int, limit_bytes: int) -> Iterator[Piece]:
        """See `Copier`."""
        return split_rows(view, offset, nbytes, limit_bytes)

    def mark(self) -> Any:
        """See `Copier`."""
        return self._device._record(self._device._copying)

    def reached(self, mark: Any, timeout_s: float) -> bool:
        """See `Copier`."""
        if "reached" in self._device.without:
            return True
        if threading.current_thread() is self._device._trainer:
            if timeout_s:
                self._device.run_copies()
            return bool(mark.done)
        with self._device._condition:
            return self._device._condition.wait_for(lambda: bool(mark.done), timeout_s)

    def check_hold(self) -> None:
        """See `Copier`."""
        if self._device.capturing:
            raise UnsupportedStateError("the step is being captured")

    def hold(self, mark: Any) -> None:
        """See `Copier`."""
        if "hold" not in self._device.without:
            self._device._queue(self._device._training, mark)

    def sample(self, views: Sequence[Any]) -> Sample:
        """See `Copier`."""
        data = [view.data if isinstance(view, FakeTensor) else view for view in views]
        sample = _FakeSample(self, [bytes(part.nbytes) for part in data])

        def take() -> None:
            sample.blocks[:] = [part.tobytes() for part in data]

        self._device._queue(self._device._copying, take)
        sample.mark = self.mark()
        return sample

    def block(self, view: Any, at_byte: int, limit_bytes: int) -> tuple[Any, int, int] | None:
        """See `Copier`."""
        itemsize = view.data.itemsize if isinstance(view, FakeTensor) else view.itemsize
        return run_at(view, view.shape, at_byte, itemsize, limit_bytes)

    def close(self) -> None:
        """See `Copier`."""


class _FakeSample:
    def __init__(self, copier: FakeCopier, blocks: list[bytes]) -> None:
        self._copier = copier
        self.blocks = blocks
        self.mark: Any = None

    def get(self) -> list[bytes]:
        if not self._copier.reached(self.mark, 60.0):
            raise TimeoutError("the copying stream did not run")
        return self.blocks
