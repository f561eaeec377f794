"""What touches storage keeps a thread and not its caller."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from safehold.errors import DeadlineError
from safehold.pipeline.storage_thread import within


def test_what_is_returned_and_raised_comes_as_it_is() -> None:
    assert within(5.0, "reading", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5.0, "reading", lambda: 1 // 0)


def test_what_is_late_is_left_behind_by_name() -> None:
    go_on = threading.Event()
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"reading did not end within 0.1 s \(path /run\)"):
        within(0.1, "reading", lambda: go_on.wait(20.0), path="/run")
    assert time.monotonic() - begun < 5.0
    go_on.set()


def test_an_interrupt_cancels_what_was_begun_and_lets_it_end() -> None:
    cancelled, ended = threading.Event(), threading.Event()

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert cancelled.wait(5.0)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        within(5.0, "writing", work, cancelled=cancelled, grace_s=5.0)
    assert ended.is_set()
