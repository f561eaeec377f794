"""The near side of zygote and hosts: makes them, and starts, watches and ends processes in them.

Invariants: every wait has a deadline; a process is signalled by its pidfd, never by its number; what was started here ends with this
process.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from safehold.testing.hosts import init, zygote

ANSWER_S = 30.0
PRELOAD_S = 120.0
KILL_S = 10.0
PRIVILEGES_HINT = "run as root with CAP_SYS_ADMIN (in a container: --privileged), on Linux with network namespaces"
_PROGRAM = "import sys; from safehold.testing.hosts.zygote import run; sys.exit(run(sys.argv[1:]))"
_REFUSED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOSPC}


class HostsUnavailableError(Exception):
    """The machine, or its user, cannot have several hosts; the text says why and what to do."""


def translated(doing: str, said: Mapping[str, Any]) -> Exception:
    """Return the error that a zygote or a host answered with."""
    text = f"{doing} failed: {said['error']}"
    if said.get("errno") in _REFUSED:
        return HostsUnavailableError(f"{text}\n  hint: {PRIVILEGES_HINT}")
    return OSError(said.get("errno") or errno.EIO, text)


def _receive(control: socket.socket, timeout_s: float, doing: str) -> tuple[dict[str, Any], list[int]]:
    if not select.select([control], [], [], max(0.0, timeout_s))[0]:
        raise TimeoutError(f"{doing}: no answer within {timeout_s:g} s")
    data, fds, _, _ = socket.recv_fds(control, zygote.MAX_MESSAGE_BYTES, 4)
    for fd in fds:
        os.set_inheritable(fd, False)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, f"{doing}: the other end is gone")
    return json.loads(data), fds


class Zygote:
    """The process that hosts are forked from; one serves any number of `Hosts`, one after the other or at once.

    Args:
        preload: Modules that it imports once for all Python programs that are started with `fork=True`.
        python_path: Folders to import from, before those of the environment.
    """

    def __init__(self, preload: Sequence[str] = (), *, python_path: Sequence[str | Path] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [*map(str, python_path), str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
        arguments = [str(theirs.fileno()), str(os.getpid()), ",".join(preload)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._control = ours
        self._lock = threading.Lock()
        self._ready = False

    def make(self, request: Mapping[str, Any]) -> tuple[int, int, socket.socket]:
        """Fork a switch or a host; returns its process id, its pidfd and its control socket.

        Raises:
            HostsUnavailableError: Not allowed or not possible here.
        """
        doing = f"making {request['name']}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, theirs:
            if not self._ready:
                _receive(self._control, PRELOAD_S, "starting the process that hosts are forked from")
                self._ready = True
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
            said, fds = _receive(self._control, ANSWER_S, doing)
        if "error" in said:
            ours.close()
            raise translated(doing, said)
        return said["pid"], fds[0], ours

    def close(self) -> None:
        """End it; hosts that were made live on."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class HostProcess:
    """A process inside a host, much like `subprocess.Popen`.

    Attributes:
        args: What was started.
        pid: Its number outside; `inner_pid` inside its host.
        stdin: A pipe, where asked for; as are `stdout` and `stderr`.
    """

    def __init__(self, first: FirstProcess, args: Sequence[str], inner_pid: int, pidfd: int) -> None:
        self.args, self.inner_pid = list(args), inner_pid
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._first, self._pidfd = first, pidfd
        self.pid = _pid_of(pidfd)

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._first.returncode(self.inner_pid, 0.0)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return how.

        Raises:
            TimeoutError: It still runs.
        """
        code = self._first.returncode(self.inner_pid, timeout_s)
        if code is None:
            raise TimeoutError(f"{' '.join(self.args)} still runs on {self._first.name} after {timeout_s:g} s")
        return code

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait(KILL_S)

    def close(self) -> None:
        """Let go of pipes and of the pidfd; it runs on."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __del__(self) -> None:
        if getattr(self, "_pidfd", -1) >= 0:
            self.close()


