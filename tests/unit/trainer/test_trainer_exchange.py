"""The exchange between the ranks, over a dictionary, one thread for a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from safehold.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    RankInterruptedError,
    RankLostError,
    StorageError,
)
from safehold.pipeline import exchange as exchange_module
from safehold.pipeline.exchange import Exchange, membership, node_name
from safehold.types import Membership

_names = iter(range(10_000))


class DictStore:
    """What torch's stores offer, in memory."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.broken = False

    def _alive(self) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: bytes) -> None:
        self._alive()
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self._alive()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._alive()
        return all(key in self._values for key in keys)


def run(
    world_size: int,
    work: Callable[[Exchange, int], Any],
    *,
    timeout_s: float = 5.0,
    store: DictStore | None = None,
    absent: tuple[int, ...] = (),
) -> list[Any]:
    """Run `work` as every rank; returns results, or the errors raised."""
    store = store or DictStore()
    name = f"test{next(_names)}"
    results: list[Any] = [None] * world_size

    def rank_of(rank: int) -> None:
        exchange = Exchange(Membership(rank=rank, world_size=world_size, store=store), name, timeout_s)
        try:
            results[rank] = work(exchange, rank)
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return results


def test_values_are_gathered_by_rank_and_decided_by_rank_0() -> None:
    def work(exchange: Exchange, rank: int) -> Any:
        said = exchange.gather("who", {"rank": rank, "data": b"\x00"})
        return exchange.decide("sum", lambda: sum(entry["rank"] for entry in said or []))

    assert run(5, work) == [10] * 5


def test_alone_there_is_nobody_to_wait_for() -> None:
    exchange = Exchange(Membership(rank=0, world_size=1, store=None), "alone", 0.0)
    assert exchange.gather("a", 1) == [1] and exchange.decide("b", lambda: 2) == 2
    exchange.agree("c", None)
    with pytest.raises(StorageError):
        exchange.agree("d", StorageError("x"))


def test_a_late_rank_is_named_by_all_who_wait() -> None:
    def work(exchange: Exchange, rank: int) -> Any:
        exchange.gather("who", rank)
        return exchange.decide("what", lambda: 1)

    errors = run(4, work, timeout_s=0.2, absent=(2,))
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], DeadlineError)
        assert "rank 2 did not take part" in str(errors[rank]) and "rank 0 did" not in str(errors[rank])


def test_rank_0_is_named_if_it_is_the_one() -> None:
    def work(exchange: Exchange, rank: int) -> Any:
        exchange.gather("who", rank)
        return exchange.decide("what", lambda: 1)

    errors = run(3, work, timeout_s=0.2, absent=(0,))
    assert all("rank 0 did not take part" in str(errors[rank]) for rank in (1, 2))


def test_several_late_ranks_are_named() -> None:
    errors = run(6, lambda exchange, rank: exchange.agree("here", None), timeout_s=0.2, absent=(1, 4, 5))
    assert all("ranks 1, 4, 5 did not" in str(errors[rank]) for rank in (0, 2, 3))


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_is_raised_by_all(failing: int) -> None:
    def work(exchange: Exchange, rank: int) -> Any:
        error = StorageError("my disk", path="/d", rank=rank) if rank == failing else None
        exchange.agree("ready", error)

    for error in run(3, work):
        assert isinstance(error, StorageError) and error.path == "/d" and error.rank == failing


@pytest.mark.parametrize("exc", [ConfigurationError("no"), ZeroDivisionError("oh"), KeyboardInterrupt()])
def test_what_rank_0_cannot_decide_is_told_to_all_at_once(exc: BaseException) -> None:
    def make() -> Any:
        raise exc

    begun = time.monotonic()
    errors = run(3, lambda exchange, rank: exchange.decide("what", make), timeout_s=20.0)
    assert time.monotonic() - begun < 5.0
    assert errors[0] is exc
    expected = RankInterruptedError if isinstance(exc, KeyboardInterrupt) else ConfigurationError
    for error in errors[1:]:
        assert isinstance(error, expected) and (type(exc).__name__ in str(error) or "no" in str(error))


