"""An agent's server in a thread behind a real socket, and raw connections to it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_fakes import PACK_BYTES, FakeFlusher, hello, part_of

from safehold.agent import messages as m
from safehold.agent import server as server_module
from safehold.agent.server import AgentServer
from safehold.errors import CheckpointError, from_wire
from safehold.events import EventStream
from safehold.format.plan import digest as digest_of
from safehold.host.sockets import Channel, ChannelClosed, connect, listen

TIMEOUT_S = 5.0


class Storage(FakeFlusher):
    """Answers at once, but for what a test keeps back."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnation = 0
        self.tokens: dict[str, int] = {}
        self.held: set[str] = set()
        self.error: CheckpointError | None = None

    def call(self, operation, arguments, callback, *, timeout_s, fds=()) -> int:
        self.at_once = {} if operation in self.held else {operation: self._answer(operation, arguments)}
        return super().call(operation, arguments, callback, timeout_s=timeout_s, fds=fds)

    def _answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "open_run":
            if self.error is not None:
                return self.error
            number = self.tokens.get(arguments["token"])
            if number is None:
                self.incarnation += 1
                number = self.tokens[arguments["token"]] = self.incarnation
            return {"run_id": "run", "incarnation": number, "steps": [], "notes": []}
        if operation == "flush":
            timings = {"allocate_s": 0.0, "write_s": 0.0, "sync_s": 0.0}
            return {"packs": [{}], "compare": {}, "timings": timings}
        if operation == "record":
            return {"size_bytes": 1, "blake3": "0" * 64}
        return {"known": {"steps": [], "commits": [], "left": []}, "retire": {"uncommitted": []}}.get(operation, {})


class Agent:
    """A server in a thread."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = Storage()
        monkeypatch.setattr(server_module, "Flusher", lambda *args, **kwargs: self.storage)
        directory.mkdir(mode=0o700)
        self.path = directory / "agent.sock"
        self.listener = listen(self.path)
        self.server = AgentServer(str(directory), self.listener, log_fd=None, events=EventStream("agent"))
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.trainers: list[Trainer] = []

    def trainer(self) -> Trainer:
        self.trainers.append(Trainer(connect(self.path, timeout_s=TIMEOUT_S)))
        return self.trainers[-1]

    def join(self, world: m.World, **settings: Any) -> list[Trainer]:
        """All ranks of a job come in, and rank 0 opens the run."""
        found = []
        for rank in range(world.world_size):
            trainer = self.trainer()
            assert isinstance(trainer.ask(hello(rank, world, **settings)), m.Welcome)
            found.append(trainer)
        assert isinstance(found[0].ask(m.OpenRun(2)), m.RunOpened)
        return found

    def idle(self) -> None:
        """Wait until everything posted so far was done."""
        done = threading.Event()
        self.server.post(done.set)
        assert done.wait(TIMEOUT_S)

    def until(self, reached: Callable[[], Any]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        self.server.post(self._stop)
        for trainer in self.trainers:
            trainer.channel.close()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()

    def _stop(self) -> None:
        self.server._stop_at = 0.0


class Trainer:
    """A raw connection."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.told: list[Any] = []
        self.fds: dict[int, int] = {}

    def send(self, message: msgspec.Struct | bytes, fds: tuple[int, ...] = ()) -> None:
        self.channel.send(message if isinstance(message, bytes) else m.encode(message), fds, timeout_s=TIMEOUT_S)

    def receive(self) -> Any:
        data, fds = self.channel.recv(timeout_s=TIMEOUT_S)
        reply = m.decode_reply(data)
        self.fds[reply.id] = len(fds)
        for fd in fds:
            os.close(fd)
        if reply.id == 0:
            self.told.append(reply)
        return reply

    def reply(self, number: int) -> Any:
        while True:
            found = self.receive()
            if found.id == number:
                return found

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.reply(message.id)

    def refused(self, message: Any) -> CheckpointError:
        reply = self.ask(message)
        assert isinstance(reply, m.Refused), reply
        return from_wire(reply.error)

    def wait_for(self, kind: type) -> Any:
        while True:
            for reply in self.told:
                if isinstance(reply, kind):
                    return reply
            self.receive()

    def is_closed(self) -> bool:
        try:
            while True:
                self.receive()
        except ChannelClosed:
            return True

    def begin(self, rank: int, step: int, world_size: int = 1) -> m.Begin:
        part = part_of(rank, world_size)
        return m.Begin(10, step, 0, digest_of(part), part, [(0, PACK_BYTES)], PACK_BYTES, [], {})
