"""Streaming an arena into packs: no sooner than staged, cancelled, late, slow, full, stuck; the checksums are of the bytes."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from typing import Any

import pytest
from whole_saves import Job, Promises, believed, check

from safehold.errors import (
    CheckpointError,
    DeadlineError,
    RankLostError,
    SkippedError,
    StorageError,
    StorageFullError,
    TornFileError,
)
from safehold.format import crc, paths
from safehold.pipeline import flush
from safehold.pipeline.flush import FlushJob, FlushResult, StagedWord, flush_rank
from safehold.pipeline.pacing import Pacer
from safehold.policy.retention import Keep
from safehold.testing.fake_disk import FakeDisk
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.flash import FlashTier
from safehold.types import CommitId

MIB = 1 << 20
HEAD = (4096 - 8).to_bytes(8, "little") + b"{"
"""How every pack begins: the length of its header, and a brace."""
COMMIT = CommitId(10, 1, 0)
DIRECTORY = paths.checkpoint_dir(COMMIT)


class Word:
    """A staged word that the test moves."""

    def __init__(self, staged: int = 0) -> None:
        self.staged = staged
        self.waits: list[int] = []

    def staged_word(self) -> StagedWord:
        def wait(seen: int, timeout_s: float) -> None:
            self.waits.append(seen)
            time.sleep(min(timeout_s, 0.002))

        return StagedWord(lambda: self.staged, wait)


def arena_of(size: int) -> memoryview:
    arena = memoryview(mmap.mmap(-1, size))
    arena[:] = random.Random(size).randbytes(size)
    for at in range(0, size, 4096):  # wherever a pack begins
        arena[at : at + 9] = HEAD
    return arena


def job_of(packs: list[int], **options: Any) -> FlushJob:
    places, at = [], 0
    for size in packs:
        places.append((at, size))
        at += size
    defaults: dict[str, Any] = {
        "commit": COMMIT,
        "node": 2,
        "rank": 5,
        "packs": tuple(places),
        "compare": (),
        "staged_total": at,
        "block_bytes": MIB,
        "threads": 2,
        "rate_bytes_s": 0,
        "deadline_s": 30.0,
    }
    return FlushJob(**(defaults | options))


def pack_path(part: int) -> str:
    return f"{DIRECTORY}/{paths.pack(2, 5, part)}"


def start(*args: Any, **options: Any) -> tuple[threading.Thread, list[FlushResult | BaseException]]:
    results: list[FlushResult | BaseException] = []

    def run() -> None:
        try:
            results.append(flush_rank(*args, **options))
        except BaseException as exc:
            results.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def tier(disk: FakeDisk) -> FakeTier:
    return FakeTier(FlashTier(disk.root, disk))


@pytest.mark.parametrize("packs", [[], [4096], [3 * MIB + 4096], [2 * MIB, 4096, 5 * MIB + 8192]])
@pytest.mark.parametrize("threads", [1, 3])
def test_packs_and_their_records(tier: FakeTier, disk: FakeDisk, packs: list[int], threads: int) -> None:
    arena = arena_of(sum(packs) + 4096)
    compare = (("tail", sum(packs), 100), ("none", 0, 0))
    job = job_of(packs, threads=threads, compare=compare, block_bytes=2 * MIB)
    found = flush_rank(tier, job, arena, Word(sum(packs)).staged_word(), threading.Event())
    tree, at = disk.tree(), 0
    for part, (size, record) in enumerate(zip(packs, found.packs, strict=True)):
        data = arena[at : at + size]
        assert tree[pack_path(part)] == data
        assert (record.file, record.rank, record.part) == (paths.pack(2, 5, part), 5, part)
        assert record.crc32 == crc.crc(data) and record.size_bytes == size
        assert (crc.decode_crcs(record.block_crcs) == crc.crc_blocks(data)).all()
        at += size
    assert found.compare == {"tail": crc.crc(arena[at : at + 100]), "none": crc.crc(b"")}
    survivor = disk.crash(survival="kept")
    assert {path: data for path, data in survivor.tree().items() if data} == {p: d for p, d in tree.items() if d}


def test_nothing_is_read_before_it_is_staged(tier: FakeTier) -> None:
    size = 6 * MIB
    arena, word = arena_of(size), Word()
    right = bytes(arena)
    arena[:] = bytes(size)
    seen: list[int] = []
    thread, results = start(
        tier, job_of([4 * MIB, 2 * MIB]), arena, word.staged_word(), threading.Event(), flushed=seen.append
    )
    for staged in (100, MIB - 1, MIB, 3 * MIB + 5, size):
        written = [op.offset + op.nbytes for op in tier.log if op.kind == "write_at"]
        assert sum(op.nbytes for op in tier.log if op.kind == "write_at") <= word.staged, written
        arena[word.staged : staged] = right[word.staged : staged]
        word.staged = staged
        time.sleep(0.02)
    thread.join(10)
    assert isinstance(results[0], FlushResult), results
    assert results[0].packs[0].crc32 == crc.crc(right[: 4 * MIB])
    assert seen[-1] == size and sorted(seen) == seen


@pytest.mark.parametrize(("ring", "beside"), [(False, False), (False, True), (True, False)], ids=str)
def test_while_a_rank_waits_for_staging_nothing_is_checksummed(
    tier: FakeTier, monkeypatch: pytest.MonkeyPatch, ring: bool, beside: bool
) -> None:
    """Else a core that copies would be kept from it; what a ring holds, or is staged beside training, cannot or need not wait."""
    size = 8 * MIB
    arena, word, summed = arena_of(size), Word(6 * MIB), []
    crc_blocks = crc.crc_blocks

    def counted(data: memoryview) -> Any:
        summed.append(len(data))
        return crc_blocks(data)

    monkeypatch.setattr(crc, "crc_blocks", counted)
    job = job_of([4 * MIB, 4 * MIB], block_bytes=MIB, ring_bytes=size if ring else 0, beside_training=beside)
    thread, results = start(tier, job, arena, word.staged_word(), threading.Event())
    deadline = time.monotonic() + 10
    while sum(op.nbytes for op in tier.log if op.kind == "write_at") < 6 * MIB and time.monotonic() < deadline:
        time.sleep(0.002)
    assert sum(summed) == (6 * MIB if ring or beside else 0)
    word.staged = size
    thread.join(10)
    monkeypatch.undo()
    assert isinstance(results[0], FlushResult), results
    assert sum(summed) == size
    for part, record in enumerate(results[0].packs):
        data = arena[4 * MIB * part : 4 * MIB * (part + 1)]
        assert (crc.decode_crcs(record.block_crcs) == crc.crc_blocks(data)).all() and record.crc32 == crc.crc(data)


def test_cancelling_ends_checksums_that_were_left(
    tier: FakeTier, disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, cancelled, summed = Word(4 * MIB - 1), threading.Event(), []
    crc_blocks = crc.crc_blocks

    def counted(data: memoryview) -> Any:
        summed.append(len(data))
        cancelled.set()
        return crc_blocks(data)

    monkeypatch.setattr(crc, "crc_blocks", counted)
    thread, results = start(tier, job_of([4 * MIB], threads=1), arena_of(4 * MIB), word.staged_word(), cancelled)
    while tier.count("write_at") < 3:
        time.sleep(0.002)
    word.staged = 4 * MIB
    thread.join(10)
    assert isinstance(results[0], SkippedError), results
    assert len(summed) <= 2 and not [path for path in disk.tree() if path.endswith(".safetensors")]


def test_no_turn_is_waited_for_where_nothing_was_left(tier: FakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    pacer = Pacer(IdleOrNot(2.0), 0.01)
    wait = pacer.wait
    monkeypatch.setattr(pacer, "wait", lambda *args: turns.append(wait(*args)) or turns[-1])
    job = job_of([4 * MIB], beside_training=True)
    flush_rank(tier, job, arena_of(4 * MIB), Word(4 * MIB).staged_word(), threading.Event(), pacer=pacer)
    assert len(turns) == 4


@pytest.mark.parametrize(
    "head",
    [bytes(9), HEAD[:8] + b"x", (4096).to_bytes(8, "little") + b"{", (1 << 40).to_bytes(8, "little") + b"{"],
    ids=["zeros", "no brace", "no multiple", "too long"],
)
@pytest.mark.parametrize("part", [0, 1])
def test_an_arena_that_nobody_staged_into_is_never_a_pack(tier: FakeTier, part: int, head: bytes) -> None:
    arena = arena_of(2 * MIB)
    arena[part * MIB : part * MIB + 9] = head
    with pytest.raises(TornFileError, match="not what was staged") as caught:
        flush_rank(tier, job_of([MIB, MIB]), arena, Word(2 * MIB).staged_word(), threading.Event())
    assert caught.value.path == pack_path(part) and (caught.value.step, caught.value.rank) == (10, 5)


def test_what_is_told_to_be_written_never_goes_back(tier: FakeTier) -> None:
    told: list[int] = []
    held_up = threading.Event()

    def flushed(num_bytes: int) -> None:
        if not held_up.is_set():  # the first who tells something is held up while he does
            held_up.set()
            time.sleep(0.1)
        told.append(num_bytes)

    size = 8 * MIB
    flush_rank(tier, job_of([size]), arena_of(size), Word(size).staged_word(), threading.Event(), flushed=flushed)
    assert told == sorted(told) and told[-1] == size


@pytest.mark.parametrize("num_started", [0, 1])
def test_threads_that_cannot_be_started_end_it_by_name(
    tier: FakeTier, disk: FakeDisk, num_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, starts = threading.Thread.start, iter(range(9))

    def limited(self: threading.Thread) -> None:
        if next(starts) >= num_started:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(StorageError, match="no thread to write with"):
        flush_rank(tier, job_of([8 * MIB]), arena_of(8 * MIB), Word(MIB).staged_word(), threading.Event())
    assert tier.count("abort") == 1 and not [path for path in disk.tree() if path.endswith(".safetensors")]


@pytest.mark.parametrize("when", ["before staging", "while staging", "when staged", "before"])
def test_cancelling_ends_it_and_leaves_no_file(tier: FakeTier, disk: FakeDisk, when: str) -> None:
    arena, word, cancelled = arena_of(4 * MIB), Word(), threading.Event()
    job = job_of([2 * MIB, 2 * MIB], threads=1)
    gate = tier.hang("write_at", at=1) if when in ("while staging", "when staged") else None
    if when == "before":
        cancelled.set()
    word.staged = {"while staging": 3 * MIB, "when staged": 4 * MIB, "before": 4 * MIB}.get(when, 0)
    thread, results = start(tier, job, arena, word.staged_word(), cancelled)
    if gate is not None:
        assert gate.reached.wait(10)
    time.sleep(0.02)
    cancelled.set()
    time.sleep(0.02)
    if gate is not None:
        gate.release()
    thread.join(10)
    assert isinstance(results[0], SkippedError) and results[0].step == 10 and results[0].rank == 5, results
    assert not [path for path in disk.tree() if path.endswith(".safetensors")]
    assert tier.count("write_at") < 4


def test_a_rank_that_does_not_stage_in_time_is_named(tier: FakeTier, disk: FakeDisk) -> None:
    word = Word(MIB)
    with pytest.raises(RankLostError, match=rf"rank 5 staged {MIB} of {2 * MIB} bytes") as caught:
        flush_rank(tier, job_of([2 * MIB], deadline_s=0.1), arena_of(2 * MIB), word.staged_word(), threading.Event())
    assert caught.value.rank == 5 and not [path for path in disk.tree() if path.endswith(".safetensors")]


def test_a_slow_disk_meets_the_deadline(tier: FakeTier) -> None:
    tier.slow("write_at", 0.06)
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        flush_rank(
            tier,
            job_of([40 * MIB], deadline_s=0.2, threads=1),
            arena_of(40 * MIB),
            Word(40 * MIB).staged_word(),
            threading.Event(),
        )
    assert time.monotonic() - begun < 2


def test_a_disk_that_never_answers_is_left_behind(tier: FakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "STUCK_S", 0.1)
    gate = tier.hang("write_at", at=1, times=-1)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="did not take the bytes in time") as caught:
        flush_rank(
            tier, job_of([4 * MIB], deadline_s=0.2), arena_of(4 * MIB), Word(4 * MIB).staged_word(), threading.Event()
        )
    assert time.monotonic() - begun < 3 and caught.value.step == 10
    assert tier.count("abort") == 0  # the file is still in use
    gate.release()


def test_an_error_beside_a_stuck_write_is_the_one_that_is_told(tier: FakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "STUCK_S", 0.1)
    gate = tier.hang("write_at", at=0)
    tier.fail("write_at", at=1, error=OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(StorageError, match="EIO"):
        flush_rank(tier, job_of([8 * MIB]), arena_of(8 * MIB), Word(8 * MIB).staged_word(), threading.Event())
    gate.release()


def test_the_rate_is_limited(tier: FakeTier) -> None:
    job = job_of([4 * MIB], rate_bytes_s=20 * MIB, threads=2)
    found = flush_rank(tier, job, arena_of(4 * MIB), Word(4 * MIB).staged_word(), threading.Event())
    assert found.write_s >= 3 / 20


@pytest.mark.parametrize("kind", ["create_pack", "write_at", "finish"])
@pytest.mark.parametrize("at", [0, 1])
def test_errors_are_raised_by_name_and_files_removed(tier: FakeTier, disk: FakeDisk, kind: str, at: int) -> None:
    tier.fail(kind, at=at, error=OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(StorageError, match="EIO") as caught:
        flush_rank(tier, job_of([MIB, 4096]), arena_of(MIB + 4096), Word(MIB + 4096).staged_word(), threading.Event())
    assert "safetensors" in str(caught.value.path)
    left = [path for path in disk.tree() if path.endswith(".safetensors")]
    assert len(left) <= (1 if kind == "finish" and at == 1 else 0)  # a finished one goes with the attempt


def test_a_foreign_file_of_that_name_is_an_error_by_name(tier: FakeTier) -> None:
    tier.put(pack_path(0), b"foreign")
    with pytest.raises(StorageError, match="something else has the name") as caught:
        flush_rank(tier, job_of([4096]), arena_of(4096), Word(4096).staged_word(), threading.Event())
    assert caught.value.path == pack_path(0)
    assert tier.get(pack_path(0), limit_bytes=100) == b"foreign"


# Room.


def test_room_is_asked_for_once_and_only_where_it_is_full(tier: FakeTier) -> None:
    asked: list[CheckpointError] = []

    def make_room(exc: StorageFullError) -> bool:
        asked.append(exc)
        return True

    options = {"make_room": make_room}
    args = (job_of([4096, 8192]), arena_of(12288), Word(12288).staged_word(), threading.Event())
    tier.fail("create_pack", at=1, error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert len(flush_rank(tier, *args, **options).packs) == 2 and len(asked) == 1
    tier.delete_tree(DIRECTORY)
    tier.fail("create_pack", error=OSError(errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(StorageError):
        flush_rank(tier, *args, **options)
    assert len(asked) == 1
    tier.fail("create_pack", times=-1, error=OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    with pytest.raises(StorageFullError):
        flush_rank(tier, *args, **options)
    assert len(asked) == 2


def test_without_room_the_save_fails_by_name(tier: FakeTier, disk: FakeDisk) -> None:
    disk.capacity_bytes = MIB
    with pytest.raises(StorageFullError) as caught:
        flush_rank(
            tier, job_of([4096, 2 * MIB]), arena_of(2 * MIB + 4096), Word(1 << 30).staged_word(), threading.Event()
        )
    assert caught.value.path and "00000-" not in "".join(disk.tree()) and not caught.value.retry
    assert not [path for path in disk.tree() if path.endswith(".safetensors")]


class QuotaDisk(FakeDisk):
    """Shows free space that it does not give."""

    def _free_bytes(self) -> int:
        return (1 << 40) - self._used_bytes()


@pytest.mark.parametrize("disk_class", [FakeDisk, QuotaDisk])
def test_older_ones_beyond_the_rule_go_for_a_save_that_does_not_fit(disk_class: type[FakeDisk]) -> None:
    disk = disk_class(full_errno=errno.ENOSPC if disk_class is FakeDisk else errno.EDQUOT)
    promises = Promises()
    job = Job(FlashTier(disk.root, disk), promises, keep=Keep(last=2))
    job.open()
    for number, step in enumerate((10, 20, 30), 1):
        job.save(step, number)
    disk.capacity_bytes = disk._used_bytes() + 12288
    promises.kept = {commit for commit in promises.kept if commit.step > 10}
    job.save(40, 4)
    assert [commit.step for commit in check(job.tier, promises)] == [40, 30, 20]
    promises.kept -= {commit for commit in promises.kept if commit.step == 20}
    job.save(50, 5)
    assert [commit.step for commit in believed(job.tier)][:3] == [50, 40, 30]


class IdleOrNot:
    """Cores that training leaves idle, or not."""

    num_cores = 2

    def __init__(self, idle: float) -> None:
        self.idle = idle

    def sample(self) -> float:
        return self.idle


@pytest.mark.parametrize(
    ("idle", "beside", "slow"), [(0.0, True, True), (0.0, False, False), (2.0, True, False)], ids=str
)
def test_only_beside_training_without_an_idle_core_a_flush_is_paced(
    tier: FakeTier, idle: float, beside: bool, slow: bool
) -> None:
    """While the trainers wait for staging, and while a core is idle, it goes as fast as it can."""
    pacer = Pacer(IdleOrNot(idle), 0.01, cpu_time=iter(range(10_000)).__next__)  # each block takes a second, it says
    pacer._sampled_s -= 1.0
    word = Word(4 * MIB if beside else 3 * MIB + MIB // 2)
    job = job_of([4 * MIB], threads=1, deadline_s=1.0 if idle < 1 else 30.0, beside_training=beside)
    begun = time.monotonic()
    thread, results = start(tier, job, arena_of(4 * MIB), word.staged_word(), threading.Event(), pacer=pacer)
    while sum(op.kind == "write_at" for op in tier.log) < 3 and time.monotonic() < begun + 10:
        time.sleep(0.002)
    # Paced, the second block would wait 50 s; it waits until half of the time to the deadline is gone.
    assert (time.monotonic() - begun >= 0.35) == slow
    word.staged = 4 * MIB
    thread.join(10)
    assert isinstance(results[0], FlushResult)