@pytest.mark.parametrize("interrupted", [0, 2])
def test_an_interrupted_rank_is_not_waited_for(interrupted: int) -> None:
    def work(exchange: Exchange, rank: int) -> Any:
        with exchange.telling():
            if rank == interrupted:
                raise KeyboardInterrupt
            exchange.gather("who", rank)
            return exchange.decide("what", lambda: 1)

    begun = time.monotonic()
    results = run(3, work, timeout_s=20.0)
    assert time.monotonic() - begun < 5.0
    assert isinstance(results[interrupted], KeyboardInterrupt)
    for error in [result for rank, result in enumerate(results) if rank != interrupted]:
        assert isinstance(error, RankInterruptedError) and error.rank == interrupted


def test_who_gives_up_tells_those_who_wait_longer() -> None:
    def work(exchange: Exchange, rank: int) -> Any:
        exchange.put(f"met/{rank}", True)
        exchange._timeout_s = 0.1
        return exchange.take("never", f"rank {9}", timeout_s=0.2 if rank == 1 else 20.0)

    begun = time.monotonic()
    errors = run(3, work)
    assert time.monotonic() - begun < 10.0
    assert all(isinstance(error, DeadlineError) and "rank 9" in str(error) for error in errors)


def test_a_store_that_dies_is_an_error_of_ours() -> None:
    store = DictStore()

    def work(exchange: Exchange, rank: int) -> Any:
        if rank == 0:
            time.sleep(0.1)
            store.broken = True
        exchange.gather("who", rank)
        return exchange.decide("what", lambda: 1)

    for error in run(3, work, store=store):
        assert isinstance(error, RankLostError) and "Connection reset" in str(error)
        assert isinstance(error.__cause__, RuntimeError)


def test_two_exchanges_of_one_name_do_not_meet() -> None:
    store = DictStore()
    with ThreadPoolExecutor(4) as threads:
        members = [Membership(rank=rank, world_size=2, store=store) for rank in (0, 1)]
        first, second = ([Exchange(member, "twice", 5.0) for member in members] for _ in range(2))
        said = [threads.submit(exchange[1].put, "x", number) for number, exchange in ((1, first), (2, second))]
        heard = [threads.submit(exchange[0].take, "x", "rank 1") for exchange in (first, second)]
        assert [answer.result(30.0) for answer in (*said, *heard)] == [None, None, 1, 2]


def test_opened() -> None:
    assert Exchange.opened({"value": 3}) == 3
    with pytest.raises(CheckpointError):
        Exchange.opened({"error": StorageError("x").to_wire()})


def test_membership_by_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    assert membership(store, 1, 3) == Membership(rank=1, world_size=3, store=store)
    assert membership(store, 0, 1).store is None
    for rank, world_size in ((None, 2), (0, None), (2, 2), (-1, 2)):
        with pytest.raises(ConfigurationError):
            membership(store, rank, world_size)
    with pytest.raises(ConfigurationError, match="store"):
        membership(None, 0, 2)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert membership().world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        membership()


def test_the_name_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/" in node_name()
    monkeypatch.setenv("SAFEHOLD_NODE", "n7")
    assert node_name() == "n7"


def test_rank_0_stays_until_all_have_heard_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def work(exchange: Exchange, rank: int) -> None:
        exchange.decide("last", lambda: "word")
        if rank:
            time.sleep(0.1)
            order.append("heard")
        exchange.part()
        if not rank:
            order.append("left")

    run(3, work)
    assert order == ["heard", "heard", "left"]
    monkeypatch.setattr(exchange_module, "PART_S", 0.05)
    began = time.monotonic()
    run(2, lambda exchange, rank: exchange.part() if not rank else None)
    assert time.monotonic() - began < 2.0, "one that never says so is not waited for"
