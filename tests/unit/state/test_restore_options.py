"""Slips of the pen in `rename` and `partial`: named, and never a reason to lose something silently."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from safehold.errors import ConfigurationError, StateMismatchError
from safehold.state.collect import collect
from safehold.state.leaves import RestoreOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from state_checkpoint import MemoryCheckpoint


def saved(state: Any) -> MemoryCheckpoint:
    return MemoryCheckpoint([collect(state, rank=0, world_size=1)])


def trained(name: str) -> dict[str, Any]:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"net": {name: layer}, "optimizer": optimizer}


def test_an_entry_of_rename_that_speaks_of_nothing_is_refused_by_name() -> None:
    source, target = trained("old"), trained("new")
    before = target["net"]["new"].weight.detach().clone()
    with pytest.raises(ConfigurationError) as caught:
        saved(source).restore(target, options=RestoreOptions(rename={"net.odl": "net.new", "x": "y"}, partial=True))
    assert "net.odl, x" in caught.value.message and caught.value.hint == "did you mean net.old?"
    assert torch.equal(target["net"]["new"].weight, before)
    saved(source).restore(target, options=RestoreOptions(rename={"net.old": "net.new"}))
    assert torch.equal(target["net"]["new"].weight, source["net"]["old"].weight)


def test_a_program_that_renames_goes_on_restoring_what_it_saves_itself() -> None:
    """The next checkpoint has the new names; the same `rename` must not stop the next start of the job."""
    for rename in ({"net.old": "net.new"}, {"net.old.weight": "net.new.weight", "net.old.bias": "net.new.bias"}):
        saved(trained("new")).restore(trained("new"), options=RestoreOptions(rename=rename))
    state = {"a": torch.ones(1), "b": {"c": 1}}
    binding = saved(state).restore(state, options=RestoreOptions(rename={"module": "", "b": "b"}))
    assert binding.unused == ["rename= 'module': not in the checkpoint, which has its new name already"]
    with pytest.raises(ConfigurationError, match="modle"):
        saved({"module": {"x": 1}, "y": 1}).restore(
            {"x": 0, "y": 0}, options=RestoreOptions(rename={"modle": ""}, partial=True)
        )


def test_an_entry_that_another_one_covers_or_that_only_an_optimizer_has_speaks_of_something() -> None:
    source = {"a": {"b": torch.ones(1)}}
    target = {"x": torch.zeros(1)}
    saved(source).restore(target, options=RestoreOptions(rename={"a": "y", "a.b": "x"}))
    assert target["x"] == 1
    old, new = trained("old"), trained("new")
    checkpoint = saved({"optimizer": old["optimizer"], "net": old["net"]})
    for name in [name for name in checkpoint.specs if name.startswith("net.")]:
        del checkpoint.specs[name]
    checkpoint.restore(new, options=RestoreOptions(rename={"net.old": "net.new"}, partial=["net.*"]))
    [first, *_] = new["optimizer"].state.values()
    assert torch.equal(first["exp_avg"], next(iter(old["optimizer"].state.values()))["exp_avg"])


def test_a_pattern_of_partial_that_nothing_matches_is_named_and_does_not_stop_a_restore_that_fits() -> None:
    """What an old checkpoint had is gone from the next one, which the same program must go on to restore."""
    checkpoint = saved({"a": torch.ones(1), "head": torch.ones(1)})
    options = RestoreOptions(partial=["haed*", "a"])
    with pytest.raises(StateMismatchError, match=r"(?s)head.*of no use \(1\):\n\s+partial= 'haed\*'"):
        checkpoint.restore({"a": torch.zeros(1)}, options=options)
    binding = checkpoint.restore({"a": torch.zeros(1), "head": torch.zeros(1)}, options=options)
    assert binding.unused == ["partial= 'haed*': matches no leaf of this state, and none of the checkpoint"]
    for partial in (["head", "new"], ["*"], True, None):
        state = {"a": torch.zeros(1), "head": torch.zeros(1), **({"new": 1} if partial else {})}
        assert checkpoint.restore(state, options=RestoreOptions(partial=partial)).unused == []


def test_one_pattern_may_be_a_string() -> None:
    """Its letters are no patterns: `*` among them would let everything pass."""
    checkpoint = saved({"a": torch.ones(1), "head.x": 1})
    options = RestoreOptions(partial="head*")
    assert checkpoint.restore({"a": torch.zeros(1)}, options=options).left_out == ["head\\.x: not in this state"]
    with pytest.raises(StateMismatchError, match="missing"):
        checkpoint.restore({"a": torch.zeros(1), "b": 1}, options=options)
