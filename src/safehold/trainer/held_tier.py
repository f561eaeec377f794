"""A checkpoint that lies in the memory of the nodes, as a restore reads it: through this node's agent, from whoever holds what.

What nobody has whole is made of what the rest of its redundancy set holds (`pipeline.lost_node`), here and not by the agent: ranks share
the work among them, and what is read of other nodes is what a copy would be read by.

Invariants: bytes come as they were found, and verify where they are read, as those of any source. A share that one node cannot give is
asked of the next that has it, and one that did not answer is asked no more. Only what a restore reads is here: nothing can be written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from safehold.agent import held_messages
from safehold.config import Config
from safehold.errors import AgentUnavailableError, CheckpointError, IntegrityError, StorageError, TornFileError
from safehold.format import paths, records
from safehold.pipeline.catalog import Checkpoint
from safehold.pipeline.lost_node import LostNode, open_lost
from safehold.pipeline.sources import Source
from safehold.policy.memory_belief import KNOWERS, Where
from safehold.policy.memory_parity import SetHeld
from safehold.trainer.connection import Run
from safehold.types import CommitId

PLANS = KNOWERS
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


class ParitySource:
    """A pack of a node that nobody has whole, or not as it should be; a `pipeline.sources.Source`."""

    name = "parity"
    verified = False

    def __init__(self, held: HeldTier, node: int, path: str) -> None:
        self._held, self._node, self._name = held, node, path.rpartition("/")[2]
        self.label = f"parity of node {node} of the save"

    def read(self, offset: int, size_bytes: int, buffer: memoryview) -> memoryview:
        """See `Source`."""
        target = buffer[:size_bytes]
        self._held.give_back(self._node, self._name, offset, target)
        return target


class HeldTier:
    """What a restore needs of a tier, of one checkpoint in memory; see the module.

    Args:
        run: The run that was joined.
        config: Settings.
        commit: The checkpoint.
        where: Who has what of it, as the offer says; see `policy.memory_belief.Where`.
        manifest: Its manifest's bytes; needed where parity is read.
    """

    name = "memory"

    def __init__(
        self,
        run: Run,
        config: Config,
        commit: CommitId,
        where: Mapping[int, Sequence[int]],
        manifest: bytes = b"",
    ) -> None:
        self._run, self._config, self._commit, self._manifest = run, config, commit, manifest
        self._where = Where.from_wire(where)
        self._lost: dict[int, LostNode] = {}
        self._opening = threading.Lock()
        self._silent: set[int] = set()
        self._here = run.world.node_of[run.client.rank]
        self.url = f"memory://{paths.checkpoint_dir(commit)}"

    def name_of(self, node: int) -> str:
        """Return the name of a node."""
        return self._run.world.node_names[node]

    def sources(self, checkpoint: Checkpoint, rank: int, part: int) -> list[Source]:
        """Return where a pack can be had, the nearest first."""
        path, owner = checkpoint.pack_path(rank, part), checkpoint.plan.nodes[rank]
        found: list[Source] = [PartnerSource(self, node, path) for node in self._nodes(owner)]
        if self._where.set_of(owner) is not None:
            found.append(ParitySource(self, owner, path))
        return found

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """Return a document, of exactly `limit_bytes`.

        Raises:
            TornFileError: No node can give it.
        """
        data = bytearray(limit_bytes)
        last: CheckpointError | None = None
        owner = self._owner(path)
        for node in self._nodes(owner):
            try:
                self.read_into(node, path, 0, memoryview(data), whole=True)
                return bytes(data)
            except CheckpointError as exc:
                last = exc
        if owner != PLANS and self._where.set_of(owner) is not None:
            try:
                return self._give_back_document(owner, path, memoryview(data))
            except AgentUnavailableError:
                raise
            except CheckpointError as exc:
                last = exc
        text = f"no node can give it: {last}" if last is not None else "no node has it"
        raise TornFileError(text, path=path, step=self._commit.step, tier=self.name) from last

    def _give_back_document(self, owner: int, path: str, target: memoryview) -> bytes:
        """Return the node record or the objects of a node that nobody has."""
        name = path.rpartition("/")[2]
        if name != paths.node_record(owner):
            self.give_back(owner, name, 0, target)
            return bytes(target)
        data = self._lost_node(owner).record_bytes
        if len(data) != len(target):
            text = "the record of the node that its redundancy set has kept is another one"
            raise TornFileError(text, path=path, step=self._commit.step, tier=self.name)
        return data

    def give_back(self, owner: int, name: str, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a file of a node of the save, made of what the rest of its redundancy set holds.

        Raises:
            TornFileError: Too much of it is lost, or does not answer.
            AgentUnavailableError: This node's agent is gone, which says nothing about the checkpoint.
        """
        try:
            self._lost_node(owner).read_range(name, offset, target)
        except StorageError as exc:
            path = f"{paths.checkpoint_dir(self._commit)}/{name}"
            raise TornFileError(exc.message, path=path, step=self._commit.step, tier=self.name, hint=exc.hint) from exc
        finally:
            if not self._run.client.alive:
                raise AgentUnavailableError("the agent of this node is gone", step=self._commit.step)

    def _lost_node(self, owner: int) -> LostNode:
        with self._opening:  # who waits here wants the same documents
            found = self._lost.get(owner)
            if found is None:
                held = self._where.set_of(owner)
                assert held is not None
                path = f"{paths.checkpoint_dir(self._commit)}/{paths.MANIFEST}"
                manifest = records.decode_manifest(self._manifest, path=path)
                asked = [member for member in held.members if member in held.holders or self._nodes(member)]
                found = self._lost[owner] = open_lost(manifest, owner, _Members(self, self._where, held), asked)
            return found

    def is_silent(self, node: int) -> bool:
        """Whether a node did not answer."""
        return node in self._silent

    def read_into(self, node: int, path: str, offset: int, target: memoryview, *, whole: bool = False) -> None:
        """Fill `target` with bytes of what a node holds; `whole`: with all of a document.

        Raises:
            CheckpointError: It cannot be had from there.
        """
        if not len(target):
            return
        if node in self._silent:
            text = f"node {self.name_of(node)} did not answer before"
            raise TornFileError(text, path=path, step=self._commit.step, tier=self.name)
        request = held_messages.HeldAsk(0, node, path, offset, len(target), whole)
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
        nodes = self._where.knowers if owner == PLANS else self._where.holders.get(owner, ())
        return sorted(nodes, key=lambda node: node != self._here)

    @staticmethod
    def _owner(path: str) -> int:
        if path.startswith(paths.PLANS + "/"):
            return PLANS
        name = path.rpartition("/")[2]
        found = paths.parse_node_record(name)
        if found is None:
            found = paths.parse_node_objects(name)
        return PLANS if found is None else found


class _Members:
    """The other members of a redundancy set, by their numbers in the save; a `pipeline.symbols.Members`.

    What a member wrote and the redundancy that it made need not be at one node any more, and of either there may be none.
    """

    def __init__(self, held: HeldTier, where: Where, of: SetHeld) -> None:
        self._held, self._where, self._of = held, where, of

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        """See `Members`."""
        if paths.is_redundancy(path.rpartition("/")[2]):
            nodes = [self._of.holders[node]] if node in self._of.holders else []
        else:
            nodes = list(self._where.holders.get(node, ()))
        if not nodes:
            raise FileNotFoundError(path)
        for number, holder in enumerate(nodes):
            try:
                self._held.read_into(holder, path, offset, buffer)
                return
            except IntegrityError as exc:
                if number + 1 < len(nodes):
                    continue
                if all(self._held.is_silent(one) for one in nodes):
                    raise AgentUnavailableError(exc.message, node=exc.node) from exc
                raise
