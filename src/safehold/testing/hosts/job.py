"""A training job over several hosts: ranks that are started as torchrun starts them, on each host alike.

    with run_job(hosts, 2, "train.py", ["--steps", "20"]) as job:
        job.until("step 8")
        job.kill_host(1)
        codes = job.wait(60)

Invariants: every wait has a deadline and shows what the ranks printed; whatever was started is killed when the block ends (agents, which
are no ranks, live on as long as their host).
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from safehold.testing.hosts import timeline
from safehold.testing.hosts.hosts import Host, Hosts
from safehold.testing.hosts.processes import HostProcess

FIRST_PORT = 29500
_CHUNK_BYTES = 1 << 16
_LAST_OUTPUT_S = 2.0
_SHOWN_LINES = 60


@dataclass(slots=True, eq=False)
class JobRank:
    """One rank.

    Attributes:
        rank: Its number in the job.
        host: Where it runs.
        process: Its process.
        lines: What it printed so far, both streams, without line ends.
    """

    rank: int
    host: Host
    process: HostProcess
    lines: list[str] = field(default_factory=list)
    rest: bytes = b""

    @property
    def label(self) -> str:
        """Host and rank, as lines of output are headed."""
        return f"{self.host.name} rank {self.rank}"


class Job:
    """All ranks of one start of a job; made by `run_job`, a context manager."""

    def __init__(self, hosts: Hosts, timeout_s: float, echo: Callable[[str], None] | None) -> None:
        self.ranks: list[JobRank] = []
        self._hosts = hosts
        self._deadline = time.monotonic() + timeout_s
        self._echo = echo
        self._said: list[str] = []
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._pump = threading.Thread(target=self._collect, name="job-output", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, rank: int, host: Host, process: HostProcess) -> None:
        """Take in a rank that was started; for `run_job`."""
        assert process.stdout is not None
        entry = JobRank(rank, host, process)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, entry)
        self.ranks.append(entry)

    def begin(self) -> None:
        """All ranks were added: collect what they print."""
        self._pump.start()

    # -- waiting -----------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait for all ranks and return their exit codes, negative for signals.

        Args:
            timeout_s: Deadline; never later than the job's own.

        Raises:
            TimeoutError: Some still run; they are named, shown and killed.
        """
        deadline = self._limit(timeout_s)
        late = []
        for entry in self.ranks:
            try:
                entry.process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                late.append(entry)
        if late:
            names = ", ".join(entry.label for entry in late)
            self.kill()
            raise TimeoutError(f"{names} still ran when the time was over\n{self.tail()}")
        self._drain()
        return [entry.process.wait(0.0) for entry in self.ranks]

    def until(self, text: str, *, rank: int | None = None, timeout_s: float | None = None) -> str:
        """Wait until a rank (None: any) has printed a line with this text in it; returns the line.

        Raises:
            TimeoutError: None did, or all ranks have ended before.
        """
        deadline = self._limit(timeout_s)
        with self._changed:
            while True:
                for entry in self.ranks:
                    if rank in (None, entry.rank):
                        found = next((line for line in entry.lines if text in line), None)
                        if found is not None:
                            return found
                waiting_s = deadline - time.monotonic()
                if waiting_s <= 0 or not self._pump.is_alive():
                    why = "the time was over" if waiting_s <= 0 else "all ranks had ended"
                    raise TimeoutError(f"nobody printed {text!r} before {why}\n{self.tail()}")
                self._changed.wait(min(waiting_s, 0.2))

    def _limit(self, timeout_s: float | None) -> float:
        return self._deadline if timeout_s is None else min(self._deadline, time.monotonic() + timeout_s)

    # -- ending ------------------------------------------------------------------------------------------------------------

    def kill_host(self, index: int) -> None:
        """Lose a node with everything on it."""
        self._hosts[index].kill()

    def kill(self) -> None:
        """SIGKILL to all ranks, at once; wait until they are gone."""
        for entry in self.ranks:
            if entry.process.poll() is None:
                entry.process.signal(9)
        for entry in self.ranks:
            entry.process.wait(20.0)
        self._drain()

    def close(self) -> None:
        """Kill what is left."""
        self.kill()
        self._stop.set()
        if self._pump.is_alive():
            self._pump.join(5.0)
        self._selector.close()
        for entry in self.ranks:
            entry.process.close()

    # -- output ------------------------------------------------------------------------------------------------------------

    def output(self, rank: int) -> str:
        """What a rank printed so far."""
        return "\n".join(self.ranks[rank].lines)

    @property
    def text(self) -> str:
        """What all ranks printed so far, in the order in which it came, each line headed by host and rank."""
        with self._changed:
            return "\n".join(self._said)

    def tail(self, num_lines: int = _SHOWN_LINES) -> str:
        """The end of `text`."""
        return "\n".join(self.text.splitlines()[-num_lines:])

    def _drain(self) -> None:
        """Let what ranks that ended have printed arrive."""
        self._pump.join(_LAST_OUTPUT_S)

    def _collect(self) -> None:
        while self._selector.get_map() and not self._stop.is_set():
            for key, _ in self._selector.select(0.2):
                entry: JobRank = key.data
                try:
                    data = os.read(key.fd, _CHUNK_BYTES)
                except BlockingIOError:
                    continue
                if not data:
                    self._selector.unregister(key.fileobj)
                self._take(entry, data)
        with self._changed:
            self._changed.notify_all()

    def _take(self, entry: JobRank, data: bytes) -> None:
        *lines, entry.rest = (entry.rest + data).split(b"\n")
        if not data and entry.rest:
            lines, entry.rest = [entry.rest], b""
        for raw in lines:
            line = raw.decode(errors="replace")
            moment = timeline.heard(line, entry.host.index)
            if moment is not None:
                self._hosts.timeline.put(moment)
                line = f"* {moment.what} {moment.detail}".rstrip()
            headed = f"[{entry.label}] {line}"
            with self._changed:
                entry.lines.append(line)
                self._said.append(headed)
                self._changed.notify_all()
            if self._echo is not None:
                self._echo(headed)


