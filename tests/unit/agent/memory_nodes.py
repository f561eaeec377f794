"""Several sessions whose saves stay in memory: real bytes in arenas, real records, copies that go through the job's network."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from agent_fakes import FakePeer
from several_nodes import Job

from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.clock import new_token
from safehold.format import crc, paths
from safehold.format.pack import BLOCK
from safehold.host.memfd import Mapping
from safehold.types import CommitId

PACK_BYTES = 2 * BLOCK
SAVE: dict[str, Any] = {"in_memory": True}


class MemoryJob(Job):
    """A job where memory is a tier."""

    def __init__(self, num_nodes: int = 4, per_node: int = 1, *, copies: int = 1, domains: Any = (), **settings: Any):
        self.domains = list(domains)
        settings = {"flush_every": 1000, "memory_copies": copies, "flush_busy_share": 0.0, "flush_nice": 0, **settings}
        super().__init__(num_nodes, per_node, **settings)

    def world_of(self) -> m.World:
        world = super().world_of()
        return m.World(world.token, world.world_size, world.node_of, world.node_names, self.domains)

    def bytes_of(self, rank: int, step: int) -> bytes:
        return np.random.default_rng((rank, step)).bytes(PACK_BYTES)

    def stage_memory(self, rank: int, step: int, attempt: int = 0) -> None:
        """A rank of a memory save has staged, and its arena is checksummed."""
        node = rank // self.per_node
        arena = self.pools[node].of(rank)
        data = self.bytes_of(rank, step)
        with Mapping(arena.fd, arena.size_bytes) as mapping:
            mapping.view[:PACK_BYTES] = data
        self.send(rank, m.Staged(-1, step, attempt, {f"object-{rank}": b"\x01" * rank}))
        blocks = crc.crc_blocks(data)
        record = {
            "file": paths.pack(node, rank, 0),
            "rank": rank,
            "part": 0,
            "size_bytes": PACK_BYTES,
            "crc32": crc.crc(data),
            "block_crcs": crc.encode_crcs(blocks),
        }
        timings = {"allocate_s": 0.0, "write_s": 0.0, "sync_s": 0.0}
        self.flushers[node].answer("hold", {"packs": [record], "compare": {}, "timings": timings}, rank=rank)
        self.deliver()

    def settle_threads(self, reached: Any, timeout_s: float = 10.0) -> None:
        """Let threads and messages go on until something holds."""

        def look() -> Any:
            self.deliver()
            return reached()

        self.work.run_until(look, timeout_s)

    def save_in_memory(self, step: int, attempt: int = 0) -> None:
        """A whole memory save."""
        count = len(self.verdicts(0))
        for rank in range(self.world_size):
            self.begin(rank, step, attempt, packs=[(0, PACK_BYTES)], arena_bytes=PACK_BYTES, **SAVE)
        for rank in range(self.world_size):
            self.stage_memory(rank, step, attempt)
        self.settle_threads(lambda: all(len(self.verdicts(rank)) > count for rank in range(self.world_size)))

    # -- a new start of the job ----------------------------------------------------------------------------------------

    def restart(self, lost: Any = (), *, before: int | None = None, commits: Any = (), num_nodes: int = 0) -> None:
        """All trainers die, some nodes are replaced by empty ones, and the job starts again as the next incarnation."""
        old, self.sessions = self.sessions, []
        incarnation = max(session.incarnation for session in old)
        for node in lost:
            self.pools[node].close()
            self.replace_pool(node)
        for wire in self.wires.values():
            wire.closed = True
        self.queue.clear()
        if num_nodes:
            self.names = self.names[:num_nodes]
            self.world_size = num_nodes * self.per_node
        self.token = new_token()
        self.world = self.world_of()
        self.wires.clear()
        self.sessions = [self.start(node) for node in range(len(self.names))]
        self.peers = [FakePeer(rank) for rank in range(self.world_size)]
        self.controls = [self.attach(rank) for rank in range(self.world_size)]
        for session in self.sessions:
            session.nodes.meet([wire.address for wire in self.wires.values()])
        for session in old:
            session.close()
        head = self.sessions[0].head
        asked: list[bool] = []
        head.others.after(lambda: asked.append(True))
        head.others.ask(10.0)
        self.deliver()
        assert asked
        memory = head.memory.choose("run", incarnation if before is None else before)
        self.steps = self.sessions[0].opened("run", incarnation + 1, list(commits), memory)
        self.deliver()

    def find_nothing(self) -> dict[str, Any]:
        return {"commit": None, "manifest": b"", "newest": None, "any_commit": False, "bad": [], "skipped": []}

    def ask_restore(self, step: int | None = None, found: dict[str, Any] | None = None) -> list[Any]:
        """All ranks ask what to restore; storage has found something or nothing."""
        asks = [self.send(rank, m.RestoreAsk(0, step)) for rank in range(self.world_size)]
        self.flushers[0].answer("find", found or self.find_nothing())
        self.settle_threads(lambda: all(self.answer_to(rank, ask) for rank, ask in enumerate(asks)))
        return [self.answer_to(rank, ask) for rank, ask in enumerate(asks)]

    def read(self, rank: int, node: int, path: str, size: int, offset: int = 0) -> bytes | m.Refused:
        """What a rank gets of what a node holds."""
        ask = self.send(rank, held_messages.HeldAsk(0, node, path, offset, size))
        peer = self.peers[rank]
        self.wait_for(lambda: self.answer_to(rank, ask))
        reply = self.answer_to(rank, ask)
        return reply if isinstance(reply, m.Refused) else peer.taken[ask]

    def wait_for(self, reached: Any, timeout_s: float = 10.0) -> None:
        import time

        ends = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < ends
            time.sleep(0.001)

    def pack_of(self, offer: m.RestoreOffer, rank: int, old_rank: int, old_node: int) -> bytes | None:
        """The pack of a rank of the save, as a rank now gets it, from memory here or from the first node that can give it."""
        if old_rank in offer.memory:
            commit = (offer.step, offer.incarnation, offer.attempt)
            ask = self.send(rank, held_messages.MemoryAsk(0, old_rank, commit))
            reply = self.answer_to(rank, ask)
            if isinstance(reply, held_messages.MemorySource):
                start, size = reply.packs[0]
                return self.peers[rank].taken[ask][start : start + size]
        path = f"{paths.checkpoint_dir(CommitId(offer.step, offer.incarnation, offer.attempt))}/{paths.pack(old_node, old_rank, 0)}"
        for node in offer.in_memory_of[old_node]:
            found = self.read(rank, node, path, PACK_BYTES)
            if isinstance(found, bytes):
                return found
        return None


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
