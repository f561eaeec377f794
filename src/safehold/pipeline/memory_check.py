"""Compares an arena with the checksums of what was written from it.

Invariants: reads nothing of the packs on storage, only the documents; the arena must not change meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from safehold.errors import TornFileError
from safehold.format import crc
from safehold.pipeline.catalog import Catalog
from safehold.tiers.base import Tier
from safehold.types import CommitId


def arena_matches(tier: Tier, commit: CommitId, rank: int, packs: Sequence[tuple[int, int]], arena: memoryview) -> bool:
    """Return whether an arena holds the packs of `rank` in `commit`, by every block's checksum.

    Args:
        tier: Where the checkpoint is.
        commit: Which one.
        rank: Whose packs.
        packs: (arena offset, size) of each, in order.
        arena: The memory.

    Raises:
        IntegrityError: The documents of the checkpoint do not verify.
        StorageError: They cannot be read.
    """
    records = Catalog(tier).load(commit, lazy=True).packs()
    try:
        wanted = [records[rank, part] for part in range(len(packs))]
    except KeyError as exc:
        raise TornFileError(f"no node record has the packs of rank {rank}", step=commit.step, rank=rank) from exc
    if (rank, len(packs)) in records:
        return False
    sizes = [size for _, size in packs]
    return sizes == [record.size_bytes for record in wanted] and packs_match(
        [record.block_crcs for record in wanted], packs, arena
    )


def packs_match(block_crcs: Sequence[str], packs: Sequence[tuple[int, int]], arena: memoryview) -> bool:
    """Return whether packs in an arena have these checksums.

    Args:
        block_crcs: The encoded checksums of the blocks of each pack, in order.
        packs: (arena offset, size) of each.
        arena: The memory.
    """
    if len(block_crcs) != len(packs):
        return False
    for (start, size), wanted in zip(packs, block_crcs, strict=True):
        data = arena[start : start + size]
        if len(data) != size or not np.array_equal(crc.crc_blocks(data), crc.decode_crcs(wanted)):
            return False
    return True
