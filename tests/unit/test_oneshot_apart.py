"""Tensors that are one in the template and were saved apart: compared before a byte of the model is overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safehold
from safehold.errors import IntegrityError, StateMismatchError
from safehold.format import paths
from safehold.pipeline import apart
from safehold.types import CommitId


def tied(value: float = 7.0) -> dict[str, Any]:
    weight = torch.full((300, 1000), value)
    return {"emb": weight, "head": weight, "other": torch.full((5,), value)}


def save(run: Path, *, differ: bool) -> torch.Tensor:
    weight = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000)
    weight[0, 0] = float("nan")
    head = weight.clone()
    if differ:
        head[299, 999] += 1
    safehold.save(run, {"emb": weight, "head": head, "other": torch.ones(5)})
    return weight


@pytest.mark.parametrize("part_bytes", [64 << 20, 100_000])
def test_different_values_are_refused_and_the_model_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(apart, "COMPARE_BYTES", part_bytes)
    save(tmp_path / "run", differ=True)
    state = tied()
    with pytest.raises(StateMismatchError, match=r"nothing was overwritten[^$]*emb and head: one tensor in this state"):
        safehold.load(tmp_path / "run", state)
    assert (state["emb"] == 7).all() and (state["other"] == 7).all()


@pytest.mark.parametrize("part_bytes", [64 << 20, 100_000])
def test_equal_values_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(apart, "COMPARE_BYTES", part_bytes)
    weight = save(tmp_path / "run", differ=False)
    state = tied()
    safehold.load(tmp_path / "run", state)
    assert torch.equal(state["emb"].view(torch.int32), weight.view(torch.int32))
    assert state["emb"] is state["head"] and (state["other"] == 1).all()


def test_it_is_said_together_with_all_else_that_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path / "run", differ=True)
    state = {**tied(), "other": torch.zeros(6), "new": 1}
    with pytest.raises(StateMismatchError) as caught:
        safehold.load(tmp_path / "run", state)
    assert all(word in caught.value.message for word in ("emb and head", "other: shape", "missing", "new"))


def test_damage_in_the_other_copy_is_found_before_the_model_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "run", differ=False)
    pack = tmp_path / "run" / paths.checkpoint_dir(CommitId(0, 1, 0)) / paths.pack(0, 0, 0)
    data = bytearray(pack.read_bytes())
    data[data.rindex(np.float32(299_999).tobytes())] ^= 1
    pack.write_bytes(data)
    state = tied()
    with pytest.raises(IntegrityError) as caught:
        safehold.load(tmp_path / "run", state)
    assert "overwritten" not in str(caught.value) and (state["emb"] == 7).all() and (state["other"] == 7).all()


def test_arrays_and_casts(tmp_path: Path) -> None:
    safehold.save(
        tmp_path / "run", {"a": np.arange(9.0), "b": np.arange(9.0), "e": np.zeros((0, 3)), "f": np.zeros((0, 3))}
    )
    array, empty = np.zeros(9, np.float32), np.zeros((0, 3))
    state = {"a": array, "b": array, "e": empty, "f": empty}
    safehold.load(tmp_path / "run", state, cast=True)
    assert array.tolist() == list(range(9))
