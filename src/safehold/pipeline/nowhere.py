"""A place for packs that are to stay in memory: takes their bytes and keeps none.

So a save that is not written to storage is checksummed as one that is: block by block while it is staged, at the same pace, with the same
checks.
"""

from __future__ import annotations

from safehold.tiers.base import PackWriter


class _Writer:
    """Takes blocks."""

    alignment = 1

    def write_at(self, offset: int, data: memoryview) -> None:
        """Nothing is kept: the arena is the pack."""

    def finish(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""


class Nowhere:
    """See the module."""

    name = "memory"

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """Return what takes the bytes."""
        return _Writer()

    def delete(self, path: str) -> None:
        """There is nothing."""
