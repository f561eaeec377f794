"""Parameter groups as one object: merged over ranks and matched by the names of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from safehold.errors import StateMismatchError
from safehold.state.param_groups import match, merge, rename


def saved(*groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    return {"groups": [{"params": list(params), "values": values} for params, values in groups]}


def test_stages_merge_into_one() -> None:
    first = saved((["a", "b"], {"lr": 0.1}), (["n"], {"lr": 0.1, "wd": 0.0}))
    second = saved((["c"], {"lr": 0.1}), (["m"], {"lr": 0.1, "wd": 0.0}))
    assert merge([first, second]) == saved((["a", "b", "c"], {"lr": 0.1}), (["n", "m"], {"lr": 0.1, "wd": 0.0}))
    assert merge([first, first]) == first
    assert merge([first]) == first


def test_groups_that_differ_stay_apart() -> None:
    merged = merge([saved((["a"], {"lr": 0.1})), saved((["b"], {"lr": 0.2}))])
    assert merged == saved((["a"], {"lr": 0.1}), (["b"], {"lr": 0.2}))


def test_ranks_that_disagree_about_one_parameter() -> None:
    with pytest.raises(StateMismatchError, match=r"group of a: lr"):
        merge([saved((["a"], {"lr": 0.1})), saved((["a"], {"lr": 0.2}))])
    nan = float("nan")
    assert merge([saved((["a"], {"x": nan})), saved((["a"], {"x": nan}))])["groups"][0]["params"] == ["a"]


def test_match_by_name_whatever_the_order() -> None:
    value = saved((["a", "b"], {"lr": 0.1}), (["c"], {"lr": 0.2}))
    assert match([["c"], ["b"], ["a"], ["new"]], value) == [{"lr": 0.2}, {"lr": 0.1}, {"lr": 0.1}, None]
    with pytest.raises(StateMismatchError, match=r"group 0 joins a and c, .*different lr"):
        match([["a", "c"]], value)
    assert match([["a", "c"]], saved((["a"], {"lr": 0.1}), (["c"], {"lr": 0.1}))) == [{"lr": 0.1}]


def test_match_by_position_only_where_no_name_is_known() -> None:
    value = saved((["a"], {"lr": 0.1}), (["b"], {"lr": 0.2}))
    assert match([["x"], ["y"]], value) == [{"lr": 0.1}, {"lr": 0.2}]
    with pytest.raises(StateMismatchError, match="1 parameter group, the checkpoint has 2"):
        match([["x", "y"]], value)


def test_rename() -> None:
    assert rename(saved((["a", "b"], {"lr": 1})), lambda name: "net." + name) == saved((["net.a", "net.b"], {"lr": 1}))
