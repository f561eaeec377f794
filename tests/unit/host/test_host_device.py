"""What copies into an arena, alone: places are checked, faults say which piece, blocks are where they say."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from safehold.errors import ConfigurationError, UnsupportedStateError
from safehold.host import cuda, memfd
from safehold.host.cuda import CudaDevice
from safehold.host.device import NumpyDevice, PieceError, idle_cores, run_at, split_rows
from safehold.host.device_torch import TorchDevice, exact_bytes


@pytest.fixture
def mapping():
    fd = memfd.create(1 << 20, "device")
    found = memfd.Mapping(fd)
    os.close(fd)
    yield found
    assert found.close()


@pytest.mark.parametrize("device", [NumpyDevice(), TorchDevice(), CudaDevice()], ids=["numpy", "torch", "cuda"])
def test_host_memory_on_every_device(device, mapping):
    array = np.arange(60.0).reshape(6, 10).T
    copier = device.copier(mapping)
    copier.begin([array])
    copier.copy([(array, 64, 480), (array[:0], 5000, 0)])
    mark = copier.mark()
    assert copier.reached(mark, 0.0)
    copier.check_hold()
    copier.hold(mark)
    assert bytes(mapping.view[64 : 64 + 480]) == array.tobytes()
    assert copier.sample([array, array[1:2, 3:5]]).get() == [array.tobytes(), array[1:2, 3:5].tobytes()]
    copier.close()


@pytest.mark.parametrize("offset", [1, 3, 1001])
def test_places_that_are_not_aligned(mapping, offset):
    copier = TorchDevice().copier(mapping)
    tensor = torch.randn(30, 20)
    array = tensor.numpy()
    for view, value in ((tensor, array), (tensor.t(), array.T), (tensor[:, ::2], array[:, ::2]), (array.T, array.T)):
        copier.copy([(view, offset, value.nbytes)])
        assert bytes(mapping.view[offset : offset + value.nbytes]) == value.tobytes()
    copier.close()


@pytest.mark.parametrize("device", [NumpyDevice(), TorchDevice(), CudaDevice()], ids=["numpy", "torch", "cuda"])
@pytest.mark.parametrize(("offset", "nbytes"), [(-8, 80), ((1 << 20) - 72, 80), (0, 79), (0, 88)])
def test_nothing_is_written_outside_its_place(device, mapping, offset, nbytes):
    copier = device.copier(mapping)
    good = np.zeros(4)
    with pytest.raises(PieceError) as caught:
        copier.copy([(good, 512, 32), (np.ones(10), offset, nbytes)])
    assert caught.value.index == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert bytes(mapping.view).count(0) == 1 << 20
    copier.close()


def test_a_sample_says_which_view_could_not_be_taken(mapping):
    copier = TorchDevice().copier(mapping)
    with pytest.raises(PieceError) as caught:
        copier.sample([torch.ones(2), torch.empty(3, device="meta")])
    assert caught.value.index == 1
    with pytest.raises(PieceError) as caught:
        NumpyDevice().copier(mapping).sample(["text"])
    assert isinstance(caught.value.__cause__, UnsupportedStateError)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 7), (4, 3, 1)])
def test_runs_are_where_they_say(shape):
    array = np.random.default_rng(0).integers(0, 1 << 30, shape, dtype=np.int32)
    whole = array.tobytes()
    for at_byte in range(array.nbytes):
        view, start, size = run_at(array, array.shape, at_byte, 4, 12)
        assert start <= at_byte < start + size
        assert view.tobytes() == whole[start : start + size]
        assert size <= 12 and size % 4 == 0


@pytest.mark.parametrize("limit", [1, 4, 24, 100, 1000, 10**6])
def test_cuts_cover_everything_once_and_in_order(limit):
    array = np.arange(6 * 7 * 5, dtype=np.int32).reshape(5, 7, 6).transpose(2, 1, 0)
    whole = array.tobytes()
    at = 40
    for view, offset, size in split_rows(array, 40, array.nbytes, limit):
        assert offset == at and size == view.nbytes
        assert view.tobytes() == whole[at - 40 : at - 40 + size]
        assert size <= max(limit, 4)
        at += size
    assert at == 40 + array.nbytes


@pytest.mark.parametrize("device", [NumpyDevice(), TorchDevice(), CudaDevice()], ids=["numpy", "torch", "cuda"])
def test_every_device_cuts_arrays_and_tensors_alike(device, mapping):
    copier = device.copier(mapping)
    array = np.arange(6 * 7 * 5, dtype=np.int32).reshape(6, 7, 5)
    for value in (array, array.transpose(2, 1, 0), array[:, ::2]):
        views = [value] if type(device) is NumpyDevice else [value, torch.from_numpy(value)]
        for view in views:
            assert list(copier.split(view, 8, value.nbytes, value.nbytes)) == [(view, 8, value.nbytes)]
            pieces = list(copier.split(view, 8, value.nbytes, 100))
            assert len(pieces) > value.nbytes // 100 and all(size <= 100 for _, _, size in pieces)
            copier.copy(pieces)
            assert bytes(mapping.view[8 : 8 + value.nbytes]) == value.tobytes()
            mapping.view[8 : 8 + value.nbytes] = bytes(value.nbytes)
    copier.close()


def test_structured_arrays_are_not_sampled(mapping):
    copier = NumpyDevice().copier(mapping)
    assert copier.block(np.zeros(3, dtype=[("a", "i1"), ("b", "f8")]), 0, 4096) is None
    assert copier.block(np.zeros(3, dtype="S9000"), 0, 4096) is None


def test_an_arena_that_could_not_be_unpinned_stays_pinned(mapping, monkeypatch):
    results = iter([0, 700, 0])
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: next(results), cudaHostUnregister=lambda *_: next(results))
    monkeypatch.setattr(cuda, "_cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    device = CudaDevice()
    device.release_host(mapping)
    assert device.prepare_host(mapping) and device.prepare_host(mapping)
    with pytest.raises(ConfigurationError, match="CUDA error 700"):
        device.release_host(mapping)
    device.release_host(mapping)
    assert next(results, None) is None


def test_exact_bytes_of_odd_strides():
    tensor = torch.randn(6, 8, dtype=torch.bfloat16)
    assert exact_bytes(tensor[1:2, :1]) == tensor[1, 0].view(torch.int16).numpy().tobytes()


def test_the_cores_of_a_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    assert idle_cores({}) == 8
    assert idle_cores({"LOCAL_WORLD_SIZE": "8"}) == 3
    assert idle_cores({"LOCAL_WORLD_SIZE": "100"}) == 1
    assert idle_cores({"LOCAL_WORLD_SIZE": "none"}) == idle_cores({"LOCAL_WORLD_SIZE": "0"}) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "12")
    assert TorchDevice().num_threads() == NumpyDevice().num_threads() == 2
    assert CudaDevice().num_threads() == 1
