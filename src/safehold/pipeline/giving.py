"""What a tier is called that has files of a checkpoint which are not where they were written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from safehold.format.records import Manifest


@runtime_checkable
class Giving(Protocol):
    """A tier that gives back lost files; see `pipeline.recovering`."""

    def gives(self, manifest: Manifest, names: Iterable[str]) -> set[str]:
        """Return those of a checkpoint's files that can be had although they are missing, or damaged, where they were written."""
        ...
