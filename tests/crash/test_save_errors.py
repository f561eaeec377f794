"""An error in every operation of a save: it fails by name, older ones stay, debris is swept, and the run goes on."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from whole_saves import (
    Job,
    Promises,
    check,
    go_on,
)

from safehold.errors import StorageError, StorageFullError, StorageReadOnlyError
from safehold.pipeline.catalog import Catalog
from safehold.policy.retention import Keep
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers import flash_probe
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)


# Errors.

ERRORS = [
    (errno.ENOSPC, StorageFullError),
    (errno.EDQUOT, StorageFullError),
    (errno.EROFS, StorageReadOnlyError),
    (errno.EIO, StorageError),
]


def first_save() -> tuple[FakeDisk, Promises, Job]:
    disk, promises = FakeDisk(), Promises()
    job = Job(FlashTier(disk.root, disk), promises, keep=Keep(last=1))
    job.open()
    job.save(10, 1)
    return disk, promises, job


def fail_everywhere(times: int, *, applied: bool, every: int = 1, codes_at_once: int = 1) -> None:
    disk, _, job = first_save()
    begin = disk.num_ops
    job.save(20, 2)
    job.retire()
    num_failed = 0
    for index in range(begin + every // 2, disk.num_ops, every):
        for number in range(codes_at_once):
            code, error_class = ERRORS[(index // every + number) % len(ERRORS)]
            num_failed += fail_once(
                index, code, error_class, times, applied=applied, go_on_every=1 if codes_at_once > 1 else 7
            )
    assert num_failed * every > 30


def fail_once(
    index: int, code: int, error_class: type[StorageError], times: int, *, applied: bool, go_on_every: int
) -> bool:
    disk, promises, job = first_save()
    at: Any = index if times == 1 else (lambda op: op.index >= index and (op.changes or code == errno.EIO))
    disk.fail_at(at, code, times=times, applied=applied)
    commit = CommitId(20, 1, 0)
    certain, failed = True, False
    try:
        job.save(20, 2)
        job.retire()
    except StorageError as exc:
        failed = True
        assert type(exc) is error_class, (index, exc)
        assert exc.path and errno.errorcode[code] in str(exc), (index, exc)
        if commit not in promises.kept:
            certain = job.give_up(commit)
            assert certain or times != 1, (index, exc)
    disk.heal()
    try:
        there = check(job.tier, promises)
        wanted = [20] if commit in promises.kept else [10]
        assert [c.step for c in there][:1] == wanted or not certain
        if failed:
            again = job.save(20, 3, attempt=1)
            job.retire()
            assert check(job.tier, promises)[0] == again
            left = {c for c in Catalog(job.tier).listing().attempts if c.step == 20}
            assert left == {again}, "what failed, or was replaced, goes with the retention"
        if index % go_on_every == 0:
            go_on(disk, promises)
    except Exception as exc:
        exc.add_note(f"operation {index}, {errno.errorcode[code]}, {times} times, applied {applied}")
        raise
    return failed


@pytest.mark.parametrize(("times", "applied", "every"), [(1, False, 2), (1, True, 5), (-1, False, 5)])
def test_an_error_anywhere_fails_the_save_by_name_and_no_other(times: int, applied: bool, every: int) -> None:
    fail_everywhere(times, applied=applied, every=every)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("times", "applied"), [(1, False), (1, True), (-1, False)])
def test_every_error_everywhere(times: int, applied: bool) -> None:
    fail_everywhere(times, applied=applied, codes_at_once=4)
