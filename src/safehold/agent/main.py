"""Entry of the agent process: `python -m safehold.agent.main --run RUN --slot DIRECTORY [--stay SECONDS]`.

Started by trainers, once per run and node, or ahead of them by `safehold agent` (`--stay`); holds the slot's lock as long as it
lives. Where another one does, it leaves: quietly, unless it was started ahead.
"""

from __future__ import annotations

import argparse
import math
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
from safehold.errors import AgentUnavailableError, CheckpointError
from safehold.events import EventStream
from safehold.host.process import spare_from_oom, start_ticks
from safehold.host.runtime import AgentInfo, RunSlot
from safehold.host.sockets import listen
from safehold.policy.survival import OOM_SCORE_ADJ

LOCK_S = 0.5  # outlasts those who only look whether it is taken


def main(argv: list[str] | None = None) -> int:
    """Run an agent until it may leave; returns the exit code."""
    parser = argparse.ArgumentParser(prog="safehold.agent", description="The per-node agent of one run.")
    parser.add_argument("--run", required=True, help="run directory, as path or URL")
    parser.add_argument("--slot", required=True, help="the run's slot in the runtime directory")
    parser.add_argument("--stay", type=float, help="serve in the foreground, and stay so long without trainers")
    options = parser.parse_args(argv)
    slot = RunSlot(Path(options.slot))
    os.umask(0o077)  # whatever the job's was: what agent and flushers make is for this user, and usable by it
    try:
        lock = slot.lock(timeout_s=LOCK_S)
        if lock is None:
            if options.stay is None:
                return 0
            hint = (
                "look with 'safehold agents'; it may have been started by a trainer, and end some time after the last"
            )
            raise AgentUnavailableError("an agent of this run lives here already", path=str(slot.directory), hint=hint)
        with lock:
            _serve(options.run, slot, options.stay)
    except CheckpointError as exc:
        hint = f"\n  hint: {exc.hint}" if exc.hint and options.stay is not None else ""
        print(f"safehold agent: {exc}{hint}", file=sys.stderr)  # noqa: T201 - the log of the slot
        return exc.exit_code
    return 0


def _serve(run: str, slot: RunSlot, stay_s: float | None) -> None:
    events = EventStream("agent")
    events.subscribe(EventLog())
    install_listener(events)
    log_fd = slot.open_log()
    spare_from_oom(OOM_SCORE_ADJ)
    with listen(slot.socket_path) as listener:
        server = AgentServer(run, listener, log_fd=log_fd, events=events, stay_s=stay_s)

        def on_term(number: int, frame: FrameType | None) -> None:
            server.terminate()

        signal.signal(signal.SIGTERM, on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN if stay_s is None else on_term)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        pid = os.getpid()
        slot.write_info(
            AgentInfo(
                pid=pid,
                start_ticks=start_ticks(pid),
                version=__version__,
                run=run,
                started_s=time.time(),
                extra={} if stay_s is None else {"stay_s": f"{stay_s:g}"},
            )
        )
        if stay_s is not None:
            until = (
                "until it is told to end" if math.isinf(stay_s) else f"until {stay_s:g} s have passed without trainers"
            )
            print(f"safehold agent: serves {run} in {slot.directory}, {until}", file=sys.stderr, flush=True)  # noqa: T201
        server.serve()
    slot.info_path.unlink(missing_ok=True)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
