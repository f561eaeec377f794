"""Flushers: the real operations on the run directory over the world's storage, and a model of writing packs.

Invariants: as the real one a flusher answers each call once, in whatever order the calls end, and ends with its agent. One that hangs in
storage cannot be ended before storage answers; what it was doing then may be done, and no more.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from safehold.agent import flusher_client
from safehold.agent.flusher import FlusherProcess, superseded
from safehold.agent.flusher_client import Flusher
from safehold.config import Config
from safehold.errors import CheckpointError, CommitError, DeadlineError, StorageError
from safehold.format import crc, paths
from safehold.format.records import PackRecord
from safehold.host.sockets import Channel
from safehold.testing.world.fibers import Fiber, Killed
from safehold.testing.world.memory import Words
from safehold.testing.world.storage import URL, Hangs, Pack, View
from safehold.testing.world.timeline import Process
from safehold.tiers.base import Tier
from safehold.types import CommitId

Post = Callable[[Callable[[], None]], None]

if TYPE_CHECKING:
    from safehold.testing.world.machine import Machine
    from safehold.testing.world.world import World


class WorldFlusher(Flusher):
    """The agent's end: the real one, with a process of the world at the other end."""

    def __init__(self, world: World, machine: Machine, agent: Process, *, post: Post, dispatch: Post) -> None:
        super().__init__(
            URL,
            world.setting.wire,
            post=post,
            clock=world.timeline,
            events=world.events(agent.name),
            log_fd=None,
        )
        self._world, self._machine, self._agent, self._dispatch = world, machine, agent, dispatch

    @property
    def running(self) -> Process | None:
        """Where it runs, if it does."""
        return self._process.process if isinstance(self._process, FlusherEnd) else None

    def _ensure(self) -> Channel:
        if self._channel is not None:
            return self._channel
        self._generation += 1
        generation = self._generation

        def answered(number: int, value: Any, error: CheckpointError | None) -> None:
            self._dispatch(lambda: self._reply(generation, number, value, error))

        def died() -> None:
            self._post(lambda: self._lost(generation, "the flusher is gone"))

        end = FlusherEnd(self._world, self._machine, self._agent, answered, died)
        self._process, self._channel = cast(Any, end), cast(Channel, end)
        start = {"id": 0, "op": "start", "args": {"url": self._url, "config": self._config}}
        flusher_client._send(self._channel, start, ())
        return self._channel


class FlusherEnd(FlusherProcess):
    """The process; for its agent both the channel to it and the hold on it.

    Attributes:
        process: Where its work happens.
        closed: Whether its agent has let go of it.
    """

    def __init__(
        self,
        world: World,
        machine: Machine,
        agent: Process,
        answered: Callable[[int, Any, CheckpointError | None], None],
        died: Callable[[], None],
    ) -> None:
        super().__init__(cast(Channel, self))
        self._world, self._machine, self._agent = world, machine, agent
        self._answered = answered
        self.process = machine.process(f"flusher of {agent.name}")
        self.process.on_end.append(self._ended)
        self._died = died
        self.pid = 0
        self.closed = False
        self._is_killed = False
        self._num_stuck = 0
        self._fibers: set[Fiber] = set()
        self.packs: dict[tuple[int, ...], list[PackWork]] = {}
        agent.on_end.append(self.kill)

    # -- what the agent holds --------------------------------------------------------------------------------------------

    def send(self, data: bytes, fds: Sequence[int] = (), *, timeout_s: float | None = None) -> None:
        """As `Channel.send`."""
        world = self._world
        call = msgspec.msgpack.decode(data or _read(fds[-1]), type=dict[str, Any])
        world.timeline.at(
            world.timeline.between(*world.setting.local_s), self.process, lambda: self._take(call, list(fds))
        )

    def close(self) -> None:
        """As `Channel.close`: it ends."""
        self.closed = True
        self.kill()

    def kill(self) -> None:
        """As `Process.kill`."""
        self._is_killed = True
        if not self._num_stuck:
            self.process.kill()

    def wait(self, timeout_s: float) -> bool:
        """As `Process.wait`, without waiting."""
        return not self.process.alive

    @property
    def is_killed(self) -> bool:
        """Whether it has been told to end at once."""
        return self._is_killed

    def _stuck(self, change: int) -> None:
        self._num_stuck += change
        if self._is_killed and not self._num_stuck:
            self._world.timeline.at(0.0, None, self.process.kill)

    def _ended(self) -> None:
        for fiber in list(self._fibers):
            fiber.kill()
        if self._agent.alive and not self._is_killed:
            self._died()

    # -- calls -------------------------------------------------------------------------------------------------------------

    def _take(self, call: dict[str, Any], fds: list[int]) -> None:
        number, operation, arguments = call["id"], str(call["op"]), dict(call["args"])
        if operation == "start":
            self._config = Config.from_wire(arguments["config"])
            self._tier = None
        elif operation == "cancel":
            for work in list(self.packs.get(tuple(arguments["commit"]), ())):
                work.cancel()
            self._answer(number, True, None)
        elif operation == "flush":
            work = PackWork(self._world, self, self._world.shared.words[fds[1]], fds[0], number, arguments)
            self.packs.setdefault(tuple(arguments["commit"]), []).append(work)
            work.begin()
        elif operation != "forget":
            if operation != "record" or not self._world.timeline.is_terse:
                about = f"{self.process.name}: {operation} {arguments.get('commit', '')}"
                self._world.timeline.note("storage", about)
            given = fds if operation == "documents" else []
            self.work(lambda: self._run(number, operation, arguments, given))

    def work(self, work: Callable[[], None]) -> None:
        """Do what calls storage."""
        if not self._world.setting.interleaved:
            try:
                work()
            except Killed:
                pass
            except Hangs:
                self._begin_again(work)
            return

        def whole() -> None:
            try:
                work()
            except Hangs:
                self._begin_again(work)
            finally:
                self._fibers.discard(fiber)

        fiber = Fiber(self._world.timeline, self.process, whole)
        self._fibers.add(fiber)
        fiber.start()

    def _begin_again(self, work: Callable[[], None]) -> None:
        """It hangs, and cannot be left in its middle: do it anew once storage answers."""

        def healed() -> None:
            self._stuck(-1)
            self._world.timeline.at(0.0, self.process, lambda: None if self._is_killed else self.work(work))

        self._stuck(1)
        self._world.storage.when_healed(self._machine.name, healed)

    def _open(self) -> Tier:
        if self._tier is None:
            self._tier = View(
                self._world.storage, self._machine.name, stuck=self._stuck, is_killed=lambda: self._is_killed
            )
        return self._tier

    def _put(self, fd: int, data: bytes) -> None:
        block = self._world.shared.blocks.get(fd)
        if block is not None:  # else its agent has let go of it
            block.view[:] = data

    def _answer(self, number: int, value: Any, error: CheckpointError | None) -> None:
        timeline = self._world.timeline
        wire = msgspec.msgpack.encode({"id": number, "value": value, "error": error.to_wire() if error else None})
        delay_s = timeline.ahead_s + timeline.between(*self._world.setting.local_s)

        def arrive() -> None:
            if not self._is_killed:
                self._answered(*flusher_client._parse(wire))

        timeline.at(delay_s, self._agent, arrive)

    def superseded(self, commit: list[int]) -> CheckpointError | None:
        """Whether a newer incarnation is why storage failed."""
        return superseded(self._open(), commit)


