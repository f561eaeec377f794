"""Reads the object leaves of a checkpoint and picks each rank's value.

Invariants: a file of objects is verified whole before anything of it is decoded; decoding runs no code. Which rank's value a rank gets is
`state.rank_values`' decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safehold.errors import TornFileError
from safehold.format import objects
from safehold.format.objects_file import ObjectsFile, parse
from safehold.pipeline import agreement
from safehold.pipeline.catalog import Checkpoint
from safehold.state.rank_values import value_for_rank
from safehold.tiers.base import Tier
from safehold.types import ObjectSpec


class StoredObjects:
    """The objects of all ranks of one checkpoint.

    Args:
        tier: Where it is.
        checkpoint: Its verified documents.

    Raises:
        IntegrityError: A file is missing or does not verify.
        StorageError: It cannot be read.
    """

    def __init__(self, tier: Tier, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._by_rank: dict[int, ObjectsFile] = {}
        for node, record in checkpoint.records.items():
            if not record.objects_size_bytes:
                continue
            path = checkpoint.objects_path(node)
            try:
                data = tier.get(path, limit_bytes=record.objects_size_bytes)
            except FileNotFoundError as exc:
                raise TornFileError("the file is missing", path=path, step=checkpoint.commit.step) from exc
            agreement.check_bytes(
                data,
                record.objects_size_bytes,
                record.objects_blake3,
                path=path,
                step=checkpoint.commit.step,
                what=f"the objects of node {node}",
            )
            found = parse(data, path)
            self._by_rank.update(dict.fromkeys(found.ranks(), found))
        self._specs = {spec.name: spec for table in checkpoint.plan.objects for spec in table}
        self._holders: dict[str, list[int]] = {}
        for rank, found in sorted(self._by_rank.items()):
            for name in found.names(rank):
                self._holders.setdefault(name, []).append(rank)

    def values(self, names: Iterable[str], *, rank: int, world_size: int) -> dict[str, Any]:
        """Return what a rank gets of each named object.

        Raises:
            StateMismatchError: A policy allows no value.
            TornFileError: An object that the plan names is in no file.
        """
        return {name: self._value(name, rank, world_size) for name in names}

    def first(self, name: str) -> Any:
        """Return the value of the lowest rank that has the object."""
        return self._decode(self._held(name)[0], name)

    def _held(self, name: str) -> list[int]:
        held = self._holders.get(name)
        if not held:
            path = self._checkpoint.directory
            raise TornFileError(f"the object {name} is in no file", path=path, step=self._checkpoint.commit.step)
        return held

    def _decode(self, rank: int, name: str) -> Any:
        return objects.decode(self._by_rank[rank].get(rank, name), path=f"{name} of rank {rank}")

    def _value(self, name: str, rank: int, world_size: int) -> Any:
        spec: ObjectSpec = self._specs.get(name, ObjectSpec(name=name))
        digests = {holder: self._by_rank[holder].digest(holder, name) for holder in self._held(name)}
        return value_for_rank(
            spec,
            digests,
            lambda holder: self._decode(holder, name),
            rank=rank,
            world_size=world_size,
            saved_world_size=self._checkpoint.manifest.world_size,
        )
