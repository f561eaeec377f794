"""Finds the agent of a run on this node, or starts it.

Invariants: the slot's lock decides which agent lives; starting one too many is harmless, it leaves at once. An agent that
holds the lock and does not answer (stopped, or stuck) is left alone: a job that meets one takes the next slot, and
incarnations keep the two apart.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from safehold.agent import greeting
from safehold.agent import messages as m
from safehold.agent.greeting import OtherVersionError
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CheckpointError, DeadlineError
from safehold.host.process import module_command, spawn
from safehold.host.runtime import RunSlot, open_slot, runtime_dir
from safehold.host.sockets import Channel, ChannelClosed, connect

AGENT_MODULE = "safehold.agent.main"
MAX_SLOTS = 8
ANSWER_TIMEOUT_S = 5.0
RETRY_S = 0.02
START_AGAIN_S = 2.0
RESOLVE_SHARE = 0.4


def choose_slot(url: str, config: Config) -> RunSlot:
    """Return the slot that this start of the job uses on this node: the first whose agent answers, or that has none.

    Raises:
        AgentUnavailableError: All slots are held by agents that do not answer.
        DeadlineError: Storage does not answer.
    """
    url = _resolved(url, config.start_timeout_s * RESOLVE_SHARE)
    directory = _runtime_dir(config)
    for number in range(MAX_SLOTS):
        slot = open_slot(url if number == 0 else f"{url}#{number}", directory=directory)
        if not slot.is_locked() or _answers(slot):
            return slot
    hint = "agents that hold this run's slots do not answer; look with 'safehold agents' and end them"
    raise AgentUnavailableError(f"no usable agent slot for {url}", path=url, hint=hint)


def ahead_command(url: str, config: Config, stay_s: float) -> list[str]:
    """Return the command of an agent that is started ahead of its trainers, who find it in their first slot.

    Args:
        url: The run directory.
        config: Settings.
        stay_s: Seconds that it stays without trainers.

    Raises:
        DeadlineError: Storage does not answer.
    """
    url = _resolved(url, config.start_timeout_s * RESOLVE_SHARE)
    slot = open_slot(url, directory=_runtime_dir(config))
    return module_command(AGENT_MODULE, ["--run", url, "--slot", str(slot.directory), "--stay", str(stay_s)])


def _runtime_dir(config: Config) -> Path:
    return runtime_dir({**os.environ, "SAFEHOLD_RUNTIME_DIR": config.runtime_dir} if config.runtime_dir else None)


def _resolved(url: str, timeout_s: float) -> str:
    """Return the real path of a run directory, which has to ask storage: in a thread, since that may never answer."""
    if "://" in url:
        return url
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(os.path.realpath(url)), name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        text = f"storage does not answer: resolving the path took more than {timeout_s:g} s"
        raise DeadlineError(text, tier="flash", path=url, hint="look at the mount of the run directory")
    return found[0]


def ask_status(slot: RunSlot, timeout_s: float) -> dict[str, object]:
    """Ask the agent of a slot what it is doing.

    Raises:
        AgentUnavailableError: There is none, it does not answer, or is of a version that cannot be asked.
    """
    try:
        return _ask(slot, timeout_s)
    except OtherVersionError as exc:
        text = f"the agent runs {exc.greeting}, this is {m.greet(greeting.STATUS)}"
        hint = "use the command line of the version that the job runs with"
        raise AgentUnavailableError(text, path=str(slot.socket_path), hint=hint) from exc


def _ask(slot: RunSlot, timeout_s: float) -> dict[str, object]:
    try:
        with connect(slot.socket_path, timeout_s=timeout_s) as channel:
            channel.send(m.encode(m.StatusAsk(1)), timeout_s=timeout_s)
            data, fds = channel.recv(timeout_s=timeout_s)
            for fd in fds:
                os.close(fd)
            reply = m.decode_reply(data)
    except (ChannelClosed, OSError, ValueError) as exc:
        raise AgentUnavailableError(f"the agent does not answer: {exc}", path=str(slot.socket_path)) from exc
    if not isinstance(reply, m.Status):
        raise AgentUnavailableError("the agent answered with something else", path=str(slot.socket_path))
    return reply.facts


def _answers(slot: RunSlot) -> bool:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            _ask(slot, max(0.1, deadline - time.monotonic()))
            return True
        except OtherVersionError:
            return True
        except AgentUnavailableError:
            if time.monotonic() >= deadline or not slot.is_locked():
                return not slot.is_locked()
            time.sleep(RETRY_S)


def connect_or_start(url: str, slot: RunSlot, config: Config, timeout_s: float, *, patience_s: float = 0.0) -> Channel:
    """Connect to the slot's agent, starting it where there is none.

    Args:
        url: The run directory.
        slot: Where its agent is on this node.
        config: Settings.
        timeout_s: Limit for all of it.
        patience_s: Let another rank start it for so long.

    Raises:
        AgentUnavailableError: It cannot be started, or does not listen in time; the message has the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    started_at = time.monotonic() + patience_s - START_AGAIN_S
    while True:
        try:
            return connect(slot.socket_path, timeout_s=max(0.1, deadline - time.monotonic()))
        except (ChannelClosed, OSError, CheckpointError) as exc:
            now = time.monotonic()
            if now >= deadline:
                tail = slot.tail_log(1000).strip()
                text = f"the agent cannot be reached within {timeout_s:.0f} s: {exc}"
                raise AgentUnavailableError(
                    text, path=str(slot.socket_path), hint=f"its log ends: {tail}" if tail else "its log is empty"
                ) from exc
        if not slot.is_locked() and now - started_at > START_AGAIN_S:
            started_at = now
            _start(url, slot, config)
        time.sleep(RETRY_S)


def _start(url: str, slot: RunSlot, config: Config) -> None:
    log_fd = slot.open_log()
    try:
        spawn(
            AGENT_MODULE,
            ["--run", url, "--slot", str(slot.directory)],
            log=log_fd,
            detach=True,
        ).close()
    finally:
        os.close(log_fd)
