"""One node, and whoever speaks to it byte by byte."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from net_world import RUN, TOKEN, Events, make_peers, settings_for

from safehold.agent.net import wire
from safehold.agent.net.peers import Peers
from safehold.clock import new_token
from safehold.format.crc import crc
from safehold.testing.network_suite import Log

TIMEOUT_S = 5.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def facts(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class Target:
    """Node `b` of `a` and `b`, with its log and events."""

    def __init__(self, peer_timeout_s: float = 0.5, **limits: Any) -> None:
        self.log, self.events = Log(), Events()
        settings = settings_for(peer_timeout_s, **limits)
        self.peers: Peers = make_peers(
            "b",
            ["a", "b"],
            self.log,
            events=self.events.stream,
            settings=settings,
            metrics=lambda: "safehold_saves 3\n",
        )
        self.session = f"{new_token()}.1"

    def connect(self) -> socket.socket:
        return socket.create_connection((self.peers.address.host, self.peers.address.port), timeout=TIMEOUT_S)

    def head(self, start: str, **changes: str | None) -> bytes:
        return request_head(start, **changes)

    def messages(self, payloads: list[bytes], first: int = 1, **changes: str | None) -> bytes:
        """Return a whole request with messages."""
        body = wire.encode_batch(payloads)
        given: dict[str, str | None] = {
            "X_Safehold_Session": self.session,
            "X_Safehold_First": str(first),
            "X_Safehold_Crc32": str(crc(body)),
            "Content_Length": str(len(body)),
        }
        return self.head("POST /v1/messages", **(given | changes)) + body

    def ask(self, request: bytes) -> Answer:
        with self.connect() as sock:
            sock.sendall(request)
            return receive(sock)

    def close(self) -> None:
        self.peers.close()


def request_head(start: str, **changes: str | None) -> bytes:
    """Return the head of a request of node `a`; underscores in the names of headers stand for hyphens, None takes one away."""
    headers: dict[str, str | None] = {
        "Host": "x",
        "Authorization": f"Bearer {TOKEN}",
        wire.RUN: wire.quote(RUN),
        wire.INCARNATION: "1",
        wire.NODE: "a",
    }
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [f"{start} HTTP/1.1"] + [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def receive(sock: socket.socket) -> Answer:
    """Receive one answer; raises ConnectionError where there is none."""
    with sock.makefile("rb") as reader:
        line = reader.readline()
        if not line:
            raise ConnectionError("closed")
        headers = {}
        while (entry := reader.readline().strip()) != b"":
            name, _, value = entry.decode().partition(": ")
            headers[name] = value
        return Answer(int(line.split()[1]), headers, reader.read(int(headers.get("Content-Length", "0"))))


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side has closed; False if it sent something, or has not."""
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
