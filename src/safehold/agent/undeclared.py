"""Leaves that nobody declared, as trainers name them."""

from __future__ import annotations

from safehold.types import TensorSpec


def specs_of(leaves: list[tuple[str, str, list[int], str]]) -> list[TensorSpec]:
    """Return leaves as a trainer names them."""
    return [
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape), kind="numpy" if kind == "numpy" else "torch")
        for name, dtype, shape, kind in leaves
    ]


def without_contradictions(undeclared: dict[int, list[TensorSpec]]) -> dict[int, list[TensorSpec]]:
    """Leave out the leaves that ranks have under one name and not alike; they stay unsettled."""
    specs: dict[str, set[TensorSpec]] = {}
    for leaves in undeclared.values():
        for spec in leaves:
            specs.setdefault(spec.name, set()).add(spec)
    return {rank: [spec for spec in leaves if len(specs[spec.name]) == 1] for rank, leaves in undeclared.items()}
