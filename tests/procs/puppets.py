"""Real ranks that a test moves step by step: processes that carry out one action after the other, and can be killed in any of them.

    with rig.job(2) as job:
        job.all("open", run=str(run), every=2)
        job.all("train", 4)
        job.kill(1)
        with pytest.raises(RankError, match="rank 1"):
            job[0].call("wait", 4)

The actions are the functions of `puppet_actions`. Invariants: every call has a deadline and shows the rank's output when it is late; ranks,
agents and flushers of a rig are gone when the test is over, each ended by its own process id. Every rig has a runtime directory of its own,
so it meets no agents but its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from safehold.agent.start import ask_status
from safehold.errors import AgentUnavailableError
from safehold.host import process
from safehold.host.runtime import RunSlot, list_slots

HERE = Path(__file__).resolve().parent
CALL_S = 40.0
START_S = 60.0


class RankError(Exception):
    """What an action raised in a rank; `name` is the class, `fields` the attributes of a `CheckpointError`."""

    def __init__(self, rank: int, said: dict[str, Any]) -> None:
        super().__init__(f"rank {rank}: {said['class']}: {said['text']}")
        self.name: str = said["class"]
        self.text: str = said["text"]
        self.fields: dict[str, Any] = said.get("fields", {})
        self.trace: str = said.get("trace", "")


class RankGoneError(Exception):
    """The rank's process ended before it answered."""


