"""Entry of the agent process: `python -m safehold.agent.main --run RUN --slot DIRECTORY`.

Started by trainers, once per run and node; holds the slot's lock as long as it lives and quietly leaves if another one does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from safehold._version import __version__
from safehold.agent.event_log import EventLog
from safehold.agent.plugins import install_listener
from safehold.agent.server import AgentServer
from safehold.errors import CheckpointError
from safehold.events import EventStream
from safehold.host.process import start_ticks
from safehold.host.runtime import AgentInfo, RunSlot
from safehold.host.sockets import listen

LOCK_S = 0.5  # outlasts those who only look whether it is taken


def main(argv: list[str] | None = None) -> int:
    """Run an agent until it may leave; returns the exit code."""
    parser = argparse.ArgumentParser(prog="safehold.agent", description="The per-node agent of one run.")
    parser.add_argument("--run", required=True, help="run directory, as path or URL")
    parser.add_argument("--slot", required=True, help="the run's slot in the runtime directory")
    options = parser.parse_args(argv)
    slot = RunSlot(Path(options.slot))
    os.umask(0o077)  # whatever the job's was: what agent and flushers make is for this user, and usable by it
    try:
        lock = slot.lock(timeout_s=LOCK_S)
        if lock is None:
            return 0
        with lock:
            _serve(options.run, slot)
    except CheckpointError as exc:
        print(f"safehold agent: {exc}", file=sys.stderr)  # noqa: T201 - the log of the slot
        return exc.exit_code
    return 0


def _serve(run: str, slot: RunSlot) -> None:
    events = EventStream("agent")
    events.subscribe(EventLog())
    install_listener(events)
    log_fd = slot.open_log()
    with listen(slot.socket_path) as listener:
        server = AgentServer(run, listener, log_fd=log_fd, events=events)

        def on_term(number: int, frame: FrameType | None) -> None:
            server.terminate()

        signal.signal(signal.SIGTERM, on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        pid = os.getpid()
        slot.write_info(
            AgentInfo(pid=pid, start_ticks=start_ticks(pid), version=__version__, run=run, started_s=time.time())
        )
        server.serve()
    slot.info_path.unlink(missing_ok=True)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
