"""Sends the messages of an outbox to one peer over HTTP: batches, retries, heartbeats.

Invariants: one request is under way at a time, and a batch is sent again until it is acknowledged, so order needs nothing else. `send` may
be called from any thread, all else happens in the loop's. What is lost is `outbox`'s to say.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable
from typing import Any

import aiohttp
from yarl import URL

from safehold.agent.net import wire
from safehold.agent.net.addresses import Address
from safehold.agent.net.answers import error_of, facts_of, restarted, unreachable
from safehold.agent.net.identity import Identity
from safehold.agent.net.outbox import LARGE_BYTES, MIN_BACKOFF_S, Batch, ControlSettings, Outbox
from safehold.agent.net.seam import Listeners
from safehold.clock import new_token
from safehold.errors import AgentUnavailableError, CheckpointError
from safehold.format.crc import crc


class _Refused(Exception):
    def __init__(self, status: int, facts: dict[str, Any]) -> None:
        super().__init__(f"status {status}")
        self.status, self.facts = status, facts


class Sender:
    """See the module; `start` begins.

    Attributes:
        address: Where the peer listens.
        started: Whether it has begun.

    Args:
        node: The peer's name.
        address: Where it listens.
        identity: Who we are.
        http: The HTTP client, shared by all senders.
        tls: Whether to speak TLS.
        listeners: Who is told.
        settings: See there.
        loop: Where it runs.
    """

    def __init__(
        self,
        node: str,
        address: Address,
        *,
        identity: Identity,
        http: aiohttp.ClientSession,
        tls: bool,
        listeners: Listeners,
        settings: ControlSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._node, self.address, self.started = node, address, False
        self._identity, self._http, self._tls, self._listeners = identity, http, tls, listeners
        self._settings, self._loop = settings, loop
        self._random = random.Random(settings.seed)
        self._box = Outbox(node, new_token(), settings)
        self._superseded = 0
        self._refusal: CheckpointError | None = None
        self._heard_at = 0.0
        self._wake, self._poke = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def send(self, payload: bytes) -> None:
        """See `seam.Network.send`; from any thread."""
        try:
            if self._box.put(payload):
                self._post_in_loop(self._wake.set)
        except OverflowError as exc:
            self._post_in_loop(self._overflowed)
            raise AgentUnavailableError(str(exc), node=self._node, hint="it is slow, or not there") from exc

    def _post_in_loop(self, work: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            pass  # the loop is closed

    def _overflowed(self) -> None:
        if (error := self._box.overflowed()) is not None:
            self._listeners.on_lost(self._node, error)
        self._wake.set()  # it is asked whether it is there, and then counts as back

    @property
    def lost(self) -> CheckpointError | None:
        """Why the peer is lost, if it is."""
        return self._box.lost

    # -- in the loop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to send and to watch; again does nothing."""
        if self._task is None:
            self.started = True
            self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """End; what was not sent is dropped without a word."""
        if self._task is not None:
            self._task.cancel()

    def heard(self) -> None:
        """The peer asked something of us, so it lives."""
        self._heard_at = self._loop.time()
        if self._box.lost is not None:
            self._poke.set()

    def move(self, address: Address) -> None:
        """The peer is somewhere else now."""
        self.address = address
        self._poke.set()

    def retry(self) -> None:
        """Something changed: a retry need not wait any longer."""
        self._poke.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._until_due()
            batch = self._box.begin(self._loop.time())
            try:
                await self._post(batch)
            except _Refused as exc:
                if exc.facts.get("reason") in ("gap", "session"):
                    self._lose(restarted(self._node, self.address))
                    failures += 1
                    await self._back_off(failures)
                    continue
                cause: object = exc
                self._refusal = error_of(self._node, self.address, exc.status, exc.facts)
                self._tell_superseded(exc)
            except Exception as exc:  # whatever it was, the peer has not answered; without an end to it, it is lost
                cause = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
            else:
                failures, self._refusal = 0, None
                if self._box.answered(batch):
                    self._overflowed()  # told before, whichever thread is quicker
                    self._listeners.on_back(self._node)
                continue
            failures += 1
            self._judge(cause)
            await self._back_off(failures)

    async def _until_due(self) -> None:
        """Wait for something to send, or until the peer has been silent for a heartbeat."""
        silent_since = self._loop.time()
        while not self._box.troubled and not len(self._box):
            self._wake.clear()
            if len(self._box):
                return
            left_s = max(silent_since, self._heard_at) + self._settings.heartbeat_s - self._loop.time()
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _post(self, batch: Batch) -> None:
        """Send a batch and return once it is acknowledged."""
        body = wire.encode_batch(batch.payloads)
        headers = self._identity.headers(self._node)
        headers |= {wire.SESSION: str(batch.session), wire.FIRST: str(batch.first), wire.CRC: str(crc(body))}
        scheme = "https" if self._tls else "http"
        url = URL.build(scheme=scheme, host=self.address.host, port=self.address.port, path=wire.MESSAGES_PATH)
        limit = aiohttp.ClientTimeout(total=self._box.attempt_s(self._loop.time(), len(body)))
        # Large bodies in pieces: in one they would hold the loop, which aiohttp warns of.
        data = body if len(body) < LARGE_BYTES else io.BytesIO(body)
        async with self._http.post(url, data=data, headers=headers, timeout=limit, allow_redirects=False) as reply:
            text = bytearray()
            async for piece in reply.content.iter_any():
                text += piece
                if len(text) > wire.MAX_ANSWER_BYTES:
                    raise ValueError("the answer is too long")
            facts = facts_of(bytes(text))
            if reply.status != 200:
                raise _Refused(reply.status, facts)
            if reply.headers.get(wire.NODE) != wire.quote(self._node):
                raise ValueError(f"node {reply.headers.get(wire.NODE)!r} answers there")
            last = facts.get("last")
            if not isinstance(last, int) or last < batch.first + len(batch.payloads) - 1:
                raise ValueError("the answer acknowledges less than was sent")

    def _judge(self, cause: object) -> None:
        waited_s = self._box.overdue_s(self._loop.time())
        if waited_s is not None:
            # A refusal says more than the silence that may have come after it.
            self._lose(self._refusal or unreachable(self._node, self.address, waited_s, cause))

    def _lose(self, error: CheckpointError) -> None:
        self._refusal = None
        if self._box.lose(error):
            self._listeners.on_lost(self._node, error)

    def _tell_superseded(self, exc: _Refused) -> None:
        current = exc.facts.get("current")
        if exc.facts.get("reason") == "incarnation" and isinstance(current, int) and current > self._superseded:
            self._superseded = current
            self._listeners.on_superseded(self._node, current)

    async def _back_off(self, failures: int) -> None:
        """Wait before the next try: longer each time, by chance, and not on once there is news."""
        wait_s = self._box.backoff_s(failures, self._random.random())
        self._poke.clear()
        await asyncio.sleep(min(wait_s, MIN_BACKOFF_S))
        try:
            async with asyncio.timeout(max(0.0, wait_s - MIN_BACKOFF_S)):
                await self._poke.wait()
        except TimeoutError:
            pass
