"""Where to listen and where peers are: IP addresses, host names, names of interfaces."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from safehold.errors import ConfigurationError

_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 40
_INET6_TABLE = Path("/proc/net/if_inet6")
_LINK_SCOPE = 0x20


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where an agent listens.

    Attributes:
        host: An IP address (IPv6 without brackets, with `%interface` where it is a link's own) or a host name.
        port: TCP.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port` or `[IPv6]:port`.

        Raises:
            ConfigurationError: It is neither.
        """
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise ConfigurationError(f"{text!r} is no address", hint="an address is 'host:port' or '[IPv6]:port'")
        if ":" in host and not bracketed:
            raise ConfigurationError(f"{text!r} is no address", hint="write IPv6 addresses as '[address]:port'")
        return cls(host, int(port))


def resolve(where: str) -> tuple[socket.AddressFamily, str]:
    """Return family and IP address to listen at, for an IP address, the name of an interface, or a host name, looked at in this order.

    Of an interface with several addresses: the IPv4 address, else the first IPv6 address that is not the link's own, else that.

    Raises:
        ConfigurationError: It is none of them, or the interface has no address.
    """
    try:
        ip = ipaddress.ip_address(where.strip("[]"))
        return (socket.AF_INET6 if ip.version == 6 else socket.AF_INET), str(ip)
    except ValueError:
        pass
    if where in {name for _, name in socket.if_nameindex()}:
        found = _ipv4_of(where) or _ipv6_of(where)
        if found is None:
            hint = "'ip address' lists the interfaces and their addresses"
            raise ConfigurationError(f"network interface {where} has no IP address", hint=hint)
        return found
    try:
        infos = socket.getaddrinfo(where, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        text = f"{where!r} is no IP address, no network interface of this host and no known host name"
        raise ConfigurationError(text, hint="'ip address' lists the interfaces and their addresses") from exc
    family, _, _, _, sockaddr = infos[0]
    return family, str(sockaddr[0])


def way_to(host: str) -> str:
    """Return the address of this host on the network that leads to `host`; its own name where there is none. Nothing is sent for it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return socket.gethostname()


def _ipv4_of(interface: str) -> tuple[socket.AddressFamily, str] | None:
    request = array.array("B", struct.pack(f"16s{_IFREQ_BYTES - 16}x", interface.encode()[:15]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.AF_INET, socket.inet_ntoa(request[20:24].tobytes())


def _ipv6_of(interface: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        lines = _INET6_TABLE.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface:
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            own = int(scope, 16) == _LINK_SCOPE
            found.append((own, f"{address}%{interface}" if own else address))
    return (socket.AF_INET6, min(found, key=lambda entry: entry[0])[1]) if found else None


def listening_socket(where: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """Return a non-blocking socket that listens there.

    Args:
        where: See `resolve`.
        port: 0: any that is free.
        backlog: Connections that may wait to be accepted.

    Raises:
        ConfigurationError: There is no such address here, or the port is taken.
    """
    family, host = resolve(where)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        text = f"the agent cannot listen at {Address(host, port)}: {exc.strerror or exc}"
        hint = "is it an address of this host, and the port free? port 0 takes any"
        raise ConfigurationError(text, hint=hint) from exc
    return sock


def address_of(sock: socket.socket, where: str) -> Address:
    """Return the address that a listening socket has; `where` as it was asked for names the scope of a link's own address."""
    host, port = sock.getsockname()[:2]
    if ":" in host and "%" not in host and ipaddress.IPv6Address(host).is_link_local:
        host = resolve(where)[1]
    return Address(host, port)


def tune(sock: socket.socket, lost_after_s: float = 0.0) -> None:
    """Set what every connection between agents has: no delay of small messages, and a dead other end is noticed in the end.

    With `lost_after_s` it is noticed by then (at least 4 s), although nothing is to be sent but an answer awaited: by the kernel's own
    probes, which the kernel of a host answers whose processes are slow or stopped.
    """
    idle_s, interval_s, probes = 20, 5, 6
    if lost_after_s:
        idle_s, probes = max(1, round(lost_after_s / 4)), 3
        interval_s = max(1, int((lost_after_s - idle_s) / probes))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(4000, int(lost_after_s * 1000)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
