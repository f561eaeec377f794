"""One node's share in passing chunks on, in one round of a restore: which chunks are read, fetched, kept, given away and given up.

Invariants: used from the dispatcher thread only; nothing here waits. Slots are given in the order of the chunks' numbers, which is also
the order in which ranks use them, on all nodes: so the first chunk that somebody waits for always has a slot where it is read and where it
is taken to, and no wait goes in a circle however small the cache is. A chunk that will not come is given up, and then the ranks that want
it read it from storage: where its reader is lost, has failed, has sent bytes that do not verify, or has had no news for two patiences while
it was waited for. Who takes nothing for four, while others wait for its slots, is waited for no more; meanwhile these hear that we live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from safehold.agent import chunk_messages
from safehold.agent import words as w
from safehold.agent.chunk_cache import ChunkCache
from safehold.clock import Clock
from safehold.policy.passing_on import CHUNK_BYTES, Bits, Group

NUM_FETCHES, FETCHES_PER_NODE = 6, 2
GIVEN_AT_A_TIME = 2
ASK_S = 1.0
TELL_EVERY_S = 0.05
SLOW_READS = 2
MAX_FAILURES = 2


class Asker(Protocol):
    """A rank that asks for chunks to read."""

    rank: int

    def reply(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting."""
        ...


