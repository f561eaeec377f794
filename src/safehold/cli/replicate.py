"""`safehold replicate`, `fetch` and `status`: a run and its copy at a second place."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import click

from safehold.cli.output import clean, print_json, print_table, size_text, time_iso, time_text, warn
from safehold.cli.state import NUMBER, STEP, json_option, run_argument


class RateType(click.ParamType):  # type: ignore[type-arg]
    """Bytes per second, such as `200MB` or `1.5 GiB/s`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the rate as an int."""
        from safehold.cli.config_source import as_bytes

        try:
            rate = value if isinstance(value, int) else as_bytes(value.removesuffix("/s"))
        except (ValueError, LookupError):
            rate = 0
        if not 1 <= rate <= 1 << 50:
            self.fail(f"{value!r} is no rate; give bytes per second, such as 200MB", param, ctx)
        return rate


RATE = RateType()
rate_option = click.option("--rate", type=RATE, help="Send at most so many bytes per second, such as 200MB.")


@click.command()
@run_argument
@click.argument("steps", metavar="[STEP]...", type=NUMBER, nargs=-1)
@click.option("--to", "url", metavar="URL", required=True, help="The second place: a path or a URL.")
@click.option("--all", "all_steps", is_flag=True, help="Every checkpoint that is not there yet, newest first.")
@rate_option
@click.option("--keep", type=click.IntRange(min=1), help="Keep the newest so many there; older ones are deleted there.")
@json_option
@click.pass_context
def replicate(
    ctx: click.Context,
    run: str,
    steps: tuple[int, ...],
    url: str,
    all_steps: bool,
    rate: int | None,
    keep: int | None,
    as_json: bool,
) -> None:
    """Copy checkpoints to a second place.

    The newest, or the given steps, or --all. What is there already is not sent again, nor what an interrupted copy has finished.
    Ctrl-C leaves nothing half done.
    """
    from safehold.cli.opening import open_run
    from safehold.errors import CheckpointError
    from safehold.pipeline import replicas
    from safehold.policy.retention import Keep
    from safehold.tiers.open import open_tier

    if all_steps and steps:
        raise click.UsageError("give steps or --all, not both", ctx)
    opened = open_run(run)
    target = open_tier(url, name="remote")
    rule = Keep(last=keep) if keep is not None else None
    seen = replicas.survey(opened.tier, target)
    replicas.sweep_partial(seen, target)
    asked = [opened.find(step) for step in dict.fromkeys(steps)]
    if not asked:
        opened.find(None)
    done: list[Any] = []
    failures: list[CheckpointError] = []
    for commit in asked or replicas.choose(seen, all_steps=all_steps, keep=rule):
        try:
            done.append(_copy(opened.tier, target, commit, rate))
        except CheckpointError as exc:
            # One damaged checkpoint does not keep the others from being copied; the first failure is told in the end.
            failures.append(exc)
            if len(failures) > 1 or exc.exit_code != 6 or not (all_steps or len(asked) > 1):
                break
    swept = None
    if rule is not None and not failures:
        swept = replicas.let_go(opened.seen.pins, target, rule, asked_for=asked)
    if as_json and not failures:
        print_json(_outcome(done, swept))
    elif not as_json:
        _tell(done, swept, target.url)
    if failures:
        raise failures[0]


@click.command()
@click.argument("url", metavar="URL")
@click.argument("step", type=STEP, required=False)
@click.option("--to", "run", metavar="RUN", required=True, help="The run directory: new, empty, or of the same run.")
@rate_option
@json_option
def fetch(url: str, step: int | None, run: str, rate: int | None, as_json: bool) -> None:
    """Copy a checkpoint back from a second place.

    STEP is a number, or 'latest' (the default). A restore from RUN takes it then. Refused where RUN has gone on without it.
    """
    from safehold.cli.opening import open_run
    from safehold.tiers.open import open_tier

    opened = open_run(url)
    target = open_tier(run)
    result = _copy(opened.tier, target, opened.find(step), rate, restrict=True)
    if as_json:
        print_json(_outcome([result], None))
    else:
        _tell([result], None, target.url)


@click.command()
@run_argument
@click.option("--to", "url", metavar="URL", required=True, help="The second place: a path or a URL.")
@json_option
def status(run: str, url: str, as_json: bool) -> None:
    """Compare a run with its copy at a second place.

    Documents are verified and files are looked for with their sizes; 'safehold verify URL' reads their bytes.
    """
    from safehold.cli.opening import open_run
    from safehold.pipeline import replicas
    from safehold.tiers.open import open_tier

    opened = open_run(run)
    target = open_tier(url, name="remote")
    seen = replicas.survey(opened.tier, target)
    for problem in seen.there.problems:
        warn(f"{target.url}: {problem.path}: {problem.message}")
    rows = [_row(row, seen.here.files.get(row.commit, {})) for row in seen.rows]
    if as_json:
        lag = {
            "steps": seen.lag.steps,
            "seconds": seen.lag.seconds,
            "num_checkpoints": seen.lag.num_checkpoints,
            "num_bytes": seen.lag.num_bytes,
        }
        places = {"here": opened.tier.url, "there": target.url, "run_id": opened.info.run_id}
        print_json({**places, "checkpoints": rows, "lag": lag, "num_set_aside": seen.num_set_aside})
        return
    if not rows:
        click.echo("no checkpoints", err=True)
        return
    print_table(
        ["STEP", "CREATED", "SIZE", "INC", "HERE", "THERE", "SIZE THERE", "NOTES"],
        [
            (
                row["step"],
                time_text(row["created_s"] or 0.0),
                "" if row["total_bytes"] is None else size_text(row["total_bytes"]),
                f"{row['incarnation']}-{row['attempt']}",
                row["here"],
                row["there"],
                size_text(row["there_bytes"]) if row["there_bytes"] else "",
                _notes(row),
            )
            for row in rows
        ],
        right="STEP SIZE",
    )
    click.echo(_lag_text(seen.lag))
    if seen.num_set_aside:
        warn(
            f"{seen.num_set_aside} older there do not count any more; 'safehold gc {clean(url)} --set-aside' deletes them"
        )


def _copy(source: Any, target: Any, commit: Any, rate: int | None, *, restrict: bool = False) -> Any:
    """Copy one checkpoint, under a lease: the source's run may go on, and would let it go."""
    from safehold.cli.progress import progress
    from safehold.config import Config
    from safehold.errors import StepNotFoundError
    from safehold.pipeline.leases import Reader, is_committed
    from safehold.pipeline.replicate import replicate as copy
    from safehold.pipeline.trials import CopySettings
    from safehold.tiers.open import open_tier

    config = Config()
    place = open_tier(
        source.url, file_mode=0o644, dir_mode=0o755
    )  # the run's agent, which may be another user's, reads it
    leases = Reader(
        place, lease_s=config.lease_s, limit_s=config.stall_timeout_s, host=os.uname().nodename, pid=os.getpid()
    )
    with leases as reader, progress(f"step {commit.step}", in_bytes=True) as tick:
        if reader.hold(commit) and not is_committed(source, commit):
            text = "the checkpoint was un-committed before it could be read"
            hint = "'safehold ls' lists what there is now"
            raise StepNotFoundError(text, step=commit.step, path=source.url, hint=hint)
        return copy(
            source, target, commit, settings=CopySettings(rate_bytes_s=rate or 0), progress=tick, restrict=restrict
        )


