"""Somebody else at the agents' port: refused, said once, and no save is any the worse for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from safehold.agent.start import ask_status
from safehold.host.runtime import RunSlot, list_slots
from safehold.testing.hosts import Host, Hosts, run_job

pytestmark = pytest.mark.root
SCRIPT = Path(__file__).parent / "training.py"
# What a stranger on the same network tries; prints the status line of each answer, or how the connection ended.
STRANGER = r"""
import http.client, json, socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
address = (host, int(port))
heard = {}
def plain(name, data, wait=3.0):
    with socket.create_connection(address, timeout=wait) as sock:
        try:
            sock.sendall(data)
            heard[name] = sock.recv(200).decode("latin-1").split("\r\n")[0] or "closed"
        except OSError as exc:
            heard[name] = type(exc).__name__
def asks(name, method, path, headers, body=b""):
    try:
        connection = http.client.HTTPConnection(*address, timeout=5)
        connection.request(method, path, body=body, headers=headers)
        reply = connection.getresponse()
        heard[name] = f"{reply.status} {len(reply.read())}"
    except (OSError, http.client.HTTPException) as exc:
        heard[name] = type(exc).__name__
silent = [socket.create_connection(address, timeout=5) for _ in range(20)]
plain("garbage", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 20)
plain("no http", b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
guess = {"Authorization": "Bearer " + "0" * 32, "X-Safehold-Run": "r", "X-Safehold-Incarnation": "1", "X-Safehold-Node": "host-0"}
for path in ("/v1/health", "/v1/metrics", "/v1/data/flash/run.json", "/", "/v1/data/flash/..%2f..%2fetc%2fpasswd"):
    asks("no token " + path, "GET", path, {})
    asks("wrong token " + path, "GET", path, guess)
asks("post", "POST", "/v1/messages", guess, b"x" * 1000)
plain("huge", b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
try:
    loris = socket.create_connection(address, timeout=5)
    for byte in b"GET /v1/he":
        loris.send(bytes([byte])); time.sleep(0.05)
except OSError:
    pass  # it was cut off, as it should be
print(json.dumps(heard))
time.sleep(float(sys.argv[2]))
"""


def agent_slot(host: Host) -> RunSlot:
    slots = [slot for slot in list_slots(host.runtime) if slot.is_locked()]
    assert len(slots) == 1
    return slots[0]


def test_strangers_at_the_port_are_refused_once_and_cost_no_save(two_hosts: Hosts) -> None:
    run, go = str(two_hosts.shared / "run"), two_hosts.shared / "go"
    args = [run, "5", "--pause-at", "2", str(go), "--settings", "{'peer_timeout_s': 3.0}"]
    with run_job(two_hosts, 1, SCRIPT, args, timeout_s=60.0) as job:
        job.until("pausing", rank=0, timeout_s=40)
        slot = agent_slot(two_hosts[0])
        facts = ask_status(slot, 5.0)["session"]
        assert isinstance(facts, dict) and facts["nodes"][0].startswith("host-0")
        stranger = [sys.executable, "-c", STRANGER, facts["address"]]
        found = two_hosts[1].run([*stranger, "0"], timeout_s=30)
        heard = json.loads(found.stdout.splitlines()[0])
        asked = {name: answer for name, answer in heard.items() if "token" in name}
        assert len(asked) == 10 and all(re.match("40[134] ", answer) for answer in asked.values()), heard
        assert all(int(answer.split()[1]) < 300 for answer in asked.values()), "nothing is read out"
        assert all(answer.startswith("40") for name, answer in asked.items() if "wrong" in name)
        assert not heard["huge"].startswith("HTTP/1.1 2") and heard["post"].startswith("401"), heard
        for _ in range(3):
            two_hosts[1].run([*stranger, "0"], timeout_s=30)
        beside = two_hosts[1].popen([*stranger, "20"])  # it stays with its open connections while saves go on
        go.touch()
        assert job.wait(60) == [0, 0], job.tail()
        beside.kill()
    assert "saved 5" in job.output(0) and "failed" not in job.text
    log = slot.log_path.read_text()
    lines = [line for line in log.splitlines() if "refused" in line]
    assert 0 < len(lines) <= 12 and len(set(lines)) == len(lines), log
    assert "Traceback" not in log


def certificate(directory: Path) -> dict[str, str]:
    """One key and certificate for all nodes, signed by itself."""
    key, cert = directory / "key.pem", directory / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=nodes"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=30)
    key.chmod(0o600)
    return {"network_cert": str(cert), "network_key": str(key), "network_ca": str(cert)}


def test_agents_talk_over_tls_and_those_without_a_certificate_are_refused(two_hosts: Hosts) -> None:
    shared = two_hosts.shared
    settings = {**certificate(shared), "network_check_names": False, "peer_timeout_s": 3.0}
    go = shared / "go"
    args = [str(shared / "run"), "4", "--pause-at", "2", str(go), "--settings", repr(settings)]
    with run_job(two_hosts, 1, SCRIPT, args, timeout_s=60.0) as job:
        job.until("pausing", rank=0, timeout_s=40)
        facts = ask_status(agent_slot(two_hosts[0]), 5.0)["session"]
        assert isinstance(facts, dict)
        found = two_hosts[1].run([sys.executable, "-c", STRANGER, facts["address"], "0"], timeout_s=30)
        heard = json.loads(found.stdout.splitlines()[0])
        assert not any(answer[:1] in "2" for answer in heard.values()), heard
        go.touch()
        assert job.wait(60) == [0, 0], job.tail()
    assert "saved 4" in job.output(1)
