"""The agent: connections in, one dispatcher, sessions, and the decision to leave.

Invariants: everything but receiving, sending and populating memory happens in the dispatcher thread, which never blocks on a socket or on
storage. A connection that breaks the protocol is closed and harms nobody else. The agent leaves when its trainers have been gone for
the linger time and nothing is in flight, or when it is told to (SIGTERM). One that was started ahead stays (`stay_s`): when another would
leave, it frees its arenas. The same signal may have been sent to its trainers, which then save once more: it serves them for
`TERM_SERVE_S`, or until they have gone; then it takes no more saves, finishes what all ranks have begun, or staged if they are gone, until
`TERM_GRACE_S` after the signal, and abandons the rest.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from safehold._version import __version__
from safehold.agent import greeting
from safehold.agent import messages as m
from safehold.agent.arenas import ArenaPool
from safehold.agent.connection import Connection
from safehold.agent.facts import facts_of
from safehold.agent.flusher_client import Flusher
from safehold.agent.greeting import Greeting, OtherVersionError
from safehold.agent.lead import SETTLE_GRACE_S
from safehold.agent.means import REAL, Means
from safehold.agent.net.seam import Listeners
from safehold.agent.nodes import MeetingNetwork
from safehold.agent.opening import Opening
from safehold.agent.session import Session
from safehold.clock import SYSTEM_CLOCK, Clock
from safehold.config import Config
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ConfigurationError,
    SupersededError,
)
from safehold.events import EventStream
from safehold.host.sockets import Channel, ChannelClosed, Listener

ORDERLY_LINGER_S = 1.0
FIRST_LINGER_S = 10.0
TERM_SERVE_S, TERM_GRACE_S = 8.0, 20.0  # a job scheduler kills what is left some 30 s after its SIGTERM
COPY_STOP_S = 3.0
FAREWELL_S = 1.0
ACCEPT_RETRY_S = 0.2
MAX_WAIT_S = 1.0


class AgentServer:
    """Serves one run on one node.

    Args:
        url: The run directory, as path or URL.
        listener: Where trainers connect.
        log_fd: Log, for flushers.
        events: The agent's event stream.
        clock: Time.
        stay_s: Stay for so long after the last trainer has gone, or from the start; None: only where there is memory to keep.
        means: Threads and control words of sessions.
    """

    def __init__(
        self,
        url: str,
        listener: Listener,
        *,
        log_fd: int | None,
        events: EventStream,
        clock: Clock = SYSTEM_CLOCK,
        stay_s: float | None = None,
        means: Means = REAL,
    ) -> None:
        self.url, self._stay_s, self._busy_at, self._means = url, stay_s, clock.monotonic(), means
        self._listener, self._log_fd, self._events, self._clock = listener, log_fd, events, clock
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sessions: dict[str, Session] = {}
        self._current: Session | None = None
        self._pool: ArenaPool | None = None
        self._flusher: Flusher | None = None
        self._copier: Flusher | None = None
        self._gone_since: float | None = None
        self._config = Config()
        self._connections: set[Connection] = set()
        self._leaving = self._settling = self._has_settled = self._stopping = False
        self._stop_at: float | None = None
        self._serve_until = 0.0
        self._linger_until = clock.monotonic() + FIRST_LINGER_S

    # -- life ----------------------------------------------------------------------------------------------------------

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` in the dispatcher."""
        self._queue.put(work)

    def serve(self) -> None:
        """Run until it is time to leave."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        while not self._done():
            try:
                work = self._queue.get(timeout=self._patience())
            except queue.Empty:
                work = _nothing
            for part in (work, self._tick):
                try:
                    part()
                except Exception as exc:
                    self._events.emit("agent", "failed", error=f"{type(exc).__name__}: {exc}")
                    traceback.print_exc()
        self._stopping = True
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        for connection in list(self._connections):
            connection.flush(FAREWELL_S)
        for flusher in self._processes():
            flusher.close()
        if self._pool is not None:
            self._pool.close()

    def terminate(self) -> None:
        """Finish what there is and leave, see the module; called from a signal handler's thread."""
        self.post(self._terminate)

    def _terminate(self) -> None:
        if self._leaving:
            return
        self._leaving = True
        now = self._clock.monotonic()
        self._serve_until, self._stop_at = now + TERM_SERVE_S, now + TERM_GRACE_S
        self._finish()

    def _finish(self) -> None:
        """Take no more saves once the trainers have gone, or have been served long enough; then leave when the last is over."""
        now, served = self._clock.monotonic(), self._has_trainers()
        if self._settling or self._stop_at is None or (served and now < self._serve_until):
            return
        self._settling = True
        left_s = max(0.0, self._stop_at - now)

        def ready() -> None:
            self._has_settled = True

        session = self._current
        if session is None:
            ready()
            return
        settled = lambda: session.guard.when_idle(ready, left_s)  # noqa: E731 - other nodes may read here, for redundancy
        session.settle(settled, left_s, grace_s=left_s if served else SETTLE_GRACE_S)

    def _stop_copying(self) -> None:
        """Leave once no replication is under way, which may go on until shortly before the end of the grace."""
        session, now = self._current, self._clock.monotonic()
        if session is not None and self._stop_at is not None:
            session.stop_copying(now=now >= self._stop_at - COPY_STOP_S)
        if session is None or not session.is_copying(0.0):
            self._stop_at = now

    def _processes(self) -> list[Flusher]:
        return [flusher for flusher in (self._flusher, self._copier) if flusher is not None]

    def _is_copying(self, now: float) -> bool:
        """Whether a replication is worth staying for, now that the trainers have gone."""
        self._gone_since = now if self._gone_since is None else self._gone_since
        return self._current is not None and self._current.is_copying(now - self._gone_since)

    def _has_trainers(self) -> bool:
        return any(session.peers for session in self._sessions.values())

    def _done(self) -> bool:
        now = self._clock.monotonic()
        if self._stop_at is not None and now >= self._stop_at:
            return True
        if self._has_trainers():
            self._gone_since = None
        if self._has_trainers() or self._in_flight() or self._is_copying(now):
            self._linger_until = max(self._linger_until, now)
            self._busy_at = now
            return False
        if self._stay_s is None or now < self._linger_until:
            return now >= self._linger_until
        if self._pool is not None:
            self._pool.rest()
        return now >= self._busy_at + self._stay_s

    def _in_flight(self) -> bool:
        num_open = self._current.num_open if self._current is not None else 0
        protecting = self._current is not None and self._current.guard.is_busy
        return num_open > 0 or protecting or (self._flusher is not None and self._flusher.num_open > 0)

    def _live(self) -> list[Session]:
        """The session that owns the run here, and those that are being opened: their deadlines run."""
        found = list(self._sessions.values())
        return found if self._current is None or self._current in found else [*found, self._current]

    def _patience(self) -> float:
        now = self._clock.monotonic()
        due = [now + MAX_WAIT_S]
        if self._linger_until > now:
            due.append(self._linger_until)
        if self._stop_at is not None:
            due.append(self._stop_at if self._settling else self._serve_until)
        due.extend(when for flusher in self._processes() if (when := flusher.next_deadline()) is not None)
        due.extend(when for session in self._live() if (when := session.next_deadline()) is not None)
        return max(0.001, min(due) - self._clock.monotonic())

    def _tick(self) -> None:
        if self._copier is not None:
            self._copier.check_deadlines()
            self._copier.reap_abandoned()
        if self._flusher is not None:
            self._flusher.check_deadlines()
            if self._flusher.abandoned and self._flusher.reap_abandoned() and self._pool is not None:
                self._pool.recovered()
        for session in self._live():
            session.tick()
        if self._leaving:
            self._finish()
        if self._has_settled:
            self._stop_copying()

    # -- connections -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                channel = self._listener.accept()
            except ChannelClosed:
                if self._stopping:
                    return
                time.sleep(ACCEPT_RETRY_S)  # out of descriptors, say: that passes
                continue
            threading.Thread(target=self._receive, args=(channel,), name="trainer", daemon=True).start()

    def _receive(self, channel: Channel) -> None:
        connection = Connection(channel)
        self.post(lambda: self._connections.add(connection))
        while True:
            fds: list[int] = []
            try:
                data, fds = channel.recv(timeout_s=None)
                message = m.decode_request(data)
                payload = _read_payload(message, fds)
            except OtherVersionError as exc:
                self.post(lambda other=exc.greeting: self._stranger(connection, other))  # type: ignore[misc]
                return
            except Exception:  # it ended, or what came is no message of ours: either way this connection is over
                self.post(lambda: self._gone(connection))
                return
            finally:
                for fd in fds:
                    os.close(fd)
            self.post(lambda message=message, payload=payload: self._handle(connection, message, payload))  # type: ignore[misc]

    def _gone(self, connection: Connection) -> None:
        self._connections.discard(connection)
        session = connection.session
        if session is not None and connection.rank >= 0:
            orderly, process = connection.orderly and not connection.linger, connection.process
            pidfd = -1 if process is None else process.fileno()
            session.detach(connection.rank, connection, orderly=orderly, pid=connection.pid, pidfd=pidfd)
            self._linger(session)
            self._forget(session)
        elif connection.refused and not self._sessions:
            self._linger_until = self._clock.monotonic() + ORDERLY_LINGER_S
        connection.close()

    def _linger(self, session: Session) -> None:
        """Decide how long to wait for a restart, after a rank has gone: only memory is worth it, and only its own job's end counts."""
        if self._has_trainers() or (self._current is not None and session is not self._current):
            return
        held = self._pool is not None and self._pool.total_bytes > 0
        linger_s = self._config.agent_linger_s if session.disorderly and held else ORDERLY_LINGER_S
        self._linger_until = self._clock.monotonic() + linger_s

    def _forget(self, session: Session) -> None:
        """Drop a session that no rank is left of, unless its ranks may come back."""
        if not session.peers and session is not self._current:
            self._sessions.pop(session.token, None)
            session.close()
            self._go_on_if_left(session)

    def _handle(self, connection: Connection, message: m.Request, payload: dict[str, bytes] | None) -> None:
        try:
            match message:
                case m.StatusAsk():
                    connection.reply(m.Status(message.id, self._facts()))
                case m.Hello():
                    self._hello(connection, message)
                case m.Bye():
                    connection.orderly, connection.linger = True, message.linger
                    connection.reply(m.Done(message.id))
                case m.Begin() if self._settling:
                    raise AgentUnavailableError("the agent is leaving", rank=connection.rank)
                case m.OpenRun():
                    self._open_run(connection, message)
                case _:
                    self._session_of(connection).handle(connection, message, payload)
        except CheckpointError as exc:
            connection.refuse(message.id, exc)
        except Exception as exc:
            traceback.print_exc()
            text = f"the agent cannot carry out {type(message).__name__}: {type(exc).__name__}: {exc}"
            connection.refuse(message.id, ConfigurationError(text, hint="the agent's log has more"))

    def _session_of(self, connection: Connection) -> Session:
        if connection.session is None:
            raise ConfigurationError("say hello first")
        return connection.session

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        if connection.session is not None:
            raise ConfigurationError("this connection has said hello before", rank=hello.rank)
        connection.refused = True  # until it is not
        if self._leaving and (self._settling or hello.world.token not in self._sessions):
            raise AgentUnavailableError("the agent is leaving", rank=hello.rank, hint="try again in a moment")
        if hello.protocol != m.PROTOCOL or hello.version != __version__:
            self._make_room(Greeting(hello.protocol, hello.version, greeting.HELLO), hello.rank)
        session = self._sessions.get(hello.world.token)
        if session is None or session is not self._current:
            self._refuse_if_older(hello)
        if session is None:
            session = self._new_session(hello)
        session.refuse_if_ended(hello.rank)
        control, node_control = session.attach(connection, hello)
        connection.rank, connection.session, connection.refused = hello.rank, session, False
        fds = (*control.fds, node_control.block_fd)
        address = session.nodes.address if session.nodes is not None else ""
        connection.reply(m.Welcome(hello.id, __version__, os.getpid(), address), fds)
        if session.incarnation and session is not self._current:
            self.switch(session)

    def _refuse_if_older(self, hello: m.Hello) -> None:
        """A trainer comes back to an agent that serves a newer incarnation already."""
        current = self._current
        if current is not None and hello.incarnation and current.incarnation > hello.incarnation:
            text = f"incarnation {current.incarnation} owns the run now; this is {hello.incarnation}"
            hint = "another job was started in this run directory; stop this one, or give it a directory of its own"
            raise SupersededError(text, rank=hello.rank, hint=hint)

    def _make_room(self, other: Greeting, rank: int | None = None) -> None:
        """A trainer of another version came: finish, leave, and say so."""
        text = f"the agent runs {m.greet(greeting.IS_HERE)}, the trainer {other}"
        if not self._has_trainers():
            self._terminate()
            raise AgentUnavailableError(f"{text}; it drains and leaves", rank=rank, hint="try again in a moment")
        hint = "another job of this run directory is still running; stop it first"
        raise ConfigurationError(text, rank=rank, hint=hint)

    def _stranger(self, connection: Connection, other: Greeting) -> None:
        """Somebody came whose messages cannot be read: answer in the words that all versions know."""
        word = greeting.IS_HERE
        if other.word == greeting.HELLO:
            try:
                self._make_room(other)
            except CheckpointError as exc:
                word = greeting.LEAVES if exc.retry else greeting.BUSY
        connection.greet(word)
        self._gone(connection)

    def _new_session(self, hello: m.Hello) -> Session:
        world = hello.world
        nodes = range(len(world.node_names))
        if not 0 <= hello.rank < world.world_size == len(world.node_of) or not set(world.node_of) <= set(nodes):
            text = f"rank {hello.rank} of {world.world_size} on nodes {world.node_of[:8]} makes no world"
            raise ConfigurationError(text, rank=hello.rank)
        if self._pool is None or self._flusher is None:
            self._config = Config.from_wire(hello.config)
            flusher = self._flusher = self._new_flusher(hello.config)
            self._pool = ArenaPool(
                self.post,
                self._config.memory_budget_bytes,
                released=flusher.forget,
                nice=self._config.flush_nice,
                spawn=self._means.spawn,
            )
        config = Config.from_wire(hello.config)
        if config.remote and self._copier is None:
            # A process of its own: a second place that does not answer must not take flushes along.
            self._copier = self._new_flusher(hello.config)
        session = Session(
            hello,
            pool=self._pool,
            flusher=self._flusher,
            post=self.post,
            clock=self._clock,
            events=self._events,
            make_network=self._make_network,
            on_opened=self._opened_elsewhere,
            settle_old=self.settle_old,
            copier=self._copier,
            means=self._means,
        )
        self._sessions[session.token] = session
        return session

    def _new_flusher(self, config: dict[str, Any]) -> Flusher:
        return Flusher(self.url, config, post=self.post, clock=self._clock, events=self._events, log_fd=self._log_fd)

    def switch(self, session: Session) -> None:
        """A session owns the run here from now on; the one before has ended."""
        old = self._current
        if old is not None and old is not session:
            old.end(session.incarnation)
        if old is not None and old.run_id != session.run_id and self._pool is not None:
            self._pool.forget()
        self._current, self._config = session, session.config
        if self._pool is not None:
            self._pool.configure(session.config.memory_budget_bytes)
        if old is not None and old is not session:
            self._sessions.pop(old.token, None)
            self._forget(old)

    # -- opening a run -----------------------------------------------------------------------------------------------------

    def _open_run(self, connection: Connection, message: m.OpenRun) -> None:
        session = self._session_of(connection)
        assert self._flusher is not None and self._pool is not None
        Opening(self, session, connection, message, flusher=self._flusher, pool=self._pool).begin()

    @property
    def current(self) -> Session | None:
        """The session that owns the run here."""
        return self._current

    def has(self, session: Session) -> bool:
        """Whether any rank of a session is here, or may come back."""
        return session.token in self._sessions

    def settle_old(self, session: Session, then: Callable[[], None], deadline_s: float) -> None:
        """Have the job before finish, or give up, what it has in flight here."""
        old = self._current
        if old is None or old is session or old.ended_by:
            then()
            return

        def settled() -> None:
            then()
            self._go_on_if_left(session)

        old.settle(settled, deadline_s)

    def _go_on_if_left(self, session: Session) -> None:
        """A session's ranks have left before it owned the run: the job that had settled for it takes saves again."""
        if self._current is not None and not self._settling and not self.has(session):
            self._current.resume()

    def _opened_elsewhere(self, session: Session, steps: list[int]) -> None:
        """A lead on another node has opened an incarnation."""
        self.switch(session)
        if self._pool is not None:
            self._pool.drop_idle(set(session.local_ranks), self._pool.ranks_with_content(set(steps)))

    def _make_network(self, hello: m.Hello, listeners: Listeners) -> MeetingNetwork:
        from safehold.agent.net.make import make_network

        return make_network(hello, listeners, url=self.url, events=self._events)

    def _facts(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "run": self.url,
            "arenas_bytes": self._pool.total_bytes if self._pool else 0,
            "budget_bytes": self._pool.budget_bytes if self._pool else 0,
            "memory": self._pool.facts() if self._pool else {"steps": {}, "verified": []},
            "flusher_pid": self._flusher.pid if self._flusher else None,
            "flusher_calls": self._flusher.num_open if self._flusher else 0,
            "flushers_replaced": self._flusher.replaced if self._flusher else 0,
            "session": facts_of(self._current) if self._current else None,
            "leaving": self._leaving,
            "stay_s": self._stay_s,
        }


def _read_payload(message: m.Request, fds: list[int]) -> dict[str, bytes] | None:
    """Return the objects that came in a descriptor.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It holds something else.
    """
    if not (isinstance(message, m.Staged) and message.objects_fd and fds):
        return None
    with os.fdopen(os.dup(fds[0]), "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=dict[str, bytes])


def _nothing() -> None:
    """What the dispatcher does when only time has passed."""
