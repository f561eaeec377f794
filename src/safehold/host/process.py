"""Starting, watching and ending processes of this host.

Invariants: a process is named by a pidfd, never by its number alone, so that a reused number cannot be signalled;
nothing is forked without exec; what is started inherits the descriptors that it is given and no others; no wait is
without a deadline unless the caller passes None. What the processes do is not known here.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from safehold.errors import AgentUnavailableError, ConfigurationError
from safehold.host import libc

# The package is found where it was found here, after everything else; the working directory is not searched (-P).
_RUN_MODULE = (
    "import runpy, sys; r = sys.argv.pop(1); r in sys.path or sys.path.append(r); m = sys.argv.pop(1); "
    "runpy.run_module(m, run_name='__main__', alter_sys=True)"
)
# Starts the rest of its arguments as a grandchild, so that the starter's children stay its own, and prints its number.
_DETACH = (
    "import os, sys; p = os.fork()\n"
    "if p: os.write(1, b'%d' % p); os._exit(0)\n"
    "os.dup2(2, 1); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
)
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_BEST_EFFORT_LOWEST = (2 << 13) | 7


class _Popen(subprocess.Popen[bytes]):
    """A `Popen` that may be forgotten while its process runs on."""

    def __del__(self) -> None:
        return


class Process:
    """A process that can be waited for and signalled without the risk of meeting another that has its number."""

    def __init__(self, pid: int, *, child: bool = False) -> None:
        """Take hold of a running process.

        Args:
            pid: Its number.
            child: Whether it is a child of this process: then its exit code will be known, and it is reaped.

        Raises:
            ProcessLookupError: There is none.
        """
        self.pid = pid
        self._child = child
        self._fd = os.pidfd_open(pid)
        self._exit_code: int | None = None
        self._gone = False
        self.start_ticks = start_ticks(pid)

    @classmethod
    def of_pidfd(cls, fd: int) -> Self:
        """Take ownership of the pidfd of a process whose number need not be known here (`pid` is 0 then, as is `start_ticks`)."""
        self = cls.__new__(cls)
        self.pid, self._child, self._fd, self._exit_code, self._gone, self.start_ticks = 0, False, fd, None, False, 0
        return self

    def fileno(self) -> int:
        """The pidfd, readable once the process has ended; for a poller."""
        return self._fd

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal's number, or None while it runs and for processes that are not children."""
        self.is_alive()
        return self._exit_code

    def is_alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return not self.wait(0)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end; return whether it came in time."""
        if self._gone:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)):
            return False
        self._reap()
        self._gone = True
        return True

    def _reap(self) -> None:
        if not self._child:
            return
        try:
            found = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # the host program reaps everything itself
            return
        if found is not None:
            self._exit_code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Send a signal; return False if the process had ended."""
        if not self.is_alive():
            return False
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def terminate(self, *, grace_s: float, kill_s: float = 5.0) -> bool:
        """Send SIGTERM, after `grace_s` SIGKILL; return whether it ended, at most `kill_s` after that (a stuck disk
        can hold it).
        """
        self.kill(signal.SIGTERM)
        if self.wait(grace_s):
            return True
        self.kill(signal.SIGKILL)
        return self.wait(kill_s)

    def close(self) -> None:
        """Let go of it; it runs on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._gone = -1, True

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def spawn(
    module: str,
    arguments: Sequence[str] = (),
    *,
    fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    log: int | None = None,
    detach: bool = False,
    timeout_s: float = 30.0,
) -> Process:
    """Start `python -m module arguments` in a session of its own.

    Args:
        module: Found where this interpreter would find it, or beside the safehold that runs here; never in the
            working directory.
        arguments: Its `sys.argv[1:]`.
        fds: Descriptors that it inherits, under the same numbers; all others are closed in it.
        env: Its environment; None: the one of this process, whole.
        log: Descriptor for its standard output and error; None: `/dev/null`.
        detach: Start it as nobody's child, so that a launcher that kills the tree below a trainer does not find it.
            Its exit code will not be known. Costs about 15 ms.
        timeout_s: Limit for starting.

    Raises:
        ConfigurationError: There is no interpreter to start.
        AgentUnavailableError: The system refused, or it ended at once.
    """
    command = module_command(module, arguments)
    try:
        pid = _spawn_detached(command, fds, env, log, timeout_s) if detach else _spawn_child(command, fds, env, log)
        process = Process(pid, child=not detach)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise AgentUnavailableError(f"starting {module} failed: {exc}") from exc
    return process


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module in another interpreter, as `spawn` finds it.

    Raises:
        ConfigurationError: There is no interpreter to start.
    """
    if not sys.executable:
        raise ConfigurationError("sys.executable is empty: there is no interpreter to start a background process with")
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-P", "-c", _RUN_MODULE, root, module, *arguments]


