"""Safehold saves and restores the whole state of a distributed training run.

The public names are those of `__all__`; they are loaded at first use, so that `import safehold` costs little and the command line never
imports a framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from safehold._version import __version__

if TYPE_CHECKING:
    from safehold.checkpointer import Checkpointer
    from safehold.config import Config
    from safehold.errors import CheckpointError
    from safehold.oneshot import load, save
    from safehold.policy.retention import Best, Keep
    from safehold.state.declare import Parts, PerRank, Sharded
    from safehold.trainer.handles import SaveHandle

_PLACES = {
    "Best": "safehold.policy.retention",
    "CheckpointError": "safehold.errors",
    "Checkpointer": "safehold.checkpointer",
    "Config": "safehold.config",
    "Keep": "safehold.policy.retention",
    "Parts": "safehold.state.declare",
    "PerRank": "safehold.state.declare",
    "SaveHandle": "safehold.trainer.handles",
    "Sharded": "safehold.state.declare",
    "load": "safehold.oneshot",
    "save": "safehold.oneshot",
}

__all__ = [
    "Best",
    "CheckpointError",
    "Checkpointer",
    "Config",
    "Keep",
    "Parts",
    "PerRank",
    "SaveHandle",
    "Sharded",
    "__version__",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    """Load a public name at first use."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'safehold' has no attribute {name!r}")
    value = getattr(importlib.import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
