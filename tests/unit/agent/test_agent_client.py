"""A trainer's side of the connection, with the test as the agent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from agent_fakes import world_of

from safehold.agent import client as client_module
from safehold.agent import greeting
from safehold.agent import messages as m
from safehold.agent.client import AgentClient
from safehold.agent.start import ask_status, choose_slot
from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    StorageError,
    SupersededError,
)
from safehold.host.control import NodeControl, RankControl
from safehold.host.runtime import open_slot
from safehold.host.sockets import Channel, ChannelClosed, listen

TIMEOUT_S = 5.0


class Agent:
    """Accepts connections and answers as it is told."""

    def __init__(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.channels: list[Channel] = []
        self.connected = threading.Event()
        self.told: list[Any] = []
        self.lost: list[str] = []
        monkeypatch.setattr(client_module, "connect_or_start", self._connect)
        (tmp_path / "rt").mkdir(mode=0o700)
        self.slot = open_slot(tmp_path / "run", directory=tmp_path / "rt")
        self.control, self.node = RankControl.create(), NodeControl.create()
        self.refusal: CheckpointError | None = None
        self.welcome = True
        self.answers: list[bytes] = []
        self.client = AgentClient(
            url="/run",
            slot=self.slot,
            rank=0,
            config=Config(request_timeout_s=0.3),
            keep={},
            every_seconds=0.0,
            notify=self.told.append,
            lost=self.lost.append,
        )

    def _connect(self, *args: Any, **more: Any) -> Channel:
        ours, theirs = Channel.pair()
        self.channels.append(ours)
        threading.Thread(target=self._serve_hello, args=(ours,), daemon=True).start()
        return theirs

    def _serve_hello(self, channel: Channel) -> None:
        data, _ = channel.recv(timeout_s=TIMEOUT_S)
        hello = m.decode_request(data)
        if not self.welcome:
            return
        if self.answers:
            channel.send(self.answers.pop(0))
            return
        if self.refusal is not None:
            error, self.refusal = self.refusal, None
            channel.send(m.encode(m.Refused(hello.id, error.to_wire())))
            return
        channel.send(m.encode(m.Welcome(hello.id, "0", 1)), (*self.control.fds, self.node.block_fd))

    def connect(self) -> None:
        self.client.connect(world_of(1), TIMEOUT_S)

    @property
    def channel(self) -> Channel:
        return self.channels[-1]

    def receive(self) -> Any:
        return m.decode_request(self.channel.recv(timeout_s=TIMEOUT_S)[0])

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self.channel.send(message if isinstance(message, bytes) else m.encode(message), fds)

    def answer(self, reply: Any, fds: tuple[int, ...] = ()) -> threading.Thread:
        """In a thread: take one request and send the reply to it."""

        def work() -> None:
            request = self.receive()
            self.send(reply(request.id), fds)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def agent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    agent = Agent(tmp_path, monkeypatch)
    yield agent
    agent.welcome = True
    for channel in agent.channels:
        channel.close()
    agent.client.close(linger=True)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(reached: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_hello_brings_the_control_words(agent: Agent) -> None:
    assert not agent.client.alive
    agent.connect()
    assert agent.client.alive and agent.client.agent_pid == 1
    agent.client.control.set_progress(step=7)
    assert agent.control.step == 7


def test_a_request_and_its_answer(agent: Agent) -> None:
    agent.connect()
    agent.answer(lambda number: m.Granted(number, 3, 4096), (0,))
    reply, fds = agent.client.request(m.Register(0, []), m.Granted, TIMEOUT_S, "x")
    assert reply.arena_id == 3 and len(fds) == 1
    os.close(fds[0])


def test_refusals_are_raised_as_they_were(agent: Agent) -> None:
    agent.connect()
    agent.answer(lambda number: m.Refused(number, StorageError("full", path="/d").to_wire()), (0, 1))
    before = num_fds()
    with pytest.raises(StorageError, match="full"):
        agent.client.request(m.Register(0, []), m.Done, TIMEOUT_S, "x")
    assert num_fds() <= before


def test_an_answer_of_another_kind_is_an_error_and_leaves_nothing_open(agent: Agent) -> None:
    agent.connect()
    before = num_fds()
    agent.answer(lambda number: m.Granted(number, 3, 4096), (0, 1))
    with pytest.raises(AgentUnavailableError, match="Granted"):
        agent.client.request(m.Register(0, []), m.Done, TIMEOUT_S, "x")
    until(lambda: num_fds() <= before)


def test_an_answer_that_comes_late_leaves_nothing_open(agent: Agent) -> None:
    agent.connect()
    before = num_fds()
    for _ in range(5):
        with pytest.raises(DeadlineError, match=r"within 0\.02 s"):
            agent.client.ask(m.Register(0, []), 0.02, "x")
        agent.send(m.Granted(agent.receive().id, 3, 4096), (0, 1, 2))
    agent.answer(lambda number: m.Done(number))
    agent.client.ask(m.Register(0, []), TIMEOUT_S, "x")
    assert num_fds() <= before and not agent.client._pending


def test_notifications_reach_their_subscriber_and_its_faults_harm_nobody(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.connect()
    before = num_fds()
    agent.send(m.Note("one"), (0, 1))
    until(lambda: agent.told)
    agent.client._notify = lambda reply: 1 / 0
    agent.send(m.Note("two"))
    agent.answer(lambda number: m.Done(number))
    agent.client.ask(m.Register(0, []), TIMEOUT_S, "x")
    assert agent.told == [m.Note("one")] and "ZeroDivisionError" in caplog.text
    assert num_fds() <= before


@pytest.mark.parametrize("how", ["closed", "garbage", "half"])
def test_an_agent_that_dies_fails_all_requests_at_once(agent: Agent, how: str) -> None:
    agent.connect()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            agent.client.ask(m.Register(0, []), TIMEOUT_S, "x")
        except CheckpointError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        agent.receive()
    before = num_fds()
    begun = time.monotonic()
    if how == "garbage":
        agent.send(b"garbage", (0, 1, 2))
    elif how == "half":
        agent.channel._sock.send(b"\x10\0\0\0\0\0\0\0x")
        agent.channel.close()
    else:
        agent.channel.close()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert time.monotonic() - begun < 1.0 and len(errors) == 3
    assert all(isinstance(error, AgentUnavailableError) for error in errors)
    until(lambda: agent.lost)
    assert len(agent.lost) == 1 and not agent.client.alive
    assert num_fds() < before + 1
    with pytest.raises(AgentUnavailableError):
        agent.client.tell(m.Register(0, []))


def test_another_agent_is_found_and_old_control_words_are_closed(agent: Agent) -> None:
    agent.connect()
    agent.channel.close()
    until(lambda: agent.lost)
    agent.client.reconnect(TIMEOUT_S)
    before = num_fds()
    for number in range(3):
        agent.channel.close()
        until(lambda: len(agent.lost) == number + 2)
        agent.client.reconnect(TIMEOUT_S)
    assert agent.client.alive and agent.client.generation == 5
    assert num_fds() <= before
    assert len(agent.lost) == 4


def test_one_that_is_leaving_is_tried_again(agent: Agent) -> None:
    agent.refusal = AgentUnavailableError("the agent is leaving")
    agent.connect()
    assert agent.client.alive and len(agent.channels) == 2


@pytest.mark.parametrize("error", [SupersededError("newer"), ConfigurationError("version")])
def test_a_refused_hello_leaves_no_connection_behind(agent: Agent, error: CheckpointError) -> None:
    agent.refusal = error
    with pytest.raises(type(error)):
        agent.connect()
    assert not agent.client.alive
    with pytest.raises(ChannelClosed):
        agent.channel.recv(timeout_s=TIMEOUT_S)
    agent.client._receiver.join(TIMEOUT_S)
    assert not agent.lost, "who connects knows; told as lost, it would be looked for again and again"


def foreign(word: str) -> bytes:
    """What an agent of a protocol that is not made yet answers."""
    return greeting.Greeting(99, "9.9", word).line()


def test_an_agent_of_another_protocol_that_leaves_is_tried_again(agent: Agent) -> None:
    agent.answers = [foreign(greeting.LEAVES)]
    agent.connect()
    assert len(agent.channels) == 2


@pytest.mark.parametrize("word", [greeting.BUSY, "a word that is not made yet"])
def test_an_agent_of_another_protocol_is_named_with_its_version(agent: Agent, word: str) -> None:
    agent.answers = [foreign(word)]
    with pytest.raises(
        ConfigurationError, match=r"safehold 9\.9 \(protocol 99\), the trainer safehold .* \(protocol 1\)"
    ):
        agent.connect()
    assert len(agent.channels) == 1 and not agent.client.alive


def test_who_only_asks_hears_of_the_other_version_and_counts_it_as_alive(agent: Agent) -> None:
    slot = agent.slot
    lock = slot.lock(timeout_s=1.0)
    assert lock is not None
    with lock, listen(slot.socket_path) as listener:

        def serve() -> None:
            for _ in range(2):
                with listener.accept() as channel:
                    data, _ = channel.recv(timeout_s=TIMEOUT_S)
                    assert data.startswith(b"safehold/1 ")
                    channel.send(foreign(greeting.IS_HERE))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(AgentUnavailableError, match=r"runs safehold 9\.9 \(protocol 99\), this is safehold"):
            ask_status(slot, TIMEOUT_S)
        config = Config(runtime_dir=str(slot.directory.parent))
        found = choose_slot(str(slot.directory.parent.parent / "run"), config)
        assert found == slot, "no other slot: it makes room, or says that it is busy"
        thread.join(TIMEOUT_S)


def test_an_agent_that_never_welcomes(agent: Agent) -> None:
    agent.welcome = False
    with pytest.raises(DeadlineError, match="hello"):
        agent.client.connect(world_of(1), 0.2)
    assert not agent.client.alive


def test_an_agent_that_shows_no_sign_of_life_is_not_waited_for(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LIFE_POLL_S", 0.02)
    agent.connect()
    agent.node.beat()
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="sign of life"):
        agent.client.ask(m.Register(0, []), 60.0, "x")
    assert 0.2 < time.monotonic() - begun < TIMEOUT_S


def test_goodbye(agent: Agent) -> None:
    agent.connect()
    answered = agent.answer(lambda number: m.Done(number))
    agent.client.close(linger=False)
    answered.join(TIMEOUT_S)
    agent.client.close(linger=False)
    with pytest.raises(AgentUnavailableError):
        agent.client.ask(m.Register(0, []), 1.0, "x")
    assert not agent.lost


def test_goodbye_to_one_that_is_gone(agent: Agent) -> None:
    agent.connect()
    agent.channel.close()
    agent.client.close(linger=False)


def test_a_forked_child_cannot_use_it(agent: Agent) -> None:
    agent.connect()
    agent.client._pid += 1
    for use in (
        lambda: agent.client.ask(m.Register(0, []), 1.0, "x"),
        lambda: agent.client.tell(m.Register(0, [])),
        lambda: agent.client.reconnect(1.0),
    ):
        with pytest.raises(ConfigurationError, match="forked"):
            use()
    agent.client._pid -= 1
