"""The hosts themselves: that they are apart, that what is done to them really happens, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from safehold.host.runtime import list_slots
from safehold.testing.hosts import FLASH, RUNTIME, Host, Hosts, HostsUnavailableError, Proxy, Zygote, network, run_job

pytestmark = pytest.mark.root
HERE = Path(__file__).parent
MIB = 1 << 20
# A daemon as agents are: a session of its own and nobody's child.
DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open(sys.argv[1], "w").write(str(os.getpid()))
while True: time.sleep(100)
"""


def until(look: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_daemon(host: Host) -> None:
    """Have a daemon run, whose parents are gone."""
    mark = f"daemon-{time.monotonic_ns()}"
    host.popen([sys.executable, "-I", "-S", "-c", DAEMON, str(FLASH / mark)]).wait(10)
    until((host.flash / mark).exists)


def pair(a: Host, b: Host, name: network.NetworkName) -> tuple[socket.socket, socket.socket]:
    """A connection from a to b."""
    with b.listen(0, name) as listener:
        found = a.open_socket()
        found.settimeout(5)
        found.connect(listener.getsockname())
        other, _ = listener.accept()
    other.settimeout(5)
    return found, other


def test_hosts_are_apart_and_reach_each_other(four_hosts: Hosts) -> None:
    a, b, *_ = four_hosts
    assert all(x.reaches(y, name) for x in four_hosts for y in four_hosts for name in network.NETWORKS)
    assert [host.run(["uname", "-n"]).stdout.strip() for host in four_hosts] == [f"host-{n}" for n in range(4)]
    boots = {host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout for host in four_hosts}
    assert len(boots) == 4
    assert a.run(["getent", "hosts", "host-1-storage"]).stdout.split()[0] == b.address("storage")
    for place in (str(FLASH), str(RUNTIME), "/dev/shm"):
        assert a.run(["touch", f"{place}/mine"]).returncode == 0
        assert b.run(["ls", "-A", place]).stdout == ""
    assert (a.flash / "mine").exists() and (a.runtime / "mine").exists()
    assert a.run(["ls", "-A", str(b.directory)]).returncode != 0  # nobody looks into another's flash
    a.run(["touch", str(four_hosts.shared / "ours")])
    assert b.run(["ls", str(four_hosts.shared)]).stdout == "ours\n"
    assert [path.name for path in list_slots(a.runtime)] == []


def test_a_process_has_its_streams_its_exit_code_and_only_its_host(two_hosts: Hosts) -> None:
    a, b = two_hosts
    process = a.popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"X": "1"})
    assert process.stdin is not None and process.stdout is not None
    assert a.pids() == [process.pid] and b.pids() == []
    assert process.poll() is None
    process.stdin.write(b"words")
    process.stdin.close()
    assert process.stdout.read() == b"words"
    assert process.wait(5) == 0
    assert a.run(["sh", "-c", "echo out; echo err >&2; exit 3"]).stdout == "out\nerr\n"
    assert a.run(["sh", "-c", "exit 3"]).returncode == 3
    assert a.run(["sh", "-c", "kill -TERM $$"]).returncode == -signal.SIGTERM
    assert a.run(["/no/such/program"]).returncode == 127
    sleeping = a.popen(["sleep", "100"])
    with pytest.raises(TimeoutError, match=r"sleep 100 still runs on host-0"):
        sleeping.wait(0.01)
    sleeping.kill()
    assert sleeping.poll() == -signal.SIGKILL


def test_a_cut_is_silent_and_heals(two_hosts: Hosts) -> None:
    a, b = two_hosts
    here, there = pair(a, b, "storage")
    with here, there:
        b.cut("storage")
        assert not a.reaches(b, "storage", timeout_s=0.15)
        assert a.reaches(b, "compute")
        here.sendall(b"late")
        there.settimeout(0.15)
        with pytest.raises(TimeoutError):
            there.recv(10)
        b.heal("storage")
        there.settimeout(5)
        assert there.recv(10) == b"late"  # the connection lived on
    assert a.reaches(b, "storage")


def test_a_network_parts_into_groups(four_hosts: Hosts) -> None:
    four_hosts.part("compute", [0, 1], [2, 3])
    for x in four_hosts:
        for y in four_hosts:
            together = x.index // 2 == y.index // 2
            assert x.reaches(y, timeout_s=5.0 if together else 0.05) == together
    assert four_hosts[0].reaches(four_hosts[2], "storage")
    four_hosts.heal("compute")
    assert four_hosts[0].reaches(four_hosts[2])


def transfer_s(a: Host, b: Host, num_bytes: int) -> float:
    here, there = pair(a, b, "storage")
    with here, there:
        begun = time.monotonic()
        sender = threading.Thread(target=lambda: here.sendall(b"\0" * num_bytes))
        sender.start()
        left = num_bytes
        while left:
            left -= len(there.recv(MIB))
        sender.join()
        return time.monotonic() - begun


