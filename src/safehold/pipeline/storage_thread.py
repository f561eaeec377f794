"""Does what touches storage in a thread of its own: a disk that never answers keeps that thread and not the trainer.

Invariants: the caller waits for an event and never polls, so that nothing is slower than the storage; what is raised there is raised here
as it is. A thread that is late is left behind, and its result dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from safehold.errors import DeadlineError

T = TypeVar("T")


def within(
    limit_s: float,
    doing: str,
    action: Callable[[], T],
    *,
    cancelled: threading.Event | None = None,
    grace_s: float = 0.0,
    path: str | None = None,
) -> T:
    """Return what `action` returns, which is called in another thread.

    If this thread is interrupted (Ctrl-C), what was begun is `cancelled`, or else may end within `grace_s`, so that nothing stays half
    done.

    Args:
        limit_s: Seconds until it is given up.
        doing: What it does, for the error.
        action: What touches storage.
        cancelled: Set if this thread is interrupted.
        grace_s: Seconds that it may take to end then.
        path: Where, for the error.

    Raises:
        DeadlineError: It did not end in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()  # a thread whose `join` was interrupted counts as ended for Python

    def work() -> None:
        try:
            results.append(action())
        except BaseException as exc:
            errors.append(exc)
        finally:
            ended.set()

    try:
        threading.Thread(target=work, name="safehold-storage", daemon=True).start()
        in_time = ended.wait(limit_s)
    except Exception:
        raise
    except BaseException:
        if cancelled is not None:
            cancelled.set()
        ended.wait(grace_s)
        raise
    if not in_time:
        hint = "the storage does not answer; its thread was left behind"
        raise DeadlineError(f"{doing} did not end within {limit_s:g} s", path=path, hint=hint)
    if errors:
        raise errors[0]
    return results[0]
