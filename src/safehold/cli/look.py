"""`safehold ls` and `safehold show`: what is there, without reading data."""

from __future__ import annotations

from typing import Any

import click

from safehold.cli.output import (
    clean,
    number_text,
    print_facts,
    print_json,
    print_table,
    size_text,
    time_iso,
    time_text,
)
from safehold.cli.state import STEP, json_option, run_argument

PHASES = ("stage_s", "allocate_s", "write_s", "sync_s", "recorded_s")


@click.command()
@run_argument
@click.option("--all", "show_all", is_flag=True, help="Also list attempts that do not count, and why.")
@json_option
def ls(run: str, show_all: bool, as_json: bool) -> None:
    """List the checkpoints of a run, newest first."""
    from safehold.cli.opening import open_run
    from safehold.pipeline.leases import Observer

    opened = open_run(run)
    views = opened.catalog.commits(opened.seen)
    leases = Observer().look(opened.tier)
    entries = [_entry(view, leases, opened.seen.files.get(view.commit, {})) for view in views]
    if show_all:
        entries += _others(opened, leases)
        entries.sort(key=lambda e: (e["step"], e["incarnation"], e["attempt"]), reverse=True)
    if as_json:
        print_json(entries)
        return
    if not entries:
        click.echo("no checkpoints", err=True)
        return
    print_table(
        ["STEP", "CREATED", "SIZE", "RANKS", "INC", "NOTES"],
        [
            (
                entry["step"],
                time_text(entry["created_s"] or 0.0),
                size_text(entry["total_bytes"] if entry["total_bytes"] is not None else entry["stored_bytes"]),
                "" if entry["world_size"] is None else entry["world_size"],
                f"{entry['incarnation']}-{entry['attempt']}",
                _notes(entry),
            )
            for entry in entries
        ],
        right="STEP SIZE RANKS",
    )


@click.command()
@run_argument
@click.argument("step", type=STEP, required=False)
@click.option("--leaves", "show_leaves", is_flag=True, help="List every leaf.")
@json_option
def show(run: str, step: int | None, show_leaves: bool, as_json: bool) -> None:
    """Show a run, or what is in one of its checkpoints.

    STEP is a number, or 'latest'. Without it the run itself is shown.
    """
    from safehold.cli.opening import open_run

    opened = open_run(run)
    if step is None and not show_leaves:
        _show_run(opened, as_json)
    else:
        _show_checkpoint(opened, step, show_leaves, as_json)


def _entry(view: Any, leases: Any, files: dict[str, int]) -> dict[str, Any]:
    """One object of `ls --json`."""
    from safehold.errors import FormatVersionError
    from safehold.pipeline.joining import not_here

    manifest = view.manifest
    entry: dict[str, Any] = {
        "step": view.commit.step,
        "incarnation": view.commit.incarnation,
        "attempt": view.commit.attempt,
        "status": "committed" if manifest else "newer" if isinstance(view.error, FormatVersionError) else "damaged",
        "created_s": manifest.created_s if manifest else None,
        "created": time_iso(manifest.created_s) if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "num_nodes": len(manifest.nodes) if manifest else None,
        "total_bytes": manifest.total_bytes if manifest else None,
        "stored_bytes": view.stored_bytes,
        "metrics": dict(manifest.metrics) if manifest else {},
        "final": bool(manifest and manifest.final),
        "pinned": view.pinned,
        "leased": leases.on(view.commit) is not None,
        "quarantined": view.quarantine is not None,
        "not_here": not_here(manifest, files) if manifest else [],
        "reason": "",
    }
    if view.error is not None:
        entry["reason"] = f"{view.error.path}: {view.error.message}" if view.error.path else view.error.message
    elif view.quarantine is not None:
        entry["reason"] = view.quarantine.reason
    return entry


