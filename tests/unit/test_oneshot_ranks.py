"""`safehold.save` by several ranks over a store: all return after the commit, or all raise the same."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


import safehold
from safehold import oneshot
from safehold.errors import (
    CheckpointError,
    CommitError,
    ConfigurationError,
    DeadlineError,
    StateMismatchError,
    StorageFullError,
    UnsupportedStateError,
)
from safehold.format import paths
from safehold.pipeline import direct_save
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.verify import verify
from safehold.policy import belief
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.open import open_tier
from safehold.types import CommitId


def believed(path: Path) -> list[CommitId]:
    return belief.believed(Catalog(open_tier(path)).listing())


class DictStore:
    """A launcher's store in this process: what torch's `Store` offers, as far as it is needed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def in_threads(world_size: int, action: Callable[[int], Any]) -> list[Any]:
    """Run ranks as threads; an error is a result."""
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = action(rank)
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def pack_of(path: Path, commit: CommitId, rank: int = 0) -> Path:
    return path / paths.checkpoint_dir(commit) / paths.pack(0, rank, 0)


def use_tier(monkeypatch: pytest.MonkeyPatch, path: Path) -> FakeTier:
    tier = FakeTier(open_tier(path))
    monkeypatch.setattr(oneshot, "open_tier", lambda *_, **__: tier)
    return tier