def test_a_throttle_limits_both_directions(two_hosts: Hosts) -> None:
    a, b = two_hosts
    assert min(transfer_s(a, b, 4 * MIB) for _ in range(3)) < 0.3
    b.throttle("storage", 8 * MIB)
    for x, y in ((a, b), (b, a)):
        assert 0.3 < transfer_s(x, y, 4 * MIB) < 2.0  # 0.5 s by the rate
    b.heal("storage")
    assert min(transfer_s(a, b, 4 * MIB) for _ in range(3)) < 0.3


def test_a_lost_host_is_silent_and_nothing_of_it_survives(two_hosts: Hosts) -> None:
    a, b = two_hosts
    start_daemon(b)
    here, there = pair(a, b, "compute")
    with here:
        with there:
            there.setblocking(True)
            process = b.popen(["cat"], stdin=there.fileno())  # the connection is its own now
        pids = b.pids()
        assert len(pids) == 2
        b.kill()
        here.settimeout(0.1)
        with pytest.raises(TimeoutError):
            here.recv(1)  # neither an end of the stream nor a reset
    assert not any(alive(pid) for pid in pids)
    assert process.wait(0) == -signal.SIGKILL
    assert not b.directory.exists()
    assert not a.reaches(b, timeout_s=0.05)
    with pytest.raises(ProcessLookupError, match="replace it first"):
        b.run(["true"])


def test_a_replacement_is_empty_and_has_another_name_and_address(two_hosts: Hosts) -> None:
    a, old = two_hosts
    (old.flash / "data").touch()
    boot = old.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    new = old.replace()
    assert two_hosts[1] is new and not old.alive and new.index == 1
    assert (new.name, new.address()) != (old.name, old.address())
    assert new.run(["uname", "-n"]).stdout.strip() == new.name
    assert new.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot
    assert list(new.flash.iterdir()) == [] and new.run(["ls", "-A", str(FLASH)]).stdout == ""
    assert a.reaches(new) and a.reaches(new, "storage")
    assert a.run(["getent", "hosts", new.name]).stdout.split()[0] == new.address()


def test_crashed_processes_leave_the_flash(two_hosts: Hosts) -> None:
    a, b = two_hosts
    start_daemon(a)
    (a.flash / "data").touch()
    other = b.popen(["sleep", "100"])
    pids = a.pids()
    a.crash_processes()
    assert pids and a.pids() == [] and not any(alive(pid) for pid in pids)
    assert (a.flash / "data").exists()
    assert a.run(["ls", "/run/flash/data"]).returncode == 0
    assert other.poll() is None


def test_a_paused_host_stands_still(two_hosts: Hosts) -> None:
    a, b = two_hosts
    count = "import sys\nwhile True: sys.stdout.write('.'); sys.stdout.flush()"
    with (a.flash / "count").open("wb") as output:
        a.popen([sys.executable, "-I", "-S", "-c", count], stdout=output)
    size = (a.flash / "count").stat
    until(lambda: size().st_size > 0)
    a.pause()
    time.sleep(0.02)
    before = size().st_size
    time.sleep(0.1)
    assert size().st_size == before
    assert b.run(["true"]).returncode == 0
    a.resume()
    until(lambda: size().st_size > before)


def test_a_proxy_delays_and_breaks_connections_between_hosts(two_hosts: Hosts) -> None:
    a, b = two_hosts
    with b.listen(7000, "compute") as server:
        options = {"listener": a.listen(0, "compute"), "open_socket": a.open_socket}
        with Proxy((b.address(), 7000), delay_s=0.1, drop_after_bytes=100, **options) as proxy:
            with a.open_socket() as here:
                here.settimeout(5)
                begun = time.monotonic()
                here.connect(proxy.address)
                there, _ = server.accept()
                with there:
                    here.sendall(b"ping")
                    assert there.recv(10) == b"ping"
                    assert 0.1 <= time.monotonic() - begun < 4.0
                    proxy.delay_s = 0.0
                    there.sendall(b"pong")
                    assert here.recv(10) == b"pong"
                    here.sendall(b"x" * 200)
                    with pytest.raises(ConnectionResetError):
                        here.recv(10)


def test_a_job_has_torchruns_variables_and_an_all_reduce(four_hosts: Hosts) -> None:
    heard: list[str] = []
    with run_job(four_hosts, 1, HERE / "all_reduce.py", ["7"], {"EXTRA": "e"}, echo=heard.append) as job:
        assert job.wait(30) == [0, 0, 0, 0]
        assert [job.output(rank).splitlines()[-1] for rank in range(4)] == [
            f"host-{rank} local 0 of 1, group {rank}: sum 70.0 e" for rank in range(4)
        ]
        assert "[host-2 rank 2] host-2 local 0 of 1, group 2: sum 70.0 e" in job.text.splitlines()
        assert job.until("* saved 7", rank=3) == "* saved 7"
    assert heard == job.text.splitlines()
    assert [(moment.host, moment.what) for moment in four_hosts.timeline.events].count((3, "saved")) == 1