class PackWork:
    """Writes one rank's pack: waits until it is staged, writes what the arena holds, makes it durable."""

    def __init__(
        self, world: World, flusher: FlusherEnd, words: Words, arena_fd: int, number: int, arguments: dict[str, Any]
    ) -> None:
        self._world, self._flusher, self._words, self._number = world, flusher, words, number
        self._arguments, self._arena = arguments, world.shared.arenas[arena_fd]
        self._is_over = self._is_writing = False
        commit = CommitId(*arguments["commit"])
        file = paths.pack(arguments["node"], arguments["rank"], 0)
        self._path = f"{paths.checkpoint_dir(commit)}/{file}"
        self._pack = Pack(flusher._machine.name, arguments["packs"][0][1])
        self._file = file

    def begin(self) -> None:
        """Make the pack, and wait for the first byte."""
        self._world.storage.put(self._path, self._pack)
        self._words.watching.append(self._look)
        timeline = self._world.timeline
        timeline.at(self._arguments["deadline_s"], self._flusher.process, self._expire)
        self._look()

    def cancel(self) -> None:
        """It is not wanted any more."""
        self._fail(CommitError("the flush was cancelled", step=self._arguments["commit"][0]))

    def _expire(self) -> None:
        self._fail(DeadlineError("not flushed in time", step=self._arguments["commit"][0]))

    def _look(self) -> None:
        if not self._is_writing and self._arguments["save_seq"] in self._words.staged:
            self._is_writing = True
            self._at(self._world.setting.write_s, self._write)

    def _at(self, times: tuple[float, float], work: Callable[[], None]) -> None:
        """Go on once storage has taken its time."""
        storage, timeline, machine = self._world.storage, self._world.timeline, self._flusher._machine.name

        def due() -> None:
            if self._is_over or self._flusher.is_killed:
                return
            if machine in storage.hanging:
                self._flusher._stuck(1)
                storage.when_healed(machine, unstuck)
            elif machine in storage.failing or storage.files.get(self._path) is not self._pack:
                error = StorageError("injected failure", tier="flash", path=self._path)
                self._flusher.work(lambda: self._fail(self._flusher.superseded(self._arguments["commit"]) or error))
            else:
                work()

        def unstuck() -> None:
            self._flusher._stuck(-1)
            due()

        timeline.at(timeline.between(*times) * storage.slow.get(machine, 1.0), self._flusher.process, due)

    def _write(self) -> None:
        self._pack.content = self._arena.content
        self._at(self._world.setting.sync_s, self._sync)

    def _sync(self) -> None:
        if self._pack.content != self._arena.content:
            self._pack.content = None  # somebody staged over it while it was read
        self._pack.durable = True
        value = zlib.crc32(repr(self._pack.content).encode())
        size = self._pack.size_bytes
        record = PackRecord(
            file=self._file,
            rank=self._arguments["rank"],
            part=0,
            size_bytes=size,
            crc32=value,
            block_crcs=crc.encode_crcs(np.array([value], np.uint32)),
        )
        answer = {
            "packs": [msgspec.to_builtins(record)],
            "compare": {key: zlib.crc32(key.encode()) for key, _, _ in self._arguments["compare"]},
            "timings": {"allocate_s": 0.0, "write_s": 0.1, "sync_s": 0.1},
        }
        self._end()
        self._flusher._answer(self._number, answer, None)

    def _fail(self, error: CheckpointError) -> None:
        if not self._is_over:
            self._end()
            self._flusher._answer(self._number, None, error)

    def _end(self) -> None:
        self._is_over = True
        if self._look in self._words.watching:
            self._words.watching.remove(self._look)
        key = tuple(self._arguments["commit"])
        left = [work for work in self._flusher.packs.pop(key, []) if work is not self]
        if left:
            self._flusher.packs[key] = left


def _read(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()
