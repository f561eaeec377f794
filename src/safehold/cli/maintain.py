"""`safehold verify`, `rm`, `pin`, `unpin` and `gc`: looking after a run directory."""

from __future__ import annotations

import math
from typing import Any

import click

from safehold.cli.output import clean, print_json, size_text, warn
from safehold.cli.state import NUMBER, STEP, json_option, run_argument


@click.command()
@run_argument
@click.argument("step", type=STEP, required=False)
@click.option("--all", "all_steps", is_flag=True, help="Verify every checkpoint.")
@click.option("--mark", is_flag=True, help="Quarantine what is damaged, and clear the quarantine of what is whole.")
@json_option
@click.pass_context
def verify(ctx: click.Context, run: str, step: int | None, all_steps: bool, mark: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and check it.

    STEP is a number, or 'latest' (the default). Ends with 6 if anything is wrong with what could be read: what other nodes keep on
    disks of their own cannot, and is named.
    """
    from safehold.cli.opening import open_run
    from safehold.cli.progress import progress
    from safehold.pipeline.verify import verify as verify_bytes

    if all_steps and step is not None:
        raise click.UsageError("give a step or --all, not both", ctx)
    opened = open_run(run)
    commits = opened.believed if all_steps else [opened.find(step)]
    reports = []
    for commit in commits:
        with progress(f"step {commit.step}", in_bytes=True) as tick:
            report = verify_bytes(opened.tier, commit, tick)
        reports.append(report)
        if mark:
            _mark(opened, report)
        if not as_json:
            _tell_report(
                report, quarantined=commit in opened.seen.quarantined and not (mark and _may_clear(opened, report))
            )
    if as_json:
        print_json([_report(report) for report in reports])
    elif not reports:
        click.echo("no checkpoints", err=True)
    elif step is None:
        _tell_how_many(reports, len(opened.believed), run)
    if not as_json:
        _tell_not_read(reports)
    return 0 if all(report.ok for report in reports) else 6


@click.command()
@run_argument
@click.argument("steps", metavar="STEP...", type=NUMBER, nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Even if no good checkpoint is left, or somebody reads it.")
@click.option("--now", is_flag=True, help="Free the space at once; whoever is reading the checkpoint fails.")
@json_option
def rm(run: str, steps: tuple[int, ...], force: bool, now: bool, as_json: bool) -> None:
    """Delete checkpoints.

    They are un-committed at once; their space is freed by the run's agent, by 'safehold gc', or at once with --now, or
    where storage is too full to note that they go.
    Pinned checkpoints are refused, and so are, without --force, the last good one and one that a reader holds a lease on.
    """
    from safehold.cli.opening import open_run
    from safehold.pipeline import sweep
    from safehold.pipeline.leases import Observer

    opened = open_run(run)
    commits = [opened.find(step) for step in dict.fromkeys(steps)]
    _refuse_pinned(opened, commits)
    observer = None if force else Observer()
    if observer is not None:
        _refuse_leased(opened, commits, observer.look(opened.tier))
        _refuse_last_good(opened, commits)
    incarnation = opened.seen.newest
    freed = 0
    for commit in sorted(commits):
        _, size = sweep.take_away(opened.tier, commit, incarnation, "safehold rm", opened.seen, observer)
        freed += size
    if now:
        doomed = [c for c in opened.seen.listing.attempts if c.step in {commit.step for commit in commits}]
        _, size = sweep.delete_bytes(opened.tier, doomed, incarnation=incarnation, observer=observer)
        freed += size
    _tell_removed(opened, [commit.step for commit in commits], freed, now or freed > 0, as_json)


@click.command()
@run_argument
@click.argument("steps", metavar="STEP...", type=NUMBER, nargs=-1, required=True)
@click.option("--note", default="", help="Why, for people.")
@json_option
def pin(run: str, steps: tuple[int, ...], note: str, as_json: bool) -> None:
    """Keep checkpoints from being deleted.

    Neither retention nor 'safehold rm' touches them, until they are unpinned.
    """
    from safehold.cli.opening import open_run
    from safehold.pipeline import ledger

    opened = open_run(run)
    for step in steps:
        opened.find(step)
    for step in steps:
        ledger.put_pin(opened.tier, step, note=note)
    if as_json:
        print_json({"pinned": sorted({*opened.seen.pins, *steps})})
    else:
        click.echo(f"pinned {', '.join(map(str, steps))}")


@click.command()
@run_argument
@click.argument("steps", metavar="STEP...", type=NUMBER, nargs=-1, required=True)
@json_option
def unpin(run: str, steps: tuple[int, ...], as_json: bool) -> None:
    """Let retention delete checkpoints again."""
    from safehold.cli.opening import open_run
    from safehold.errors import StepNotFoundError
    from safehold.pipeline import ledger

    opened = open_run(run)
    for step in steps:
        if step not in opened.seen.pins:
            pinned = ", ".join(map(str, sorted(opened.seen.pins))) or "none"
            raise StepNotFoundError("the step is not pinned", step=step, hint=f"pinned are: {pinned}")
    for step in steps:
        ledger.remove_pin(opened.tier, step)
    if as_json:
        print_json({"pinned": sorted(set(opened.seen.pins) - set(steps))})
    else:
        click.echo(f"unpinned {', '.join(map(str, steps))}")


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds", context, parameter)
    return value


@click.command()
@run_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option(
    "--grace-s",
    type=click.FloatRange(0.0, 1e9),
    callback=_finite,
    default=30.0,
    show_default=True,
    help="Leave alone what was un-committed less than so many seconds ago.",
)
@click.option(
    "--job-ended", is_flag=True, help="No job runs: also delete its unfinished attempts, and plans that nothing uses."
)
@click.option("--ignore-leases", is_flag=True, help="No reader is alive: also delete leases, and what they hold.")
@click.option("--set-aside", is_flag=True, help="Also delete checkpoints that a rollback to an older step set aside.")
@json_option
def gc(
    run: str,
    dry_run: bool,
    grace_s: float,
    job_ended: bool,
    ignore_leases: bool,
    set_aside: bool,
    as_json: bool,
) -> None:
    """Delete what nobody needs: debris, and what was un-committed.

    Debris are attempts that were never committed, and temporary files of ours. Safe beside a running job, unless --job-ended is given.
    What a reader holds a lease on stays, unless --ignore-leases is given.
    """
    from safehold.cli.opening import open_run
    from safehold.pipeline import sweep

    opened = open_run(run)
    if job_ended:
        _refuse_live_agent(run)
    swept = sweep.sweep(
        opened.tier,
        incarnation=opened.seen.newest,
        live=() if job_ended else None,
        plans_in_use=() if job_ended else None,
        grace_s=grace_s,
        set_aside=set_aside,
        ignore_leases=ignore_leases,
        dry_run=dry_run,
    )
    if as_json:
        attempts = [{"step": c.step, "incarnation": c.incarnation, "attempt": c.attempt} for c in sorted(swept.deleted)]
        print_json(
            {
                "dry_run": dry_run,
                "attempts": attempts,
                "plans": list(swept.plans),
                "files": list(swept.files),
                "freed_bytes": swept.freed_bytes,
            }
        )
        return
    verb = "would delete" if dry_run else "deleted"
    for commit in sorted(swept.deleted):
        click.echo(f"{verb} step {commit.step}, attempt {commit.incarnation}-{commit.attempt}")
    for digest in swept.plans:
        click.echo(f"{verb} plan {digest[:16]}")
    for path in swept.files:
        click.echo(f"{verb} {clean(path)}")
    click.echo(f"{'would free' if dry_run else 'freed'} {size_text(swept.freed_bytes)}")


def _report(report: Any) -> dict[str, Any]:
    """One object of `verify --json`."""
    return {
        "step": report.commit.step,
        "incarnation": report.commit.incarnation,
        "attempt": report.commit.attempt,
        "ok": report.ok,
        "num_files": report.num_files,
        "num_bytes": report.num_bytes,
        "faults": [
            {
                "path": fault.path,
                "message": fault.message,
                "block": fault.block,
                "offset_bytes": fault.offset_bytes,
                "keys": list(fault.keys),
                "num_keys": fault.num_keys,
                "node": fault.node,
                "rank": fault.rank,
                "redundancy": fault.redundancy,
            }
            for fault in report.faults
        ],
        "notes": list(report.notes),
        "not_read": list(report.not_read),
    }


def _tell_report(report: Any, *, quarantined: bool) -> None:
    from safehold.format.names import counted

    head = f"step {report.commit.step}: "
    if report.ok:
        verdict = "ok" if not report.not_read else "no fault in what is here"
        click.echo(f"{head}{verdict}, {counted(report.num_files, 'file')}, {size_text(report.num_bytes)}")
    else:
        click.echo(f"{head}{counted(len(report.faults), 'fault')}")
    for fault in report.faults:
        click.echo(f"  {clean(fault, 2000)}")
    for note in report.notes:
        warn(note)
    if not report.ok or not quarantined:
        return
    if report.not_read:
        warn(f"step {report.commit.step} is quarantined, and what is here is whole")
    else:
        warn(f"step {report.commit.step} is quarantined and whole; 'safehold verify --mark' clears it")


def _tell_how_many(reports: list[Any], num_steps: int, run: str) -> None:
    """Say how much of the run was verified, where that was not asked for step by step."""
    from safehold.format.names import counted

    bad = sum(not report.ok for report in reports)
    parts = sum(bool(report.not_read) for report in reports)
    verdict = (
        "" if len(reports) == 1 else f", {bad} damaged" if bad else ", all whole" if not parts else ", no fault found"
    )
    what = "" if not parts else " in part" if parts == len(reports) else f" ({parts} of them in part)"
    click.echo(f"verified {len(reports)} of {counted(num_steps, 'checkpoint')}{what}{verdict}")
    if len(reports) < num_steps:
        click.echo(f"hint: only the newest was read; 'safehold verify {clean(run)} --all' reads all", err=True)


def _tell_not_read(reports: list[Any]) -> None:
    """Say whose part of the checkpoints was not read, and how to read it."""
    from safehold.format.names import numbered

    nodes = sorted({name for report in reports for name in report.not_read})
    if nodes:
        shown = numbered("node", [clean(name) for name in nodes], 8)
        click.echo(f"hint: run this on {shown}, too: each node reads what is on its own disk", err=True)


def _may_clear(opened: Any, report: Any) -> bool:
    """Whether what was read is whole, and has in it what was found to be bad, if it is only a part of the checkpoint."""
    from safehold.format import paths

    word = opened.seen.quarantined.get(report.commit)
    if not report.data_ok or not report.not_read or word is None:
        return bool(report.data_ok)
    directory, _, name = word.path.rpartition("/")
    if directory != paths.checkpoint_dir(report.commit):
        return bool(directory)  # a plan, say, which every node has
    return name in opened.seen.files.get(report.commit, {})


def _mark(opened: Any, report: Any) -> None:
    from safehold.pipeline import ledger

    if report.data_ok:
        if _may_clear(opened, report):
            ledger.clear_quarantine(opened.tier, report.commit)
    else:
        fault = next(fault for fault in report.faults if not fault.redundancy)
        ledger.put_quarantine(
            opened.tier,
            report.commit,
            incarnation=opened.seen.newest,
            reason=f"safehold verify: {fault.message}"[:1000],
            path=fault.path,
        )


def _refuse_pinned(opened: Any, commits: list[Any]) -> None:
    from safehold.errors import ConfigurationError

    for commit in commits:
        if commit.step in opened.seen.pins:
            note = opened.seen.pins[commit.step].note
            raise ConfigurationError(
                f"the checkpoint is pinned{f' ({clean(note)})' if note else ''}",
                step=commit.step,
                hint=f"'safehold unpin RUN {commit.step}' first",
            )


def _refuse_leased(opened: Any, commits: list[Any], leases: Any) -> None:
    """Refuse what somebody reads; whether the reader still lives cannot be told by one look."""
    from safehold.errors import ConfigurationError

    for commit in commits:
        at_step = [other for other in opened.seen.listing.attempts if other.step == commit.step]
        lease = next((found for other in at_step if (found := leases.on(other)) is not None), None)
        if lease is not None:
            raise ConfigurationError(
                f"the checkpoint is being read by {clean(lease.holder)}",
                step=commit.step,
                path=lease.path,
                hint="wait until it is read; if the reader is dead, --force deletes all the same",
            )


def _refuse_last_good(opened: Any, commits: list[Any]) -> None:
    """Refuse if no checkpoint is left whose documents verify and whose files are there."""
    from safehold.errors import ConfigurationError, IntegrityError

    why = []
    for commit in opened.believed:
        if commit in commits:
            continue
        if commit in opened.seen.quarantined:
            why.append(f"step {commit.step} is quarantined")
            continue
        try:
            opened.catalog.check_files(opened.catalog.load(commit, run_id=opened.info.run_id))
            return
        except IntegrityError as exc:
            why.append(f"step {commit.step}: {exc.message}")
    raise ConfigurationError(
        "no good checkpoint would be left",
        step=max(commits).step,
        path=opened.tier.url,
        hint="; ".join([*why[:3], "--force deletes all the same"]),
    )


def _tell_removed(opened: Any, steps: list[int], freed: int, now: bool, as_json: bool) -> None:
    from safehold.errors import SupersededError
    from safehold.policy import belief

    left = belief.believed(opened.catalog.listing())
    revived = [commit.step for commit in left if commit.step in steps]
    if as_json:
        print_json({"removed": [s for s in steps if s not in revived], "freed_bytes": freed})
    else:
        click.echo(f"removed {', '.join(str(s) for s in steps if s not in revived)}")
        click.echo(f"freed {size_text(freed)}" if now else "their space is freed by the run's agent, or 'safehold gc'")
    if revived:
        raise SupersededError(
            "a job that started meanwhile has accepted the checkpoint again",
            step=revived[0],
            hint="repeat the command",
        )


def _refuse_live_agent(run: str) -> None:
    from safehold.cli.slots import all_slots
    from safehold.errors import ConfigurationError
    from safehold.host import runtime

    wanted = runtime.run_key(run)
    for slot in all_slots():
        info = slot.read_info() if slot.is_locked() else None
        # An agent that met another one which did not answer has a slot of another name, hence its note.
        if slot.is_locked() and (slot.key == wanted or (info is not None and runtime.run_key(info.run) == wanted)):
            raise ConfigurationError(
                "an agent of this run lives on this host", path=run, hint="end the job first, or leave out --job-ended"
            )
