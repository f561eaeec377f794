"""The trainer's way to its agent about chunks that are passed on between nodes in a restore."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from safehold.agent import chunk_messages
from safehold.agent.chunk_cache import table_bytes
from safehold.agent.client import AgentClient
from safehold.config import Config
from safehold.errors import CheckpointError
from safehold.host.memfd import Mapping
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.passed_chunks import PassedChunks
from safehold.pipeline.restore import Reading
from safehold.policy import passing_on as policy
from safehold.tiers.base import Tier


class Passing:
    """What one rank takes and reads for others in one round of a restore.

    Args:
        client: The way to the agent.
        config: Settings.
        names: Of all nodes.
        number: The round.
    """

    def __init__(self, client: AgentClient, config: Config, names: Sequence[str], number: int) -> None:
        self._client, self._config, self._names, self._round = client, config, names, number
        self._mapping: Mapping | None = None
        self._passed: PassedChunks | None = None
        self._asked = False

    def begin(self, reading: Reading, tier: Tier, checkpoint: Checkpoint) -> None:
        """Have a reading take from the cache what is passed on, if anything is; where that is not possible it reads all by itself."""
        self._asked = True
        with suppress(CheckpointError, ValueError):
            cache, fds = self._client.request(
                chunk_messages.CacheAsk(0, self._round),
                chunk_messages.Cache,
                self._config.request_timeout_s,
                "the cache of a restore",
            )
            try:
                if not cache.groups or not fds:
                    return
                self._mapping = Mapping(fds[0], cache.size_bytes)
            finally:
                for fd in fds:
                    os.close(fd)
            num_chunks = policy.Numbering(checkpoint.plan.pack_sizes).num_chunks
            self._passed = PassedChunks(
                self._mapping.view,
                table_bytes(num_chunks),
                groups=[policy.group_of(members, chunks, num_chunks) for members, chunks in cache.groups],
                node=cache.node,
                names=self._names,
                tier=tier,
                checkpoint=checkpoint,
                talk=self,
                patience_s=self._config.stall_timeout_s / 2,
            )
            reading.take_from(self._passed)

    def end(self, *, done: bool) -> int:
        """Let go of the cache; returns the bytes that the node's ranks have read from storage, as far as the agent knows."""
        if not self._asked:
            return 0
        self._asked = False
        if self._passed is not None:
            self._passed.close()
        if self._mapping is not None:
            self._mapping.close()
        with suppress(CheckpointError):
            reply, _ = self._client.request(
                chunk_messages.ReadingOver(0, self._round, done),
                chunk_messages.NodeRead,
                self._config.request_timeout_s,
                "the end of a restore",
            )
            return reply.storage_bytes
        return 0

    # -- passed_chunks.Talk ------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the agent is there."""
        return self._client.alive

    def ask(
        self, read: list[tuple[int, int]], failed: list[int], read_s: float
    ) -> tuple[Sequence[tuple[int, int]], bool]:
        """See `passed_chunks.Talk`."""
        message = chunk_messages.ChunksAsk(0, self._round, read, failed, read_s)
        reply, _ = self._client.request(
            message, chunk_messages.ChunksToRead, self._config.request_timeout_s, "what a restore reads for others"
        )
        return reply.chunks, reply.over

    def used(self, number: int, *, wrong: bool) -> None:
        """See `passed_chunks.Talk`."""
        with suppress(CheckpointError):
            self._client.tell(chunk_messages.ChunksUsed(-1, self._round, [number], [number] if wrong else []))
