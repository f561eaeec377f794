"""Work that waits in its middle: real storage code, written to block, whose calls take virtual time and interleave with others.

Invariants: a fiber has a thread, but only one thread runs at a time: whoever starts or resumes a fiber waits until it pauses or ends. A
fiber of a killed process is unwound at its next pause, without doing anything more.
"""

from __future__ import annotations

import threading

from safehold.testing.world.timeline import Process, Timeline, Work

_local = threading.local()


class Killed(BaseException):
    """The process that a fiber belongs to is dead."""


class _Worker:
    """A thread that runs one fiber after another."""

    idle: list[_Worker] = []  # noqa: RUF012 - shared by all worlds: a thread is a thread

    def __init__(self) -> None:
        self.go, self.back = threading.Lock(), threading.Lock()  # each is released by one side to let the other go on
        self.go.acquire()
        self.back.acquire()
        self.fiber: Fiber | None = None
        threading.Thread(target=self._run, name="fiber", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            fiber, self.fiber = self.fiber, None
            if fiber is not None:
                _local.fiber = fiber
                fiber.main()
                _local.fiber = None
                del fiber
            _Worker.idle.append(self)
            self.back.release()


class Fiber:
    """See the module.

    Args:
        timeline: Where its pauses are events.
        process: Whose work it is.
        work: What it does.
    """

    def __init__(self, timeline: Timeline, process: Process, work: Work) -> None:
        self._timeline, self._process, self._work = timeline, process, work
        self._worker: _Worker | None = None
        self.killed = False
        self.over = False

    def start(self) -> None:
        """Run it until its first pause."""
        self._worker = _Worker.idle.pop() if _Worker.idle else _Worker()
        self._worker.fiber = self
        self._switch()

    def _switch(self) -> None:
        worker = self._worker
        assert worker is not None
        worker.go.release()
        worker.back.acquire()

    def main(self) -> None:
        """The thread's work."""
        try:
            self._work()
        except Killed:
            pass
        except BaseException as exc:  # a fault of the simulation or of the code in it: the world stops
            self._timeline.problems.append(exc)
        self.over = True

    def pause(self, seconds: float) -> None:
        """Let virtual time pass; called inside."""
        if self.killed:
            raise Killed
        self._timeline.at(seconds, self._process, self.resume)
        self.park()

    def park(self) -> None:
        """Wait until somebody calls `resume`; called inside."""
        worker = self._worker
        assert worker is not None
        worker.back.release()
        worker.go.acquire()
        if self.killed:
            raise Killed

    def resume(self) -> None:
        """Run it until its next pause; called outside."""
        if not self.over:
            self._switch()

    def kill(self) -> None:
        """Unwind it; called outside."""
        if not self.over and not self.killed:
            self.killed = True
            self._switch()


def current() -> Fiber | None:
    """Return the fiber that this runs in."""
    return getattr(_local, "fiber", None)
