"""What version 1 wrote is still read, value for value; each kind of damage is refused, by name and with its path."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from safehold.errors import ChecksumError, FormatVersionError, IntegrityError, ManifestError, TornFileError
from safehold.format import crc, document, dtypes, objects, pack, paths, plan, records, redundancy
from safehold.types import CommitId, Rect

HERE = Path(__file__).parent
WHOLE = HERE / "v1" / "whole"
DAMAGED = HERE / "v1" / "damaged"


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make_v1", HERE / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_maker()
FILES = sorted(str(path.relative_to(WHOLE)) for path in WHOLE.rglob("*") if path.is_file())
DIRECTORY = paths.checkpoint_dir(CommitId(10, 3, 0))
PLAN = next(path for path in FILES if path.startswith(paths.PLANS))
PACKS = [f"{DIRECTORY}/{paths.pack(0, rank, 0)}" for rank in range(2)]
REDUNDANCY, SHARE = (f"{DIRECTORY}/{name}" for name in (paths.redundancy_record(0), paths.redundancy_share(0, 0)))
BARE = [*PACKS, SHARE]


def whole(path: str) -> bytes:
    return (WHOLE / path).read_bytes()


def node_record() -> records.NodeRecord:
    path = f"{DIRECTORY}/{paths.node_record(0)}"
    return records.decode_node_record(whole(path), path=path)


def read_pack(data: bytes, *, path: str) -> pack.PackHeader:
    """Verify a pack against its node record, as a reader of format.md does."""
    record = next(entry for entry in node_record().packs if path.endswith(entry.file))
    if len(data) != record.size_bytes:
        raise TornFileError(f"{record.size_bytes} bytes expected, {len(data)} there", path=path)
    if not np.array_equal(crc.crc_blocks(data), crc.decode_crcs(record.block_crcs)):
        raise ChecksumError("a block does not match its checksum", path=path)
    return pack.parse_header(data, len(data), path=path)


def read_share(data: bytes, *, path: str) -> bytes:
    """Verify a share against its record, as a reader of format.md does."""
    (share,) = redundancy.decode_redundancy(whole(REDUNDANCY), path=REDUNDANCY)[0].shares
    if len(data) != share.size_bytes:
        raise TornFileError(f"{share.size_bytes} bytes expected, {len(data)} there", path=path)
    if not np.array_equal(crc.crc_blocks(data), crc.decode_crcs(share.block_crcs)):
        raise ChecksumError("a block does not match its checksum", path=path)
    return data


def reader(path: str) -> Callable[..., Any]:
    name = path.rsplit("/", 1)[-1]
    if path in PACKS:
        return read_pack
    table: dict[str, Callable[..., Any]] = {
        paths.RUN_JSON: records.decode_run,
        paths.MANIFEST: records.decode_manifest,
        paths.node_record(0): records.decode_node_record,
        paths.node_objects(0): objects.parse,
        paths.redundancy_record(0): redundancy.decode_redundancy,
        paths.redundancy_share(0, 0): read_share,
        paths.tombstone(3): records.decode_tombstone,
        "part-0": plan.decode_part,
        "part-1": plan.decode_part,
    }
    for prefix, read in (
        (paths.PINS, records.decode_pin),
        (paths.LEASES, records.decode_lease),
        (paths.QUARANTINES, records.decode_quarantine),
        (paths.INCARNATIONS, records.decode_incarnation),
        (paths.PLANS, plan.decode_plan),
    ):
        if path.startswith(prefix + "/"):
            return read
    return table[name]


def test_the_set_is_complete() -> None:
    assert len(FILES) == 16
    kinds = {document.seal(kind, {})[:20] for kind in document.MAX_BYTES}
    assert kinds == {whole(path)[:20] for path in FILES if path not in BARE}


@pytest.mark.parametrize("path", FILES)
def test_reads_every_whole_file(path: str) -> None:
    assert reader(path)(whole(path), path=path) is not None


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("kind", ["flipped", "cut-one", "cut-half", "empty", "tail", "foreign", "newer"])
def test_refuses_damage_by_name(path: str, kind: str) -> None:
    bad = DAMAGED / kind / path
    if kind == "newer" and path in BARE:
        assert not bad.exists()
        return
    with pytest.raises(IntegrityError) as caught:
        reader(path)(bad.read_bytes(), path=path)
    assert caught.value.path == path
    assert path in str(caught.value)
    if kind == "newer":
        assert type(caught.value) is FormatVersionError and "format 2" in str(caught.value)
    else:
        assert type(caught.value) in (ManifestError, TornFileError, ChecksumError)
    if kind == "foreign" and path not in BARE:
        assert "expected, this one is of kind" in str(caught.value)


def test_records_say_what_they_said() -> None:
    for path, data in make.build_small().items():
        assert reader(path)(data, path=path) == reader(path)(whole(path), path=path)
        assert data == whole(path), "records of version 1 are still written byte for byte"
    manifest = records.decode_manifest(whole(f"{DIRECTORY}/manifest.json"), path="manifest")
    assert (manifest.commit, manifest.world_size, manifest.final) == (CommitId(10, 3, 0), 2, True)
    assert manifest.metrics["loss"] == 2.5 and math.isnan(manifest.metrics["grad_norm"])
    assert manifest.plan_digest == PLAN.rsplit("/")[-1] == plan.digest(whole(PLAN))
    assert manifest.plan_size_bytes == len(whole(PLAN))
    node = whole(f"{DIRECTORY}/node-00000.json")
    assert (manifest.nodes[0].size_bytes, manifest.nodes[0].blake3) == (len(node), document.digest(node))
    assert manifest.crc32 == crc.crc(b"".join(whole(path) for path in PACKS))
    assert records.encode_manifest(manifest) == whole(f"{DIRECTORY}/manifest.json")
    assert records.encode_node_record(node_record()) == node


def test_redundancy_is_still_written_byte_for_byte() -> None:
    node = whole(f"{DIRECTORY}/{paths.node_record(0)}")
    record, stored = redundancy.decode_redundancy(whole(REDUNDANCY), path=REDUNDANCY)
    assert stored[1] == node and [ref.node for ref in record.members] == [1, 0]
    assert make.build_redundancy(node) == {REDUNDANCY: whole(REDUNDANCY), SHARE: whole(SHARE)}


def test_packs_are_still_laid_out_byte_for_byte() -> None:
    for rank, path in enumerate(PACKS):
        assert make.make_rank(rank)[0] == whole(path)
        header = read_pack(whole(path), path=path)
        assert header.data_start % pack.BLOCK == 0 and len(whole(path)) % pack.BLOCK == 0


def test_plan_leads_to_every_piece() -> None:
    stored = plan.decode_plan(whole(PLAN), PLAN, expected_digest=PLAN.rsplit("/")[-1])
    assert stored.leaves == make.LEAVES and stored.nodes == (0, 0) and stored.aliases == make.ALIASES
    assert stored.objects == (make.OBJECTS, make.OBJECTS)
    found = set()
    for row in range(stored.num_rows):
        rank, leaf = int(stored.rank[row]), stored.leaves[stored.leaf[row]]
        dims = len(leaf.shape)
        rect = Rect(
            tuple(map(int, stored.offsets[row, :dims])),
            tuple(map(int, stored.sizes[row, :dims])),
        )
        index = make.PIECES[rank].index((leaf.name, rect))
        nbytes = rect.numel * dtypes.itemsize(leaf.dtype)
        start = int(stored.offset[row])
        assert whole(PACKS[rank])[start : start + nbytes] == make.content(rank, index, nbytes)
        found.add((rank, index))
    assert len(found) == stored.num_rows == sum(map(len, make.PIECES))


def test_parts_still_merge_into_the_plan() -> None:
    parts = [whole("part-0"), whole("part-1")]
    assert node_record().part_digests == {rank: plan.digest(part) for rank, part in enumerate(parts)}
    merged, stored = plan.merge_parts(parts, (0, 0)), plan.decode_plan(whole(PLAN), PLAN)
    for name in ("rank", "leaf", "offsets", "sizes", "pack", "offset"):
        assert np.array_equal(getattr(merged, name), getattr(stored, name))
    assert (merged.leaves, merged.pack_sizes, merged.objects) == (stored.leaves, stored.pack_sizes, stored.objects)


def test_objects_have_their_values() -> None:
    path = f"{DIRECTORY}/node-00000.objects"
    stored = objects.parse(whole(path), path)
    assert stored.ranks() == (0, 1)
    for rank in range(2):
        assert stored.names(rank) == ("random.python", "trainer")
        for name, value in make.VALUES[rank].items():
            assert objects.decode(stored.get(rank, name)) == value
            assert objects.encode(value, name=name) == stored.get(rank, name), "objects are still written byte for byte"
    assert stored.digest(0, "trainer") == stored.digest(1, "trainer")
    assert stored.digest(0, "random.python") != stored.digest(1, "random.python")
