"""Verifies the arenas of trainers that have died, so that a restore from this node's memory has only to copy.

Invariants: an arena counts as verified once all its bytes matched their checksums while no process was left that could write to it, and
until one is given it again to write. What does not match stays what it was: the restore finds it, says so, and reads elsewhere.
However often trainers go, one thread waits for the ends of their processes, with one descriptor for each process that still runs.
Used from the dispatcher thread only, but for that thread.
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from safehold.agent.arenas import Arena, ArenaPool, Post
from safehold.agent.flusher_client import Flusher
from safehold.errors import CheckpointError
from safehold.host.process import Process

LEAVING_S = 30.0
WATCH_POLL_S = 0.05


@dataclass(slots=True)
class _Leaving:
    """A process whose end is waited for `until` then; `ranks` (rank -> life) are those that it was."""

    process: Process
    until: float = 0.0
    ranks: dict[int, int] = field(default_factory=dict)


class MemoryChecks:
    """Follows the trainers of one session that went.

    Args:
        pool: The node's arenas.
        flusher: Reads the checksums, and compares.
        post: Runs a function in the dispatcher.
        timeout_s: Seconds that a check may take.
    """

    def __init__(self, pool: ArenaPool, flusher: Flusher, post: Post, *, timeout_s: float) -> None:
        self._pool, self._flusher, self._post, self._timeout_s = pool, flusher, post, timeout_s
        self._dead: set[int] = set()
        self._lives: dict[int, int] = {}
        self._checking: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._leaving: dict[int, _Leaving] = {}
        self._is_watched = False
        self._num_unseen = 0

    def rank_gone(self, rank: int, pid: int, pidfd: int = -1) -> None:
        """A trainer's connection ended; its arena is checked once its process has, if that can be seen.

        Args:
            rank: Which.
            pid: Its process; 0: its number is not known here.
            pidfd: Of its process, if need be; stays the caller's. -1: none.
        """
        if pid <= 0 and pidfd < 0:
            return
        life = self._lives.get(rank, 0)
        try:
            self._await_end(rank, pid, life, pidfd)
        except ProcessLookupError:
            self._post(lambda: self._ended(rank, life))
        except (OSError, RuntimeError):
            pass  # no descriptor or no thread: then the restore verifies

    def rank_back(self, rank: int) -> None:
        """A trainer has connected."""
        self._dead.discard(rank)
        self._lives[rank] = self._lives.get(rank, 0) + 1

    def _await_end(self, rank: int, pid: int, life: int, pidfd: int) -> None:
        with self._lock:
            if pid <= 0:
                self._num_unseen += 1
                pid, leaving = -self._num_unseen, _Leaving(Process.of_pidfd(os.dup(pidfd)))
            else:
                leaving = self._leaving.get(pid) or _Leaving(Process(pid))
            if not self._is_watched:
                threading.Thread(target=self._watch, name="process-ends", daemon=True).start()
                self._is_watched = True
            leaving.until, leaving.ranks[rank] = time.monotonic() + LEAVING_S, life
            self._leaving[pid] = leaving

    def _watch(self) -> None:
        """Wait for the ends of processes, as long as there are any to wait for."""
        while True:
            poller = select.poll()
            with self._lock:
                now = time.monotonic()
                for pid, leaving in list(self._leaving.items()):
                    ended = leaving.process.wait(0)
                    if ended or now > leaving.until:
                        del self._leaving[pid]
                        leaving.process.close()
                    else:
                        poller.register(leaving.process.fileno(), select.POLLIN)
                    for rank, life in leaving.ranks.items() if ended else ():
                        self._post(lambda rank=rank, life=life: self._ended(rank, life))  # type: ignore[misc]
                if not self._leaving:
                    self._is_watched = False
                    return
            poller.poll(WATCH_POLL_S * 1000)

    def close(self) -> None:
        """Wait for no process any more."""
        with self._lock:
            for leaving in self._leaving.values():
                leaving.process.close()
            self._leaving.clear()

    def _ended(self, rank: int, life: int) -> None:
        if self._lives.get(rank, 0) == life:
            self._dead.add(rank)
            self.consider()

    def consider(self) -> None:
        """Check what dead trainers left, if that is a whole checkpoint and was not checked yet."""
        for rank in self._dead:
            for arena in self._pool.of_all(rank):
                if arena.content is not None and not arena.busy and not arena.verified:
                    self._check(arena)

    def _check(self, arena: Arena) -> None:
        commit, use = arena.content, (arena.arena_id, arena.num_uses)
        assert commit is not None
        if use in self._checking:
            return
        self._checking.add(use)

        def checked(equal: Any, error: CheckpointError | None) -> None:
            self._checking.discard(use)
            same = arena in self._pool.of_all(arena.rank) and use == (arena.arena_id, arena.num_uses)
            if same and arena.rank in self._dead and arena.content == commit:
                arena.verified = error is None and equal is True

        arguments = {
            "commit": [commit.step, commit.incarnation, commit.attempt],
            "rank": arena.rank,
            "packs": arena.packs,
            "arena_id": arena.arena_id,
            "arena_bytes": arena.size_bytes,
            "block_crcs": self._pool.held.block_crcs(commit, arena.rank) if arena.in_memory else None,
        }
        self._flusher.call("check_memory", arguments, checked, timeout_s=self._timeout_s, fds=(arena.fd,))
