"""The bytes of a checkpoint's nodes, where their files lie on the joined disks of a job's nodes now.

Invariants: every file is read from the node that is said to have what its node wrote, own ones from the own disk; readers are kept open
until `close`. Thread-safe.

Must not live here: what is made of the bytes (`pipeline.redundancy`, `lost_node`), which node has what (`pipeline.joining`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from safehold.errors import RankLostError
from safehold.tiers.base import PackReader, Tier


class PlacedMembers:
    """See the module and `pipeline.symbols.Members`.

    Args:
        tiers: Node of the checkpoint -> the tier that has its files; who is not in it is lost.
    """

    def __init__(self, tiers: Mapping[int, Tier]) -> None:
        self._tiers = dict(tiers)
        self._readers: dict[tuple[int, str], PackReader] = {}
        self._lock = threading.Lock()

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        """See `Members`."""
        self._reader(node, path).read_into(offset, buffer)

    def _reader(self, node: int, path: str) -> PackReader:
        with self._lock:
            found = self._readers.get((node, path))
        if found is not None:
            return found
        tier = self._tiers.get(node)
        if tier is None:
            raise RankLostError("its files are on no node of this job", node=str(node), path=path)
        opened = tier.open_pack(path, retry_s=0.0)
        with self._lock:
            found = self._readers.setdefault((node, path), opened)
        if found is not opened:
            opened.close()
        return found

    def close(self) -> None:
        """Close all files; nothing may be read any more."""
        with self._lock:
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.close()
