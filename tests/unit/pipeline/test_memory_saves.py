"""What saves that stay in memory share with those that are flushed: checksums as they are staged, records, and the check of an arena."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from safehold.config import Config
from safehold.errors import TornFileError
from safehold.events import EventStream
from safehold.format import crc, records
from safehold.host.memfd import Mapping, create
from safehold.pipeline.flush import FlushJob, StagedWord, flush_rank
from safehold.pipeline.maintenance import open_run, record
from safehold.pipeline.memory_check import packs_match
from safehold.pipeline.node_records import make_record
from safehold.pipeline.nowhere import Nowhere
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.open import open_tier
from safehold.types import CommitId

MIB = 1 << 20
COMMIT = CommitId(10, 1, 0)
PACKS = ((0, MIB), (MIB, 2 * MIB + 4096))
TOTAL = 3 * MIB + 4096


def arena_of(*, heads: bool = True) -> Mapping:
    fd = create(TOTAL, "arena")
    mapping = Mapping(fd, TOTAL)
    mapping.view[:] = np.random.default_rng(7).bytes(TOTAL)
    for start, _ in PACKS if heads else ():
        mapping.view[start : start + 8] = (4088).to_bytes(8, "little")
        mapping.view[start + 8 : start + 4096] = b"{" + b" " * 4087
    return mapping


def job() -> FlushJob:
    return FlushJob(
        commit=COMMIT,
        node=0,
        rank=0,
        packs=PACKS,
        compare=(("w", 4096, 100),),
        staged_total=TOTAL,
        block_bytes=MIB,
        threads=2,
        rate_bytes_s=0,
        deadline_s=10.0,
    )


WORD = StagedWord(lambda: TOTAL, lambda seen, timeout_s: None)


def test_a_save_that_goes_nowhere_is_checksummed_as_one_that_is_written() -> None:
    with arena_of() as arena:
        written = flush_rank(FakeTier(), job(), arena.view, WORD, threading.Event())
        kept = flush_rank(Nowhere(), job(), arena.view, WORD, threading.Event())
        assert kept.packs == written.packs and kept.compare == written.compare
        crcs = [pack.block_crcs for pack in kept.packs]
        assert packs_match(crcs, PACKS, arena.view)
        arena.view[MIB + 5000] ^= 1
        assert not packs_match(crcs, PACKS, arena.view)
        assert not packs_match(crcs[:1], PACKS, arena.view)
        assert not packs_match(crcs, [PACKS[0], (2 * MIB, PACKS[1][1])], arena.view), "longer than the arena"


def test_what_is_no_pack_is_refused_there_too() -> None:
    with arena_of(heads=False) as arena, pytest.raises(TornFileError, match="not what was staged"):
        flush_rank(Nowhere(), job(), arena.view, WORD, threading.Event())


def test_a_record_in_memory_is_that_on_storage() -> None:
    tier = FakeTier()
    with arena_of() as arena:
        packs = flush_rank(Nowhere(), job(), arena.view, WORD, threading.Event()).packs
    data = arena.size_bytes and packs[0]
    assert data.crc32 == crc.combine_blocks(crc.decode_crcs(data.block_crcs), data.size_bytes)
    facts = {"run_id": "run", "node": 0, "node_name": "n0", "timings": {"write_s": 1.0}}
    made, objects = make_record(COMMIT, packs=packs, objects={0: {"a": b"\x01"}}, part_digests={0: "a" * 64}, **facts)
    plain = [
        {name: getattr(pack, name) for name in ("file", "rank", "part", "size_bytes", "crc32", "block_crcs")}
        for pack in packs
    ]
    arguments = {
        "commit": [10, 1, 0],
        "packs": plain,
        "objects": {0: {"a": b"\x01"}},
        "part_digests": {0: "a" * 64},
        **facts,
    }
    record(tier, Config(), arguments, EventStream())
    directory = "checkpoints/000000010/1-0"
    assert tier.get(f"{directory}/node-00000.json", limit_bytes=MIB) == made
    assert tier.get(f"{directory}/node-00000.objects", limit_bytes=MIB) == objects
    assert records.decode_node_record(made, path="x").packs == tuple(packs)


def test_a_start_is_told_the_incarnation_of_the_start_before_it(tmp_path: Path) -> None:
    tier = open_tier(str(tmp_path / "run"))

    def start(token: str, **more: object) -> dict[str, object]:
        arguments = {"token": token, "up_to": None, "exclude": [], "reason": "start", **more}
        return open_run(tier, Config(), arguments, EventStream())

    assert [(found["incarnation"], found["before"]) for found in map(start, "abbc")] == [(1, 0), (2, 1), (2, 1), (3, 2)]
    back = start("d", up_to=[12, 3, 0], in_memory=True)
    assert (back["incarnation"], back["before"], back["steps"]) == (4, 3, [])
