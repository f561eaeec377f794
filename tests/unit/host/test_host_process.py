"""Processes: known by pidfd, started without inheriting what they should not, ended within a deadline."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safehold.errors import AgentUnavailableError, ConfigurationError
from safehold.host import process
from safehold.host.process import Process, find, spawn, start_ticks

PROBE = """
import os, sys, json, signal
print(json.dumps({
    "argv": sys.argv[1:], "fds": sorted(int(f) for f in os.listdir("/proc/self/fd")), "sid": os.getsid(0), "pid": os.getpid(),
    "ppid": os.getppid(), "path": sys.path, "nice": os.getpriority(os.PRIO_PROCESS, 0), "env": os.environ.get("PROBE"),
    "name": __name__, "stdin": os.read(0, 1).hex(),
}), flush=True)
if "wait" in sys.argv: signal.pause()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN); print("ready", flush=True)
    while True: signal.pause()
sys.exit(7)
"""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """A module on the path, started with its output in a pipe; gives what it printed and its process."""
    import json

    (tmp_path / "probe_module.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []

    def start(*arguments, **options):
        read_end, write_end = os.pipe()
        running = spawn("probe_module", arguments, log=write_end, **options)
        os.close(write_end)
        started.append(running)
        file = os.fdopen(read_end)
        line = file.readline()
        assert line.startswith("{"), line + file.read()
        if "stubborn" in arguments:
            assert file.readline() == "ready\n"
        file.close()
        return json.loads(line), running

    yield start
    for running in started:
        running.kill()
        running.wait(5)
        running.close()


@pytest.mark.parametrize("detach", [False, True])
def test_a_process_gets_what_it_is_given_and_no_more(probe, detach, monkeypatch):
    monkeypatch.setenv("PROBE", "kept")
    leaked = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    given = os.open("/dev/null", os.O_RDONLY)
    seen, running = probe("a", "b c", "", fds=[given], detach=detach)
    assert seen["argv"] == ["a", "b c", ""]
    assert seen["name"] == "__main__" and seen["env"] == "kept" and seen["stdin"] == ""
    assert given in seen["fds"] and leaked not in seen["fds"]
    assert len(seen["fds"]) == 5, "the standard ones, what was given, and the one that lists them"
    assert seen["pid"] == running.pid and seen["sid"] != os.getsid(0)
    assert (seen["ppid"] == os.getpid()) is not detach
    assert os.getcwd() not in seen["path"] and "" not in seen["path"]
    assert running.wait(10)
    assert running.exit_code == (None if detach else 7)
    for fd in (leaked, given):
        os.close(fd)


def test_modules_of_the_working_directory_do_not_shadow(tmp_path, monkeypatch):
    (tmp_path / "datetime.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    running = spawn("calendar")
    assert running.wait(20) and running.exit_code == 0
    running.close()


@pytest.mark.parametrize("detach", [False, True])
def test_ending_a_process(probe, detach):
    _, running = probe("wait", detach=detach)
    assert running.is_alive() and not running.wait(0.05)
    assert running.exit_code is None
    assert running.terminate(grace_s=10)
    assert not running.is_alive()
    assert running.exit_code == (None if detach else -signal.SIGTERM)
    assert running.kill() is False


def test_a_stubborn_process_is_killed(probe):
    _, running = probe("stubborn")
    begun = time.monotonic()
    assert running.terminate(grace_s=0.2)
    assert time.monotonic() - begun < 5
    assert running.exit_code == -signal.SIGKILL


def test_forgetting_a_process_warns_nobody_and_leaves_it_running(probe):
    _, running = probe("wait")
    pid, ticks = running.pid, running.start_ticks
    del running
    again = find(pid, ticks)
    assert again is not None and again.terminate(grace_s=5)
    again.close()


def test_a_number_alone_finds_nobody(probe):
    _, running = probe("wait")
    assert find(running.pid, running.start_ticks + 1) is None
    found = find(running.pid, running.start_ticks)
    assert found is not None
    found.close()
    running.terminate(grace_s=5)
    assert find(running.pid, running.start_ticks) is None
    with pytest.raises(ProcessLookupError):
        start_ticks(2**22 + 1)


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    watched = Process(child.pid)
    assert watched.wait(20)
    assert not watched.is_alive()
    assert child.wait() == 0
    watched.close()


def test_starting_without_an_interpreter_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigurationError, match="interpreter"):
        spawn("timeit")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    for detach in (False, True):
        with pytest.raises(AgentUnavailableError, match="timeit"):
            spawn("timeit", detach=detach)


def test_lower_priority_in_a_child():
    code = """
from safehold.host.process import lower_priority
import os
print(lower_priority(nice=5, oom_score_adj=500), os.getpriority(os.PRIO_PROCESS, 0))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "nice=" in out and out.strip().endswith(str(max(5, os.getpriority(os.PRIO_PROCESS, 0))))
    assert "oom_score_adj=500" in out


def test_closing_lets_go(probe):
    _, running = probe("wait")
    pid = running.pid
    running.close()
    running.close()
    assert Path(f"/proc/{pid}").exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_of_any_name_has_a_start():
    name = Path("/proc/self/comm")
    before, ticks = name.read_bytes(), process.start_ticks(os.getpid())
    try:
        name.write_bytes(b"\xff) 1 \xfe")
        assert process.start_ticks(os.getpid()) == ticks > 0
    finally:
        name.write_bytes(before)


def test_sparing_from_the_oom_killer_never_raises_the_adjustment():
    code = """
from safehold.host.process import lower_priority, spare_from_oom
lower_priority(0, lower_io=False, oom_score_adj=500)
print(spare_from_oom(700), spare_from_oom(500), spare_from_oom(-900))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[:2] == ["500", "500"]
    assert out[2] in ("-900", "500"), "500 where it is not allowed"


def test_a_process_known_by_its_pidfd_only():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = process.Process.of_pidfd(os.pidfd_open(child.pid))
    assert known.is_alive() and (known.pid, known.exit_code) == (0, None)
    assert known.kill() and known.wait(5.0) and not known.is_alive()
    known.close()
    assert known.fileno() == -1
    child.communicate()
