"""Restores of a run: what costs a checkpoint its good name, what ends a restore, and what does not spoil one that is done."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safehold
from safehold.errors import AgentUnavailableError, ConfigurationError, DeadlineError, StorageError
from safehold.testing.fake_tier import FakeTier

Make = Callable[..., safehold.Checkpointer]


def faulty(ckpt: safehold.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    """Have a rank read from storage, which fails on demand."""
    tier = FakeTier(ckpt._restorer._tier)
    monkeypatch.setattr(ckpt._restorer, "_tier", tier)
    monkeypatch.setattr(ckpt._restorer, "_memory", lambda *_: None)
    return tier


def two_saves(ckpt: safehold.Checkpointer) -> dict[str, Any]:
    state = {"w": torch.zeros(1000)}
    for step in (5, 10):
        state["w"] += step
        ckpt.save(step, state).wait()
    return state


def quarantined(ckpt: safehold.Checkpointer) -> list[Path]:
    return list(Path(ckpt.path).glob("quarantine*/*"))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_trouble_of_one_rank_costs_no_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with make() as ckpt:
        state = two_saves(ckpt)
        tier = faulty(ckpt, monkeypatch)
        for kind, path in (("open_pack", "*"), ("get", "*.objects")):
            tier.fail(kind, path=path, error=OSError(number, "not here, not now"))
            with pytest.raises(StorageError, match="not here, not now") as caught:
                ckpt.restore(state)
            assert ("partly overwritten" in str(caught.value)) == (kind == "open_pack")
        assert not quarantined(ckpt)
        assert ckpt.restore(state) == 10 and ckpt.incarnation == 1


def test_bytes_that_the_storage_has_lost_cost_the_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as ckpt:
        state = two_saves(ckpt)
        faulty(ckpt, monkeypatch).fail("read_into", error=OSError(errno.EIO, "Input/output error"))
        assert ckpt.restore(state) == 5 and state["w"].unique().tolist() == [5.0]
        assert quarantined(ckpt) and ckpt.incarnation == 2


@pytest.mark.parametrize("path", ["plans/*", "*.objects", "*/node-*.json"])
def test_storage_that_hangs_ends_a_restore_by_name(make: Make, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with make(stall_timeout_s=0.3) as ckpt:
        state = two_saves(ckpt)
        tier = faulty(ckpt, monkeypatch)
        gate = tier.hang("get", path=path)
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match="documents of a checkpoint"):
            ckpt.restore(state)
        assert time.monotonic() - begun < 5.0
        gate.release()
        assert ckpt.restore(state) == 10


@pytest.mark.parametrize("step", ["5", True, 5.0, -1])
def test_what_is_no_step_is_refused(make: Make, step: Any) -> None:
    with make() as ckpt:
        state = two_saves(ckpt)
        with pytest.raises(ConfigurationError, match="a step is"):
            ckpt.restore(state, step)
        assert ckpt.restore(state, np.int64(5)) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_restored_is_not_lost_to_what_comes_after(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overlap: bool
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise AgentUnavailableError("no agent today")

    with make() as ckpt:
        state = two_saves(ckpt)
    with make(every=3, overlap=overlap) as ckpt:
        for name in ("prepare", "prepare_restored"):
            monkeypatch.setattr(ckpt._saver, name, fail)
        with caplog.at_level(logging.WARNING):
            assert ckpt.restore(state) == 10
        assert "no agent today" in caplog.text


def test_a_step_that_only_prepares_raises_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise AgentUnavailableError("no agent today")

    with make(every=3) as ckpt, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(ckpt._saver, "prepare", fail)
        assert ckpt.step(1, {"w": torch.zeros(3)}) is None
        assert "no agent today" in caplog.text
