"""How fast the flush of a node may go beside training: at full speed while a core is idle, at a small share while none is.

Invariants: decides from what it is told and does nothing itself; without an observation there is no limit. The share is one of
CPU time, not of bytes: what keeps a training step waiting is the time that a core works for the flush.
"""

from __future__ import annotations

import math

IDLE_CORES = 0.3
"""With fewer idle cores than this, work of the flush takes time from training."""


class Pace:
    """Spaces out the work of all flushes of a node.

    Args:
        num_cores: Cores that the flusher may run on.
        busy_share: Share of their time that the flush takes at most while none of them is idle; 0 or 1: no limit.
    """

    def __init__(self, num_cores: float, busy_share: float) -> None:
        self._busy_cores = num_cores * busy_share if 0 < busy_share < 1 else 0.0
        self._idle_cores: float | None = None
        self._free_at_s = -math.inf

    @property
    def limits(self) -> bool:
        """Whether work has to be spaced out now."""
        return self._busy_cores > 0 and self._idle_cores is not None and self._idle_cores < IDLE_CORES

    def observe(self, idle_cores: float | None) -> None:
        """Note how many cores were idle lately, the flush at work; None: that cannot be told."""
        self._idle_cores = idle_cores

    def spent(self, now_s: float, cpu_s: float) -> None:
        """Note that a piece of work is done, which took `cpu_s` of CPU time, and so began at least that long ago."""
        if self.limits:
            self._free_at_s = max(now_s - cpu_s, self._free_at_s) + cpu_s / self._busy_cores

    def pause_s(self, now_s: float) -> float:
        """Return how long the next piece of work has to wait, as things are; ask again after a while, for they change."""
        return max(0.0, self._free_at_s - now_s) if self.limits else 0.0