def _pid_of(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1


class FirstProcess:
    """The near side of process 1 of a host, or of the switch; see `init`. Safe to call from several threads."""

    def __init__(self, zygote_: Zygote, request: Mapping[str, Any]) -> None:
        self.name: str = request["name"]
        self.pid, self._pidfd, self._control = zygote_.make(request)
        self._lock = threading.RLock()
        self._ended: dict[int, int] = {}
        self._answers: list[tuple[dict[str, Any], list[int]]] = []
        self._dead = False
        try:
            said, _ = self._answer(ANSWER_S, "furnishing")
            if "error" in said:
                raise translated(f"furnishing {self.name}", said)
        except BaseException:
            self.kill()
            raise

    def start(self, args: Sequence[str], env: Mapping[str, str], cwd: str, fds: list[int], fork: bool) -> HostProcess:
        """Start a process with these descriptors for standard input, output and error."""
        message = {"do": "start", "args": list(args), "env": dict(env), "cwd": cwd, "fork": fork}
        said, found = self._ask(message, fds, ANSWER_S)
        return HostProcess(self, args, said["pid"], found[0])

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the host but the first, in one step."""
        self._ask({"do": "signal all", "number": int(number)}, [], ANSWER_S)

    def kill_all(self) -> None:
        """Kill all processes of the host but the first, and wait until they are gone."""
        self._ask({"do": "kill all"}, [], init.KILL_S + ANSWER_S)

    def open_socket(self) -> socket.socket:
        """Return a new TCP socket that lives in the network of the host."""
        _, fds = self._ask({"do": "socket"}, [], ANSWER_S)
        return socket.socket(fileno=fds[0])

    def returncode(self, inner_pid: int, timeout_s: float) -> int | None:
        """How a process that was started here ended; None if it still runs after that time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if inner_pid in self._ended:
                    return self._ended[inner_pid]
                if self._dead:
                    return -int(signal.SIGKILL)
                self._hear(0.0)
                if inner_pid in self._ended or self._dead:
                    continue
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([self._control], [], [], min(left, 0.05))

    def kill(self) -> None:
        """Kill the first process; returns when the kernel has ended all others of the host.

        Raises:
            TimeoutError: Something does not end (held by a dead disk, say).
        """
        with self._lock:
            if self._dead:
                return
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not select.select([self._pidfd], [], [], KILL_S)[0]:
                raise TimeoutError(f"the processes of {self.name} do not end within {KILL_S:g} s")
            self._dead = True
            while self._hear(0.0):
                pass
            self._control.close()
            os.close(self._pidfd)

    def _ask(self, message: Mapping[str, Any], fds: list[int], timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            if self._dead:
                raise ProcessLookupError(errno.ESRCH, f"{self.name} is not alive; replace it first")
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
            said, found = self._answer(timeout_s, str(message["do"]))
        if "error" in said:
            raise translated(f"{message['do']} on {self.name}", said)
        return said, found

    def _answer(self, timeout_s: float, doing: str) -> tuple[dict[str, Any], list[int]]:
        deadline = time.monotonic() + timeout_s
        while not self._answers:
            if not self._hear(deadline - time.monotonic()):
                raise TimeoutError(f"{doing}: {self.name} does not answer within {timeout_s:g} s")
        return self._answers.pop(0)

    def _hear(self, timeout_s: float) -> bool:
        """Take one message, if one comes in time; what ended is noted, answers are kept."""
        if not select.select([self._control], [], [], max(0.0, timeout_s))[0]:
            return False
        try:
            said, fds = _receive(self._control, 0.0, self.name)
        except ConnectionResetError:
            if self._dead:
                return False
            self.kill()  # it has ended by itself, or somebody ended it
            raise ProcessLookupError(errno.ESRCH, f"{self.name} has ended") from None
        if "ended" in said:
            self._ended[said["ended"]] = said["returncode"]
        else:
            self._answers.append((said, fds))
        return True
