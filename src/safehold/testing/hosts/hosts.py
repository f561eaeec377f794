"""Several hosts on one machine; see the package.

Invariants: each host has its own network, host name, process table, /dev/shm, runtime directory and flash; programs, libraries and the
shared directory are the machine's. Everything ends with `close`, or with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from safehold.testing.hosts import leftovers, network
from safehold.testing.hosts.network import NETWORKS, Cable, NetworkName, Switch
from safehold.testing.hosts.processes import FirstProcess, HostProcess, Zygote
from safehold.testing.hosts.timeline import Timeline

MIN_HOSTS, MAX_HOSTS = 2, 8
FLASH = Path("/run/flash")
RUNTIME = Path("/run/safehold")
_LISTEN_BACKLOG = 64


class Host:
    """One host; made by `Hosts`.

    Attributes:
        index: Its place, from 0.
        generation: How often it was replaced.
        alive: False from `kill` until it is replaced.
    """

    def __init__(self, hosts: Hosts, index: int, generation: int) -> None:
        self.index, self.generation, self.alive = index, generation, True
        self._hosts = hosts
        self.cables = {name: Cable(name, index, generation) for name in NETWORKS}
        self.directory = hosts.private / self.name
        for path in (self.flash, self.runtime):
            path.mkdir(mode=0o700, parents=True)
        (self.directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self._first = FirstProcess(hosts.zygote, self._request())
        try:
            hosts.switch.plug(self._first, self.cables.values())
        except BaseException:
            self._first.kill()
            raise

    def _request(self) -> dict[str, object]:
        binds = [
            [str(self.flash), str(FLASH)],
            [str(self.runtime), str(RUNTIME)],
            [str(self._hosts.names_file), "/etc/hosts"],
            [str(self._hosts.lookup_file), "/etc/nsswitch.conf"],
            [str(self.directory / "boot_id"), "/proc/sys/kernel/random/boot_id"],
        ]
        return {"make": "host", "name": self.name, "binds": binds, "hidden": [str(self._hosts.private)]}

    def __repr__(self) -> str:
        return f"<Host {self.name}{'' if self.alive else ', lost'}>"

    @property
    def name(self) -> str:
        """Its host name; a replacement has another."""
        return f"host-{self.index}" + (f"-{self.generation}" if self.generation else "")

    @property
    def flash(self) -> Path:
        """Its flash, as seen from outside; inside it is at `FLASH`, on every host alike."""
        return self.directory / "flash"

    @property
    def runtime(self) -> Path:
        """Its runtime directory, as seen from outside; inside it is at `RUNTIME`."""
        return self.directory / "runtime"

    def address(self, name: NetworkName = "compute") -> str:
        """Its address in one of the networks."""
        return self.cables[name].address

    def environment(self) -> dict[str, str]:
        """What every process of this host has in its environment, if nothing else is said."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SAFEHOLD_")}
        kept.pop("XDG_RUNTIME_DIR", None)
        return {
            **kept,
            "HOSTNAME": self.name,
            "SAFEHOLD_RUNTIME_DIR": str(RUNTIME),
            "GLOO_SOCKET_IFNAME": "compute",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(self._hosts.python_path),
        }

    # -- processes -------------------------------------------------------------------------------------------------------

    def popen(
        self,
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        fork: bool = False,
    ) -> HostProcess:
        """Start a process in this host.

        Args:
            args: The program and its arguments; with `fork` a Python script and its arguments.
            env: Added to `environment()`.
            cwd: Working directory; None: the machine's root.
            stdin: As for `subprocess.Popen`, but None is nothing to read.
            stdout: As for `subprocess.Popen`, but None is this process's standard error.
            stderr: The same; also `subprocess.STDOUT`.
            fork: Run the script in a fork of the zygote, which has imported its preloaded modules, instead of a new interpreter.
        """
        with contextlib.ExitStack() as stack:
            ours: list[int | None] = []
            theirs: list[int] = []
            for number, wanted in enumerate((stdin, stdout, stderr)):
                mine, fd = _stream(number, wanted, theirs, stack)
                ours.append(mine)
                theirs.append(fd)
            environment = {**self.environment(), **(env or {})}
            try:
                process = self._first.start(list(map(str, args)), environment, str(cwd or "/"), theirs, fork)
            except BaseException:
                for mine in ours:
                    if mine is not None:
                        os.close(mine)
                raise
        process.stdin, process.stdout, process.stderr = (
            None if mine is None else os.fdopen(mine, "rb" if number else "wb") for number, mine in enumerate(ours)
        )
        return process

    def run(
        self, args: Sequence[str | Path], *, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; returns exit code and what it wrote, both streams together in `stdout`.

        Raises:
            TimeoutError: It does not end; it is killed.
        """
        with tempfile.TemporaryFile() as output:
            process = self.popen(args, env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                code = process.wait(timeout_s)
            except TimeoutError:
                process.kill()
                raise
            finally:
                process.close()
            output.seek(0)
            return subprocess.CompletedProcess(list(args), code, output.read().decode(errors="replace"), "")

    def open_socket(self) -> socket.socket:
        """Return a new TCP socket that lives in this host's network, for use right here."""
        return self._first.open_socket()

    def listen(self, port: int, name: NetworkName | None = None) -> socket.socket:
        """Return a socket that listens in this host, in one of its networks or (None) all; port 0: a free one."""
        found = self.open_socket()
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(("0.0.0.0" if name is None else self.address(name), port))
            found.listen(_LISTEN_BACKLOG)
        except BaseException:
            found.close()
            raise
        return found

    def reaches(self, other: Host, name: NetworkName = "compute", *, timeout_s: float = 5.0) -> bool:
        """Return whether packets go from here to another host and back."""
        return network.reachable(self.open_socket, (other.address(name), 9), timeout_s)

    def pids(self) -> list[int]:
        """Numbers, outside, of all processes in this host but the first."""
        return leftovers.members(self._first.pid) if self.alive else []

    # -- what happens to it ------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Lose the node: its cables first (so that nobody hears its connections end), then all processes, flash and runtime directory."""
        if not self.alive:
            return
        self._hosts.switch.unplug(self.cables.values())
        self._first.kill()
        self.alive = False
        self._hosts.timeline.add(self.index, "killed")  # no process of it tells anything later
        shutil.rmtree(self.directory)

    def replace(self) -> Host:
        """Put a fresh host in its place: the same index, nothing else the same. Returns it; this one is killed if it is not yet."""
        return self._hosts.replace(self.index)

    def crash_processes(self) -> None:
        """Kill all processes at once and wait until they are gone; flash and what lies in /dev/shm stay."""
        self._first.kill_all()
        self._hosts.timeline.add(self.index, "crashed")

    def pause(self) -> None:
        """Stop all processes (SIGSTOP), in one step."""
        self._first.signal_all(signal.SIGSTOP)
        self._hosts.timeline.add(self.index, "paused")

    def resume(self) -> None:
        """Undo `pause`."""
        self._first.signal_all(signal.SIGCONT)
        self._hosts.timeline.add(self.index, "resumed")

    def cut(self, name: NetworkName) -> None:
        """Lose all packets from and to this host in a network, silently."""
        self._hosts.switch.cut(self.cables[name])
        self._hosts.timeline.add(self.index, "cut", name)

    def throttle(self, name: NetworkName, rate_bytes_s: float) -> None:
        """Let no more than so many bytes per second through, in each direction."""
        self._hosts.switch.throttle(self._first, self.cables[name], rate_bytes_s)
        self._hosts.timeline.add(self.index, "throttled", f"{name} {rate_bytes_s:g} B/s")

    def heal(self, name: NetworkName) -> None:
        """Undo `cut`, `throttle` and `Hosts.part` for this host."""
        self._hosts.switch.heal(self.cables[name])
        self._hosts.switch.throttle(self._first, self.cables[name], None)
        self._hosts.timeline.add(self.index, "healed", name)

    def close(self) -> None:
        """End all processes; for `Hosts`."""
        self.alive = False
        self._first.kill()


def _stream(
    number: int, wanted: int | IO[bytes] | None, theirs: Sequence[int], stack: contextlib.ExitStack
) -> tuple[int | None, int]:
    """Return our end of a pipe, if one is wanted, and the descriptor for the process."""
    if wanted == subprocess.PIPE:
        read, write = os.pipe()
        mine, other = (write, read) if number == 0 else (read, write)
        stack.callback(os.close, other)
        return mine, other
    if wanted == subprocess.DEVNULL or (wanted is None and number == 0):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, null)
        return None, null
    if wanted is None:
        return None, 2
    if wanted == subprocess.STDOUT:
        return None, theirs[1]
    return None, wanted if isinstance(wanted, int) else wanted.fileno()


