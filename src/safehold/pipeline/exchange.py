"""The one exchange at start-up, over the launcher's store: who is where, and what rank 0 decided.

Invariants: this is the only collective of the library, and only the constructor (and the one-shot save) uses it. Every wait has a
deadline and names who is late, not who waits for them. A failure of one rank is told to all, so that all raise the same, at once.

A launcher that starts the ranks again may give them the store of the start before, with all that was said then. So nobody believes what
merely lies there: each rank says hello with a word that it has just made up, rank 0 answers with that word and the round's, also made up,
and everything that is exchanged lies under the round. An answer to another word is one of an earlier round, and is waited past.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import msgspec

from safehold.clock import new_token
from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    RankLostError,
    from_interrupt,
    from_wire,
)
from safehold.types import Membership, Store

POLL_S = 0.01
PART_S = 5.0
TELL_S = 1.0
"""How long a rank that is interrupted before the round has begun waits for the others, to tell them."""
_counts: dict[tuple[str, int, int], int] = {}


class Exchange:
    """One round of start-up talk.

    Attributes:
        heed: Asked while this rank waits for others: why there is no use in that; None: there is.

    Args:
        membership: Who takes part.
        name: Tells several constructors of one job apart; the same on all ranks.
        timeout_s: Deadline of each wait.
    """

    def __init__(self, membership: Membership, name: str, timeout_s: float) -> None:
        self._rank, self._world_size, self._store = membership.rank, membership.world_size, membership.store
        # Counted for each rank, which may be a thread, and only where there is somebody to talk to: what one rank does
        # alone must not put it out of step with the others.
        who = (name, self._rank, self._world_size)
        if self._store is not None:
            _counts[who] = _counts.get(who, 0) + 1
        self._place = f"safehold/{name}/{_counts.get(who, 0)}"
        self._word = new_token()
        self._prefix = f"{self._place}/{self._word}" if self._rank == 0 else ""
        self._answered: dict[int, str] = {}
        self._has_met = self._store is None
        self._timeout_s = timeout_s
        self._gathered = ""
        self.heed: Callable[[], CheckpointError | None] = lambda: None

    def put(self, key: str, value: Any) -> None:
        """Tell everybody."""
        if self._store is not None:
            self._meet()
            self._write(f"{self._prefix}/{key}", value)

    def take(self, key: str, who: str, timeout_s: float | None = None) -> Any:
        """Wait for what somebody tells, for `timeout_s` if that is longer than this exchange's deadline.

        Raises:
            DeadlineError: It did not come; names `who`.
        """
        self._meet()
        self._wait([f"{self._prefix}/{key}"], lambda _: who, timeout_s)
        return self._read(f"{self._prefix}/{key}")

    def gather(self, key: str, value: Any, timeout_s: float | None = None) -> list[Any] | None:
        """Every rank gives a value; rank 0 gets all, by rank; the others get None. `timeout_s` as for `take`."""
        if self._store is None:
            return [value]
        self._gathered = key
        self.put(f"{key}/{self._rank}", value)
        if self._rank != 0:
            return None
        keys = [f"{self._prefix}/{key}/{rank}" for rank in range(self._world_size)]
        self._wait(keys, _named, timeout_s)
        return [self._read(entry) for entry in keys]

    def decide(self, key: str, make: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Rank 0 makes a value, all get it; if making it fails, all raise the same error. `timeout_s` as for `take`."""
        if self._rank != 0:
            self._meet()
            path = f"{self._prefix}/{key}"
            self._wait([path], lambda _: self._who_is_late(), timeout_s)
            return self.opened(self._read(path))
        try:
            value = make()
        except CheckpointError as exc:
            self.put(key, {"error": exc.to_wire()})
            raise
        except BaseException as exc:
            text = f"rank 0 failed: {type(exc).__name__}: {exc}"
            told = ConfigurationError(text, rank=0) if isinstance(exc, Exception) else from_interrupt(exc, rank=0)
            self.put(key, {"error": told.to_wire()})
            raise
        self.put(key, {"value": value})
        return value

    def agree(self, key: str, error: CheckpointError | None, timeout_s: float | None = None) -> None:
        """All ranks say whether they got here; if one did not, all raise its error. `timeout_s` as for `take`."""

        def verdict() -> None:
            assert said is not None
            for entry in said:
                if entry is not None:
                    raise from_wire(entry)

        said = self.gather(key, error.to_wire() if error else None, timeout_s)
        self.decide(f"{key}/verdict", verdict, timeout_s)

    def part(self) -> None:
        """The last word was said: rank 0, in whose process the store may live, waits a little until all have heard it."""
        if self._store is None or not self._has_met:
            return
        if self._rank != 0:
            self.put(f"heard/{self._rank}", True)
            return
        missing = [f"{self._prefix}/heard/{rank}" for rank in range(1, self._world_size)]
        until = time.monotonic() + PART_S
        while (missing := [key for key in missing if not self._has(key)]) and time.monotonic() < until:
            time.sleep(POLL_S)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around everything that is exchanged: tell the others if this rank is interrupted, so that they wait no longer."""
        try:
            yield
        except Exception:
            raise
        except BaseException as exc:
            with suppress(CheckpointError):
                self._tell_interrupted(from_interrupt(exc, rank=self._rank))
            raise

    @staticmethod
    def opened(entry: dict[str, Any]) -> Any:
        """Return the value that somebody told, or raise the error that was told instead."""
        if "error" in entry:
            raise from_wire(entry["error"])
        return entry["value"]

    # -- the round -----------------------------------------------------------------------------------------------------

    def _meet(self, timeout_s: float | None = None) -> None:
        """Find the round that all ranks are in now: see the module.

        Raises:
            DeadlineError: Some rank is not there.
        """
        if self._has_met:
            return
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if self._rank != 0:
            self._write(f"{self._place}/hello/{self._rank}", self._word)
            self._await_answer(deadline, limit_s)
        self._write(f"{self._prefix}/here/{self._rank}", True)
        if self._rank == 0:
            self._answer_all(deadline, limit_s)
        self._has_met = True

    def _await_answer(self, deadline: float, limit_s: float) -> None:
        path = f"{self._place}/answer/{self._rank}"
        while True:
            if self._has(path):
                word, round_word = self._read(path)
                if word == self._word:
                    self._prefix = f"{self._place}/{round_word}"
                    return
            if time.monotonic() > deadline:
                raise self._late_error(_named([0]), limit_s)
            time.sleep(POLL_S)

    def _answer_all(self, deadline: float, limit_s: float, *, heed: bool = True) -> None:
        """Answer every rank until it is in this round; what an earlier one said there is answered too, and heard by nobody."""
        missing = list(range(1, self._world_size))
        while missing := [rank for rank in missing if not self._has(f"{self._prefix}/here/{rank}")]:
            if heed:
                self._raise_if_failed()
            for rank in missing:
                if not self._has(hello := f"{self._place}/hello/{rank}"):
                    continue
                if (word := self._read(hello)) != self._answered.get(rank):
                    self._write(f"{self._place}/answer/{rank}", [word, self._word])
                    self._answered[rank] = word
            if time.monotonic() > deadline:
                self._give_up(_named(missing), limit_s)
            time.sleep(POLL_S)

    def _tell_interrupted(self, error: CheckpointError) -> None:
        if self._store is None:
            return
        if self._rank != 0:
            self._meet(TELL_S)
        self._write(f"{self._prefix}/failed", error.to_wire())
        if self._rank == 0 and not self._has_met:  # whoever is answered finds it
            self._answer_all(time.monotonic() + TELL_S, TELL_S, heed=False)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _who_is_late(self) -> str:
        """Rank 0, or those that it may be waiting for itself."""
        if away := [rank for rank in range(self._world_size) if not self._has(f"{self._prefix}/here/{rank}")]:
            return _named(away)
        keys = [f"{self._prefix}/{self._gathered}/{rank}" for rank in range(self._world_size)]
        late = [rank for rank, key in enumerate(keys) if self._gathered and not self._has(key)]
        return _named(late or [0])

    def _wait(self, keys: Sequence[str], who: Callable[[list[int]], str], timeout_s: float | None) -> None:
        limit_s = max(self._timeout_s, timeout_s or 0.0)
        deadline = time.monotonic() + limit_s
        missing = list(enumerate(keys))
        while True:
            missing = [(index, key) for index, key in missing if not self._has(key)]
            if not missing:
                return
            self._raise_if_failed()
            if time.monotonic() > deadline:
                self._give_up(who([index for index, _ in missing]), limit_s)
            time.sleep(POLL_S)

    def _raise_if_failed(self) -> None:
        if self._has(failed := f"{self._prefix}/failed"):
            raise from_wire(self._read(failed))
        if (error := self.heed()) is not None:
            self._write(failed, error.to_wire())
            raise error

    def _give_up(self, late: str, limit_s: float) -> NoReturn:
        error = self._late_error(late, limit_s)
        self._write(f"{self._prefix}/failed", error.to_wire())
        raise error

    def _late_error(self, late: str, limit_s: float) -> DeadlineError:
        text = f"{late} did not take part in the exchange between the ranks within {limit_s:g} s"
        hint = "making a Checkpointer and safehold.save are collective: every rank makes the same call"
        return DeadlineError(text, rank=self._rank, hint=hint)

    def _write(self, path: str, value: Any) -> None:
        assert self._store is not None
        with _translated():
            self._store.set(path, msgspec.msgpack.encode(value))

    def _has(self, path: str) -> bool:
        assert self._store is not None
        with _translated():
            return bool(self._store.check([path]))

    def _read(self, path: str) -> Any:
        assert self._store is not None
        with _translated():
            return msgspec.msgpack.decode(self._store.get(path))


@contextmanager
def _translated() -> Iterator[None]:
    """Say what an error of the launcher's store means: mostly that the process that has it is gone."""
    try:
        yield
    except Exception as exc:
        hint = "the store lives in a process of the job or its launcher, often rank 0; look why that one ended"
        raise RankLostError(f"the store that the ranks meet at failed: {exc}", hint=hint) from exc


def _named(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks[:16]))


def node_name() -> str:
    """Return what names this node: `SAFEHOLD_NODE`, else host name and boot id."""
    if name := os.environ.get("SAFEHOLD_NODE"):
        return name
    return f"{os.uname().nodename}/{boot_id()[:8]}"


def boot_id() -> str:
    """Return what the kernel calls this start of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"


def membership(store: Store | None = None, rank: int | None = None, world_size: int | None = None) -> Membership:
    """Find out rank, world size and the store, from arguments, torch.distributed, or the launcher's environment.

    Raises:
        ConfigurationError: The environment speaks of several ranks and there is no store to reach them by.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigurationError(f"rank {rank} of world size {world_size} makes no sense")
        if world_size > 1 and store is None:
            raise ConfigurationError("several ranks need a store", hint="pass store=, or initialise torch.distributed")
        return Membership(rank=rank, world_size=world_size, store=store if world_size > 1 else None)
    from safehold.state.process_group import launcher_store

    return launcher_store(store)
