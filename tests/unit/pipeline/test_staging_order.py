"""The order that staging asks a device for: right with all of its waits, and visibly wrong without any one of them."""

import numpy as np
import pytest
from staging_bench import Bench

from safehold.errors import CommitError, DeadlineError, UnsupportedStateError
from safehold.host import memfd
from safehold.pipeline import staging
from safehold.testing.fake_device import FakeDevice

OLD, MADE, STEPPED = 1.0, 2.0, 3.0
SIZE = 1000


def value(number):
    return np.full(SIZE, number).tobytes()


def prepared(*, hooked=True, num_leaves=1, **options):
    """Leaves that a kernel still has to make on the training stream, and a bench that expects what it makes."""
    device = FakeDevice(**options)
    tensors = [device.tensor(np.full(SIZE, OLD)) for _ in range(num_leaves)]
    bench = Bench(device, [(f"leaf{n}", tensor, value(MADE), hooked) for n, tensor in enumerate(tensors)])

    def fill(number):
        def kernel():
            for tensor in tensors:
                tensor.data[...] = number

        return kernel

    device.launch(fill(MADE))
    return device, bench, fill


def overlapped_step(**options):
    """Stage beside training, step as soon as the hook lets one, and only then let the copies run."""
    device, bench, fill = prepared(**options)
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    device.launch(fill(STEPPED))
    device.synchronize()
    device.run_copies()
    try:
        ticket.finish(20)
        bench.assert_exact()
    finally:
        bench.close()


def plain_step(**options):
    """Stage, and step right after."""
    device, bench, fill = prepared(hooked=False, **options)
    ticket = bench.stage(overlap=False)
    device.launch(fill(STEPPED))
    device.synchronize()
    device.run_copies()
    try:
        ticket.finish(20)
        bench.assert_exact()
    finally:
        bench.close()


def unhooked_beside(**options):
    """A leaf that is not hooked may change as soon as `stage` has returned, also with overlap."""
    device, bench, fill = prepared(hooked=False, **options)
    ticket = bench.stage(overlap=True)
    device.launch(fill(STEPPED))
    device.synchronize()
    device.run_copies()
    try:
        ticket.finish(20)
        bench.assert_exact()
    finally:
        bench.close()


SCENARIOS = [overlapped_step, plain_step, unhooked_beside]


@pytest.mark.parametrize("eager_copies", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_order(scenario, eager_copies):
    scenario(eager_copies=eager_copies)


@pytest.mark.parametrize(
    ("scenario", "without", "eager_copies"),
    [
        (overlapped_step, "begin", True),  # copies what the training stream has not made yet
        (overlapped_step, "hold", False),  # copies what the step has made of it
        (overlapped_step, "reached", False),  # announces bytes that are not there
        (plain_step, "begin", True),
        (plain_step, "reached", False),
        (unhooked_beside, "begin", True),
        (unhooked_beside, "reached", False),
    ],
)
def test_each_wait_is_needed(scenario, without, eager_copies):
    with pytest.raises((AssertionError, UnsupportedStateError)):
        scenario(without=[without], eager_copies=eager_copies)


def test_the_step_is_held_without_stopping_the_host():
    device, bench, fill = prepared(num_leaves=3)
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    device.launch(fill(STEPPED))
    assert not ticket.settled  # the host went on, nothing is copied yet
    assert bench.end not in bench.checker.told
    device.run_copies()
    figures = ticket.finish(20)
    assert figures.overlapped_bytes == figures.size_bytes == 3 * SIZE * 8
    device.synchronize()
    bench.assert_exact()
    bench.close()


def test_only_what_is_hooked_waits_for_the_step():
    device = FakeDevice()
    hooked, buffer = device.tensor(np.full(SIZE, MADE)), device.tensor(np.full(SIZE, MADE))
    host = np.full(SIZE, MADE)
    bench = Bench(
        device,
        [
            ("buffer", buffer, value(MADE), False),
            ("weight", hooked, value(MADE), True),
            ("counter", host, value(MADE), False),
        ],
    )
    ticket = bench.stage(overlap=True)
    buffer.data[...] = STEPPED
    host[...] = STEPPED
    ticket.wait_before_step()
    device.run_copies()
    ticket.finish(20)
    bench.assert_exact()
    bench.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fail_at", range(4))
def test_a_fault_of_the_device_fails_the_ticket_by_name(overlap, fail_at):
    device, bench, _ = prepared(num_leaves=4, fail_at=fail_at)
    ticket = bench.stage(overlap=overlap)
    ticket.wait_before_step()
    device.run_copies()
    with pytest.raises(CommitError, match=f"leaf{fail_at} failed: the fake device fails"):
        ticket.finish(20)
    assert bench.end not in bench.checker.told
    device.fail_at = None
    after = bench.stage(overlap=overlap)
    after.wait_before_step()
    device.run_copies()
    after.finish(20)
    bench.assert_exact()
    bench.close()


def test_a_device_that_never_gets_there_is_given_up(monkeypatch):
    monkeypatch.setattr(staging, "_LIMIT_S", 0.3)
    device, bench, _ = prepared()
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    with pytest.raises(DeadlineError, match="did not end within"):
        ticket.finish(0.05)
    with pytest.raises(DeadlineError, match="did not copy leaf0"):
        ticket.finish(20)
    device.run_copies()
    bench.close()


def test_cancelling_waits_until_nothing_writes_to_the_arena():
    device, bench, _ = prepared()
    ticket = bench.stage(overlap=True)
    ticket.wait_before_step()
    assert ticket.cancel(CommitError("not wanted any more"))
    with pytest.raises(CommitError, match="not wanted"):
        ticket.finish(0)
    before = bytes(bench.mapping.view)
    device.run_copies()
    assert bytes(bench.mapping.view) == before
    assert bench.end not in bench.checker.told
    bench.close()


def test_the_next_save_waits_for_its_turn():
    device, bench, _ = prepared()
    bench.stage(overlap=True)
    with pytest.raises(Exception, match="still being staged"):
        bench.stage(overlap=True)
    device.run_copies()
    bench.close()


def test_arenas_are_prepared_and_released():
    device = FakeDevice()
    fd = memfd.create(4096, "test")
    with memfd.Mapping(fd) as mapping:
        assert device.prepare_host(mapping)
        assert device.prepared == [mapping.address]
        device.release_host(mapping)
        assert device.prepared == []


def test_a_step_that_is_captured_fails_the_save_and_not_the_step():
    device, bench, fill = prepared()
    ticket = bench.stage(overlap=True)
    device.capturing = True
    ticket.wait_before_step()
    device.launch(fill(STEPPED))
    device.synchronize()  # nothing was put into the stream that is captured
    device.run_copies()
    with pytest.raises(UnsupportedStateError, match="captured"):
        ticket.finish(20)
    assert bench.end not in bench.checker.told
    bench.close()
