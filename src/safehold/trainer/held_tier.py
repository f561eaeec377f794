"""A checkpoint that lies in the memory of the nodes, as a restore reads it: through this node's agent, from whoever holds what.

Invariants: bytes come as they were found, and verify where they are read, as those of any source. A share that one node cannot give is
asked of the next that has it, and one that did not answer is asked no more. Only what a restore reads is here: nothing can be written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from safehold.agent import held_messages
from safehold.config import Config
from safehold.errors import CheckpointError, IntegrityError, StorageError, TornFileError
from safehold.format import paths
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.sources import Source
from safehold.trainer.connection import Run
from safehold.types import CommitId

PLANS = -1
"""Whose place in `holders` the nodes have that know the plan."""


class PartnerSource:
    """A pack in the memory of a node; a `pipeline.sources.Source`."""

    name = "partner"
    verified = False

    def __init__(self, held: HeldTier, node: int, path: str) -> None:
        self._held, self._node, self._path = held, node, path
        self.label = f"partner {held.name_of(node)}"

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """See `Source`."""
        target = buffer[:size_bytes]
        self._held.read_into(self._node, self._path, offset, target)
        return target


class HeldTier:
    """What a restore needs of a tier, of one checkpoint in memory; see the module.

    Args:
        run: The run that was joined.
        config: Settings.
        commit: The checkpoint.
        holders: Node of its save -> nodes that have its share; `PLANS` -> those that know its plan.
    """

    name = "memory"

    def __init__(self, run: Run, config: Config, commit: CommitId, holders: Mapping[int, Sequence[int]]) -> None:
        self._run, self._config, self._commit, self._holders = run, config, commit, holders
        self._silent: set[int] = set()
        self._here = run.world.node_of[run.client.rank]
        self.url = f"memory://{paths.checkpoint_dir(commit)}"

    def name_of(self, node: int) -> str:
        """Return the name of a node."""
        return self._run.world.node_names[node]

    def sources(self, checkpoint: Checkpoint, rank: int, part: int) -> list[Source]:
        """Return where a pack can be had, the nearest first."""
        path = checkpoint.pack_path(rank, part)
        return [PartnerSource(self, node, path) for node in self._nodes(checkpoint.plan.nodes[rank])]

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """Return a document, of exactly `limit_bytes`.

        Raises:
            TornFileError: No node can give it.
        """
        data = bytearray(limit_bytes)
        last: CheckpointError | None = None
        for node in self._nodes(self._owner(path)):
            try:
                self.read_into(node, path, 0, memoryview(data))
                return bytes(data)
            except CheckpointError as exc:
                last = exc
        text = f"no node can give it: {last}" if last is not None else "no node has it"
        raise TornFileError(text, path=path, step=self._commit.step, tier=self.name) from last

    def read_into(self, node: int, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of what a node holds.

        Raises:
            CheckpointError: It cannot be had from there.
        """
        if not len(target):
            return
        if node in self._silent:
            text = f"node {self.name_of(node)} did not answer before"
            raise TornFileError(text, path=path, step=self._commit.step, tier=self.name)
        request = held_messages.HeldAsk(0, node, path, offset, len(target))
        client, limit_s = self._run.client, self._config.stall_timeout_s
        try:
            _, fds = client.request(request, held_messages.HeldBytes, limit_s, "what is in memory of a node")
        except CheckpointError as exc:
            if not client.alive:
                raise
            if not isinstance(exc, IntegrityError | StorageError):
                self._silent.add(node)
            text = f"node {self.name_of(node)} cannot give it: {exc.message}"
            raise TornFileError(text, path=path, step=self._commit.step, tier=self.name) from exc
        try:
            if len(fds) != 1 or os.preadv(fds[0], [target], 0) != len(target):
                raise TornFileError("the agent gave fewer bytes than were asked for", path=path, tier=self.name)
        finally:
            for fd in fds:
                os.close(fd)

    def _nodes(self, owner: int) -> list[int]:
        return sorted(self._holders.get(owner, ()), key=lambda node: node != self._here)

    @staticmethod
    def _owner(path: str) -> int:
        if path.startswith(paths.PLANS + "/"):
            return PLANS
        name = path.rpartition("/")[2]
        found = paths.parse_node_record(name)
        if found is None:
            found = paths.parse_node_objects(name)
        return PLANS if found is None else found
