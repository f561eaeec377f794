"""The places of agents on this host that a command looks at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safehold.cli import config_source
from safehold.config import Config

if TYPE_CHECKING:
    from safehold.host.runtime import RunSlot

STATUS_TIMEOUT_S = 2.0


def all_slots() -> list[RunSlot]:
    """Return the slots in the runtime directory that the environment gives, and in the one that the settings name."""
    from safehold.host import runtime

    configured, _ = config_source.load(Config)["runtime_dir"]
    found = runtime.list_slots()
    if configured and Path(configured).is_dir():
        found += [slot for slot in runtime.list_slots(Path(configured)) if slot not in found]
    return found


def status_of(slot: RunSlot) -> dict[str, Any]:
    """Ask the agent of a slot what it is doing; nothing where it does not answer."""
    from safehold.agent.start import ask_status
    from safehold.errors import CheckpointError

    try:
        return dict(ask_status(slot, STATUS_TIMEOUT_S))
    except CheckpointError:
        return {}


def memory_of(facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return what an agent holds: all memory in bytes, the newest step that is in memory only, and copies for other nodes.

    None where it does not say.
    """
    try:
        held, session = facts["memory"], facts["session"] or {}
        return {
            "bytes": facts["arenas_bytes"],
            "budget_bytes": facts["budget_bytes"],
            "step": held["only_step"],
            "copies": held["copies"],
            "partners": session.get("memory", {}).get("partners", []),
        }
    except (KeyError, TypeError):
        return None
