"""Power cuts after every operation of whole saves by the real pipeline: the newest that survives verifies and loads.

And each bug that a save could have is found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from whole_saves import (
    Job,
    Moment,
    Promises,
    Scenario,
    check,
    cut_everywhere,
    go_on,
    shares_of,
    state_of,
)

from safehold.config import Config
from safehold.format import paths
from safehold.pipeline import direct_save, ledger
from safehold.pipeline.exchange import Exchange
from safehold.policy.retention import Keep
from safehold.testing.crash_model import Survival
from safehold.testing.fake_disk import FakeDisk
from safehold.tiers import flash_probe
from safehold.tiers.base import Tier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId, Membership

T = TypeVar("T")
U = TypeVar("U")


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)


def one_save(tier: Tier, promises: Promises) -> None:
    job = Job(tier, promises)
    job.open()
    job.sweep()
    job.save(10, 1)


def two_saves_keep_one(tier: Tier, promises: Promises) -> None:
    job = Job(tier, promises, keep=Keep(last=1))
    job.open()
    job.save(10, 1)
    job.save(20, 2)
    job.retire()
    job.save(30, 3)
    job.retire()


def overwrite(tier: Tier, promises: Promises) -> None:
    """The same step again, in the same incarnation and in the next."""
    job = Job(tier, promises)
    job.open()
    job.save(10, 1)
    job.save(10, 2, attempt=1)
    job.retire()
    job = Job(tier, promises)
    job.open()
    job.sweep()
    job.save(10, 3)
    job.retire()


def roll_back(tier: Tier, promises: Promises) -> None:
    job = Job(tier, promises)
    job.open()
    first = job.save(10, 1)
    job.save(20, 2)
    job = Job(tier, promises)
    job.open(up_to=first)
    job.sweep()
    job.save(20, 3)


def grace(tier: Tier, promises: Promises) -> None:
    """Un-committed now, deleted later by another incarnation."""
    job = Job(tier, promises, keep=Keep(last=1), grace_s=1000.0)
    job.open()
    job.save(10, 1)
    job.save(20, 2)
    job.retire()
    job = Job(tier, promises, keep=Keep(last=1))
    job.open()
    job.sweep()
    job.retire()


def several_packs(tier: Tier, promises: Promises) -> None:
    job = Job(tier, promises, pack_size_bytes=4096)
    job.open()
    job.save(10, 1)


def one_shot(tier: Tier, promises: Promises) -> None:
    for incarnation, (step, version) in enumerate([(10, 1), (20, 2), (10, 3)], 1):
        member = Membership(rank=0, world_size=1, store=None)
        commit = CommitId(step, incarnation, 0)
        promises.begun[commit] = version
        direct_save.save(
            tier,
            Exchange(member, "save", 10.0),
            state_of(version),
            config=Config(),
            member=member,
            step=step,
            metrics={},
            random_states=False,
            overwrite=True,
            token=f"one shot {incarnation}",
        )
        promises.kept = {kept for kept in promises.kept if kept.step != step} | {commit}


SCENARIOS = [one_save, two_saves_keep_one, overwrite, roll_back, grace, several_packs, one_shot]


def check_all(moments: Iterator[Moment], *, every: int = 1) -> int:
    """Check all survivors of all moments, and that the run goes on from one of each; return how many were checked."""
    seen = set()
    for number, moment in enumerate(moments):
        for name, survivor in moment.survivors:
            key = hash((tuple(sorted(survivor.tree().items())), repr(moment.promises)))
            if key in seen:
                continue
            seen.add(key)
            try:
                check(FlashTier(survivor.root, survivor), moment.promises)
                if name.startswith("random") and number % every == 0:
                    go_on(survivor, copy.deepcopy(moment.promises))
            except Exception as exc:
                exc.add_note(f"{moment}, {name}")
                raise
    return len(seen)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_anywhere_loses_nothing_promised(scenario: Scenario) -> None:
    survivals: tuple[tuple[int, Survival], ...] = ((0, "lost"), (0, "kept"), (1, "random"), (2, "random"))
    assert check_all(cut_everywhere(scenario, survivals)) > 50


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_anywhere_with_many_seeds(scenario: Scenario) -> None:
    for seed in range(0, 60, 6):
        survivals: tuple[tuple[int, Survival], ...] = tuple((seed + more, "random") for more in range(6))
        check_all(cut_everywhere(scenario, survivals))


@pytest.mark.parametrize(
    "options",
    [{"direct_align": 0}, {"links": False}, {"short_transfers": True}, {"allocates": False, "direct_align": 4096}],
    ids=str,
)
def test_a_power_cut_on_other_disks(options: dict[str, Any]) -> None:
    assert check_all(cut_everywhere(two_saves_keep_one, ((0, "lost"), (3, "random")), **options), every=3) > 50


# Bugs that a save could have; each must be found.


class SyncsWithTheManifest(FlashTier):
    """Makes names in a checkpoint's directory durable together with its manifest, and not before."""

    def sync_tree(self, directory: str) -> None:
        return

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        self.syncs = "/node-" not in path
        super().put(path, data, exclusive=exclusive)

    def _sync_upward(self, directory: str) -> None:
        if self.syncs:
            super()._sync_upward(directory)


