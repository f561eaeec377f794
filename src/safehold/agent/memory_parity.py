"""Makes a node's parity of a save in memory, by reading what it needs of the other members of its redundancy set.

Each member keeps its own share and says so; once all members of a set have, the lead lets them protect it. Then each reads the node records
of the others, and by ranges the blocks of the stripes whose parity rows it holds, by the way that restores read. What comes out lies beside
the shares under the names that flash would have (`pipeline.redundancy`), so one reader gives back lost nodes of both.

Invariants: a block is summed only if it matches the checksum in its node's record, the one that the lead was told of. Nothing counts before
all rows are made. Everything ends by its deadline. Runs in threads; nothing here is the dispatcher's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from safehold._version import __version__
from safehold.agent.memory_copies import KIND, Effort
from safehold.agent.memory_held import Held
from safehold.agent.net.seam import Network
from safehold.clock import SYSTEM_CLOCK
from safehold.errors import CheckpointError, DeadlineError, IntegrityError, SkippedError, TornFileError
from safehold.format import paths, records, redundancy
from safehold.format.records import NodeRecord, NodeRef
from safehold.format.redundancy import RedundancyRecord
from safehold.host import memfd
from safehold.host.process import lower_priority
from safehold.pipeline import agreement, block_work
from safehold.pipeline.redundancy import make_shares
from safehold.pipeline.symbols import read_document, view_of
from safehold.policy.memory_parity import RedundancyTold
from safehold.policy.placement import RedundancySet
from safehold.types import CommitId


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityWork:
    """What is protected.

    Attributes:
        commit: The save.
        run_id: The run's id.
        node: Index of this node.
        names: Names of all nodes.
        of: The redundancy set of this node.
        refs: Its members' records, as the lead was told of them, in the order of the ring.
        read_timeout_s: Seconds that one read of another node may take.
    """

    commit: CommitId
    run_id: str
    node: int
    names: Sequence[str]
    of: RedundancySet
    refs: tuple[NodeRef, ...]
    read_timeout_s: float

    def run(self, held: Held, network: Network, effort: Effort, cancelled: threading.Event) -> None:
        """Make the parity that this node holds; it counts when this returns.

        Raises:
            CheckpointError: A member cannot be reached or its bytes do not verify, there is no room, or it was cancelled.
        """
        members = _Members(self, held, network, effort, cancelled)
        work = block_work.Effort(
            threads=effort.threads,
            deadline_s=effort.deadline_s,
            cancelled=cancelled.is_set,
            pace=lambda _: members.done(),
        )
        watch = block_work.Watch(work, f"making the parity of step {self.commit.step}")
        writers: list[_RowWriter] = []
        try:
            stored = [self._record(members, ref, watch) for ref in self.refs]
            decoded = [self._decoded(ref, data) for ref, data in zip(self.refs, stored, strict=True)]
            view = view_of(self.commit, self.of, decoded, stored)

            def create(path: str, size: int) -> _RowWriter:
                row = paths.parse_redundancy_share(path.rpartition("/")[2])
                assert row is not None
                writers.append(_RowWriter(held.begin_redundancy(self.commit, self.node, row[1], size), size))
                return writers[-1]

            shares = make_shares(view, self.node, members, create, effort=work, watch=watch)
            record = RedundancyRecord(
                run_id=self.run_id,
                commit=self.commit,
                node=self.node,
                kind=self.of.kind,
                num_data=self.of.num_data,
                num_parity=self.of.num_parity,
                members=self.refs,
                shares=shares,
                created_s=SYSTEM_CLOCK.wall(),
                library=__version__,
            )
            told = RedundancyTold(
                node=self.node,
                kind=self.of.kind,
                num_data=self.of.num_data,
                num_parity=self.of.num_parity,
                members=self.of.members,
                blocks=tuple(stream.num_blocks for stream in view.geometry.streams),
            )
            held.end_redundancy(record, redundancy.encode_redundancy(record, stored), told)
        except BaseException as exc:
            # A thread that hangs in the network may still write: its memory is let go of, and not used again.
            held.drop_redundancy(self.commit, self.node, in_use=any(not writer.closed for writer in writers))
            if isinstance(exc, CheckpointError) and exc.node is not None and exc.node.isdecimal():
                exc.node = self.names[int(exc.node)]  # where a set is read, nodes have numbers
            raise

    def _record(self, members: _Members, ref: NodeRef, watch: block_work.Watch) -> bytes:
        watch.check()
        path = f"{paths.checkpoint_dir(self.commit)}/{paths.node_record(ref.node)}"
        data = read_document(members, ref.node, path, ref.size_bytes)
        what = f"the record of node {self.names[ref.node]}"
        agreement.check_bytes(data, ref.size_bytes, ref.blake3, path=path, step=self.commit.step, what=what)
        return data

    def _decoded(self, ref: NodeRef, data: bytes) -> NodeRecord:
        record = records.decode_node_record(data, path=paths.node_record(ref.node))
        if (record.commit, record.node, record.run_id) != (self.commit, ref.node, self.run_id):
            text = f"node {self.names[ref.node]} has told of the record of another save"
            raise IntegrityError(text, step=self.commit.step, node=str(ref.node))
        return record


class _Members:
    """The bytes of the other members, at the pace of flushes; a `pipeline.symbols.Members`."""

    def __init__(
        self, work: ParityWork, held: Held, network: Network, effort: Effort, cancelled: threading.Event
    ) -> None:
        self._work, self._held, self._network = work, held, network
        self._effort, self._cancelled = effort, cancelled
        self._deadline = time.monotonic() + effort.deadline_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._turn = threading.local()

    def read_into(self, node: int, path: str, offset: int, buffer: memoryview) -> None:
        """See `Members`; waits for this thread's turn first."""
        step = self._work.commit.step
        if node == self._work.node:
            found = self._held.find(path)
            if found is None or found.fd >= 0 or len(found.data) < offset + buffer.nbytes:
                raise TornFileError("it is not in the memory of this node any more", path=path, step=step)
            buffer[:] = found.data[offset : offset + buffer.nbytes]
            return
        self._begin(buffer.nbytes)
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the parity was not made in time", step=step)
        limit_s = min(left_s, self._work.read_timeout_s)
        self._network.read_into(self._work.names[node], KIND, path, offset, buffer, deadline_s=limit_s)

    def _begin(self, size: int) -> None:
        """Wait for the turn of a read, and with the first of a batch for that of the batch."""
        turn, effort = self._turn, self._effort
        if not hasattr(turn, "began"):
            lower_priority(effort.nice, lower_io=False)
            turn.began = None
        if turn.began is None and effort.pacer is not None:
            turn.began = effort.pacer.wait(self._cancelled, self._deadline - effort.deadline_s / 2)
        if effort.rate_bytes_s:
            with self._lock:
                now = time.monotonic()
                start = max(now, self._free_at)
                self._free_at = start + size / effort.rate_bytes_s
            self._cancelled.wait(start - now)
        if self._cancelled.is_set():
            raise SkippedError("the save was abandoned", step=self._work.commit.step)

    def done(self) -> None:
        """A batch of this thread is read and summed."""
        began, self._turn.began = getattr(self._turn, "began", None), None
        if began is not None and self._effort.pacer is not None:
            self._effort.pacer.spent(began)


class _RowWriter:
    """A parity row in memory; a `tiers.base.PackWriter`."""

    alignment = 1

    def __init__(self, fd: int, size: int) -> None:
        try:
            self._mapping = memfd.Mapping(fd, size)
        finally:
            os.close(fd)
        self.closed = False

    def write_at(self, offset: int, data: memoryview) -> None:
        """See `PackWriter`."""
        self._mapping.view[offset : offset + data.nbytes] = data

    def finish(self) -> None:
        """See `PackWriter`."""
        self._mapping.close()
        self.closed = True

    def abort(self) -> None:
        """See `PackWriter`."""
        if not self.closed:
            self.finish()
