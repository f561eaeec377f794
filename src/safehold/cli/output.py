"""How things look on a terminal and as JSON.

Invariants: text that comes from a checkpoint or a file name goes through `clean`; results go to stdout, everything else
to stderr; JSON is strict (no NaN) and ends with a newline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from safehold.errors import CheckpointError
from safehold.format.names import display

ERROR_FIELDS = ("step", "rank", "node", "tier", "path", "hint")


def clean(text: object, limit: int = 400) -> str:
    """Return text without control characters, at most `limit` long."""
    return display(str(text), limit)


def print_json(value: Any) -> None:
    """Write a value to stdout."""
    import json

    click.echo(json.dumps(strict(value), indent=2, allow_nan=False))


def strict(value: Any) -> Any:
    """Return a value that JSON has: numbers that are not finite become words, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]], *, right: str = "") -> None:
    """Write aligned columns.

    Args:
        head: Names of the columns.
        rows: Cells; cleaned here.
        right: Names of columns that are aligned to the right, separated by blanks.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    to_the_right = set(right.split())
    for line in [list(head), *cells]:
        texts = [
            text.rjust(width) if name in to_the_right else text.ljust(width)
            for text, width, name in zip(line, widths, head, strict=True)
        ]
        click.echo("  ".join(texts).rstrip())


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Write one `name: value` per line, aligned."""
    listed = [(name, clean(value)) for name, value in facts]
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        click.echo(f"{name + ':':<{width + 1}} {value}")


def warn(text: object) -> None:
    """Say something on stderr that is no error."""
    click.echo(f"warning: {clean(text, 2000)}", err=True)


def print_error(exc: CheckpointError, *, as_json: bool) -> None:
    """Tell an expected error on stderr: message, where, hint."""
    if as_json:
        import json

        wire = {"class": type(exc).__name__, "message": exc.message, "exit_code": exc.exit_code, "retry": exc.retry}
        wire |= {name: value for name in ERROR_FIELDS if (value := getattr(exc, name)) is not None}
        click.echo(json.dumps({"error": strict(wire)}), err=True)
        return
    where = ", ".join(
        f"{name} {clean(value)}" for name in ERROR_FIELDS[:-1] if (value := getattr(exc, name)) is not None
    )
    click.echo(f"error: {clean(exc.message, 2000)}", err=True)
    if where:
        click.echo(f"  where: {where}", err=True)
    if exc.hint:
        click.echo(f"  hint: {clean(exc.hint, 2000)}", err=True)


def size_text(num_bytes: int | None) -> str:
    """Return a size for people."""
    if num_bytes is None:
        return "unknown"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def time_text(seconds: float) -> str:
    """Return a wall time for people, in the local time zone; empty for 0."""
    moment = _moment(seconds)
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S") if moment else ""


def time_iso(seconds: float) -> str | None:
    """Return a wall time for programs, UTC; None for 0."""
    moment = _moment(seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds > 0 else None
    except (OverflowError, ValueError, OSError):
        return None


def number_text(value: float) -> str:
    """Return a metric for people."""
    return f"{value:.6g}"
