"""Staging from a real GPU. Skipped, visibly, where there is none; the order of its waits is tested on CPU with the fake device."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from staging_bench import Bench

from safehold.errors import UnsupportedStateError
from safehold.host import cuda, memfd
from safehold.host.cuda import CudaDevice
from safehold.host.device import open_device

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture
def bench():
    """Makes a bench whose arena is populated and pinned, and takes both back at the end."""
    made = []

    def make(leaves, *, pin=True):
        device = CudaDevice()
        found = Bench(device, [(name, view, value, hooked) for name, view, value, hooked in leaves])
        memfd.populate(found.mapping)
        if pin:
            assert device.prepare_host(found.mapping)
            assert device.prepare_host(found.mapping)
        made.append((device, found))
        return found

    yield make
    for device, found in made:
        found.stager.close()
        device.release_host(found.mapping)
        assert found.mapping.close()


def value_of(view):
    source = view.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return source.view(-1).view(torch.uint8).numpy().tobytes() if source.numel() else b""


def leaf(name, view, hooked=True):
    return name, view, value_of(view), hooked


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pin", [False, True])
def test_every_layout_arrives_exactly(bench, overlap, pin):
    torch.manual_seed(0)
    base = torch.randn(600, 500, device="cuda")
    views = [base, base.t(), base[::2, 1:], base[:1].expand(3, 500), base[2, 3], base[:0], base.bfloat16().t()]
    complex_ = torch.view_as_complex(torch.randn(64, 64, 2, device="cuda"))
    views += [
        complex_,
        complex_.conj(),
        complex_.conj().t(),
        complex_.conj().imag,
        torch.arange(7, device="cuda", dtype=torch.uint8),
    ]
    leaves = [leaf(f"leaf{n}", view, hooked=n % 2 == 0) for n, view in enumerate(views)]
    host = np.arange(1000.0)
    leaves += [("scalar", torch.tensor(3.0), value_of(torch.tensor(3.0)), True), ("host", host, host.tobytes(), False)]
    found = bench(leaves, pin=pin)
    for _ in range(2):
        ticket = found.stage(overlap=overlap)
        ticket.wait_before_step()
        ticket.finish(60)
        found.assert_exact()


def test_the_training_stream_is_waited_for_and_held(bench):
    weight = torch.zeros(64 << 20, device="cuda")
    expected = torch.full((64 << 20,), 2.0)
    found = bench([("weight", weight, expected.numpy().tobytes(), True)])
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            weight.fill_(2.0)
            ticket = found.stage(overlap=True)
            ticket.wait_before_step()
            assert not ticket.settled  # the host was not kept
            weight.fill_(3.0)
        ticket.finish(60)
        found.assert_exact()
        torch.cuda.synchronize()
        assert float(weight[0]) == 3.0


def test_steps_of_optimizers(bench):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()

    step()
    leaves = [leaf(name, p.detach()) for name, p in model.named_parameters()]
    leaves += [leaf(f"{n}.{k}", v) for n, s in enumerate(optimizer.state.values()) for k, v in s.items()]
    found = bench(leaves)
    ticket = found.stage(overlap=True)
    handle = optimizer.register_step_pre_hook(lambda *_: ticket.wait_before_step())
    step()
    step()
    ticket.finish(60)
    found.assert_exact()
    handle.remove()


def test_a_change_during_the_copy_fails_by_name(bench):
    weight = torch.randn(32 << 20, device="cuda")
    found = bench([leaf("weight", weight)])
    torch.cuda._sleep(10_000_000)
    ticket = found.stage(overlap=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        weight.add_(1)
    ticket.wait_before_step()
    with pytest.raises(UnsupportedStateError, match="weight changed"):
        ticket.finish(60)


def test_freed_memory_is_not_reused_before_it_was_copied(bench):
    weight = torch.ones(64 << 20, device="cuda")
    found = bench([leaf("weight", weight)])
    for _ in range(3):
        source = torch.ones(64 << 20, device="cuda")
        found.items[0] = type(found.items[0])(
            view=source, offset=found.items[0].offset, nbytes=found.items[0].nbytes, hooked=True, name="weight"
        )
        ticket = found.stage(overlap=True)
        ticket.wait_before_step()
        source.untyped_storage().resize_(0)
        spoiler = torch.zeros(64 << 20, device="cuda")
        ticket.finish(60)
        found.assert_exact()
        del spoiler


def test_strided_sources_take_bounded_memory(bench):
    weight = torch.randn(16384, 8192, device="cuda").t()
    found = bench([leaf("weight", weight, hooked=False)])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found.stage(overlap=False).finish(60)
    found.assert_exact()
    assert torch.cuda.max_memory_allocated() - before <= 2 * cuda.TEMPORARY_BYTES


def test_a_step_that_is_being_captured_is_not_spoiled(bench):
    weight = torch.randn(64 << 20, device="cuda")
    found = bench([leaf("weight", weight)])
    torch.cuda._sleep(500_000_000)
    ticket = found.stage(overlap=True)
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ticket.wait_before_step()
        out.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert float(out[0]) == 1.0
    with pytest.raises(UnsupportedStateError, match="captured"):
        ticket.finish(60)


def test_the_device_is_found_by_the_state():
    assert isinstance(open_device([torch.ones(1, device="cuda")]), CudaDevice)
    node = cuda.numa_node()
    assert node is None or node >= 0
