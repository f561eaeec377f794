"""What a power cut may leave of files and directories: the model behind `testing.fake_disk`.

It allows what POSIX allows, which is more than any one file system does. A file's content and size are safe after an
fsync of the file; an entry of a directory after an fsync of that directory; nothing else is. Of what is not safe, any
part may survive, in any order: each 4 KiB sector by itself (lost, as it was at any time since, zeros, or torn at a
512-byte border), each change of a directory by itself. A rename is one change. Invariant: the same seed and the same
calls give the same survivors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from safehold.host.disk import FileStat

SECTOR_BYTES = 4096
TORN_BYTES = 512

Survival = Literal["random", "lost", "kept"]


@dataclass(slots=True, eq=False)
class FileNode:
    """A file: its content as readers see it, and what is needed to know what a power cut may leave.

    Attributes:
        content: What readers see.
        durable_size: Its size at the last fsync.
        versions: For each sector changed since the last fsync, its earlier contents, oldest (the durable one) first.
        reserved_bytes: Space that was allocated.
        modified_s: Time of the last change.
    """

    content: bytearray = field(default_factory=bytearray)
    durable_size: int = 0
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    reserved_bytes: int = 0
    modified_s: float = 0.0

    def write(self, data: memoryview, offset: int) -> None:
        """Write as a page cache does."""
        self.resize(max(len(self.content), offset + data.nbytes))
        if data.nbytes:
            for sector in range(offset // SECTOR_BYTES, (offset + data.nbytes - 1) // SECTOR_BYTES + 1):
                self._remember(sector)
            self.content[offset : offset + data.nbytes] = data

    def resize(self, size: int) -> None:
        """Cut off or extend by zeros."""
        old = len(self.content)
        if size < old:
            for sector in range(size // SECTOR_BYTES, -(-old // SECTOR_BYTES)):
                self._remember(sector)
            del self.content[size:]
        else:
            self.content.extend(bytes(size - old))

    def _remember(self, sector: int) -> None:
        before = bytes(self.content[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES])
        self.versions.setdefault(sector, []).append(before)

    def fsync(self) -> None:
        """Make content and size safe."""
        self.versions.clear()
        self.durable_size = len(self.content)

    def survivor(self, rng: random.Random, survival: Survival) -> FileNode:
        """Return the file as a power cut may leave it."""
        if survival == "kept":
            content = bytearray(self.content)
        else:
            keep = 0.0 if survival == "lost" else rng.choice((0.0, 0.3, 0.7, 1.0))
            size = len(self.content) if rng.random() < keep else self.durable_size
            content = bytearray(self.content[:size].ljust(size, b"\0"))
            for sector, versions in sorted(self.versions.items()):
                begin = sector * SECTOR_BYTES
                if begin < size:
                    length = min(SECTOR_BYTES, size - begin)
                    chosen = self._sector(sector, versions, rng, keep, survival)
                    content[begin : begin + length] = chosen[:length].ljust(length, b"\0")
        return FileNode(content, len(content), {}, max(self.reserved_bytes, len(content)), self.modified_s)

    def _sector(self, sector: int, versions: list[bytes], rng: random.Random, keep: float, survival: Survival) -> bytes:
        begin = sector * SECTOR_BYTES
        durable, newest = versions[0], bytes(self.content[begin : begin + SECTOR_BYTES])
        if survival == "lost":
            return durable
        if rng.random() < keep:
            return newest
        kind = rng.choice(("lost", "between", "torn", "zeros"))
        if kind == "between":
            return rng.choice(versions)
        if kind == "torn":
            cut = rng.randrange(TORN_BYTES, SECTOR_BYTES, TORN_BYTES)
            return newest[:cut] + durable[cut:]
        if kind == "zeros" and begin >= self.durable_size:  # allocated, its content never written
            return b""
        return durable


@dataclass(slots=True, eq=False)
class Change:
    """One change of directory entries, which survives as a whole or not at all.

    Attributes:
        edits: Directory, name, and what the name stands for afterwards (None: nothing).
        durable: Whether it is safe, by an fsync of one of its directories.
    """

    edits: tuple[tuple[DirNode, str, Node | None], ...]
    durable: bool = False


@dataclass(slots=True, eq=False)
class DirNode:
    """A directory: its entries as readers see them, those that are safe, and the changes in between.

    Attributes:
        entries: What readers see.
        durable: Entries at the last fsync.
        pending: Changes since, oldest first.
        modified_s: Time of the last change.
    """

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    modified_s: float = 0.0

    def fsync(self) -> None:
        """Make the entries safe."""
        for change in self.pending:
            change.durable = True
        self.pending.clear()
        self.durable = dict(self.entries)


Node = FileNode | DirNode


def apply(*edits: tuple[DirNode, str, Node | None]) -> None:
    """Change directory entries as one, visible at once and safe later."""
    change = Change(edits)
    for directory in {id(edit[0]): edit[0] for edit in edits}.values():
        directory.pending.append(change)
    for directory, name, node in edits:
        if node is None:
            directory.entries.pop(name, None)
        else:
            directory.entries[name] = node


def stat_of(node: Node) -> FileStat:
    """Return what a name of `node` stands for."""
    if isinstance(node, DirNode):
        return FileStat(kind="directory", size_bytes=0, identity=(0, id(node)), modified_s=node.modified_s)
    return FileStat(kind="file", size_bytes=len(node.content), identity=(0, id(node)), modified_s=node.modified_s)


class Survivors:
    """Builds the tree that a power cut leaves; everything in it is durable.

    Args:
        rng: Decides.
        survival: `random`; `lost`: nothing that was not fsynced; `kept`: everything.
    """

    def __init__(self, rng: random.Random, survival: Survival) -> None:
        self._rng = rng
        self._survival = survival
        self._keep = rng.choice((0.0, 0.3, 0.7, 1.0))
        self._in_order = rng.random() < 0.5
        self._verdicts: dict[int, bool] = {}
        self._copies: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        """Return what is left of `node` and all below it; a file with two names stays one."""
        copy = self._copies.get(id(node))
        if copy is None:
            if isinstance(node, FileNode):
                copy = self._copies[id(node)] = node.survivor(self._rng, self._survival)
            else:
                copy = self._copies[id(node)] = self._directory(node)
        return copy

    def _directory(self, node: DirNode) -> DirNode:
        entries = dict(node.durable)
        for change in node.pending:
            if self._survives(change):
                for directory, name, target in change.edits:
                    if directory is node and target is None:
                        entries.pop(name, None)
                    elif directory is node and target is not None:
                        entries[name] = target
            elif self._in_order:  # journals keep the order: nothing after the first that is lost
                break
        copied = {name: self.of(entry) for name, entry in sorted(entries.items())}
        return DirNode(dict(copied), dict(copied), [], node.modified_s)

    def _survives(self, change: Change) -> bool:
        if change.durable or self._survival == "kept":
            return True
        if self._survival == "lost":
            return False
        return self._verdicts.setdefault(id(change), self._rng.random() < self._keep)
