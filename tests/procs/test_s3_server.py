"""Checkpoints in a real S3 server: the tier's suite, whole runs, and what happens when the server dies or refuses."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from puppets import Rig, until
from s3_server import BUCKET, READER_KEY, SECRET_KEY, S3Server, require_binary, signed_exchange, signed_request

import safehold
from safehold.errors import CheckpointError, ConfigurationError, StorageError, StorageReadOnlyError, TornFileError
from safehold.host.disk import join
from safehold.pipeline.catalog import Catalog
from safehold.policy.belief import believed
from safehold.testing.tier_suite import MIB, TierSuite, pattern
from safehold.tiers.base import Entry, Tier
from safehold.tiers.object_requests import Patience, open_stores
from safehold.tiers.object_store import ObjectStoreTier
from safehold.tiers.open import open_tier

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

PART = 5 * MIB  # the least that S3 takes
QUICK = Patience(request_timeout_s=5.0, request_retry_s=1.0)
_names = iter(range(1_000_000))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server of this module's tests."""
    require_binary()
    with S3Server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same, with the environment that leads to it."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


def quick_tier(patience: Patience = QUICK, bucket: str = BUCKET, kind: Any = ObjectStoreTier, **options: Any) -> Any:
    prefix = f"run-{next(_names)}"
    stores = open_stores("s3", bucket, prefix, patience)
    return kind(stores, f"s3://{bucket}/{prefix}", patience=patience, **options)


class WithoutEmptyFolders(ObjectStoreTier):
    """SeaweedFS shows a folder until its own cleaner has seen that it is empty, which stores without folders do not."""

    def list(self, directory: str) -> list[Entry]:
        found = super().list(directory)
        return [entry for entry in found if not entry.is_dir or self._below(join(directory, entry.name), "looking")]


class TestS3(TierSuite):
    pack_bytes = 12 * MIB

    @pytest.fixture(autouse=True)
    def _lead_there(self, s3: S3Server) -> None: ...

    def make_tier(self, directory: Path) -> Tier:
        return quick_tier(part_bytes=PART, kind=WithoutEmptyFolders)

    def reopen(self, tier: Tier, directory: Path) -> Tier:
        return open_tier(tier.url)


def test_a_bucket_itself_is_a_place(s3: S3Server) -> None:
    tier = open_tier(f"s3://{BUCKET}")
    tier.put("top-level.json", b"x", exclusive=True)
    assert "top-level.json" in [entry.name for entry in tier.list("")]
    assert open_tier(f"s3://{BUCKET}/top").list("") == []
    tier.delete("top-level.json")


def test_markers_of_folders_are_nothing(s3: S3Server) -> None:
    """Consoles make an object `folder/` to show a folder; it is no file, and does not keep a directory from being deleted."""
    tier = quick_tier()
    prefix = tier.url.removeprefix("s3:/")
    tier.put("c/10/m.json", b"x")
    for folder in ("", "c/", "c/10/"):
        assert signed_request(s3, "PUT", f"{prefix}/{folder}") == 200
    assert [entry.name for entry in tier.list("c/10")] == ["m.json"]
    assert [(entry.name, entry.is_dir) for entry in tier.list("c")] == [("10", True)]
    assert [(entry.name, entry.is_dir) for entry in tier.list("")] == [("c", True)]
    tier.delete_tree("c/10")
    assert tier.list("c/10") == []


@pytest.mark.parametrize("data", [pattern(1000, 1), b"short"])
def test_a_pack_that_is_replaced_under_its_reader(s3: S3Server, data: bytes) -> None:
    tier = quick_tier()
    tier.put("p", pattern(1000))
    reader = tier.open_pack("p")
    tier.put("p", data)
    with pytest.raises(TornFileError, match="replaced"):
        reader.read_into(0, memoryview(bytearray(1000)))


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError) as caught:
        quick_tier().put("a", b"x")
    assert caught.value.hint and "127.0.0.1" not in str(caught.value)


def uploads_under_way() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "safehold-upload"]


def test_an_aborted_pack_leaves_no_upload(s3: S3Server) -> None:
    tier = quick_tier(part_bytes=PART)
    writer = tier.create_pack("c/p", 4 * PART)
    writer.write_at(0, memoryview(pattern(3 * PART)))
    deadline = time.monotonic() + 10
    while writer._next < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b"<UploadId>" in signed_exchange(s3, "GET", f"/{BUCKET}?uploads")[1]
    writer.abort()
    assert tier.list("c") == [] and not uploads_under_way()
    assert b"<UploadId>" not in signed_exchange(s3, "GET", f"/{BUCKET}?uploads")[1]


