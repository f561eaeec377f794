"""Two jobs in one run directory, one of them stopped before any operation and continued after: neither spoils anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from whole_saves import (
    Job,
    Promises,
    check,
    go_on,
)

from safehold.config import Config
from safehold.errors import CheckpointError, StorageError, SupersededError
from safehold.format.records import Incarnation
from safehold.pipeline import ledger
from safehold.pipeline import snapshot as snapshots
from safehold.pipeline.catalog import Catalog
from safehold.policy.belief import Listing
from safehold.policy.retention import Keep
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers import flash_probe
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

T = TypeVar("T")
U = TypeVar("U")


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)
    monkeypatch.setitem(Catalog.__init__.__kwdefaults__, "patience_s", 0.0)


class MeetingDisk(FakeDisk):
    """Does something else in between, once: before the operation with a given index."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.at = -1
        self.meet: Callable[[], None] = lambda: None

    def _operate(self, kind: str, path: str, action: Callable[[], T], offset: int = 0, nbytes: int = 0) -> T:
        if self.num_ops == self.at:
            self.at = -1
            self.meet()
        return super()._operate(kind, path, action, offset, nbytes)


@dataclass
class World:
    """A disk with a run of two checkpoints, and two jobs that meet there."""

    keep: int = 1

    def __post_init__(self) -> None:
        self.disk, self.promises = MeetingDisk(), Promises()
        self.first = self.job("first")
        self.first.open()
        self.first.save(10, 1)
        self.first.save(20, 2)

    def job(self, token: str) -> Job:
        return Job(FlashTier(self.disk.root, self.disk), self.promises, keep=Keep(last=self.keep), token=token)

    def check(self) -> list[CommitId]:
        return check(FlashTier(self.disk.root, self.disk), self.promises)


def old_job(world: World) -> Job:
    """What the job that is superseded somewhere in between does; it may be told so."""
    job = world.job("old")
    try:
        job.open()
        job.sweep()
        job.save(30, 3)
        job.retire()
    except CheckpointError as exc:
        assert isinstance(exc, SupersededError | StorageError)  # its files may be swept before it looks
    return job


def new_job(world: World) -> tuple[int, list[CommitId]]:
    """A job that opens, saves and retires; returns its incarnation and what is believed then."""
    job = world.job("new")
    job.open()
    job.sweep()
    job.save(30, 5)
    job.retire()
    return job.incarnation, world.check()


def meet(world: World, outer: Callable[[World], T], inner: Callable[[World], U], at: int) -> tuple[T, U]:
    """Run `outer`, and `inner` as a whole before its operation `at`; return what both did."""
    results: list[U] = []
    world.disk.at = world.disk.num_ops + at
    world.disk.meet = lambda: results.append(inner(world))
    return outer(world), results[0]


def moments_of(job: Callable[[World], Any], *, reads: bool) -> list[int]:
    """The operations of a job before which another one makes a difference: changes, and (many more) beginnings of reads."""
    world = World()
    begin = world.disk.num_ops
    job(world)
    return [op.index - begin for op in world.disk.log[begin:] if op.changes or (reads and op.kind in ("scan", "open"))]


def paused_anywhere(*, go_on_every: int = 5, reads: bool = False) -> None:
    for number, at in enumerate(moments_of(old_job, reads=reads)[::-1]):
        world = World()
        old, (incarnation, then) = meet(world, old_job, new_job, at)
        try:
            there = world.check()
            if old.incarnation < incarnation:
                assert there == then, "the old job added or took away something"
            if number % go_on_every == 0:
                go_on(world.disk, world.promises)
        except Exception as exc:
            exc.add_note(f"the old job was paused before its operation {at}")
            raise


def test_an_old_job_paused_anywhere_spoils_nothing_of_the_new() -> None:
    """It goes on after the new one has opened, saved the same step, and retired."""
    paused_anywhere()


def opened_anywhere(inner: Callable[[World], Any], *, go_on_every: int = 5, reads: bool = True) -> None:
    def open_one(world: World) -> None:
        world.job("new").open()

    for number, at in enumerate(moments_of(open_one, reads=reads)):
        world = World()
        world.first.config = Config(delete_grace_s=1000.0)
        meet(world, open_one, inner, at)
        try:
            world.check()
            if number % go_on_every == 0:
                go_on(world.disk, world.promises)
        except Exception as exc:
            exc.add_note(f"the old job ran before operation {at} of the opening")
            raise


def save_in_first(world: World) -> None:
    """What the job that is open already does meanwhile."""
    try:
        world.first.save(30, 3)
        world.first.retire()
    except SupersededError:
        pass


def retire_in_first(world: World) -> None:
    try:
        world.first.retire()
    except SupersededError:
        pass


@pytest.mark.parametrize("inner", [save_in_first, retire_in_first])
def test_what_an_old_job_does_while_a_new_one_opens_holds(inner: Callable[[World], Any]) -> None:
    opened_anywhere(inner)


def no_second_look(tier: Tier, record: Incarnation, rule: object) -> tuple[Incarnation, Listing]:
    return record, snapshots.take(tier).listing


def trusting(tier: Tier, record: Incarnation, seen: Listing, clock: object, *, first: int) -> ledger.OpenedIncarnation:
    return ledger.OpenedIncarnation(record=record, accepted=record.accepted, withdrawn=())


@pytest.mark.parametrize(
    ("name", "variant", "find"),
    [
        ("_take_in_late", no_second_look, lambda: opened_anywhere(save_in_first)),
        ("_read_again", trusting, lambda: opened_anywhere(retire_in_first)),
        ("newer_incarnation", lambda tier, incarnation: None, paused_anywhere),
    ],
    ids=["commits once more", "tombstones once more", "newer ones"],
)
def test_looking_less_often_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, variant: object, find: Callable[[], None]
) -> None:
    monkeypatch.setattr(ledger, name, variant)
    with pytest.raises(AssertionError):
        find()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_run_goes_on_from_every_meeting() -> None:
    paused_anywhere(go_on_every=1, reads=True)
    for inner in (save_in_first, retire_in_first):
        opened_anywhere(inner, go_on_every=1)