@dataclass(slots=True)
class _Neighbour:
    """What is known of another node."""

    news_at: float
    took_at: float
    lost: str = ""
    fetching: int = 0
    failures: int = 0
    here: list[tuple[int, int]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class PassageFigures:
    """What was passed on: bytes read here, and taken from others; and how many chunks were given up, by reason."""

    read_bytes: int = 0
    taken_bytes: int = 0
    given_up: dict[str, int] = field(default_factory=dict)


class Passage:
    """See the module.

    Args:
        number: The round.
        node: This node.
        names: Of all nodes.
        groups: Those that this node is a member of.
        wants: Rank of this node -> bitmap of what it wants.
        cache: The memory; at least two slots for each of the two kinds of chunks, or as many as there are.
        fetch: Has a chunk fetched from another node, beside: (node, number, view, then told why it failed or None).
        tell: Tells another node.
        patience_s: See the module.
        clock: Time.
    """

    def __init__(
        self,
        number: int,
        *,
        node: int,
        names: Sequence[str],
        groups: Iterable[Group],
        wants: Mapping[int, Bits],
        cache: ChunkCache,
        fetch: Callable[[int, int, memoryview, Callable[[str | None], None]], None],
        tell: Callable[[int, w.Chunks], None],
        patience_s: float,
        clock: Clock,
    ) -> None:
        self.number, self.cache, self.figures = number, cache, PassageFigures()
        self._node, self._names, self._fetch, self._tell, self._clock = node, names, fetch, tell, clock
        self._patience_s, self._slowest_s = patience_s, 0.0
        self._reader: dict[int, int] = {}
        self._turn: dict[int, tuple[int, int]] = {}
        self._users: dict[int, set[int]] = {}  # ranks; other nodes as -1 - node
        now = clock.monotonic()
        self._others: dict[int, _Neighbour] = {}
        for group in groups:
            others = [other for other in group.members if other != node]
            size, own = len(group.members), group.members.index(node)
            for other in others:
                self._others.setdefault(other, _Neighbour(now, now))
            for place, (chunk, reader) in enumerate(zip(group.chunks.tolist(), group.readers().tolist(), strict=True)):
                self._reader[chunk] = reader
                self._turn[chunk] = (place // size, (place - own) % size)  # all nodes begin with another one
                users = {rank for rank, bits in wants.items() if bits[chunk]}
                self._users[chunk] = users | {-1 - other for other in others} if reader == node else users
        self._to_read = deque(sorted(chunk for chunk, reader in self._reader.items() if reader == node))
        self._to_take = deque(sorted(chunk for chunk, reader in self._reader.items() if reader != node))
        self._share_slots()
        self._reading: dict[int, float] = {}
        self._shown: dict[int, float] = {}
        self._taking: dict[int, float] = {}
        self._fetching: set[int] = set()
        self._here: dict[int, int] = {}
        self._dead: set[int] = set()
        self._done: set[int] = set()
        self._askers: deque[tuple[Asker, int, float]] = deque()
        self._told_at = float("-inf")
        self._closed = False

    def _share_slots(self) -> None:
        """Both kinds get all the slots they need, or the smaller one as many as it can use of a half."""
        slots, read, take = self.cache.num_slots, len(self._to_read), len(self._to_take)
        self._read_room = read if read + take <= slots else min(read, max(slots // 2, slots - take))
        self._take_room = min(take, slots - self._read_room)

    # -- ranks -----------------------------------------------------------------------------------------------------------

    def ask(self, peer: Asker, message: chunk_messages.ChunksAsk) -> None:
        """A rank has read chunks, and asks for more."""
        self._slowest_s = max(self._slowest_s, min(message.read_s, 60.0))
        now = self._clock.monotonic()
        for number, size in message.read:
            if self._reading.pop(number, None) is None or not 0 < size <= CHUNK_BYTES:
                continue
            if number in self._dead:  # it took too long, and was given up meanwhile
                self._let_go(number)
                continue
            self.figures.read_bytes += size
            self.cache.show(number, size)
            self._shown[number] = now
            for other in self._takers(number):
                self._others[other].here.append((number, size))
        for number in message.failed:
            if self._reading.pop(number, None) is not None:
                self._give_up(number, "could not be read")
                self._let_go(number)
        self._askers.append((peer, message.id, now + ASK_S))
        self.go_on()

    def used(self, rank: int, message: chunk_messages.ChunksUsed) -> None:
        """A rank needs chunks no more."""
        for number in message.wrong:
            reader = self._reader.get(number, self._node)
            if reader != self._node:
                self.lose(reader, "sent bytes that do not verify")
        for number in message.chunks:
            self._release(number, rank)
        self.go_on()

    def rank_gone(self, rank: int) -> None:
        """A rank asks for nothing any more; what it was reading is given up."""
        self._askers = deque(entry for entry in self._askers if entry[0].rank != rank)

    # -- other nodes -----------------------------------------------------------------------------------------------------

    def heard(self, node: int, message: w.Chunks) -> None:
        """A neighbour told something; what makes no sense from there is ignored, as bytes are verified whatever is told."""
        other = self._others.get(node)
        if other is None:
            return
        now = other.news_at = self._clock.monotonic()
        for number, size in message.here:
            if self._reader.get(number) == node and number not in self._dead and 0 < size <= CHUNK_BYTES:
                self._here[number] = size
        for number in message.failed:
            if self._reader.get(number) == node:
                self._give_up(number, f"node {self._names[node]} could not read it")
        for number in message.taken:
            if self._reader.get(number) == self._node:
                other.took_at = now
                self._release(number, -1 - node)
        self.go_on()

    def lose(self, node: int, why: str) -> None:
        """Nothing more is expected of a node: what it should pass on is read from storage."""
        other = self._others.get(node)
        if other is None or other.lost:
            return
        other.lost = why
        why = f"node {self._names[node]} {why}"
        for number, reader in self._reader.items():
            if reader == node and number not in self._fetching:
                self._give_up(number, why)
        self._expect_no_taking(node)

    def _expect_no_taking(self, node: int) -> None:
        for number in list(self._users):
            if self._reader[number] == self._node:
                self._release(number, -1 - node)

    # -- going on ----------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Hand out and fetch what there is room for, and tell the neighbours."""
        if self._closed:
            return
        self._hand_out()
        now = self._clock.monotonic()
        while self._to_take and len(self._taking) < self._take_room:
            number = self._to_take.popleft()
            if number not in self._dead:
                self.cache.place(number)
                self._taking[number] = now
        self._start_fetches()
        self._tell_neighbours()

    def _hand_out(self) -> None:
        now = self._clock.monotonic()
        while self._askers and self._to_read and (room := self._read_room - self._num_read_slots()) > 0:
            peer, request, _ = self._askers.popleft()
            chunks: list[tuple[int, int]] = []
            while self._to_read and len(chunks) < min(GIVEN_AT_A_TIME, room):
                number = self._to_read.popleft()
                chunks.append((number, self.cache.place(number)))
                self._reading[number] = now
            peer.reply(chunk_messages.ChunksToRead(request, chunks, over=False))
        while self._askers and (not self._to_read or self._askers[0][2] <= now):
            peer, request, _ = self._askers.popleft()
            peer.reply(chunk_messages.ChunksToRead(request, [], over=not self._to_read))

    def _num_read_slots(self) -> int:
        """Slots of chunks that this node reads."""
        return self.cache.num_slots - self.cache.num_free - len(self._taking)

    def _start_fetches(self) -> None:
        for number in sorted(self._taking, key=self._turn.__getitem__):
            if len(self._fetching) >= NUM_FETCHES:
                return
            size, other = self._here.get(number), self._others[self._reader[number]]
            if size is None or number in self._fetching or number in self._shown or number in self._dead:
                continue
            if other.fetching < FETCHES_PER_NODE:
                self._start_fetch(number, size, other)

    def _start_fetch(self, number: int, size: int, other: _Neighbour) -> None:
        def done(why: str | None) -> None:
            self._fetching.discard(number)
            other.fetching -= 1
            if self._closed:
                return
            if why is None and number not in self._dead:
                self._took(number, size, other)
            else:
                self._missed(number, why or "", other)
            self.go_on()

        other.fetching += 1
        self._fetching.add(number)
        self._fetch(self._reader[number], number, self.cache.view(number, size), done)

    def _took(self, number: int, size: int, other: _Neighbour) -> None:
        now = self._clock.monotonic()
        self.cache.show(number, size)
        self.figures.taken_bytes += size
        self._shown[number] = other.news_at = now
        other.failures = 0
        other.taken.append(number)
        if not self._users[number]:
            self._let_go(number)

    def _missed(self, number: int, why: str, other: _Neighbour) -> None:
        self._give_up(number, why)
        self._let_go(number)
        other.failures += 1
        if other.failures >= MAX_FAILURES:
            self.lose(self._reader[number], why)

    def _tell_neighbours(self, *, at_once: bool = False) -> None:
        now = self._clock.monotonic()
        if not at_once and now < self._told_at + TELL_EVERY_S:
            return
        for node, other in self._others.items():
            if other.here or other.failed or other.taken:
                self._told_at = now
                self._tell(node, w.Chunks(self.number, other.here, other.failed, other.taken))
                other.here, other.failed, other.taken = [], [], []

    # -- letting go --------------------------------------------------------------------------------------------------------

    def _takers(self, number: int) -> list[int]:
        return [-1 - user for user in self._users[number] if user < 0]

    def _release(self, number: int, user: int) -> None:
        users = self._users.get(number)
        if users is None:
            return
        users.discard(user)
        if not users and number in self._shown:
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        """Nobody uses a chunk any more, or it will not come."""
        self._taking.pop(number, None)
        if self._shown.pop(number, None) is not None:
            self._done.add(number)
        self.cache.free(number)

    def _give_up(self, number: int, why: str) -> None:
        """A chunk will not come; slots that somebody may still write to stay taken until that is over."""
        if number in self._dead or number in self._shown or number in self._done:
            return
        self._dead.add(number)
        self.figures.given_up[why] = self.figures.given_up.get(why, 0) + 1
        self.cache.give_up(number)
        if self._reader[number] == self._node:
            for other in self._takers(number):
                self._others[other].failed.append(number)
            return
        self._others[self._reader[number]].taken.append(number)
        if number not in self._fetching:
            self._let_go(number)

    # -- time --------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due."""
        now = self._clock.monotonic()
        due = [when for *_, when in self._askers]
        if any(other.here or other.failed or other.taken for other in self._others.values()):
            due.append(self._told_at + TELL_EVERY_S)
        if self._reading or self._taking or self._to_read:
            due.append(now + self._patience_s / 4)
        return min(due, default=None)

    def tick(self) -> None:
        """Let deadlines pass."""
        now = self._clock.monotonic()
        patience_s = max(self._patience_s, SLOW_READS * self._slowest_s)
        for number, since in list(self._taking.items()):
            reader = self._reader[number]
            waited_s = now - max(since, self._others[reader].news_at)
            if number not in self._here and number not in self._dead and waited_s > 2 * patience_s:
                self.lose(reader, f"had no news of what it reads for {waited_s:.0f} s")
        for number, since in list(self._reading.items()):
            if now - since > 2 * patience_s:
                self._give_up(number, f"was not read within {now - since:.0f} s")
        if self._to_read and self._num_read_slots() >= self._read_room:
            self._wait_for_takers(now, patience_s)
        self.go_on()

    def _wait_for_takers(self, now: float, patience_s: float) -> None:
        """Slots are short: who takes nothing is waited for no more; while it is, those that wait for us hear why, with their patience."""
        own = sorted((number, since) for number, since in self._shown.items() if self._reader[number] == self._node)
        for number, since in own:
            for taker in self._takers(number):
                if now - max(since, self._others[taker].took_at) > 4 * patience_s:
                    self._expect_no_taking(taker)
        if own and self._takers(own[0][0]) and now - self._told_at > patience_s / 2:
            self._told_at = now
            for node, other in self._others.items():
                if not other.lost:
                    self._tell(node, w.Chunks(self.number))

    def close(self) -> None:
        """It is over: who still asks hears so, and the memory goes."""
        self._closed = True
        while self._askers:
            peer, request, _ = self._askers.popleft()
            peer.reply(chunk_messages.ChunksToRead(request, [], over=True))
        self.cache.close()
