"""Parity of the saves in memory of one node, from the word that its own share is kept to the word that its parity is made.

Invariants: used from the dispatcher thread only; the work runs in threads, and ends by a deadline or when the save is abandoned. A save is
waited for until the lead lets its set protect it or abandons it, which it does by its own deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safehold.agent import words as w
from safehold.agent.arenas import Post
from safehold.agent.means import Spawn
from safehold.agent.memory_copies import Effort
from safehold.agent.memory_held import Held
from safehold.agent.memory_parity import ParityWork
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CheckpointError, CommitError, SkippedError, StorageError
from safehold.format import document
from safehold.format.records import NodeRef
from safehold.policy.placement import RedundancySet
from safehold.types import CommitId

if TYPE_CHECKING:
    from safehold.agent.session import Session

Done = Callable[[CheckpointError | None], None]


@dataclass(slots=True)
class _Waiting:
    """A share that is kept and not protected: who hears of it, and whether the work has begun."""

    done: Done
    cancelled: threading.Event
    begun: bool = False


class Protecting:
    """See the module.

    Args:
        here: This node's session.
        of: Its redundancy set.
        config: The run's settings.
        held: What is in memory here.
        effort: Returns what the work may take; called in its thread.
        post: Runs a function in the dispatcher.
        spawn: Has done beside the dispatcher what takes time.
    """

    def __init__(
        self,
        here: Session,
        of: RedundancySet,
        *,
        config: Config,
        held: Held,
        effort: Callable[[], Effort],
        post: Post,
        spawn: Spawn,
    ) -> None:
        self._here, self._of, self._config, self._held = here, of, config, held
        self._effort, self._post, self._spawn = effort, post, spawn
        self._waiting: dict[CommitId, _Waiting] = {}

    def kept(self, commit: CommitId, record: bytes, cancelled: threading.Event, done: Done) -> None:
        """The node keeps its share of a save; `done` hears once its parity is made, or why not."""
        self._waiting[commit] = _Waiting(done, cancelled)
        digest = document.digest(record)
        self._here.report(w.ShareKept(commit.incarnation, commit.step, commit.attempt, len(record), digest))

    def make_parity(self, word: w.MakeParity) -> None:
        """All members of the set keep their shares: make the parity."""
        commit = CommitId(word.step, word.incarnation, word.attempt)
        waiting = self._waiting.get(commit)
        if waiting is None or waiting.begun:
            return
        waiting.begun = True
        here, network = self._here, self._here.memory.network
        if tuple(node for node, *_ in word.refs) != self._of.members or network is None:
            text = "the lead has another redundancy set for this node"
            self._ended(commit, waiting, CommitError(text, step=word.step))
            return
        work = ParityWork(
            commit=commit,
            run_id=here.run_id,
            node=here.node,
            names=here.world.node_names,
            of=self._of,
            refs=tuple(NodeRef(node=node, size_bytes=size, blake3=digest) for node, size, digest in word.refs),
            read_timeout_s=self._config.stall_timeout_s,
        )

        def run() -> None:
            error: CheckpointError | None = None
            try:
                work.run(self._held, network, self._effort(), waiting.cancelled)
            except CheckpointError as exc:
                error = exc
            except Exception as exc:
                error = StorageError(f"making parity in memory failed: {type(exc).__name__}: {exc}", tier="memory")
            self._post(lambda: self._ended(commit, waiting, error))

        try:
            self._spawn(f"parity-{commit.step}", run)
        except RuntimeError as exc:
            failure = AgentUnavailableError(f"no thread to make parity with: {exc}", step=word.step)
            self._ended(commit, waiting, failure)

    def abandoned(self, commit: CommitId) -> None:
        """A save is given up: nobody waits for its parity, unless a thread is at work on it."""
        waiting = self._waiting.get(commit)
        if waiting is not None and not waiting.begun:
            self._ended(commit, waiting, SkippedError("the save was abandoned", step=commit.step))

    def _ended(self, commit: CommitId, waiting: _Waiting, error: CheckpointError | None) -> None:
        self._waiting.pop(commit, None)
        waiting.done(error)
