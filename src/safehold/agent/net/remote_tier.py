"""The disk of another node as a tier, reached through that node's agent.

Invariants: works from any process that knows the agents' addresses and token. What the other node says of its files (absent, there already,
torn, full) is raised as its tier raised it, with the node's name; that it cannot be reached is a `StorageError`. Every call has a deadline.
A node that could not be reached is not asked again for `SILENT_S`, so that many calls do not each wait for it. Packs are read, not written.
"""

from __future__ import annotations

import errno
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from safehold.agent.net.addresses import Address
from safehold.agent.net.bulk import BulkClient, BulkSettings
from safehold.agent.net.call_client import CallClient
from safehold.agent.net.identity import Identity
from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    DeadlineError,
    StorageError,
    TornFileError,
    from_wire,
)
from safehold.host.disk import components
from safehold.tiers.base import ALIGNMENT_BYTES, Entry, PackReader, PackWriter, ProbeReport

T = TypeVar("T")

KIND = "tier"
"""Of questions that `agent.tier_calls` answers."""
FLASH = "flash"
"""Kind of bulk bytes: a file below the run directory."""
PIECE_BYTES = 8 << 20
"""What is longer is asked for, and sent, in pieces."""
SILENT_S = 1.0


class PeerTier:
    """See the module and `tiers.base.Tier`.

    Args:
        node: The other node's name.
        address: Where its agent listens.
        url: The run directory, the same on all nodes.
        identity: Who we are.
        tls: Context, or None.
        deadline_s: Seconds for one small operation.
        read_s: Seconds for reading one range of a pack.
        peer_timeout_s: Seconds without a connection after which the node counts as unreachable.
    """

    name = "flash"

    def __init__(
        self,
        node: str,
        address: Address,
        *,
        url: str,
        identity: Identity,
        tls: ssl.SSLContext | None,
        deadline_s: float,
        read_s: float,
        peer_timeout_s: float,
    ) -> None:
        self.node, self.url = node, url
        self._deadline_s, self._read_s = deadline_s, read_s
        common: dict[str, Any] = {"identity": identity, "tls": tls, "peer_timeout_s": peer_timeout_s}
        self._repeated = CallClient(node, address, **common)
        self._once = CallClient(node, address, **common, once=True)
        bulk = BulkSettings(peer_timeout_s=max(peer_timeout_s, 1.0), stall_s=min(read_s, 30.0))
        self._bulk = BulkClient(node, address, identity=identity, tls=tls, settings=bulk)
        self._silent_until = 0.0
        self._silent_why: CheckpointError | None = None

    def close(self) -> None:
        """Close all connections; calls that are under way fail."""
        for client in (self._repeated, self._once, self._bulk):
            client.close()

    # -- packs -----------------------------------------------------------------------------------------------------------

    def create_pack(self, path: str, size_bytes: int) -> PackWriter:
        """See `Tier`; refused: a node writes its packs to its own disk."""
        components(path)
        raise StorageError("packs are not written to another node's disk", node=self.node, tier=self.name, path=path)

    def open_pack(self, path: str, *, direct: bool = True, retry_s: float | None = None) -> PackReader:
        """See `Tier`."""
        return _PeerPackReader(self, path, self.size(path, retry_s=retry_s))

    # -- small files -----------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """See `Tier`.

        Raises:
            SupersededError: That node has seen a newer incarnation than the one that writes.
        """
        key = ""
        if len(data) > PIECE_BYTES:
            key = os.urandom(16).hex()
            for start in range(0, len(data), PIECE_BYTES):
                self._ask("piece", path, key=key, offset=start, data=data[start : start + PIECE_BYTES])
            data = b""
        self._ask("put", path, once=exclusive, data=data, key=key, exclusive=exclusive)

    def get(self, path: str, *, limit_bytes: int, retry_s: float | None = None) -> bytes:
        """See `Tier`."""
        found = self._ask("get", path, limit_bytes=limit_bytes, inline_bytes=PIECE_BYTES, retry_s=retry_s)
        if isinstance(found, bytes):
            return found
        buffer = bytearray(int(found))
        self._read(path, 0, memoryview(buffer))
        return bytes(buffer)

    def size(self, path: str, *, retry_s: float | None = None) -> int:
        """See `Tier`."""
        return int(self._ask("size", path, retry_s=retry_s))

    # -- directories -----------------------------------------------------------------------------------------------------

    def list(self, directory: str) -> list[Entry]:
        """See `Tier`."""
        found = self._ask("list", directory)
        return [Entry(name=name, is_dir=is_dir, size_bytes=size) for name, is_dir, size in found]

    def digests(self, paths: Sequence[str]) -> dict[str, str]:
        """Return blake3 of the files of these that are there."""
        return dict(self._ask("digests", "", paths=tuple(paths)))

    def delete(self, path: str) -> None:
        """See `Tier`."""
        self._ask("delete", path)

    def delete_tree(self, directory: str) -> None:
        """See `Tier`."""
        self._ask("delete_tree", directory)

    def delete_if_empty(self, directory: str) -> None:
        """See `Tier`."""
        self._ask("delete_if_empty", directory)

    def sync_tree(self, directory: str) -> None:
        """See `Tier`."""
        try:
            self._ask("sync_tree", directory)
        except FileNotFoundError as exc:
            text = "making directory entries durable failed: there is no such directory"
            raise StorageError(text, node=self.node, tier=self.name, path=directory) from exc

    def make_directory(self, path: str) -> None:
        """See `Tier`."""
        self._ask("make_directory", path)

    def sweep_temporaries(self, directory: str, *, older_than_s: float = 3600.0) -> tuple[str, ...]:
        """See `Tier`."""
        return tuple(self._ask("sweep_temporaries", directory, older_than_s=older_than_s))

    # -- the place -------------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int | None:
        """See `Tier`."""
        found = self._ask("free_bytes", "")
        return None if found is None else int(found)

    def probe(self) -> ProbeReport:
        """See `Tier`."""
        return msgspec.convert(self._ask("probe", ""), ProbeReport)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _ask(self, operation: str, path: str, *, once: bool = False, **arguments: Any) -> Any:
        components(path)
        question = msgspec.msgpack.encode({"op": operation, "path": path, **arguments})
        self._refuse_if_silent(path)
        try:
            answer = (self._once if once else self._repeated).call(KIND, question, deadline_s=self._deadline_s)
        except CheckpointError as exc:
            self._translate(exc, path)
        return self._value(msgspec.msgpack.decode(answer, type=dict[str, Any]), path)

    def _value(self, answer: Mapping[str, Any], path: str) -> Any:
        where = f"{path} (node {self.node})"
        match answer.get("failed"):
            case None:
                return answer.get("value")
            case "absent":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
            case "exists":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where)
            case "value":
                raise ValueError(str(answer.get("text")))
            case _:
                error = from_wire(dict(answer["error"]))
                error.node = error.node or self.node
                raise error

    def _read(self, path: str, offset: int, view: memoryview) -> None:
        self._refuse_if_silent(path)
        try:
            self._bulk.read_into(FLASH, path, offset, view, deadline_s=self._read_s)
        except CheckpointError as exc:
            self._translate(exc, path)

    def _refuse_if_silent(self, path: str) -> None:
        why = self._silent_why
        if why is not None and time.monotonic() < self._silent_until:
            self._translate(why, path)

    def _translate(self, exc: CheckpointError, path: str) -> NoReturn:
        if not isinstance(exc, AgentUnavailableError | DeadlineError):
            exc.tier, exc.path, exc.node = exc.tier or self.name, exc.path or path, exc.node or self.node
            raise exc
        if exc is not self._silent_why:
            self._silent_why, self._silent_until = exc, time.monotonic() + SILENT_S
        text = f"the disk of node {self.node} cannot be reached: {exc.message}"
        raise StorageError(text, node=self.node, tier=self.name, path=path, hint=exc.hint) from exc


class _PeerPackReader:
    """See `tiers.base.PackReader`."""

    alignment = ALIGNMENT_BYTES

    def __init__(self, tier: PeerTier, path: str, size_bytes: int) -> None:
        self._tier, self._path, self.size_bytes = tier, path, size_bytes
        self._closed = False

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `PackReader`."""
        view = memoryview(buffer).cast("B")
        if self._closed:
            raise ValueError(f"pack {self._path} is closed")
        if view.readonly:
            raise ValueError("the buffer is read-only")
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        if offset + view.nbytes > self.size_bytes:
            text = f"bytes {offset} to {offset + view.nbytes} were wanted of a pack that ends at {self.size_bytes}"
            raise TornFileError(text, node=self._tier.node, tier=self._tier.name, path=self._path)
        if view.nbytes:
            self._tier._read(self._path, offset, view)

    def close(self) -> None:
        """See `PackReader`."""
        self._closed = True
