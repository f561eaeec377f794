"""`safehold.save` and `safehold.load`: once, without an agent, alone or with several ranks over a store."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run_dirs import flip
from whole_saves import equal

import safehold
from safehold import oneshot
from safehold.errors import (
    CheckpointError,
    ChecksumError,
    ConfigurationError,
    DeadlineError,
    IntegrityError,
    StateMismatchError,
    StepNotFoundError,
    StorageFullError,
    UnsupportedStateError,
)
from safehold.format import paths
from safehold.pipeline import direct_save
from safehold.pipeline.catalog import Catalog
from safehold.pipeline.verify import verify
from safehold.policy import belief
from safehold.testing.fake_tier import FakeTier
from safehold.tiers.open import open_tier
from safehold.types import CommitId


def numbers(version: int = 1) -> dict[str, Any]:
    return {
        "model": {"w": np.arange(12.0).reshape(3, 4) * version, "b": np.array(version, np.int32)},
        "list": [np.ones(3) * version, {"deep": [1, 2, version]}, None],
        "step": version,
        "empty": np.zeros((0, 2)),
    }


def tensors(version: int = 1) -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4) * version
    return {
        "w": weight,
        "tied": weight,
        "half": torch.full((5,), 0.5 * version, dtype=torch.bfloat16),
        "strided": torch.arange(20).reshape(4, 5).t(),
        "nested": {"x": [torch.tensor(version), torch.zeros(0)], "text": "läuft"},
    }


def believed(path: Path) -> list[CommitId]:
    return belief.believed(Catalog(open_tier(path)).listing())


# One rank.


def test_arrays_and_plain_values_come_back(tmp_path: Path) -> None:
    assert safehold.save(tmp_path / "run", numbers(), step=7, metrics={"loss": 0.5}) == 7
    assert equal(safehold.load(tmp_path / "run"), numbers())
    report = verify(open_tier(tmp_path / "run"), CommitId(7, 1, 0))
    assert report.ok and not report.notes
    manifest = Catalog(open_tier(tmp_path / "run")).commits()[0].manifest
    assert manifest is not None and manifest.metrics == {"loss": 0.5} and not manifest.final


def test_tensors_come_back_tied_ones_too(tmp_path: Path) -> None:
    state = tensors()
    safehold.save(tmp_path / "run", state)
    found = safehold.load(tmp_path / "run")
    for name in ("w", "tied", "half", "strided"):
        assert found[name].dtype == state[name].dtype and torch.equal(found[name], state[name])
    assert found["nested"]["text"] == "läuft" and torch.equal(found["nested"]["x"][0], torch.tensor(1))
    assert found["nested"]["x"][1].shape == (0,)


@pytest.mark.parametrize("how", ["url", "string", "relative"])
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = {"url": f"file://{tmp_path}/a%20b", "string": str(tmp_path / "a b"), "relative": "a b"}[how]
    safehold.save(path, numbers())
    assert equal(safehold.load(tmp_path / "a b"), numbers())


def test_steps(tmp_path: Path) -> None:
    for step in (20, 10, 1_000_000_000):
        safehold.save(tmp_path / "run", numbers(step), step=step)
    assert safehold.load(tmp_path / "run")["step"] == 1_000_000_000
    assert safehold.load(tmp_path / "run", step=10)["step"] == 10
    with pytest.raises(StepNotFoundError, match="no such checkpoint") as caught:
        safehold.load(tmp_path / "run", step=11)
    assert "10" in str(caught.value.hint)


def test_a_step_is_replaced_only_if_told_to(tmp_path: Path) -> None:
    safehold.save(tmp_path / "run", numbers(1), step=5)
    with pytest.raises(ConfigurationError, match="step 5 is committed already"):
        safehold.save(tmp_path / "run", numbers(2), step=5)
    assert safehold.load(tmp_path / "run")["step"] == 1
    safehold.save(tmp_path / "run", numbers(2), step=5, overwrite=True)
    assert safehold.load(tmp_path / "run")["step"] == 2


def test_names_choose_leaves_and_only_those_are_read(tmp_path: Path) -> None:
    safehold.save(tmp_path / "run", numbers())
    assert equal(safehold.load(tmp_path / "run", names=["model.*"]), {"model": numbers()["model"]})
    assert safehold.load(tmp_path / "run", names=["step"]) == {"step": 1}
    assert safehold.load(tmp_path / "run", names=["*.b", "step"]).keys() == {"model", "step"}
    assert safehold.load(tmp_path / "run", names="step") == {"step": 1}
    for names in (["nothing"], ["step", "nothing"]):
        with pytest.raises(StateMismatchError, match="no leaf matches nothing"):
            safehold.load(tmp_path / "run", names=names)
    for options in ({"partial": True}, {"rename": {"step": "x"}}, {"cast": True}, {"random_states": True}):
        with pytest.raises(ConfigurationError, match="need a template"):
            safehold.load(tmp_path / "run", **options)
    with pytest.raises(StateMismatchError, match="goes without a template"):
        safehold.load(tmp_path / "run", numbers(), names=["step"])


def test_an_alias_alone(tmp_path: Path) -> None:
    safehold.save(tmp_path / "run", tensors())
    for name in ("w", "tied"):
        found = safehold.load(tmp_path / "run", names=[name])
        assert found.keys() == {name} and torch.equal(found[name], tensors()["w"])


def test_random_states_are_kept_if_asked_for_and_not_shown(tmp_path: Path) -> None:
    torch.manual_seed(3)
    safehold.save(tmp_path / "run", {"x": 1}, random_states=True)
    wanted = torch.rand(4)
    assert safehold.load(tmp_path / "run") == {"x": 1}
    torch.manual_seed(4)
    safehold.load(tmp_path / "run", {"x": 0})
    assert not torch.equal(torch.rand(4), wanted)
    safehold.load(tmp_path / "run", {"x": 0}, random_states=True)
    assert torch.equal(torch.rand(4), wanted)


def test_templates_are_filled_in_place(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    safehold.save(tmp_path / "run", {"model": model, "optimizer": optimizer, "extra": 3}, step=1)
    fresh = torch.optim.Adam(other.parameters())
    template: dict[str, Any] = {"model": other, "optimizer": fresh, "extra": 0}
    pointer = other.weight.data_ptr()
    assert safehold.load(tmp_path / "run", template) is template
    assert other.weight.data_ptr() == pointer and torch.equal(other.weight, model.weight) and template["extra"] == 3
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_templates_that_do_not_fit_are_left_alone(tmp_path: Path) -> None:
    safehold.save(tmp_path / "run", {"a": np.ones(3), "b": np.ones(2), "c": 1})
    template = {"a": np.zeros(3), "b": np.zeros(5), "d": np.zeros(1)}
    with pytest.raises(StateMismatchError) as caught:
        safehold.load(tmp_path / "run", template)
    assert all(name in str(caught.value) for name in ("b", "c", "d")) and not template["a"].any()
    safehold.load(tmp_path / "run", {"a": template["a"]}, partial=True)
    assert template["a"].all()
    narrow = np.zeros(3, np.float32)
    safehold.load(tmp_path / "run", {"x": narrow}, partial=True, rename={"a": "x"}, cast=True)
    assert narrow.all()


def test_states_at_the_edges(tmp_path: Path) -> None:
    for number, state in enumerate(
        [{}, {"a": {}}, {"a": []}, {"a": np.zeros(0)}, {"t": (1, np.ones(2))}, {0: np.ones(1), "0": np.zeros(1)}]
    ):
        safehold.save(tmp_path / "run", state, step=number)
        assert equal(safehold.load(tmp_path / "run", step=number), state)
    with pytest.raises(ConfigurationError):
        safehold.save(tmp_path / "run", np.ones(3), step=9)
    with pytest.raises(UnsupportedStateError, match=r"b.*c"):
        safehold.save(tmp_path / "run", {"b": {"c": lambda: None}}, step=9)
    assert believed(tmp_path / "run")[0].step == 5


def test_what_was_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    state = OrderedDict(w=torch.ones(1000), later=np.zeros(10))
    safehold.save(tmp_path / "run", state)
    state["w"].fill_(7)
    assert torch.equal(safehold.load(tmp_path / "run")["w"], torch.ones(1000))


def test_nothing_there(tmp_path: Path) -> None:
    for step in (None, 5):
        with pytest.raises(StepNotFoundError, match="this directory does not exist"):
            safehold.load(tmp_path / "absent", step=step)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(StepNotFoundError, match=r"no run directory[^$]*the directory is empty"):
        safehold.load(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.pt").write_text("precious")
    for action in (lambda: safehold.load(tmp_path / "full"), lambda: safehold.save(tmp_path / "full", {"a": 1})):
        with pytest.raises(CheckpointError, match="no run directory"):
            action()
    assert os.listdir(tmp_path / "full") == ["model.pt"]


def test_nothing_stays_open_or_mapped(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps", encoding="ascii") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd" in line for line in maps)

    safehold.save(tmp_path / "run", numbers(), step=0)
    safehold.load(tmp_path / "run")
    before = held()
    for step in range(1, 4):
        safehold.save(tmp_path / "run", numbers(), step=step)
        safehold.load(tmp_path / "run")
    assert held() == before


# Trouble.


def pack_of(path: Path, commit: CommitId, rank: int = 0) -> Path:
    return path / paths.checkpoint_dir(commit) / paths.pack(0, rank, 0)


@pytest.mark.parametrize("template", [False, True])
def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: bool
) -> None:
    path = tmp_path / "run"
    for step in (1, 2, 3):
        safehold.save(path, {"w": np.full(1000, float(step))}, step=step)
    flip(pack_of(path, CommitId(3, 3, 0)), 4096 + 500)
    flip(path / paths.checkpoint_dir(CommitId(2, 2, 0)) / "manifest.json", 300)
    state = {"w": np.zeros(1000)} if template else None
    with caplog.at_level(logging.WARNING, "safehold"):
        found = safehold.load(path, state)
    assert (found["w"] == 1.0).all() and (state is None or found is state)
    text = caplog.text
    assert "step 3 cannot be used" in text and "bytes of w" in text and "00000-00000.0.safetensors" in text
    assert "step 2 cannot be used" in text and "manifest.json" in text
    for step in (2, 3):
        with pytest.raises(IntegrityError) as caught:
            safehold.load(path, step=step)
        assert caught.value.step == step and caught.value.path


def test_what_cannot_be_used_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log where an older one was taken, with the error where there is none."""
    path = tmp_path / "run"
    for step in (1, 2, 3):
        safehold.save(path, {"w": np.full(1000, float(step)), "v": step}, step=step)
    for step in (2, 3):
        flip(pack_of(path, CommitId(step, step, 0)), 4096 + 500)
    with caplog.at_level(logging.WARNING, "safehold"):
        with pytest.raises(StateMismatchError) as misfit:
            safehold.load(path, {"w": np.zeros(1000)})
        assert [note[:14] for note in getattr(misfit.value, "__notes__", [])] == []
        assert safehold.load(path)["v"] == 1
    assert [caplog.text.count(f"step {step} cannot be used") for step in (1, 2, 3)] == [0, 1, 1]
    caplog.clear()
    flip(pack_of(path, CommitId(1, 1, 0)), 4096 + 500)
    with caplog.at_level(logging.WARNING, "safehold"), pytest.raises(ChecksumError) as caught:
        safehold.load(path)
    assert caught.value.step == 3 and not caplog.text
    notes = "\n".join(caught.value.__notes__)
    assert "step 2 cannot be used" in notes and "step 1 cannot be used" in notes and "step 3" not in notes


