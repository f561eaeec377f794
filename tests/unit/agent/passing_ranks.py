"""Ranks of several nodes that restore chunks through their agents, step by step, in the test's hands."""

from __future__ import annotations

from collections import Counter
from typing import Any

from several_nodes import Job

from safehold.agent import chunk_messages
from safehold.agent import messages as m
from safehold.agent.chunk_cache import GIVEN_UP, table_bytes
from safehold.policy.passing_on import CHUNK_BYTES, encode

SIZE = 4096


def content(number: int) -> bytes:
    return bytes([number % 251, number // 251]) * (SIZE // 2)


class Ranks:
    """All ranks of a job, which want chunks.

    Attributes:
        wants: Rank -> numbers that it has not got yet.
        read: Rank -> chunks that it has read for all.
        storage: Rank -> chunks that it has read for itself.
        broken: Chunks that cannot be read for all.
        asleep: Ranks that do nothing.
        lying: Ranks that write something else.
    """

    def __init__(self, job: Job, wants: dict[int, list[int]], num_chunks: int) -> None:
        self.job, self.num_chunks = job, num_chunks
        self.all = {rank: sorted(numbers) for rank, numbers in wants.items()}
        self.wants = {rank: list(numbers) for rank, numbers in self.all.items()}
        self.read: dict[int, list[int]] = {rank: [] for rank in range(job.world_size)}
        self.storage: dict[int, list[int]] = {rank: [] for rank in range(job.world_size)}
        self.passed: dict[int, set[int]] = {}
        self.broken, self.asleep, self.lying = set[int](), set[int](), set[int]()
        self.round = 0
        self._asked: dict[int, int] = {}
        self._over: set[int] = set()
        self.caches: dict[int, Any] = {}
        for session in job.sessions:
            session.passing._beside = job.work.post  # no threads, so that the clock stands while chunks are fetched

    def plan(self) -> None:
        """All ask, and say what they want."""
        job = self.job
        asks = [job.send(rank, m.RestoreAsk(0, None)) for rank in range(job.world_size)]
        found = {"commit": [10, 1, 0], "manifest": b"m", "newest": [10, 1, 0], "any_commit": True}
        job.flushers[0].answer("find", {**found, "bad": [], "skipped": []})
        job.deliver()
        self.round = job.answer_to(0, asks[0]).round
        for rank in range(job.world_size):
            wants = encode(self.all.get(rank, []), self.num_chunks)
            job.send(rank, m.Vote(0, self.round, "planned", num_chunks=self.num_chunks, wants=wants))
        assert all(job.peers[rank].last(m.Verdict).outcome == "go" for rank in range(job.world_size))
        for rank, numbers in self.wants.items():
            if numbers:
                job.send(rank, chunk_messages.CacheAsk(0, self.round))
                passage = job.sessions[rank // job.per_node].passing._passage
                cache = job.peers[rank].last(chunk_messages.Cache)
                assert bool(cache.groups) == (passage is not None)
                self.passed[rank] = set(passage._reader) if passage is not None else set()
                self.caches[rank] = passage.cache if passage is not None else None

    def run(self, most: int = 4000) -> None:
        """Let all go on until all have what they want."""
        for _ in range(most):
            moved = [self.step(rank) for rank in self.wants if rank not in self.asleep]
            if all(not self.wants[rank] and self.quiet(rank) for rank in self.wants if rank not in self.asleep):
                return
            if not any(moved):
                self.job.tick(0.1)
        raise AssertionError(f"still wanted: {self.wants}")

    def quiet(self, rank: int) -> bool:
        return rank in self._over or not self.passed[rank]

    def step(self, rank: int) -> bool:
        """Read what is to be read, take what is there; returns whether anything was done."""
        if not self.passed[rank]:
            self.storage[rank] += self.wants[rank]
            self.wants[rank] = []
            return False
        return self._read(rank) | self._take(rank)

    def _read(self, rank: int) -> bool:
        answer = (
            self.job.answer_to(rank, self._asked[rank])
            if rank in self._asked
            else chunk_messages.ChunksToRead(0, [], False)
        )
        if answer is None or rank in self._over:
            return False
        if answer.over:
            self._over.add(rank)
            return True
        read, failed = [], []
        for number, slot in answer.chunks:
            if number in self.broken:
                failed.append(number)
                continue
            at = table_bytes(self.num_chunks) + slot * CHUNK_BYTES
            text = content(number + 1 if rank in self.lying else number)
            self.caches[rank]._mapping.view[at : at + SIZE] = text
            read.append((number, SIZE))
        self.read[rank] += [number for number, _ in read]
        self._asked[rank] = self.job.send(rank, chunk_messages.ChunksAsk(0, self.round, read, failed))
        return bool(read or failed)

    def _take(self, rank: int) -> bool:
        if not self.wants[rank]:
            return False
        number = self.wants[rank][0]
        cache = self.caches[rank]
        state = int(cache._table[number]) if number in self.passed[rank] else GIVEN_UP
        if not state:
            return False
        wrong = []
        if state == GIVEN_UP:
            self.storage[rank].append(number)
        else:
            at = table_bytes(self.num_chunks) + (state - 1) * CHUNK_BYTES
            if bytes(cache._mapping.view[at : at + SIZE]) != content(number):
                wrong.append(number)
                self.storage[rank].append(number)
        self.wants[rank].pop(0)
        self.job.send(rank, chunk_messages.ChunksUsed(0, self.round, [number], wrong))
        return True

    def end(self) -> None:
        """All vote that they have it all."""
        job = self.job
        for rank in range(job.world_size):
            job.send(rank, m.Vote(0, self.round, "verified", storage_bytes=len(self.read[rank]) * SIZE))
        assert all(job.peers[rank].last(m.Verdict).outcome == "go" for rank in range(job.world_size))
        for rank, cache in self.caches.items():
            if cache is not None:
                job.send(rank, chunk_messages.ReadingOver(0, self.round, True))

    def all_read(self) -> list[int]:
        """All chunks that were read for all."""
        return sorted(number for numbers in self.read.values() for number in numbers)

    def loads(self) -> Counter[int]:
        """Node -> chunks that it has read for all."""
        found: Counter[int] = Counter()
        for rank, numbers in self.read.items():
            found[rank // self.job.per_node] += len(numbers)
        return found
