"""Process 1 of a host: starts, reaps, stops and kills the host's processes, as it is told from outside.

Requests are JSON over a Unix socket, with descriptors beside them, answered one by one:

    -> {"do": "start", "args": [...], "env": {...}, "cwd": ..., "fork": false} + [standard input, output, error]
    <- {"pid": 12} + [its pidfd]                                  the number inside the host
    -> {"do": "signal all", "number": 19}                         <- {}     everybody but process 1, at once
    -> {"do": "kill all"}                                         <- {}     once all are gone
    -> {"do": "socket"}                                           <- {} + [a TCP socket in this host's network]
    <- {"ended": 12, "returncode": -9}                            whenever a process that was started here ends

Invariants: one thread; a program that is forked, not started with exec, is returned through `serve` and run when all else is off the
stack. When the other end of the socket is closed, or its process has ended, this process ends, and with it (by the kernel) the whole host.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from safehold.testing.hosts import kernel

MAX_MESSAGE_BYTES = 1 << 18
KILL_S = 10.0
_WATCH_S = 5.0  # also without a wake-up, look at the owner now and then

Program = Callable[[], NoReturn]


def serve(control: socket.socket, owner_fd: int, request: dict[str, Any]) -> Program | None:
    """Serve until the owner is gone; in a forked program, return what it shall run."""
    try:
        if request["make"] == "host":
            _furnish(request)
        kernel.name_process(request["name"])
        control.send(json.dumps({"ready": True}).encode())
    except OSError as exc:
        control.send(json.dumps({"error": str(exc), "errno": exc.errno}).encode())
        os._exit(1)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    started: set[int] = set()
    while True:
        sources: list[socket.socket | int] = [control, woken, owner_fd]
        ready, _, _ = select.select(sources, [], [], _WATCH_S)
        if owner_fd in ready:
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _report_ends(control, started)
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 4)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if message["do"] == "start":
            program = _start(message, fds, control, (woken, wake, owner_fd), started)
            if program is not None:
                return program
        else:
            _carry_out(message, control, started)


def _furnish(request: dict[str, Any]) -> None:
    """Give the host its name and its own /proc, /dev/shm and /run, and put directories of the machine in their places."""
    kernel.detach_mounts()
    kernel.set_host_name(request["name"])
    kernel.mount_processes()
    kernel.mount_memory("/dev/shm", "1777")
    kernel.mount_memory("/run")
    for source, target in request["binds"]:
        if target.startswith("/run/"):
            os.makedirs(target, mode=0o700, exist_ok=True)
        if os.path.exists(target):
            kernel.bind(source, target)
    for path in request["hidden"]:
        kernel.mount_memory(path)


def _carry_out(message: dict[str, Any], control: socket.socket, started: set[int]) -> None:
    said: dict[str, Any] = {}
    fds: list[int] = []
    try:
        if message["do"] == "signal all":
            _signal_all(message["number"])
        elif message["do"] == "kill all":
            _kill_all(control, started)
        elif message["do"] == "socket":
            fds = [socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()]
        else:
            said = {"error": f"unknown request {message['do']}", "errno": errno.EINVAL}
    except OSError as exc:
        said = {"error": str(exc), "errno": exc.errno}
    socket.send_fds(control, [json.dumps(said).encode()], fds)
    for fd in fds:
        os.close(fd)


def _signal_all(number: int) -> None:
    if os.getpid() != 1:
        raise OSError(errno.EPERM, "not the first process of a host")
    try:
        os.kill(-1, number)  # all of this process namespace but this one, in one step
    except ProcessLookupError:
        pass


def _kill_all(control: socket.socket, started: set[int]) -> None:
    deadline = time.monotonic() + KILL_S
    while True:
        _signal_all(signal.SIGKILL)
        _report_ends(control, started)
        left = [entry for entry in os.listdir("/proc") if entry.isdecimal() and entry != "1"]
        if not left:
            return
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"processes {', '.join(left)} do not end (does a dead disk hold them?)")
        time.sleep(0.002)


def _start(
    message: dict[str, Any], fds: list[int], control: socket.socket, own_fds: tuple[int, ...], started: set[int]
) -> Program | None:
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
        control.close()
        for fd in own_fds:
            os.close(fd)
        return _become(message, fds)
    started.add(pid)
    for fd in fds:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
    os.close(pidfd)
    return None


def _become(message: dict[str, Any], fds: list[int]) -> Program:
    """In the child: put on environment and descriptors, then start the program, or return it where it is to run right here."""
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(message["cwd"])
        os.environ.clear()
        os.environ.update(message["env"])
        if message["fork"]:
            return lambda: _run_script(message["args"])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(message["args"][0], message["args"], message["env"])
    except OSError as exc:
        os.write(2, f"cannot start {message['args'][0]}: {exc}\n".encode())
        os._exit(127)


def _run_script(args: list[str]) -> NoReturn:
    """Be `python script args`, in an interpreter that has imported much of what it needs."""
    path = args[0]
    sys.argv = list(args)
    sys.path[0] = str(Path(path).resolve().parent)
    for entry in reversed([entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]):
        if entry not in sys.path:
            sys.path.insert(1, entry)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # a fork has its parent's state
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException as exc:
        frames = exc.__traceback__
        sys.excepthook(type(exc), exc, frames.tb_next if frames is not None else None)  # without this function
        code = 1
    _end(module, code)


def _end(module: types.ModuleType, code: int) -> NoReturn:
    """End as an interpreter does, but leave imported modules alone: taking those apart costs a rank 0.3 s of CPU."""
    getattr(threading, "_shutdown")()  # noqa: B009 - waits for threads
    atexit._run_exitfuncs()
    module.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _report_ends(control: socket.socket, started: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in started:  # else an orphan, whose end is nobody's business
            started.discard(pid)
            control.send(json.dumps({"ended": pid, "returncode": os.waitstatus_to_exitcode(status)}).encode())
