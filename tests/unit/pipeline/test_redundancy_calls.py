"""Redundancy on disks of the nodes' own, by the flusher's operations: made, given back, surveyed; and what a restore reads meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
from joined_disks import LocalJob, LocalWorld
from whole_saves import EVENTS, Promises

from safehold.agent.redundancy_calls import RedundancyCalls
from safehold.agent.redundancy_wire import set_from_wire, set_to_wire
from safehold.config import Config
from safehold.errors import SkippedError, StepNotFoundError, StorageFullError, TornFileError
from safehold.format import paths, records
from safehold.pipeline import maintenance
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.recovering import RecoveringTier, RedundancySource
from safehold.pipeline.verify import verify
from safehold.policy.placement import Layout, parse_scheme, place
from safehold.types import CommitId

NODES = ["a", "b", "c", "d"]
COMMIT = CommitId(10, 1, 0)
DIRECTORY = paths.checkpoint_dir(COMMIT)
SHARE = 2 << 20
"""One block of objects, one of the pack."""
KEEP = {"last": 3, "every_steps": None, "every_hours": None, "best": None}


class Cluster:
    """Nodes with a saved checkpoint, and the flusher's operations on each."""

    def __init__(self, *steps: int) -> None:
        self.world = LocalWorld(NODES)
        job = LocalJob(self.world, Promises())
        job.open()
        for version, step in enumerate(steps or (10,)):
            job.save(step, version + 1)
        self.before = {name: self.files(name) for name in NODES}
        self.room_asked: list[int] = []
        self.numbers = 0

    def files(self, name: str, commit: CommitId = COMMIT) -> dict[str, bytes]:
        """What a node has of the checkpoint."""
        tier, directory = self.world.tiers[name], paths.checkpoint_dir(commit)
        return {
            entry.name: tier.get(f"{directory}/{entry.name}", limit_bytes=1 << 30) for entry in tier.list(directory)
        }

    def call(self, here: int, operation: str, **arguments: Any) -> Any:
        calls = RedundancyCalls(
            joined=lambda: self.world.view(here),
            config=lambda: Config(),
            pacer=lambda: None,
            make_room=lambda arguments, need: bool(self.room_asked.append(need)),
            events=EVENTS,
        )
        self.numbers += 1
        given = {"number": self.numbers, "commit": [10, 1, 0], "deadline_s": 20.0, "keep": KEEP, "incarnation": 1}
        return calls.operations[operation]({**given, **arguments})

    def protect(self, layout: Layout, at: Mapping[int, str] | None = None) -> None:
        """Every node makes its share."""
        for of in layout.sets:
            for node in of.members:
                self.call(node, "protect", node=node, set=set_to_wire(of), at=at or dict(enumerate(self.world.nodes)))

    def lose(self, *nodes: int) -> None:
        """Empty disks come in the place of some; the run is opened, which brings the small files."""
        names = [f"new-{name}" if node in nodes else name for node, name in enumerate(self.world.nodes)]
        kept = {name: disk for name, disk in self.world.disks.items() if name in names}
        self.world = LocalWorld(names, kept)
        LocalJob(self.world, Promises()).open()

    def find(self, node: int = 0) -> Any:
        arguments = {"step": None, "exclude": []}
        return maintenance.find(RecoveringTier(self.world.view(node)), Config(), arguments, EVENTS)


def layout_of(words: str) -> Layout:
    scheme = parse_scheme(copies=words) if words.isdigit() else parse_scheme(parity=words)
    assert scheme is not None
    return place(scheme, range(len(NODES)))


