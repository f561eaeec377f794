"""What is held in memory: copies count once they are whole, memory is used again, and nothing is given away while somebody writes to it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from safehold.agent import memory_held
from safehold.agent.memory_held import Held, Image
from safehold.errors import ChecksumError, StorageFullError, TornFileError
from safehold.format import crc, document, paths, records
from safehold.host import memfd
from safehold.pipeline.node_records import make_record
from safehold.types import CommitId

SIZE = 8192
COMMIT, NEXT = CommitId(5, 1, 0), CommitId(6, 1, 0)
OBJECTS = {1: {"lr": b"\x01"}}


@pytest.fixture
def held() -> Iterator[Held]:
    found = Held(lambda: 4 * SIZE)
    yield found
    found.close()


def data_of(step: int, part: int = 0) -> bytes:
    return np.random.default_rng((step, part)).bytes(SIZE)


def record_of(commit: CommitId, node: int = 1, parts: int = 1) -> tuple[bytes, bytes]:
    packs = []
    for part in range(parts):
        data = data_of(commit.step, part)
        packs.append(
            {
                "file": paths.pack(node, 1, part),
                "rank": 1,
                "part": part,
                "size_bytes": SIZE,
                "crc32": crc.crc(data),
                "block_crcs": crc.encode_crcs(crc.crc_blocks(data)),
            }
        )
    return make_record(
        commit, run_id="run", node=node, node_name="n1", packs=packs, objects=OBJECTS, part_digests={}, timings={}
    )


def send(held: Held, commit: CommitId, data: bytes, *, node: int = 1, piece: int = SIZE) -> None:
    for start in range(0, len(data), piece):
        chunk = data[start : start + piece]
        fd, image = held.land(commit, node, 1, len(data))
        os.pwrite(fd, chunk, start)
        held.landed(fd, image, start, len(chunk), crc.crc(chunk))


def copy(held: Held, commit: CommitId, *, node: int = 1) -> None:
    send(held, commit, data_of(commit.step), node=node)
    held.finish(commit, node, *record_of(commit, node))


def manifest_of(commit: CommitId, plan: bytes) -> bytes:
    record, _ = record_of(commit)
    ref = records.NodeRef(node=1, size_bytes=len(record), blake3=document.digest(record))
    return records.encode_manifest(
        records.Manifest(
            run_id="run",
            commit=commit,
            world_size=2,
            nodes=(ref,),
            plan_digest=document.digest(plan),
            plan_size_bytes=len(plan),
            total_bytes=SIZE,
            crc32=0,
            created_s=1.0,
            library="0",
        )
    )


def content(found: Any) -> bytes:
    assert found is not None
    if found.fd < 0:
        return found.data
    try:
        return os.pread(found.fd, found.size_bytes, found.offset)
    finally:
        os.close(found.fd)


def test_a_copy_counts_once_it_is_whole_and_is_found_as_on_a_tier(held: Held) -> None:
    directory = paths.checkpoint_dir(COMMIT)
    both = data_of(5, 0) + data_of(5, 1)
    send(held, COMMIT, both, piece=4096)
    assert held.told()[0].shares == () and held.find(f"{directory}/{paths.pack(1, 1, 0)}") is None
    record, objects = record_of(COMMIT, parts=2)
    held.finish(COMMIT, 1, record, objects)
    assert held.told()[0].shares == (1,) and held.told()[0].run_id == "run"
    assert content(held.find(f"{directory}/{paths.pack(1, 1, 0)}")) == data_of(5, 0)
    assert content(held.find(f"{directory}/{paths.pack(1, 1, 1)}")) == data_of(5, 1)
    assert content(held.find(f"{directory}/{paths.node_record(1)}")) == record
    assert content(held.find(f"{directory}/{paths.node_objects(1)}")) == objects
    for path in (f"{directory}/{paths.node_record(0)}", f"{directory}/{paths.MANIFEST}", "plans/0", "x"):
        assert held.find(path) is None
    assert held.ranks(COMMIT) == {1: True}
    image = held.image(COMMIT, 1)
    assert image is not None and image.packs == [(0, SIZE), (SIZE, SIZE)]
    os.close(image.fd)


def test_what_does_not_match_its_record_does_not_count(held: Held) -> None:
    record, objects = record_of(COMMIT)
    with pytest.raises(TornFileError, match="given up"):
        held.finish(COMMIT, 1, record, objects)
    send(held, COMMIT, b"\xff" + data_of(5)[1:])
    with pytest.raises(ChecksumError, match="rank 1 does not match"):
        held.finish(COMMIT, 1, record, objects)
    with pytest.raises(ChecksumError, match="objects of node 1"):
        held.finish(COMMIT, 1, record, objects + b"x")
    with pytest.raises(TornFileError, match="another save"):
        held.finish(COMMIT, 1, *record_of(NEXT))
    assert held.told()[0].shares == ()
    held.drop(COMMIT)
    fd, image = held.land(COMMIT, 1, 1, SIZE)  # only half of it comes
    held.landed(fd, image, 0, 4096, crc.crc(data_of(5)[:4096]))
    with pytest.raises(ChecksumError):
        held.finish(COMMIT, 1, record, objects)
    with pytest.raises(TornFileError, match="two sizes"):
        held.land(COMMIT, 1, 1, 2 * SIZE)


def test_memory_is_used_again_but_never_what_is_still_written_to(held: Held) -> None:
    copy(held, COMMIT)
    held.drop(COMMIT)
    assert held.total_bytes == SIZE, "it waits to be used again"
    copy(held, NEXT)
    assert held.total_bytes == SIZE
    late = CommitId(7, 1, 0)
    fd, image = held.land(late, 1, 1, SIZE)
    held.drop(late)
    copy(held, CommitId(8, 1, 0))
    os.pwrite(fd, b"\xff" * SIZE, 0)  # comes late, and meets nobody's memory
    held.landed(fd, image, 0, SIZE, crc.crc(b"\xff" * SIZE))
    assert content(held.find(f"{paths.checkpoint_dir(CommitId(8, 1, 0))}/{paths.pack(1, 1, 0)}")) == data_of(8)
    held.drop_up_to(8)
    held.trim()
    assert held.total_bytes == 0


def test_copies_that_were_never_committed_give_way_and_the_last_good_one_does_not(held: Held) -> None:
    plan = b"plan"
    copy(held, COMMIT)
    held.put_plan(document.digest(plan), plan)
    held.put_manifest(COMMIT, manifest_of(COMMIT, plan), run_id="run", believed_by=1)
    for step in (6, 7, 8):  # each was given up, and this node has not heard of it
        copy(held, CommitId(step, 1, 0))
    assert [(entry.commit.step, entry.shares) for entry in held.told()] == [(8, (1,)), (5, (1,))]
    held.accept(COMMIT, 2)
    told = held.told()
    assert [(entry.commit, entry.believed_by, entry.nodes) for entry in told] == [(COMMIT, 2, (1,))]
    assert told[0].manifest == document.digest(manifest_of(COMMIT, plan))
    held.accept(None, 3)
    assert held.told() == []


def test_what_was_in_doubt_gives_way_to_the_next_copy_unless_a_new_start_believes_it(held: Held) -> None:
    copy(held, COMMIT)
    held.put_manifest(COMMIT, manifest_of(COMMIT, b"plan"), run_id="run", believed_by=1)
    held.doubt(COMMIT)
    held.accept(COMMIT, 2)
    copy(held, NEXT)
    assert [entry.commit for entry in held.told()] == [NEXT, COMMIT]
    held.doubt(COMMIT)
    copy(held, CommitId(7, 1, 0))
    assert [entry.commit.step for entry in held.told()] == [7]


def test_a_manifest_without_its_plan_is_not_told(held: Held) -> None:
    held.put_manifest(COMMIT, manifest_of(COMMIT, b"plan"), run_id="run", believed_by=1)
    assert held.told()[0].manifest == ""
    held.put_plan(document.digest(b"plan"), b"plan")
    assert held.told()[0].manifest != ""
    assert content(held.find(paths.plan(document.digest(b"plan")))) == b"plan"
    for number in range(20):
        held.put_plan(document.digest(bytes([number])), bytes([number]))
    assert held.has_plan(document.digest(b"plan")), "what a manifest names stays"
    assert not held.has_plan(document.digest(bytes([1])))


def test_what_does_not_fit_is_refused_by_name_unless_room_comes_soon(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_held, "ROOM_WAIT_S", 0.05)
    for node in range(4):
        copy(held, COMMIT, node=node)
    with pytest.raises(StorageFullError, match="32,768 of the 32,768 bytes for copies are taken") as found:
        held.land(NEXT, 9, 1, SIZE + 4096)
    assert "memory_budget_bytes" in str(found.value) and found.value.rank == 1
    monkeypatch.setattr(memory_held, "ROOM_WAIT_S", 10.0)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(held.land(NEXT, 9, 2, 4096)))
    thread.start()
    time.sleep(0.02)
    assert not done
    held.drop(COMMIT)
    thread.join(5.0)
    assert len(done) == 1
    held.landed(done[0][0], done[0][1], 0, 4096, None)


def test_the_image_of_an_arena_goes_with_the_arena(held: Held) -> None:
    data = data_of(5)
    fd = memfd.create(SIZE, "arena")
    os.pwrite(fd, data, 0)
    held.put_own(COMMIT, 1, *record_of(COMMIT), {1: Image(os.dup(fd), SIZE, 77)})
    assert held.arenas(COMMIT) == [(77, [(0, SIZE)])]
    assert held.ranks(COMMIT) == {1: False} and held.total_bytes == 0
    assert held.block_crcs(COMMIT, 1) == [crc.encode_crcs(crc.crc_blocks(data))]
    held.forget_arena(76)
    assert content(held.find(f"{paths.checkpoint_dir(COMMIT)}/{paths.pack(1, 1, 0)}")) == data
    held.forget_arena(77)
    assert held.told() == [] and held.block_crcs(COMMIT, 1) is None
    os.close(fd)
