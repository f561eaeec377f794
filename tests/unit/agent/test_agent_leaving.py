"""When the agent leaves: told to, after its trainers, and to make room for another version."""

from __future__ import annotations

import time

import msgspec
import pytest
from agent_fakes import hello, world_of
from agent_sockets import TIMEOUT_S, Agent, Trainer

from safehold._version import __version__
from safehold.agent import greeting
from safehold.agent import messages as m
from safehold.agent import server as server_module
from safehold.agent import words as w
from safehold.errors import AgentUnavailableError, ConfigurationError, DeadlineError, from_wire
from safehold.host.sockets import ChannelClosed


def has_left(agent: Agent) -> bool:
    agent.thread.join(TIMEOUT_S)
    return not agent.thread.is_alive() and not agent.path.exists()


def hold_record(agent: Agent, trainer: Trainer) -> None:
    """A save that is staged and not recorded."""
    agent.storage.held = {"record"}
    trainer.ask(trainer.begin(0, 5))
    trainer.ask(m.Staged(11, 5, 0, {}))
    agent.until(lambda: agent.storage.open("record"))


def recorded(agent: Agent) -> None:
    agent.storage.held = set()
    agent.server.post(lambda: agent.storage.answer("record", {"size_bytes": 1, "blake3": "0" * 64}))


# -- told to leave ---------------------------------------------------------------------------------------------------------


def test_told_to_leave_before_anybody_came(agent: Agent) -> None:
    agent.server.terminate()
    assert has_left(agent)