def test_where_there_is_no_older_one_the_first_error_is_told_and_whether_the_state_was_touched(tmp_path: Path) -> None:
    safehold.save(tmp_path / "run", {"w": np.ones(1000), "v": np.ones(10)}, step=3)
    flip(pack_of(tmp_path / "run", CommitId(3, 1, 0)), 4096 + 500)
    with pytest.raises(ChecksumError, match="partly overwritten"):
        safehold.load(tmp_path / "run", {"w": np.zeros(1000), "v": np.zeros(10)})
    with pytest.raises(ChecksumError) as caught:
        safehold.load(tmp_path / "run")
    assert "overwritten" not in str(caught.value)


def use_tier(monkeypatch: pytest.MonkeyPatch, path: Path) -> FakeTier:
    tier = FakeTier(open_tier(path))
    monkeypatch.setattr(oneshot, "open_tier", lambda *_, **__: tier)
    return tier


def test_a_disk_that_never_answers_ends_in_an_error_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    safehold.save(path, numbers(1), step=1)
    monkeypatch.setenv("SAFEHOLD_FLUSH_TIMEOUT_S", "0.3")
    for number, kind in enumerate(["list", "create_pack", "write_at", "finish", "put", "sync_tree"]):
        tier = use_tier(monkeypatch, path)
        gate = tier.hang(kind, times=-1)
        begun = time.monotonic()
        with pytest.raises(DeadlineError):
            safehold.save(path, numbers(2), step=2 + number)
        assert time.monotonic() - begun < 8, kind
        gate.release()
        monkeypatch.undo()
        monkeypatch.setenv("SAFEHOLD_FLUSH_TIMEOUT_S", "0.3")
    time.sleep(0.1)
    monkeypatch.undo()
    safehold.save(path, numbers(9), step=9)
    assert equal(safehold.load(path), numbers(9))


