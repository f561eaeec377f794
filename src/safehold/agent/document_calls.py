"""What a flusher does for the documents that a restore hands out: it reads them with what it finds, and puts them where the agent says.

Invariants: what was read for `find` is kept until it was put somewhere, and no longer; a flusher that has not got it reads it anew, and
what is not what was asked for is put nowhere.
"""

from __future__ import annotations

import threading
from typing import Any

from safehold.config import Config
from safehold.errors import CheckpointError, ChecksumError
from safehold.events import EventStream
from safehold.format import document, paths
from safehold.pipeline import bundle, maintenance
from safehold.tiers.base import Tier
from safehold.types import CommitId


class DocumentCalls:
    """See the module; calls come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[str, bytes] = ("", b"")

    def find(self, tier: Tier, config: Config, arguments: dict[str, Any], events: EventStream) -> dict[str, Any]:
        """Find what can be restored, as `maintenance.find` does; `documents` in the answer: size and digest of its documents in one piece.

        None where they cannot be had in one piece, or have less than `share_from_bytes`: then every rank reads its own.
        """
        seen = bundle.Remembering(tier)
        value = maintenance.find(seen.tier, config, arguments, events)
        value["documents"], data = None, None
        if value["commit"] is not None:
            commit, most, least = CommitId(*value["commit"]), config.restore_cache_bytes, arguments["share_from_bytes"]
            try:
                data = bundle.collect(tier, commit, seen.found, most, least)
            except (CheckpointError, OSError) as exc:  # ranks will meet it, and say what it means
                events.emit("documents", "failed", error=str(exc))
        if data is not None:
            digest = document.digest(data)
            value["documents"] = [len(data), digest]
            with self._lock:
                self._kept = (digest, data)
        return value

    def bundle(self, tier: Tier, config: Config, arguments: dict[str, Any]) -> bytes:
        """Return the documents of a commit in one piece: those of `find`, or read from storage.

        Raises:
            ChecksumError: They are not those that were named.
            CheckpointError: They cannot be had.
        """
        with self._lock:
            (digest, data), self._kept = self._kept, ("", b"")
        if digest == arguments["blake3"]:
            return data
        commit = CommitId(*arguments["commit"])
        found = bundle.collect(tier, commit, {}, config.restore_cache_bytes)
        if found is None or document.digest(found) != arguments["blake3"]:
            text = "the documents on storage are not those that the lead has named"
            path = paths.checkpoint_dir(commit)
            raise ChecksumError(text, path=path, step=commit.step, tier=tier.name)
        return found
