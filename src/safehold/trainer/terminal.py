"""What a person sees on a terminal: a restore's progress, and the last words of a program that does not end well.

Invariants: progress is one line on standard error, from rank 0 only, and only where a person looks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

QUIET_S = 2.0
EVERY_S = 0.5
NOT_AWAITED = "the last saves were not waited for; the agent finishes what was staged ('safehold ls' shows it)"
IN_MEMORY_ONLY = (
    "is in memory only, and goes with the agents after agent_linger_s; save with final=True or flush=True to keep it"
)


def restore_progress() -> Callable[[int, int], None] | None:
    """Return what shows (bytes done, bytes in all), or None where standard error is no terminal. Silent for the first seconds."""
    if not sys.stderr.isatty():
        return None
    begun = shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal begun, shown
        now = time.monotonic()
        if done == 0:
            begun = now
        if now - begun < QUIET_S or (now - shown < EVERY_S and done < total):
            return
        shown = now
        percent = 100.0 * done / max(1, total)
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\rsafehold: restoring {percent:5.1f} % of {total / 1e9:.2f} GB{end}")
        sys.stderr.flush()

    return show


def end_program(text: str, exit_code: int) -> NoReturn:
    """End a program that is ending already, with a code that says why."""
    sys.stderr.write(f"safehold: {text}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
