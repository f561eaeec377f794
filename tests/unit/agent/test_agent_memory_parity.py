"""Saves that stay in memory, with parity: several sessions lose nodes, and what those had comes back of what the others hold."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from memory_nodes import PACK_BYTES, SAVE, MemoryJob, pack_path, restored

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import AgentUnavailableError, ChecksumError, TornFileError
from safehold.format import paths
from safehold.policy.placement import parse_scheme, place, survives
from safehold.types import CommitId

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_nodes", "parity", "most"), [(4, "xor:4", 2), (5, "xor:3", 2), (6, "rs:4+2", 3), (3, "rs:4+2", 2)]
)
def test_what_is_left_decides_what_is_restored(num_nodes: int, parity: str, most: int) -> None:
    """Sweep: all losses up to one more than parity stands; what can be had comes back bit for bit, and the rest is named.

    Where members have less than the longest, more comes back than the scheme promises.
    """
    layout = place(parse_scheme(parity=parity), range(num_nodes))
    for count in range(most + 1):
        for lost in itertools.islice(itertools.combinations(range(num_nodes), count), 0, None, (1, 2, 5, 9)[count]):
            job = MemoryJob(num_nodes, memory_parity=parity)
            job.sizes = {0: 4096, 1: 3 * MIB, 2: 2 * MIB + 8192, 3: 5 * MIB, 4: MIB}
            job.save_in_memory(5)
            job.restart(lost)
            offers = job.ask_restore()
            if offers[0].step is None:
                assert not survives(layout, lost), lost
                assert "step 5 was in memory and cannot be used" in offers[0].skipped[0]
                continue
            assert [(offer.step, offer.tier) for offer in offers] == [(5, "memory")] * num_nodes, lost
            rank = lost[0] if lost else 0
            for old in range(num_nodes):
                assert restored(job, offers[rank], rank, old) == job.bytes_of(old, 5), f"{old} without {lost}"


def test_a_lost_node_s_documents_come_back_too_and_fewer_nodes_restore() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    job.save_in_memory(5)
    commit = CommitId(5, 1, 0)
    directory = paths.checkpoint_dir(commit)
    names = (paths.node_record(3), paths.node_objects(3))
    wanted = {name: job.pools[3].held.find(f"{directory}/{name}").data for name in names}
    job.restart({3}, num_nodes=3)
    offer = job.ask_restore()[1]
    tier = job.tier_of(1, offer)
    for name, data in wanted.items():
        assert tier.get(f"{directory}/{name}", limit_bytes=len(data)) == data
    assert restored(job, offer, 1, 3) == job.bytes_of(3, 5)


def test_a_share_that_does_not_verify_any_more_is_made_of_the_others() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    job.save_in_memory(5)
    offer = job.ask_restore()[0]
    plan: Any = SimpleNamespace(nodes={2: 2})
    checkpoint: Any = SimpleNamespace(plan=plan, pack_path=lambda rank, part: pack_path(offer, rank))
    sources = job.tier_of(0, offer).sources(checkpoint, 2, 0)
    assert [source.name for source in sources] == ["partner", "parity"]
    buffer = memoryview(bytearray(PACK_BYTES))
    assert bytes(sources[1].read(0, PACK_BYTES, buffer)) == job.bytes_of(2, 5)


def test_a_bad_block_is_replaced_where_there_is_more_parity_and_else_named() -> None:
    for parity, num_nodes in (("rs:4+2", 6), ("xor:4", 4)):
        job = MemoryJob(num_nodes, memory_parity=parity)
        job.sizes = dict.fromkeys(range(num_nodes), 3 * MIB)
        job.save_in_memory(5)
        job.restart({3})
        for node in (1,) if parity == "rs:4+2" else (0, 1, 2):
            flip(job.pools[node].of_all(node)[0].fd)
        offer = job.ask_restore()[0]
        if parity == "rs:4+2":
            assert restored(job, offer, 0, 3) == job.bytes_of(3, 5)
            continue
        with pytest.raises(TornFileError, match="too much of its stripe is lost") as found:
            restored(job, offer, 0, 3)
        assert "checksum" in str(found.value)


def flip(fd: int) -> None:
    """Flip a bit in each block of an arena."""
    for offset in range(100, os.fstat(fd).st_size, MIB):
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)


def test_a_node_that_dies_in_the_middle_is_replaced_by_another_symbol() -> None:
    job = MemoryJob(6, memory_parity="rs:4+2")
    job.sizes = dict.fromkeys(range(6), 4 * MIB)
    job.save_in_memory(5)
    job.restart({3})
    offer = job.ask_restore()[0]
    tier = job.tier_of(0, offer)
    checkpoint: Any = SimpleNamespace(
        plan=SimpleNamespace(nodes={3: 3}), pack_path=lambda rank, part: pack_path(offer, rank)
    )
    (source,) = tier.sources(checkpoint, 3, 0)
    first = bytes(source.read(0, MIB, memoryview(bytearray(MIB))))
    job.cut(0, 1)
    job.cut(0, 2)
    with pytest.raises(TornFileError, match="too much of its stripe is lost"):
        job.tier_of(0, offer).sources(checkpoint, 3, 0)[0].read(0, 4 * MIB, memoryview(bytearray(4 * MIB)))
    job.mend(0, 2)
    rest = bytes(source.read(MIB, 3 * MIB, memoryview(bytearray(3 * MIB))))
    assert first + rest == job.bytes_of(3, 5)


def test_a_part_of_a_document_is_not_kept_as_the_document() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    job.save_in_memory(5)
    path = f"{paths.checkpoint_dir(CommitId(5, 1, 0))}/{paths.node_objects(2)}"
    data = job.pools[2].held.find(path).data
    assert job.read(0, 2, path, 10) == data[:10]
    assert job.read(0, 2, path, len(data), whole=True) == data
    job.cut(0, 2)
    assert job.read(0, 2, path, len(data), whole=True) == data, "once it is here it is asked for no more"


def test_an_agent_that_died_says_nothing_about_the_checkpoint() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    job.save_in_memory(5)
    job.restart({3})
    offer = job.ask_restore()[0]
    tier = job.tier_of(0, offer)
    tier._run.client.alive = False  # type: ignore[misc]
    with pytest.raises(AgentUnavailableError):
        tier.give_back(3, paths.pack(3, 3, 0), 0, memoryview(bytearray(PACK_BYTES)))
    tier = job.tier_of(0, offer)
    for other in (1, 2):
        job.cut(0, other)
    with pytest.raises(TornFileError, match="no node can give it"):  # so an older checkpoint is tried, aloud
        tier.get(f"{paths.checkpoint_dir(CommitId(5, 1, 0))}/{paths.node_objects(3)}", limit_bytes=10)


# -- saves -------------------------------------------------------------------------------------------------------------


def begin_all(job: MemoryJob, step: int) -> None:
    for rank in range(job.world_size):
        job.begin(rank, step, packs=[(0, job.size_of(rank))], arena_bytes=job.size_of(rank), **SAVE)


def failed(job: MemoryJob, step: int) -> Any:
    job.settle_threads(lambda: all(("failed", step) in job.verdicts(rank) for rank in range(job.world_size)))
    return job.failure(0)


def test_a_save_is_durable_once_all_have_made_their_parity_and_not_before() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    begin_all(job, 5)
    held_back = job.sessions[2].memory.make_parity
    words: list[Any] = []
    job.sessions[2].memory.make_parity = words.append  # type: ignore[method-assign]
    for rank in range(4):
        job.stage_memory(rank, 5)
    job.settle_threads(lambda: words and all(job.pools[node].held.facts()["parity"] == 5 for node in (0, 1, 3)))
    assert not any(job.verdicts(rank) for rank in range(4)) and not job.told(w.HoldManifest)
    assert len(words[0].refs) == 4
    held_back(words[0])
    job.settle_threads(lambda: all(job.verdicts(rank) for rank in range(4)))
    assert job.verdicts(0) == [("durable", 5)]
    assert all(len(pool.held.told()[0].shares) == 1 for pool in job.pools), "nobody has a whole copy of another's share"


def test_bytes_that_change_before_they_are_summed_fail_the_save_and_the_last_good_one_stays() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    job.sizes = dict.fromkeys(range(4), 5 * MIB)  # all chunks of all stripes have data
    job.save_in_memory(5)
    begin_all(job, 6)
    words: list[Any] = []
    held_back = job.sessions[2].memory.make_parity
    job.sessions[2].memory.make_parity = words.append  # type: ignore[method-assign]
    for rank in range(4):
        job.stage_memory(rank, 6)
    job.settle_threads(lambda: words)
    flip(job.pools[1].of(1).fd)
    held_back(words[0])
    error = failed(job, 6)
    assert isinstance(error, ChecksumError) and error.node == "n1", "the damaged one is named"
    job.restart({0})
    offers = job.ask_restore()
    assert offers[0].step == 5 and restored(job, offers[0], 0, 0) == job.bytes_of(0, 5)


def test_a_member_that_cannot_be_reached_fails_the_save_by_name_and_a_later_one_works() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    job.save_in_memory(5)
    job.cut(1, 3, noticed=False)
    begin_all(job, 6)
    for rank in range(4):
        job.stage_memory(rank, 6)
    assert "does not answer" in str(failed(job, 6))
    job.mend(1, 3)
    job.save_in_memory(7)
    assert job.verdicts(0)[-1] == ("durable", 7)
    job.restart({1})
    assert restored(job, job.ask_restore()[1], 1, 1) == job.bytes_of(1, 7)


def test_a_node_that_is_lost_while_parity_is_waited_for_ends_the_save() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    begin_all(job, 6)
    for rank in range(3):
        job.stage_memory(rank, 6)
    job.settle_threads(lambda: len(job.told(w.ShareKept)) == 2)  # of the others; the lead's own comes by no network
    job.cut(0, 3)
    job.settle_threads(lambda: ("failed", 6) in job.verdicts(0))
    assert "n3" in str(job.failure(0))
    left = job.sessions[:3]
    job.settle_threads(
        lambda: not any(session.memory._sendings for session in left)
    )  # the lead's own may be kept later
    assert not any(session.memory._protecting._waiting for session in left if session.memory._protecting)


def test_memory_of_parity_is_used_again_and_the_sum_is_told_before_the_first_save() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    for rank in range(4):
        job.send(rank, m.Prepare(0, PACK_BYTES))
    job.deliver()
    (note,) = [note for note in job.peers[0].of(m.Note) if note.info]
    assert f"2 x {MIB:,} of parity for a redundancy set with n1, n2, n3" in note.text
    for step in range(5, 10):
        job.save_in_memory(step)
        assert 0 < job.pools[0].held.total_bytes <= 2 * MIB, "what was told"
    assert job.pools[0].held.facts()["parity"] == 9
    job.settings.update(flush_every=1, memory_parity="")
    job.restart()
    job.save(20)
    job.restart()
    assert [pool.held.total_bytes for pool in job.pools] == [0] * 4


def test_what_does_not_fit_is_refused_with_the_sums() -> None:
    job = MemoryJob(4, memory_parity="xor:4", memory_budget_bytes=3 * MIB)
    for pool in job.pools:
        pool.configure(3 * MIB)
    for rank in range(4):
        job.send(rank, m.Prepare(0, MIB))
    job.deliver()
    job.begin(0, 5, packs=[(0, PACK_BYTES)], arena_bytes=PACK_BYTES, **SAVE)
    assert "of parity for a redundancy set with n1, n2, n3" in job.peers[0].refusal().message


def test_a_word_for_another_set_is_refused() -> None:
    job = MemoryJob(4, memory_parity="xor:4")
    begin_all(job, 5)
    done: list[Any] = []
    protecting = job.sessions[1].memory._protecting
    assert protecting is not None
    protecting.kept(CommitId(5, 1, 0), b"record", threading.Event(), done.append)
    job.sessions[1].memory.make_parity(w.MakeParity(1, 5, 0, [(0, 3, "x"), (1, 3, "y")]))
    assert "another redundancy set" in done[0].message
    job.sessions[1].memory.make_parity(w.MakeParity(1, 7, 0, []))  # of a save that nobody waits for
