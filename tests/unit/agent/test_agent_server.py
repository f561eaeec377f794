"""The agent behind a real socket, in a thread; trainers are raw channels that say what they like."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_fakes import PACK_BYTES, FakeFlusher, hello, part_of, world_of

from safehold.agent import messages as m
from safehold.agent import server as server_module
from safehold.agent.server import AgentServer
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    StorageError,
    SupersededError,
    from_wire,
)
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
        return {}


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


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    agent = Agent(tmp_path / "slot", monkeypatch)
    yield agent
    agent.close()


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_job_comes_in_saves_and_leaves(agent: Agent) -> None:
    trainers = agent.join(world_of(2))
    assert trainers[0].fds[1] == 3, "control words, their wake-up, the node's words"
    assert isinstance(trainers[1].ask(m.JoinRun(3, "run", 1)), m.Done)
    for rank, trainer in enumerate(trainers):
        assert isinstance(trainer.ask(trainer.begin(rank, 5, 2)), m.Granted)
        assert trainer.fds[10] == 1
        assert isinstance(trainer.ask(m.Staged(11, 5, 0, {"a": b"1"})), m.Done)
    for trainer in trainers:
        assert trainer.wait_for(m.Durable).step == 5
    for trainer in trainers:
        assert isinstance(trainer.ask(m.Bye(12, False)), m.Done)
        trainer.channel.close()
    agent.thread.join(TIMEOUT_S)
    assert not agent.thread.is_alive(), "it leaves once all have said goodbye"


def test_the_arena_comes_with_every_grant(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    for number, step in enumerate((5, 6)):
        granted = trainer.ask(trainer.begin(0, step))
        assert granted.arena_id == 1 and trainer.fds[10] == 1, number
        trainer.ask(m.Staged(11, step, 0, {}))
        trainer.wait_for(m.Durable)
        trainer.told.clear()


def test_objects_may_come_in_a_descriptor(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    trainer.ask(trainer.begin(0, 5))
    fd = os.memfd_create("objects")
    os.write(fd, msgspec.msgpack.encode({"a": b"x" * 5000}))
    trainer.send(m.Staged(11, 5, 0, {}, objects_fd=True), (fd,))
    os.close(fd)
    assert isinstance(trainer.reply(11), m.Done)
    trainer.wait_for(m.Durable)
    assert agent.storage.done("record")[0]["objects"] == {0: {"a": b"x" * 5000}}


@pytest.mark.parametrize("content", [b"garbage", b""])
def test_objects_that_cannot_be_read_end_the_save_rather_than_commit_without_them(agent: Agent, content: bytes) -> None:
    trainers = agent.join(world_of(2))
    for rank, trainer in enumerate(trainers):
        trainer.ask(trainer.begin(rank, 5, 2))
    fd = os.memfd_create("objects")
    os.write(fd, content)
    trainers[1].send(m.Staged(11, 5, 0, {}, objects_fd=True), (fd,))
    os.close(fd)
    assert trainers[1].is_closed()
    assert "rank 1" in str(from_wire(trainers[0].wait_for(m.SaveFailed).error))
    assert not agent.storage.done("record")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\xff" * 1000,
        msgspec.msgpack.encode({"type": "begin", "id": 3}),
        m.encode(m.Durable(1, 0, "flash", {})),
    ],
)
def test_garbage_ends_the_connection_and_harms_nobody(agent: Agent, data: bytes) -> None:
    [good] = agent.join(world_of(1))
    fds = num_fds()
    bad = agent.trainer()
    bad.send(data, (good.channel.fileno(),) * 3)
    assert bad.is_closed()
    bad.channel.close()
    agent.until(lambda: num_fds() <= fds)
    assert isinstance(good.ask(m.Drain(5)), m.Done)


def test_descriptors_that_nobody_asked_for_are_closed(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    fds = num_fds()
    for number in range(5, 15):
        trainer.send(m.Drain(number), (trainer.channel.fileno(),) * 4)
        trainer.reply(number)
    assert num_fds() == fds


@pytest.mark.parametrize(
    "message", [m.OpenRun(5), m.Drain(5), m.Prepare(5, 1), m.RestoreAsk(5, None), m.JoinRun(5, "r", 1)]
)
def test_without_hello_nothing_is_done(agent: Agent, message: Any) -> None:
    assert "hello" in str(agent.trainer().refused(message))


def test_status_needs_no_hello(agent: Agent) -> None:
    facts = agent.trainer().ask(m.StatusAsk(5)).facts
    assert facts["pid"] == os.getpid() and facts["session"] is None
    agent.join(world_of(1))
    assert agent.trainer().ask(m.StatusAsk(5)).facts["session"]["incarnation"] == 1


def test_wrong_order_is_refused_and_can_be_mended(agent: Agent) -> None:
    world = world_of(2)
    first, second = agent.trainer(), agent.trainer()
    first.ask(hello(0, world))
    second.ask(hello(1, world))
    assert "not open yet" in str(first.refused(first.begin(0, 5, 2)))
    assert "only rank 0" in str(second.refused(m.OpenRun(5)))
    assert "hello before" in str(first.refused(hello(0, world)))
    assert isinstance(first.ask(m.OpenRun(5)), m.RunOpened)
    assert isinstance(first.ask(m.OpenRun(6)), m.RunOpened), "asked again it is the same incarnation"
    assert agent.storage.incarnation == 1
    assert isinstance(first.ask(first.begin(0, 5, 2)), m.Granted)


@pytest.mark.parametrize(
    "world", [m.World("t", 2, [0], ["host"]), m.World("t", 0, [], []), m.World("t", 1, [3], ["host"])]
)
def test_a_world_that_makes_no_sense_is_refused(agent: Agent, world: m.World) -> None:
    assert isinstance(agent.trainer().refused(hello(0, world)), ConfigurationError)
    agent.join(world_of(1))


def test_settings_that_make_no_sense_are_refused(agent: Agent) -> None:
    message = msgspec.structs.replace(hello(0, world_of(1)), config={"flush_timeout_s": [1, 2]})
    assert isinstance(agent.trainer().refused(message), ConfigurationError)
    agent.join(world_of(1))


# -- two jobs ----------------------------------------------------------------------------------------------------------------


def test_the_next_job_takes_over_once_the_one_before_is_settled(agent: Agent) -> None:
    [old] = agent.join(world_of(1, "old"))
    agent.storage.held = {"record"}
    old.ask(old.begin(0, 5))
    old.ask(m.Staged(11, 5, 0, {}))
    new = agent.trainer()
    new.ask(hello(0, world_of(1, "new")))
    new.send(m.OpenRun(5))
    agent.until(lambda: agent.storage.open("record"))
    agent.idle()
    assert agent.storage.incarnation == 1, "what all ranks had staged is finished first"
    agent.storage.held = set()
    agent.server.post(lambda: agent.storage.answer("record", {"size_bytes": 1, "blake3": "0" * 64}))
    assert new.reply(5).incarnation == 2
    assert old.wait_for(m.Durable).step == 5 and old.wait_for(m.Superseded).incarnation == 2
    assert isinstance(old.refused(old.begin(0, 6)), SupersededError)
    assert isinstance(old.refused(m.OpenRun(7)), SupersededError)
    assert isinstance(new.ask(new.begin(0, 6)), m.Granted)


def test_an_old_job_that_comes_back_late_does_not_take_over(agent: Agent) -> None:
    agent.storage.incarnation = 6
    [new] = agent.join(world_of(1, "new"))
    late = agent.trainer()
    assert isinstance(late.refused(hello(0, world_of(1, "old"), incarnation=4)), SupersededError)
    assert isinstance(new.ask(m.Drain(5)), m.Done) and not new.told


def test_a_job_comes_back_to_a_restarted_agent_with_its_incarnation(agent: Agent) -> None:
    world = world_of(2)
    first, second = agent.trainer(), agent.trainer()
    assert isinstance(first.ask(hello(1, world)), m.Welcome), "it did not hear of the incarnation before the agent died"
    assert isinstance(second.ask(hello(0, world, incarnation=4)), m.Welcome)
    for rank, trainer in ((1, first), (0, second)):
        assert isinstance(trainer.ask(trainer.begin(rank, 5, 2)), m.Granted)
        trainer.ask(m.Staged(11, 5, 0, {}))
    assert second.wait_for(m.Durable).step == 5
    assert agent.storage.done("publish")[0]["commit"] == [5, 4, 0]


def test_an_open_that_fails_gives_the_run_back_to_the_old_job(agent: Agent) -> None:
    [old] = agent.join(world_of(1, "old"))
    new = agent.trainer()
    new.ask(hello(0, world_of(1, "new")))
    agent.storage.error = StorageError("read-only")
    assert isinstance(new.refused(m.OpenRun(5)), StorageError)
    assert isinstance(old.ask(old.begin(0, 5)), m.Granted)
    old.ask(m.Staged(11, 5, 0, {}))
    assert old.wait_for(m.Durable).step == 5


def test_jobs_that_crash_again_and_again_leave_no_descriptors(agent: Agent) -> None:
    def crash(number: int) -> None:
        for trainer in agent.join(world_of(3, f"job {number}")):
            trainer.channel.close()

    crash(0)
    crash(1)
    agent.until(lambda: not any(session.peers for session in agent.server._sessions.values()))
    agent.idle()
    before = num_fds()
    for number in range(2, 8):
        crash(number)
    never_opened = agent.trainer()
    never_opened.ask(hello(0, world_of(1, "never opened")))
    never_opened.channel.close()
    agent.until(lambda: len(agent.server._sessions) == 1 and num_fds() <= before)


def test_a_job_that_leaves_while_its_run_is_opened_still_ends_the_old_one(agent: Agent) -> None:
    [old] = agent.join(world_of(1, "old"))
    agent.storage.held = {"open_run"}
    new = agent.trainer()
    new.ask(hello(0, world_of(1, "new")))
    new.send(m.OpenRun(5))
    agent.until(lambda: agent.storage.open("open_run"))
    new.channel.close()
    agent.until(lambda: len(agent.server._sessions) == 1)
    value = {"run_id": "run", "incarnation": 2, "steps": [], "notes": []}
    agent.server.post(lambda: agent.storage.answer("open_run", value))
    assert old.wait_for(m.Superseded).incarnation == 2


# -- leaving -----------------------------------------------------------------------------------------------------------------


def test_told_to_leave_it_finishes_what_is_staged_and_says_so(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    agent.storage.held = {"record"}
    trainer.ask(trainer.begin(0, 5))
    trainer.ask(m.Staged(11, 5, 0, {}))
    agent.until(lambda: agent.storage.open("record"))
    agent.server.terminate()
    agent.server.terminate()
    agent.idle()
    assert isinstance(trainer.refused(trainer.begin(0, 6)), AgentUnavailableError), "no failure of the user's"
    assert isinstance(agent.trainer().refused(hello(0, world_of(1, "new"))), AgentUnavailableError)
    agent.server.post(lambda: agent.storage.answer("record", {"size_bytes": 1, "blake3": "0" * 64}))
    assert trainer.wait_for(m.Durable).step == 5, "the last words reach the trainer"
    assert trainer.is_closed()
    agent.thread.join(TIMEOUT_S)
    assert not agent.thread.is_alive() and not agent.path.exists()


def test_told_to_leave_before_anybody_came(agent: Agent) -> None:
    agent.server.terminate()
    agent.thread.join(TIMEOUT_S)
    assert not agent.thread.is_alive()


def test_another_version_makes_an_idle_agent_leave(agent: Agent) -> None:
    stranger = agent.trainer()
    message = msgspec.structs.replace(hello(0, world_of(1)), version="9.9")
    refusal = stranger.refused(message)
    assert isinstance(refusal, AgentUnavailableError) and "9.9" in str(refusal)
    agent.thread.join(TIMEOUT_S)
    assert not agent.thread.is_alive()


def test_another_version_is_refused_while_a_job_runs(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    stranger = agent.trainer()
    refusal = stranger.refused(msgspec.structs.replace(hello(0, world_of(1, "x")), protocol=99))
    assert isinstance(refusal, ConfigurationError) and "still running" in str(refusal)
    assert isinstance(trainer.ask(m.Drain(5)), m.Done)


def test_a_fault_of_the_agent_itself_is_an_answer_too(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    [trainer] = agent.join(world_of(1))

    def broken(*args: object) -> None:
        raise ZeroDivisionError("oh")

    agent.server._current.when_idle = broken  # type: ignore[union-attr,method-assign]
    assert "ZeroDivisionError" in str(trainer.refused(m.Drain(5)))
    agent.server._tick = broken  # type: ignore[method-assign]
    assert isinstance(trainer.ask(m.StatusAsk(6)), m.Status)
    agent.idle()
    del agent.server._tick
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_out_of_descriptors_is_an_answer_too(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    [trainer] = agent.join(world_of(1))
    before = num_fds()
    dup = os.dup

    def none_left(fd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    assert isinstance(trainer.refused(m.Prepare(5, PACK_BYTES)), AgentUnavailableError)
    monkeypatch.setattr(os, "dup", dup)
    assert isinstance(trainer.ask(m.Prepare(6, PACK_BYTES)), m.Prepared)
    agent.until(lambda: num_fds() <= before + 1)  # the arena


def test_a_trainer_that_does_not_read_is_cut_off(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    from safehold.agent import connection

    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.1)
    trainers = agent.join(world_of(2))
    session = agent.server._current
    assert session is not None
    agent.server.post(lambda: [session._tell_all("x" * 100_000) for _ in range(100)])
    drain = threading.Thread(target=trainers[0].is_closed)
    drain.start()
    agent.until(lambda: list(session.peers) == [0])
    trainers[0].channel.close()
    drain.join(TIMEOUT_S)
