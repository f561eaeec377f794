"""What the network between agents moves, beside a raw socket that moves the same bytes, on the loopback of one machine.

    python benchmarks/network.py --bytes 536870912 --rounds 5

Two processes, as two agents are; two more that speak TLS. In each round, one after the other:

- raw: the other process sends from a memfd by sendfile, this one receives into populated memory; no checksum.
- read_into, write_from: the same bytes over HTTP with token, ranges and checksums, into the same memory (of the other process).
- tls_read_into, tls_write_from: as these, encrypted, and both ends identified by certificates (made for the measurement by `openssl`).
- message: a control message there and one back, half of the time counts; the median of many.

Prints one JSON object: medians of the rounds. CPU seconds are those of both processes together;
`..._share_of_plain` compares TLS with none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safehold.agent.net.addresses import Address
from safehold.agent.net.peers import Peers
from safehold.agent.net.seam import Incoming, Landing, Listeners, Source
from safehold.agent.net.tls import TlsFiles
from safehold.clock import new_token
from safehold.events import EventStream

CHUNK_BYTES = 1 << 20
WAIT_S = 60.0
NUM_MESSAGES = 300


def make_memory(size: int) -> int:
    """Return a memfd that is full of bytes."""
    fd = os.memfd_create("network-benchmark")
    block = os.urandom(min(size, 16 << 20))
    for start in range(0, size, len(block)):
        os.pwrite(fd, block[: size - start], start)
    return fd


def make_tls(directory: Path) -> TlsFiles:
    """Return a certificate of this machine's loopback, and the authority that it is from."""

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=WAIT_S)

    ca, key, request, node, extensions = (
        str(directory / f"{name}.pem") for name in ("ca", "key", "csr", "node", "ext")
    )
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-days", "2", "-keyout", f"{ca}.key", "-out", ca, "-subj", "/CN=benchmark-ca")
    openssl("req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=benchmark")
    Path(extensions).write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", ca, "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2", "-extfile", extensions)
    openssl("x509", "-req", "-in", request, *signed, "-out", node)
    return TlsFiles(certificate=node, key=key, ca=ca)


def make_peers(node: str, token: str, listeners: Listeners, tls: TlsFiles | None = None) -> Peers:
    return Peers(
        node,
        nodes=["here", "there"],
        bind="127.0.0.1",
        token=token,
        run_id="benchmark",
        incarnation=1,
        listeners=listeners,
        events=EventStream("agent"),
        tls=tls,
    )


def nothing(*args: Any) -> None:
    pass


def other_process(pipe: Any, token: str, size: int, tls: TlsFiles | None) -> None:
    """Serve what is measured until told to stop; answers with CPU seconds when asked."""
    fd, buffer = make_memory(size), memoryview(bytearray(size))
    peers: Peers

    def echo(node: str, payload: bytes) -> None:
        peers.send(node, payload)

    def sink(incoming: Incoming) -> Landing:
        view = buffer[incoming.offset : incoming.offset + incoming.size]
        return Landing(view=view, done=nothing, failed=nothing)

    peers = make_peers("there", token, Listeners(on_message=echo, on_lost=nothing, on_back=nothing), tls)
    peers.provide("pack", lambda node, name: Source(fd=os.dup(fd), offset=0, size=size))
    peers.accept("copy", sink)
    raw = socket.create_server(("127.0.0.1", 0))
    pipe.send((str(peers.address), raw.getsockname()[1]))
    peers.meet({"here": Address.parse(pipe.recv())})

    def serve_raw() -> None:
        while True:
            sock, _ = raw.accept()
            with sock:
                sent = 0
                while sent < size:
                    sent += os.sendfile(sock.fileno(), fd, sent, size - sent)

    threading.Thread(target=serve_raw, daemon=True).start()
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    peers.close()


