"""What trainers and their agent say about documents that are handed out in a restore; see `agent.messages` for the rest."""

from __future__ import annotations

import msgspec


class DocumentsAsk(msgspec.Struct, tag="documents_ask", frozen=True):
    """A rank asks for the documents that were offered with this round; the answer comes once they are here, or will not come."""

    id: int
    round: int


class Documents(msgspec.Struct, tag="documents", frozen=True):
    """Descriptor: memory that begins with the documents (`pipeline.bundle`); none, and no bytes, where each rank reads storage."""

    id: int
    size_bytes: int


class DocumentsOver(msgspec.Struct, tag="documents_over", frozen=True):
    """A rank needs the documents no more; `done`: nor does any other on any node, since all have voted. Replied to with `Done`."""

    id: int
    round: int
    done: bool
