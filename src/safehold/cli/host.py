"""`safehold agent`, `safehold agents` and `safehold config`: this host and its settings."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from safehold.cli.output import clean, print_json, print_table, size_text, time_iso, time_text
from safehold.cli.state import json_option

STATUS_TIMEOUT_S = 1.0
"""For the question to an agent: one that hangs is shown without the answer."""

if TYPE_CHECKING:
    from safehold.host.runtime import AgentInfo


@click.command()
@click.argument("run")
@click.option("--idle-exit", "idle_exit_s", type=click.FloatRange(min=0), help="Leave after so many seconds alone.")
def agent(run: str, idle_exit_s: float | None) -> None:
    """Serve a run on this node, ahead of its trainers.

    Runs in the foreground until it is told to end (SIGTERM, Ctrl-C), in the job step, unit or container that it was started in, so
    that it and the memory that it keeps for a restart outlive what ends the trainers. They find it where they have the same runtime
    directory.
    """
    from safehold.agent.start import ahead_command
    from safehold.cli import config_source
    from safehold.config import Config

    config = config_source.build(Config, config_source.load(Config))
    command = ahead_command(run, config, math.inf if idle_exit_s is None else idle_exit_s)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(command[0], command)


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Also slots whose agent has ended.")
@json_option
def agents(show_all: bool, as_json: bool) -> None:
    """List the agents of this host.

    With the host memory that each has, and the newest step that is in memory only. Those of other users are not shown.
    """
    from safehold.cli.slots import all_slots, memory_of, status_of

    entries = []
    for slot in all_slots():
        alive = slot.is_locked()
        if not alive and not show_all:
            continue
        info = slot.read_info()
        facts = status_of(slot) if alive else {}
        entries.append(
            {
                "key": slot.key,
                "alive": alive,
                "pid": info.pid if info else None,
                "run": info.run if info else None,
                "version": info.version if info else None,
                "started_s": info.started_s if info else None,
                "started": time_iso(info.started_s) if info else None,
                "log": str(slot.log_path),
                **_fate(info if alive else None),
                "protected_step": _protected_step(facts),
                "extra": dict(info.extra) if info else {},
                "remote": _remote(facts),
                "memory": memory_of(facts),
            }
        )
    if as_json:
        print_json(entries)
    elif not entries:
        click.echo("no agents", err=True)
    else:
        columns = [
            "PID",
            "ALIVE",
            "STARTED",
            "AGE",
            "VERSION",
            "LIMIT",
            "OOM",
            "GROUP",
            "MEMORY",
            "RUN",
            "REMOTE",
            "LOG",
        ]
        rows = [_row(entry) for entry in entries]
        if any(entry["protected_step"] is not None for entry in entries):
            columns.insert(-1, "PROTECTED")
            steps = ["" if entry["protected_step"] is None else f"step {entry['protected_step']}" for entry in entries]
            rows = [(*row[:-1], step, row[-1]) for row, step in zip(rows, steps, strict=True)]
        print_table(columns, rows, right="PID AGE LIMIT OOM")


def _protected_step(facts: dict[str, Any]) -> int | None:
    """Return the last step whose redundancy on other nodes is complete, as its agent knows; None where it does not, or does not answer."""
    session = facts.get("session")
    step = session.get("protected_step") if isinstance(session, dict) else None
    return step if isinstance(step, int) else None


def _fate(info: AgentInfo | None) -> dict[str, Any]:
    """What an agent shares its fate with; nothing of one that cannot be seen from here (in another container, say)."""
    from safehold.host import cgroups, memory
    from safehold.host.process import find

    process = find(info.pid, info.start_ticks) if info else None
    if process is None:
        return {"control_group": None, "memory_limit_bytes": None, "oom_score_adj": None}
    around = cgroups.surroundings(process.pid)
    limit = memory.group_limit_bytes(process.pid)
    process.close()
    return {
        "control_group": around.group or None,
        "memory_limit_bytes": limit,
        "oom_score_adj": around.oom_score_adj,
    }


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    started = entry["started_s"] or 0.0
    age = f"{(time.time() - started) / 3600:.1f} h" if started else ""
    alive = "yes" if entry["alive"] else "no"
    limit, adjustment = entry["memory_limit_bytes"], entry["oom_score_adj"]
    fate = (
        "" if limit is None else size_text(limit),
        "" if adjustment is None else adjustment,
        clean(entry["control_group"] or ""),
    )
    held, run, remote = _memory_text(entry["memory"]), clean(entry["run"]), _remote_text(entry["remote"])
    return entry["pid"], alive, time_text(started), age, entry["version"], *fate, held, run, remote, entry["log"]


def _memory_text(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return ""
    held = [f"{memory['bytes'] / 1e9:.1f} GB"] if memory["bytes"] else []
    if memory["step"] is not None:
        held.append(f"step {memory['step']}")
    if memory["copies"]:
        held.append(f"copies of {len(memory['copies'])}")
    if memory["parity"] is not None:
        held.append(f"parity of step {memory['parity']}")
    return ", ".join(held)


def _remote(facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return what an agent says of the second place; one that does not answer, or is not beside rank 0, says nothing of it."""
    session = facts.get("session")
    found = session.get("remote") if isinstance(session, dict) else None
    return dict(found) if isinstance(found, dict) else None


def _remote_text(remote: dict[str, Any] | None) -> str:
    if remote is None:
        return ""
    if remote["last_error"]:
        return f"failed: {clean(remote['last_error'].splitlines()[0])}"
    if remote["lag_checkpoints"]:
        steps, seconds = remote["lag_steps"], remote["lag_seconds"]
        lag = "nothing copied by this job yet" if steps is None else f"lag {steps} steps, {seconds:.0f} s"
        return f"{lag}, copying {size_text(remote['copying_bytes'])}" if remote["copying_bytes"] else lag
    return "" if remote["newest_step"] is None else f"has step {remote['newest_step']}"


@click.group()
def config() -> None:
    """Show the settings and where each comes from."""


@config.command("show")
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False),
    help="Settings file; default: $SAFEHOLD_CONFIG, else safehold.toml here.",
)
@json_option
def config_show(path: str | None, as_json: bool) -> None:
    """Show every setting, its value, and where that comes from.

    A later origin wins: default, file, environment (SAFEHOLD_<NAME>), argument.
    """
    from safehold.cli import config_source
    from safehold.config import Config

    sources = config_source.load(Config, path=path)
    built = config_source.build(Config, sources)
    values = {name: getattr(built, name) for name in sources}
    if as_json:
        print_json({name: {"value": values[name], "origin": origin} for name, (_, origin) in sources.items()})
        return
    print_table(
        ["SETTING", "VALUE", "ORIGIN"],
        [(name, "''" if values[name] == "" else values[name], origin) for name, (_, origin) in sources.items()],
    )