class Hosts:
    """Some hosts that are joined by two networks; a context manager.

    Args:
        num: How many, 2 to 8.
        root: A directory for what they have on disk, empty or left by a `Hosts` whose process has ended; None: one of its own, which is
            removed afterwards.
        zygote: To fork from; None: one of its own, without preloaded modules.
        python_path: Folders that processes import from, before those of this process's environment.

    Raises:
        HostsUnavailableError: Not allowed or not possible on this machine.
    """

    def __init__(
        self,
        num: int,
        *,
        root: str | Path | None = None,
        zygote: Zygote | None = None,
        python_path: Sequence[str | Path] = (),
    ) -> None:
        if not MIN_HOSTS <= num <= MAX_HOSTS:
            raise ValueError(f"{num} hosts: {MIN_HOSTS} to {MAX_HOSTS} are possible")
        network.check()
        self.python_path = [*map(str, python_path), str(Path(__file__).resolve().parents[3])]
        self.python_path += filter(None, [os.environ.get("PYTHONPATH")])
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.root = leftovers.take(root, stack)
            self.private, self.shared = self.root / "hosts", self.root / "shared"
            self.names_file, self.lookup_file = self.root / "names", self.root / "lookup"
            self.private.mkdir(mode=0o700)
            self.shared.mkdir(mode=0o700)
            self.names_file.touch()
            self.lookup_file.write_text("passwd: files\ngroup: files\nhosts: files\n")  # no DNS: nobody would answer
            self.zygote = zygote or Zygote()
            if zygote is None:
                stack.callback(self.zygote.close)
            switch = FirstProcess(self.zygote, {"make": "switch", "name": "switch"})
            stack.callback(switch.kill)
            self.switch = Switch(switch)
            self.timeline = Timeline([f"host-{index}" for index in range(num)])
            self._hosts: list[Host] = []
            self.jobs_started = 0
            stack.callback(self._close_hosts)
            for index in range(num):
                self._hosts.append(Host(self, index, 0))
            self._tell_names()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts))

    def close(self) -> None:
        """End all processes of all hosts, remove the networks; what is on disk stays if `root` was given."""
        self._stack.close()

    def _close_hosts(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, even if one does not end
            for host in self._hosts:
                stack.callback(host.close)

    def replace(self, index: int) -> Host:
        """Put a fresh host in the place of one, which is killed if it is not yet; returns it."""
        old = self._hosts[index]
        old.kill()
        host = self._hosts[index] = Host(self, index, old.generation + 1)
        self._tell_names()
        self.timeline.add(index, "replaced", host.name)
        return host

    def part(self, name: NetworkName, *groups: Sequence[int]) -> None:
        """Split a network: hosts of one group reach each other only; those that are in none stay together. `heal` undoes it."""
        self.switch.part(name, [[self._hosts[index].cables[name] for index in group] for group in groups])
        for index in {index for group in groups for index in group}:
            self.timeline.add(index, "cut", f"{name} parted")

    def heal(self, name: NetworkName) -> None:
        """Undo whatever was done to a network."""
        for host in self._hosts:
            if host.alive:
                host.heal(name)

    def _tell_names(self) -> None:
        """Write the file that hosts have for `/etc/hosts`; in place, since it is mounted."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self._hosts:
            for name in NETWORKS:
                suffix = "" if name == "compute" else f"-{name}"
                lines.append(f"{host.cables[name].address} {host.name}{suffix}")
        self.names_file.write_text("\n".join(lines) + "\n")
