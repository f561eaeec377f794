"""A rank's arena in the trainer: when it is mapped and unmapped, and what copies into it when."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from safehold.agent import messages as m
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CommitError, DeadlineError, SkippedError, UnsupportedStateError
from safehold.host import memfd
from safehold.host.control import RankControl
from safehold.pipeline.layout import Comparison, Planner, SaveLayout
from safehold.pipeline.staging import Ticket
from safehold.state.collect import collect
from safehold.state.leaves import Leaves
from safehold.trainer.arena import ArenaWriter
from safehold.trainer.connection import Run
from safehold.trainer.handles import SaveHandle

SIZE = 64 << 10


class Bench:
    """An arena writer and the state that it writes."""

    def __init__(self) -> None:
        self.control = RankControl.create()
        self.client: Any = SimpleNamespace(generation=1, rank=0, control=self.control)
        self.run = Run(client=self.client, world=None, run_id="run", newest_step=None, notes=[])  # type: ignore[arg-type]
        self.writer = ArenaWriter(self.run, Config(stage_timeout_s=0.3))
        self.planner = Planner(0, 1, pack_size_bytes=1 << 30, split_bytes=1 << 20)
        self.state: dict[str, Any] = {"w": np.arange(1000.0), "n": 3}
        self.seq = 0

    def map(self, arena_id: int, size: int = SIZE) -> memfd.Mapping:
        return self.writer.map(m.Granted(1, arena_id, size), [memfd.create(size, "arena")])

    def lay_out(self) -> tuple[Leaves, SaveLayout, Comparison]:
        leaves = collect(self.state, rank=0, world_size=1, random_states=False)
        layout = self.planner.layout(leaves)
        return leaves, layout, self.planner.comparison(layout, leaves, 1)

    def save(self, arena: memfd.Mapping, *, overlap: bool = False) -> tuple[SaveHandle, Ticket]:
        leaves, layout, comparison = self.lay_out()
        handle = SaveHandle(1, 0, flush_timeout_s=1.0)
        if overlap:
            for leaf in leaves.tensors:
                leaf.hooked = True
            self.planner = Planner(0, 1, pack_size_bytes=1 << 30, split_bytes=1 << 20)
            layout = self.planner.layout(leaves)
        with self.writer.saving():
            self.seq += 1
            self.control.begin_save(self.seq)
            self.writer.write_headers(layout, arena)
            ticket = self.writer.stage(handle, layout, comparison, leaves, arena, overlap=overlap)
        return handle, ticket

    def packs(self, arena: memfd.Mapping) -> dict[str, Any]:
        from safetensors.numpy import load

        return load(bytes(arena.view[: self.lay_out()[1].pack_bytes]))


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def slow(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies beside training wait for this."""
    from safehold.host.device import NumpyCopier
    from safehold.host.device_torch import TorchCopier

    go = threading.Event()
    for kind in (NumpyCopier, TorchCopier):
        copy = kind.copy

        def slowly(self: Any, pieces: Any, copy: Any = copy) -> None:
            if threading.current_thread().name == "safehold-stage":
                go.wait(10.0)
            copy(self, pieces)

        monkeypatch.setattr(kind, "copy", slowly)
    return go


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_arena_is_mapped_once_and_descriptors_are_closed(bench: Bench) -> None:
    before = num_fds()
    arena = bench.map(1)
    assert bench.map(1) is arena and num_fds() == before + 1, "an mmap keeps one of its own"
    assert bench.map(2) is not arena and bench.run.retired == [arena]
    assert bench.map(1) is not bench.run.arenas[2], "news of an older one come late"
    assert list(bench.run.arenas) == [2] and len(bench.run.retired) == 2
    bench.client.generation += 1
    assert bench.map(1) is bench.run.arenas[1] and len(bench.run.retired) == 3
    with pytest.raises(AgentUnavailableError):
        bench.writer.map(m.Granted(1, 9, SIZE), [])
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(AgentUnavailableError):
        bench.writer.map(m.Granted(1, 9, SIZE), [fd])
    bench.writer.close()
    assert num_fds() == before and not bench.run.arenas and not bench.run.retired


def test_what_is_staged_is_a_pack(bench: Bench) -> None:
    arena = bench.map(1)
    _handle, ticket = bench.save(arena)
    assert ticket.settled and np.array_equal(bench.packs(arena)["w"], bench.state["w"])
    bench.state["w"] += 1
    bench.save(arena)
    assert np.array_equal(bench.packs(arena)["w"], bench.state["w"])


