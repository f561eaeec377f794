"""One save call at a time in a process: what a signal handler or another thread begins in the middle of one is refused, not waited for.

Invariant: entering never blocks, and what was entered is left by who entered it.
"""

from __future__ import annotations

import threading
from types import TracebackType

from safehold.errors import ConfigurationError


class Alone:
    """A context manager that is entered by one at a time.

    Raises:
        ConfigurationError: Somebody is inside already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConfigurationError(
                "save was called while another save of this process was in its call",
                hint="save from one thread; in a signal handler set a flag, and save in the training loop",
            )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