@dataclass
class Bench:
    """This process's side."""

    pipe: Any
    peers: Peers
    raw_port: int
    view: memoryview

    def cpu_s(self) -> float:
        self.pipe.send("cpu")
        return time.process_time() + float(self.pipe.recv())

    def raw(self) -> None:
        with socket.create_connection(("127.0.0.1", self.raw_port), timeout=WAIT_S) as sock:
            filled = 0
            while filled < len(self.view):
                count = sock.recv_into(self.view[filled : filled + CHUNK_BYTES])
                assert count
                filled += count

    def read_into(self) -> None:
        self.peers.read_into("there", "pack", "x", 0, self.view, deadline_s=WAIT_S)

    def write_from(self) -> None:
        self.peers.write_from("there", "copy", "x", 0, self.view, total=len(self.view), deadline_s=WAIT_S)

    def timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Return seconds and CPU seconds."""
        cpu = self.cpu_s()
        begun = time.perf_counter()
        work()
        seconds = time.perf_counter() - begun
        return seconds, self.cpu_s() - cpu


@contextmanager
def far_end(size: int, came: threading.Event, tls: TlsFiles | None) -> Iterator[Bench]:
    """Start another process, meet it, and end it."""
    token = new_token()
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    other = context.Process(target=other_process, args=(far, token, size, tls), daemon=True)
    other.start()
    listeners = Listeners(on_message=lambda node, payload: came.set(), on_lost=nothing, on_back=nothing)
    peers = make_peers("here", token, listeners, tls)
    try:
        address, raw_port = pipe.recv()
        pipe.send(str(peers.address))
        peers.meet({"there": Address.parse(address)})
        yield Bench(pipe, peers, raw_port, memoryview(bytearray(os.urandom(1 << 20) * (size >> 20))))
    finally:
        pipe.send("stop")
        peers.close()
        other.join(WAIT_S)
        other.kill()


def measure(size: int, rounds: int) -> dict[str, Any]:
    came = threading.Event()
    with (
        tempfile.TemporaryDirectory() as directory,
        far_end(size, came, None) as plain,
        far_end(size, came, make_tls(Path(directory))) as secure,
    ):
        works: dict[str, tuple[Bench, Callable[[], None]]] = {
            "raw": (plain, plain.raw),
            "read_into": (plain, plain.read_into),
            "write_from": (plain, plain.write_from),
            "tls_read_into": (secure, secure.read_into),
            "tls_write_from": (secure, secure.write_from),
        }
        for _, work in works.values():
            work()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, (bench, work) in works.items():
                times[name].append(bench.timed(work))
        return report(size, times, latency_s(plain.peers, came))


def latency_s(peers: Peers, came: threading.Event) -> float:
    """Return half of the time of a message there and one back."""
    taken = []
    for _ in range(NUM_MESSAGES):
        came.clear()
        begun = time.perf_counter()
        peers.send("there", b"x" * 100)
        assert came.wait(WAIT_S)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) / 2


def report(size: int, times: dict[str, list[tuple[float, float]]], latency: float) -> dict[str, Any]:
    gib = size / (1 << 30)
    found: dict[str, Any] = {"bytes": size, "rounds": len(times["raw"]), "message_ms": round(1000 * latency, 3)}
    for name, taken in times.items():
        found[f"{name}_gb_s"] = round(size / 1e9 / statistics.median(seconds for seconds, _ in taken), 2)
        found[f"{name}_cpu_s_gib"] = round(statistics.median(cpu for _, cpu in taken) / gib, 3)
        if name != "raw":
            shares = [raw / ours for (raw, _), (ours, _) in zip(times["raw"], taken, strict=True)]
            found[f"{name}_share_of_raw"] = round(statistics.median(shares), 2)
        if name.startswith("tls_"):
            plain = times[name.removeprefix("tls_")]
            shares = [theirs / ours for (theirs, _), (ours, _) in zip(plain, taken, strict=True)]
            found[f"{name}_share_of_plain"] = round(statistics.median(shares), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=512 << 20, help="bytes of one transfer, whole MiB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(measure(options.bytes >> 20 << 20, options.rounds), indent=2))


if __name__ == "__main__":
    main()
