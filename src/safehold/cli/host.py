"""`safehold agents` and `safehold config`: this host and its settings."""

from __future__ import annotations

import time
from typing import Any

import click

from safehold.cli.output import clean, print_json, print_table, time_iso, time_text
from safehold.cli.state import json_option


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Also slots whose agent has ended.")
@json_option
def agents(show_all: bool, as_json: bool) -> None:
    """List the agents of this host.

    With the host memory that each has, and the newest step that is in memory only. Those of other users are not shown.
    """
    from safehold.cli.slots import all_slots, memory_of

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
                "extra": dict(info.extra) if info else {},
                "memory": memory_of(slot) if alive else None,
            }
        )
    if as_json:
        print_json(entries)
    elif not entries:
        click.echo("no agents", err=True)
    else:
        print_table(
            ["PID", "ALIVE", "STARTED", "AGE", "VERSION", "MEMORY", "RUN", "LOG"],
            [_row(e) for e in entries],
            right="PID AGE",
        )


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    started = entry["started_s"] or 0.0
    age = f"{(time.time() - started) / 3600:.1f} h" if started else ""
    alive = "yes" if entry["alive"] else "no"
    memory = entry["memory"] or {"bytes": 0, "step": None, "copies": {}}
    held = f"{memory['bytes'] / 1e9:.1f} GB" if memory["bytes"] else ""
    if memory["step"] is not None:
        held += f", step {memory['step']}"
    if memory["copies"]:
        held += f", copies of {len(memory['copies'])}"
    return entry["pid"], alive, time_text(started), age, entry["version"], held, clean(entry["run"]), entry["log"]


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
