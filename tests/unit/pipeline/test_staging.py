"""Staging without overlap: exact bytes of everything, in arena order, faults by name."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staging_bench import Bench, random_bytes

from safehold.errors import CommitError, ConfigurationError, UnsupportedStateError
from safehold.events import EventStream
from safehold.host import control, memfd
from safehold.host.device import NumpyDevice, open_device
from safehold.host.device_torch import TorchDevice
from safehold.pipeline import stage_work
from safehold.pipeline.staging import StageItem, Stager

DTYPES = sorted(
    {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype) and not value.is_complex},
    key=str,
)


def value_of(view: torch.Tensor) -> bytes:
    """The bytes that a view must have in the arena, by a way that staging does not use."""
    resolved = view.detach().resolve_conj().resolve_neg()
    if resolved.itemsize in (1, 2, 4, 8) and not resolved.is_complex():
        resolved = resolved.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[resolved.itemsize])
    return resolved.cpu().numpy().tobytes()


def stage_all(views, *, device=None, overlap=False):
    device = device or TorchDevice()
    leaves = [
        (f"leaf{n}", view, view.tobytes() if isinstance(view, np.ndarray) else value_of(view), True)
        for n, view in enumerate(views)
    ]
    bench = Bench(device, leaves)
    ticket = bench.stage(overlap=overlap)
    ticket.wait_before_step()
    figures = ticket.finish(30)
    bench.assert_exact()
    assert figures.size_bytes == sum(item.nbytes for item in bench.items)
    bench.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_dtype_and_every_layout(dtype, overlap):
    raw = torch.frombuffer(bytearray(random_bytes(1, 6 * 8 * dtype.itemsize)), dtype=torch.uint8)
    tensor = raw.view(dtype).view(6, 8)
    stage_all(
        [
            tensor,
            tensor.t(),
            tensor[::2, 1:],
            tensor[:1].expand(3, 8),
            tensor[2, 3],
            tensor[:0],
            tensor[1:, :1],
            tensor.view(2, 3, 2, 4).permute(3, 1, 0, 2),
        ],
        overlap=overlap,
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_and_their_lazy_bits(dtype):
    tensor = torch.view_as_complex(torch.randn(6, 8, 2, dtype=torch.float64)).to(dtype)
    stage_all(
        [
            tensor,
            tensor.conj(),
            tensor.conj().t(),
            tensor.conj()[::2, 3:],
            tensor.imag,
            tensor.conj().imag,
            torch._neg_view(tensor.real.contiguous()),
        ]
    )


def test_channels_last_parameters_and_subclasses():
    weight = torch.nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))

    class Labelled(torch.Tensor):
        pass

    grown = (weight * 2).detach().requires_grad_()
    stage_all([weight, grown, torch.randn(5, 5).as_subclass(Labelled), torch.randn(3, 3).as_subclass(Labelled).t()])
    assert weight.grad_fn is None and weight.requires_grad


def test_numpy_arrays():
    structured = np.zeros(5, dtype=[("a", "<i4"), ("b", "<f8")])
    structured["b"] = 1.5
    arrays = [
        np.arange(24.0).reshape(4, 6),
        np.arange(24.0).reshape(4, 6).T,
        np.arange(24, dtype=">i4")[::3],
        np.array(7),
        np.zeros((0, 3)),
        np.array(["2024-01-01", "NaT"], dtype="M8[s]"),
        np.array(["ab", "c"]),
        structured,
        np.broadcast_to(np.arange(3), (4, 3)),
        np.frombuffer(b"read only", np.uint8),
    ]
    stage_all(arrays)
    stage_all(arrays, device=NumpyDevice(), overlap=True)


def test_signalling_nans_keep_their_bits():
    bits = torch.tensor([0x7FA00001, 0x7FC00000, -0x5FFFFF, 1], dtype=torch.int32).view(torch.float32)
    stage_all([bits, bits.expand(5, 4), bits.repeat(3, 1).t()])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_view_of_any_tensor(data):
    shape = data.draw(st.lists(st.integers(0, 7), max_size=4))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64])
    )
    if dtype is torch.complex64:
        tensor = torch.randn(shape, dtype=dtype)
    else:
        tensor = torch.randn(shape).to(dtype)
    for dim, size in enumerate(shape):
        step = data.draw(st.integers(1, 3))
        start = data.draw(st.integers(0, size))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    stage_all([tensor], overlap=data.draw(st.booleans()))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.view(-1)],
    ids=["plain", "t", "strided", "flat"],
)
def test_large_tensors_are_cut_and_arrive_whole(make, overlap):
    tensor = torch.frombuffer(bytearray(random_bytes(3, 24_000_000)), dtype=torch.float32).view(3000, 2000)
    stage_all([torch.ones(7), make(tensor.contiguous()), torch.ones(9)], overlap=overlap)


def test_one_row_longer_than_a_batch():
    stage_all([torch.arange(2 * 3_000_000, dtype=torch.float32).view(2, -1), torch.arange(5_000_000.0).expand(2, -1)])


def test_progress_is_told_every_8_mib_and_never_backwards():
    leaves = [
        (f"leaf{n}", view := torch.full((1 << 18,), n, dtype=torch.int32), value_of(view), False) for n in range(64)
    ]
    bench = Bench(TorchDevice(), leaves)
    bench.stage(overlap=False).finish(0)
    bench.assert_exact()
    steps = np.diff([0, *bench.checker.told])
    assert len(steps) >= 6 and steps.min() >= 0
    assert steps[:-1].min() >= stage_work.ADVANCE_BYTES
    bench.close()


def test_several_threads_copy_what_is_worth_it(monkeypatch):
    seen = set()
    device = TorchDevice()
    leaves = [
        (f"leaf{n}", view := torch.full((4 << 20,), n, dtype=torch.uint8), value_of(view), False) for n in range(16)
    ]
    bench = Bench(device, leaves)
    copy = bench.stager.copier.copy
    barrier = threading.Barrier(3, timeout=20)

    def watch(pieces):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            barrier.wait()
        copy(pieces)

    monkeypatch.setattr(bench.stager.copier, "copy", watch)
    monkeypatch.setattr(device, "num_threads", lambda: 3)
    bench.stage(overlap=False).finish(0)
    bench.assert_exact()
    assert len(seen) == 3
    bench.close()


def test_the_same_arena_is_used_again_and_again():
    tensor = torch.zeros(1000)
    bench = Bench(TorchDevice(), [("w", tensor, value_of(tensor), True)])
    for step in range(5):
        tensor.fill_(step)
        expected = bytearray(bench.checker.expected)
        expected[bench.items[0].offset : bench.items[0].offset + 4000] = value_of(tensor)
        bench.checker.expected = bytes(expected)
        bench.stage(overlap=step % 2 == 1).finish(10)
        bench.assert_exact()
    bench.close()


def test_it_drives_a_real_control_block():
    fd = memfd.create(8192, "test")
    block = control.RankControl.create()
    mapping = memfd.Mapping(fd)
    stager = Stager(TorchDevice(), mapping, block)
    block.begin_save(1)
    stager.stage([StageItem(view=torch.ones(4), offset=0, nbytes=16)], overlap=False, size_bytes=4096).finish(0)
    assert block.staged_of(1) == 4096
    stager.close()
    block.close()


def test_nothing_is_kept_alive_and_gradients_are_not_tracked():
    weight = torch.nn.Parameter(torch.randn(100, 100))
    view = weight.t()
    leaf = weakref.ref(weight)
    bench = Bench(TorchDevice(), [("w", view, value_of(view), False)])
    ticket = bench.stage(overlap=False)
    ticket.finish(0)
    assert view.grad_fn is not None  # the user's own
    bench.items.clear()
    del weight, view
    gc.collect()
    assert leaf() is None
    bench.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=False),
        torch.empty(4, device="meta"),
        np.array([object()] * 2),
        "text",
    ],
    ids=["sparse", "meta", "objects", "text"],
)
def test_what_cannot_be_copied_fails_by_name(bad, overlap):
    leaves = [("good", torch.ones(4), bytes(16), True), ("model.bad", bad, bytes(16), True)]
    bench = Bench(TorchDevice(), leaves)
    ticket = bench.stage(overlap=overlap)
    ticket.wait_before_step()
    with pytest.raises((UnsupportedStateError, CommitError), match=r"model\.bad"):
        ticket.finish(10)
    assert bench.end not in bench.checker.told
    bench.close()


def test_a_view_of_another_size_than_planned_never_spills():
    tensor = torch.ones(100)
    bench = Bench(TorchDevice(), [("short", tensor, bytes(64), False), ("next", torch.ones(4), bytes(16), False)])
    with pytest.raises(CommitError, match="short"):
        bench.stage(overlap=False).finish(0)
    assert bytes(bench.mapping.view[bench.items[0].offset :]).count(0) == bench.end - bench.items[0].offset
    bench.close()


def test_a_wrong_layout_is_refused():
    fd = memfd.create(4096, "test")
    with memfd.Mapping(fd) as mapping:
        stager = Stager(NumpyDevice(), mapping, control.RankControl.create())
        one = StageItem(view=np.zeros(8), offset=0, nbytes=64, name="one")
        for wrong in (
            StageItem(view=np.zeros(8), offset=32, nbytes=64, name="two"),
            StageItem(view=np.zeros(8), offset=4064, nbytes=64, name="two"),
        ):
            with pytest.raises(ConfigurationError, match="two"):
                stager.stage([one, wrong], overlap=False)
        stager.close()


def test_an_empty_state_is_staged():
    bench = Bench(TorchDevice(), [])
    assert bench.stage(overlap=True).finish(0).size_bytes == 0
    bench.assert_exact()
    bench.close()


def test_events_tell_of_success_and_failure():
    events = EventStream()
    seen = []
    events.subscribe(seen.append)
    fd = memfd.create(4096, "test")
    with memfd.Mapping(fd) as mapping:
        stager = Stager(TorchDevice(), mapping, control.RankControl.create(), events)
        stager.stage([StageItem(view=torch.ones(4), offset=0, nbytes=16)], overlap=False, step=7).finish(0)
        stager.stage([StageItem(view=torch.ones(4), offset=0, nbytes=15)], overlap=False, step=8)
        stager.close()
    assert [(event.phase, event.stage, event.step) for event in seen] == [
        ("stage", "started", 7),
        ("stage", "done", 7),
        ("stage", "started", 8),
        ("stage", "failed", 8),
    ]


def test_the_device_is_chosen_by_the_state():
    assert isinstance(open_device([torch.ones(1), np.ones(1)]), TorchDevice)
