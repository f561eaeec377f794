"""Power cuts around a reader's lease: nothing that is left blocks retention for ever, and what is leased is whole at all times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from run_dirs import RunDir
from whole_saves import Promises, cut_everywhere

from safehold.format import paths, records
from safehold.pipeline import ledger, leftovers, sweep
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.leases import Observer, Reader
from safehold.policy.retention import Keep
from safehold.testing.disk_faults import Op
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers.base import TEMPORARY_PREFIX, Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

LEASED = CommitId(10, 1, 0)
ROUNDS = 3


def prepared(tier: Tier) -> RunDir:
    run = RunDir(Path("/run"), tier)
    run.save(10)
    run.save(20)
    return run


def retire(tier: Tier, run: RunDir, observer: Observer, incarnation: int = 1) -> None:
    keep = Keep(last=1)
    sweep.retire(tier, keep, incarnation=incarnation, grace_s=0.0, observer=observer, clock=run)


def is_whole(tier: Tier, commit: CommitId) -> bool:
    catalog = Catalog(tier, patience_s=0.0)
    if commit not in catalog.listing().attempts:
        return False
    catalog.check_files(catalog.load(commit))
    return True


def lives(tier: Tier) -> list[str]:
    return [entry.name for entry in tier.list(paths.LEASES)]


def read(tier: Tier, promises: Promises) -> None:
    """A reader's whole life, beside a save that is retired when the reader has gone."""
    run = prepared(tier)
    observer = Observer(run)
    with Reader(tier, lease_s=600.0, limit_s=10.0, host="h", pid=1) as reader:
        assert reader.hold(LEASED)
        own = reader._own
        assert own is not None
        own._put(exclusive=False)  # a renewal
        retire(tier, run, observer)
    retire(tier, run, observer)
    assert not is_whole(tier, LEASED)


def dead_reader(tier: Tier, promises: Promises) -> None:
    """A lease that nobody renews any more, until it has gone."""
    run = prepared(tier)
    lease = records.Lease(commit=LEASED, reader="0a" * 16, host="h", pid=1, lease_s=600.0, renewals=0, created_s=1.0)
    tier.put(paths.lease(10, lease.reader), records.encode_lease(lease))
    observer = Observer(run)
    for _ in range(2):
        retire(tier, run, observer)
        run.now_s += 600
    assert not is_whole(tier, LEASED) and not lives(tier)


def forced(tier: Tier, promises: Promises) -> None:
    """Un-committed under the reader's hands, whose bytes stay."""
    run = prepared(tier)
    lease = records.Lease(commit=LEASED, reader="0a" * 16, host="h", pid=1, lease_s=600.0, renewals=0, created_s=1.0)
    tier.put(paths.lease(10, lease.reader), records.encode_lease(lease))
    ledger.uncommit(tier, 10, incarnation=1, reason="test", clock=run)
    observer = Observer(run)
    retire(tier, run, observer)
    assert is_whole(tier, LEASED)
    tier.delete(paths.lease(10, lease.reader))
    retire(tier, run, observer)


def goes_on(disk: FakeDisk) -> None:
    """Assert that the next incarnation is rid of the checkpoint, the lease and temporaries after a while."""
    later = RunDir(Path("/run"), FlashTier(disk.root, disk))
    later.now_s += 1e9
    later.open()
    observer = Observer(later)
    for _ in range(ROUNDS):
        retire(later.tier, later, observer, later.incarnation)
        later.now_s += 600
    attempts = Catalog(later.tier).listing().attempts
    assert [commit.step for commit in attempts] == [20], "retention is blocked"
    assert is_whole(later.tier, CommitId(20, 1, 0)) and not lives(later.tier)
    old = FlashTier(disk.root, disk, clock=later)
    later.now_s += 1e9
    leftovers.sweep_temporaries(old, [])
    assert not [path for path in disk.tree() if path.startswith(f"{paths.LEASES}/{TEMPORARY_PREFIX}")]


@pytest.mark.parametrize("scenario", [read, dead_reader, forced])
def test_whatever_is_left_goes_in_the_end(scenario: Callable[[Tier, Promises], None]) -> None:
    def concerned(op: Op) -> bool:
        return paths.LEASES in op.path or ("/000000010/" in op.path and "safetensors" not in op.path)

    moments = 0
    for moment in cut_everywhere(scenario, when=concerned):
        for name, disk in moment.survivors:
            tier = FlashTier(disk.root, disk)
            if not any(view.commit.step == 20 for view in Catalog(tier, patience_s=0.0).commits()):
                continue  # before the second save
            moments += 1
            try:
                held = Observer().look(tier).on(LEASED)
                if held is not None and scenario is not dead_reader:
                    assert is_whole(tier, LEASED), "deleted under a lease"
                goes_on(disk)
            except AssertionError as exc:
                exc.add_note(f"{moment}, {name}")
                raise
    assert moments > 30
