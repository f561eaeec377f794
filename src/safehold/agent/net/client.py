"""One peer, as this node sees it: control messages go through the loop, bulk bytes through the calling threads."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp

from safehold.agent.net.addresses import Address
from safehold.agent.net.bulk import BulkClient, BulkSettings
from safehold.agent.net.control import Sender
from safehold.agent.net.identity import Identity
from safehold.agent.net.outbox import ControlSettings
from safehold.agent.net.seam import Listeners
from safehold.errors import CheckpointError


def http_client(tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return the HTTP client that all peers of a node share; made and closed in the loop."""
    connector = aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else False, keepalive_timeout=30.0)
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False, trust_env=False)


class PeerClient:
    """See the module.

    Args:
        node: The peer's name.
        address: Where it listens.
        identity: Who we are.
        http: The HTTP client for control messages.
        tls: Context for TLS, or None.
        listeners: Who is told.
        control: How control messages are sent.
        bulk: How bulk bytes are asked for.
        loop: Where control messages are sent from.
    """

    def __init__(
        self,
        node: str,
        address: Address,
        *,
        identity: Identity,
        http: aiohttp.ClientSession,
        tls: ssl.SSLContext | None,
        listeners: Listeners,
        control: ControlSettings,
        bulk: BulkSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.node = node
        self.sender = Sender(
            node,
            address,
            identity=identity,
            http=http,
            tls=tls is not None,
            listeners=listeners,
            settings=control,
            loop=loop,
        )
        self.bulk = BulkClient(node, address, identity=identity, tls=tls, settings=bulk, lost=lambda: self.sender.lost)

    @property
    def lost(self) -> CheckpointError | None:
        """Why the peer is lost, if it is."""
        return self.sender.lost

    def close(self) -> None:
        """Drop what waits, break what is under way; in the loop."""
        self.sender.stop()
        self.bulk.close()