def test_told_to_leave_with_its_trainers_it_serves_them_until_they_go(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption signals the whole job: the trainers save once more."""
    monkeypatch.setattr(server_module, "SETTLE_GRACE_S", 0.05)
    [trainer] = agent.join(world_of(1))
    hold_record(agent, trainer)
    agent.server.terminate()
    agent.server.terminate()
    agent.idle()
    refusal = agent.trainer().refused(hello(0, world_of(1, "new")))
    assert isinstance(refusal, AgentUnavailableError), "no new job"
    trainer.send(msgspec.structs.replace(trainer.begin(0, 6), final=True))
    recorded(agent)
    assert isinstance(trainer.reply(10), m.Granted)
    time.sleep(0.2)  # what it stages takes its time
    trainer.ask(m.Staged(12, 6, 0, {}))
    agent.until(lambda: len(agent.storage.done("publish")) == 2)
    while [reply.step for reply in trainer.told if isinstance(reply, m.Durable)] != [5, 6]:
        trainer.receive()
    trainer.channel.close()
    assert has_left(agent), "at once, whatever the linger time"


def test_told_to_leave_a_rank_may_come_back_as_long_as_others_are_served(agent: Agent) -> None:
    first, second = agent.join(world_of(2))
    agent.server.terminate()
    second.channel.close()
    agent.until(lambda: list(agent.server._current.peers) == [0])  # type: ignore[union-attr]
    back = agent.trainer()
    assert isinstance(back.ask(hello(1, world_of(2))), m.Welcome)
    for rank, trainer in enumerate((first, back)):
        assert isinstance(trainer.ask(trainer.begin(rank, 5, 2)), m.Granted)


@pytest.mark.parametrize("begun", [[0], [0, 1]])
def test_told_to_leave_it_has_its_time(agent: Agent, monkeypatch: pytest.MonkeyPatch, begun: list[int]) -> None:
    """Once it is over no save is let in; what all ranks have begun can still be staged, the rest is given up."""
    monkeypatch.setattr(server_module, "TERM_SERVE_S", 0.2)
    monkeypatch.setattr(server_module, "SETTLE_GRACE_S", 0.05)
    trainers = agent.join(world_of(2))
    for rank in begun:
        trainers[rank].ask(trainers[rank].begin(rank, 5, 2))
    agent.server.terminate()
    agent.until(lambda: agent.server._settling)
    if begun == [0]:
        assert "settled" in str(from_wire(trainers[1].wait_for(m.SaveFailed).error))
    else:
        assert isinstance(trainers[0].refused(trainers[0].begin(0, 6, 2)), AgentUnavailableError), (
            "not the user's fault"
        )
        time.sleep(0.2)
        for trainer in trainers:
            trainer.send(m.Staged(-1, 5, 0, {}))
        assert trainers[1].wait_for(m.Durable).step == 5, "the last words reach the trainers"
    assert trainers[0].is_closed() and has_left(agent)


def test_told_to_leave_its_time_is_bounded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TERM_SERVE_S", 0.1)
    monkeypatch.setattr(server_module, "TERM_GRACE_S", 0.4)
    [trainer] = agent.join(world_of(1))
    hold_record(agent, trainer)
    began = time.monotonic()
    agent.server.terminate()
    assert isinstance(from_wire(trainer.wait_for(m.SaveFailed).error), DeadlineError)
    assert trainer.is_closed() and has_left(agent)
    assert 0.4 <= time.monotonic() - began < 2.0


def test_told_to_leave_after_its_trainers_died_it_finishes_what_they_had_staged(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    hold_record(agent, trainer)
    trainer.channel.close()
    agent.until(lambda: not agent.server._has_trainers())
    agent.server.terminate()
    agent.idle()
    recorded(agent)
    assert has_left(agent) and agent.storage.done("publish")


# -- after its trainers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def short_orderly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ORDERLY_LINGER_S", 0.05)


@pytest.mark.usefixtures("short_orderly")
@pytest.mark.parametrize("case", ["refused", "killed", "not opened", "hello refused"])
def test_an_agent_of_a_constructor_that_failed_leaves_at_once(agent: Agent, case: str) -> None:
    """There is no memory that a restart could want, however the trainers went."""
    trainer = agent.trainer()
    world = m.World("t", 2, [0], ["host"]) if case == "hello refused" else world_of(1)
    welcome = trainer.ask(hello(0, world))
    assert isinstance(welcome, m.Refused if case == "hello refused" else m.Welcome)
    if case == "refused":
        agent.storage.error = ConfigurationError("the directory holds something else")
        assert isinstance(trainer.refused(m.OpenRun(5)), ConfigurationError)
        trainer.ask(m.Bye(6, True))
    elif case == "killed":
        trainer.ask(m.OpenRun(5))
    trainer.channel.close()
    assert has_left(agent)


@pytest.mark.usefixtures("short_orderly")
def test_an_agent_with_memory_waits_for_a_restart(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1), agent_linger_s=1.6)
    trainer.ask(m.Prepare(5, 4096))
    trainer.channel.close()
    agent.until(lambda: not agent.server._has_trainers())
    time.sleep(1.0)
    assert agent.thread.is_alive()
    again = agent.trainer()
    again.ask(hello(0, world_of(1, "not opened")))
    began = time.monotonic()
    again.channel.close()  # and does not prolong it
    assert has_left(agent) and time.monotonic() - began < 1.4


# -- other versions --------------------------------------------------------------------------------------------------------


def test_another_version_makes_an_idle_agent_leave(agent: Agent) -> None:
    stranger = agent.trainer()
    message = msgspec.structs.replace(hello(0, world_of(1)), version="9.9")
    refusal = stranger.refused(message)
    assert isinstance(refusal, AgentUnavailableError) and "safehold 9.9 (protocol 1)" in str(refusal)
    assert has_left(agent)


def test_another_version_is_refused_while_a_job_runs(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    stranger = agent.trainer()
    refusal = stranger.refused(msgspec.structs.replace(hello(0, world_of(1, "x")), protocol=99))
    assert isinstance(refusal, ConfigurationError) and "still running" in str(refusal)
    assert isinstance(trainer.ask(m.Register(5, [])), m.Done)


def greeted(trainer: Trainer, word: str) -> greeting.Greeting:
    """What the agent answers to words of a protocol that is not made yet."""
    trainer.send(greeting.Greeting(99, "9.9", word).line() + b"whatever they say then")
    with pytest.raises(greeting.OtherVersionError) as caught:
        trainer.receive()
    with pytest.raises(ChannelClosed):
        trainer.channel.recv(timeout_s=TIMEOUT_S)
    return caught.value.greeting


def test_another_protocol_is_answered_in_the_words_that_all_versions_know(agent: Agent) -> None:
    [trainer] = agent.join(world_of(1))
    found = greeted(agent.trainer(), greeting.HELLO)
    assert found == greeting.Greeting(m.PROTOCOL, __version__, greeting.BUSY)
    assert greeted(agent.trainer(), greeting.STATUS).word == greeting.IS_HERE
    assert isinstance(trainer.ask(m.Register(5, [])), m.Done)
    trainer.channel.close()
    agent.until(lambda: not agent.server._has_trainers())
    assert greeted(agent.trainer(), greeting.STATUS).word == greeting.IS_HERE
    assert not agent.server._leaving, "who only asks drives nobody away"
    assert greeted(agent.trainer(), greeting.HELLO).word == greeting.LEAVES
    assert has_left(agent)


# -- redundancy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True], ids=["trainers gone", "told to leave"])
def test_it_stays_while_other_nodes_may_read_from_it_for_redundancy(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(server_module, "ORDERLY_LINGER_S", 0.05)
    [trainer] = agent.join(world_of(1))
    guard = agent.server._current.guard  # type: ignore[union-attr]
    guard._is_on = True
    agent.server.post(guard.committed)
    if told:
        agent.server.terminate()
    else:
        trainer.ask(m.Bye(20, False))
    trainer.channel.close()
    time.sleep(0.3)
    assert agent.thread.is_alive()
    agent.server.post(lambda: guard.over(w.ProtectionOver(1, 1, 5, True, True)))
    assert has_left(agent)