def _outcome(done: list[Any], swept: Any) -> dict[str, Any]:
    """What `replicate --json` and `fetch --json` say."""
    return {
        "checkpoints": [
            {
                "step": result.commit.step,
                "incarnation": result.commit.incarnation,
                "attempt": result.commit.attempt,
                "was_there": result.was_there,
                "sent_bytes": result.sent_bytes,
                "kept_bytes": result.kept_bytes,
                "seconds": result.seconds,
            }
            for result in done
        ],
        "removed": sorted({commit.step for commit in swept.uncommitted}) if swept else [],
        "freed_bytes": swept.freed_bytes if swept else 0,
    }


def _tell(done: list[Any], swept: Any, url: str) -> None:
    for result in done:
        head = f"step {result.commit.step}"
        if result.was_there:
            click.echo(f"{head}: is there already")
            continue
        text = f"{head}: sent {size_text(result.sent_bytes)}"
        if result.kept_bytes:
            text += f", found {size_text(result.kept_bytes)} there"
        if result.seconds > 0 and result.sent_bytes:
            text += f", {size_text(round(result.sent_bytes / result.seconds))}/s"
        click.echo(f"{text} to {clean(url)}")
    if swept is not None:
        if swept.uncommitted:
            click.echo(f"removed there: {', '.join(str(c.step) for c in swept.uncommitted)}")
        if swept.problem is not None:
            warn(f"nothing was removed there: {swept.problem.message}")


def _row(row: Any, files: Mapping[str, int]) -> dict[str, Any]:
    """One checkpoint of `status --json`; `files` are those of its directory here."""
    from safehold.pipeline.joining import not_here

    manifest = next((view.manifest for view in (row.here, row.there) if view is not None and view.manifest), None)
    elsewhere = [] if row.here is None or row.here.manifest is None else not_here(row.here.manifest, files)
    here = "no" if row.here is None else "damaged" if row.here.manifest is None else "part" if elsewhere else "yes"
    words = {"complete": "yes", "missing": "no", "extra": "yes", "uncommitted": "no"}
    return {
        "step": row.commit.step,
        "incarnation": row.commit.incarnation,
        "attempt": row.commit.attempt,
        "created_s": manifest.created_s if manifest else None,
        "created": time_iso(manifest.created_s) if manifest else None,
        "total_bytes": manifest.total_bytes if manifest else None,
        "here": here,
        "there": "copying" if row.state == "partial" and row.at_work else words.get(row.state, row.state),
        "here_bytes": row.here.stored_bytes if row.here is not None else 0,
        "there_bytes": row.there_bytes,
        "not_here": elsewhere,
        "reason": row.reason,
    }


def _notes(row: dict[str, Any]) -> str:
    from safehold.format.names import numbered

    where = numbered("node", [clean(name) for name in row["not_here"]], 3)
    words = [f"not here: what {where} saved"] if row["not_here"] else []
    return "; ".join([*words, *([row["reason"]] if row["reason"] else [])])


def _lag_text(lag: Any) -> str:
    from safehold.format.names import counted

    if lag.steps is None:
        return "lag: nothing is there yet"
    if not lag.num_checkpoints:
        return "lag: none"
    span = lag.seconds if math.isfinite(lag.seconds) else 0.0
    minutes, seconds = divmod(round(span), 60)
    hours, minutes = divmod(minutes, 60)
    time = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return f"lag: {counted(lag.num_checkpoints, 'checkpoint')}, {counted(lag.steps, 'step')}, {time}, {size_text(lag.num_bytes)}"
