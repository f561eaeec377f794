"""The places of agents on this host that a command looks at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safehold.cli import config_source
from safehold.config import Config

if TYPE_CHECKING:
    from safehold.host.runtime import RunSlot


def all_slots() -> list[RunSlot]:
    """Return the slots in the runtime directory that the environment gives, and in the one that the settings name."""
    from safehold.host import runtime

    configured, _ = config_source.load(Config)["runtime_dir"]
    found = runtime.list_slots()
    if configured and Path(configured).is_dir():
        found += [slot for slot in runtime.list_slots(Path(configured)) if slot not in found]
    return found