def _others(opened: Any, leases: Any) -> list[dict[str, Any]]:
    """Attempts that are no checkpoint, with the reason."""
    from safehold.policy import belief

    seen = opened.seen
    believed, hidden = set(opened.believed), set(belief.shadowed(seen.listing))
    newest = seen.listing.newest
    out = []
    for commit, attempt in seen.listing.attempts.items():
        if commit in believed:
            continue
        stones = [stone for stone in attempt.tombstones if not belief.is_void(seen.listing, stone, commit)]
        if stones:
            status, reason = "deleted", stones[0].reason or "un-committed"
        elif not attempt.has_manifest:
            status, reason = "uncommitted", "it has no manifest: unfinished, or being written"
        elif commit in hidden:
            status, reason = "hidden", "a later attempt at this step counts"
        else:
            status, reason = "abandoned", f"incarnation {newest} does not list it"
        out.append(
            {
                "step": commit.step,
                "incarnation": commit.incarnation,
                "attempt": commit.attempt,
                "status": status,
                "created_s": None,
                "created": None,
                "world_size": None,
                "num_nodes": None,
                "total_bytes": None,
                "stored_bytes": sum(seen.files.get(commit, {}).values()),
                "metrics": {},
                "final": False,
                "pinned": commit.step in seen.pins,
                "leased": leases.on(commit) is not None,
                "quarantined": commit in seen.quarantined,
                "not_here": [],
                "reason": reason,
            }
        )
    return out


def _notes(entry: dict[str, Any]) -> str:
    words = [] if entry["status"] == "committed" else [entry["status"].upper()]
    words += [name for name in ("pinned", "leased", "final", "quarantined") if entry[name]]
    if entry["not_here"]:
        words.append(f"partial here: not what {_nodes(entry['not_here'])} saved")
    words += [f"{name}={number_text(value)}" for name, value in sorted(entry["metrics"].items())]
    text = " ".join(words)
    return f"{text} ({entry['reason']})" if entry["reason"] else text


