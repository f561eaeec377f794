"""The flusher remembers readers' leases from one call to the next, whatever the calls are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from run_dirs import RunDir

from safehold.agent.flusher import FlusherProcess
from safehold.config import Config
from safehold.errors import StorageFullError
from safehold.format import paths, records
from safehold.pipeline import ledger
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.leases import Observer
from safehold.pipeline.maintenance import keep_to_wire
from safehold.policy.retention import Keep
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

ARGUMENTS: dict[str, Any] = {
    "keep": keep_to_wire(Keep(last=1)),
    "incarnation": 1,
    "acknowledged": [[10, 1, 0], [20, 1, 0], [30, 1, 0]],
    "given_up": [],
    "packs": [[0, 1 << 50]],
    "num_ranks": 1,
}


def retire(flusher: FlusherProcess) -> None:
    flusher._operations["retire"](ARGUMENTS, [])


def sweep(flusher: FlusherProcess) -> None:
    flusher._operations["sweep"](ARGUMENTS, [])


def make_room(flusher: FlusherProcess) -> None:
    flusher._make_room(ARGUMENTS, StorageFullError("a pack does not fit"))


@pytest.mark.parametrize("call", [retire, sweep, make_room])
def test_what_is_leased_goes_once_the_lease_has_not_changed_for_long(
    tmp_path: Path, call: Callable[[FlusherProcess], None]
) -> None:
    run = RunDir(tmp_path / "run")
    leased = run.save(10)
    for step in (20, 30):
        run.save(step)
    if call is sweep:  # takes what was un-committed
        for step in (10, 20):
            ledger.uncommit(run.tier, step, incarnation=1, reason="test", clock=run)
    lease = records.Lease(
        commit=leased, reader="0a" * 16, host="h", pid=1, lease_s=600.0, renewals=0, created_s=run.now_s
    )
    run.tier.put(paths.lease(10, lease.reader), records.encode_lease(lease))
    flusher = FlusherProcess(None)  # type: ignore[arg-type]
    flusher._tier, flusher._config, flusher._observer = FakeTier(run.tier), Config(delete_grace_s=0.0), Observer(run)

    def there() -> list[CommitId]:
        return sorted(Catalog(run.tier).listing().attempts)

    call(flusher)
    assert [commit.step for commit in there()] == [10, 30], "20 went, 10 is being read"
    run.now_s += 599
    call(flusher)
    assert [commit.step for commit in there()] == [10, 30]
    run.now_s += 1
    call(flusher)
    assert [commit.step for commit in there()] == [30] and not run.tier.list(paths.LEASES)
