"""Forks hosts: a process that has imported what their processes need, so that a rank starts in milliseconds.

Three kinds of process come from it, all by fork: a *switch*, which has a network namespace; a *host*, which is process 1 of its own
process namespace and has network, host name, mounts and IPC of its own; and programs, which a host forks (`init`). Requests are JSON over a
Unix socket, with descriptors beside them:

    -> {"make": "host" or "switch", "name": ..., "binds": ...} + [the new process's control socket]
    <- {"pid": 123} + [its pidfd], or {"error": ..., "errno": ...}

Invariants: the process that forks has one thread. Every process that was made here watches the process that asked for it (by a pidfd) and
ends with it, so that nothing is left behind even after SIGKILL: with process 1 the kernel ends a host's processes, with the last of them
its network.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
from typing import Any

from safehold.testing.hosts import init, kernel

MAX_MESSAGE_BYTES = 1 << 18
HOST_FLAGS = (
    kernel.NEW_NETWORK | kernel.NEW_HOST_NAME | kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_PROCESSES
)  # the user namespace stays: root here is root there

Program = init.Program


def main(control_fd: int, owner: int, preload: list[str]) -> Program | None:
    """Serve until the owner is gone; in a forked program, return what it shall run."""
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays shared: no collection in a fork touches it
    kernel.name_process("safehold-zygote")
    kernel.adopt_orphans()
    control = socket.socket(fileno=control_fd)
    owner_fd = os.pidfd_open(owner)
    control.send(b"{}")
    while True:
        sources: list[socket.socket | int] = [control, owner_fd]
        ready, _, _ = select.select(sources, [], [], 1.0)
        _reap()
        if owner_fd in ready:
            return None
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 4)
        if not data:
            return None
        program = _make(json.loads(data), fds[0], control, owner_fd)
        if program is not None:
            return program


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _make(request: dict[str, Any], served_fd: int, control: socket.socket, owner_fd: int) -> Program | None:
    """Fork a switch or a host; returns None in the zygote, and in what was forked the program to run."""
    go_read, go = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        control.close()
        os.close(told)
        return _become(request, served_fd, owner_fd, go, go_read, tell)
    for fd in (served_fd, tell, go_read):
        os.close(fd)
    with os.fdopen(told, "rb") as answer:
        said = json.loads(answer.readline() or b'{"error": "it ended at once", "errno": 0}')
    if "error" in said:
        control.send(json.dumps(said).encode())
    else:
        pidfd = os.pidfd_open(said["pid"])  # it waits for `go`, so it is still there
        socket.send_fds(control, [json.dumps(said).encode()], [pidfd])
        os.close(pidfd)
    os.close(go)
    return None


def _become(request: dict[str, Any], served_fd: int, owner_fd: int, go: int, go_read: int, tell: int) -> Program | None:
    is_host = request["make"] == "host"
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        kernel.unshare(HOST_FLAGS if is_host else kernel.NEW_NETWORK)
        pid = os.fork() if is_host else 0
    except OSError as exc:
        os.write(tell, json.dumps({"error": str(exc), "errno": exc.errno}).encode() + b"\n")
        os._exit(1)
    if pid:  # the one in the middle; the zygote adopts the host
        os.write(tell, json.dumps({"pid": pid}).encode() + b"\n")
        os._exit(0)
    os.close(go)
    if not is_host:
        os.write(tell, json.dumps({"pid": os.getpid()}).encode() + b"\n")
    os.close(tell)
    os.read(go_read, 1)
    os.close(go_read)
    return init.serve(socket.socket(fileno=served_fd), owner_fd, request)


def run(arguments: list[str]) -> int:
    """Be the process; returns the exit code of whatever it has become."""
    control_fd, owner, preload = arguments
    found = main(int(control_fd), int(owner), list(filter(None, preload.split(","))))
    return 0 if found is None else found()
