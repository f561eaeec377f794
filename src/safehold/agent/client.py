"""A trainer's side of the connection to its agent.

Invariants: one thread receives; requests wait with a deadline and name the agent when it is late, or when it has not shown a sign of life
for long (it was stopped); notifications go to the subscriber in the receiving thread. When the agent dies, every waiting request fails
at once, and `reconnect` starts another one and says hello again, once all that was told of the old connection has been told. Safe to call
from several threads. A forked child never uses its parent's connection.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from safehold._version import __version__
from safehold.agent import messages as m
from safehold.agent.greeting import HELLO, LEAVES, Greeting, OtherVersionError
from safehold.agent.start import connect_or_start
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CheckpointError, ConfigurationError, DeadlineError, from_wire
from safehold.host.control import NodeControl, RankControl
from safehold.host.runtime import RunSlot
from safehold.host.sockets import Channel, ChannelClosed

R = TypeVar("R", bound=msgspec.Struct)
Notify = Callable[[m.Reply], None]
LIFE_POLL_S = 0.5
OTHERS_START_S = 1.5

log = logging.getLogger("safehold")


class _Pending:
    __slots__ = ("arrived", "channel", "fds", "reply")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.arrived = threading.Event()
        self.reply: Any = None
        self.fds: list[int] = []


class AgentClient:
    """See the module.

    Args:
        url: The run directory.
        slot: Where its agent is on this node.
        rank: This rank.
        config: Settings.
        keep: Wire form of the retention rules.
        every_seconds: Interval of time-based saves, 0 for none.
        listen: Where the agent listens for those of other nodes.
        notify: Takes `Settled`, `Durable`, `SaveFailed`, `Superseded` and `Note`.
        lost: Told once per connection that was welcomed that the agent is gone.
    """

    def __init__(
        self,
        *,
        url: str,
        slot: RunSlot,
        rank: int,
        config: Config,
        keep: dict[str, Any],
        every_seconds: float,
        notify: Notify,
        lost: Callable[[str], None],
        listen: str = "",
    ) -> None:
        self._url, self._slot, self.rank, self._config = url, slot, rank, config
        self._keep, self._every_seconds = keep, every_seconds
        self._notify, self._on_lost = notify, lost
        self._channel: Channel | None = None
        self._receiver: threading.Thread | None = None
        self._other: Greeting | None = None
        self._pending: dict[int, _Pending] = {}
        self._next = 1
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._world: m.World | None = None
        self._listen = listen
        self.address, self.addresses = "", list[str]()
        self.local_flash = False
        self.run_id, self.incarnation = "", 0
        self.control: RankControl | None = None
        self.node_control: NodeControl | None = None
        self.generation = 0
        self.agent_pid = 0
        self.closed = False

    @property
    def url(self) -> str:
        """The run directory."""
        return self._url

    @property
    def alive(self) -> bool:
        """Whether the agent is there."""
        return (channel := self._channel) is not None and not channel.closed

    def connect(self, world: m.World, timeout_s: float) -> None:
        """Find or start the agent and say hello; also after it was lost.

        Raises:
            AgentUnavailableError: It cannot be started or reached.
            ConfigurationError: An agent of another version is busy.
            SupersededError: A newer incarnation owns the run.
        """
        self._check_process()
        self._world = world
        deadline = time.monotonic() + timeout_s
        if self._receiver is not None and self._receiver is not threading.current_thread():
            self._receiver.join(timeout_s)  # what it still has to tell is about the old connection
        while True:
            if self.closed:
                raise self._gone("connecting")
            left_s = max(0.1, deadline - time.monotonic())
            # One rank starts it, the others only if that one does not.
            patience_s = 0.0 if self.rank == min(world.ranks_of(world.node_of[self.rank])) else OTHERS_START_S
            channel = connect_or_start(self._url, self._slot, self._config, left_s, patience_s=patience_s)
            self.generation += 1
            self.node_control = None  # its signs of life were the old agent's
            self._channel, self._other = channel, None
            self._receiver = threading.Thread(target=self._receive, args=(channel,), name="safehold-agent", daemon=True)
            self._receiver.start()
            try:
                self._hello(world, max(0.1, deadline - time.monotonic()))
                if self.closed:  # meanwhile, by another thread that did not see this channel yet
                    raise self._gone("connecting")
                return
            except CheckpointError as exc:
                channel.close()
                if not isinstance(exc, AgentUnavailableError) or time.monotonic() + 0.2 > deadline:
                    raise
                time.sleep(0.2)

    def reconnect(self, timeout_s: float) -> None:
        """Connect again after the agent was lost."""
        if self._world is None:
            raise ConfigurationError("not connected yet")
        self.connect(self._world, timeout_s)

    def _hello(self, world: m.World, timeout_s: float) -> None:
        message = m.Hello(
            id=0,
            protocol=m.PROTOCOL,
            version=__version__,
            rank=self.rank,
            pid=os.getpid(),
            world=world,
            config=self._config.to_wire(),
            keep=self._keep,
            every_seconds=self._every_seconds,
            incarnation=self.incarnation,
            run_id=self.run_id,
            listen=self._listen if len(world.node_names) > 1 else "",
            addresses=self.addresses,
            local_flash=self.local_flash,
        )
        reply, fds = self._exchange(message, timeout_s, "hello")
        if not isinstance(reply, m.Welcome) or len(fds) != 3:
            _close(fds)
            raise AgentUnavailableError("the agent answered with something else", rank=self.rank)
        self.control, self.node_control = RankControl.attach(fds[0], fds[1]), NodeControl.attach(fds[2])
        self.agent_pid, self.address = reply.agent_pid, reply.address

    def request(self, message: msgspec.Struct, expect: type[R], timeout_s: float, doing: str) -> tuple[R, list[int]]:
        """Ask and wait.

        Args:
            message: The request; its `id` is filled in here.
            expect: Type of the reply.
            timeout_s: Deadline.
            doing: What is being done, for the error.

        Returns:
            The reply, and descriptors that the caller owns.

        Raises:
            CheckpointError: What the agent refused with.
            DeadlineError: No answer in time.
            AgentUnavailableError: It died.
        """
        reply, fds = self._exchange(message, timeout_s, doing)
        if isinstance(reply, expect):
            return reply, fds
        _close(fds)
        raise AgentUnavailableError(f"the agent answered {doing} with {type(reply).__name__}", rank=self.rank)

    def ask(self, message: msgspec.Struct, timeout_s: float, doing: str) -> tuple[Any, list[int]]:
        """As `request`, for questions with more than one kind of answer; refusals are raised."""
        return self._exchange(message, timeout_s, doing)

    def tell(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send a request without waiting for its reply (which must be `Done` or a refusal; it is dropped)."""
        self._check_process()
        channel = self._channel
        if channel is None:
            raise self._gone("telling the agent")
        try:
            channel.send(m.encode(message), fds, timeout_s=self._config.request_timeout_s)
        except (ChannelClosed, TimeoutError, OSError) as exc:
            raise self._gone("telling the agent") from exc

    def _exchange(self, message: Any, timeout_s: float, doing: str) -> tuple[Any, list[int]]:
        self._check_process()
        channel = self._channel
        if channel is None:
            raise self._gone(doing)
        pending = _Pending(channel)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._pending[number] = pending
        in_time = False
        try:
            channel.send(m.encode(msgspec.structs.replace(message, id=number)), timeout_s=min(timeout_s, 30.0))
            self._await(pending, timeout_s, doing)
            in_time = True
        except (ChannelClosed, TimeoutError, OSError) as exc:
            raise self._gone(doing) from exc
        finally:
            with self._lock:
                self._pending.pop(number, None)
            if not in_time or isinstance(pending.reply, m.Refused):
                _close(pending.fds)
        if pending.reply is None:
            raise self._gone(doing)
        if isinstance(pending.reply, m.Refused):
            raise from_wire(pending.reply.error)
        return pending.reply, pending.fds

    def _await(self, pending: _Pending, timeout_s: float, doing: str) -> None:
        """Wait for a reply as long as the agent shows signs of life."""
        begun = time.monotonic()
        hint = "look at the agent's log (safehold agents shows where)"
        while not pending.arrived.wait(max(0.0, min(LIFE_POLL_S, begun + timeout_s - time.monotonic()))):
            now = time.monotonic()
            if now - begun >= timeout_s:
                text = f"the agent did not answer {doing} within {timeout_s:g} s"
                raise DeadlineError(text, rank=self.rank, hint=hint)
            silent_s = self._silent_s(now)
            if silent_s > self._config.request_timeout_s:
                text = f"the agent has shown no sign of life for {silent_s:.0f} s ({doing}); was it stopped?"
                raise DeadlineError(text, rank=self.rank, hint=hint)

    def _silent_s(self, now: float) -> float:
        """How long the agent has not been heard of; 0 before it was for the first time."""
        beat_ns = self.node_control.agent_beat_ns if self.node_control is not None else 0
        return now - beat_ns / 1e9 if beat_ns else 0.0

    def _receive(self, channel: Channel) -> None:
        fds: list[int] = []
        welcomed = False  # else it is for `connect` to say what became of it
        try:
            while True:
                data, fds = channel.recv(timeout_s=None)
                reply = m.decode_reply(data)
                taken, fds = fds, []
                welcomed = welcomed or isinstance(reply, m.Welcome)
                self._deliver(reply, taken)
        except OtherVersionError as exc:
            why = str(exc)
            self._other = exc.greeting
        except (ChannelClosed, OSError, msgspec.DecodeError) as exc:
            why = str(exc)
        _close(fds)
        channel.close()
        with self._lock:
            waiting = [pending for pending in self._pending.values() if pending.channel is channel]
        for pending in waiting:
            pending.arrived.set()
        if welcomed and not self.closed and os.getpid() == self._pid:
            self._on_lost(why)

    def _deliver(self, reply: m.Reply, fds: list[int]) -> None:
        number = reply.id
        if number == 0:
            try:
                self._notify(reply)
            except Exception:
                log.exception("safehold: a notification of the agent could not be taken")
        else:
            with self._lock:  # whoever gives up waiting takes it out under the lock, too
                pending = self._pending.get(number)
                if pending is not None:
                    pending.reply, pending.fds = reply, fds
            if pending is not None:
                pending.arrived.set()
                return
        _close(fds)

    def close(self, *, linger: bool) -> None:
        """Say goodbye and close."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        try:
            self._exchange(m.Bye(0, linger), 5.0, "goodbye")
        except CheckpointError:
            pass  # it is gone, which is where we are going
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        blocks = self.control, self.node_control
        self.control = self.node_control = None
        for block in blocks:
            if block is not None:
                block.close()

    def _gone(self, doing: str) -> CheckpointError:
        if (other := self._other) is not None:
            text = f"the agent runs {other}, the trainer {m.greet(HELLO)}"
            if other.word == LEAVES:
                text = f"{text}; it drains and leaves"
                return AgentUnavailableError(text, rank=self.rank, hint="try again in a moment")
            hint = "another job of this run directory is still running; stop it first"
            return ConfigurationError(text, rank=self.rank, hint=hint)
        hint = "it is started again at the next save; its log says why it ended: " + str(self._slot.log_path)
        return AgentUnavailableError(f"the agent of this node is gone ({doing})", rank=self.rank, hint=hint)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            hint = "make a Checkpointer in the process that uses it"
            raise ConfigurationError("a forked child cannot use its parent's Checkpointer", rank=self.rank, hint=hint)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
