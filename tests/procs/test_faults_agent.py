"""The life of the agent: one per run and node, private, quiet, and gone when nobody needs it."""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
import time
from pathlib import Path

import msgspec
import puppets
import pytest
from puppets import Job, Rig, until

from safehold._version import __version__
from safehold.agent import held_messages
from safehold.agent import messages as m
from safehold.clock import new_token
from safehold.config import Config
from safehold.host.runtime import RunSlot, list_slots
from safehold.host.sockets import ChannelClosed, connect

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]

SLOW = {"flush_block_bytes": 1 << 20, "flush_rate_bytes_s": 2 << 20, "direct_io": False}


def hello(rank: int = 0, *, protocol: int = m.PROTOCOL, version: str = __version__, incarnation: int = 0) -> m.Hello:
    world = m.World(new_token(), 1, [0], ["here"])
    keep = {"last": 1, "every_steps": None, "every_hours": None, "best": None}
    return m.Hello(
        7, protocol, version, rank, os.getpid(), world, Config().to_wire(), keep, incarnation=incarnation, run_id=""
    )


def ask(slot: RunSlot, data: bytes) -> m.Reply:
    with connect(slot.socket_path) as channel:
        channel.send(data)
        reply, fds = channel.recv(timeout_s=10.0)
        for fd in fds:
            os.close(fd)
        return m.decode_reply(reply)


def save(job: Job, step: int) -> None:
    job.all("train", step)
    job.all("save", step, wait=True)


def test_one_agent_private_and_without_a_port(rig: Rig) -> None:
    with rig.job(3) as job:
        job.all("evaluate", "os.umask(0)")  # an umask that closes nothing
        job.all("open", str(rig.run))
        save(job, 1)
        agents = lambda: [pid for pid, command in rig.processes().items() if "safehold.agent.main" in command]  # noqa: E731
        deadline = time.monotonic() + 20
        while len(agents()) > 1 and time.monotonic() < deadline:  # one that found another may be on its way out
            time.sleep(0.1)
        assert agents() == [rig.agent_pid()]
        flushers = rig.flusher_pids()
        assert len(flushers) == 1
        (slot,) = rig.slots()
        for path in (rig.runtime, slot.directory):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(slot.socket_path.stat().st_mode) == 0o600
        assert not stat.S_IMODE(slot.lock_path.stat().st_mode) & 0o077
        ports = set()
        for table in ("tcp", "tcp6", "udp", "udp6"):
            ports |= {line.split()[9] for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]}
        for pid in [rig.agent_pid(), *flushers]:
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
            opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
            assert not {name[8:-1] for name in opened if name.startswith("socket:[")} & ports
            assert os.getsid(pid) == pid  # a signal to the job's process group does not reach it
            lowered = os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
            assert lowered == (pid in flushers), "the agent itself answers at once"
        job.all("close")


def test_it_leaves_soon_after_all_ranks_have_closed_and_lingers_otherwise(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), agent_linger_s=1000)
        save(job, 1)
        job.all("close")
    with puppets.Lasts() as took:
        until(lambda: not rig.processes(), "the end of agent and flusher")
    assert took.seconds < 10
    with rig.job(2) as job:
        job.all("open", str(rig.run), agent_linger_s=2.0)
        save(job, 2)
        job[0].call("close")
        job[1].kill()  # one is enough: it may be started again
    with puppets.Lasts() as took:
        until(lambda: not rig.processes(), "the end of agent and flusher")
    assert 1.5 < took.seconds < 12
    assert not any(slot.socket_path.exists() or slot.info_path.exists() for slot in list_slots(rig.runtime))


