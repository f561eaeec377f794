"""`safehold.load` holds a lease while it reads, takes another checkpoint where that came too late, and leaves nothing behind."""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run_dirs import RunDir

import safehold
from safehold import oneshot
from safehold.errors import ConfigurationError, StepNotFoundError
from safehold.format import paths
from safehold.pipeline import leases, ledger, sweep
from safehold.pipeline.leases import Observer
from safehold.policy.retention import Keep
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    for step in (10, 20, 30):
        made.save(step, tensors={"w": np.full(3, step)}, objects_={"step": step})
    return made


def load_with(path: Path, action: Callable[[], object], **options: Any) -> Any:
    """Load, and do something between looking for a checkpoint and reading it."""

    def rename(name: str) -> str:
        action()
        return name

    return safehold.load(path, {"w": np.zeros(3, np.int64), "step": 0}, rename=rename, **options)


def files(run: RunDir) -> list[str]:
    return [entry.name for entry in run.tier.list(paths.LEASES)]


def retire(run: RunDir, observer: Observer | None = None) -> sweep.Swept:
    return sweep.retire(run.tier, Keep(last=1), incarnation=run.incarnation, grace_s=0.0, observer=observer, clock=run)


def test_what_is_loaded_stays_meanwhile(run: RunDir) -> None:
    held: list[Any] = []

    def meanwhile() -> None:
        if not held:
            held.append(Observer().look(run.tier).on(CommitId(10, 1, 0)))
            assert retire(run).deleted == (CommitId(20, 1, 0),)

    assert load_with(run.root, meanwhile, step=10)["step"] == 10
    lease = held[0].lease
    assert (lease.pid, lease.host, lease.lease_s) == (os.getpid(), os.uname().nodename, 600.0)
    assert files(run) == [] and retire(run).deleted == (CommitId(10, 1, 0),)


def test_the_length_is_a_setting(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFEHOLD_LEASE_S", "5")
    lengths: set[float] = set()
    load_with(run.root, lambda: lengths.update(v.lease.lease_s for v in Observer().look(run.tier).found if v.lease))
    assert lengths == {5.0}
    monkeypatch.setenv("SAFEHOLD_LEASE_S", "0.5")
    with pytest.raises(ConfigurationError, match="lease_s must be from 1 to 86400"):
        safehold.load(run.root)


def test_without_a_lease_nothing_is_written(run: RunDir) -> None:
    seen: list[list[str]] = []
    load_with(run.root, lambda: seen.append(files(run)), lease=False)
    assert seen and not any(seen) and not (run.root / paths.LEASES).exists()


def test_leases_can_be_read_by_who_may_enter_the_directory(run: RunDir) -> None:
    modes: list[int] = []

    def look() -> None:
        folder = run.root / paths.LEASES
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir()))

    umask = os.umask(0o022)
    try:
        load_with(run.root, look)
    finally:
        os.umask(umask)
    assert modes[:2] == [0o755, 0o644]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_lease_is_released_on_every_way_out(run: RunDir, error: type[BaseException]) -> None:
    def fail() -> None:
        assert len(files(run)) == 1
        raise error

    with pytest.raises(error):
        load_with(run.root, fail)
    assert files(run) == []


def test_where_nothing_can_be_loaded_there_is_no_lease(tmp_path: Path) -> None:
    with pytest.raises(StepNotFoundError):
        safehold.load(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_read_only_directory_is_loaded_without(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "_told", set())
    tier = FakeTier(run.tier)
    for kind in ("put", "delete", "make_directory"):
        tier.fail(kind, times=-1, error=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(oneshot, "open_tier", lambda *_, **__: tier)
    with caplog.at_level(logging.WARNING, "safehold"):
        for _ in range(2):
            assert safehold.load(run.root)["step"] == 30
    assert [record.message.count("reading without a lease") for record in caplog.records] == [1]


# -- what is un-committed just before the lease is there -------------------------------------------------------------------


def beaten(run: RunDir, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Let retention be faster than the reader, at each of these steps: bytes and all."""
    hold = leases.Reader.hold

    def late(self: leases.Reader, commit: CommitId) -> bool:
        if commit.step in steps:
            ledger.uncommit(run.tier, commit.step, incarnation=run.incarnation, reason="test", clock=run)
            sweep.delete_bytes(run.tier, [commit], incarnation=run.incarnation, observer=Observer())
        return hold(self, commit)

    monkeypatch.setattr(leases.Reader, "hold", late)


def test_the_next_one_is_taken(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    beaten(run, monkeypatch, 30, 20)
    assert safehold.load(run.root)["step"] == 10 and files(run) == []


def test_one_that_was_asked_for_is_missed_by_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    beaten(run, monkeypatch, 20)
    with pytest.raises(StepNotFoundError) as caught:
        safehold.load(run.root, step=20)
    assert caught.value.step == 20 and files(run) == []


def test_one_that_goes_while_it_has_no_lease_is_found_out(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    """As when a reader was stopped for too long."""
    done: list[int] = []

    def lose() -> None:
        if not done:
            done.append(1)
            ledger.uncommit(run.tier, 30, incarnation=1, reason="test", clock=run)
            sweep.delete_bytes(run.tier, [CommitId(30, 1, 0)], incarnation=1, observer=None)

    with caplog.at_level(logging.WARNING, "safehold"):
        assert load_with(run.root, lose)["step"] == 20
    assert "step 30 cannot be used" in caplog.text and files(run) == []
