"""Documents that an agent hands out to a rank: believed only if they are what was offered, else storage is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import safehold
from safehold.agent import document_messages as dm
from safehold.agent import messages as m
from safehold.config import Config
from safehold.format import document
from safehold.host import memfd
from safehold.pipeline.bundle import collect, pack, unpack
from safehold.testing.fake_tier import FakeTier
from safehold.trainer.documents import HandedOut
from safehold.types import CommitId

DATA = pack({"plans/a": b"a plan"})
OFFER = m.RestoreOffer(0, 10, 1, 0, round=3, documents=(len(DATA), document.digest(DATA)))


class Agent:
    """Hands out what it is told."""

    def __init__(self, data: bytes | None, size: int = -1, round_: int = 3) -> None:
        self.data, self.size, self.round = data, size, round_
        self.told: list[Any] = []

    def request(self, message: Any, kind: type, timeout_s: float, what: str) -> tuple[dm.Documents, list[int]]:
        assert message == dm.DocumentsAsk(0, self.round) and kind is dm.Documents
        if self.data is None:
            return dm.Documents(1, 0), []
        fd = memfd.create(len(self.data), "test")
        os.pwrite(fd, self.data, 0)
        return dm.Documents(1, self.size if self.size >= 0 else len(self.data)), [fd]

    def tell(self, message: Any) -> None:
        self.told.append(message)


def handed_out(agent: Agent) -> HandedOut:
    return HandedOut(agent, Config(), OFFER)  # type: ignore[arg-type]


def test_what_was_offered_is_taken_and_let_go_of_once() -> None:
    agent, tier = Agent(DATA), FakeTier()
    found = handed_out(agent)
    over = found.over(tier)
    assert over is not None and over.get("plans/a", limit_bytes=100) == b"a plan" and not tier.log
    found.end(done=True)
    found.end(done=False)
    assert agent.told == [dm.DocumentsOver(-1, 3, True)]
    with pytest.raises(FileNotFoundError):
        over.get("plans/a", limit_bytes=100)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Agent(None), ""),
        (Agent(DATA[:-1] + b"?"), "not those that the lead has named"),
        (Agent(DATA, 5), "5 bytes came"),
        (Agent(DATA[:-1], len(DATA)), "shared memory passed has"),
    ],
)
def test_whatever_else_comes_is_left_for_storage(agent: Agent, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "safehold"):
        found = handed_out(agent)
    assert found.over(FakeTier()) is None
    assert said in caplog.text and bool(said) == bool(caplog.records)
    found.end(done=False)
    assert agent.told == [dm.DocumentsOver(-1, 3, False)]


@pytest.mark.parametrize("damaged", ["", "plans/", "node-00000.objects", "manifest.json"])
def test_a_document_that_does_not_verify_is_read_from_storage(
    make: Callable[..., safehold.Checkpointer], monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    with make() as ckpt:
        state: dict[str, Any] = {"w": torch.arange(100), "note": "kept"}
        ckpt.save(10, state).wait()
        restorer, client = ckpt._restorer, ckpt._run.client
        commit = CommitId(10, ckpt.incarnation, 0)
        data = collect(restorer._tier, commit, {}, 1 << 30)
        assert data is not None
        files = {path: bytes(found) for path, found in unpack(memoryview(data)).items()}
        for path in [path for path in files if damaged and damaged in path]:
            files[path] = bytes(len(files[path]))
        data = pack(files)
        tier = restorer._tier = FakeTier(restorer._tier)
        real = client.request

        def request(message: Any, kind: Any, timeout_s: float, what: str) -> Any:
            if isinstance(message, dm.DocumentsAsk):
                return Agent(data, round_=message.round).request(message, kind, timeout_s, what)
            reply, fds = real(message, kind, timeout_s, what)
            if isinstance(reply, m.RestoreOffer):
                reply = replace(reply, manifest=b"", documents=(len(data), document.digest(data)))
            return reply, fds

        monkeypatch.setattr(client, "request", request)
        state = {"w": torch.zeros(100, dtype=torch.int64), "note": ""}
        assert ckpt.restore(state) == 10 and state["note"] == "kept" and torch.equal(state["w"], torch.arange(100))
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.documents == ("storage" if damaged else "agent")
        assert bool([op for op in tier.log if op.kind == "get"]) == bool(damaged)
