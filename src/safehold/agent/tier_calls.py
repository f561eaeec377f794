"""Answers what other nodes ask of this node's disk; runs in the flusher.

Invariants: only the own disk is touched, through its tier, by paths that the tier checks. Whoever has seen a newer incarnation refuses to
write for an older one (`pipeline.joining.refuse_stale`). Pieces of a long file wait in memory, of which there is a bound.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from safehold.errors import CheckpointError, ConfigurationError, StorageError
from safehold.pipeline import joining
from safehold.tiers.base import Tier

MAX_PIECES_BYTES = 256 << 20
MAX_PIECED = 16

_SIMPLE = ("delete", "delete_tree", "delete_if_empty", "sync_tree", "make_directory")


class TierCalls:
    """See the module."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[str, bytearray] = OrderedDict()
        self._lock = threading.Lock()
        self._operations: dict[str, Callable[[Tier, str, Mapping[str, Any]], Any]] = {
            "get": _get,
            "put": self._put,
            "piece": self._piece,
            "size": lambda tier, path, a: tier.size(path, retry_s=a["retry_s"]),
            "list": lambda tier, path, a: [[e.name, e.is_dir, e.size_bytes] for e in tier.list(path)],
            "digests": lambda tier, path, a: joining.digests(tier, a["paths"]),
            "sweep_temporaries": lambda tier, path, a: tier.sweep_temporaries(path, older_than_s=a["older_than_s"]),
            "free_bytes": lambda tier, path, a: tier.free_bytes(),
            "probe": lambda tier, path, a: msgspec.to_builtins(tier.probe()),
        }

    def answer(self, tier: Tier, question: bytes) -> bytes:
        """Carry out a question of `agent.net.remote_tier.PeerTier`."""
        asked = msgspec.msgpack.decode(question, type=dict[str, Any])
        try:
            answer = {"value": self._carry_out(tier, str(asked["op"]), str(asked["path"]), asked)}
        except FileNotFoundError:
            answer = {"failed": "absent"}
        except FileExistsError:
            answer = {"failed": "exists"}
        except ValueError as exc:
            answer = {"failed": "value", "text": str(exc)}
        except CheckpointError as exc:
            absent = isinstance(exc, StorageError) and isinstance(exc.__cause__, FileNotFoundError)
            answer = {"failed": "absent"} if absent else {"failed": "error", "error": exc.to_wire()}
        return msgspec.msgpack.encode(answer)

    def _carry_out(self, tier: Tier, operation: str, path: str, asked: Mapping[str, Any]) -> Any:
        if operation in _SIMPLE:
            return getattr(tier, operation)(path)
        found = self._operations.get(operation)
        if found is None:
            raise ConfigurationError(f"there is no operation {operation!r} of a disk", path=path)
        return found(tier, path, asked)

    def _put(self, tier: Tier, path: str, asked: Mapping[str, Any]) -> None:
        data = bytes(asked["data"])
        if asked["key"]:
            with self._lock:
                data = bytes(self._pieces.pop(asked["key"], b""))
            if not data:
                raise StorageError("the pieces of a long file did not come, or are gone again", path=path)
        joining.refuse_stale(tier, path)
        tier.put(path, data, exclusive=bool(asked["exclusive"]))

    def _piece(self, tier: Tier, path: str, asked: Mapping[str, Any]) -> None:
        with self._lock:
            held = self._pieces.setdefault(str(asked["key"]), bytearray())
            start, data = int(asked["offset"]), asked["data"]
            if start > len(held):
                raise StorageError("a piece of a long file has not come", path=path)
            held[start:] = data  # one that is asked for again replaces itself
            while len(self._pieces) > MAX_PIECED or sum(map(len, self._pieces.values())) > MAX_PIECES_BYTES:
                self._pieces.popitem(last=False)


def _get(tier: Tier, path: str, asked: Mapping[str, Any]) -> bytes | int:
    """Return a file, or only its size where it is too long for an answer."""
    size, limit = tier.size(path, retry_s=asked["retry_s"]), int(asked["limit_bytes"])
    if asked["inline_bytes"] < size <= limit:
        return size
    return tier.get(path, limit_bytes=limit, retry_s=asked["retry_s"])
