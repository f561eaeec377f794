"""One save call at a time in a process: what a signal handler or another thread begins in the middle of one is refused, not waited for.

Invariant: entering never blocks; whoever is interrupted, at whatever point, is not inside any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from safehold.errors import ConfigurationError


class Alone:
    """Lets one in at a time. No lock: a signal between taking one and noting that it was taken would leave it taken for ever."""

    def __init__(self) -> None:
        self._inside: list[object] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be inside.

        Raises:
            ConfigurationError: Somebody is inside already.
        """
        mine = object()
        try:
            self._inside.append(mine)
            if self._inside[0] is not mine:
                raise ConfigurationError(
                    "save was called while another save of this process was in its call",
                    hint="save from one thread; in a signal handler set a flag, and save in the training loop",
                )
            yield
        finally:
            with suppress(ValueError):
                self._inside.remove(mine)