@pytest.mark.parametrize("words", ["1", "xor:4", "rs:2+2", "3"])
def test_whatever_the_scheme_promises_is_found_read_and_given_back(words: str) -> None:
    layout = layout_of(words)
    promised = [lost for count in (1, 2, 3) for lost in combinations(range(4), count)]
    promised = [lost for lost in promised if all(of.survives(lost) for of in layout.sets)]
    assert len(promised) >= 4
    for lost in promised[:: max(1, len(promised) // 4)]:
        cluster = Cluster()
        cluster.protect(layout)
        shares = {name: cluster.files(name) for name in NODES}
        cluster.lose(*lost)
        found = cluster.find(lost[0])
        assert found["commit"] == [10, 1, 0] and found["skipped"] == []
        assert sorted(found["holders"]) == [node for node in range(4) if node not in lost]
        at = found["holders"]
        for node in lost:
            cluster.call(node, "rebuild", node=node, at=at)
        survey = cluster.call(0, "survey")
        assert survey["at"] == dict(enumerate(cluster.world.nodes)) and survey["names"] == NODES
        assert survey["protected"] == [node for node in range(4) if node not in lost]
        sets = [set_from_wire(one) for one in survey["sets"]]
        for node in lost:
            of = next(of for of in sets if node in of.members)
            cluster.call(node, "protect", node=node, set=set_to_wire(of), at=survey["at"])
        for node, name in enumerate(cluster.world.nodes):
            whole = {path: data for path, data in cluster.files(name).items() if not path.startswith("redundancy")}
            assert whole == cluster.before[NODES[node]]
            again = {
                path: data for path, data in cluster.files(name).items() if "redundancy" in path and "json" not in path
            }
            assert again == {path: data for path, data in shares[NODES[node]].items() if path in again} and again
        assert verify(cluster.world.view(), COMMIT).faults == ()


def test_a_restore_reads_records_objects_and_packs_of_a_lost_node() -> None:
    cluster = Cluster()
    cluster.protect(layout_of("xor:4"))
    cluster.lose(2)
    tier = RecoveringTier(cluster.world.view(1))
    catalog = Catalog(tier)
    checkpoint = catalog.load(COMMIT)
    catalog.check_files(checkpoint)
    for name, data in cluster.before["c"].items():
        if name.endswith(".safetensors"):
            source = RedundancySource(tier, checkpoint.manifest, 2, name)
            buffer = memoryview(bytearray(len(data)))
            assert bytes(source.read(0, len(data), buffer)) == data and source.name == "parity"
            assert bytes(source.read(7, 99, buffer)) == data[7:106]
        else:
            assert tier.get(f"{DIRECTORY}/{name}", limit_bytes=1 << 20) == data
    assert {entry.name for entry in cluster.world.tiers["new-c"].list(DIRECTORY)} == {paths.MANIFEST}, (
        "nothing is written"
    )
    with pytest.raises(FileNotFoundError):
        tier.get(f"{DIRECTORY}/node-00009.json", limit_bytes=1000)
    tier.close()


@pytest.mark.parametrize("name", ["node-00001.json", "node-00001.objects", "00001-00001.0.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "missing", "shorter"])
def test_what_is_damaged_on_a_node_that_is_there_is_replaced(name: str, damage: str) -> None:
    cluster = Cluster()
    cluster.protect(layout_of("1"))
    path, tier = f"{DIRECTORY}/{name}", cluster.world.tiers["b"]
    data = bytearray(cluster.before["b"][name])
    if damage == "missing":
        tier.delete(path)
    else:
        data[len(data) // 2] ^= 1
        tier.put(path, bytes(data[:-1] if damage == "shorter" else data))
    view = RecoveringTier(cluster.world.view(1))
    found = cluster.find()
    assert found["commit"] == [10, 1, 0] and found["skipped"] == []
    if name.endswith("safetensors"):
        source = RedundancySource(view, records.decode_manifest(found["manifest"], path=path), 1, name)
        buffer = memoryview(bytearray(len(data)))
        assert bytes(source.read(0, len(data), buffer)) == cluster.before["b"][name] and source.name == "copy"
    else:
        assert view.get(path, limit_bytes=len(data)) == cluster.before["b"][name]


def test_more_losses_than_promised_are_named_with_what_would_have_kept_them() -> None:
    cluster = Cluster()
    cluster.protect(layout_of("xor:4"))
    cluster.lose(1, 3)
    with pytest.raises(StepNotFoundError) as caught:
        cluster.find()
    assert "the files of nodes b, d are lost" in str(caught.value) and "xor:4 survives the loss of 1" in str(
        caught.value
    )
    manifest = cluster.world.tiers["a"].get(f"{DIRECTORY}/{paths.MANIFEST}", limit_bytes=1 << 20)
    tier = RecoveringTier(cluster.world.view())
    with pytest.raises(TornFileError) as torn:
        tier.lost(records.decode_manifest(manifest, path="manifest"), 3)
    assert torn.value.hint == "parity='rs:2+2' would have kept them" and torn.value.node == "b"


@pytest.mark.parametrize("name", ["node-00001.json", "node-00001.objects"])
def test_what_is_damaged_and_has_no_redundancy_is_refused_for_what_is_wrong_with_it(name: str) -> None:
    cluster = Cluster()
    path, tier = f"{DIRECTORY}/{name}", cluster.world.tiers["b"]
    tier.put(path, cluster.before["b"][name] + b"more")
    view = RecoveringTier(cluster.world.view(2))
    with pytest.raises(TornFileError) as caught:
        view.get(path, limit_bytes=len(cluster.before["b"][name]))
    assert "redundancy" not in str(caught.value)
    tier.delete(path)
    view.forget()
    with pytest.raises(FileNotFoundError if "objects" in name else TornFileError):
        view.get(path, limit_bytes=1 << 20)


def test_without_redundancy_a_lost_node_is_named_and_an_older_checkpoint_is_used() -> None:
    cluster = Cluster(5, 10)
    for node in range(4):
        of = layout_of("1").set_of(node)
        assert of is not None
        names = dict(enumerate(NODES))
        cluster.call(node, "protect", node=node, set=set_to_wire(of), at=names, commit=[5, 1, 0])
    cluster.lose(2)
    found = cluster.find()
    assert found["commit"] == [5, 1, 0] and len(found["skipped"]) == 1
    assert "step 10 cannot be used: the files of node c are lost" in found["skipped"][0]
    assert "copies=1 would have kept them" in found["skipped"][0]


def test_a_rebuild_that_was_cut_off_leaves_a_node_lost() -> None:
    cluster = Cluster()
    cluster.protect(layout_of("1"))
    cluster.lose(2)
    pack = next(name for name in cluster.before["c"] if name.endswith(".safetensors"))
    cluster.world.tiers["new-c"].put(f"{DIRECTORY}/{pack}", bytes(len(cluster.before["c"][pack])))
    survey = cluster.call(0, "survey")
    assert 2 not in survey["at"]
    assert cluster.find()["commit"] == [10, 1, 0]
    assert cluster.call(2, "rebuild", node=2, at=survey["at"])["bytes"] > 0
    assert cluster.files("new-c") == cluster.before["c"]


def test_no_room_for_redundancy_and_the_next_save_is_told_before_anything_is_written() -> None:
    cluster = Cluster()
    of = layout_of("1").sets[0]
    node = of.members[0]
    disk = cluster.world.disks[NODES[node]]
    mine = sum(len(data) for name, data in cluster.before[NODES[node]].items() if not name.endswith(".json"))
    arguments = {"node": node, "set": set_to_wire(of), "at": dict(enumerate(NODES))}
    disk.capacity_bytes = disk._used_bytes() + SHARE + mine - 1
    before = cluster.files(NODES[node])
    with pytest.raises(StorageFullError) as caught:
        cluster.call(node, "protect", **arguments)
    assert "of redundancy, and the next save of" in caught.value.message and cluster.room_asked == [SHARE + mine]
    assert cluster.files(NODES[node]) == before
    disk.capacity_bytes = disk._used_bytes() + SHARE + mine
    assert cluster.call(node, "protect", **arguments)["bytes"] > 0
    disk.capacity_bytes = disk._used_bytes()
    cluster.call(node, "protect", **arguments)  # it is there already, and needs no room


def test_what_an_older_checkpoint_takes_counts_as_room_for_the_next_save() -> None:
    cluster = Cluster(5, 10)
    of = layout_of("1").sets[0]
    node = of.members[0]
    disk = cluster.world.disks[NODES[node]]
    mine = sum(len(data) for name, data in cluster.before[NODES[node]].items() if not name.endswith(".json"))
    assert mine > 0
    disk.capacity_bytes = disk._used_bytes() + SHARE
    cluster.call(node, "protect", node=node, set=set_to_wire(of), at=dict(enumerate(NODES)))
    assert cluster.room_asked == []


def test_work_is_given_up_by_its_number_and_leaves_nothing() -> None:
    cluster = Cluster()
    of = layout_of("1").sets[0]
    calls = RedundancyCalls(
        joined=cluster.world.view, config=Config, pacer=lambda: None, make_room=lambda *_: False, events=EVENTS
    )
    calls.operations["stop_protecting"]({"number": 77})
    given = {"number": 77, "commit": [10, 1, 0], "deadline_s": 20.0, "keep": KEEP, "incarnation": 1}
    with pytest.raises(SkippedError):
        calls.operations["protect"]({**given, "node": of.members[0], "set": set_to_wire(of), "at": {0: "a", 1: "b"}})
    assert not [name for name in cluster.files("a") if name.startswith("redundancy")]


def test_a_checkpoint_that_has_gone_meanwhile_is_told_so() -> None:
    cluster = Cluster()
    of = layout_of("1").sets[0]
    for tier in cluster.world.tiers.values():
        tier.delete_tree(DIRECTORY)
    with pytest.raises(SkippedError, match="not there any more"):
        cluster.call(of.members[0], "protect", node=of.members[0], set=set_to_wire(of), at=dict(enumerate(NODES)))
