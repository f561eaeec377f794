"""A user's program that is interrupted (SIGINT, as by Ctrl-C) at a chosen moment; NumPy only, so that it starts fast.

    python interrupted.py WHAT RUN PHASE

`WHAT` names one of the functions below; `PHASE` is the event at whose start the signal comes. With `PUPPET_STORE`, a
directory, ranks meet there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import safehold
from safehold.events import Event

STEP = 2


class DirectoryStore:
    """A key-value store of files."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "%")

    def set(self, key: str, value: bytes) -> None:
        temporary = self._path(f"{key}.{os.getpid()}.tmp")
        temporary.write_bytes(value)
        temporary.rename(self._path(key))

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)


def state() -> dict[str, object]:
    return {"w": np.arange(1 << 20, dtype=np.float32), "n": 1}


def interrupt(number: int = 1) -> None:
    """Ctrl-C, as the main thread meets it."""
    for _ in range(number):
        signal.raise_signal(signal.SIGINT)


def at(
    ckpt: safehold.Checkpointer, phase: str, step: int | None = STEP, first: Callable[[], object] = lambda: None
) -> None:
    """Interrupt when a phase starts, and `first` has returned."""

    def listen(event: Event) -> None:
        if (event.phase, event.stage) == (phase, "started") and step in (None, event.step):
            first()
            interrupt()

    ckpt.events.subscribe(listen)


def with_block(run: str, phase: str) -> None:
    with safehold.Checkpointer(run) as ckpt:
        ckpt.save(1, state()).wait()
        at(ckpt, phase)
        ckpt.save(STEP, state())


def bare(run: str, phase: str) -> None:
    ckpt = safehold.Checkpointer(run)
    ckpt.save(1, state()).wait()
    at(ckpt, phase)
    ckpt.save(STEP, state())


def go_on(run: str, phase: str) -> None:
    with safehold.Checkpointer(run) as ckpt:
        assert ckpt.restore(state()) in (1, None)
        ckpt.save(STEP, state()).wait()


def own_code(run: str, phase: str) -> None:
    try:
        bare(run, phase)
    except KeyboardInterrupt:
        sys.exit(42)


def restore(run: str, phase: str) -> None:
    with safehold.Checkpointer(run) as ckpt:
        at(ckpt, phase, None)
        ckpt.restore(state())


def drain_at_exit(run: str, phase: str) -> None:
    ckpt = safehold.Checkpointer(run, flush_rate_bytes_s=4 << 20, flush_block_bytes=1 << 20)
    real = ckpt.wait

    def wait(timeout_s: float | None = None, *, remote: bool = False) -> None:
        signal.signal(signal.SIGALRM, lambda *_: interrupt())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        real(timeout_s, remote=remote)

    ckpt.wait = wait  # type: ignore[method-assign]
    ckpt.save(1, {"w": np.zeros(1 << 20)})
    if phase == "close":
        ckpt.close()
    if phase == "again":
        with ckpt:
            interrupt()


def wait_for(store: DirectoryStore, key: str) -> None:
    ends = time.monotonic() + 20
    while not store.check([key]) and time.monotonic() < ends:
        time.sleep(0.005)


def ranks(run: str, phase: str) -> None:
    """Rank 1 is interrupted in its save; rank 0 hears of it when it ends."""
    rank = int(os.environ["RANK"])
    store = DirectoryStore(os.environ["PUPPET_STORE"])
    ckpt = safehold.Checkpointer(run, store=store, rank=rank, world_size=2)
    ckpt.save(1, state()).wait()
    if rank == 1:
        at(ckpt, phase, first=lambda: wait_for(store, "staged"))
    handle = ckpt.save(STEP, state())
    store.set("staged", b"")  # before that the news would be raised by `save` itself
    while handle.state in ("staging", "staged"):
        time.sleep(0.01)


def once(run: str, phase: str) -> None:
    """The save without an agent, interrupted while it writes or while it commits."""
    from safehold.pipeline import direct_save
    from safehold.tiers import flash_pack

    place = flash_pack.FlashPackWriter if phase == "write_at" else direct_save
    real = getattr(place, phase)

    def slowly(*arguments: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return real(*arguments, **options)

    setattr(place, phase, slowly)
    safehold.save(run, state(), step=STEP)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
