"""The exchange between the ranks, over a real store of torch that is used again by the next start of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from safehold.errors import CheckpointError, DeadlineError
from safehold.pipeline import exchange as exchange_module
from safehold.pipeline.exchange import Exchange
from safehold.types import Membership

dist = pytest.importorskip("torch.distributed")
WORLD = 3
LIMIT_S = 20.0


class Died(BaseException):
    """A rank's process ended, without a word."""


class Rounds:
    """One store, and the ranks of one start of the job after the other, each a thread with a connection of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> None:
        self._monkeypatch, self._threads, self._number = monkeypatch, threads, 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S))

    def next(self) -> None:
        """The launcher starts all ranks again: new processes, which count from the beginning."""
        self._monkeypatch.setattr(exchange_module, "_counts", {})
        self._number += 1

    def start(
        self, rank: int, until: Callable[[str], None] = lambda _: None, *, limit_s: float = LIMIT_S
    ) -> Future[Any]:
        """Start a rank; `until` is called before each part of the talk, and may have it die there."""
        store = dist.TCPStore("127.0.0.1", self.store.port, timeout=timedelta(seconds=LIMIT_S))
        exchange = Exchange(Membership(rank=rank, world_size=WORLD, store=store), "open", limit_s)
        return self._threads.submit(_talk, exchange, rank, self._number, until)

    def wait(self, path: str, news: Callable[[Any], bool]) -> None:
        """Wait until the store has something new there."""
        for _ in range(int(LIMIT_S / 0.01)):
            key = f"safehold/open/1/{path}"
            if self.store.check([key]) and news(self.store.get(key)):
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"nothing new at {path}")

    def now(self, path: str) -> Any:
        """Return what lies there."""
        return self.store.get(f"safehold/open/1/{path}")


def _talk(exchange: Exchange, rank: int, number: int, until: Callable[[str], None]) -> Any:
    """What a start says: who is there, a token and a world from rank 0, an agent's address from rank 1, and that all have got here."""
    until("rank")
    said = exchange.gather("rank", f"rank {rank} of start {number}")
    until("world")
    world = exchange.decide("world", lambda: [f"token {number}", *(said or ())])
    until("slot")
    if rank == 1:
        exchange.put("slot/0", f"address {number}")
    slot = exchange.take("slot/0", "rank 1")
    until("verdict")
    exchange.agree("joined", None)
    return [*world, slot]


def _all_of(number: int) -> list[str]:
    return [f"token {number}", *(f"rank {rank} of start {number}" for rank in range(WORLD)), f"address {number}"]


def _dies_before(part: str) -> Callable[[str], None]:
    def until(now: str) -> None:
        if now == part:
            raise Died

    return until


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    """A store that nobody has used yet."""
    with ThreadPoolExecutor(2 * WORLD) as threads:
        yield Rounds(monkeypatch, threads)


def _whole_round(rounds: Rounds, order: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    rounds.next()
    started = {rank: rounds.start(rank) for rank in order}
    return [started[rank].result(2 * LIMIT_S) for rank in range(WORLD)]


def test_a_start_hears_nothing_of_those_before(rounds: Rounds) -> None:
    for number, order in enumerate(((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)), 1):
        assert _whole_round(rounds, order) == [_all_of(number)] * WORLD


def test_who_comes_before_rank_0_waits_for_the_new_one(rounds: Rounds) -> None:
    _whole_round(rounds)
    before = {rank: rounds.now(f"hello/{rank}") for rank in (1, 2)}
    rounds.next()
    started = [rounds.start(rank) for rank in (1, 2)]
    for rank in (1, 2):
        rounds.wait(f"hello/{rank}", lambda value, old=before[rank]: value != old)  # type: ignore[misc]
    started.append(rounds.start(0))
    assert [future.result(2 * LIMIT_S) for future in started] == [_all_of(2)] * WORLD


def test_rank_0_waits_for_who_comes_late(rounds: Rounds) -> None:
    _whole_round(rounds)
    before = {rank: rounds.now(f"answer/{rank}") for rank in (1, 2)}
    rounds.next()
    started = [rounds.start(0)]
    for rank in (1, 2):  # it has answered what the ranks of the start before said
        rounds.wait(f"answer/{rank}", lambda value, old=before[rank]: value != old)  # type: ignore[misc]
    started += [rounds.start(rank) for rank in (2, 1)]
    assert [future.result(2 * LIMIT_S) for future in started] == [_all_of(2)] * WORLD


@pytest.mark.parametrize("part", ["rank", "world", "slot", "verdict"])
@pytest.mark.parametrize("dying", [0, 1])
def test_what_a_start_left_that_died_in_the_middle_is_not_believed(rounds: Rounds, dying: int, part: str) -> None:
    rounds.next()
    started = {
        rank: rounds.start(rank, _dies_before(part) if rank == dying else lambda _: None, limit_s=0.5)
        for rank in range(WORLD)
    }
    with pytest.raises((Died, CheckpointError)):  # on a busy machine its time may be up before it gets there
        started[dying].result(LIMIT_S)
    for rank in set(range(WORLD)) - {dying}:
        error = started[rank].exception(LIMIT_S)
        assert error is None or isinstance(error, CheckpointError), error
    assert _whole_round(rounds, (2, 0, 1)) == [_all_of(2)] * WORLD


def test_a_rank_that_has_the_store_of_a_start_before_to_itself_says_who_is_missing(rounds: Rounds) -> None:
    _whole_round(rounds)
    rounds.next()
    with pytest.raises(DeadlineError, match="rank 0 did not take part"):
        rounds.start(1, limit_s=0.2).result(LIMIT_S)
    rounds.next()
    with pytest.raises(DeadlineError, match="ranks 1, 2 did not take part"):
        rounds.start(0, limit_s=0.2).result(LIMIT_S)
