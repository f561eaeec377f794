"""What the ranks of a job have to agree about when they meet: one run directory, the same settings, agents that reach each other.

Invariants: `facts` and `address_facts` look at this process and its host, all else is pure and happens on rank 0, for all. Whatever is
refused is refused by name: which setting, which ranks, which nodes. What may be a secret is not shown.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Any

from safehold.agent.net.addresses import Address
from safehold.clock import new_token
from safehold.config import Config
from safehold.errors import ConfigurationError
from safehold.format.names import display, numbered
from safehold.pipeline.exchange import boot_id, node_name
from safehold.policy.placement import Scheme, place
from safehold.types import Membership

DOMAIN_VARIABLE = "SAFEHOLD_DOMAIN"
"""Names what a node fails together with, larger domains first: `room-1/rack-7`."""
LAUNCHER_VARIABLE = "MASTER_ADDR"
OWN_SETTINGS = ("runtime_dir", "storage_interface", "network_cert", "network_key", "network_ca")
"""Settings that may differ from node to node."""
SECRET_WORDS = ("key", "token", "secret", "password", "credential")
MAX_SETTINGS, MAX_VALUES, MAX_RANKS, MAX_NODES = 3, 3, 8, 4
SAME_HINT = (
    "give every rank the same arguments and environment ('safehold config show' tells where each value comes from)"
)


def facts(url: str, config: Config, same: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank says of itself.

    Args:
        url: The run directory, in its one spelling.
        config: Settings.
        same: What else has to be the same on all ranks, by name, as it is shown.
    """
    settings = {name: value for name, value in config.to_wire().items() if name not in OWN_SETTINGS} | dict(same)
    return {"node": node_name(), "url": url, "settings": settings, "domain": os.environ.get(DOMAIN_VARIABLE, "")}


def world_of(gathered: list[dict[str, Any]], membership: Membership, scheme: Scheme | None) -> dict[str, Any]:
    """Return the world that the ranks make, as the fields of `messages.World`.

    Args:
        gathered: The `facts` of all ranks.
        membership: Of rank 0.
        scheme: The redundancy, if there is any.

    Raises:
        ConfigurationError: They contradict each other, or are too few for the redundancy.
    """
    nodes: dict[str, int] = {}
    node_of = [nodes.setdefault(entry["node"], len(nodes)) for entry in gathered]
    names = list(nodes)
    _check_same(gathered, [names[node] for node in node_of])
    domains = [gathered[node_of.index(node)]["domain"] for node in range(len(nodes))]
    for rank, entry in enumerate(gathered):
        if entry["domain"] != domains[node_of[rank]]:
            text = (
                f"ranks of node {entry['node']} name different failure domains: "
                f"{entry['domain']!r} and {domains[node_of[rank]]!r}"
            )
            hint = f"{DOMAIN_VARIABLE} is the node's, the same for all its ranks"
            raise ConfigurationError(text, rank=rank, hint=hint)
    if scheme is not None:
        place(scheme, range(len(nodes)), {node: name for node, name in enumerate(domains) if name})
    return {
        "token": new_token(),
        "world_size": membership.world_size,
        "node_of": node_of,
        "node_names": names,
        "domains": domains,
    }


def _check_same(gathered: list[dict[str, Any]], nodes: list[str]) -> None:
    urls = [entry["url"] for entry in gathered]
    if len(set(urls)) > 1:
        text = f"the ranks have different run directories: {_who_has_what(urls, nodes)}"
        raise ConfigurationError(text, rank=_first_other(urls), hint=SAME_HINT)
    first = gathered[0]["settings"]
    if all(entry["settings"] == first for entry in gathered):
        return
    known = dict.fromkeys(name for entry in gathered for name in entry["settings"])
    found = {name: [_shown(name, entry["settings"]) for entry in gathered] for name in known}
    values = {name: [repr(entry["settings"].get(name)) for entry in gathered] for name in known}
    differ = [name for name in known if len(set(values[name])) > 1]
    told = [
        f"{name} is {_who_has_what(found[name], nodes)}"
        if len(set(found[name])) > 1
        else f"{name} (not shown), which is another one than rank 0's on {_where(_others(values[name]), nodes)}"
        for name in differ[:MAX_SETTINGS]
    ]
    more = f"; and {len(differ) - MAX_SETTINGS} more" if len(differ) > MAX_SETTINGS else ""
    text = f"the ranks have different settings: {'; '.join(told)}{more}"
    raise ConfigurationError(text, rank=_first_other(values[differ[0]]), hint=SAME_HINT)


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    if any(word in name for word in SECRET_WORDS):
        return ""
    return display(repr(settings[name])) if name in settings else "unknown"


def _who_has_what(values: Sequence[str], nodes: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    told = [f"{value} on {_where(ranks, nodes)}" for value, ranks in list(ranks_of.items())[:MAX_VALUES]]
    return ", ".join(told) + (f", and {len(ranks_of) - MAX_VALUES} other values" if len(ranks_of) > MAX_VALUES else "")


def _where(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    names = list(dict.fromkeys(nodes[rank] for rank in ranks))
    more = f" and {len(names) - MAX_NODES} more" if len(names) > MAX_NODES else ""
    noun = "nodes" if len(names) > 1 else "node"
    return f"{numbered('rank', ranks, MAX_RANKS)} ({noun} {', '.join(names[:MAX_NODES])}{more})"


def _others(values: Sequence[str]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _first_other(values: Sequence[str]) -> int:
    return _others(values)[0]


# -- where the agents are --------------------------------------------------------------------------------------------------


def address_facts(address: str, config: Config) -> dict[str, str]:
    """Return where this node's agent listens, and what it takes to judge whether others reach it there."""
    try:
        network = f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        network = ""
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    return {"address": address, "given": config.storage_interface, "launcher": launcher, "network": network}


def addresses(names: Sequence[str], told: Sequence[Mapping[str, str]]) -> list[str]:
    """Return where the agents of several nodes listen, by node.

    Args:
        names: The nodes' names.
        told: The `address_facts` of each node.

    Raises:
        ConfigurationError: Some agent listens where no other node reaches it. A loopback address is taken where `storage_interface`
            gives it as such and all nodes are in one network namespace, for nothing else says that this is meant.
    """
    networks = {entry["network"] for entry in told}
    for name, entry in zip(names, told, strict=True):
        ip = _ip_of(Address.parse(entry["address"]).host)
        if ip is None or not (ip.is_loopback or ip.is_unspecified):
            continue
        kind = "a loopback address" if ip.is_loopback else "no address to connect to"
        if ip.is_loopback and _is_loopback(entry["given"]):
            if len(networks) == 1:
                continue
            kind = "a loopback address, and the nodes are not all in one network namespace"
        text = f"the agent of node {name} listens at {entry['address']} ({kind}), where the other nodes do not reach it"
        raise ConfigurationError(text, node=name, hint=_way_out(entry))
    return [entry["address"] for entry in told]


def _way_out(entry: Mapping[str, str]) -> str:
    use = "the name of the network interface between the nodes, or this node's address on it"
    if entry["given"]:
        return f"storage_interface is {entry['given']!r} there; set it to {use}"
    launcher = entry["launcher"]
    leads = f"{LAUNCHER_VARIABLE}={launcher} leads there" if launcher else f"{LAUNCHER_VARIABLE} is not set there"
    return f"{leads}; set storage_interface (or SAFEHOLD_STORAGE_INTERFACE on that node) to {use}"


def _is_loopback(given: str) -> bool:
    ip = _ip_of(given.strip("[]"))
    return ip is not None and ip.is_loopback


def _ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