def test_a_commit_that_fails_half_way_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    safehold.save(path, numbers(1), step=1)
    tier = use_tier(monkeypatch, path)
    tier.fail("put", path="*/manifest.json", error=OSError(errno.ENOSPC, "full"), applied=True)
    with pytest.raises(StorageFullError, match="ENOSPC") as caught:
        safehold.save(path, numbers(2), step=2)
    assert "not known" not in str(caught.value)
    assert [commit.step for commit in believed(path)] == [1]
    tier.heal()
    tier.fail("put", path="*/manifest.json", error=OSError(errno.ENOSPC, "full"), applied=True)
    tier.fail("put", path="*/tombstone-*", error=OSError(errno.ENOSPC, "full"))
    with pytest.raises(StorageFullError, match="whether the checkpoint is committed is not known"):
        safehold.save(path, numbers(3), step=3)
    tier.heal()
    safehold.save(path, numbers(4), step=4)
    assert {commit.step for commit in believed(path)} >= {1, 4}
    assert equal(safehold.load(path), numbers(4))


def test_a_disk_that_never_answers_ends_a_load_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    safehold.save(path, numbers(1), step=1)
    monkeypatch.setenv("SAFEHOLD_STALL_TIMEOUT_S", "0.2")
    for kind, where in (("list", "*"), ("get", "plans/*"), ("get", "*.objects"), ("read_into", "*")):
        for template in (None, numbers(2)):
            tier = use_tier(monkeypatch, path)
            gate = tier.hang(kind, path=where, times=-1)
            begun = time.monotonic()
            with pytest.raises(DeadlineError):
                safehold.load(path, template)
            assert time.monotonic() - begun < 5, (kind, where)
            gate.release()


