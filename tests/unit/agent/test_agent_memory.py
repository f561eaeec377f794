"""Saves that stay in memory, with copies at partners: several sessions, whose nodes are lost and whose trainers die."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from memory_nodes import PACK_BYTES, SAVE, MemoryJob

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import (
    ChecksumError,
    CommitError,
    ConfigurationError,
    RankLostError,
    StepNotFoundError,
    TornFileError,
)
from safehold.types import CommitId

LOSSES = [set(lost) for count in range(4) for lost in itertools.combinations(range(4), count)]


def test_a_memory_save_touches_no_storage_and_is_durable_once_all_nodes_and_partners_have_it() -> None:
    job = MemoryJob(4)
    job.save_in_memory(5)
    for rank in range(4):
        durable = job.peers[rank].last(m.Durable)
        assert (durable.step, durable.tier, durable.figures["num_files"]) == (5, "memory", 0)
    asked = {name for flusher in job.flushers for name, _ in flusher.log}
    assert asked == {"hold", "sweep"}, "neither plan, nor record, nor manifest, nor packs, nor retention"
    told = [pool.held.told() for pool in job.pools]
    assert all(entry[0].manifest and entry[0].commit.step == 5 for entry in told)
    assert all(len(entry[0].shares) == 2 for entry in told), "its own, and that of one other"
    assert [pool.facts()["only_step"] for pool in job.pools] == [5] * 4


@pytest.mark.parametrize("lost", LOSSES, ids=lambda lost: "-".join(map(str, sorted(lost))) or "none")
def test_what_is_left_decides_what_is_restored(lost: set[int]) -> None:
    """Sweep: which nodes are lost decides whether the newest save is whole; if it is, every rank gets its bytes."""
    job = MemoryJob(4)
    for step in (5, 6):
        job.save_in_memory(step)
    partners = job.sessions[0].memory.partners.of
    whole = all(node not in lost or not set(partners[node]) <= lost for node in range(4))
    job.restart(lost)
    offers = job.ask_restore()
    if not whole:
        assert [offer.step for offer in offers] == [None] * 4
        assert any("step 6 was in memory and cannot be used" in text for text in offers[0].skipped)
        return
    assert [(offer.step, offer.tier) for offer in offers] == [(6, "memory")] * 4
    assert job.steps == [6]
    for rank, old in itertools.product(range(4), range(4)):
        assert job.pack_of(offers[rank], rank, old, old) == job.bytes_of(old, 6), f"rank {rank} of old rank {old}"


def test_two_copies_survive_the_loss_of_two_partners() -> None:
    job = MemoryJob(3, copies=2)
    job.save_in_memory(5)
    job.restart({1, 2})
    offers = job.ask_restore()
    assert [job.pack_of(offers[0], 0, old, old) for old in range(3)] == [job.bytes_of(old, 5) for old in range(3)]


def test_fewer_nodes_restore_what_is_left_on_them() -> None:
    job = MemoryJob(4)
    job.save_in_memory(5)
    job.restart(num_nodes=3)
    offers = job.ask_restore()
    assert len(offers) == 3 and offers[0].tier == "memory"
    for old in range(4):
        assert job.pack_of(offers[1], 1, old, old) == job.bytes_of(old, 5)


def test_storage_is_used_where_it_is_newer_and_memory_where_that_is() -> None:
    job = MemoryJob(2)
    job.save_in_memory(5)
    job.restart(commits=[4])
    flash = {**job.find_nothing(), "commit": [4, 1, 0], "manifest": b"m4", "newest": [4, 1, 0], "any_commit": True}
    assert [(offer.step, offer.tier) for offer in job.ask_restore(found=flash)] == [(5, "memory")] * 2
    job.restart(commits=[6])
    newer = {**flash, "commit": [6, 1, 0], "newest": [6, 1, 0]}
    assert [(offer.step, offer.tier) for offer in job.ask_restore(found=newer)] == [(6, "flash")] * 2
    job.restart(commits=[4])
    assert [(offer.step, offer.tier) for offer in job.ask_restore(4, found=flash)] == [(4, "flash")] * 2


@pytest.mark.parametrize("own_disks", [True, False])
def test_on_own_disks_a_flushed_save_does_not_take_the_place_of_one_in_memory(own_disks: bool) -> None:
    """It is lost with any node until its redundancy is made; what is in memory has copies from the start."""
    job = MemoryJob(4)
    for session in job.sessions:
        session.local_flash = own_disks
    job.save_in_memory(5)
    job.save(6)
    assert [[told.commit.step for told in pool.held.told()] for pool in job.pools] == [[5] if own_disks else []] * 4
    if own_disks:
        job.save_in_memory(7)
        assert [[told.commit.step for told in pool.held.told()] for pool in job.pools] == [[7]] * 4


def test_newer_ones_on_storage_that_cannot_be_used_are_set_aside() -> None:
    """Node-local flash without redundancy: step 6 was flushed, and went with a node; step 5 is still in memory."""
    job = MemoryJob(2)
    job.save_in_memory(5)
    job.restart(commits=[6])
    asks = [job.send(rank, m.RestoreAsk(0, None)) for rank in range(2)]
    job.flushers[0].answer("find", None, StepNotFoundError("none of the 1 checkpoints can be used"))
    job.settle_threads(lambda: all(job.answer_to(rank, ask) for rank, ask in enumerate(asks)))
    offers = [job.answer_to(rank, ask) for rank, ask in enumerate(asks)]
    assert [(offer.step, offer.tier) for offer in offers] == [(5, "memory")] * 2
    for phase in ("planned", "verified"):
        for rank in range(2):
            job.send(rank, m.Vote(0, offers[0].round, phase))
    (asked,) = job.flushers[0].open("open_run")
    assert asked["up_to"][0] == 5 and asked["in_memory"] is True, (
        "step 6 must not count any more, so that it can be saved again"
    )


def test_a_start_that_knew_nothing_of_it_sets_it_aside() -> None:
    job = MemoryJob(2)
    job.save_in_memory(5)
    job.restart(before=2)  # incarnation 2 was opened elsewhere, and has not accepted it
    assert job.ask_restore()[0].step is None
    assert [pool.held.told() for pool in job.pools] == [[], []]


def test_an_accepted_one_is_believed_by_the_next_start_too_though_nothing_was_saved() -> None:
    job = MemoryJob(2)
    job.save_in_memory(5)
    for _ in range(3):
        job.restart()
        assert [offer.step for offer in job.ask_restore()] == [5, 5]


def test_what_was_found_bad_in_memory_is_left_out_and_set_aside() -> None:
    job = MemoryJob(2)
    job.save_in_memory(5)
    job.restart(commits=[4])
    flash = {**job.find_nothing(), "commit": [4, 1, 0], "manifest": b"m4", "newest": [4, 1, 0], "any_commit": True}
    offers = job.ask_restore(found=flash)
    error = ChecksumError("block 0 does not match", step=5).to_wire()
    votes = [job.send(rank, m.Vote(0, offers[0].round, "verified", error, "pack")) for rank in range(2)]
    assert job.answer_to(0, votes[0]).outcome == "again"
    assert not job.flushers[0].done("quarantine"), "there is nothing on storage to leave word against"
    offers = job.ask_restore(found=flash)
    assert [(offer.step, offer.tier) for offer in offers] == [(4, "flash")] * 2
    for phase in ("planned", "verified"):
        votes = [job.send(rank, m.Vote(0, offers[0].round, phase)) for rank in range(2)]
    opened = {"run_id": "run", "incarnation": 3, "steps": [4]}
    assert job.flushers[0].open("open_run")[0]["in_memory"] is False
    job.flushers[0].answer("open_run", opened)
    job.deliver()
    assert job.answer_to(1, votes[1]).outcome == "go"
    assert [pool.held.told() for pool in job.pools] == [[], []]


# -- saves that fail ---------------------------------------------------------------------------------------------------


def begin(job: MemoryJob, rank: int, step: int, **fields: Any) -> None:
    job.begin(rank, step, **{"packs": [(0, PACK_BYTES)], "arena_bytes": PACK_BYTES, **SAVE, **fields})


def failed(job: MemoryJob, step: int) -> Any:
    job.settle_threads(lambda: all(("failed", step) in job.verdicts(rank) for rank in range(job.world_size)))
    return job.failure(0)


def test_a_copy_that_comes_damaged_fails_the_save_and_the_last_good_one_stays() -> None:
    job = MemoryJob(2)
    job.save_in_memory(5)

    def spoil(source: str, target: str, what: str, data: bytes) -> bytes:
        return data if what.endswith("record") or source != "n0" else b"\xff" + data[1:]

    job.spoil = spoil
    for rank in range(2):
        begin(job, rank, 6)
    for rank in range(2):
        job.stage_memory(rank, 6)
    error = failed(job, 6)
    assert isinstance(error, ChecksumError) and error.step == 6
    job.spoil = lambda source, target, what, data: data
    job.restart()
    offers = job.ask_restore()
    assert [offer.step for offer in offers] == [5, 5]
    assert job.pack_of(offers[0], 0, 1, 1) == job.bytes_of(1, 5)
    job.restart({1})
    assert job.pack_of(job.ask_restore()[1], 1, 1, 1) == job.bytes_of(1, 5)


def test_a_partner_that_cannot_be_reached_fails_the_save_by_name_and_a_later_one_works() -> None:
    job = MemoryJob(4)
    job.save_in_memory(5)
    job.cut(1, 3, noticed=False)
    for rank in range(4):
        begin(job, rank, 6)
    for rank in range(4):
        job.stage_memory(rank, 6)
    assert "does not answer" in str(failed(job, 6))
    job.mend(1, 3)
    job.save_in_memory(7)
    assert job.verdicts(0)[-1] == ("durable", 7)
    assert [entry.commit.step for entry in job.pools[3].held.told()] == [7]


def test_a_node_that_is_lost_before_it_has_the_manifest_leaves_the_save_in_doubt() -> None:
    job = MemoryJob(3)
    for rank in range(3):
        begin(job, rank, 6)
    for rank in range(2):
        job.stage_memory(rank, 6)
    job.work.run_for(0.05)
    real = job.sessions[2].memory.hold_manifest
    job.sessions[2].memory.hold_manifest = lambda word: None  # it is slow
    job.stage_memory(2, 6)
    job.settle_threads(lambda: job.sessions[0].memory.told()[0].manifest and job.told(w.HoldManifest))
    job.cut(0, 2)
    error = failed_of(job, 0, 6)
    assert isinstance(error, RankLostError) and "whether it is committed is not known" in error.message
    job.sessions[2].memory.hold_manifest = real
    job.mend(0, 2)
    job.restart()
    assert job.ask_restore()[0].step == 6, "all shares are there, and two nodes have the manifest"


def failed_of(job: MemoryJob, rank: int, step: int) -> Any:
    job.settle_threads(lambda: ("failed", step) in job.verdicts(rank))
    return job.failure(rank)


def test_a_save_that_is_in_doubt_gives_way_to_the_next_and_not_the_last_good_one() -> None:
    job = MemoryJob(2)
    job.save_in_memory(5)
    for rank in range(2):
        begin(job, rank, 6)
    job.sessions[1].memory.hold_manifest = lambda word: None
    for rank in range(2):
        job.stage_memory(rank, 6)
    job.settle_threads(lambda: any(word.step == 6 for word in job.told(w.HoldManifest)))
    job.cut(0, 1)
    failed_of(job, 0, 6)
    failed_of(job, 1, 6)
    job.mend(0, 1)
    for rank in range(2):  # the next one begins, and takes the memory of the one in doubt
        begin(job, rank, 7)
    for pool in job.pools:
        assert {arena.content for arena in pool.of_all(0) + pool.of_all(1)} == {CommitId(5, 1, 0), None}
    for node, pool in enumerate(job.pools):
        (good,) = [entry for entry in pool.held.told() if entry.commit.step == 5]
        assert good.manifest and good.shares == (0, 1), f"node {node} has all of the last good one"
    job.restart()
    assert job.ask_restore()[0].step == 6, "its copies are left, and a node that has the manifest"


def test_nodes_that_disagree_about_where_a_save_goes_fail_it_by_name() -> None:
    job = MemoryJob(2)
    begin(job, 0, 5)
    begin(job, 1, 5, in_memory=False)
    error = failed(job, 5)
    assert isinstance(error, CommitError) and "n0 keeps the save in memory, and node n1 flushes it" in error.message


def test_ranks_of_a_node_that_disagree_are_refused() -> None:
    job = MemoryJob(2, per_node=2)
    begin(job, 0, 5)
    begin(job, 1, 5, in_memory=False)
    assert "some ranks of the node keep the save in memory" in str(job.peers[1].refusal())


def test_a_job_without_the_tier_refuses_a_memory_save() -> None:
    job = MemoryJob(2, flush_every=1)
    begin(job, 0, 5)
    assert isinstance(job.peers[0].refusal(), ConfigurationError)


# -- what it takes -----------------------------------------------------------------------------------------------------


def test_the_memory_that_it_takes_is_told_before_the_first_save() -> None:
    job = MemoryJob(2)
    for rank in range(2):
        job.send(rank, m.Prepare(0, 1 << 20))
    job.deliver()
    (note,) = [note for note in job.peers[0].of(m.Note) if note.info]
    assert "2 x 1,048,576 bytes for 1 rank + 2 x 1,048,576 for copies of node n1 = 4,194,304 bytes" in note.text


def test_what_does_not_fit_is_refused_with_the_sums_and_saves_to_storage_go_on() -> None:
    job = MemoryJob(2, memory_budget_bytes=3 << 20)
    for pool in job.pools:
        pool.configure(3 << 20)
    for rank in range(2):
        job.send(rank, m.Prepare(0, 1 << 20))
    job.deliver()
    begin(job, 0, 5)
    error = job.peers[0].refusal()
    assert isinstance(error, ConfigurationError) and error.node == "n0"
    assert "= 4,194,304 bytes of host memory on this node; the budget is 3,145,728 bytes" in error.message
    begin(job, 0, 6, in_memory=False)
    assert job.peers[0].last(m.Granted)
    begin(job, 0, 7)
    assert job.peers[0].refusal().message == error.message


def test_a_copy_of_what_is_not_the_sender_s_own_is_refused() -> None:
    job = MemoryJob(4)
    wires = job.wires
    with pytest.raises(TornFileError, match="not its own"):
        wires["n1"].write_from("n0", "held", "5/1/0/2/2", 0, memoryview(b"x"), total=1, deadline_s=1.0)
    with pytest.raises(TornFileError, match="incarnation 9"):
        wires["n2"].write_from("n0", "held", "5/9/0/2/2", 0, memoryview(b"x"), total=1, deadline_s=1.0)
    for name in ("5/1/0/2", "5/1/0/2/x", "a/1/0/2/2", "5/1/0/2/2/2"):
        with pytest.raises(TornFileError):
            wires["n2"].write_from("n0", "held", name, 0, memoryview(b"x"), total=1, deadline_s=1.0)
    assert job.pools[0].held.total_bytes == 0


def test_memory_of_copies_is_used_again_and_goes_when_memory_is_no_tier_any_more() -> None:
    job = MemoryJob(2)
    for step in range(5, 11):
        job.save_in_memory(step)
        assert job.pools[0].held.total_bytes <= 2 * PACK_BYTES
    job.settings["flush_every"] = 1
    job.restart()
    job.save(20)
    assert [pool.held.told() for pool in job.pools] == [[], []]
    assert [len(pool.of_all(node)) for node, pool in enumerate(job.pools)] == [1, 1]
    job.restart()
    assert [pool.held.total_bytes for pool in job.pools] == [0, 0]