def _spawn_child(command: list[str], fds: Sequence[int], env: Mapping[str, str] | None, log: int | None) -> int:
    output = subprocess.DEVNULL if log is None else log
    return _Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=tuple(fds),
        env=None if env is None else dict(env),
        start_new_session=True,
    ).pid


def _spawn_detached(
    command: list[str], fds: Sequence[int], env: Mapping[str, str] | None, log: int | None, timeout_s: float
) -> int:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _DETACH, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if log is None else log,
        pass_fds=tuple(fds),
        env=None if env is None else dict(env),
        start_new_session=True,
        timeout=timeout_s,
        check=True,
    )
    return int(done.stdout)


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; with the number, this names a process for good.

    Raises:
        ProcessLookupError: There is none.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()  # a process may have any bytes for a name
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None
    return int(text.rsplit(b")", 1)[1].split()[19])


def find(pid: int, ticks: int) -> Process | None:
    """Take hold of the process that had this number and this start, or return None if it has ended."""
    try:
        process = Process(pid)
    except (ProcessLookupError, PermissionError):
        return None
    # Checked after the pidfd was opened: from then on the number cannot pass to another unnoticed.
    if process.start_ticks == ticks and process.is_alive():
        return process
    process.close()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """What `lower_priority` achieved.

    Attributes:
        nice: Niceness now.
        io_lowered: Whether the I/O priority is the lowest of best effort.
        oom_score_adj: Out-of-memory score adjustment now, None if unknown.
    """

    nice: int
    io_lowered: bool
    oom_score_adj: int | None


def lower_priority(nice: int = 10, *, lower_io: bool = True, oom_score_adj: int | None = None) -> Priority:
    """Make this process give way to others, as far as the system allows.

    Args:
        nice: Niceness to reach; never lowered.
        lower_io: Ask for the lowest best-effort I/O priority (schedulers without priorities ignore it).
        oom_score_adj: Wanted adjustment; a positive one has the kernel choose this process before the trainer.
    """
    current = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > current:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError:
            pass
    io_lowered = False
    if lower_io:
        try:
            libc.syscall("ioprio_set", _IOPRIO_WHO_PROCESS, 0, _IOPRIO_BEST_EFFORT_LOWEST)
            io_lowered = True
        except OSError:
            pass
    adjustment: int | None = None
    try:
        path = Path("/proc/self/oom_score_adj")
        if oom_score_adj is not None:
            path.write_text(str(oom_score_adj))
        adjustment = int(path.read_text())
    except OSError:
        pass
    return Priority(nice=os.getpriority(os.PRIO_PROCESS, 0), io_lowered=io_lowered, oom_score_adj=adjustment)


def spare_from_oom(oom_score_adj: int) -> int | None:
    """Have the out-of-memory killer choose others before this process and what it starts, where the system lets it (CAP_SYS_RESOURCE).

    Args:
        oom_score_adj: Wanted adjustment; one that is lower already stays.

    Returns:
        The adjustment now, None if unknown.
    """
    path = Path("/proc/self/oom_score_adj")
    try:
        if int(path.read_text()) > oom_score_adj:
            path.write_text(str(oom_score_adj))
    except OSError:
        pass
    try:
        return int(path.read_text())
    except OSError:
        return None
