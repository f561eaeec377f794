"""The agent behind a real socket, in a thread; trainers are raw channels that say what they like."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import pytest
from agent_fakes import PACK_BYTES, hello, world_of
from agent_sockets import TIMEOUT_S, Agent

from safehold.agent import messages as m
from safehold.errors import (
    AgentUnavailableError,
    ConfigurationError,
    StorageError,
    SupersededError,
    from_wire,
)


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
    ids = set()
    for number, step in enumerate((5, 6)):
        granted = trainer.ask(trainer.begin(0, step))
        ids.add(granted.arena_id)
        assert trainer.fds[10] == 1, number
        trainer.ask(m.Staged(11, step, 0, {}))
        trainer.wait_for(m.Durable)
        trainer.told.clear()
    assert len(ids) == 1


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
    assert isinstance(good.ask(m.Register(5, [])), m.Done)


def test_descriptors_that_nobody_asked_for_are_closed(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    fds = num_fds()
    for number in range(5, 15):
        trainer.send(m.Register(number, []), (trainer.channel.fileno(),) * 4)
        trainer.reply(number)
    assert num_fds() == fds


@pytest.mark.parametrize(
    "message", [m.OpenRun(5), m.Register(5, []), m.Prepare(5, 1), m.RestoreAsk(5, None), m.JoinRun(5, "r", 1)]
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
    assert isinstance(new.ask(m.Register(5, [])), m.Done) and not new.told


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


# -- faults ------------------------------------------------------------------------------------------------------------------


def test_a_fault_of_the_agent_itself_is_an_answer_too(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    [trainer] = agent.join(world_of(1))

    def broken(*args: object) -> None:
        raise ZeroDivisionError("oh")

    agent.server._current._register = broken  # type: ignore[union-attr,method-assign]
    assert "ZeroDivisionError" in str(trainer.refused(m.Register(5, [])))
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
    agent.server.post(lambda: [session.tell_all("x" * 100_000) for _ in range(100)])
    drain = threading.Thread(target=trainers[0].is_closed)
    drain.start()
    agent.until(lambda: list(session.peers) == [0])
    trainers[0].channel.close()
    drain.join(TIMEOUT_S)


def test_deadlines_run_for_sessions_that_are_being_opened_too(agent: Any) -> None:
    """What is waited for while a run is opened is waited for by a session that does not own the run yet."""
    ticked: list[str] = []

    class Other:
        def __init__(self, name: str) -> None:
            self.name = name
            self.peers: dict[int, Any] = {}

        def tick(self) -> None:
            ticked.append(self.name)

        def next_deadline(self) -> float:
            return 0.0

    opening, current = Other("opening"), Other("current")
    server = agent.server
    done = threading.Event()

    def work() -> None:
        before = server._sessions, server._current
        server._sessions, server._current = {"a": opening, "b": current}, current
        server._tick()
        assert server._patience() == 0.001
        server._sessions, server._current = before
        done.set()

    server.post(work)
    assert done.wait(5.0) and ticked == ["opening", "current"]
