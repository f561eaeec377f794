"""Time and randomness, handed in as parameters so that tests own them."""

from __future__ import annotations

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Where code gets the time from."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back. For durations and deadlines."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, UTC. For records that people read, never for decisions between hosts."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The real one. `CLOCK_MONOTONIC` is the same for all processes of a host, which the shared control words rely on."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock`."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


def new_token() -> str:
    """Return 128 random bits as 32 hex digits."""
    return secrets.token_hex(16)