class SyncsNoPack(FlashTier):
    def create_pack(self, path: str, size_bytes: int) -> Any:
        writer = super().create_pack(path, size_bytes)
        writer._buffered.fsync = lambda: None  # type: ignore[method-assign]
        return writer


class PublishesBeforeRecords(FlashTier):
    """Keeps node records back until the manifest is there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held: dict[str, bytes] = {}

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        if "/node-" in path and path.endswith(".json"):
            self.held[path] = data
            return
        super().put(path, data, exclusive=exclusive)
        if path.endswith("manifest.json"):
            for held, content in self.held.items():
                super().put(held, content)

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        return self.held.get(path) or super().get(path, limit_bytes=limit_bytes, retry_s=retry_s)


class StoresPlansInACache(FlashTier):
    """Writes plans and does not make their names durable."""

    def _sync_upward(self, directory: str) -> None:
        if directory != "plans":
            super()._sync_upward(directory)


@pytest.mark.parametrize("tier_class", [SyncsWithTheManifest, SyncsNoPack, PublishesBeforeRecords, StoresPlansInACache])
def test_a_careless_save_is_found(tier_class: type[FlashTier]) -> None:
    survivals: tuple[tuple[int, Survival], ...] = tuple((seed, "random") for seed in range(100))
    moments = cut_everywhere(
        one_save,
        survivals,
        make_tier=lambda disk: tier_class(disk.root, disk),
        when=lambda op: op.kind == "link" and op.path.endswith("manifest.json"),
    )
    with pytest.raises(AssertionError):
        check_all(moments, every=1000)


class RetiresBeforeCommit(Job):
    """Makes room for the coming checkpoint as if it were there already."""

    def publish(self, commit: CommitId, *rest: Any) -> None:
        for old in [kept for kept in self.promises.kept if kept.step < commit.step]:
            ledger.uncommit(self.tier, old.step, incarnation=self.incarnation, reason="too early")
        super().publish(commit, *rest)


class DeletesBeforeTombstone(Job):
    def retire(self) -> dict[str, Any]:
        there = sorted(self.promises.kept)
        self.promises.kept -= set(there[:-1])
        for old in there[:-1]:
            directory = paths.checkpoint_dir(old)
            for entry in self.tier.list(directory):
                self.tier.delete(f"{directory}/{entry.name}")
        return {}


class TellsTooEarly(Job):
    """Acknowledges when publishing is asked for, not when it is done."""

    def publish(self, commit: CommitId, *rest: Any) -> None:
        self.promises.kept.add(commit)
        super().publish(commit, *rest)


@pytest.mark.parametrize("job_class", [RetiresBeforeCommit, DeletesBeforeTombstone, TellsTooEarly])
def test_a_careless_order_is_found(job_class: type[Job]) -> None:
    def scenario(tier: Tier, promises: Promises) -> None:
        job = job_class(tier, promises, keep=Keep(last=1))
        job.open()
        job.save(10, 1)
        job.save(20, 2)
        job.retire()

    with pytest.raises(AssertionError):
        check_all(cut_everywhere(scenario), every=1000)


def test_names_that_another_process_left_undurable_are_made_durable() -> None:
    """A plan, an incarnation and a manifest that are there already may have a writer that died before its fsync."""

    class Forgetful(FlashTier):
        forgets = True

        def _sync_upward(self, directory: str) -> None:
            if not self.forgets:
                super()._sync_upward(directory)

    promises = Promises()
    disk = FakeDisk()
    tier = Forgetful(disk.root, disk)
    shares = shares_of(1)
    job = Job(tier, promises, token="again and again")
    job.open()
    job.store_plan(shares)
    tier.forgets = False
    job = Job(tier, promises, token="again and again")
    job.open()
    assert job.incarnation == 1
    commit = CommitId(10, 1, 0)
    packs = [record for rank, share in enumerate(shares) for record in job.flush(commit, rank, share)]
    plan = job.store_plan(shares)
    node = job.record(commit, dict(enumerate(shares)), packs)
    tier.forgets = True
    promises.begun[commit] = 1
    job.publish(commit, *plan, [{"node": 0, **node}])
    tier.forgets = False
    manifest = tier.get(f"{paths.checkpoint_dir(commit)}/manifest.json", limit_bytes=1 << 20)
    ledger.publish(tier, commit, manifest)
    promises.kept.add(commit)
    for seed in range(4):
        left = disk.crash(seed=seed, survival="lost")
        assert check(FlashTier(left.root, left), promises) == [commit]