@pytest.mark.parametrize("step", [True, "5", -1, 2.0, None, 1 << 41])
def test_what_is_no_step_is_refused_before_anything_is_written(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ConfigurationError, match="a step is"):
        safehold.save(tmp_path / "run", numbers(), step=step)
    assert not (tmp_path / "run").exists()
    safehold.save(tmp_path / "run", numbers(), step=1)
    if step is not None:
        with pytest.raises(ConfigurationError, match="a step is"):
            safehold.load(tmp_path / "run", step=step)


def test_numpys_integers_are_steps(tmp_path: Path) -> None:
    saved: Any = safehold.save(tmp_path / "run", numbers(), step=np.int64(7))  # type: ignore[arg-type]
    assert type(saved) is int and saved == 7
    assert equal(safehold.load(tmp_path / "run", step=np.int64(7)), numbers())  # type: ignore[arg-type]


@pytest.mark.parametrize("metrics", [{"loss": "much"}, [1], {"": 1.0}])
def test_what_are_no_metrics_is_refused_before_anything_is_written(tmp_path: Path, metrics: Any) -> None:
    with pytest.raises(ConfigurationError, match="metric"):
        safehold.save(tmp_path / "run", numbers(), metrics=metrics)
    assert not (tmp_path / "run").exists()


def test_settings_come_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {name: np.ones(1 << 18) for name in "abc"}
    (tmp_path / "safehold.toml").write_text('pack_size_bytes = "2 MiB"\n')
    safehold.save("run", state, step=1)
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) > 1
    assert equal(safehold.load("run"), state)
    monkeypatch.setenv("SAFEHOLD_RESTORE_THREADS", "0")
    for call in (lambda: safehold.load("run"), lambda: safehold.save("run", state, step=2)):
        with pytest.raises(ConfigurationError, match="restore_threads"):
            call()


def test_leftovers_of_a_killed_save_are_swept_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"

    class KilledError(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise KilledError

    safehold.save(path, numbers(1), step=1)
    monkeypatch.setattr(direct_save, "_commit", die)
    monkeypatch.setattr(direct_save, "_within", lambda config, doing, action, *_: action())
    monkeypatch.setattr(direct_save, "_discard", lambda *_: None)
    with pytest.raises(KilledError):
        safehold.save(path, numbers(2), step=2)
    monkeypatch.undo()
    assert pack_of(path, CommitId(2, 2, 0)).exists()
    safehold.save(path, numbers(3), step=3)
    assert not pack_of(path, CommitId(2, 2, 0)).exists()
    assert [commit.step for commit in believed(path)] == [3, 1]
