"""What goes to a second place, in which order, and what would count there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from safehold.format.records import Incarnation, Manifest, NodeRecord, NodeRef, PackRecord, Tombstone
from safehold.policy import replication
from safehold.policy.belief import AttemptView, Listing
from safehold.policy.replication import EARLY, LATE, Allowance
from safehold.policy.retention import CommitFacts, Keep
from safehold.types import CommitId


def at(step: int, incarnation: int = 1, attempt: int = 0) -> CommitId:
    return CommitId(step, incarnation, attempt)


def incarnation(number: int, *accepted: CommitId, token: str = "t") -> Incarnation:
    return Incarnation(run_id="r", number=number, token=token, accepted=tuple(sorted(accepted)), created_s=1.0)


def listing(incarnations: list[Incarnation], *commits: CommitId, stones: dict[CommitId, int] | None = None) -> Listing:
    laid = stones or {}
    views = {
        commit: AttemptView(
            has_manifest=True,
            tombstones=[Tombstone(commit=commit, incarnation=laid[commit], created_s=1.0)] if commit in laid else (),
        )
        for commit in commits
    }
    return Listing(incarnations={record.number: record for record in incarnations}, attempts=views)


def facts(step: int, **options: bool) -> CommitFacts:
    return CommitFacts(commit=at(step), created_s=float(step), **options)


def test_the_manifest_is_last_in_either_order() -> None:
    for order in (EARLY, LATE):
        assert order[-1] == "manifest" and len(set(order)) == len(order) == 5
        assert order.index("plan") < order.index("data") < order.index("records")
        assert order.index("incarnations") < order.index("manifest")
    assert set(EARLY) == set(LATE)


def test_files_are_packs_and_objects_the_largest_first() -> None:
    def pack(node: int, rank: int, part: int, size: int) -> PackRecord:
        name = f"{node:05d}-{rank:05d}.{part}.safetensors"
        return PackRecord(file=name, rank=rank, part=part, size_bytes=size, crc32=0, block_crcs="")

    def record(node: int, *packs: PackRecord, objects: int = 0) -> NodeRecord:
        return NodeRecord(run_id="r", node=node, node_name="h", commit=at(10), packs=packs, objects_size_bytes=objects)

    manifest = Manifest(
        run_id="r",
        commit=at(10),
        world_size=2,
        nodes=(NodeRef(node=0, size_bytes=1, blake3="0" * 64),),
        plan_digest="0" * 64,
        plan_size_bytes=1,
        total_bytes=0,
        crc32=0,
        created_s=1.0,
        library="x",
    )
    records = {0: record(0, pack(0, 0, 0, 10), pack(0, 0, 1, 30)), 1: record(1, pack(1, 1, 0, 20), objects=15)}
    files = replication.data_files(manifest.commit, records)
    assert [(file.name, file.size_bytes) for file in files] == [
        ("00000-00000.1.safetensors", 30),
        ("00001-00001.0.safetensors", 20),
        ("node-00001.objects", 15),
        ("00000-00000.0.safetensors", 10),
    ]
    assert all(file.path.startswith("checkpoints/000000010/1-0/") for file in files)


def test_incarnations_come_first_unless_nothing_would_count_any_more() -> None:
    here = listing([incarnation(1), incarnation(2, at(20))], at(20))
    assert replication.order(here, Listing()) == EARLY
    assert replication.order(here, listing([incarnation(1)], at(20))) == EARLY
    assert replication.order(here, listing([incarnation(1)], at(10), at(20))) == EARLY
    assert replication.order(here, listing([incarnation(1)], at(10))) == LATE
    assert replication.order(here, listing([incarnation(1)])) == EARLY


def test_incarnations_that_differ_are_found() -> None:
    one, two = incarnation(1), incarnation(2, at(20))
    assert replication.conflict({1: one, 2: two}, {1: one}) is None
    assert replication.conflict({1: one}, {}) is None
    assert replication.conflict({1: one, 2: two}, {1: one, 2: incarnation(2, at(10))}) == 2
    assert replication.conflict({1: one}, {1: replace_token(one)}) == 1


def replace_token(record: Incarnation) -> Incarnation:
    return incarnation(record.number, *record.accepted, token="another")


def test_what_would_count_there() -> None:
    here = listing([incarnation(1)], at(10), at(20))
    assert replication.would_count(here, Listing(), at(20))
    ahead = listing([incarnation(1), incarnation(2, at(10))], at(10))
    assert replication.would_count(here, ahead, at(10)) and not replication.would_count(here, ahead, at(20))
    # What was un-committed there is taken away before it is sent again.
    assert replication.would_count(here, listing([incarnation(1)], at(10), stones={at(10): 1}), at(10))
    # A higher attempt at the step hides it, and it counts all the same.
    assert replication.would_count(here, listing([incarnation(1)], at(10, attempt=1)), at(10))


def test_what_would_be_dropped() -> None:
    here = listing([incarnation(1), incarnation(2, at(10))], at(10))
    there = listing([incarnation(1)], at(10), at(20))
    assert replication.dropped(here, there) == [at(20)]
    assert replication.dropped(listing([incarnation(1)], at(10)), there) == []


def test_whether_a_tombstone_holds() -> None:
    stoned = listing([incarnation(1)], at(10), stones={at(10): 1})
    assert replication.holding(stoned, at(10)) and not replication.holding(stoned, at(20))
    void = replace(stoned, incarnations={1: incarnation(1), 2: incarnation(2, at(10))})
    assert not replication.holding(void, at(10))


def test_what_is_sent() -> None:
    here = [facts(step) for step in (10, 20, 30)]
    assert replication.to_send(here, ()) == [at(30)]
    assert replication.to_send(here, {at(30)}) == []
    assert replication.to_send(here, {at(20)}, all_steps=True) == [at(30), at(10)]
    assert replication.to_send([], (), all_steps=True) == []


def test_a_quarantined_one_is_sent_only_for_want_of_another() -> None:
    assert replication.to_send([facts(10), facts(20, quarantined=True)], ()) == [at(10)]
    assert replication.to_send([facts(10, quarantined=True), facts(20, quarantined=True)], ()) == [at(20)]


def test_what_would_be_let_go_at_once_is_not_sent() -> None:
    here = [facts(10, pinned=True), facts(20), facts(30), facts(40)]
    assert replication.to_send(here, (), all_steps=True, keep=Keep(last=2)) == [at(40), at(30), at(10)]
    newer_there = [facts(50), facts(60)]
    assert replication.to_send(here, (), all_steps=True, keep=Keep(last=2), there_facts=newer_there) == [at(10)]


def test_lag() -> None:
    here = {at(10): 100.0, at(20): 160.0, at(30): 220.0}
    behind = replication.lag(here, {at(10)})
    assert (behind.steps, behind.seconds, behind.num_checkpoints) == (20, 120.0, 2)
    none = replication.lag(here, {at(30), at(10)})
    assert (none.steps, none.seconds, none.num_checkpoints) == (0, 0.0, 0)
    nothing = replication.lag(here, {at(5)})
    assert (nothing.steps, nothing.seconds, nothing.num_checkpoints) == (None, None, 3)
    assert replication.lag({}, set()).num_checkpoints == 0


def test_the_allowance_spaces_out_transfers() -> None:
    allowance = Allowance(100)
    assert [allowance.pause_s(0.0, 50), allowance.pause_s(0.0, 50), allowance.pause_s(0.5, 50)] == [0.5, 1.0, 1.0]
    assert allowance.pause_s(10.0, 50) == 0.5
    assert Allowance(0).pause_s(0.0, 1 << 40) == 0.0


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_pauses_grow_and_are_bounded(chance: float) -> None:
    pauses = [replication.backoff_s(attempt, chance) for attempt in range(1, 40)]
    assert pauses == sorted(pauses) and 0.05 <= pauses[0] <= 0.1 and 5.0 <= pauses[-1] <= 10.0
