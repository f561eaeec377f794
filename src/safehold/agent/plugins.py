"""Loads the one event listener that the environment names, in trainers, agents and flushers alike.

`SAFEHOLD_LISTENER=package.module:function` is imported and subscribed; drills use it to inject faults, users to collect traces.
"""

from __future__ import annotations

import importlib
import os

from safehold.errors import ConfigurationError
from safehold.events import EventStream

VARIABLE = "SAFEHOLD_LISTENER"


def install_listener(events: EventStream) -> None:
    """Subscribe the listener named by the environment, if one is.

    Raises:
        ConfigurationError: The name cannot be imported.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return
    module, _, function = name.partition(":")
    try:
        listener = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigurationError(
            f"{VARIABLE}={name!r} cannot be loaded: {exc}", hint="give package.module:function, or unset it"
        ) from exc
    events.subscribe(listener)