class Zygote:
    """The process that forks ranks; one per test session."""

    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        }
        command = [sys.executable, str(HERE / "zygote.py"), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._control = ours

    def fork(self, env: dict[str, str], cwd: str, fds: list[int]) -> int:
        """Start a rank; returns its process id."""
        if self._process.poll() is not None:  # it fell victim to something: the next test has another
            self._control.close()
            self._start()
        socket.send_fds(self._control, [json.dumps({"env": env, "cwd": cwd}).encode()], fds)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            said = self._hear(deadline - time.monotonic())
            if said is not None and "pid" in said:
                return int(said["pid"])
        raise AssertionError("the zygote does not fork")

    def returncode(self, pid: int, timeout_s: float) -> int | None:
        """Return how a rank ended; None if it still runs after that time."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._ended:
            left = deadline - time.monotonic()
            self._hear(max(0.0, left))
            if left <= 0:
                break
        return self._ended.get(pid)

    def _hear(self, timeout_s: float) -> dict[str, Any] | None:
        if not select.select([self._control], [], [], timeout_s)[0]:
            return None
        data = self._control.recv(1 << 20)
        if not data:
            raise AssertionError("the zygote is gone")
        said: dict[str, Any] = json.loads(data)
        if "ended" in said:
            self._ended[said["ended"]] = said["returncode"]
        return said

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


class Rank:
    """One rank: a process and the socket by which it is told what to do."""

    def __init__(self, zygote: Zygote, number: int, env: dict[str, str], cwd: str, directory: Path) -> None:
        self.number = number
        self._zygote = zygote
        self._output = directory / f"output-{number}.txt"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._output.open("wb") as output:
            self.pid = zygote.fork(env, cwd, [theirs.fileno(), output.fileno()])
        theirs.close()
        self._socket = ours
        self._file = ours.makefile("rb")

    def send(self, action: str, *args: Any, **options: Any) -> None:
        """Begin an action."""
        line = json.dumps({"action": action, "args": args, "options": options}) + "\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` tells that it is gone
            self._socket.sendall(line.encode())

    def answer(self, timeout_s: float = CALL_S) -> Any:
        """Return what the action returned.

        Raises:
            RankError: It raised.
            RankGoneError: The process ended instead.
            AssertionError: It was not done in time.
        """
        self._socket.settimeout(timeout_s)
        try:
            line = self._file.readline()
        except TimeoutError:
            raise AssertionError(f"rank {self.number} does not answer within {timeout_s} s\n{self.output}") from None
        except ConnectionResetError:
            line = b""
        if not line:
            raise RankGoneError(f"rank {self.number} ended\n{self.output}")
        said = json.loads(line)
        if "error" in said:
            raise RankError(self.number, said["error"])
        return said["result"]

    def call(self, action: str, *args: Any, timeout_s: float = CALL_S, **options: Any) -> Any:
        """Do it and wait; see `answer`."""
        self.send(action, *args, **options)
        return self.answer(timeout_s)

    @property
    def output(self) -> str:
        """What it printed, the end."""
        return self._output.read_bytes()[-6000:].decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._zygote.returncode(self.pid, 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self._zygote.returncode(self.pid, 20.0) is not None

    def end(self, timeout_s: float = CALL_S) -> int:
        """Have the program end the ordinary way (it returns from main); returns the exit code."""
        self._socket.shutdown(socket.SHUT_WR)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = CALL_S) -> int:
        """Wait for the end; returns the exit code, negative for a signal."""
        code = self._zygote.returncode(self.pid, timeout_s)
        assert code is not None, f"rank {self.number} still runs after {timeout_s} s\n{self.output}"
        return code

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._file.close()
        self._socket.close()


class Job:
    """All ranks of one start of a job."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def all(self, action: str, *args: Any, timeout_s: float = CALL_S, **options: Any) -> list[Any]:
        """Do it on all ranks at once; raises what the lowest rank raised."""
        results = self.each(action, *args, timeout_s=timeout_s, **options)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def each(self, action: str, *args: Any, timeout_s: float = CALL_S, **options: Any) -> list[Any]:
        """As `all`, but what a rank raised is its result."""
        for rank in self.ranks:
            rank.send(action, *args, **options)
        results: list[Any] = []
        for rank in self.ranks:
            try:
                results.append(rank.answer(timeout_s))
            except (RankError, RankGoneError) as exc:
                results.append(exc)
        return results

    def kill(self) -> None:
        """SIGKILL to all, at once."""
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.kill()

    def end(self, timeout_s: float = CALL_S) -> list[int]:
        """Let all ranks end the ordinary way."""
        for rank in self.ranks:
            rank._socket.shutdown(socket.SHUT_WR)
        return [rank.wait(timeout_s) for rank in self.ranks]


class Rig:
    """Jobs, agents and run directories of one test."""

    def __init__(self, zygote: Zygote, directory: Path) -> None:
        self._zygote = zygote
        self.directory = directory
        self.runtime = directory / "rt"
        self.run = directory / "run"
        self._jobs: list[Job] = []
        self._count = 0

    def environment(self) -> dict[str, str]:
        """What every process of this rig has in its environment."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SAFEHOLD_")}
        return {
            **kept,
            "SAFEHOLD_RUNTIME_DIR": str(self.runtime),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    @contextlib.contextmanager
    def job(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        *,
        cwd: Path | None = None,
        nodes: Sequence[str] = (),
        shared: Collection[str] = (),
    ) -> Iterator[Job]:
        """Start ranks; on leaving, what is left of them is killed (their agents live on until the test ends).

        Args:
            world_size: How many.
            env: Added to their environment.
            cwd: Where they start.
            nodes: The node of each rank, each with a disk of its own at `run` (needs root); none: all on one node.
            shared: Of these, those that see the same directory there.
        """
        self._count += 1
        directory = self.directory / f"job-{self._count}"
        directory.mkdir()
        ranks: list[Rank] = []
        try:
            for number in range(world_size):
                environment = {
                    **self.environment(),
                    "RANK": str(number),
                    "LOCAL_RANK": str(number),
                    "WORLD_SIZE": str(world_size),
                    "PUPPET_RENDEZVOUS": str(directory / "rendezvous"),
                    **(self._on_node(nodes[number], own=nodes[number] not in shared) if nodes else {}),
                    **(env or {}),
                }
                ranks.append(Rank(self._zygote, number, environment, str(cwd or directory), directory))
            yield Job(ranks)
        finally:
            for rank in ranks:
                rank.close()

    def _on_node(self, node: str, *, own: bool) -> dict[str, str]:
        disk, runtime = self.directory / f"disk-{node}", self.runtime / node
        for directory in (self.run, disk, runtime):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = {"SAFEHOLD_NODE": node, "SAFEHOLD_RUNTIME_DIR": str(runtime), "SAFEHOLD_STORAGE_INTERFACE": "127.0.0.1"}
        return {**found, "PUPPET_DISK": str(disk), "PUPPET_RUN": str(self.run)} if own else found

    # -- agents --------------------------------------------------------------------------------------------------------

    def slots(self) -> list[RunSlot]:
        """The slots with a living agent."""
        if not self.runtime.exists():
            return []
        return [slot for slot in self._all_slots() if slot.is_locked()]

    def _all_slots(self) -> list[RunSlot]:
        nodes = [path.name.removeprefix("disk-") for path in sorted(self.directory.glob("disk-*"))]
        places = [self.runtime / node for node in nodes] if nodes else [self.runtime]
        return [slot for place in places if place.exists() for slot in list_slots(place)]

    def agent_pid(self, slot: RunSlot | None = None) -> int:
        """Process id of the only agent."""
        if slot is None:
            (slot,) = self.slots()
        info = until(slot.read_info, "the agent's note")
        return int(info.pid)

    def status(self, slot: RunSlot | None = None) -> dict[str, Any]:
        """What the agent says about itself."""
        if slot is None:
            (slot,) = self.slots()
        return dict(ask_status(slot, 10.0))

    def try_status(self) -> dict[str, Any] | None:
        """As `status`; None while there is no agent that answers."""
        slots = self.slots()
        try:
            return self.status(slots[0]) if slots else None
        except AgentUnavailableError:
            return None

    def processes(self) -> dict[int, str]:
        """All processes of this rig but ranks: process id -> its command line, found by their environment."""
        marker = re.compile(re.escape(f"SAFEHOLD_RUNTIME_DIR={self.runtime}".encode()) + rb"(/[^/\0]*)?\0")
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if b"safehold.agent" in command and marker.search((entry / "environ").read_bytes() + b"\0"):
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def flusher_pids(self) -> list[int]:
        """Process ids of all flushers of this rig."""
        return [pid for pid, command in self.processes().items() if "safehold.agent.flusher" in command]

    def log(self) -> str:
        """The logs of all agents."""
        if not self.runtime.exists():
            return ""
        return "".join(slot.tail_log(8000) for slot in self._all_slots())

    def close(self) -> None:
        """End what is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                found = process.Process(pid)
                found.kill(signal.SIGKILL)
                found.wait(5.0)
                found.close()

    # -- what is on storage ----------------------------------------------------------------------------------------------

    def steps(self, run: Path | None = None) -> list[int]:
        """Steps of the checkpoints that exist, ascending."""
        from safehold.pipeline.catalog import Catalog
        from safehold.policy import belief
        from safehold.tiers.open import open_tier

        tier = open_tier(str(run or self.run))
        return sorted(commit.step for commit in belief.believed(Catalog(tier).listing()))

    def verified_steps(self, run: Path | None = None) -> list[int]:
        """As `steps`, after every checksum of every checkpoint was found right."""
        from safehold.pipeline.catalog import Catalog
        from safehold.pipeline.verify import verify
        from safehold.policy import belief
        from safehold.tiers.open import open_tier

        tier = open_tier(str(run or self.run))
        steps = []
        for commit in belief.believed(Catalog(tier).listing()):
            report = verify(tier, commit)
            assert report.ok, report.faults
            steps.append(commit.step)
        return sorted(steps)

    def attempts(self, run: Path | None = None) -> list[str]:
        """Directories of attempts, committed or not, relative to `checkpoints/`."""
        root = (run or self.run) / "checkpoints"
        return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def until(look: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """Return the first true value of `look`; asks every few milliseconds.

    Raises:
        AssertionError: It did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.01)


@contextlib.contextmanager
def rig_of(zygote: Zygote, directory: Path) -> Iterator[Rig]:
    """Make a rig and end everything of it afterwards."""
    rig = Rig(zygote, directory)
    try:
        yield rig
    finally:
        rig.close()


class Lasts:
    """Measures how long a block took: `with Lasts() as took: ...; assert took.seconds < 5`."""

    def __enter__(self) -> Lasts:
        self._begun = time.monotonic()
        self.seconds = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._begun


def need(*tools: str) -> None:
    """Go on only as root and with these tools; a build server that lacks them fails."""
    lacks = [tool for tool in tools if shutil.which(tool) is None]
    if os.getuid() == 0 and lacks and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "bindfs", "fuse3"]
        subprocess.run(
            command,
            check=False,
            capture_output=True,
            timeout=120,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        lacks = [tool for tool in tools if shutil.which(tool) is None]
    if os.getuid() != 0 or lacks:
        why = f"needs root{' and ' + ', '.join(lacks) if lacks else ''}"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """A short path, as real runtime directories have."""
    return tempfile.TemporaryDirectory(prefix="safehold-rig-", ignore_cleanup_errors=True)