def run_job(
    hosts: Hosts,
    ranks_per_host: int,
    script: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    on: Sequence[int] | None = None,
    fork: bool = True,
    timeout_s: float = 60.0,
    echo: Callable[[str], None] | None = None,
) -> Job:
    """Start a job and return it at once.

    Args:
        hosts: Where.
        ranks_per_host: How many ranks on each host.
        script: A Python script; it finds its place in the variables that torchrun sets.
        args: Its arguments.
        env: Added to the environment of every rank.
        on: Indexes of the hosts that take part, node 0 first; None: all.
        fork: Fork ranks from the zygote (see `Zygote`) instead of starting an interpreter for each.
        timeout_s: For the whole job: no wait for it lasts longer.
        echo: Given every line of output as it comes, headed by host and rank.
    """
    nodes = [hosts[index] for index in (range(len(hosts)) if on is None else on)]
    job = Job(hosts, timeout_s, echo)
    hosts.jobs_started += 1
    port = FIRST_PORT + hosts.jobs_started  # an earlier job's connections may linger at its port
    command = [*([] if fork else [sys.executable]), str(Path(script).resolve()), *args]
    try:
        for group_rank, host in enumerate(nodes):
            for local_rank in range(ranks_per_host):
                variables = _torchrun_variables(nodes, ranks_per_host, group_rank, local_rank, port)
                process = host.popen(
                    command,
                    env={**variables, **(env or {})},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    fork=fork,
                )
                job.add(group_rank * ranks_per_host + local_rank, host, process)
    except BaseException:
        job.begin()
        job.close()
        raise
    job.begin()
    return job


def _torchrun_variables(
    nodes: Sequence[Host], ranks_per_host: int, group_rank: int, local_rank: int, port: int
) -> dict[str, str]:
    """What torchrun gives a rank (torch/distributed/elastic/agent/server/local_elastic_agent.py, `_start_workers`)."""
    rank, world_size = group_rank * ranks_per_host + local_rank, len(nodes) * ranks_per_host
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(group_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": nodes[0].address("compute"),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"hosts-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONUNBUFFERED": "1",
    }