def test_headers_are_written_again_where_they_may_not_be_there(bench: Bench) -> None:
    arena = bench.map(1)
    bench.save(arena)
    arena.view[:8] = bytes(8)
    bench.save(arena)
    assert bytes(arena.view[:8]) == bytes(8), "known to be there: not written"
    bench.writer.reset()
    bench.save(arena)
    assert np.array_equal(bench.packs(arena)["w"], bench.state["w"])

    _leaves, layout, _ = bench.lay_out()
    other = SaveLayout(
        **{name: getattr(layout, name) for name in layout.__slots__ if name not in ("headers", "digest")},
        headers=((0, b"x" * 8), (SIZE, b"outside")),
        digest="another",
    )
    with pytest.raises(ValueError):
        bench.writer.write_headers(other, arena)
    bench.save(arena)
    assert np.array_equal(bench.packs(arena)["w"], bench.state["w"]), "half a header of another layout was in the way"


def test_an_arena_is_unmapped_by_the_save_that_uses_another(bench: Bench) -> None:
    first = bench.map(1)
    bench.save(first)
    second = bench.map(2)
    assert first.view.nbytes == SIZE, "still mapped"
    bench.save(second)
    assert bench.run.retired == []
    with pytest.raises(ValueError):
        first.view.nbytes
    bench.writer.close()
    assert bench.run.arenas == {}


def test_an_arena_is_unmapped_before_a_larger_one_is_asked_for(bench: Bench) -> None:
    first = bench.map(1)
    bench.save(first)
    bench.writer.make_room(SIZE, saving=True)
    assert bench.run.arenas == {1: first}, "it is large enough"
    bench.writer.make_room(2 * SIZE)
    assert not bench.run.arenas and not bench.run.retired
    with pytest.raises(ValueError):
        bytes(first.view[:1])
    ring = bench.map(2)
    bench.writer.make_room(2 * SIZE)
    assert bench.run.arenas == {2: ring}, "asked for in vain: the budget holds no more"
    with bench.writer.saving():
        bench.writer.make_room(3 * SIZE)
        assert bench.run.arenas == {2: ring}, "somebody else's save"
        bench.writer.make_room(3 * SIZE, saving=True)
        assert not bench.run.arenas
    bench.writer.close()


def test_preparing_beside_a_save_unmaps_nothing_that_is_copied_into(bench: Bench, slow: threading.Event) -> None:
    first = bench.map(1)
    _handle, ticket = bench.save(first, overlap=True)
    assert not ticket.settled
    leaves, _, _ = bench.lay_out()
    bench.writer.prepare(m.Prepared(1, 2, SIZE), [memfd.create(SIZE, "arena")], leaves)
    assert bench.run.retired == [first] and first.view.nbytes == SIZE
    slow.set()
    bench.writer.finish()
    assert ticket.error is None
    bench.save(bench.run.arenas[2])
    assert bench.run.retired == []


def test_the_optimizers_wait_is_the_tickets_own(bench: Bench, slow: threading.Event) -> None:
    arena = bench.map(1)
    handle, ticket = bench.save(arena, overlap=True)
    other = SaveHandle(2, 0, flush_timeout_s=1.0)
    threading.Timer(0.1, slow.set).start()
    bench.writer.before_optimizer_step()
    assert ticket.settled or ticket._closed
    assert handle.figures.pause_s > 0.05 and other.figures.pause_s == 0.0
    bench.writer.finish()
    pause = handle.figures.pause_s
    bench.writer.before_optimizer_step()
    assert handle.figures.pause_s == pause, "nothing is open"


def test_a_staging_that_does_not_end_is_cancelled_and_the_next_save_goes_on(
    bench: Bench, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.writer, "_config", Config(stage_timeout_s=0.05))
    arena = bench.map(1)
    _handle, ticket = bench.save(arena, overlap=True)
    failed: list[Any] = []
    bench.writer.follow(ticket, lambda: failed.append("staged"), failed.append)
    timer = threading.Timer(0.4, slow.set)
    timer.start()
    bench.writer.finish()
    assert isinstance(ticket.error, DeadlineError)
    deadline = time.monotonic() + 5.0
    while not failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert isinstance(failed[0], DeadlineError) and len(failed) == 1
    _, again = bench.save(arena)
    assert again.error is None and np.array_equal(bench.packs(arena)["w"], bench.state["w"])
    assert bench.control.staged_of(1) is None, "the old one says nothing any more"


