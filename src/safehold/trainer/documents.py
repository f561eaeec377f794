"""The trainer's way to the documents of a checkpoint that its agent hands out in a restore."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from safehold.agent import document_messages as dm
from safehold.agent import messages as m
from safehold.agent.client import AgentClient
from safehold.config import Config
from safehold.errors import CheckpointError, ChecksumError
from safehold.format import document
from safehold.host.memfd import Mapping
from safehold.pipeline.bundle import Bundled, unpack
from safehold.tiers.base import Tier

log = logging.getLogger("safehold")


class HandedOut:
    """What one rank gets of the documents that were offered; asks for them, and waits until they are here or will not come.

    Args:
        client: The way to the agent.
        config: Settings.
        offer: The offer that names them.

    Raises:
        CheckpointError: The agent is gone, or refuses.
    """

    def __init__(self, client: AgentClient, config: Config, offer: m.RestoreOffer) -> None:
        assert offer.documents is not None
        self._client, self._config, self._offer = client, config, offer
        self._files: dict[str, memoryview] = {}
        self._mapping: Mapping | None = None
        self._over = False
        reply, fds = client.request(
            dm.DocumentsAsk(0, offer.round), dm.Documents, config.restore_timeout_s, "the documents of a checkpoint"
        )
        try:
            if fds:
                self._take(reply, fds[0])
        except CheckpointError as exc:
            log.warning("safehold: the documents that the agent handed out cannot be used, storage is read: %s", exc)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, reply: dm.Documents, fd: int) -> None:
        assert self._offer.documents is not None
        size, digest = self._offer.documents
        if reply.size_bytes != size:
            raise ChecksumError(f"{reply.size_bytes} bytes came, {size} were offered", step=self._offer.step)
        self._mapping = Mapping(fd, size, writable=False)
        if document.digest(self._mapping.view) != digest:
            raise ChecksumError("they are not those that the lead has named", step=self._offer.step)
        self._files = unpack(self._mapping.view)

    def over(self, tier: Tier) -> Tier | None:
        """Return a tier that has them, and the rest from `tier`; None: they did not come."""
        return Bundled(tier, self._files).tier if self._files else None

    def end(self, *, done: bool) -> None:
        """Let go of them; `done`: nobody on any node needs them any more."""
        if self._over:
            return
        self._over = True
        self._files.clear()
        if self._mapping is not None:
            self._mapping.close()
        with suppress(CheckpointError):
            self._client.tell(dm.DocumentsOver(-1, self._offer.round, done))
