"""Forks ranks from one process that has imported everything already, so that a start costs milliseconds instead of seconds.

Started by `puppets.Zygote` with one end of a Unix socket. It takes requests (JSON, with descriptors beside them) and reports ends:

    -> {"env": {...}, "cwd": "..."} + [the rank's end of its command socket, its output file]
    <- {"pid": 123}
    <- {"ended": 123, "returncode": -9}

Invariants: the process that forks has one thread and has run no computation. A child has a session of its own, ends the way an ordinary
program does (so `atexit` runs), and ends when its command socket ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any

import own_disks

MAX_MESSAGE_BYTES = 1 << 20


def main() -> None:
    import puppet_actions  # everything that a rank needs, imported once

    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ends(control)
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 2)
        if not data:
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            os.close(woken)
            os.close(wake)
            commands = _become(request, fds)
            puppet_actions.serve(commands)
            return
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())


def _become(request: dict[str, Any], fds: list[int]) -> socket.socket:
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    command_fd, output_fd = fds
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    os.set_inheritable(command_fd, False)
    if disk := os.environ.get("PUPPET_DISK"):
        own_disks.mount(disk, os.environ["PUPPET_RUN"])
    return socket.socket(fileno=command_fd)


def _report_ends(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(json.dumps({"ended": pid, "returncode": os.waitstatus_to_exitcode(status)}).encode())


if __name__ == "__main__":
    main()
