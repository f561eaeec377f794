"""Redundancy sets as plain values, between agents and flushers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safehold.policy.placement import RedundancySet


def set_to_wire(of: RedundancySet) -> dict[str, Any]:
    """Return a set as plain values."""
    return {"kind": of.kind, "num_data": of.num_data, "num_parity": of.num_parity, "members": list(of.members)}


def set_from_wire(wire: Mapping[str, Any]) -> RedundancySet:
    """Return the set of `set_to_wire`.

    Raises:
        ValueError: It is none.
    """
    return RedundancySet(
        kind=wire["kind"],
        num_data=int(wire["num_data"]),
        num_parity=int(wire["num_parity"]),
        members=tuple(int(node) for node in wire["members"]),
    )
