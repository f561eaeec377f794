"""Makes a node's record and its file of objects, as they lie on a tier and in memory alike.

Invariant: pure; nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from blake3 import blake3

from safehold.format import crc, objects_file, records
from safehold.types import CommitId


def make_record(
    commit: CommitId,
    *,
    run_id: str,
    node: int,
    node_name: str,
    packs: Iterable[Any],
    objects: Mapping[int, Mapping[str, bytes]],
    part_digests: Mapping[int, str],
    timings: Mapping[str, float],
) -> tuple[bytes, bytes]:
    """Return the record's bytes, and those of the objects.

    Args:
        commit: The attempt.
        run_id: The run's id.
        node: Index of the node.
        node_name: Its name.
        packs: What its ranks wrote: pack records, or their plain values.
        objects: Rank -> name -> encoded value.
        part_digests: Rank -> digest of the part that it wrote by.
        timings: Seconds spent, by phase.
    """
    data = objects_file.encode_objects({rank: dict(blobs) for rank, blobs in objects.items()})
    record = records.NodeRecord(
        run_id=run_id,
        node=node,
        node_name=node_name,
        commit=commit,
        packs=tuple(msgspec.convert(entry, records.PackRecord, from_attributes=True) for entry in packs),
        objects_size_bytes=len(data),
        objects_crc32=crc.crc(data),
        objects_blake3=blake3(data).hexdigest(),
        part_digests=dict(part_digests),
        timings=dict(timings),
    )
    return records.encode_node_record(record), data
