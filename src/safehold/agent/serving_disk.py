"""What another node asks of this node's disk, carried out by the flusher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from safehold.errors import CheckpointError

if TYPE_CHECKING:
    from safehold.agent.session import Session


def ask_disk(here: Session, question: bytes, reply: Callable[[bytes | CheckpointError], None]) -> None:
    """Carry it out; a job that is over gets nothing done by anybody."""
    if here.ended_by:
        reply(here.superseded())
        return
    here.flusher.call(
        "tier",
        {"question": question},
        lambda value, error: reply(value if error is None else error),
        timeout_s=here.config.flush_timeout_s,
    )