@pytest.mark.parametrize("key", ["wrong secret", "reader"])
def test_wrong_credentials(s3: S3Server, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if key == "reader":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    tier = quick_tier()

    def write_pack() -> None:
        writer = tier.create_pack("p", 3 * 8 * MIB)
        try:
            writer.write_at(0, memoryview(bytes(writer.size_bytes)))
            writer.finish()
        finally:
            writer.abort()

    begun = time.monotonic()
    for action in (
        lambda: tier.put("a", b"x"),
        lambda: tier.put("a", b"x", exclusive=True),
        lambda: tier.delete("a"),
        tier.probe,
        write_pack,
    ):
        with pytest.raises(StorageReadOnlyError, match="credentials") as caught:
            action()
        text = f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
        assert SECRET_KEY not in text and "not-the-secret" not in text and READER_KEY not in text
    assert time.monotonic() - begun < 3.0, "what is refused is not tried again"


def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    tier = quick_tier(bucket="no-such-bucket")
    for action in (
        lambda: tier.put("a", b"x"),
        lambda: tier.put("a", b"x", exclusive=True),
        lambda: tier.get("a", limit_bytes=1),
        lambda: tier.list(""),
        tier.probe,
    ):
        with pytest.raises(ConfigurationError, match="no such bucket") as caught:
            action()
        assert "make the bucket" in (caught.value.hint or "")


def test_http_has_to_be_allowed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(ConfigurationError, match="AWS_ALLOW_HTTP"):
        quick_tier().put("a", b"x")


def test_answers_that_do_not_come(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and says nothing holds a call for as long as it was told, and no longer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tier = quick_tier(Patience(request_timeout_s=0.3, request_retry_s=0.5))
        for action in (
            lambda: tier.get("a", limit_bytes=1),
            lambda: tier.put("a", b"x", exclusive=True),
            lambda: tier.list(""),
        ):
            begun = time.monotonic()
            with pytest.raises(StorageError, match="no answer in time"):
                action()
            assert time.monotonic() - begun < 2.0


STATE = {"w": np.arange(3 * MIB, dtype=np.float32).reshape(3, -1), "n": 7, "deep": [{"a": np.ones(5)}, "text"]}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "safehold", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_save_load_and_look(s3: S3Server) -> None:
    """A checkpoint goes there and back, and the command line reads it."""
    url = f"s3://{BUCKET}/runs/one-{next(_names)}"
    assert safehold.save(url, STATE, step=3) == 3
    safehold.save(url, {**STATE, "n": 8}, step=4)
    loaded = safehold.load(url)
    assert loaded["n"] == 8 and (np.asarray(loaded["w"]) == STATE["w"]).all()
    template = {"w": np.zeros_like(STATE["w"]), "n": 0, "deep": [{"a": np.zeros(5)}, ""]}
    assert safehold.load(url, template, step=3)["n"] == 7 and (template["w"] == STATE["w"]).all()
    for verb, expected in (("ls", "4"), ("show", "one save"), ("verify", "")):
        done = command(verb, url)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
    done = command("show", url, "4", "--leaves")
    assert done.returncode == 0 and "deep" in done.stdout, done.stdout + done.stderr
    done = command("cat", url, "4", "n")
    assert done.returncode == 0 and "8" in done.stdout, done.stdout + done.stderr
    done = command("rm", url, "3", "--now")
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.raises(CheckpointError):
        safehold.load(url, step=3)


def test_a_damaged_pack_is_found(s3: S3Server) -> None:
    url = f"s3://{BUCKET}/runs/damaged-{next(_names)}"
    safehold.save(url, STATE, step=3)
    tier = open_tier(url)
    path = next(
        f"checkpoints/000000003/{attempt.name}/{entry.name}"
        for attempt in tier.list("checkpoints/000000003")
        for entry in tier.list(f"checkpoints/000000003/{attempt.name}")
        if entry.name.endswith(".safetensors")
    )
    data = bytearray(tier.get(path, limit_bytes=64 * MIB))
    data[len(data) // 2] ^= 1
    tier.put(path, bytes(data))
    assert command("verify", url).returncode == 6


PROGRAM = """
import sys
import numpy
import safehold
state = {"w": numpy.zeros(3_000_000), "n": 0}
ckpt = safehold.Checkpointer(sys.argv[1], keep=1)
start = ckpt.restore(state) or 0
assert state["n"] == start and (state["w"] == start).all()
for step in range(start + 1, start + 4):
    state["n"], state["w"] = step, state["w"] + 1
    ckpt.save(step, state).wait()
ckpt.close()
print("step", state["n"])
"""


def test_a_run_with_its_agent(s3: S3Server, rig: Rig) -> None:
    """A `Checkpointer` saves there through the agent, resumes from there, and keeps what it is told to keep."""
    url = f"s3://{BUCKET}/runs/whole-{next(_names)}"
    script = rig.directory / "program.py"
    script.write_text(PROGRAM)
    for expected in (3, 6):
        done = subprocess.run(
            [sys.executable, str(script), url],
            env={**rig.environment(), **s3.environment()},
            capture_output=True, stdin=subprocess.DEVNULL, timeout=90, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and f"step {expected}" in done.stdout, done.stdout + done.stderr + rig.log()
    done = command("verify", url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert safehold.load(url)["n"] == 6
    until(lambda: steps_of(url) == [6], "retention to leave one checkpoint")


def steps_of(url: str) -> list[int]:
    return sorted(commit.step for commit in believed(Catalog(open_tier(url)).listing()))


OUTAGE = """
import sys, time
import numpy
import safehold
from safehold.errors import CheckpointError
state = {"w": numpy.zeros(3_000_000), "n": 0}
ckpt = safehold.Checkpointer(sys.argv[1], flush_timeout_s=8)
for step in range(1, 4):
    print("ready", step, flush=True)
    sys.stdin.readline()
    begun, state["n"] = time.monotonic(), step
    try:
        ckpt.save(step, state).wait()
        print("saved", step, flush=True)
    except CheckpointError as exc:
        print("failed", step, type(exc).__name__, round(time.monotonic() - begun), str(exc).splitlines()[0], flush=True)
ckpt.close()
"""


def test_an_outage_costs_one_save(tmp_path: Path, rig: Rig) -> None:
    """While the store is away a save fails by name, within its deadline; training goes on, and so do later saves."""
    require_binary()
    with S3Server(tmp_path / "s3") as server:
        url = f"s3://{BUCKET}/run"
        script = rig.directory / "outage.py"
        script.write_text(OUTAGE)
        with subprocess.Popen(
            [sys.executable, str(script), url],
            env={**rig.environment(), **server.environment()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        ) as program:  # fmt: skip
            try:
                assert program.stdin is not None and program.stdout is not None
                said = []
                for step in (1, 2, 3):
                    if step == 2:
                        server.kill()
                    if step == 3:
                        server.start()
                    assert program.stdout.readline() == f"ready {step}\n"
                    program.stdin.write("\n")
                    program.stdin.flush()
                    said.append(program.stdout.readline())
                rest = program.communicate(timeout=60)[0]
            finally:
                program.kill()
        assert said[0] == "saved 1\n" and said[2] == "saved 3\n" and program.returncode == 0, f"{said} {rest}"
        assert said[1].startswith("failed 2") and int(said[1].split()[3]) <= 30, said


REPLICATED = """
import sys
import numpy
import safehold
state = {"w": numpy.zeros(500_000), "n": 0}
ckpt = safehold.Checkpointer(sys.argv[1], remote=sys.argv[2], keep=1, agent_linger_s=3)
start = ckpt.restore(state) or 0
assert state["n"] == start and (state["w"] == start).all()
for step in (start + 1, start + 2):
    state["n"], state["w"] = step, state["w"] + 1
    ckpt.save(step, state).wait(30)
ckpt.close(remote=True)
print("step", step, ckpt.last_restore.source if ckpt.last_restore else "nothing")
"""


def test_a_run_on_disk_that_replicates_itself_into_a_bucket_and_comes_back_from_there(s3: S3Server, rig: Rig) -> None:
    url = f"s3://{BUCKET}/copies/run-{next(_names)}"
    script = rig.directory / "program.py"
    script.write_text(REPLICATED)
    for expected in ("step 2 nothing", "step 4 remote"):
        done = subprocess.run(
            [sys.executable, str(script), str(rig.run), url],
            env={**rig.environment(), **s3.environment()},
            capture_output=True, stdin=subprocess.DEVNULL, timeout=90, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr + rig.log()
        rig.close()
        shutil.rmtree(rig.run)
    assert command("verify", url).returncode == 0


def test_a_server_that_is_killed_in_mid_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload goes on when the server is back in time; else it fails by name within its deadline, and nothing is there."""
    require_binary()
    data = pattern(6 * PART)
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        patient = quick_tier(Patience(request_timeout_s=10.0, request_retry_s=40.0), part_bytes=PART)
        hasty = quick_tier(part_bytes=PART)
        writers = [tier.create_pack("p", len(data)) for tier in (patient, hasty)]
        for writer in writers:
            writer.write_at(0, memoryview(data)[: 2 * PART])
            deadline = time.monotonic() + 10
            while writer._next < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        server.kill()
        begun = time.monotonic()
        with pytest.raises(StorageError, match="uploading a pack failed") as caught:
            writers[1].write_at(2 * PART, memoryview(data)[2 * PART :])
            writers[1].finish()
        writers[1].abort()
        assert caught.value.retry and time.monotonic() - begun < 15.0
        writers[0].write_at(2 * PART, memoryview(data)[2 * PART :])
        server.start()
        writers[0].finish()
        assert patient.get("p", limit_bytes=len(data)) == data
        assert hasty.list("") == []
