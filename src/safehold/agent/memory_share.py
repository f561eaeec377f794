"""The work of keeping one node's share of a save in memory: its record, its objects, its images, and the copies at partners.

Invariants: runs in a thread, and touches nothing of the dispatcher's but what is held, which is safe to use from anywhere. Every descriptor
it was given is closed or handed on, whatever happens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safehold.agent.memory_copies import Effort, Sending
from safehold.agent.memory_held import Held, Image
from safehold.agent.net.seam import Network
from safehold.agent.node_save import NodeSave
from safehold.host import memfd
from safehold.pipeline.node_records import make_record
from safehold.types import CommitId


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareWork:
    """What is kept.

    Attributes:
        commit: The save.
        run_id: The run's id.
        node: Index of this node; `node_name` is its name.
        packs: What its ranks have staged, as pack records' plain values.
        objects: Rank -> name -> encoded value.
        part_digests: Rank -> digest of its part.
        timings: Seconds spent, by phase.
        images: Rank -> the arena it staged into, by a descriptor of its own.
    """

    commit: CommitId
    run_id: str
    node: int
    node_name: str
    packs: Sequence[Any]
    objects: Mapping[int, Mapping[str, bytes]]
    part_digests: Mapping[int, str]
    timings: Mapping[str, float]
    images: dict[int, Image]

    def run(
        self,
        held: Held,
        network: Network | None,
        partners: Sequence[str],
        effort: Callable[[], Effort],
        cancelled: threading.Event,
    ) -> tuple[bytes, bytes]:
        """Keep the share here and send it to the partners; returns the record's bytes and those of the objects.

        Raises:
            CheckpointError: It could not be kept, or did not come whole to a partner.
        """
        maps: dict[int, memfd.Mapping] = {}
        owned = True
        try:
            if network is not None and partners:
                for rank, image in self.images.items():
                    maps[rank] = memfd.Mapping(image.fd, image.size_bytes, writable=False)
            record, objects = make_record(
                self.commit,
                run_id=self.run_id,
                node=self.node,
                node_name=self.node_name,
                packs=self.packs,
                objects=self.objects,
                part_digests=self.part_digests,
                timings=self.timings,
            )
            held.put_own(self.commit, self.node, record, objects, self.images)
            owned = False
            if network is not None and partners:
                sending = Sending(network, partners, self.commit, self.node, record, objects, maps, cancelled)
                sending.run(effort())
            return record, objects
        finally:
            for mapping in maps.values():
                mapping.close()
            for image in self.images.values() if owned else ():
                os.close(image.fd)


def share_of(save: NodeSave, commit: CommitId, **facts: Any) -> ShareWork:
    """Return the work for a save that all ranks of this node have staged; `facts` are the other fields."""
    images = {
        rank: Image(os.dup(mine.arena.fd), size, mine.arena.arena_id)
        for rank, mine in save.ranks.items()
        if (size := sum(nbytes for _, nbytes in mine.begin.packs))
    }
    return ShareWork(
        commit=commit,
        objects={rank: dict(mine.objects) for rank, mine in save.ranks.items()},
        part_digests={rank: mine.begin.part_digest for rank, mine in save.ranks.items()},
        images=images,
        **facts,
    )
