"""Giving back what was lost: whole nodes and ranges, with damage at every kind of source."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from redundant_nodes import DIRECTORY, Nodes

from safehold.errors import CheckpointError, ChecksumError, StorageError, TornFileError
from safehold.format import crc, paths, redundancy
from safehold.pipeline import symbols
from safehold.pipeline.block_work import Effort
from safehold.pipeline.lost_node import open_lost
from safehold.pipeline.rebuild import rebuild
from safehold.pipeline.redundancy import protect
from safehold.policy.placement import Layout, RedundancySet, parse_scheme, place, survives
from safehold.testing.fake_tier import FakeTier

MIB = 1 << 20
SCHEMES = ["1", "2", "3", "xor:3", "xor:4", "rs:2+2", "rs:4+2", "rs:3+3"]
SIZES = [0, 1, 4096, 5000, MIB - 1, MIB, MIB + 1, 2 * MIB + 77]


def layout(count: int, words: str) -> Layout:
    scheme = parse_scheme(copies=words) if words.isdigit() else parse_scheme(parity=words)
    assert scheme is not None
    return place(scheme, range(count))


def rebuilt(nodes: Nodes, node: int, **options) -> dict[str, bytes]:
    lost = nodes.lost(node)
    nodes.replace(node)
    rebuild(nodes.tiers[node], lost, **options)
    return nodes.files(node)


def forge(nodes: Nodes, holder: int, row: int, data: bytes) -> None:
    """Let a node hold something else in a share, with a record that fits it."""
    stored, parts = redundancy.decode_redundancy(nodes.files(holder)[paths.redundancy_record(holder)], path="")
    forged = redundancy.ShareRecord(
        file=stored.shares[row].file,
        row=row,
        size_bytes=len(data),
        crc32=crc.crc(data),
        block_crcs=crc.encode_crcs(crc.crc_blocks(data)),
    )
    shares = tuple(forged if share.row == row else share for share in stored.shares)
    sealed = redundancy.encode_redundancy(msgspec.structs.replace(stored, shares=shares), parts)
    nodes.tiers[holder].put(f"{DIRECTORY}/{forged.file}", data)
    nodes.tiers[holder].put(f"{DIRECTORY}/{paths.redundancy_record(holder)}", sealed)


@pytest.mark.parametrize("words", SCHEMES)
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_how_much_is_protected_by_how_much_is_lost(words: str, spare: int) -> None:
    rng = random.Random(f"{words} {spare}")
    scheme = layout(24, words).scheme
    count = scheme.width + spare
    packs = [[rng.choice(SIZES) for _ in range(rng.randrange(4))] for _ in range(count)]
    nodes = Nodes(None, packs, objects={node: rng.choice(SIZES) for node in range(count)}, seed=count)
    plan = layout(count, words)
    nodes.protect(plan)
    for num_lost in range(scheme.num_parity + 2):
        ways = list(itertools.combinations(range(count), num_lost))
        for lost in rng.sample(ways, min(4, len(ways))):
            nodes.silent = set(lost)
            for node in lost:
                tier = nodes.new_tier(node)
                try:
                    rebuild(tier, nodes.lost(node))
                except CheckpointError:
                    assert not survives(plan, lost), (lost, node)
                    assert paths.node_record(node) not in {entry.name for entry in tier.list(DIRECTORY)}
                else:
                    found = {
                        e.name: tier.get(f"{DIRECTORY}/{e.name}", limit_bytes=1 << 30) for e in tier.list(DIRECTORY)
                    }
                    assert found == nodes.wanted[node], (lost, node)


@pytest.mark.parametrize(
    ("words", "count"), [("1", 2), ("2", 4), ("xor:4", 4), ("xor:3", 5), ("rs:2+2", 4), ("rs:2+2", 5)]
)
def test_what_survives_is_exactly_what_is_said(words: str, count: int) -> None:
    """With blocks everywhere, all of what is lost comes back if and only if `survives` says so."""
    plan = layout(count, words)
    width = plan.sets[0].num_data
    nodes = Nodes(None, [[100] * width] * count)
    nodes.protect(plan)
    for num_lost in range(1, count):
        for lost in itertools.combinations(range(count), num_lost):
            nodes.silent = set(lost)
            came_back = True
            for node in lost:
                try:
                    found = nodes.lost(node)
                    for name, data in nodes.wanted[node].items():
                        buffer = bytearray(len(data))
                        if name != paths.node_record(node):
                            found.read_range(name, 0, memoryview(buffer))
                            assert buffer == data
                except CheckpointError:
                    came_back = False
            assert came_back == survives(plan, lost), lost


@pytest.mark.parametrize("words", ["1", "xor:4", "rs:2+2"])
def test_ranges(words: str) -> None:
    nodes = Nodes(None, [[5 * MIB + 77, 3000], [MIB], [7 * MIB], [2 * MIB]], objects={0: 2 * MIB + 9})
    nodes.protect(layout(4, words))
    nodes.lose(0)
    lost, rng = nodes.lost(0), random.Random(2)
    for name in (paths.pack(0, 0, 0), paths.pack(0, 0, 1), paths.node_objects(0)):
        data = nodes.wanted[0][name]
        ranges = [(0, len(data)), (0, 0), (len(data), 0), (len(data) - 1, 1), (0, 1), (MIB - 1, 2), (MIB, MIB)]
        ranges += [(start := rng.randrange(len(data)), rng.randrange(len(data) - start + 1)) for _ in range(6)]
        for start, length in ranges:
            if start + length <= len(data):
                buffer = bytearray(length)
                lost.read_range(name, start, memoryview(buffer))
                assert buffer == data[start : start + length], (name, start, length)
        for start, length in ((-1, 2), (0, len(data) + 1), (len(data), 1)):
            with pytest.raises(TornFileError, match="the node wrote no bytes"):
                lost.read_range(name, start, memoryview(bytearray(length)))
    for name in ("../../run.json", paths.pack(1, 1, 0), paths.MANIFEST):
        with pytest.raises(TornFileError):
            lost.read_range(name, 0, memoryview(bytearray(1)))
    assert lost.record_bytes == nodes.wanted[0][paths.node_record(0)]


def test_a_range_reads_no_more_than_its_blocks() -> None:
    nodes = Nodes(None, [[8 * MIB]] * 4)
    nodes.protect(layout(4, "xor:4"))
    nodes.lose(0)
    lost = nodes.lost(0)
    nodes.reads.clear()
    lost.read_range(paths.pack(0, 0, 0), MIB + 5, memoryview(bytearray(100)))
    assert [length for _, _, _, length in nodes.reads] == [MIB] * 3


@pytest.mark.parametrize("words", ["2", "rs:2+2"])
def test_flipped_bits_at_every_source_are_made_good_and_named(words: str) -> None:
    """One node is lost, and one bit of every file of another is flipped: one of two losses each is left for it."""
    for bad in (1, 2, 3):
        nodes = Nodes(None, [[3 * MIB, 100]] * 4, objects=dict.fromkeys(range(4), 3000))
        nodes.protect(layout(4, words))
        names = [name for name in nodes.files(bad) if name != paths.node_record(bad)]
        for name in names:
            nodes.flip(bad, name, 50)
        nodes.lose(0)
        lost = nodes.lost(0)
        nodes.replace(0)
        found = rebuild(nodes.tiers[0], lost)
        assert nodes.files(0) == nodes.wanted[0]
        assert all(fault.node == bad and str(fault).startswith(f"node {bad}: ") for fault in found.faults)


@pytest.mark.parametrize("words", ["1", "xor:4"])
def test_a_flipped_bit_beyond_what_is_protected_is_an_error_by_name(words: str) -> None:
    nodes = Nodes(None, [[4 * MIB]] * 4)
    nodes.protect(layout(4, words))
    for node in range(1, 4):
        for name in nodes.files(node):
            if name.endswith("safetensors") or paths.parse_redundancy_share(name):
                nodes.flip(node, name, 5)
    nodes.lose(0)
    lost = nodes.lost(0)
    tier = nodes.replace(0)
    with pytest.raises(TornFileError, match=r"of 00000-00000\.0\.safetensors of node 0 cannot be") as caught:
        rebuild(tier, lost)
    assert "checksum" in str(caught.value.hint) and caught.value.node == "0"
    assert nodes.files(0) == {}, "nothing is left"


def test_only_the_bad_block_is_lost_at_a_bad_source() -> None:
    """Two sources have a bad block each, at different rows: one loss in each row, which one parity makes good."""
    nodes = Nodes(None, [[6 * MIB]] * 4)
    nodes.protect(layout(4, "rs:2+2"))
    for row, node in enumerate((1, 2, 3)):
        for name in nodes.files(node):
            if name.endswith("safetensors"):
                nodes.flip(node, name, row * MIB)
                nodes.flip(node, name, (3 + row) * MIB)
    nodes.lose(0)
    assert rebuilt(nodes, 0) == nodes.wanted[0]


def test_a_share_that_was_made_of_something_else_is_found_by_the_node_record() -> None:
    """Its own checksums fit: the block that comes out does not, and another share is taken."""
    nodes = Nodes(None, [[MIB], [MIB], [MIB]])
    nodes.protect(layout(3, "2"))
    for holder in (1, 2):
        stored, _ = redundancy.decode_redundancy(nodes.files(holder)[paths.redundancy_record(holder)], path="")
        members = [ref.node for ref in stored.members]
        row = next(r for r in range(2) if members[(members.index(holder) + 2 - r) % 3] == 0)
        forge(nodes, holder, row, bytes(stored.shares[row].size_bytes))
        nodes.silent = {0}
        if holder == 1:
            buffer = bytearray(MIB)
            nodes.lost(0).read_range(paths.pack(0, 0, 0), 0, memoryview(buffer))
            assert buffer == nodes.wanted[0][paths.pack(0, 0, 0)]
    with pytest.raises(ChecksumError, match="does not match the node record"):
        nodes.lost(0).read_range(paths.pack(0, 0, 0), 0, memoryview(bytearray(MIB)))


def test_damaged_foreign_and_missing_redundancy_records() -> None:
    nodes = Nodes(None, [[MIB]] * 4)
    nodes.protect(layout(4, "rs:2+2"))
    nodes.lose(0)
    record = paths.redundancy_record(1)
    whole = nodes.files(1)[record]
    other = Nodes(None, [[MIB]] * 4, seed=1)
    other.protect(layout(4, "rs:2+2"))
    nodes.flip(1, record, 200)
    assert rebuilt(nodes, 0) == nodes.wanted[0]
    for stale in (other.files(1)[record], nodes.files(2)[paths.redundancy_record(2)], b"", whole[:4096]):
        nodes.tiers[1].put(f"{DIRECTORY}/{record}", stale)
        assert rebuilt(nodes, 0) == nodes.wanted[0]
    for node in (1, 2, 3):
        nodes.tiers[node].delete(f"{DIRECTORY}/{paths.redundancy_record(node)}")
    with pytest.raises(TornFileError, match="none of the 3 nodes that answer holds redundancy for node 0"):
        nodes.lost(0)


def test_who_cannot_be_asked_may_answer_later() -> None:
    nodes = Nodes(None, [[3 * MIB]] * 4)
    nodes.protect(layout(4, "xor:4"))
    nodes.lose(0, 1)
    with pytest.raises(StorageError, match="cannot be given back") as caught:
        rebuild(nodes.new_tier(0), nodes.lost(0))
    assert caught.value.retry and "node 1 does not answer" in str(caught.value.hint)
    nodes.silent = {0}
    everybody = open_lost(nodes.manifest, 0, nodes, [3, 2, 1])
    nodes.silent = {0, 1, 2, 3}
    with pytest.raises(StorageError):
        everybody.read_range(paths.pack(0, 0, 0), 0, memoryview(bytearray(10)))
    with pytest.raises(StorageError, match="none of the 3 nodes"):
        open_lost(nodes.manifest, 0, nodes, [1, 2, 3])


def test_a_node_that_goes_away_meanwhile_is_asked_no_more() -> None:
    nodes = Nodes(None, [[8 * MIB]] * 4)
    nodes.protect(layout(4, "rs:2+2"))
    nodes.silent = {0}
    lost = nodes.lost(0)
    nodes.silent = {0, 1}
    nodes.reads.clear()
    tier = nodes.replace(0)
    rebuild(tier, lost, effort=Effort(threads=1, memory_bytes=4 * MIB))
    assert nodes.files(0) == nodes.wanted[0]
    assert len([node for node, *_ in nodes.reads if node == 1]) == 1


def test_a_storage_that_keeps_failing_is_asked_no_more(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [[16 * MIB]] * 4)
    nodes.protect(layout(4, "rs:2+2"))
    nodes.silent = {0}
    lost = nodes.lost(0)
    nodes.tiers[1] = FakeTier(nodes.tiers[1])
    nodes.tiers[1].fail("read_into", times=-1)
    nodes.reads.clear()
    nodes.replace(0)
    rebuild(nodes.tiers[0], lost, effort=Effort(threads=1, memory_bytes=4 * MIB))
    assert nodes.files(0) == nodes.wanted[0]
    assert len([node for node, *_ in nodes.reads if node == 1]) <= symbols.MAX_STORAGE_ERRORS


def test_a_finished_rebuild_is_not_done_again_but_for_what_is_damaged() -> None:
    nodes = Nodes(None, [[5000, 6000]] * 3, objects={0: 700})
    nodes.protect(layout(3, "xor:3"))
    nodes.lose(0)
    lost, tier = nodes.lost(0), nodes.replace(0)
    first = rebuild(tier, lost)
    assert len(first.files) == 3 and first.num_bytes == 11700 and not first.kept
    again = rebuild(tier, lost)
    assert again.files == () and len(again.kept) == 3
    nodes.flip(0, paths.pack(0, 0, 1), 77)
    nodes.tiers[0].put(f"{DIRECTORY}/{paths.node_objects(0)}", b"short")
    watched = FakeTier(tier)
    repaired = rebuild(watched, lost)
    order = [op.path.rsplit("/", 1)[-1] for op in watched.log if op.kind in ("delete", "create_pack", "put")]
    assert order[0] == order[-1] == paths.node_record(0), "nothing is believed in between"
    assert set(repaired.files) == {paths.pack(0, 0, 1), paths.node_objects(0)}
    assert nodes.files(0) == nodes.wanted[0]


def test_files_without_a_node_record_are_written_again_however_whole_they_look() -> None:
    nodes = Nodes(None, [[5000], [6000], [7000]])
    nodes.protect(layout(3, "xor:3"))
    nodes.lose(0)
    lost, tier = nodes.lost(0), nodes.replace(0)
    name = paths.pack(0, 0, 0)
    tier.put(f"{DIRECTORY}/{name}", nodes.wanted[0][name])
    assert rebuild(tier, lost).files == (name,)


def test_nothing_is_written_where_it_cannot_end_well() -> None:
    nodes = Nodes(None, [[5000] * 3] * 4)
    nodes.protect(layout(4, "xor:4"))
    nodes.lose(0, 1)
    lost, tier = nodes.lost(0), FakeTier(nodes.new_tier(0))
    with pytest.raises(CheckpointError):
        rebuild(tier, lost)
    assert {op.kind for op in tier.log} <= {"list", "open_pack", "get"}


def test_a_replacement_makes_its_own_share_and_the_next_loss_is_survived() -> None:
    nodes = Nodes(None, [[3 * MIB + 5, 20], [MIB], [2 * MIB], [10]], objects={2: 40})
    plan = layout(4, "xor:4")
    nodes.protect(plan)
    for node in range(4):
        nodes.silent = {node}
        rebuilt(nodes, node)
        nodes.silent = set()
        nodes.protect(plan, nodes=[node])
        assert nodes.own_files(node) == nodes.wanted[node]


def test_two_layouts_at_once_the_one_that_most_agree_on_counts() -> None:
    nodes = Nodes(None, [[MIB]] * 4)
    nodes.protect(layout(4, "rs:2+2"))
    other = RedundancySet(
        kind="copies", num_data=1, num_parity=1, members=(0, 2, 1, 3)
    )  # node 3 has the copy of node 0
    protect(nodes.tiers[1], nodes.manifest, 1, other, nodes)
    nodes.lose(0)
    assert rebuilt(nodes, 0) == nodes.wanted[0]


def test_shares_of_sizes_that_the_set_does_not_give_do_not_count() -> None:
    nodes = Nodes(None, [[3 * MIB], [3 * MIB], [3 * MIB]])
    nodes.protect(layout(3, "xor:3"))
    for node in (1, 2):
        share = bytes(MIB)
        forge(nodes, node, 0, share)
    nodes.lose(0)
    with pytest.raises(TornFileError) as caught:
        rebuilt(nodes, 0)
    assert caught.value.hint == "node 1 has made no redundancy; node 2 has made no redundancy"


def test_the_digest_of_the_objects_counts_too() -> None:
    nodes = Nodes(None, [[10], [10]], objects={0: 2 * MIB}, objects_blake3="ab" * 32)
    nodes.protect(layout(2, "1"))
    nodes.lose(0)
    with pytest.raises(ChecksumError, match="the objects does not match"):
        rebuilt(nodes, 0)
    assert nodes.files(0) == {}
