"""The parameter groups of an optimizer as one object, and what becomes of them on other ranks or in other groups.

The object is `{"class": name of the optimizer's class, "groups": [{"params": [name, ...], "values": {key: value}},
...]}`, in the order of the groups; names are those of leaves (`safehold.format.names.join`), of a parameter that no
saved module holds `#<group>.#<position>`.

Invariants: no framework is imported; values are compared, never changed. Groups are matched by the names of their
parameters and by position only where no name is known on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from safehold.errors import StateMismatchError
from safehold.format.names import counted

TEMPLATE_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys that a restore leaves as the optimizer has them: they say how it computes on this machine, not what."""


def rename(value: Mapping[str, Any], new_name: Callable[[str], str]) -> dict[str, Any]:
    """Return the object with every parameter name replaced by `new_name` of it."""
    return {
        **value,
        "groups": [
            {"params": [new_name(name) for name in group["params"]], "values": group["values"]}
            for group in value["groups"]
        ],
    }


def merge(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the objects of several ranks (pipeline stages, whose optimizers have different parameters) into one.

    Groups at the same position with equal values become one group; others stay apart, in the order of the ranks.

    Raises:
        StateMismatchError: Two ranks have different values for one parameter; names it and the keys.
    """
    merged: list[dict[str, Any]] = []
    origin: list[int] = []
    seen: dict[str, dict[str, Any]] = {}
    for value in values:
        for position, group in enumerate(value["groups"]):
            new = []
            for name in group["params"]:
                known = seen.setdefault(name, group["values"])
                if known is group["values"]:
                    new.append(name)
                elif keys := _differing(known, group["values"]):
                    raise StateMismatchError(
                        f"the optimizers of several ranks disagree about the group of {name}: {', '.join(keys)}"
                    )
            if not new and group["params"]:
                continue
            _add(merged, origin, position, new, group["values"])
    classes = sorted({value["class"] for value in values if "class" in value})
    if len(classes) > 1:
        raise StateMismatchError(f"the optimizers of several ranks are of different classes: {', '.join(classes)}")
    return {**({"class": classes[0]} if classes else {}), "groups": merged}


def _add(merged: list[dict[str, Any]], origin: list[int], position: int, params: list[str], values: Any) -> None:
    for at, group in zip(origin, merged, strict=True):
        if at == position and not _differing(group["values"], values):
            group["params"].extend(name for name in params if name not in group["params"])
            return
    merged.append({"params": params, "values": values})
    origin.append(position)


def match(groups: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """Return for each group of an optimizer the saved values that it gets, None where it keeps its own.

    Args:
        groups: The names of the parameters of each group.
        saved: The saved object.

    Raises:
        StateMismatchError: The parameters of one group were in groups with different values, or nothing fits.
    """
    by_name = {name: group["values"] for group in saved["groups"] for name in group["params"]}
    if not any(name in by_name for names in groups for name in names):
        return _match_by_position(groups, saved["groups"])
    matched: list[dict[str, Any] | None] = []
    for position, names in enumerate(groups):
        found = [(name, by_name[name]) for name in names if name in by_name]
        for name, values in found[1:]:
            if values is not found[0][1] and (keys := _differing(found[0][1], values)):
                raise StateMismatchError(
                    f"parameter group {position} joins {found[0][0]} and {name}, which were saved in groups with "
                    f"different {', '.join(keys)}",
                    hint="make the groups as they were when the checkpoint was saved",
                )
        matched.append(dict(found[0][1]) if found else None)
    return matched


def _match_by_position(groups: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[Any]:
    if len(groups) != len(saved):
        raise StateMismatchError(
            f"the optimizer has {counted(len(groups), 'parameter group')}, the checkpoint has {len(saved)}, and no "
            "parameter has the same name in both"
        )
    return [dict(group["values"]) for group in saved]


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    keys: Iterable[str] = dict.fromkeys((*first, *second))
    missing = object()
    return [
        key for key in keys if key not in TEMPLATE_KEYS and not _same(first.get(key, missing), second.get(key, missing))
    ]


def _same(first: Any, second: Any) -> bool:
    if hasattr(first, "tolist") or hasattr(second, "tolist"):
        first = first.tolist() if hasattr(first, "tolist") else first
        second = second.tolist() if hasattr(second, "tolist") else second
        return bool(first == second)
    if type(first) is not type(second):
        return False
    return bool(first == second) or repr(first) == repr(second)
