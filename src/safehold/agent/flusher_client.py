"""The agent's hold on its flusher: the child process that does all tier I/O.

Invariants: the agent never waits for the flusher; every call has a deadline and a callback that runs exactly once, in the dispatcher.
A flusher that misses a deadline, dies, or speaks nonsense is killed, abandoned and replaced; all its open calls fail by name. What
was handed to it (arenas) counts as lost until its process is really gone, since a dead disk may still hold the pages.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from safehold.clock import Clock
from safehold.errors import CheckpointError, DeadlineError, StorageError, from_wire
from safehold.events import EventStream
from safehold.host.process import Process, spawn
from safehold.host.sockets import Channel, ChannelClosed
from safehold.tiers.base import tier_word

SEND_TIMEOUT_S = 10.0
KILL_WAIT_S = 1.0
ANSWER_SLACK_S = 5.0
"""How long after its own deadline a flush has to answer."""
INLINE_BYTES = 1 << 20
"""What is longer travels in shared memory: messages have a limit, what a user keeps in objects has none."""

Callback = Callable[[Any, CheckpointError | None], None]
Post = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class _Call:
    operation: str
    deadline: float
    callback: Callback
    timeout_s: float


class Flusher:
    """One flusher process and the calls that are open at it; used from the dispatcher thread only.

    Attributes:
        replaced: How many processes were lost.
        abandoned: Those of them that could not be ended yet.
        may_still_run: While a callback runs with an error: whether the process that had the call could not be ended, so that it may
            still use what it was given.
        lost: While a callback runs with an error: whether the process that had the call was lost with it, so that what was asked for
            may be done, half done, or not begun.

    Args:
        url: The run directory, as path or URL.
        config: Wire form of the run's settings.
        post: Runs a function in the dispatcher.
        clock: Time.
        events: Where starts and losses are told.
        log_fd: Takes the flusher's output.
    """

    def __init__(
        self, url: str, config: dict[str, Any], *, post: Post, clock: Clock, events: EventStream, log_fd: int | None
    ) -> None:
        self._url, self._config = url, config
        self._peers: dict[str, Any] | None = None
        self._post, self._clock, self._events = post, clock, events
        self._log_fd = log_fd
        self._calls: dict[int, _Call] = {}
        self._next_id = 1
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._generation = 0
        self.replaced = 0
        self.abandoned: list[Process] = []
        self.may_still_run = False
        self.lost = False

    @property
    def url(self) -> str:
        """The run directory."""
        return self._url

    @property
    def pid(self) -> int | None:
        """Process id of the running flusher, if one runs."""
        return self._process.pid if self._process else None

    @property
    def num_open(self) -> int:
        """Calls without an answer."""
        return len(self._calls)

    def configure(self, config: dict[str, Any], peers: dict[str, Any] | None = None) -> None:
        """Use these settings from now on; a new session brings its own. `peers`: of `joined_flash.to_wire`, with node-local flash."""
        self._config, self._peers = config, peers
        self._tell("start", self._start())

    def _start(self) -> dict[str, Any]:
        return {"url": self._url, "config": self._config, "peers": self._peers}

    def forget(self, arena_id: int) -> None:
        """Have the process unmap an arena, so that its pages go; one that does not run has none."""
        self._tell("forget", {"arena_id": arena_id})

    def _tell(self, operation: str, arguments: dict[str, Any]) -> None:
        """Send what has no answer, if there is a process."""
        if self._channel is None:
            return
        try:
            message = {"id": 0, "op": operation, "args": arguments}
            self._channel.send(msgspec.msgpack.encode(message), timeout_s=SEND_TIMEOUT_S)
        except (OSError, ChannelClosed) as exc:
            self._lost(self._generation, f"cannot talk to the flusher: {exc}")

    def call(
        self,
        operation: str,
        arguments: dict[str, Any],
        callback: Callback,
        *,
        timeout_s: float,
        fds: Sequence[int] = (),
    ) -> int:
        """Start an operation; `callback(value, error)` follows in the dispatcher. Returns the call's number."""
        number = self._next_id
        self._next_id += 1
        call = _Call(operation, self._clock.monotonic() + timeout_s, callback, timeout_s)
        message = {"id": number, "op": operation, "args": arguments}
        if self._channel is not None:
            try:
                _send(self._channel, message, fds)
                self._calls[number] = call
                return number
            except ChannelClosed as exc:  # it ended before it heard of this call, which another one can carry out
                self._lost(self._generation, f"the flusher is gone: {exc}")
            except (OSError, CheckpointError) as exc:
                self._calls[number] = call
                self._lost(self._generation, f"cannot talk to the flusher: {exc}")
                return number
        self._calls[number] = call
        try:
            _send(self._ensure(), message, fds)
        except (OSError, ChannelClosed, CheckpointError) as exc:
            self._lost(self._generation, f"cannot talk to the flusher: {exc}")
        return number

    def next_deadline(self) -> float | None:
        """When the earliest open call is due."""
        return min((call.deadline for call in self._calls.values()), default=None)

    def check_deadlines(self) -> None:
        """Give the process up if a call is overdue."""
        now = self._clock.monotonic()
        late = [call for call in self._calls.values() if call.deadline <= now]
        if late:
            names = ", ".join(f"{call.operation} after {call.timeout_s:g} s" for call in late)
            self._lost(self._generation, f"storage does not answer: {names}", deadline=True)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the process end; kill it if it does not."""
        self._generation += 1
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None and not process.wait(timeout_s):
            process.kill()
            if not process.wait(2.0):
                self.abandoned.append(process)

    def _ensure(self) -> Channel:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            process = spawn(
                "safehold.agent.flusher",
                ["--fd", str(theirs.fileno())],
                fds=[theirs.fileno()],
                log=self._log_fd,
            )
        except CheckpointError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._generation += 1
        channel = Channel(ours)
        self._process, self._channel = process, channel
        self._events.emit("flusher", "started", pid=process.pid)
        _send(channel, {"id": 0, "op": "start", "args": self._start()}, ())
        threading.Thread(
            target=self._receive, args=(channel, self._generation), name="flusher-replies", daemon=True
        ).start()
        return channel

    def _receive(self, channel: Channel, generation: int) -> None:
        while True:
            try:
                data, fds = channel.recv(timeout_s=None)
                for fd in fds:
                    os.close(fd)
                number, value, error = _parse(data)
            except Exception as exc:
                text = f"the flusher is gone: {exc}"
                self._post(lambda text=text: self._lost(generation, text))  # type: ignore[misc]
                return
            self._post(lambda a=number, b=value, c=error: self._reply(generation, a, b, c))  # type: ignore[misc]

    def _reply(self, generation: int, number: int, value: Any, error: CheckpointError | None) -> None:
        call = self._calls.pop(number, None) if generation == self._generation else None
        if call is not None:
            _end(call, value, error)

    def _lost(self, generation: int, why: str, *, deadline: bool = False) -> None:
        if generation != self._generation:
            return
        self._generation += 1
        channel, process = self._channel, self._process
        self._channel = self._process = None
        self.replaced += 1
        self._events.emit("flusher", "failed", error=why)
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            if not process.wait(KILL_WAIT_S):
                self.abandoned.append(process)
                self.may_still_run = True
        calls, self._calls = list(self._calls.values()), {}
        hint = "a new flusher is started for the next save; look at the storage"
        kind = DeadlineError if deadline else StorageError
        self.lost = True
        try:
            for call in calls:
                _end(call, None, kind(f"{call.operation}: {why}", tier=tier_word(self._url), path=self._url, hint=hint))
        finally:
            self.may_still_run = self.lost = False

    def reap_abandoned(self) -> bool:
        """Forget abandoned processes that have ended; True if none is left."""
        self.abandoned = [process for process in self.abandoned if not process.wait(0)]
        return not self.abandoned


def _send(channel: Channel, message: dict[str, Any], fds: Sequence[int]) -> None:
    data = msgspec.msgpack.encode(message)
    if len(data) <= INLINE_BYTES:
        channel.send(data, fds, timeout_s=SEND_TIMEOUT_S)
        return
    large = os.memfd_create("safehold-call", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(large), "wb") as file:
            file.write(data)
        channel.send(b"", [*fds, large], timeout_s=SEND_TIMEOUT_S)
    finally:
        os.close(large)


def _parse(data: bytes) -> tuple[int, Any, CheckpointError | None]:
    """Take a reply apart; raises whatever it likes for one that makes no sense."""
    reply = msgspec.msgpack.decode(data, type=dict[str, Any])
    error = reply.get("error")
    return int(reply["id"]), reply.get("value"), from_wire(dict(error)) if error else None


def _end(call: _Call, value: Any, error: CheckpointError | None) -> None:
    """Run a callback; what is wrong in one must not keep others from being called."""
    try:
        call.callback(value, error)
    except Exception as exc:
        traceback.print_exc()
        if error is None:
            # A fault of ours: whoever waits for the outcome hears of it now, not at a deadline.
            _end(
                call,
                None,
                StorageError(f"{call.operation} was done, and the agent failed: {type(exc).__name__}: {exc}"),
            )
