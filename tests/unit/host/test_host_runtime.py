"""The slots of a host's agents: private, locked by the living, found by everybody of the same user."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from safehold.errors import AgentUnavailableError, ConfigurationError
from safehold.host import runtime
from safehold.host.runtime import AgentInfo, list_slots, open_slot, run_key, runtime_dir


def test_where_it_is(tmp_path):
    chosen = tmp_path / "a" / "b"
    assert runtime_dir({"SAFEHOLD_RUNTIME_DIR": str(chosen), "XDG_RUNTIME_DIR": str(tmp_path)}) == chosen
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "safehold"
    assert str(runtime_dir({"XDG_RUNTIME_DIR": "/nonexistent"})) == f"/tmp/safehold-{os.getuid()}"
    assert str(runtime_dir({})) == f"/tmp/safehold-{os.getuid()}"


@pytest.mark.parametrize("case", ["open", "link", "file", "foreign", "nowhere"])
def test_what_is_not_private_is_refused(tmp_path, case, monkeypatch):
    path = tmp_path / "run"
    if case == "open":
        path.mkdir(mode=0o755)
    elif case == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "real")
    elif case == "file":
        path.write_text("")
    elif case == "foreign":
        path.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    else:
        path = tmp_path / "file" / "run"
        (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="runtime directory") as caught:
        runtime_dir({"SAFEHOLD_RUNTIME_DIR": str(path)})
    assert str(path) in str(caught.value) and "SAFEHOLD_RUNTIME_DIR" in str(caught.value)
    assert (f"'chmod 700 {path}'" in str(caught.value)) == (case == "open")


def test_one_directory_has_one_key(tmp_path, monkeypatch):
    run = tmp_path / "run"
    key = run_key(run)
    assert len(key) == 16 and int(key, 16) >= 0
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    for spelling in (str(run), "run", "./run/", "../" + tmp_path.name + "/run", "link", f"file://{run}"):
        assert run_key(spelling) == key
    assert run_key(f"FILE://localhost{tmp_path}/r%75n/") == key
    assert run_key(tmp_path / "other") != key
    assert run_key("s3://bucket/run/") == run_key("S3://bucket/run") != run_key("s3://bucket/Run")


@pytest.fixture
def base(tmp_path):
    return runtime_dir({"SAFEHOLD_RUNTIME_DIR": str(tmp_path / "rt")})


def test_one_agent_at_a_time(base):
    slot = open_slot("/some/run", directory=base)
    assert not slot.is_locked()
    with slot.lock() as held:
        assert held is not None
        assert slot.is_locked()
        assert slot.lock(timeout_s=0) is None
    assert not slot.is_locked()
    again = slot.lock()
    assert again is not None
    again.release()


def test_looking_does_not_keep_an_agent_out(base):
    slot = open_slot("/some/run", directory=base)
    stop = threading.Event()

    def look():
        while not stop.is_set():
            slot.is_locked()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with slot.lock() as held:
                assert held is not None
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_killed_agent_holds_no_lock(base):
    slot = open_slot("/some/run", directory=base)
    code = (
        "import sys, time; from pathlib import Path; from safehold.host.runtime import RunSlot; "
        "held = RunSlot(Path(sys.argv[1])).lock(); print('locked', flush=True); time.sleep(60)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code, str(slot.directory)], stdout=subprocess.PIPE)
    assert agent.stdout.readline() == b"locked\n"
    assert slot.is_locked()
    agent.kill()
    agent.wait()
    agent.stdout.close()
    assert not slot.is_locked()


def test_the_note(base):
    slot = open_slot("/some/run", directory=base)
    assert slot.read_info() is None
    info = AgentInfo(pid=1, start_ticks=2, version="1.0", run="/some/run", started_s=3.5, extra={"node": "n1"})
    slot.write_info(info)
    assert slot.read_info() == info
    slot.info_path.write_text('{"pid": "x"')
    assert slot.read_info() is None
    slot.info_path.unlink()
    slot.info_path.symlink_to("/etc/passwd")
    assert slot.read_info() is None


def test_slots_are_listed_and_removed(base):
    assert list_slots(base) == []
    slots = [open_slot(f"/run/{n}", directory=base) for n in range(3)]
    (base / "something else").mkdir()
    (base / "0123456789abcdef").write_text("")
    assert [slot.key for slot in list_slots(base)] == sorted(slot.key for slot in slots)
    with slots[0].lock():
        slots[0].open_log()
        assert slots[0].remove() is False
        assert slots[1].remove() is True
    assert len(list_slots(base)) == 2
    assert slots[1].is_locked() is False


def test_a_lock_on_a_removed_slot_counts_for_nothing(base):
    slot = open_slot("/some/run", directory=base)
    fd = os.open(slot.lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    assert slot.remove()
    open_slot("/some/run", directory=base)
    held = slot.lock(timeout_s=0)
    assert held is not None
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    held.release()


def test_a_slot_that_cannot_be_locked_says_so_and_leaves_no_descriptor(base, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    slot = open_slot("/some/run", directory=base)
    monkeypatch.setattr(fcntl, "flock", refuses)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AgentUnavailableError, match="No locks available") as caught:
        slot.lock()
    assert caught.value.path == str(slot.lock_path)
    assert os.listdir("/proc/self/fd") == before
    slot.lock_path.unlink()
    slot.directory.rmdir()
    for action in (slot.lock, slot.open_log):
        with pytest.raises(AgentUnavailableError, match="SAFEHOLD_RUNTIME_DIR"):
            action()


def test_a_full_runtime_directory_costs_the_note_and_not_the_agent(base, monkeypatch):
    def full(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    slot = open_slot("/some/run", directory=base)
    slot.log_path.write_bytes(b"x" * (runtime.LOG_LIMIT_BYTES + 1))
    monkeypatch.setattr(Path, "write_bytes", full)
    slot.write_info(AgentInfo(pid=1, start_ticks=2, version="1.0", run="/some/run", started_s=3.5))
    assert slot.read_info() is None
    os.close(slot.open_log())
    assert not list(slot.directory.glob(".agent*"))


def test_the_log_is_bounded(base):
    slot = open_slot("/some/run", directory=base)
    fd = slot.open_log()
    os.write(fd, b"first\n" + b"x" * 3000 + b"\nlast\n")
    assert not slot.trim_log()
    assert slot.trim_log(limit_bytes=1000)
    assert (slot.directory / "agent.log.1").stat().st_size == 1000
    assert slot.log_path.stat().st_size == 0
    os.write(fd, b"after\n")
    assert slot.tail_log() == "after\n"
    assert slot.tail_log(3) == "er\n"
    os.close(fd)
    slot.log_path.unlink()
    assert slot.tail_log() == ""


def test_time_is_not_wasted_on_a_living_agent(base):
    slot = open_slot("/some/run", directory=base)
    with slot.lock():
        begun = time.monotonic()
        assert slot.lock(timeout_s=0.1) is None
        assert time.monotonic() - begun < 2
    assert runtime.LOG_LIMIT_BYTES > 0
