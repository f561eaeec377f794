"""TLS and IPv6."""

from __future__ import annotations

import os
import random
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from net_proxy import wait_for
from net_world import Events, make_peers, settings_for

from safehold.agent.net.peers import Peers
from safehold.agent.net.seam import Incoming, Landing, Source
from safehold.agent.net.tls import TlsFiles, client_context
from safehold.errors import AgentUnavailableError, ConfigurationError
from safehold.format.crc import crc
from safehold.testing.network_suite import Log, memory

DATA = random.Random(9).randbytes((3 << 20) + 7)


def openssl(*args: str) -> None:
    subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=30)


def make_ca(directory: Path, name: str) -> Path:
    key, certificate = directory / f"{name}.key", directory / f"{name}.pem"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *new_key, "-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}")
    return certificate


def make_node(directory: Path, ca: Path, name: str, address: str = "IP:127.0.0.1") -> TlsFiles:
    key, request, certificate = (directory / f"{name}.{end}" for end in ("key", "csr", "pem"))
    extensions = directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName={address}\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", *new_key, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
    signed = ("-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", str(request), *signed, "-extfile", str(extensions), "-out", str(certificate))
    return TlsFiles(certificate=str(certificate), key=str(key), ca=str(ca))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    directory = tmp_path_factory.mktemp("tls")
    ca, other_ca = make_ca(directory, "ca"), make_ca(directory, "other")
    return {
        "good": make_node(directory, ca, "node"),
        "elsewhere": make_node(directory, ca, "elsewhere", "IP:10.9.9.9"),
        "foreign": make_node(directory, other_ca, "foreign"),
    }


def pair(
    tls_a: TlsFiles | None, tls_b: TlsFiles | None, bind: str = "127.0.0.1", timeout_s: float = 10.0
) -> tuple[Peers, Peers, Log, Log, Events]:
    log_a, log_b, events = Log(), Log(), Events()
    settings = settings_for(timeout_s, body_timeout_s=5.0, header_timeout_s=0.8)
    a = make_peers("a", ["a", "b"], log_a, tls=tls_a, bind=bind, settings=settings)
    b = make_peers("b", ["a", "b"], log_b, tls=tls_b, bind=bind, settings=settings, events=events.stream)
    a.meet({"b": b.address})
    b.meet({"a": a.address})
    return a, b, log_a, log_b, events


def exchange(a: Peers, b: Peers, log_b: Log) -> None:
    for number in range(20):
        a.send("b", b"%d" % number)
    assert wait_for(lambda: len(log_b.messages) == 20)
    fd, buffer = memory(DATA), bytearray(len(DATA))
    b.provide("pack", lambda node, name: Source(fd=os.dup(fd), offset=0, size=len(DATA)))

    def sink(incoming: Incoming) -> Landing:
        return Landing(view=memoryview(buffer), done=lambda value: None, failed=lambda error: None)

    b.accept("copy", sink)
    for _ in range(2):
        got = bytearray(len(DATA) - 5)
        assert a.read_into("b", "pack", "x", 5, memoryview(got), deadline_s=10) == crc(DATA[5:])
        assert got == DATA[5:]
        assert a.write_from("b", "copy", "x", 0, memoryview(DATA), total=len(DATA), deadline_s=10) == crc(DATA)
        assert buffer == DATA
    os.close(fd)


def test_all_goes_over_tls(files: dict[str, TlsFiles]) -> None:
    a, b, _, log_b, events = pair(files["good"], files["good"])
    exchange(a, b, log_b)
    assert not events
    a.close()
    b.close()


@pytest.mark.parametrize("bind", ["::1", "lo"])
def test_ipv6_and_interfaces(bind: str) -> None:
    if bind == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this host")
    a, b, _, log_b, _ = pair(None, None, bind)
    assert b.address.host == {"::1": "::1", "lo": "127.0.0.1"}[bind] and b.address.port
    exchange(a, b, log_b)
    a.close()
    b.close()


@pytest.mark.parametrize(("who", "word"), [("foreign", "erti"), ("elsewhere", "erti"), (None, "")])
def test_who_cannot_show_a_certificate_is_refused(files: dict[str, TlsFiles], who: str | None, word: str) -> None:
    """A server of another CA, one that is not where its certificate says, one that speaks no TLS: each is lost, and hears nothing."""
    a, b, log_a, log_b, _ = pair(files["good"], files[who] if who else None, timeout_s=1.5)
    a.send("b", b"secret")
    assert wait_for(lambda: bool(log_a.lost))
    assert word in str(log_a.lost[0][1]) and not log_b.messages
    with pytest.raises(AgentUnavailableError, match="b"):
        a.read_into("b", "pack", "x", 0, memoryview(bytearray(1)), deadline_s=5)
    a.close()
    b.close()


def test_clients_need_a_certificate_too(files: dict[str, TlsFiles]) -> None:
    a, b, _, _, events = pair(files["good"], files["good"])
    context = client_context(files["good"])
    bare = ssl.create_default_context(cafile=files["good"].ca)
    for tls, welcome in ((context, True), (bare, False)):
        with socket.create_connection((b.address.host, b.address.port), timeout=5) as sock:
            try:
                with tls.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
                    wrapped.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (wrapped.recv(100).startswith(b"HTTP/1.1 401")) == welcome
            except (ssl.SSLError, ConnectionError):
                assert not welcome
    assert wait_for(lambda: set(events.refused()) == {"token", "handshake"})
    a.close()
    b.close()


def test_a_handshake_that_does_not_end(files: dict[str, TlsFiles]) -> None:
    a, b, _, _, events = pair(files["good"], files["good"])
    with socket.create_connection((b.address.host, b.address.port), timeout=5) as sock:
        assert sock.recv(1) == b""
    assert wait_for(lambda: bool(events)) and events.refused()[0] in ("slow", "handshake")
    a.close()
    b.close()


def test_names_need_not_be_checked(files: dict[str, TlsFiles]) -> None:
    """One certificate for all nodes: its CA is checked, its address is not."""
    shared = TlsFiles(
        certificate=files["elsewhere"].certificate,
        key=files["elsewhere"].key,
        ca=files["elsewhere"].ca,
        check_names=False,
    )
    a, b, _, log_b, _ = pair(shared, shared)
    exchange(a, b, log_b)
    a.close()
    b.close()


def test_files_that_are_none(files: dict[str, TlsFiles], tmp_path: Path) -> None:
    good = files["good"]
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", good.key, "-out", str(locked), "-aes256", "-passout", "pass:secret")
    for certificate, key, ca in (
        (str(tmp_path / "absent"), good.key, good.ca),
        (str(empty), good.key, good.ca),
        (good.certificate, files["foreign"].key, good.ca),
        (good.certificate, str(locked), good.ca),
        (good.certificate, good.key, str(empty)),
    ):
        with pytest.raises(ConfigurationError, match="TLS cannot be set up") as caught:
            make_peers("a", ["a"], Log(), tls=TlsFiles(certificate=certificate, key=key, ca=ca))
        assert caught.value.hint and caught.value.path