def test_connections_that_speak_nonsense_harm_nobody(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        save(job, 1)
        (slot,) = rig.slots()
        path = str(slot.socket_path)
        frame = struct.Struct("<Q")
        nonsense = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            frame.pack(1 << 62),
            frame.pack((64 << 20) + 1),
            frame.pack(64 << 20) + b"x" * 1000,  # and the rest never comes
            frame.pack(3) + b"\xc1\xc1\xc1",
            frame.pack(5000) + b"\x91" * 5000,
            frame.pack(2) + b"\x91",
        ]
        for value in ([], {}, 7, {"type": "hello"}, {"type": "begin", "id": 1}, {"type": "nobody"}):
            data = msgspec.msgpack.encode(value)
            nonsense.append(frame.pack(len(data)) + data)
        deep: object = 1
        for _ in range(900):
            deep = [deep]
        data = msgspec.msgpack.encode({"type": "staged", "id": 1, "step": 1, "attempt": 0, "objects": {}, "x": deep})
        nonsense.append(frame.pack(len(data)) + data)
        open_sockets = []
        for data in nonsense:
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(path)
            peer.sendall(data)
            open_sockets.append(peer)
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(path)
        read_end, write_end = os.pipe()
        socket.send_fds(peer, [frame.pack(4)], [read_end] * 20)
        open_sockets.append(peer)
        # What is a message, and makes no sense.
        for message in (m.OpenRun(5), m.Register(5, []), held_messages.MemoryAsk(5, 0), m.Register(5, [])):
            assert isinstance(ask(slot, m.encode(message)), m.Refused)
        begin = m.Begin(5, 1, 0, "x", b"", [(-5, 1 << 50)], -1, [], {})
        assert isinstance(ask(slot, m.encode(begin)), m.Refused)
        for strange in (hello(5), hello(-1), hello(protocol=99), hello(version="0.0.0"), hello(incarnation=0)):
            reply = ask(slot, m.encode(strange))
            assert isinstance(reply, m.Refused | m.Welcome)
            if strange.version == "0.0.0":
                assert isinstance(reply, m.Refused)
                assert "0.0.0" in reply.error["message"]
        save(job, 2)
        for peer in open_sockets:
            peer.close()
        os.close(read_end)
        os.close(write_end)
        save(job, 3)
        assert rig.status()["session"]["connected"] == [0, 1]
        job.all("close")
    assert rig.verified_steps() == [1, 2, 3]
    until(lambda: not rig.processes(), "the end of agent and flusher")


def test_a_lingering_agent_makes_room_for_another_version(rig: Rig) -> None:
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        save(job, 1)
        job.kill()
    (slot,) = rig.slots()
    reply = ask(slot, m.encode(hello(version="99.0")))
    assert isinstance(reply, m.Refused)
    assert reply.error["class"] == "AgentUnavailableError"
    assert "99.0" in reply.error["message"]
    until(lambda: not rig.processes(), "the end of agent and flusher")
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        assert job[0].call("restore")["step"] == 1
        job.all("close")


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_a_plan_that_is_damaged_while_the_job_runs_is_written_again_by_the_next_save(rig: Rig, damage: str) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        save(job, 1)
        save(job, 2)
        used = Path(max((rig.run / "plans").iterdir(), key=os.path.getmtime))  # the first save had no states yet
        whole = used.read_bytes()
        if damage == "missing":
            used.unlink()
        else:
            used.write_bytes(whole[:-1] if damage == "short" else bytes([whole[0] ^ 1]) + whole[1:])
        save(job, 3)
        assert used.read_bytes() == whole
        job.all("close")
    assert rig.verified_steps() == [1, 2, 3]


def test_many_connections_at_once(rig: Rig) -> None:
    """More than the agent has descriptors for: they wait or are refused, and it works again afterwards."""
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        save(job, 1)
        (slot,) = rig.slots()
        agent = rig.agent_pid()
        used = len(list(Path(f"/proc/{agent}/fd").iterdir()))
        limits = resource.prlimit(agent, resource.RLIMIT_NOFILE)
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (used + 10, limits[1]))
        held = []
        for _ in range(40):
            try:
                held.append(connect(slot.socket_path, timeout_s=1.0))
            except (ChannelClosed, TimeoutError):
                break
        time.sleep(0.5)
        for channel in held:
            channel.close()
        resource.prlimit(agent, resource.RLIMIT_NOFILE, limits)
        assert rig.status()["pid"] == agent
        save(job, 2)
        job.all("close")
