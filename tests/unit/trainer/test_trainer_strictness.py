"""What a user can do by mistake, and must hear of before anything is lost."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import safehold
from safehold.errors import ConfigurationError, StateMismatchError
from safehold.tiers.open import place


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFEHOLD_RUNTIME_DIR", str(tmp_path / "runtime"))
    return str(tmp_path / "run")


def stepped(kind=torch.optim.AdamW, **options):
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_new_training_in_a_used_directory_is_refused_and_not_lost_to_retention(run):
    with safehold.Checkpointer(run, keep=1) as ckpt:
        ckpt.save(10, {"x": torch.ones(3)}).wait()
    with safehold.Checkpointer(run, keep=1) as ckpt:
        with pytest.raises(ConfigurationError, match="step 1 comes before step 10"):
            ckpt.save(1, {"x": torch.zeros(3)})
        ckpt.save(11, {"x": torch.zeros(3)}).wait()
    assert safehold.load(run)["x"].sum() == 0


def test_steps_do_not_go_back_within_one_start_unless_told(run):
    with safehold.Checkpointer(run, keep=5) as ckpt:
        ckpt.save(5, {"x": torch.ones(3)}).wait()
        with pytest.raises(ConfigurationError, match="step 3 comes before step 5"):
            ckpt.save(3, {"x": torch.ones(3)})
        ckpt.save(3, {"x": torch.ones(3)}, overwrite=True).wait()
        assert ckpt.restore({"x": torch.zeros(3)}, 3) == 3
        ckpt.save(4, {"x": torch.ones(3)}).wait()


@pytest.mark.parametrize("step", [True, "3", -1, 1.5, None, 1 << 60])
def test_what_is_no_step_is_refused_and_harms_nothing(run, step):
    with safehold.Checkpointer(run) as ckpt:
        with pytest.raises(ConfigurationError, match="a step is an integer"):
            ckpt.save(step, {"x": 1})
        ckpt.save(np.int64(7), {"x": 1}).wait()
    assert safehold.load(run) == {"x": 1}


@pytest.mark.parametrize("keep", [None, True, "3", 0, 10**30])
def test_what_is_no_keep_rule_is_refused(run, keep):
    with pytest.raises(ConfigurationError, match="keep"):
        safehold.Checkpointer(run, keep=keep)


def test_metrics_that_are_no_numbers_are_refused(run):
    with safehold.Checkpointer(run) as ckpt, pytest.raises(ConfigurationError, match="metrics"):
        ckpt.save(1, {"x": 1}, metrics={"loss": "low"})


def test_another_kind_of_optimizer_is_refused_before_anything_is_overwritten(run):
    with safehold.Checkpointer(run) as ckpt:
        ckpt.save(1, stepped()).wait()
    other = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    before = other["model"].weight.detach().clone()
    with safehold.Checkpointer(run) as ckpt, pytest.raises(StateMismatchError, match="AdamW, the state has SGD"):
        ckpt.restore(other)
    assert torch.equal(other["model"].weight, before)
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    with pytest.raises(StateMismatchError, match="AdamW, the state has SGD"):
        safehold.load(run, other)
    assert torch.equal(other["model"].weight, before)


def test_what_a_rollback_sets_aside_is_said_and_stays_on_storage(run, caplog):
    with safehold.Checkpointer(run, keep=9, delete_grace_s=0.0) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"x": torch.full((2,), step)}).wait()
    with safehold.Checkpointer(run, keep=9, delete_grace_s=0.0) as ckpt:
        with caplog.at_level(logging.WARNING, logger="safehold"):
            assert ckpt.restore({"x": torch.zeros(2, dtype=torch.int64)}, 1) == 1
        assert "later steps up to 3 are set aside" in caplog.text
        ckpt.save(2, {"x": torch.full((2,), 20)}).wait()
    for _ in range(2):
        with safehold.Checkpointer(run, keep=9, delete_grace_s=0.0) as ckpt:
            ckpt.wait()
    import pathlib

    manifests = sorted(path.parent.name for path in pathlib.Path(run).glob("checkpoints/00000000[23]/*/manifest.json"))
    assert manifests == ["1-0", "1-0", "3-0"]
    assert safehold.load(run)["x"].tolist() == [20, 20]


def test_taking_over_a_running_job_is_said(run, caplog):
    first = safehold.Checkpointer(run)
    try:
        with caplog.at_level(logging.WARNING, logger="safehold"), safehold.Checkpointer(run):
            assert "took this run over from a job that is still running" in caplog.text
            deadline = time.monotonic() + 10.0
            while first._failures._superseded is None and time.monotonic() < deadline:
                time.sleep(0.005)  # the agent tells it, by a message of its own
    finally:
        with pytest.raises(safehold.CheckpointError, match="owns the run"):
            first.close()


def test_tensors_that_were_saved_apart_and_differ_are_refused_before_anything_is_overwritten(run):
    apart = {"emb": torch.ones(4), "head": torch.zeros(4), "x": torch.ones(2)}
    weight = torch.full((4,), 7.0)
    state = {"emb": weight, "head": weight, "x": torch.zeros(2)}

    def refuses(ckpt):
        with pytest.raises(StateMismatchError, match="emb and head: one tensor in this state, two in the"):
            ckpt.restore(state)
        assert weight.tolist() == [7] * 4 and not state["x"].any()

    with safehold.Checkpointer(run) as ckpt:
        ckpt.save(1, apart).wait()
        refuses(ckpt)
    with safehold.Checkpointer(run) as ckpt:
        refuses(ckpt)
        fits = {name: torch.full_like(tensor, 9) for name, tensor in apart.items()}
        assert ckpt.restore(fits) == 1 and fits["emb"].all() and not fits["head"].any()
        ckpt.save(2, {**apart, "head": torch.ones(4)}).wait()
        assert ckpt.restore(state) == 2 and weight.tolist() == [1] * 4 and state["x"].all()


def test_another_schedule_and_a_wrong_rename_are_refused_before_anything_is_overwritten(run, caplog):
    sched = torch.optim.lr_scheduler

    def state(kind, **options):
        found = stepped()
        return {**found, "schedule": kind(found["optimizer"], **options)}

    with safehold.Checkpointer(run) as ckpt:
        ckpt.save(1, state(sched.StepLR, step_size=3)).wait()
    other = state(sched.CosineAnnealingLR, T_max=9)
    before = other["model"].weight.detach().clone()
    with safehold.Checkpointer(run) as ckpt:
        with pytest.raises(StateMismatchError, match="class StepLR, the state has the class CosineAnnealingLR"):
            ckpt.restore(other)
        with pytest.raises(ConfigurationError, match=r"rename= speaks of what is not in the checkpoint.*: modle"):
            ckpt.restore(other, partial=True, rename={"modle": "net"})
        assert torch.equal(other["model"].weight, before)
        with caplog.at_level(logging.WARNING, logger="safehold"):
            assert ckpt.restore(other, partial=["schedule", "old.*"]) == 1
        assert "of no use: partial= 'old.*'" in caplog.text and "schedule" not in caplog.text
        assert other["schedule"].step_size == 3


@pytest.mark.parametrize("path", [None, 3, b"/run"])
def test_what_is_no_run_directory_is_refused_by_name(path):
    with pytest.raises(ConfigurationError, match="a run directory is a path or a URL, not"):
        safehold.Checkpointer(path)


@pytest.mark.parametrize("name", ["overlap", "random_states"])
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_what_is_no_flag_is_refused_by_name(run, name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is True or False, not {value!r}"):
        safehold.Checkpointer(run, **{name: value})


def test_the_home_directory_may_be_written_as_people_write_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place("~/runs/a") == place(Path("~/runs/a")) == f"{tmp_path}/runs/a" and place("~") == str(tmp_path)
    assert place("runs/~").endswith("/runs/~") and place("./~x/a").endswith("/~x/a")
    with pytest.raises(ConfigurationError, match="no home directory is known for '~no-such-user-here'") as caught:
        place("~no-such-user-here/runs")
    assert "./~no-such-user-here/runs" in str(caught.value.hint)
