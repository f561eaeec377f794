"""`safehold cat` and `safehold diff`: values of leaves."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import click

from safehold.cli.output import clean, print_json, print_table
from safehold.cli.state import STEP, json_option, run_argument


@click.command()
@run_argument
@click.argument("step", type=STEP)
@click.argument("leaf")
@click.option("--rank", type=click.IntRange(0), help="Whose object, where the ranks have different ones.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["npy", "safetensors", "json"]),
    help="Default: npy for a tensor, json for an object.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to this file instead of stdout.")
@json_option
def cat(run: str, step: int, leaf: str, rank: int | None, form: str | None, output: str | None, as_json: bool) -> None:
    """Write one leaf of a checkpoint.

    Every byte is verified. STEP is a number, or 'latest'. LEAF is the name that 'safehold show --leaves' gives.
    --json is short for --format json.
    """
    from safehold.cli import values
    from safehold.cli.opening import open_run
    from safehold.errors import ConfigurationError
    from safehold.pipeline.leaf_reader import LeafReader

    form = "json" if as_json else form
    opened = open_run(run)
    with LeafReader(opened.tier, opened.load(step)) as reader:
        spec = reader.tensor_spec(leaf)
        if spec is None:
            if form not in (None, "json"):
                raise ConfigurationError(
                    f"{clean(leaf)} is no tensor and cannot be written as {form}", hint="use --format json"
                )
            data = values.object_json(reader.read_object(leaf, rank))
        elif rank is not None:
            raise ConfigurationError(f"{clean(leaf)} is a tensor, the same for all ranks", hint="leave out --rank")
        else:
            values.check_form(spec, form or "npy")
            data = values.tensor_bytes(spec, leaf, reader.read_bytes(leaf), form or "npy")
    _write(data, output, is_text=spec is None or form == "json")


@click.command()
@run_argument
@click.argument("before", type=STEP)
@click.argument("after", type=STEP)
@click.option("--exit-code", is_flag=True, help="End with 1 if they differ.")
@json_option
def diff(run: str, before: int, after: int, exit_code: bool, as_json: bool) -> int:
    """Compare two checkpoints leaf by leaf.

    Their world sizes may differ. BEFORE and AFTER are steps, or 'latest'.
    """
    from safehold.cli.opening import open_run
    from safehold.cli.progress import progress
    from safehold.pipeline import inspect

    opened = open_run(run)
    left, right = opened.load(before), opened.load(after)
    with progress("leaves") as tick:
        found = inspect.compare(opened.tier, left, right, tick)
    if as_json:
        print_json(
            {
                "before": left.commit.step,
                "after": right.commit.step,
                "same": found.is_empty,
                "num_same": found.num_same,
                "added": list(found.added),
                "removed": list(found.removed),
                "changed": [
                    {"name": c.name, "what": c.what, "before": c.before, "after": c.after} for c in found.changed
                ],
            }
        )
    else:
        rows: list[tuple[str, str, str]] = [("+", name, "") for name in found.added]
        rows += [("-", name, "") for name in found.removed]
        for change in found.changed:
            words = f"{change.what} {change.before} -> {change.after}" if change.before or change.after else change.what
            rows.append(("M", change.name, words))
        if rows:
            print_table(["", "LEAF", "CHANGE"], rows)
        click.echo(
            f"{len(found.added)} added, {len(found.removed)} removed, {len(found.changed)} changed, "
            f"{found.num_same} the same"
        )
    return 1 if exit_code and not found.is_empty else 0


def _write(data: bytes, output: str | None, *, is_text: bool) -> None:
    """Write to stdout, or to a file that appears whole or not at all."""
    from safehold.errors import ConfigurationError

    if output is None:
        if not is_text and sys.stdout.isatty():
            raise ConfigurationError("bytes are not written to a terminal", hint="use -o FILE, or --format json")
        sys.stdout.buffer.write(data)
        return
    target = Path(os.path.realpath(output))  # a link stays one
    if target.exists() and not target.is_file():
        with open(output, "wb") as file:  # a pipe or a device: nothing may take its place
            file.write(data)
        return
    if not target.parent.is_dir():
        hint = "make the directory first, or name another file with -o"
        raise ConfigurationError("there is no directory for the output", path=str(target.parent), hint=hint)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