@pytest.mark.parametrize("exc", [KeyboardInterrupt(), CommitError("x"), SkippedError("busy"), ValueError("x")])
def test_an_interrupted_save_does_not_stand_in_the_way_of_the_next(
    bench: Bench, slow: threading.Event, exc: Any
) -> None:
    arena = bench.map(1)
    leaves, layout, comparison = bench.lay_out()
    for leaf in leaves.tensors:
        leaf.hooked = True
    layout = Planner(0, 1, pack_size_bytes=1 << 30, split_bytes=1 << 20).layout(leaves)
    handle = SaveHandle(1, 0, flush_timeout_s=1.0)
    threading.Timer(0.1, slow.set).start()
    with pytest.raises(type(exc)), bench.writer.saving():
        bench.writer.write_headers(layout, arena)
        if not isinstance(exc, SkippedError):
            bench.writer.stage(handle, layout, comparison, leaves, arena, overlap=True)
        raise exc
    _, ticket = bench.save(arena)
    assert ticket.error is None and np.array_equal(bench.packs(arena)["w"], bench.state["w"])


def test_what_follows_an_overlapped_staging(bench: Bench) -> None:
    arena = bench.map(1)
    done: list[Any] = []
    _, ticket = bench.save(arena, overlap=True)
    bench.writer.follow(ticket, lambda: done.append("staged"), done.append)

    def broken() -> None:
        raise MemoryError("none")

    bench.writer.follow(ticket, broken, done.append)
    deadline = time.monotonic() + 5.0
    while len(done) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    [error] = [entry for entry in done if entry != "staged"]
    assert isinstance(error, CommitError) and "MemoryError" in str(error)


def test_a_tensor_that_cannot_be_copied_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from safehold.host import device

    def broken(view: Any) -> Any:
        raise UnsupportedStateError("not from here")

    arena = bench.map(1)
    bench.save(arena)
    monkeypatch.setattr(device, "_as_array", broken)
    with pytest.raises(UnsupportedStateError, match="w: not from here"):
        bench.save(arena)
    monkeypatch.undo()
    bench.save(arena)


def test_a_ring_takes_what_is_larger_than_itself(bench: Bench) -> None:
    bench.state["w"] = np.arange(3 << 20, dtype=np.float32)
    leaves, layout, _ = bench.lay_out()
    ring_bytes = 8 << 20
    arena = bench.map(1, ring_bytes)
    handle = SaveHandle(1, 0, flush_timeout_s=1.0)
    written = bytearray(layout.pack_bytes)
    bench.control.begin_save(1)
    bench.control.begin_flush(1)

    def flush() -> None:
        done = 0
        while done < layout.pack_bytes:
            staged = bench.control.wait_staged(1, done, 5.0) or 0
            for at in range(done, staged, 4096):
                written[at : at + 4096] = arena.view[at % ring_bytes : at % ring_bytes + 4096]
            done = max(done, staged)
            bench.control.advance_flushed(1, done)

    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    with bench.writer.saving():
        bench.writer.stage_in_waves(handle, layout, leaves, arena, ring_bytes=ring_bytes, save_seq=1)
    flusher.join(5.0)
    from safetensors.numpy import load

    assert np.array_equal(load(bytes(written))["w"], bench.state["w"])


def test_waves_end_when_the_save_is_given_up(bench: Bench) -> None:
    bench.state["w"] = np.arange(3 << 20, dtype=np.float32)
    leaves, layout, _ = bench.lay_out()
    arena = bench.map(1, 8 << 20)
    handle = SaveHandle(1, 0, flush_timeout_s=1.0)
    bench.control.begin_save(1)
    threading.Timer(0.1, handle._advance, ["failed"], {"error": CommitError("rank 1 left")}).start()
    begun = time.monotonic()
    with pytest.raises(CommitError, match="rank 1 left"), bench.writer.saving():
        bench.writer.stage_in_waves(handle, layout, leaves, arena, ring_bytes=8 << 20, save_seq=1)
    assert time.monotonic() - begun < 3.0


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(bench: Bench, slow: threading.Event) -> None:
    _, ticket = bench.save(bench.map(1), overlap=True)
    bench.writer._pid += 1
    bench.writer.before_optimizer_step()
    assert not ticket.settled
    bench.writer._pid -= 1
    slow.set()
    bench.writer.close()
