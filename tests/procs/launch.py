"""Starts real ranks for a test: N processes that run one Python function each, joined by gloo on loopback.

    results = run("state_workers:ddp", 2, args={"seed": 1})

The function is `fn(rank: int, world_size: int, args: dict) -> JSON-able`. Rendezvous is a file in a private directory, so
no port is needed. Every wait is bounded; whatever was started is killed by its own process id, also if the test fails.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_STDERR_TAIL = 4000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: The rank.
        returncode: As `subprocess` gives it; negative for a signal; None if it was still running at the deadline.
        result: What the function returned; None if it did not return.
        error: Its traceback, if it raised.
        stderr: The end of what it wrote there.
    """

    rank: int
    returncode: int | None
    result: Any
    error: str | None
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process ended well."""
        return self.returncode == 0 and self.error is None


class Ranks:
    """Ranks that are running; made by `started`."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], directory: Path) -> None:
        self.processes = processes
        self._directory = directory

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signum)

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Wait until all have ended or the time is over; those still running stay so."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [self._outcome(rank) for rank in range(len(self.processes))]

    def _outcome(self, rank: int) -> Outcome:
        said: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            said = json.loads((self._directory / f"result-{rank}.json").read_text())
        stderr = (self._directory / f"stderr-{rank}.txt").read_bytes()[-_STDERR_TAIL:].decode(errors="replace")
        return Outcome(
            rank=rank,
            returncode=self.processes[rank].poll(),
            result=said.get("result"),
            error=said.get("error"),
            stderr=stderr,
        )


@contextlib.contextmanager
def started(
    function: str,
    world_size: int,
    args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    *,
    backend: str | None = "gloo",
    python_path: str | os.PathLike[str] | None = None,
) -> Iterator[Ranks]:
    """Start the ranks; on leaving, kill those that are left.

    Args:
        function: `module:function`; the module is found in this folder, or in `python_path`.
        world_size: Number of ranks.
        args: Handed to the function; JSON-able.
        env: Added to the environment.
        backend: Of the process group that is made before and destroyed after the function; None for none (no torch).
        python_path: A folder to import from, before this one.
    """
    with tempfile.TemporaryDirectory(prefix="safehold-ranks-") as name:
        directory = Path(name)
        (directory / "args.json").write_text(json.dumps(args or {}))
        paths = [str(path) for path in (python_path, _HERE, os.environ.get("PYTHONPATH")) if path]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                environment = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    **(env or {}),
                }
                command = [sys.executable, str(_HERE / "launch.py"), function, name, backend or ""]
                with (directory / f"stderr-{rank}.txt").open("wb") as stderr:
                    processes.append(
                        subprocess.Popen(
                            command, env=environment, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
                        )
                    )
            yield Ranks(processes, directory)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
            for process in processes:
                process.wait()


def run(
    function: str,
    world_size: int,
    args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 90.0,
    **options: Any,
) -> list[Any]:
    """Run the function on every rank and return the results by rank; arguments as for `started`.

    Raises:
        AssertionError: A rank failed or was not done in time; says which and shows its traceback.
    """
    with started(function, world_size, args, env, **options) as ranks:
        outcomes = ranks.wait(timeout_s)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        told = [
            f"rank {o.rank}: {'still running after ' + str(timeout_s) + ' s' if o.returncode is None else o.returncode}\n"
            f"{o.error or o.stderr}"
            for o in failed
        ]
        raise AssertionError(f"{function} failed on {len(failed)} of {world_size} ranks\n" + "\n".join(told))
    return [outcome.result for outcome in outcomes]


def _child(function: str, directory: Path, backend: str) -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    said: dict[str, Any] = {}
    try:
        args = json.loads((directory / "args.json").read_text())
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
        if backend:
            said["result"] = _in_group(call, backend, directory, rank, world_size, args)
        else:
            said["result"] = call(rank, world_size, args)
        text = json.dumps(said)
    except BaseException:
        said = {"error": traceback.format_exc()}
        text = json.dumps(said)
    temporary = directory / f"result-{rank}.tmp"
    temporary.write_text(text)
    temporary.rename(directory / f"result-{rank}.json")
    return 1 if "error" in said else 0


def _in_group(call: Any, backend: str, directory: Path, rank: int, world_size: int, args: dict[str, Any]) -> Any:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(directory / "rendezvous"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    result = call(rank, world_size, args)
    dist.barrier()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    code = _child(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # torch now and then aborts while an interpreter with process groups is taken apart
