"""Staging through a ring that is smaller than the state: a flusher sees every byte once, and waits for nobody for ever."""

import threading

import numpy as np
import pytest
import torch

from safehold.errors import CommitError, ConfigurationError, DeadlineError
from safehold.host import memfd
from safehold.host.control import RankControl
from safehold.host.device import NumpyDevice
from safehold.host.device_torch import TorchDevice
from safehold.pipeline.staging import StageItem, Stager
from safehold.testing.fake_device import FakeDevice


class Flusher:
    """Reads blocks out of the ring as they are staged, as the real one would."""

    def __init__(self, control, mapping, ring_bytes, size_bytes, block_bytes):
        self.out = bytearray()
        self._arguments = control, mapping, ring_bytes, size_bytes, block_bytes
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        control, mapping, ring_bytes, size_bytes, block_bytes = self._arguments
        control.begin_flush(1)
        while len(self.out) < size_bytes:
            staged = control.wait_staged(1, len(self.out), 5.0)
            whole = staged if staged == size_bytes else (staged or 0) // block_bytes * block_bytes
            while len(self.out) < whole:
                start = len(self.out) % ring_bytes
                count = min(block_bytes, whole - len(self.out), ring_bytes - start)
                self.out += mapping.view[start : start + count]
                control.advance_flushed(1, len(self.out))

    def join(self):
        self._thread.join(20)
        return bytes(self.out)


def items_of(views, values):
    items, offset = [], 0
    for number, (view, data) in enumerate(zip(views, values, strict=True)):
        items.append(StageItem(view=view, offset=offset, nbytes=len(data), name=f"leaf{number}"))
        offset += len(data)
        if pad := -offset % 64:
            items.append(StageItem(view=np.zeros(pad, np.uint8), offset=offset, nbytes=pad, name="padding"))
            offset += pad
    return items, offset


def stage(device, views, values, ring_bytes, block_bytes):
    items, size = items_of(views, values)
    fd = memfd.create(ring_bytes, "ring")
    control = RankControl.create()
    with memfd.Mapping(fd) as mapping:
        stager = Stager(device, mapping, control)
        control.begin_save(1)
        flusher = Flusher(control, mapping, ring_bytes, size, block_bytes)

        def wait_flushed(num_bytes):
            if not control.wait_flushed(1, num_bytes, 10.0):
                raise DeadlineError("the flusher is late")

        figures = stager.stage_in_waves(items, ring_bytes, wait_flushed, size_bytes=size)
        out = flusher.join()
        stager.close()
    assert figures.size_bytes == size
    for item, data in zip((i for i in items if i.name != "padding"), values, strict=True):
        assert out[item.offset : item.offset + item.nbytes] == data, item.name
    control.close()


def test_a_ring_of_host_memory():
    torch.manual_seed(0)
    big = torch.randn(1000, 1000)
    views = [
        torch.randn(3),
        big,
        big.t(),
        big[:, ::3],
        torch.arange(7, dtype=torch.uint8),
        np.arange(100_000).reshape(100, 1000).T,
    ]
    values = [v.contiguous().numpy().tobytes() if isinstance(v, torch.Tensor) else v.tobytes() for v in views]
    for ring, block in (
        (1 << 20, 1 << 18),
        (3 << 20, 1 << 20),
        (64 << 20, 4 << 20),
        (12 * 4096, 4096),
        (12 * 4096, 8 * 4096),
    ):
        stage(TorchDevice(), views, values, ring, block)


def test_a_ring_of_a_device_that_queues():
    device = FakeDevice()
    data = np.random.default_rng(0).normal(size=(500, 500))
    stage(
        device,
        [device.tensor(data), device.tensor(data.T), data],
        [data.tobytes(), data.T.tobytes(), data.tobytes()],
        1 << 19,
        1 << 17,
    )


def test_faults():
    fd = memfd.create(1 << 20, "ring")
    control = RankControl.create()
    with memfd.Mapping(fd) as mapping:
        stager = Stager(NumpyDevice(), mapping, control)
        view = np.zeros(1 << 20)
        item = StageItem(view=view, offset=0, nbytes=view.nbytes, name="big")

        def late(num_bytes):
            raise DeadlineError(f"the flusher is late at {num_bytes}")

        with pytest.raises(DeadlineError, match="late at"):
            stager.stage_in_waves([item], 1 << 20, late, size_bytes=view.nbytes)
        for ring in (0, 1000, 2 << 20):
            with pytest.raises(ConfigurationError, match="ring"):
                stager.stage_in_waves([item], ring, late, size_bytes=view.nbytes)
        gap = StageItem(view=np.zeros(8), offset=64, nbytes=64, name="gap")
        with pytest.raises(ConfigurationError, match="gap begins at 64"):
            stager.stage_in_waves([gap], 1 << 20, late, size_bytes=128)
        short = StageItem(view=np.zeros(4), offset=0, nbytes=64, name="short")
        with pytest.raises(CommitError, match="short"):
            stager.stage_in_waves([short], 1 << 20, late, size_bytes=64)
        with pytest.raises(ConfigurationError, match="end at 64"):
            stager.stage_in_waves([StageItem(view=np.zeros(8), offset=0, nbytes=64)], 1 << 20, late, size_bytes=128)
        stager.close()
    control.close()
