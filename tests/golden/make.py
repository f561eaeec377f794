"""Makes the golden files of format version 1: one of every kind, whole and damaged.

    python tests/golden/make.py            writes tests/golden/v1/ anew (before a release)

What was released is never written again: `test_format_v1.py` reads the stored files. The script is kept to show what is
in them, and as the model for the next version's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from safehold.format import crc, document, dtypes, names, objects, pack, paths, plan, records, redundancy
from safehold.types import CommitId, ObjectSpec, Rect, TensorSpec

ROOT = Path(__file__).parent / "v1"

RUN_ID = "0123456789abcdef0123456789abcdef"
COMMIT = CommitId(10, 3, 0)
DIRECTORY = paths.checkpoint_dir(COMMIT)

LEAVES = (
    TensorSpec(name=names.join(("a", "b")), dtype="float32", shape=(6, 3)),
    TensorSpec(name=names.join(("a.b",)), dtype="bfloat16", shape=(5,)),
    TensorSpec(name=names.join(("empty",)), dtype="float32", shape=(0, 3)),
    TensorSpec(name=names.join(("items", names.ListIndex(0), 5, "5")), dtype="complex64", shape=()),
    TensorSpec(name=names.join(("when",)), dtype="numpy:<M8[ns]", shape=(3,), kind="numpy"),
    TensorSpec(name=names.join(("Größe", "\n", "", "#@")), dtype="int8", shape=(2, 2, 2)),
)
LEAVES = tuple(sorted(LEAVES, key=lambda leaf: leaf.name))
LEAF = {leaf.name: index for index, leaf in enumerate(LEAVES)}

PIECES = (
    [
        ("a.b", Rect((0, 0), (4, 3))),
        ("a\\.b", Rect((0,), (5,))),
        ("empty", Rect((0, 0), (0, 3))),
        ("when", Rect((0,), (3,))),
    ],
    [
        ("a.b", Rect((4, 0), (2, 3))),
        ("items.[0].#5.5", Rect((), ())),
        (names.join(("Größe", "\n", "", "#@")), Rect((0, 0, 0), (2, 2, 2))),
    ],
)

OBJECTS = (ObjectSpec(name="random.python"), ObjectSpec(name="trainer", policy="first"))
ALIASES = (("tied", "a.b"),)

VALUES = (
    {
        "random.python": (3, (1, 2, 2**70), None),
        "trainer": {"step": 10, "loss": float("inf"), 5: {1, 2}, (1, "2"): [b"\0", "\ud800", 1.5, -0.0, None, True]},
    },
    {
        "random.python": (3, (4, 5, 6), None),
        "trainer": {"step": 10, "loss": float("inf"), 5: {1, 2}, (1, "2"): [b"\0", "\ud800", 1.5, -0.0, None, True]},
    },
)


def content(rank: int, index: int, nbytes: int) -> bytes:
    """Bytes of a piece: nothing that means something, but other ones for each piece."""
    return bytes((37 * rank + 11 * index + 3 * at + 1) % 251 for at in range(nbytes))


def make_rank(rank: int) -> tuple[bytes, bytes]:
    """Return (pack, part) of a rank."""
    pieces = [
        pack.PieceIn(name, LEAVES[LEAF[name]].dtype, LEAVES[LEAF[name]].shape, rect) for name, rect in PIECES[rank]
    ]
    layout = pack.layout(pieces)
    data = bytearray(layout.packs[0].size_bytes)
    data[: len(layout.packs[0].header)] = layout.packs[0].header
    offsets, sizes = np.zeros((len(pieces), 3), np.int64), np.ones((len(pieces), 3), np.int64)
    offset = np.zeros(len(pieces), np.int64)
    for placed in layout.pieces:
        piece = pieces[placed.index]
        assert placed.nbytes == piece.rect.numel * dtypes.itemsize(piece.dtype)
        data[placed.offset : placed.offset + placed.nbytes] = content(rank, placed.index, placed.nbytes)
        offsets[placed.index, : len(piece.shape)] = piece.rect.offsets
        sizes[placed.index, : len(piece.shape)] = piece.rect.sizes
        offset[placed.index] = placed.offset
    part = plan.Part(
        rank=rank,
        world_size=2,
        leaves=LEAVES,
        leaf=np.array([LEAF[piece.name] for piece in pieces], np.int32),
        offsets=offsets,
        sizes=sizes,
        pack=np.zeros(len(pieces), np.int32),
        offset=offset,
        pack_sizes=(len(data),),
        objects=OBJECTS,
        aliases=ALIASES,
    )
    return bytes(data), plan.encode_part(part)


def build() -> dict[str, bytes]:
    """Return the whole files, by path."""
    files: dict[str, bytes] = {}
    pack_records, parts = [], []
    for rank in range(2):
        data, part = make_rank(rank)
        parts.append(part)
        name = paths.pack(0, rank, 0)
        files[f"{DIRECTORY}/{name}"] = data
        blocks = crc.crc_blocks(data)
        pack_records.append(
            records.PackRecord(
                file=name,
                rank=rank,
                part=0,
                size_bytes=len(data),
                crc32=crc.combine_blocks(blocks, len(data)),
                block_crcs=crc.encode_crcs(blocks),
            )
        )
        files[f"part-{rank}"] = part
    encoded = {
        rank: {name: objects.encode(value, name=name) for name, value in VALUES[rank].items()} for rank in range(2)
    }
    stored_objects = objects.encode_objects(encoded)
    files[f"{DIRECTORY}/{paths.node_objects(0)}"] = stored_objects
    stored_plan = plan.encode_plan(plan.merge_parts(parts, (0, 0)))
    files[paths.plan(plan.digest(stored_plan))] = stored_plan
    node = records.encode_node_record(
        records.NodeRecord(
            run_id=RUN_ID,
            node=0,
            node_name="node-a",
            commit=COMMIT,
            packs=tuple(pack_records),
            objects_size_bytes=len(stored_objects),
            objects_crc32=crc.crc(stored_objects),
            objects_blake3=document.digest(stored_objects),
            part_digests={rank: plan.digest(part) for rank, part in enumerate(parts)},
            timings={"flush": 0.25},
        )
    )
    files[f"{DIRECTORY}/{paths.node_record(0)}"] = node
    files[f"{DIRECTORY}/{paths.MANIFEST}"] = records.encode_manifest(
        records.Manifest(
            run_id=RUN_ID,
            commit=COMMIT,
            world_size=2,
            nodes=(records.NodeRef(node=0, size_bytes=len(node), blake3=document.digest(node)),),
            plan_digest=plan.digest(stored_plan),
            plan_size_bytes=len(stored_plan),
            total_bytes=sum(record.size_bytes for record in pack_records) + len(stored_objects),
            crc32=crc.combine([r.crc32 for r in pack_records], [r.size_bytes for r in pack_records]),
            created_s=1700000000.5,
            library="0.1.0",
            metrics={"loss": 2.5, "grad_norm": float("nan")},
            final=True,
            tags=("golden",),
        )
    )
    files |= build_small()
    files |= build_redundancy(node)
    return files


def build_redundancy(node: bytes) -> dict[str, bytes]:
    """Return what node 0 holds for another one, whose files are not here: a copy of its only block, and both node records."""
    share, other = content(2, 0, 5000), content(2, 1, 700)
    record = redundancy.RedundancyRecord(
        run_id=RUN_ID,
        commit=COMMIT,
        node=0,
        kind="copies",
        num_data=1,
        num_parity=1,
        members=tuple(
            records.NodeRef(node=number, size_bytes=len(data), blake3=document.digest(data))
            for number, data in ((1, other), (0, node))
        ),
        shares=(
            redundancy.ShareRecord(
                file=paths.redundancy_share(0, 0),
                row=0,
                size_bytes=len(share),
                crc32=crc.crc(share),
                block_crcs=crc.encode_crcs(crc.crc_blocks(share)),
            ),
        ),
        created_s=1700000150.0,
        library="0.1.0",
    )
    return {
        f"{DIRECTORY}/{paths.redundancy_record(0)}": redundancy.encode_redundancy(record, (other, node)),
        f"{DIRECTORY}/{paths.redundancy_share(0, 0)}": share,
    }


def build_small() -> dict[str, bytes]:
    """Return the files that say something about a run or a checkpoint in a line."""
    return {
        paths.RUN_JSON: records.encode_run(records.RunInfo(run_id=RUN_ID, created_s=1700000000.0, library="0.1.0")),
        paths.incarnation(4): records.encode_incarnation(
            records.Incarnation(
                run_id=RUN_ID,
                number=4,
                token="f00d",
                accepted=(CommitId(5, 2, 1), COMMIT),
                created_s=1700000100.0,
                reason="start",
            )
        ),
        f"{DIRECTORY}/{paths.tombstone(3)}": records.encode_tombstone(
            records.Tombstone(commit=COMMIT, incarnation=3, created_s=1700000200.0, reason="retention")
        ),
        paths.lease(10, "0a" * 16): records.encode_lease(
            records.Lease(
                commit=COMMIT,
                reader="0a" * 16,
                host="node7",
                pid=4242,
                lease_s=600.0,
                renewals=3,
                created_s=1700000500.0,
            )
        ),
        paths.pin(10): records.encode_pin(records.Pin(step=10, created_s=1700000300.0, note="before the spike")),
        paths.quarantine(COMMIT): records.encode_quarantine(
            records.Quarantine(
                commit=COMMIT,
                incarnation=4,
                created_s=1700000400.0,
                reason="block 0 does not match its checksum",
                path=f"{DIRECTORY}/{paths.pack(0, 1, 0)}",
            )
        ),
    }


def damage(path: str, data: bytes, others: dict[str, bytes]) -> dict[str, bytes]:
    """Return the damaged forms of a file, by the kind of damage."""
    middle = len(data) // 2
    damaged = {
        "flipped": data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :],
        "cut-one": data[:-1],
        "cut-half": data[:middle],
        "empty": b"",
        "tail": data + b"\0",
        "foreign": others[paths.RUN_JSON if path != paths.RUN_JSON else paths.pin(10)],
    }
    if data.startswith(b'{"safehold"'):
        damaged["newer"] = data.replace(b'"format":1,', b'"format":2,', 1)
    return damaged


def main() -> None:
    """Write all files anew."""
    files = build()
    shutil.rmtree(ROOT, ignore_errors=True)
    for path, data in files.items():
        write(ROOT / "whole" / path, data)
        for kind, bad in damage(path, data, files).items():
            write(ROOT / "damaged" / kind / path, bad)


def write(path: Path, data: bytes) -> None:
    """Write one file and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    main()
