"""Makes the real network of a session; imported only where there are several nodes, for it brings an HTTP server along."""

from __future__ import annotations

from dataclasses import replace

from safehold.agent import messages as m
from safehold.agent.net.addresses import Address
from safehold.agent.net.peers import NetworkSettings, Peers
from safehold.agent.net.seam import Listeners
from safehold.agent.net.tls import TlsFiles
from safehold.config import Config
from safehold.events import EventStream
from safehold.format.document import digest

FIRST = 1
"""The incarnation that agents speak to each other as. The token is new with every start of the job, so no other start is ever heard; that
an incarnation is over within one start is told by the messages themselves, which name theirs."""


def make_network(hello: m.Hello, listeners: Listeners, *, url: str, events: EventStream) -> Peers:
    """Listen for the agents of the other nodes.

    Args:
        hello: Of this node's first rank.
        listeners: Who is told of messages and losses.
        url: The run directory; agents of different ones refuse each other.
        events: Where refusals are told.

    Raises:
        ConfigurationError: It cannot listen there, or the files for TLS are no good.
    """
    config, world = Config.from_wire(hello.config), hello.world
    node = world.node_of[hello.rank]
    port = Address.parse(hello.addresses[node]).port if hello.addresses else config.network_port
    tls = None
    if config.network_cert:
        tls = TlsFiles(
            certificate=config.network_cert,
            key=config.network_key or config.network_cert,
            ca=config.network_ca or None,
            check_names=config.network_check_names,
        )
    settings = NetworkSettings()
    control = replace(settings.control, peer_timeout_s=config.peer_timeout_s)
    return Peers(
        world.node_names[node],
        nodes=world.node_names,
        bind=hello.listen,
        port=port,
        token=world.token,
        run_id=digest(url.encode()),
        incarnation=FIRST,
        listeners=listeners,
        events=events,
        tls=tls,
        settings=replace(settings, control=control),
    )
