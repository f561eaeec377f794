"""The two networks that join the hosts: `compute` and `storage`, each a bridge in the switch with one cable to each host.

Invariants: bridges, cables and addresses exist in namespaces of this switch and its hosts only, so that any number of switches use the
same addresses beside each other. A cut is silent: cables keep their carrier, packets are lost, nobody gets a reset.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from safehold.testing.hosts.processes import FirstProcess, HostsUnavailableError

NetworkName = Literal["compute", "storage"]
NETWORKS: tuple[NetworkName, ...] = ("compute", "storage")
SUBNETS = {"compute": 77, "storage": 78}
COMMAND_S = 20.0
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_MIN_BURST_BYTES = 16 << 10
_BURST_S = 0.02
_QUEUE_S = 0.1
# Address resolution asks every 20 ms, for 3 s as ever: a network that is healed works at once, where otherwise it takes up to a second.
_PROBES = "retrans 20 ucast_probes 150 mcast_probes 150"


@dataclass(frozen=True, slots=True)
class Cable:
    """One cable: the switch's end is called `port`; the host's end is called as the network."""

    network: NetworkName
    host: int
    generation: int

    @property
    def port(self) -> str:
        """Its end in the switch."""
        return f"{self.network[0]}{self.host}-{self.generation}"

    @property
    def address(self) -> str:
        """The host's address; a replacement has another than the one before it."""
        return f"10.{SUBNETS[self.network]}.{self.generation % 256}.{self.host + 1}"


def tool(name: str) -> str:
    """Return the path of `ip` or `tc`.

    Raises:
        HostsUnavailableError: iproute2 is not installed.
    """
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise HostsUnavailableError(
            f"{name} is not installed\n  hint: install iproute2 (on Debian and Ubuntu: apt-get install iproute2)"
        )
    return found


def batch(inside: FirstProcess, name: str, lines: Sequence[str]) -> None:
    """Run commands of `ip` or `tc` inside a host or the switch.

    Raises:
        HostsUnavailableError: One failed; says which.
    """
    read, write = os.pipe()
    commands, feed = os.pipe()
    try:
        environment = {"PATH": _PATH, "LC_ALL": "C"}
        process = inside.start([tool(name), "-batch", "-"], environment, "/", [commands, write, write], False)
    finally:
        for fd in (write, commands):
            os.close(fd)
    with os.fdopen(read, "rb") as output:
        with os.fdopen(feed, "wb") as stream:
            stream.write("".join(f"{line}\n" for line in lines).encode())
        code = process.wait(COMMAND_S)
        process.close()
        if code:
            said = output.read().decode(errors="replace").strip()
            shown = "; ".join(lines)
            raise HostsUnavailableError(f"{name} failed on {inside.name}: {said}\n  commands: {shown}")


class Switch:
    """The networks' middle.

    Args:
        first: The process that holds its namespace.
    """

    def __init__(self, first: FirstProcess) -> None:
        self._first = first
        self._groups: dict[str, set[str]] = {network: set() for network in NETWORKS}
        lines = [line for network in NETWORKS for line in _bridge(network)]
        batch(first, "ip", lines)

    def plug(self, host: FirstProcess, cables: Collection[Cable]) -> None:
        """Connect a host, by new cables, with addresses on its end."""
        lines = []
        for cable in cables:
            lines += [
                f"link add {cable.port} type veth peer name {cable.network} netns {host.pid}",
                f"link set {cable.port} master {cable.network} addrgenmode none up",
            ]
        batch(self._first, "ip", lines)
        lines = ["link set lo up"]
        for cable in cables:
            lines += [
                f"ntable change name arp_cache dev {cable.network} {_PROBES}",
                f"addr add {cable.address}/16 dev {cable.network}",
                f"link set {cable.network} addrgenmode none up",  # no IPv6: one address, known at once
            ]
        batch(host, "ip", lines)

    def unplug(self, cables: Collection[Cable]) -> None:
        """Take cables away, both ends."""
        batch(self._first, "ip", [f"link del {cable.port}" for cable in cables])

    def cut(self, cable: Cable) -> None:
        """Lose all that passes through this cable."""
        batch(self._first, "ip", [f"link set {cable.port} nomaster"])

    def heal(self, cable: Cable) -> None:
        """Undo `cut`, `part` and `throttle`."""
        batch(self._first, "ip", [f"link set {cable.port} master {cable.network}"])

    def part(self, network: NetworkName, groups: Sequence[Collection[Cable]]) -> None:
        """Let only cables of one group reach each other; those that are in no group stay together."""
        lines = []
        for number, cables in enumerate(groups, start=1):
            bridge = f"{network}-{number}"
            if bridge not in self._groups[network]:
                self._groups[network].add(bridge)
                lines += _bridge(bridge)
            lines += [f"link set {cable.port} master {bridge}" for cable in cables]
        batch(self._first, "ip", lines)

    def throttle(self, host: FirstProcess, cable: Cable, rate_bytes_s: float | None) -> None:
        """Let no more than so many bytes per second through this cable in each direction; None: as many as go."""
        for inside, device in ((self._first, cable.port), (host, cable.network)):
            batch(inside, "tc", [_queue(device, rate_bytes_s)])


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge stp_state 0 forward_delay 0", f"link set {name} addrgenmode none up"]


def _queue(device: str, rate_bytes_s: float | None) -> str:
    if rate_bytes_s is None:
        return f"qdisc replace dev {device} root pfifo"
    burst = max(_MIN_BURST_BYTES, int(rate_bytes_s * _BURST_S))
    limit = burst + max(_MIN_BURST_BYTES, int(rate_bytes_s * _QUEUE_S))
    return f"qdisc replace dev {device} root tbf rate {int(rate_bytes_s)}bps burst {burst} limit {limit}"


def reachable(open_socket: Callable[[], socket.socket], address: tuple[str, int], timeout_s: float) -> bool:
    """Return whether a host answers at an address: also with a refusal, if nobody listens there.

    Args:
        open_socket: Makes a socket in the network to ask from (`Host.open_socket`).
        address: Where to.
        timeout_s: How long to wait for an answer.
    """
    with open_socket() as found:
        found.settimeout(timeout_s)
        try:
            found.connect(address)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True


def check() -> None:
    """Raise `HostsUnavailableError` where this process may not make hosts, without making any."""
    tool("ip")
    tool("tc")
    if os.geteuid() != 0:
        raise HostsUnavailableError(
            f"several hosts on one machine need root, and this is user {os.geteuid()}\n  hint: run the tests as root"
        )
