"""What a verification of a checkpoint found: the faults, and how much of it was read.

Must not live here: how it is found (`pipeline.verify`).
"""

from __future__ import annotations

from dataclasses import dataclass

from safehold.format import names
from safehold.types import CommitId

MAX_KEYS = 6
"""So many keys a fault names; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        path: The file, inside the run directory.
        message: What is wrong with it.
        block: Index of the checksum block concerned.
        offset_bytes: Where it begins in the file.
        keys: Keys of the pieces (or objects) that have bytes there, at most `MAX_KEYS`.
        num_keys: How many keys there are in all.
        node: The node that wrote it.
        rank: The rank that wrote it.
        redundancy: Whether it is redundancy that is damaged, and the checkpoint itself may be whole.
    """

    path: str
    message: str
    block: int | None = None
    offset_bytes: int | None = None
    keys: tuple[str, ...] = ()
    num_keys: int = 0
    node: int | None = None
    rank: int | None = None
    redundancy: bool = False

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}"
        if self.keys:
            more = f" and {self.num_keys - len(self.keys)} more" if self.num_keys > len(self.keys) else ""
            text += f"; has bytes of {', '.join(names.display(key) for key in self.keys)}{more}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        commit: The checkpoint.
        faults: All that is wrong, by path and offset.
        notes: What is odd and harmless, such as files that nobody vouches for.
        num_files: Files that were read.
        num_bytes: Bytes that were read.
        not_read: Nodes that keep what they saved on disks of their own, which were not at hand.
    """

    commit: CommitId
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    num_files: int
    num_bytes: int
    not_read: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what was read."""
        return not self.faults

    @property
    def data_ok(self) -> bool:
        """Whether nothing is wrong with what was read of the checkpoint itself, whatever its redundancy is like."""
        return all(fault.redundancy for fault in self.faults)