def test_ranks_save_together(tmp_path: Path) -> None:
    store, world_size = DictStore(), 3
    weight = torch.arange(600_000.0)

    def state(rank: int) -> dict[str, Any]:
        rows = safehold.Sharded(torch.full((2, 4), float(rank)), global_shape=(6, 4), pieces=[((2 * rank, 0), (2, 4))])
        return {"same": weight.clone(), "rows": rows, "mine": safehold.PerRank(rank, policy="first"), "n": 1}

    assert in_threads(
        world_size,
        lambda rank: safehold.save(
            tmp_path / "run", state(rank), step=4, store=store, rank=rank, world_size=world_size
        ),
    ) == [4, 4, 4]
    found = safehold.load(tmp_path / "run")
    assert torch.equal(found["same"], weight) and found["mine"] == 0 and found["n"] == 1
    assert found["rows"].tolist() == [[float(row // 2)] * 4 for row in range(6)]
    assert verify(open_tier(tmp_path / "run"), CommitId(4, 1, 0)).ok
    sizes = [pack_of(tmp_path / "run", CommitId(4, 1, 0), rank).stat().st_size for rank in range(world_size)]
    assert sum(sizes) < 4 * weight.numel() + 100_000, "replicas are written once"


def test_saves_follow_each_other_and_what_one_rank_does_alone_does_no_harm(tmp_path: Path) -> None:
    store = DictStore()

    def save(rank: int) -> None:
        for step in range(3):
            if rank == 0:
                safehold.save(tmp_path / "alone", {"a": step}, step=step, rank=0, world_size=1)
            safehold.save(tmp_path / "run", {"a": step}, step=step, store=store, rank=rank, world_size=2)

    assert in_threads(2, save) == [None, None]
    assert safehold.load(tmp_path / "run") == safehold.load(tmp_path / "alone") == {"a": 2}


def test_replicas_that_differ_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    store = DictStore()
    safehold.save(tmp_path / "run", {"w": torch.zeros(2)}, step=1)
    errors = in_threads(
        2,
        lambda rank: safehold.save(
            tmp_path / "run", {"w": torch.full((2,), float(rank))}, step=2, store=store, rank=rank, world_size=2
        ),
    )
    assert all(isinstance(error, StateMismatchError) and "w" in str(error) for error in errors), errors
    assert [commit.step for commit in believed(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / paths.checkpoint_dir(CommitId(2, 2, 0))).exists()


def test_shapes_that_differ_are_named_at_once(tmp_path: Path) -> None:
    store = DictStore()
    errors = in_threads(
        2,
        lambda rank: safehold.save(
            tmp_path / "run", {"w": torch.zeros(2 + rank)}, store=store, rank=rank, world_size=2
        ),
    )
    assert all(isinstance(error, StateMismatchError) and "'w'" in str(error) for error in errors), errors


class Explodes:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("boom")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("bad", "error_class", "text"),
    [(Explodes(), CheckpointError, "boom"), ({"f": lambda: None}, UnsupportedStateError, "f")],
)
def test_a_rank_that_fails_before_the_save_is_told_to_all(
    tmp_path: Path, bad: Any, error_class: type[CheckpointError], text: str
) -> None:
    store = DictStore()
    begun = time.monotonic()
    errors = in_threads(
        3,
        lambda rank: safehold.save(
            tmp_path / "run", {"x": bad if rank == 1 else {"f": 1}}, store=store, rank=rank, world_size=3
        ),
    )
    assert time.monotonic() - begun < 10
    assert all(isinstance(error, error_class) and text in str(error) for error in errors), errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["create_pack", "write_at", "finish"])
def test_a_full_disk_of_one_rank_is_told_to_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, kind: str
) -> None:
    path, store = tmp_path / "run", DictStore()
    rows = lambda rank: safehold.Sharded(torch.ones(2, 4), global_shape=(4, 4), pieces=[((2 * rank, 0), (2, 4))])  # noqa: E731
    state = lambda rank: {"w": rows(rank)}  # noqa: E731
    together: dict[str, Any] = {"store": store, "world_size": 2}
    in_threads(2, lambda rank: safehold.save(path, state(rank), step=1, rank=rank, **together))
    tier = use_tier(monkeypatch, path)
    tier.fail(kind, path=f"*{paths.pack(0, failing, 0)}", error=OSError(errno.ENOSPC, "full"))
    begun = time.monotonic()
    errors = in_threads(2, lambda rank: safehold.save(path, state(rank), step=2, rank=rank, **together))
    assert time.monotonic() - begun < 10
    assert all(isinstance(error, StorageFullError) and "ENOSPC" in str(error) for error in errors), errors
    assert [commit.step for commit in believed(path)] == [1]
    assert not (path / paths.checkpoint_dir(CommitId(2, 2, 0))).exists()
    assert in_threads(2, lambda rank: safehold.save(path, state(rank), step=2, rank=rank, **together)) == [2, 2]


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFEHOLD_START_TIMEOUT_S", "0.3")
    store = DictStore()
    with pytest.raises(DeadlineError, match="ranks 1, 2 did not take part"):
        safehold.save(tmp_path / "run", {"a": 1}, store=store, rank=0, world_size=3)
    with pytest.raises(DeadlineError, match=r"0.* did not take part"):
        safehold.save(tmp_path / "run", {"a": 1}, store=DictStore(), rank=1, world_size=3)


def test_an_argument_that_is_wrong_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    together: dict[str, Any] = {"store": DictStore(), "world_size": 2}

    def save(rank: int) -> int:
        return safehold.save(tmp_path / "run", {"a": 1}, step=1 - 2 * rank, rank=rank, **together)

    for error in in_threads(2, save):
        assert isinstance(error, ConfigurationError) and "a step is an integer from 0, not -1" in str(error)
    assert not (tmp_path / "run").exists()


def test_ranks_that_make_no_sense(tmp_path: Path) -> None:
    for options in ({"rank": 2, "world_size": 2}, {"rank": 0}, {"rank": 0, "world_size": 2}):
        with pytest.raises(ConfigurationError):
            safehold.save(tmp_path / "run", {"a": 1}, **options)


def test_an_unforeseen_error_of_one_rank_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = direct_save._write

    def broken(tier: Any, commit: Any, planner: Any, leaves: Any, member: Any, config: Any) -> Any:
        if member.rank == 1:
            raise MemoryError("no arena")
        return real(tier, commit, planner, leaves, member, config)

    monkeypatch.setattr(direct_save, "_write", broken)
    store = DictStore()
    errors = in_threads(
        2, lambda rank: safehold.save(tmp_path / "run", {"a": torch.ones(3)}, store=store, rank=rank, world_size=2)
    )
    assert all(isinstance(error, CommitError) and "no arena" in str(error) for error in errors), errors
    assert isinstance(errors[1].__cause__, MemoryError)
