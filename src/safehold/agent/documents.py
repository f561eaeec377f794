"""The documents of a checkpoint on one node of a restore: had once, for all ranks here and for the nodes below this one in a tree.

The lead's flusher reads manifest, plan, records and objects once, where it finds the checkpoint; the offer names their size and digest.
Each node takes them from the node above it (`policy.document_tree`) as soon as that one says that it has them, and says so to those below.

Invariants: used from the dispatcher thread only, but for `provide`, which threads of the network call, and for the thread that fetches;
nothing here waits. What the node above cannot give, or is silent about for too long, is asked of those above it, and then read from storage
by this node's flusher, once for all ranks. Where there is no memory for it, or storage fails, the ranks hear so and read for themselves.
What comes is compared with the digest before it is shown to anybody, and by each rank again. Memory is lent by the pool of arenas, and goes
back once all ranks of all nodes have voted, or all of this node have given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from safehold.agent import document_messages as dm
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.arenas import ArenaPool
from safehold.agent.flusher_client import Flusher
from safehold.agent.means import Means
from safehold.agent.net.seam import Network, Source
from safehold.agent.node_save import Peer
from safehold.agent.nodes import Nodes
from safehold.agent.shared_memory import Memory
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError
from safehold.events import EventStream
from safehold.format import document
from safehold.host import memfd
from safehold.policy import document_tree as tree

KIND = "documents"
MIN_ALONE_BYTES = 1 << 20
"""Where all ranks are on one node: what is smaller they read themselves, since asking takes as long."""
PIECE_BYTES = 8 << 20
SLOW_BYTES_S = 20e6
"""What a network is expected to carry at least, for patience."""
EARLY_KEPT = 64
Post = Callable[[Callable[[], None]], None]


class Here(Protocol):
    """The session, as this room needs it."""

    node: int
    local_ranks: list[int]
    local_flash: bool
    world: m.World
    nodes: Nodes | None
    flusher: Flusher

    @property
    def lead_node(self) -> int:
        """The node of rank 0."""
        ...

    def send(self, node: int, message: msgspec.Struct) -> None:
        """Tell another node, if it can be reached."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Documents:
    """What was offered with a round.

    Attributes:
        sources: Nodes above that may have it, the nearest first.
        due: When the node above, or this node's flusher, has been silent for too long.
        state: `waiting` for the node above, `busy` (a thread fetches), `reading` (the flusher does), `here`, or `gone`: it will not come.
        fetching: A thread writes to the memory.
        dropped: Nobody wants it any more.
    """

    round: int
    commit: list[int]
    size: int
    digest: str
    sources: list[int]
    due: float
    memory: Memory | None = None
    lent_bytes: int = 0
    state: str = "waiting"
    fetching: bool = False
    dropped: bool = False
    asking: list[tuple[Peer, int]] = field(default_factory=list)
    given: set[int] = field(default_factory=set)


