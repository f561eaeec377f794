"""Joins the disks of a job's nodes: what flushers and trainers need to know for it, and the tier that they get.

Invariants: what is needed is plain values, since flushers are other processes than the agent; the token among them reaches no log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from safehold.config import Config
from safehold.errors import ConfigurationError
from safehold.format.document import digest
from safehold.pipeline import joining
from safehold.tiers.base import Tier
from safehold.tiers.joined import JoinedTier

if TYPE_CHECKING:
    import ssl


@runtime_checkable
class Closing(Protocol):
    """A way to another node."""

    def close(self) -> None:
        """End it."""
        ...


FIRST = 1
"""The incarnation that agents speak to each other as; see `agent.net.make`."""


def to_wire(*, node: int, names: list[str], addresses: list[str], token: str) -> dict[str, Any]:
    """Return what `join` needs, as plain values."""
    if len(addresses) != len(names):
        raise ConfigurationError(f"{len(addresses)} addresses are known of {len(names)} nodes", node=names[node])
    return {"node": node, "names": names, "addresses": addresses, "token": token}


def join(own: Tier, url: str, wire: Mapping[str, Any], config: Config) -> JoinedTier:
    """Return the nodes' disks as one tier.

    Args:
        own: This node's.
        url: The run directory, the same path on all nodes.
        wire: Of `to_wire`.
        config: The run's settings.

    Raises:
        ConfigurationError: An address, or a file for TLS, is no good.
    """
    # Imported here: a job on one node pays for none of it.
    from safehold.agent.net.addresses import Address
    from safehold.agent.net.identity import Identity
    from safehold.agent.net.remote_tier import PeerTier

    names, node = list(wire["names"]), int(wire["node"])
    identity = Identity(node=names[node], token=wire["token"], run_id=digest(url.encode()), incarnation=FIRST)
    deadline_s = min(config.request_timeout_s, config.start_timeout_s / 5, config.flush_timeout_s / 4)
    tls = _tls(config)
    others: dict[str, Tier] = {
        name: PeerTier(
            name,
            Address.parse(address),
            url=own.url,
            identity=identity,
            tls=tls,
            deadline_s=deadline_s,
            read_s=config.stall_timeout_s,
            peer_timeout_s=min(config.peer_timeout_s, deadline_s / 2),
        )
        for name, address in zip(names, wire["addresses"], strict=True)
        if name != names[node]
    }
    return JoinedTier(own, others, node=names[node], guess=joining.guess(names))


def close(tier: JoinedTier) -> None:
    """Close the ways to the other nodes; calls that are under way fail."""
    for member in tier.members.values():
        if isinstance(member, Closing):
            member.close()


def _tls(config: Config) -> ssl.SSLContext | None:
    from safehold.agent.net.tls import TlsFiles, client_context

    if not config.network_cert:
        return None
    files = TlsFiles(
        certificate=config.network_cert,
        key=config.network_key or config.network_cert,
        ca=config.network_ca or None,
        check_names=config.network_check_names,
    )
    return client_context(files)
