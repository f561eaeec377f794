"""Seeded: memory saves that succeed or fail in any way, then losses and a new start: what was durable comes back, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from memory_nodes import PACK_BYTES, SAVE, MemoryJob

from safehold.agent import messages as m
from safehold.agent import words as w
from safehold.errors import AgentUnavailableError, StorageError

NODES = 4
FAULTS = ("none", "none", "spoil", "cut", "stage", "publish", "lead")


def unreachable() -> bytes:
    raise AgentUnavailableError("it does not answer")


class Story:
    """One run of saves and starts, by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.told: list[str] = [f"seed {seed}"]
        self.job = MemoryJob(NODES, copies=self.random.choice((1, 1, 2)))
        self.step = 0
        self.durable = 0  # the last step that any rank was told of
        self.saved: set[int] = set()
        self.is_protected = False  # whether the newest has all its copies: one that was restored may have fewer

    def save(self) -> None:
        job, fault = self.job, self.random.choice(FAULTS)
        self.step += 1
        self.saved.add(self.step)
        self.told.append(f"save {self.step} {fault}")
        victim = self.random.randrange(NODES)
        for rank in range(NODES):
            job.begin(rank, self.step, packs=[(0, PACK_BYTES)], arena_bytes=PACK_BYTES, **SAVE)
        if fault == "stage":
            error = StorageError("no").to_wire()
            job.send(victim, m.StageFailed(-1, self.step, 0, error))
        elif fault == "spoil":
            job.spoil = lambda source, target, what, data: data[:-1] + b"\x00" if source == f"n{victim}" else data
        elif fault == "cut":
            job.spoil = lambda source, target, what, data: unreachable() if source == f"n{victim}" else data
        elif fault in ("publish", "lead"):
            job.sessions[max(1, victim)].memory.hold_manifest = lambda word: None
        told = len(job.told(w.HoldManifest))
        for rank in range(NODES):
            if fault != "stage" or job.flushers[rank].open("hold"):
                job.stage_memory(rank, self.step)
        if fault in ("publish", "lead"):
            job.settle_threads(lambda: len(job.told(w.HoldManifest)) > told)
            job.cut(0, max(1, victim))
        job.settle_threads(lambda: all(self.verdict(rank) for rank in range(NODES)))
        if any(self.verdict(rank) == "durable" for rank in range(NODES)):
            self.durable, self.is_protected = self.step, True
        self.heal()

    def verdict(self, rank: int) -> str:
        return next((what for what, step in self.job.verdicts(rank) if step == self.step), "")

    def heal(self) -> None:
        job = self.job
        job.spoil = lambda source, target, what, data: data
        for session in job.sessions:
            session.memory.__dict__.pop("hold_manifest", None)
        for one in range(NODES):
            for other in range(one):
                if frozenset((f"n{one}", f"n{other}")) in job.cuts:
                    job.mend(one, other)
        job.deliver()

    def restart(self) -> None:
        job = self.job
        copies = len(job.sessions[0].memory.partners.of[0])
        lost = set(self.random.sample(range(NODES), self.random.randint(0, copies))) if self.is_protected else set()
        self.told.append(f"start without {lost}")
        job.restart(lost)
        offers = job.ask_restore()
        found = offers[0].step or 0
        assert found >= self.durable, self.told
        assert {offer.step for offer in offers} == {offers[0].step}
        if found:
            assert found in self.saved, self.told
            for old in range(NODES):
                data: Any = job.pack_of(offers[old], old, old, old)
                assert data == job.bytes_of(old, found), self.told
            for phase in ("planned", "verified"):
                for rank in range(NODES):
                    job.send(rank, m.Vote(0, offers[0].round, phase))
        self.durable, self.is_protected = found, False


@pytest.mark.parametrize("seed", [*range(20), 48, 54, 70])  # the last ones have found something
def test_what_was_told_to_be_durable_comes_back(seed: int) -> None:
    story = Story(seed)
    for _ in range(3):
        for _ in range(story.random.randint(1, 4)):
            story.save()
        story.restart()