class NodeDocuments:
    """See the module.

    Args:
        here: The session.
        config: Settings.
        pool: Lends memory.
        post: Runs a function in the dispatcher.
        clock: Time.
        events: Where is told where they came from.
        means: Threads and memory.
        patience_s: How long each step of the tree may take beside the time for the bytes.
    """

    def __init__(
        self,
        here: Here,
        *,
        config: Config,
        pool: ArenaPool,
        post: Post,
        clock: Clock,
        events: EventStream,
        means: Means,
        patience_s: float,
    ) -> None:
        self._here, self._config, self._pool, self._post = here, config, pool, post
        self._clock, self._events, self._means, self._patience_s = clock, events, means, patience_s
        self._current: _Documents | None = None
        self._shown: _Documents | None = None  # read by threads
        self._early: list[tuple[int, w.DocumentsTold]] = []
        if here.nodes is not None:
            here.nodes.network.provide(KIND, self.provide)

    # -- the lead's offer, and what the nodes above say ----------------------------------------------------------------------

    def offered(self, offer: m.RestoreOffer) -> None:
        """The lead offers a checkpoint; what was offered before is over."""
        current = self._current
        if offer.documents is None or offer.step is None:
            self._drop()
            return
        size, digest = offer.documents
        if current is not None and (current.round, current.digest) == (offer.round, digest):
            return
        self._drop()
        here = self._here
        above = tree.above(here.node, here.lead_node)
        step_s = self._patience_s + tree.DEGREE * size / SLOW_BYTES_S
        held = self._current = _Documents(
            round=offer.round,
            commit=[offer.step, offer.incarnation, offer.attempt],
            size=size,
            digest=digest,
            sources=above,
            due=self._clock.monotonic() + len(above) * step_s,
        )
        if not self._make_room(held):
            return
        if not above:
            self._read(held)
            return
        early, self._early = self._early, []
        for node, word in early:
            self.heard(node, word)

    def _make_room(self, held: _Documents) -> bool:
        if not 0 < held.size <= self._config.restore_cache_bytes:
            self._give_up(held, f"{held.size:,} bytes are more than restore_cache_bytes")
            return False
        needed = -(-held.size // memfd.PAGE_BYTES) * memfd.PAGE_BYTES
        held.lent_bytes = self._pool.lend(needed, memfd.PAGE_BYTES)
        if held.lent_bytes < needed:
            self._give_up(held, f"the memory budget has no {held.size:,} bytes left")
            return False
        try:
            held.memory = self._means.memory(held.size, KIND)
        except CheckpointError as exc:
            self._give_up(held, exc.message)
            return False
        return True

    def heard(self, node: int, word: w.DocumentsTold) -> None:
        """A node above has them, or will not have them; it may have heard the lead before us."""
        held = self._current
        if held is None or held.digest != word.digest:
            self._early = [*self._early, (node, word)][-EARLY_KEPT:]
        elif held.state == "waiting" and node in held.sources:
            if not word.here:
                held.sources.remove(node)
            self._fetch(held, held.sources)

    def node_lost(self, node: int) -> None:
        """A node cannot be reached."""
        held = self._current
        if held is not None and held.state == "waiting" and node == held.sources[0]:
            held.sources.remove(node)
            self._fetch(held, held.sources)

    # -- ranks -----------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, message: dm.DocumentsAsk | dm.DocumentsOver) -> None:
        """Carry out a request of a rank."""
        held = self._current
        if held is not None and held.round != message.round:
            held = None
        if isinstance(message, dm.DocumentsOver):
            if held is not None:
                held.given.discard(peer.rank)
                if message.done or not held.given:
                    self._drop()
            peer.reply(m.Done(message.id))
        elif held is None:
            peer.reply(dm.Documents(message.id, 0))
        else:
            held.given.add(peer.rank)
            held.asking.append((peer, message.id))
            self._answer(held)

    def _answer(self, held: _Documents) -> None:
        if held.state not in ("here", "gone"):
            return
        asking, held.asking = held.asking, []
        for peer, number in asking:
            if held.state == "gone" or held.memory is None:
                peer.reply(dm.Documents(number, 0))
            else:
                with memfd.read_only(held.memory.fd) as fd:
                    peer.reply(dm.Documents(number, held.size), (fd,))

    def rank_gone(self, rank: int) -> None:
        """A rank's connection ended."""
        held = self._current
        if held is None:
            return
        held.asking = [entry for entry in held.asking if entry[0].rank != rank]
        held.given.discard(rank)
        if not held.given:
            self._drop()

    # -- having them -------------------------------------------------------------------------------------------------------

    def _fetch(self, held: _Documents, nodes: Sequence[int]) -> None:
        """Take them from the first of these nodes that gives them, else from storage."""
        if not nodes or self._here.nodes is None or held.memory is None:
            self._read(held)
            return
        held.state, held.fetching = "busy", True
        names = [self._here.world.node_names[node] for node in nodes]
        network, view, deadline_s = self._here.nodes.network, held.memory.view, 2 * self._patience_s

        def work() -> None:
            try:
                took = fetch(network, names, held.digest, view, deadline_s=deadline_s)
            except Exception as exc:
                took = ("", f"{type(exc).__name__}: {exc}")
            self._post(lambda: self._fetched(held, *took))

        try:
            self._means.spawn(KIND, work)
        except RuntimeError as exc:
            self._fetched(held, "", f"no thread can be started: {exc}")

    def _fetched(self, held: _Documents, source: str, why: str) -> None:
        held.fetching = False
        if held.dropped:
            self._free(held)
        elif source:
            self._show(held, f"node {source}")
        else:
            self._events.emit("documents", "failed", error=f"no node gave the documents of a restore: {why}")
            self._read(held)

    def _read(self, held: _Documents) -> None:
        """Have this node's flusher put them there: it has them where it has found the checkpoint, else it reads them."""
        if held.memory is None:
            self._give_up(held, "there is no memory for them")
            return
        held.state, held.due = "reading", self._clock.monotonic() + self._config.stall_timeout_s

        def was_read(_: object, error: CheckpointError | None) -> None:
            if held.dropped or held.state == "gone":
                return
            if error is not None:
                self._give_up(held, str(error))
            else:
                self._show(held, "storage")

        arguments = {"commit": held.commit, "blake3": held.digest}
        timeout_s = self._config.restore_timeout_s
        self._here.flusher.call("documents", arguments, was_read, timeout_s=timeout_s, fds=(held.memory.fd,))

    def _show(self, held: _Documents, source: str) -> None:
        held.state, self._shown = "here", held
        self._events.emit("documents", step=held.commit[0], bytes=held.size, source=source)
        self._tell_below(held, here=True)
        self._answer(held)

    def _give_up(self, held: _Documents, why: str) -> None:
        self._events.emit("documents", "failed", error=f"every rank reads the documents of a restore itself: {why}")
        held.state = "gone"
        self._free(held)
        self._tell_below(held, here=False)
        self._answer(held)

    def _tell_below(self, held: _Documents, *, here: bool) -> None:
        for node in tree.below(self._here.node, self._here.lead_node, len(self._here.world.node_names)):
            self._here.send(node, w.DocumentsTold(held.digest, here))

    def provide(self, node: str, name: str) -> Source | None:
        """See `seam.Provider`; from a thread of the network."""
        held = self._shown
        memory = held.memory if held is not None and held.digest == name else None
        return memory.source(held.size) if held is not None and memory is not None else None

    # -- letting go --------------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        held, self._current, self._shown = self._current, None, None
        if held is None:
            return
        held.dropped = True
        if not held.fetching:
            self._free(held)
        held.state = "gone"
        self._answer(held)

    def _free(self, held: _Documents) -> None:
        memory, held.memory = held.memory, None
        if memory is not None:
            memory.close()
        lent, held.lent_bytes = held.lent_bytes, 0
        self._pool.take_back(lent)

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        held = self._current
        return held.due if held is not None and held.state in ("waiting", "reading") else None

    def tick(self) -> None:
        """Let the deadline pass: of a silent node above, so that those above it are asked; of storage, so that ranks meet it themselves."""
        held = self._current
        if held is None or held.state not in ("waiting", "reading") or self._clock.monotonic() < held.due:
            return
        if held.state == "waiting":
            self._fetch(held, [*held.sources[1:], held.sources[0]])
        else:
            self._give_up(held, f"storage has not given them within {self._config.stall_timeout_s:g} s")

    def close(self) -> None:
        """Stop."""
        self._drop()


def share_from_bytes(config: Config, world: m.World, *, local_flash: bool) -> int | None:
    """Return from which size on documents are handed out; None: every rank reads them. Disks of the nodes' own are no storage of all."""
    if config.restore_pass_on == "off" or local_flash or world.world_size == 1:
        return None
    return 0 if len(world.node_names) > 1 else MIN_ALONE_BYTES


def fetch(
    network: Network, names: Sequence[str], digest: str, view: memoryview, *, deadline_s: float
) -> tuple[str, str]:
    """Fill `view` with what these nodes may have, and return who gave the last of it; else an empty name, and why not.

    What one has begun the next goes on with. `deadline_s`: for each piece, beside the time for its bytes.
    """
    offset, reasons = 0, list[str]()
    for name in names:
        try:
            while offset < len(view):
                size = min(PIECE_BYTES, len(view) - offset)
                limit_s = deadline_s + size / SLOW_BYTES_S
                with view[offset : offset + size] as piece:
                    network.read_into(name, KIND, digest, offset, piece, deadline_s=limit_s)
                offset += size
        except CheckpointError as exc:
            reasons.append(f"node {name}: {exc.message}")
            continue
        if document.digest(view) == digest:
            return name, ""
        return "", f"what node {name} gave is not what the lead has named"
    return "", "; ".join(reasons)
