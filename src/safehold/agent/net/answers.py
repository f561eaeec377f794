"""What the other side's refusals mean to who asked: errors that name the node, its address, and what to do."""

from __future__ import annotations

from typing import Any

import msgspec

from safehold.errors import (
    AgentUnavailableError,
    CheckpointError,
    SupersededError,
    TornFileError,
    from_wire,
)

_HINTS = {
    401: "the agents of a job share one token; is this another job's agent, or one of an earlier start?",
    403: "all agents of a job know the names of all its nodes",
    421: "another node answers at this address; have addresses changed?",
}
RETRIED = (400, 408, 429, 500, 503)
"""Statuses after which the same may succeed: a cut or slow body, a failure of the other side."""


def facts_of(body: bytes) -> dict[str, Any]:
    """Read the values of an answer; nothing where it has none."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def error_of(node: str, address: object, status: int, facts: dict[str, Any]) -> CheckpointError:
    """Return the error that a refusal means."""
    where = f"the agent of node {node} at {address}"
    words = str(facts.get("text") or f"status {status}")[:500]
    if isinstance(facts.get("error"), dict):
        error = from_wire(facts["error"])
        error.node = error.node or node
        return error
    if status == 409 and facts.get("reason") == "incarnation":
        hint = "another job was started in this run directory; stop this one, or give it a directory of its own"
        return SupersededError(f"{where} refuses this one: {words}", node=node, hint=hint)
    if status in (404, 416):
        return TornFileError(f"{where} does not have what was asked for: {words}", node=node)
    return AgentUnavailableError(f"{where} refuses this one: {words}", node=node, hint=_HINTS.get(status))


def unreachable(node: str, address: object, after_s: float, cause: object) -> AgentUnavailableError:
    """Return the error for a node that has not answered for some time."""
    text = f"the agent of node {node} at {address} has not answered for {after_s:.1f} s: {cause}"
    hint = "is the node up, and can this one reach that address? the log of its agent may have more"
    return AgentUnavailableError(text, node=node, hint=hint)


def restarted(node: str, address: object) -> AgentUnavailableError:
    """Return the error for a node whose agent is not the one that was spoken to before."""
    text = f"the agent of node {node} at {address} was started again, and knows nothing of what was sent before"
    return AgentUnavailableError(text, node=node, hint="the log of the agent before it may say why it ended")
