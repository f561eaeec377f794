"""How rank 0 opens a run: the job before settles, the nodes find out what the run directory is, the next incarnation is created.

Invariants: used from the dispatcher thread only; nothing here waits. Each part has its share of the time for a start, so that the trainer
hears what took too long before its own time is over. Where it fails, or rank 0 has left before the incarnation is asked for, the job
before goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from safehold.agent import messages as m
from safehold.agent import places
from safehold.agent import words as w
from safehold.agent.arenas import ArenaPool
from safehold.agent.connection import Connection
from safehold.agent.fetching import Afar, look_afar, look_s, refuses
from safehold.agent.flusher_client import Flusher
from safehold.agent.session import Session
from safehold.agent.survival import survival_notes
from safehold.errors import CheckpointError, ConfigurationError, RankLostError, StorageFullError

SETTLE_SHARE, PLACE_SHARE, OPEN_SHARE = 0.4, 0.25, 0.3


class Sessions(Protocol):
    """What the agent has of sessions."""

    @property
    def current(self) -> Session | None:
        """The one that owns the run here."""
        ...

    def has(self, session: Session) -> bool:
        """Whether any of its ranks is here, or may come back."""
        ...

    def switch(self, session: Session) -> None:
        """It owns the run from now on."""
        ...

    def settle_old(self, session: Session, then: Callable[[], None], deadline_s: float) -> None:
        """Have the job before it finish, or give up, what it has in flight here."""
        ...


class Opening:
    """One `OpenRun`, until it is answered.

    Args:
        sessions: The agent's.
        session: That of rank 0.
        connection: Of rank 0.
        message: The request.
        flusher: For tier work.
        pool: The node's arenas.
    """

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        connection: Connection,
        message: m.OpenRun,
        *,
        flusher: Flusher,
        pool: ArenaPool,
    ) -> None:
        self._sessions, self._session = sessions, session
        self._connection, self._message = connection, message
        self._flusher, self._pool = flusher, pool
        self._start_s = session.config.start_timeout_s
        self._afar = Afar()

    def begin(self) -> None:
        """Begin; the answer comes by itself.

        Raises:
            ConfigurationError: Another rank than 0 asks.
            SupersededError: The session has ended.
        """
        session, rank = self._session, self._connection.rank
        session.refuse_if_ended(rank)
        head = session.head
        if rank != 0 or head is None:
            raise ConfigurationError("only rank 0 opens a run", rank=rank)
        deadline_s, others = self._start_s * SETTLE_SHARE, head.others
        settled = lambda: others.after(self._settled)  # noqa: E731
        if others.any:  # their flushers, and this one, have to work next
            ready = lambda: places.when_ready(self._flusher, session.config, settled)  # noqa: E731
        else:
            ready = settled
        others.ask(deadline_s)  # first: what nobody was asked for is over at once
        self._sessions.settle_old(session, ready, deadline_s)

    def _settled(self) -> None:
        head = self._session.head
        if not self._has_left() and head is not None:
            head.places.decide(self._placed, self._start_s * PLACE_SHARE)

    def _placed(self, local_flash: bool, error: CheckpointError | None) -> None:
        if error is not None:
            self._failed(error)
            return
        if self._has_left():
            return
        session = self._session
        assert session.head is not None
        session.head.tell_all(w.Placed(local_flash))  # this node's flusher takes the new start's settings, too
        look_afar(session.copier, session.config, self._looked, self._failed)

    def _looked(self, afar: Afar) -> None:
        if self._has_left():
            return
        self._afar = afar
        session = self._session
        if session.copier is None or session.head is None or afar.held is None:
            self._open()
            return
        # A node that cannot use it is found now, by name, and not when the first checkpoint was to be there.
        session.head.places.second_place(session.copier, self._tried, look_s(session.config))

    def _tried(self, error: CheckpointError | None) -> None:
        if self._has_left():
            return
        if error is not None and refuses(error):
            self._failed(error)
            return
        if error is not None and not isinstance(error, StorageFullError):  # that was told already
            self._afar.warnings.append(f"the remote {self._session.config.remote} was not seen by all nodes: {error}")
        self._open()

    def _open(self) -> None:
        token, held = self._session.token, self._afar.held
        arguments = {"token": token, "up_to": None, "exclude": [], "reason": "start", "held": held}
        self._flusher.call("open_run", arguments, self._opened, timeout_s=self._start_s * OPEN_SHARE)

    def _opened(self, value: Any, error: CheckpointError | None) -> None:
        if error is not None:
            self._failed(error)
            return
        sessions, session, old = self._sessions, self._session, self._sessions.current
        if not sessions.has(session):  # its ranks have left meanwhile
            if old is not None:
                old.end(value["incarnation"])
            return
        warnings = [] if old is None or old is session else old.taken_over()
        assert session.head is not None
        memory = session.head.memory.choose(value["run_id"], value.get("before", 0))
        steps = session.opened(value["run_id"], value["incarnation"], value["steps"], memory)
        sessions.switch(session)
        self._pool.drop_idle(set(session.local_ranks), self._pool.ranks_with_content(set(steps)))
        newest = max([*steps, *value.get("steps_afar", ())], default=None)
        notes = [*self._afar.notes, *value["notes"], *survival_notes(self._connection.pid)]
        if (num_nodes := len(session.world.node_names)) > 1:
            notes.append(places.note(session.local_flash, num_nodes, self._flusher.url))
        if session.head is not None:
            more, warned = session.head.protector.notes(local_flash=session.local_flash)
            notes, warnings = [*notes, *more], [*warnings, *warned]
        self._connection.reply(
            m.RunOpened(
                self._message.id,
                session.run_id,
                session.incarnation,
                newest,
                notes,
                [*warnings, *self._afar.warnings],
                session.local_flash,
            )
        )

    def _has_left(self) -> bool:
        """Whether rank 0 has gone meanwhile: then no incarnation is opened, which nobody would use, and the job before goes on."""
        if self._sessions.has(self._session) and self._session.peers.get(self._connection.rank) is self._connection:
            return False
        self._failed(RankLostError("rank 0 has left while the run was being opened", rank=self._connection.rank))
        return True

    def _failed(self, error: CheckpointError) -> None:
        self._connection.refuse(self._message.id, error)
        current = self._sessions.current
        if current is not None and current is not self._session:
            current.resume()
