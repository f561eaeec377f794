"""Threads of the network: one that runs the event loop, and a few for what blocks.

Invariants: all of them are daemons, so that a disk that holds one for ever does not hold the process; closing waits for a bounded time.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from safehold.errors import AgentUnavailableError

T = TypeVar("T")

CLOSE_S = 5.0
CLOSING_TURNS = 5


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str = "network") -> None:
        self.loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = CLOSE_S) -> T:
        """Run `work` in the loop and wait for its result; not from the loop's own thread.

        Raises:
            AgentUnavailableError: It took too long.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as exc:
            future.cancel()
            raise AgentUnavailableError(f"the network of this node has not answered for {timeout_s:g} s") from exc

    def post(self, work: Callable[..., object], *args: Any) -> None:
        """Run `work` in the loop soon; after `close` it is dropped."""
        try:
            self.loop.call_soon_threadsafe(work, *args)
        except RuntimeError:
            pass  # the loop is closed

    def close(self) -> None:
        """Cancel all that still runs, and end the thread."""
        if self.loop.is_closed():
            return
        try:
            self.call(_cancel_all())
        except AgentUnavailableError:
            pass
        self.post(self.loop.stop)
        self._thread.join(CLOSE_S)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CLOSE_S / 2) if tasks else None
    for _ in range(CLOSING_TURNS):  # connections that were closed just now end in turns of the loop to come
        await asyncio.sleep(0)


class Workers:
    """A few threads that the loop hands blocking work to; started as they are needed.

    Args:
        number: How many at most; further work waits.
        loop: Where results go.
    """

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number, self._loop = number, loop
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    async def run(self, work: Callable[[], T]) -> T:
        """Wait until a thread has done `work`, which is done in any case, also if the waiting is cancelled."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, future))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._number:
            thread = threading.Thread(target=self._work, name="network-bulk", daemon=True)
            self._threads.append(thread)
            thread.start()
        return await future

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, future = entry
            del entry
            result, error = None, None
            try:
                result = work()
            except BaseException as exc:
                error = exc
            self._idle.release()
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed
            del work, future, result, error

    def close(self) -> None:
        """Let the threads end once they have done what they do."""
        for _ in self._threads:
            self._queue.put(None)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