def _nodes(names: list[str]) -> str:
    shown = ", ".join(clean(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"node {shown}" if len(names) == 1 else f"nodes {shown}"


def _show_run(opened: Any, as_json: bool) -> None:
    seen = opened.seen
    incarnations = [
        {
            "number": number,
            "created_s": record.created_s,
            "created": time_iso(record.created_s),
            "reason": record.reason,
            "num_accepted": len(record.accepted),
        }
        for number, record in sorted(seen.listing.incarnations.items())
    ]
    facts: dict[str, Any] = {
        "url": opened.tier.url,
        "run_id": opened.info.run_id,
        "created_s": opened.info.created_s,
        "created": time_iso(opened.info.created_s),
        "library": opened.info.library,
        "steps": [commit.step for commit in opened.believed],
        "pinned": sorted(seen.pins),
        "quarantined": sorted({commit.step for commit in seen.quarantined}),
        "stored_bytes": sum(sum(files.values()) for files in seen.files.values()),
        "free_bytes": opened.tier.free_bytes(),
        "incarnations": incarnations,
        "problems": [f"{p.path}: {p.message}" if p.path else p.message for p in seen.problems],
    }
    if as_json:
        print_json(facts)
        return
    steps = facts["steps"]
    shown = ", ".join(map(str, steps[:10])) + (", ..." if len(steps) > 10 else "")
    print_facts(
        [
            ("run", facts["url"]),
            ("run id", facts["run_id"]),
            ("created", time_text(facts["created_s"])),
            ("checkpoints", f"{len(steps)} ({shown})" if steps else "0"),
            ("pinned", ", ".join(map(str, facts["pinned"])) or "none"),
            ("quarantined", ", ".join(map(str, facts["quarantined"])) or "none"),
            ("stored", size_text(facts["stored_bytes"])),
            ("free", size_text(facts["free_bytes"])),
        ]
    )
    if incarnations:
        click.echo()
        print_table(
            ["INCARNATION", "CREATED", "ACCEPTS", "REASON"],
            [(i["number"], time_text(i["created_s"]), i["num_accepted"], i["reason"]) for i in incarnations],
            right="INCARNATION ACCEPTS",
        )


def _show_checkpoint(opened: Any, step: int | None, show_leaves: bool, as_json: bool) -> None:
    from safehold.format.names import counted
    from safehold.pipeline import inspect

    checkpoint = opened.load(step)
    infos = inspect.leaves(checkpoint)
    facts = _checkpoint_facts(checkpoint, infos, pinned=checkpoint.commit.step in opened.seen.pins)
    if as_json:
        print_json(facts)
        return
    ranks, nodes = counted(facts["world_size"], "rank"), counted(len(facts["nodes"]), "node")
    size = f"{size_text(facts['total_bytes'])} of {ranks} on {nodes}"
    metrics = ", ".join(f"{name}={number_text(value)}" for name, value in sorted(facts["metrics"].items()))
    print_facts(
        [
            ("step", facts["step"]),
            ("directory", facts["directory"]),
            ("created", f"{time_text(facts['created_s'])} by safehold {facts['library']}"),
            ("size", size),
            ("leaves", f"{counted(facts['num_tensors'], 'tensor')}, {counted(facts['num_objects'], 'object')}"),
            ("metrics", metrics or "none"),
            ("flags", ", ".join(flag for flag in ("final", "pinned") if facts[flag]) or "none"),
        ]
    )
    click.echo()
    print_table(
        ["NODE", "NAME", "PACKS", "SIZE", "TIMINGS"],
        [
            (n["node"], n["name"], n["num_packs"], size_text(n["total_bytes"]), _timings(n["timings"]))
            for n in facts["nodes"]
        ],
        right="NODE PACKS SIZE",
    )
    if show_leaves:
        click.echo()
        rows = [
            (
                info.name,
                info.kind,
                info.dtype or info.policy or f"-> {clean(info.target)}",
                "" if info.shape is None else list(info.shape),
                "" if info.nbytes is None else size_text(info.nbytes),
            )
            for info in infos
        ]
        print_table(["LEAF", "KIND", "DTYPE", "SHAPE", "SIZE"], rows, right="SIZE")


def _checkpoint_facts(checkpoint: Any, infos: Any, *, pinned: bool) -> dict[str, Any]:
    """What `show --json` says of a checkpoint."""
    manifest = checkpoint.manifest
    return {
        "step": manifest.commit.step,
        "incarnation": manifest.commit.incarnation,
        "attempt": manifest.commit.attempt,
        "directory": checkpoint.directory,
        "created_s": manifest.created_s,
        "created": time_iso(manifest.created_s),
        "library": manifest.library,
        "world_size": manifest.world_size,
        "total_bytes": manifest.total_bytes,
        "crc32": f"{manifest.crc32:08x}",
        "plan": manifest.plan_digest,
        "metrics": dict(manifest.metrics),
        "final": manifest.final,
        "tags": list(manifest.tags),
        "pinned": pinned,
        "num_tensors": sum(info.kind == "tensor" for info in infos),
        "num_objects": sum(info.kind == "object" for info in infos),
        "nodes": [
            {
                "node": node,
                "name": record.node_name,
                "num_packs": len(record.packs),
                "total_bytes": sum(pack.size_bytes for pack in record.packs) + record.objects_size_bytes,
                "timings": dict(record.timings),
            }
            for node, record in sorted(checkpoint.records.items())
        ],
        "leaves": [_leaf(info) for info in infos],
    }


def _leaf(info: Any) -> dict[str, Any]:
    fields = ("name", "kind", "dtype", "shape", "nbytes", "framework", "num_ranks", "policy", "target")
    return {name: value for name in fields if (value := getattr(info, name)) is not None}


def _timings(timings: dict[str, float]) -> str:
    """Phases in the order in which they come, then what is not known here."""
    known = [name for name in PHASES if name in timings]
    names = known + sorted(set(timings) - set(known))
    return ", ".join(f"{name.removesuffix('_s')} {timings[name]:.2f} s" for name in names)
