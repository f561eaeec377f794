"""Making redundancy: what is written, from what, and what is left when it fails."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import msgspec
import pytest
from redundant_nodes import COMMIT, DIRECTORY, Nodes

from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    ChecksumError,
    DeadlineError,
    ManifestError,
    SkippedError,
    StorageError,
    TornFileError,
)
from safehold.format import crc, paths, records, redundancy
from safehold.pipeline.block_work import Effort, Watch, in_threads
from safehold.pipeline.redundancy import check_against, protect
from safehold.pipeline.symbols import Symbols, view_of
from safehold.policy.placement import parse_scheme, place
from safehold.policy.stripes import Geometry, stream_of
from safehold.testing.fake_tier import FakeTier
from safehold.types import CommitId

MIB = 1 << 20


def layout(count: int, **words: str | int):
    scheme = parse_scheme(**words)
    assert scheme is not None
    return place(scheme, range(count))


def shares(nodes: Nodes, node: int) -> dict[str, bytes]:
    return {name: data for name, data in nodes.files(node).items() if paths.parse_redundancy_share(name)}


def test_a_copy_is_the_blocks_of_another_node() -> None:
    nodes = Nodes(None, [[5000], [MIB + 3, 10]], objects={1: 20})
    made = nodes.protect(layout(2, copies=1))
    pack, more = nodes.wanted[1][paths.pack(1, 1, 0)], nodes.wanted[1][paths.pack(1, 1, 1)]
    blob = nodes.wanted[1][paths.node_objects(1)]
    # Each file begins at a block's border.
    assert shares(nodes, 0) == {"redundancy-00000.0": blob.ljust(MIB, b"\0") + pack.ljust(2 * MIB, b"\0") + more}
    assert shares(nodes, 1) == {"redundancy-00001.0": nodes.wanted[0][paths.pack(0, 0, 0)]}
    assert made[0].shares[0].crc32 == crc.crc(shares(nodes, 0)["redundancy-00000.0"])


def test_xor_of_four_nodes() -> None:
    """Known answer: with one block a chunk, node i holds the XOR of chunk c of node i + 1 + c."""
    nodes = Nodes(None, [[3 * MIB - 7], [3 * MIB], [2 * MIB], [5]])
    nodes.protect(layout(4, parity="xor:4"))
    own = [nodes.wanted[node][paths.pack(node, node, 0)].ljust(3 * MIB, b"\0") for node in range(4)]
    for node in range(4):
        total = 0
        for chunk in range(3):
            total ^= int.from_bytes(own[(node + 1 + chunk) % 4][chunk * MIB : (chunk + 1) * MIB], "little")
        (share,) = shares(nodes, node).values()
        assert share.ljust(MIB, b"\0") == total.to_bytes(MIB, "little")


def test_xor_of_many_small_files_in_buffers_that_are_used_again() -> None:
    rng = random.Random(4)
    nodes = Nodes(None, [[rng.randrange(1, 5000) for _ in range(12)] for _ in range(3)])
    nodes.protect(layout(3, parity="xor:3"), effort=Effort(threads=1, memory_bytes=6 * MIB))
    own = [[nodes.wanted[node][paths.pack(node, node, part)] for part in range(12)] for node in range(3)]
    for node in range(3):
        (share,) = shares(nodes, node).values()
        for row in range(6):
            first, second = own[(node + 1) % 3][row], own[(node + 2) % 3][6 + row]
            total = int.from_bytes(first, "little") ^ int.from_bytes(second, "little")
            assert int.from_bytes(share[row * MIB : (row + 1) * MIB], "little") == total


def test_reed_solomon_of_known_bytes() -> None:
    """Frozen: what rs:2+2 gives for these bytes is part of the format."""
    nodes = Nodes(None, [[4096, 4096]] * 4, seed=5)
    made = nodes.protect(layout(4, parity="rs:2+2"))
    sums = [[share.crc32 for share in made[node].shares] for node in range(4)]
    assert sums == [
        [756312628, 249907811],
        [2087144021, 4089617711],
        [3868887198, 1079773182],
        [2705262479, 3647085133],
    ]


def test_the_size_is_what_geometry_says_and_about_m_of_k() -> None:
    nodes = Nodes(None, [[8 * MIB]] * 6)
    made = nodes.protect(layout(6, parity="rs:4+2"))
    for record in made.values():
        assert [share.size_bytes for share in record.shares] == [2 * MIB, 2 * MIB]
    plan = layout(6, parity="rs:4+2").sets[0]
    streams = [stream_of(node_record(nodes, node)) for node in plan.members]
    assert [Geometry(plan, streams).held_bytes(position) for position in range(6)] == [4 * MIB] * 6


def node_record(nodes: Nodes, node: int):
    return records.decode_node_record(nodes.wanted[node][paths.node_record(node)], path="")


def test_the_record_is_written_last_and_keeps_the_node_records(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [[5000], [6000], [7000]])
    tier = nodes.tiers[0] = FakeTier(nodes.tiers[0])
    record = nodes.protect(layout(3, parity="xor:3"), nodes=[0])[0]
    order = [op.path.rsplit("/", 1)[-1] for op in tier.log if op.kind in ("create_pack", "finish", "sync_tree", "put")]
    assert order == ["redundancy-00000.0", "redundancy-00000.0", "1-0", "redundancy-00000.json"]
    found, stored = redundancy.decode_redundancy(nodes.files(0)["redundancy-00000.json"], path="")
    assert found == record
    assert list(stored) == [nodes.wanted[ref.node][paths.node_record(ref.node)] for ref in record.members]


def test_what_is_there_is_left_and_costs_no_reading() -> None:
    nodes = Nodes(None, [[5000], [6000], [7000]])
    first = nodes.protect(layout(3, parity="xor:3"))
    nodes.reads.clear()
    assert nodes.protect(layout(3, parity="xor:3")) == first
    assert not nodes.reads


@pytest.mark.parametrize("name", ["redundancy-00000.0", "redundancy-00000.json"])
def test_what_is_there_and_does_not_fit_is_made_anew(name: str) -> None:
    nodes = Nodes(None, [[5000], [6000], [7000]])
    nodes.protect(layout(3, parity="xor:3"))
    before = nodes.files(0)
    nodes.tiers[0].put(f"{DIRECTORY}/{name}", before[name][:-1])
    nodes.protect(layout(3, parity="xor:3"))
    assert {n: d for n, d in nodes.files(0).items() if n != "redundancy-00000.json"} == {
        n: d for n, d in before.items() if n != "redundancy-00000.json"
    }
    redundancy.decode_redundancy(nodes.files(0)["redundancy-00000.json"], path="")


def test_another_scheme_takes_the_place_of_the_old() -> None:
    nodes = Nodes(None, [[5000], [6000], [7000]])
    nodes.protect(layout(3, copies=2))
    assert len(shares(nodes, 0)) == 2
    nodes.protect(layout(3, parity="xor:3"))
    assert len(shares(nodes, 0)) == 1


def test_debris_of_an_interrupted_call_is_in_nobodys_way() -> None:
    nodes = Nodes(None, [[5000], [6000], [7000]])
    nodes.tiers[0].put(f"{DIRECTORY}/redundancy-00000.0", b"half")
    nodes.tiers[0].put(f"{DIRECTORY}/redundancy-00000.1", b"of an earlier scheme")
    nodes.tiers[0].put(f"{DIRECTORY}/redundancy-00001.0", b"another's")
    nodes.protect(layout(3, parity="xor:3"), nodes=[0])
    assert set(shares(nodes, 0)) == {"redundancy-00000.0", "redundancy-00001.0"}


@pytest.mark.parametrize("kind", ["pack", "objects", "record"])
def test_damage_of_a_member_stops_it_by_name(kind: str) -> None:
    nodes = Nodes(None, [[2 * MIB], [2 * MIB], [2 * MIB]], objects={2: 100})
    name = {"pack": paths.pack(2, 2, 0), "objects": paths.node_objects(2), "record": paths.node_record(2)}[kind]
    nodes.flip(2, name, 70)
    with pytest.raises((ChecksumError, TornFileError)) as caught:
        protect(nodes.tiers[0], nodes.manifest, 0, layout(3, copies=2).sets[0], nodes)
    assert caught.value.path == f"{DIRECTORY}/{name}"
    assert set(nodes.files(0)) == set(nodes.wanted[0]), "nothing is left"


def test_a_missing_file_a_silent_node_and_a_failing_storage_stop_it_by_name(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [[5000], [6000], [7000]])
    one = layout(3, copies=2).sets[0]
    path = f"{DIRECTORY}/{paths.pack(2, 2, 0)}"
    nodes.tiers[2] = inner = FakeTier(nodes.tiers[2])
    inner.fail("read_into", path=path, times=-1)
    with pytest.raises(StorageError) as caught:
        protect(nodes.tiers[0], nodes.manifest, 0, one, nodes)
    assert caught.value.node == "2"
    inner.heal()
    inner.delete(path)
    with pytest.raises(TornFileError, match="missing") as torn:
        protect(nodes.tiers[0], nodes.manifest, 0, one, nodes)
    assert torn.value.path == path
    nodes.lose(1)
    with pytest.raises(AgentUnavailableError, match="node 1"):
        protect(nodes.tiers[0], nodes.manifest, 0, one, nodes)
    assert set(nodes.files(0)) == set(nodes.wanted[0])


def test_a_checkpoint_that_is_not_committed_is_not_protected() -> None:
    nodes = Nodes(None, [[5000], [6000]])
    one = layout(2, copies=1).sets[0]
    nodes.tiers[0].delete(f"{DIRECTORY}/{paths.MANIFEST}")
    with pytest.raises(SkippedError, match="not committed"):
        protect(nodes.tiers[0], nodes.manifest, 0, one, nodes)
    assert not nodes.reads


def test_a_checkpoint_that_is_deleted_meanwhile_leaves_nothing() -> None:
    nodes = Nodes(None, [[5000], [6000]])
    tier = nodes.tiers[0]
    effort = Effort(pace=lambda num_bytes: tier.delete_tree(DIRECTORY))
    with pytest.raises((SkippedError, StorageError)):
        protect(tier, nodes.manifest, 0, layout(2, copies=1).sets[0], nodes, effort=effort)
    assert not tier.list(paths.step_dir(COMMIT.step))


def test_a_checkpoint_that_is_un_committed_meanwhile_gets_no_record() -> None:
    """Whoever deletes it takes the manifest first."""
    nodes = Nodes(None, [[5000], [6000]])
    tier = nodes.tiers[0]
    effort = Effort(pace=lambda num_bytes: tier.delete(f"{DIRECTORY}/{paths.MANIFEST}"))
    with pytest.raises(SkippedError, match="not committed here, or not any more"):
        protect(tier, nodes.manifest, 0, layout(2, copies=1).sets[0], nodes, effort=effort)
    assert not any(paths.is_redundancy(name) for name in nodes.files(0))


def test_records_of_another_checkpoint_node_or_run() -> None:
    nodes = Nodes(None, [[5000], [6000]])
    record = nodes.protect(layout(2, copies=1))[0]
    check_against(record, nodes.manifest, 0, path="p")
    for manifest, node in (
        (nodes.manifest, 1),
        (msgspec.structs.replace(nodes.manifest, run_id="other"), 0),
        (msgspec.structs.replace(nodes.manifest, commit=CommitId(8, 1, 0)), 0),
        (msgspec.structs.replace(nodes.manifest, nodes=nodes.manifest.nodes[:1]), 0),
        (Nodes(None, [[5000], [6000]], seed=1).manifest, 0),
    ):
        with pytest.raises(ManifestError, match="another node, checkpoint or run"):
            check_against(record, manifest, node, path="p")


def test_the_deadline_and_being_cancelled() -> None:
    nodes = Nodes(None, [[5000], [6000]])
    one = layout(2, copies=1).sets[0]
    with pytest.raises(DeadlineError, match="making the redundancy of step 7 on node 0"):
        protect(nodes.tiers[0], nodes.manifest, 0, one, nodes, effort=Effort(deadline_s=0.0))
    with pytest.raises(SkippedError, match="given up"):
        protect(nodes.tiers[0], nodes.manifest, 0, one, nodes, effort=Effort(cancelled=lambda: True))
    assert set(nodes.files(0)) == set(nodes.wanted[0])


def test_sets_that_are_not_of_this_node_or_checkpoint() -> None:
    nodes = Nodes(None, [[5000], [6000]])
    with pytest.raises(ValueError, match="not in the set"):
        protect(nodes.tiers[0], nodes.manifest, 7, layout(2, copies=1).sets[0], nodes)
    with pytest.raises(ValueError, match="node 2 has no part"):
        protect(nodes.tiers[0], nodes.manifest, 0, layout(3, copies=2).sets[0], nodes)


def test_memory_is_bounded_and_reads_are_large() -> None:
    nodes = Nodes(None, [[9 * MIB], [9 * MIB], [9 * MIB]])
    nodes.protect(layout(3, parity="xor:3"), nodes=[0], effort=Effort(threads=1, memory_bytes=6 * MIB))
    sizes = [length for _, path, _, length in nodes.reads if path.endswith("safetensors")]
    assert max(sizes) == 2 * MIB and sum(sizes) == 9 * MIB
    assert Effort(threads=4, memory_bytes=MIB).batch_blocks(7) == 1
    assert Effort(threads=1, memory_bytes=1 << 40).batch_blocks(7) == 4


def test_pace_is_told_what_moved() -> None:
    nodes, told = Nodes(None, [[3 * MIB], [3 * MIB]]), list[int]()
    nodes.protect(layout(2, copies=1), nodes=[0], effort=Effort(pace=told.append, threads=1))
    assert sum(told) == 6 * MIB


def test_a_node_that_hangs_for_ever_is_not_waited_for() -> None:
    class Hanging(Nodes):
        gate = threading.Event()

        def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
            if path.endswith("safetensors"):
                self.gate.wait(20)
            super().read_into(node, path, offset, buffer)

    nodes = Hanging(None, [[5000], [6000]])
    begun = time.monotonic()
    effort = Effort(deadline_s=0.1, patience_s=0.1)
    with pytest.raises(DeadlineError, match="did not end within"):
        protect(nodes.tiers[0], nodes.manifest, 0, layout(2, copies=1).sets[0], nodes, effort=effort)
    assert time.monotonic() - begun < 5
    nodes.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("redundancy-"):
            thread.join(10)
    assert not any(paths.is_redundancy(name) for name in nodes.files(0))


def test_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(None, [[5000], [6000]])
    effort = Effort(cancelled=lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        protect(nodes.tiers[0], nodes.manifest, 0, layout(2, copies=1).sets[0], nodes, effort=effort)
    assert paths.redundancy_record(0) not in nodes.files(0)
    nodes.protect(layout(2, copies=1))
    assert paths.redundancy_record(0) in nodes.files(0)


def test_no_threads_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(None, [[5000], [6000]])
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
    with pytest.raises(StorageError, match="no thread to work with: can't start"):
        nodes.protect(layout(2, copies=1))
    assert set(nodes.files(0)) == set(nodes.wanted[0])


def test_threads_stop_at_the_first_failure_and_none_is_left() -> None:
    begun, before = [], threading.active_count()

    def work(job: int, buffers: list[memoryview]) -> int:
        begun.append(job)
        raise StorageError("the first")

    effort = Effort(threads=2)
    with pytest.raises(StorageError, match="the first"):
        in_threads(iter(range(1000)), work, num_buffers=1, effort=effort, watch=Watch(effort, "this"))
    assert len(begun) <= 2 and threading.active_count() == before


def test_a_node_is_never_found_silent_without_a_reason() -> None:
    """Of several threads that read of it one is told, and the others find out; whichever raises first has the reason."""
    nodes = Nodes(None, [[5000], [6000]], seed=1)
    one = layout(2, copies=1).sets[0]
    decoded = [
        records.decode_node_record(nodes.wanted[node][paths.node_record(node)], path="r") for node in one.members
    ]
    seen: list[bool] = []

    class Watched(Symbols):
        def _note(self, node: int, name: str, block: int | None, error: CheckpointError) -> None:
            seen.append(self.answers(one.members.index(node)))
            super()._note(node, name, block, error)

    symbols = Watched(view_of(nodes.manifest.commit, one, decoded, [b"", b""]), nodes, one.members)
    nodes.lose(one.members[1])
    assert symbols.data(one.stripe_of_chunk(1, 0), 0, 0, 1, memoryview(bytearray(1 << 20)))
    assert seen[0] and not symbols.answers(1)
    assert len(symbols.faults) == 1
