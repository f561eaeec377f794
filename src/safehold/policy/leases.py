"""Which readers' leases still count, as one observer sees them.

The rule: a lease counts until its content has not changed for `lease_s`, by the clock of whoever looks. The reader counts its renewals up
in it, so that content never comes back; no clock of two hosts is ever compared, and no storage is asked for times of its files, which
object stores and network file systems each mean differently. Who looks for the first time counts every lease.

Invariants: what cannot be read counts, too, and expires as everything does: nothing that lies on storage can hold a checkpoint for ever. An
observer remembers no more leases than it was shown at its last look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_LEASES = 256
"""So many leases are read at a look; the others count unread, until expired ones before them were swept."""

UNREADABLE_LEASE_S = 600.0
"""How long a lease counts whose content does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A lease as it was read.

    Attributes:
        content: Digest of its content; empty where it cannot be read.
        lease_s: How long it counts unchanged.
    """

    content: str
    lease_s: float


class LeaseWatch:
    """What one observer has seen of leases; not thread-safe."""

    def __init__(self) -> None:
        self._unchanged: dict[str, tuple[str, float]] = {}

    def observe(self, seen: Mapping[str, Sighting], *, began_s: float, ended_s: float) -> set[str]:
        """Take note of a look and return the names of the leases that have expired.

        Args:
            seen: Name -> what was read, of all leases that were read.
            began_s: Monotonic time before the first was read.
            ended_s: Monotonic time after the last was read. A slow look makes leases count longer, never shorter.
        """
        before, self._unchanged = self._unchanged, {}
        expired = set()
        for name, sighting in seen.items():
            content, since_s = before.get(name, ("", ended_s))
            if name not in before or content != sighting.content:
                content, since_s = sighting.content, ended_s
            self._unchanged[name] = (content, since_s)
            if began_s - since_s >= sighting.lease_s:
                expired.add(name)
        return expired
