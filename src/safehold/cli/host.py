"""`safehold agents` and `safehold config`: this host and its settings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from safehold.cli.output import clean, print_json, print_table, time_iso, time_text
from safehold.cli.state import json_option
from safehold.errors import CheckpointError

if TYPE_CHECKING:
    from safehold.host.runtime import RunSlot

STATUS_TIMEOUT_S = 1.0
"""For the question to an agent: one that hangs is shown without the answer."""


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Also slots whose agent has ended.")
@json_option
def agents(show_all: bool, as_json: bool) -> None:
    """List the agents of this host.

    Those of other users are not shown.
    """
    from safehold.cli.slots import all_slots

    entries = []
    for slot in all_slots():
        alive = slot.is_locked()
        if not alive and not show_all:
            continue
        info = slot.read_info()
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
                "protected_step": _protected_step(slot) if alive else None,
                "extra": dict(info.extra) if info else {},
            }
        )
    if as_json:
        print_json(entries)
    elif not entries:
        click.echo("no agents", err=True)
    else:
        columns = ["PID", "ALIVE", "STARTED", "AGE", "VERSION", "RUN", "LOG"]
        rows = [_row(entry) for entry in entries]
        if any(entry["protected_step"] is not None for entry in entries):
            columns.insert(-1, "PROTECTED")
            steps = ["" if entry["protected_step"] is None else f"step {entry['protected_step']}" for entry in entries]
            rows = [(*row[:-1], step, row[-1]) for row, step in zip(rows, steps, strict=True)]
        print_table(columns, rows, right="PID AGE")


def _protected_step(slot: RunSlot) -> int | None:
    """Return the last step whose redundancy on other nodes is complete, as its agent knows; None where it does not, or does not answer."""
    from safehold.agent.start import ask_status

    try:
        session = ask_status(slot, STATUS_TIMEOUT_S).get("session")
    except CheckpointError:
        return None
    step = session.get("protected_step") if isinstance(session, dict) else None
    return step if isinstance(step, int) else None


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    started = entry["started_s"] or 0.0
    age = f"{(time.time() - started) / 3600:.1f} h" if started else ""
    alive = "yes" if entry["alive"] else "no"
    return entry["pid"], alive, time_text(started), age, entry["version"], clean(entry["run"]), entry["log"]


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
