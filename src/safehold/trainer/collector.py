"""Keeps Python's garbage collector out of the few moments for which training waits.

A full collection of a process that has torch loaded takes more than 0.1 s; walking a large state allocates enough to start one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Start no collection meanwhile; one that became due comes after it. Where the user has turned it off, it stays off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
