"""Staging beside training on CPU: nothing that the step changes gets into the arena, and what else changes is found."""

import threading
import time

import numpy as np
import pytest
import torch
from staging_bench import Bench

from safehold.errors import CommitError, UnsupportedStateError
from safehold.host.device_torch import TorchDevice


def bench_of(tensors, *, hooked=True):
    return Bench(
        TorchDevice(), [(f"w{n}", t, t.detach().contiguous().numpy().tobytes(), hooked) for n, t in enumerate(tensors)]
    )


class Gate:
    """Keeps the background copy from starting, so that the caller's part can be seen."""

    def __init__(self, bench):
        self._copy = bench.stager.copier.copy
        self.opened = threading.Event()
        self.threads = []
        bench.stager.copier.copy = self

    def __call__(self, pieces):
        self.threads.append(threading.current_thread())
        if threading.current_thread().name == "safehold-stage":
            assert self.opened.wait(20)
        self._copy(pieces)


def test_the_caller_helps_and_waits_for_what_is_in_the_middle():
    tensors = [torch.randn(1 << 20) for _ in range(8)]
    bench = bench_of(tensors)
    gate = Gate(bench)
    ticket = bench.stage(overlap=True)
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    ticket.wait_before_step()
    assert gate.opened.is_set()  # one batch was in the other thread's hands
    for tensor in tensors:
        tensor.zero_()
    figures = ticket.finish(10)
    bench.assert_exact()
    assert threading.current_thread() in gate.threads
    assert figures.pause_s > 0.05 and figures.overlapped_bytes == 32 << 20
    bench.close()
    opener.join()


def test_stage_returns_before_anything_hooked_is_copied():
    tensors = [torch.randn(1 << 20) for _ in range(4)]
    bench = bench_of(tensors)
    gate = Gate(bench)
    ticket = bench.stage(overlap=True)
    assert not ticket.settled and bench.checker.told == []
    gate.opened.set()
    ticket.finish(10)  # without a step
    bench.assert_exact()
    ticket.wait_before_step()  # late and harmless
    bench.close()


def test_many_rounds_of_random_steps():
    tensors = [torch.zeros(n) for n in (1, 1000, 100_000, 3_000_000)]
    bench = bench_of(tensors)
    for seed in range(12):
        for tensor in tensors:
            tensor.fill_(seed)
        expected = bytearray(bench.checker.expected)
        for item, tensor in zip(bench.items, tensors, strict=True):
            expected[item.offset : item.offset + item.nbytes] = tensor.numpy().tobytes()
        bench.checker.expected = bytes(expected)
        ticket = bench.stage(overlap=True)
        time.sleep(0.0005 * (seed % 4))
        ticket.wait_before_step()
        for tensor in tensors:
            tensor.fill_(-1)
        ticket.finish(10)
        bench.assert_exact()
    bench.close()


def test_a_change_during_the_copy_fails_by_name():
    tensors = [torch.randn(1 << 20) for _ in range(4)]
    bench = bench_of(tensors)
    gate = Gate(bench)
    ticket = bench.stage(overlap=True)
    tensors[2].add_(1)  # not by an optimizer that was hooked
    gate.opened.set()
    ticket.wait_before_step()
    with pytest.raises(UnsupportedStateError, match=r"^w2 changed while it was copied"):
        ticket.finish(10)
    assert bench.end not in bench.checker.told
    bench.close()


def test_a_change_after_its_copy_and_before_the_step_fails_too():
    tensors = [torch.randn(1 << 20) for _ in range(4)]
    bench = bench_of(tensors)
    copy = bench.stager.copier.copy

    def copy_and_spoil(pieces):
        copy(pieces)
        tensors[0].add_(1)

    bench.stager.copier.copy = copy_and_spoil
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    with pytest.raises(UnsupportedStateError, match="w0 changed"):
        ticket.finish(10)
    bench.close()


def test_a_change_after_the_copy_is_complete_is_nobodys_business():
    tensors = [torch.randn(1 << 16)]
    bench = bench_of(tensors)
    ticket = bench.stage(overlap=True)
    ticket.finish(10)
    tensors[0].zero_()
    ticket.wait_before_step()
    assert ticket.error is None
    bench.assert_exact()
    bench.close()


def test_nans_are_no_changes():
    bench = bench_of([torch.full((1000,), float("nan"))])
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    ticket.finish(10)
    bench.close()


def test_samples_of_strided_and_odd_tensors():
    tensors = [
        torch.randn(64, 64).t(),
        torch.randn(30)[::3],
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.randn(5, 1).expand(5, 7),
    ]
    bench = bench_of(tensors)
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    ticket.finish(10)
    bench.assert_exact()
    bench.close()


@pytest.mark.parametrize("fault", [RuntimeError("boom"), MemoryError(), SystemError("x")])
def test_a_fault_in_the_thread_is_raised_by_finish(fault):
    bench = bench_of([torch.randn(1 << 20)])

    def fail(pieces):
        raise fault

    bench.stager.copier.copy = fail
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()  # the step goes on
    with pytest.raises(CommitError, match="staging") as caught:
        ticket.finish(10)
    assert caught.value.__cause__ is fault
    bench.close()


def test_without_a_thread_the_ticket_fails(monkeypatch):
    bench = bench_of([torch.randn(1 << 10)])

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    with pytest.raises(CommitError, match="thread"):
        ticket.finish(1)
    bench.close()


def test_hooks_from_several_threads_at_once():
    bench = bench_of([torch.randn(1 << 20) for _ in range(8)])
    ticket = bench.stage(overlap=True)
    threads = [threading.Thread(target=ticket.wait_before_step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ticket.finish(10)
    bench.assert_exact()
    bench.close()


def test_numpy_leaves_may_overlap_too():
    array = np.random.default_rng(1).normal(size=300_000)
    bench = Bench(TorchDevice(), [("a", array, array.tobytes(), True)])
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    array[...] = 0
    ticket.finish(10)
    bench.assert_exact()
    bench.close()


def test_after_a_failure_nothing_more_is_copied_or_told():
    tensors = [torch.randn(2 << 20) for _ in range(8)]
    bench = bench_of(tensors, hooked=False)
    bench.stager.device.num_threads = lambda: 1
    copy, calls = bench.stager.copier.copy, []

    def copy_and_cancel(pieces):
        calls.append(pieces)
        copy(pieces)
        if len(calls) == 3:
            bench.stager._current.cancel(CommitError("not wanted"), timeout_s=0)

    bench.stager.copier.copy = copy_and_cancel
    ticket = bench.stage(overlap=False)
    with pytest.raises(CommitError, match="not wanted"):
        ticket.finish(0)
    assert len(calls) == 3
    assert bench.checker.told == [bench.items[1].offset, bench.items[2].offset]
    bench.close()


def test_the_next_save_waits_for_a_late_copy_of_a_failed_one():
    tensors = [torch.randn(1 << 20) for _ in range(8)]
    bench = bench_of(tensors)
    gate = Gate(bench)
    ticket = bench.stage(overlap=True)
    while not any(thread.name == "safehold-stage" for thread in gate.threads):
        time.sleep(0.001)
    assert ticket.cancel(timeout_s=0.01) is False
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    after = bench.stage(overlap=False)
    assert gate.opened.is_set()
    after.finish(10)
    bench.assert_exact()
    bench.close()
    opener.join()
