"""A session's part in passing on between nodes in a restore: documents, what its ranks want, the passage of a round, the way to neighbours.

Invariants: used from the dispatcher thread only, but for `provide`, which threads of the network call, and for the few threads that fetch;
nothing here waits. At most one passage exists; its memory is lent by the pool of arenas, and goes back when the first rank knows that all
ranks of all nodes have read, or all of this node have given up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from safehold.agent import chunk_messages, document_messages, documents
from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.agent.arenas import ArenaPool
from safehold.agent.chunk_cache import ChunkCache, size_bytes
from safehold.agent.means import REAL, Means
from safehold.agent.net.seam import Source
from safehold.agent.node_save import Peer
from safehold.agent.passage import NUM_FETCHES, Passage
from safehold.clock import Clock
from safehold.config import Config
from safehold.errors import CheckpointError, ConfigurationError
from safehold.events import EventStream
from safehold.host.memfd import PAGE_BYTES
from safehold.policy import passing_on as policy

KIND = "chunk"
MIN_SLOTS = 8
PATIENCE_S = (0.5, 5.0)
PATIENCE_SHARE = 0.25
Post = Callable[[Callable[[], None]], None]


class Here(documents.Here, Protocol):
    """The session, as this room needs it."""

    def report(self, report: w.Report) -> None:
        """Tell the lead, which may be here."""
        ...


class PassingOn:
    """See the module.

    Args:
        here: The session.
        config: Settings.
        pool: Lends memory.
        post: Runs a function in the dispatcher.
        beside: Runs a function in one of a few threads; None: in threads of its own.
        means: Threads and memory for documents.
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
        beside: Callable[[Callable[[], None]], None] | None = None,
        means: Means = REAL,
    ) -> None:
        self._here, self._config, self._pool, self._post = here, config, pool, post
        self._clock, self._events = clock, events
        self._threads = _Threads(NUM_FETCHES) if beside is None else None
        self._beside = beside or self._threads.run  # type: ignore[union-attr]
        shortest, longest = PATIENCE_S
        self.patience_s = min(longest, max(shortest, PATIENCE_SHARE * config.peer_timeout_s))
        self._round = 0
        self._wants: dict[int, m.Vote] = {}
        self._read_bytes: dict[int, int] = {}
        self._passage: Passage | None = None
        self._lent_bytes = 0
        self._given: set[int] = set()
        self._groups: list[tuple[list[int], bytes]] = []
        self._early: list[tuple[int, w.Chunks]] = []
        self.documents = documents.NodeDocuments(
            here,
            config=config,
            pool=pool,
            post=post,
            clock=clock,
            events=events,
            means=means,
            patience_s=self.patience_s,
        )
        if here.nodes is not None:
            here.nodes.network.provide(KIND, self.provide)

    # -- ranks -----------------------------------------------------------------------------------------------------------

    def note(self, rank: int, message: m.Request) -> m.Request:
        """Keep what a vote says of chunks, and return it without; the lead hears what the node wants before the last of its votes."""
        if not isinstance(message, m.Vote):  # a round begins, and a lead that is new counts from the start
            self._round, self._wants, self._read_bytes = 0, {}, {}
            return message
        if message.phase == "verified":
            self._read_bytes[rank] = message.storage_bytes
        elif message.phase == "planned":
            if message.round != self._round:
                self._round, self._wants, self._read_bytes = message.round, {}, {}
            self._wants[rank] = message
            if len(self._wants) == len(self._here.local_ranks):
                self._tell_wants()
        return msgspec.structs.replace(message, num_chunks=0, wants=b"")

    def _tell_wants(self) -> None:
        wanting = [vote for vote in self._wants.values() if vote.wants and vote.error is None]
        if self._here.nodes is None or not wanting:
            return
        num_chunks = wanting[0].num_chunks
        try:
            bits = np.logical_or.reduce([policy.decode(vote.wants, num_chunks) for vote in wanting])
        except ValueError as exc:
            raise ConfigurationError(f"a rank wants what is no set of chunks: {exc}") from exc
        self._here.report(w.Wants(self._round, num_chunks, policy.encode_bits(bits)))

    def handle(self, peer: Peer, message: m.Request) -> None:
        """Carry out a request of a rank."""
        match message:
            case chunk_messages.CacheAsk():
                self._give_cache(peer, message)
            case chunk_messages.ChunksAsk():
                if (passage := self._at(message.round)) is None:
                    peer.reply(chunk_messages.ChunksToRead(message.id, [], over=True))
                else:
                    passage.ask(peer, message)
            case chunk_messages.ChunksUsed():
                if (passage := self._at(message.round)) is not None:
                    passage.used(peer.rank, message)
                peer.reply(m.Done(message.id))
            case chunk_messages.ReadingOver():
                self._given.discard(peer.rank)
                if (message.done or not self._given) and self._at(message.round) is not None:
                    self._drop()
                peer.reply(chunk_messages.NodeRead(message.id, sum(self._read_bytes.values())))
            case document_messages.DocumentsAsk() | document_messages.DocumentsOver():
                self.documents.handle(peer, message)

    def _at(self, number: int) -> Passage | None:
        return self._passage if self._passage is not None and self._passage.number == number else None

    def _give_cache(self, peer: Peer, message: chunk_messages.CacheAsk) -> None:
        passage = self._at(message.round)
        if passage is None:
            peer.reply(chunk_messages.Cache(message.id, self._here.node, 0, 0, []))
            return
        self._given.add(peer.rank)
        cache = passage.cache
        reply = chunk_messages.Cache(message.id, self._here.node, cache.size_bytes, cache.num_slots, self._groups)
        peer.reply(reply, (cache.fd,))

    def rank_gone(self, rank: int) -> None:
        """A rank's connection ended."""
        self._wants.pop(rank, None)
        self.documents.rank_gone(rank)
        if self._passage is not None:
            self._passage.rank_gone(rank)
            if rank in self._given:
                self._given.discard(rank)
                if not self._given:
                    self._drop()

    # -- the lead's word, and the neighbours' --------------------------------------------------------------------------------

    def dealt(self, word: w.PassOn) -> None:
        """The lead has dealt out the chunks of a round.

        Raises:
            msgspec.DecodeError: It makes no sense.
        """
        self._drop()
        if word.round != self._round or self._here.nodes is None:
            return
        try:
            groups = [_group(self._here, members, chunks, word.num_chunks) for members, chunks in word.groups]
            wants = {
                rank: policy.decode(vote.wants, word.num_chunks)
                for rank, vote in self._wants.items()
                if vote.wants and vote.num_chunks == word.num_chunks
            }
        except ValueError as exc:
            raise msgspec.ValidationError(str(exc)) from exc
        cache = self._make_cache(sum(len(group.chunks) for group in groups), word.num_chunks)
        if cache is None:
            self._decline(word.round, groups)
            return
        self._groups = word.groups
        self._passage = Passage(
            word.round,
            node=self._here.node,
            names=self._here.world.node_names,
            groups=groups,
            wants=wants,
            cache=cache,
            fetch=self._fetch,
            tell=self._here.send,
            patience_s=self.patience_s,
            clock=self._clock,
        )
        early, self._early = self._early, []
        for node, message in early:
            self.heard(node, message)

    def _make_cache(self, num_wanted: int, num_chunks: int) -> ChunkCache | None:
        slots = min(num_wanted, self._config.restore_cache_bytes // policy.CHUNK_BYTES)
        fixed = size_bytes(num_chunks, 0)
        lent = self._pool.lend(size_bytes(num_chunks, slots), PAGE_BYTES)
        slots = (lent - fixed) // policy.CHUNK_BYTES
        if slots >= min(MIN_SLOTS, num_wanted):
            try:
                cache = ChunkCache(num_chunks, slots)
            except CheckpointError as exc:
                self._events.emit("passed_on", "failed", error=str(exc))
            else:
                self._lent_bytes = lent
                return cache
        self._pool.take_back(lent)
        return None

    def _decline(self, number: int, groups: list[policy.Group]) -> None:
        """There is no memory for it: the others shall not wait for us."""
        failed: dict[int, list[int]] = {}
        for group in groups:
            own = group.chunks[group.readers() == self._here.node].tolist()
            for node in group.members:
                failed.setdefault(node, []).extend(own)
        for node, chunks in failed.items():
            if node != self._here.node:
                self._here.send(node, w.Chunks(number, failed=chunks))

    def heard(self, node: int, message: w.Chunks | w.DocumentsTold) -> None:
        """A neighbour told something of its chunks, or of the documents; it may have heard the lead before us."""
        if isinstance(message, w.DocumentsTold):
            self.documents.heard(node, message)
        elif (passage := self._at(message.round)) is not None:
            passage.heard(node, message)
        elif message.round >= self._round:
            self._early = [entry for entry in self._early if entry[1].round == message.round][-policy.MAX_NODES * 8 :]
            self._early.append((node, message))

    def node_lost(self, node: int) -> None:
        """A node cannot be reached."""
        self.documents.node_lost(node)
        if self._passage is not None:
            self._passage.lose(node, "cannot be reached")
            self._passage.go_on()

    # -- bytes -------------------------------------------------------------------------------------------------------------

    def provide(self, node: str, name: str) -> Source | None:
        """See `seam.Provider`; from a thread of the network."""
        passage = self._passage
        number, _, chunk = name.partition("-")
        if passage is None or number != str(passage.number) or not (chunk.isascii() and chunk.isdigit()):
            return None
        return passage.cache.source(int(chunk))

    def _fetch(self, node: int, number: int, view: memoryview, done: Callable[[str | None], None]) -> None:
        assert self._here.nodes is not None and self._passage is not None
        network, name = self._here.nodes.network, self._here.world.node_names[node]
        what, deadline_s = f"{self._passage.number}-{number}", 2 * self.patience_s

        def work() -> None:
            why = None
            try:
                network.read_into(name, KIND, what, 0, view, deadline_s=deadline_s)
            except CheckpointError as exc:
                why = f"node {name} did not pass it on: {exc.message}"
            finally:
                view.release()
            self._post(lambda: done(why))

        self._beside(work)

    # -- time ----------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        due = [self.documents.next_deadline(), self._passage.next_deadline() if self._passage is not None else None]
        return min((when for when in due if when is not None), default=None)

    def tick(self) -> None:
        """Let deadlines pass."""
        self.documents.tick()
        if self._passage is not None:
            self._passage.tick()

    def _drop(self) -> None:
        passage, self._passage, self._given = self._passage, None, set()
        if passage is None:
            return
        passage.close()
        self._pool.take_back(self._lent_bytes)
        figures = passage.figures
        self._events.emit(
            "passed_on",
            read_bytes=figures.read_bytes,
            taken_bytes=figures.taken_bytes,
            given_up="; ".join(f"{count} chunks: {why}" for why, count in figures.given_up.items()),
        )

    def close(self) -> None:
        """Stop."""
        self.documents.close()
        self._drop()
        if self._threads is not None:
            self._threads.close()


def _group(here: Here, members: list[int], chunks: bytes, num_chunks: int) -> policy.Group:
    """Return a group as the lead told it.

    Raises:
        ValueError: It is none of this node's.
    """
    if here.node not in members or not set(members) <= set(range(len(here.world.node_names))):
        raise ValueError(f"nodes {members[:8]} are no group of node {here.node}")
    return policy.group_of(members, chunks, num_chunks)


class _Threads:
    """A few daemon threads, started at first use, that nobody waits for."""

    def __init__(self, number: int) -> None:
        self._number, self._started = number, False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self, work: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            for index in range(self._number):
                threading.Thread(target=self._work, name=f"fetch-{index}", daemon=True).start()
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def close(self) -> None:
        if self._started:
            for _ in range(self._number):
                self._queue.put(None)