def test_a_job_of_an_ordinary_interpreter_ends_as_a_forked_one_does(two_hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import atexit, os, sys, threading, time, weakref\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "weakref.finalize(thing, print, 'finalized')\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "assert __name__ == '__main__' and sys.argv[1] == 'a', sys.argv\n"
        "if os.environ['RANK'] == '1': raise ValueError('broken')\n"
        "sys.exit('words')\n"
    )
    said = []
    for fork in (True, False):
        with run_job(two_hosts, 1, script, ["a"], fork=fork) as job:
            assert job.wait(20) == [1, 1]
            ends = (job.output(0).splitlines(), job.output(1).splitlines()[-1], sorted(job.output(1).splitlines()))
            said.append((ends[0], "ValueError: broken" in ends[2], "finalized" in ends[2]))
    assert said[0] == said[1]
    assert said[0][0][0] == "words" and said[0][1:] == (True, True)


def test_a_late_job_is_shown_and_killed(two_hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text("import os, time\nprint('here', flush=True)\ntime.sleep(100 * int(os.environ['RANK']))\n")
    with run_job(two_hosts, 1, script) as job:
        job.until("here", rank=1)
        assert job.ranks[0].process.wait(10) == 0
        with pytest.raises(TimeoutError, match=r"(?s)^host-1 rank 1 still ran.*\[host-0 rank 0\] here"):
            job.wait(0.3)
        assert job.wait(1) == [0, -signal.SIGKILL]
    with run_job(two_hosts, 1, script, on=[1, 0]) as job:
        job.until("here")
        job.kill_host(0)
        assert job.wait(20) == [0, -signal.SIGKILL]
        with pytest.raises(TimeoutError, match="nobody printed 'there' before all ranks had ended"):
            job.until("there")


OWNER = """
import sys, time
from safehold.testing.hosts import Hosts
hosts = Hosts(2, root=sys.argv[1])
hosts[0].popen(["sleep", "1000"]); hosts[1].popen(["sleep", "1000"])
print(*[pid for host in hosts for pid in host.pids()], flush=True)
time.sleep(1000)
"""


def test_hosts_of_a_killed_owner_are_gone_and_swept(host_zygote: Zygote, tmp_path: Path, two_hosts: Hosts) -> None:
    root = tmp_path / "killed"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        with pytest.raises(FileExistsError, match="still runs"):
            Hosts(2, root=root, zygote=host_zygote)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    until(lambda: not any(map(alive, pids)))
    until(lambda: not processes_with(str(owner.pid)))
    assert (root / "hosts" / "host-0").exists()
    with Hosts(2, root=root, zygote=host_zygote) as hosts:
        assert list(hosts[0].flash.iterdir()) == []
    assert two_hosts[0].reaches(two_hosts[1])


def processes_with(word: str) -> list[int]:
    """The zygote of an owner, and what was forked from it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_hosts_without_a_root_leave_nothing_and_a_failure_neither(
    host_zygote: Zygote, monkeypatch: pytest.MonkeyPatch, two_hosts: Hosts, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    base = tmp_path / f"safehold-hosts-{os.getuid()}"
    dead = base / "dead"
    dead.mkdir(parents=True)
    (dead / "owner.json").write_text('{"pid": 1, "start_ticks": 1}')
    foreign = base / "foreign"
    foreign.mkdir()
    with pytest.raises(RuntimeError, match="a test fails"), Hosts(2, zygote=host_zygote) as hosts:
        assert sorted(base.iterdir()) == sorted([foreign, hosts.root])
        process = hosts[0].popen(["sleep", "1000"])
        raise RuntimeError("a test fails")
    assert not alive(process.pid)
    assert list(base.iterdir()) == [foreign]
    with pytest.raises(FileExistsError, match="choose another root"):
        Hosts(2, root=two_hosts.root, zygote=host_zygote)


def test_without_privileges_the_error_says_what_to_do(
    host_zygote: Zygote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, two_hosts: Hosts
) -> None:
    code = "import sys; from safehold.testing.hosts import Hosts; Hosts(2, root=sys.argv[1])"
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    command = [*without, sys.executable, "-c", code, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "HostsUnavailableError: making switch failed: [Errno 1] unshare" in done.stderr
    assert "hint: run as root with CAP_SYS_ADMIN" in done.stderr
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 65534)
        with pytest.raises(HostsUnavailableError, match=r"need root, and this is user 65534\n  hint: run"):
            Hosts(2, root=tmp_path / "b", zygote=host_zygote)
    monkeypatch.setattr(network, "_PATH", str(tmp_path))
    with pytest.raises(HostsUnavailableError, match=r"ip is not installed\n  hint: install iproute2"):
        Hosts(2, root=tmp_path / "c", zygote=host_zygote)
