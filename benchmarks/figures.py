"""From measurements to tables: medians, ratios, bounds. Pure: no processes, no files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Measurement = dict[str, Any]
GIB = 1 << 30

STAGES_FIRST = ("dcp-thread", "dcp-process", "torch-checkpointing")
STAGES_IN_BACKGROUND = ("dcp-thread-background", "torch-checkpointing-background")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure beside its limit.

    Attributes:
        name: What was measured.
        value: Its median, in `unit`.
        unit: `s`, `ratio`, `MB`, or a count.
        limit: What it stands beside, in words.
        ratio: The figure as a multiple of that limit, or a share of it; None where the value itself is the ratio.
        bound: The largest (smallest) ratio that was promised, None where nothing was.
        at_least: True if the ratio has to be at least `bound`.
        num_values: How many measurements the median is of.
    """

    name: str
    value: float
    unit: str
    limit: str = ""
    ratio: float | None = None
    bound: float | None = None
    at_least: bool = False
    num_values: int = 0

    @property
    def is_kept(self) -> bool | None:
        """Whether the bound is kept; None where there is none."""
        measured = self.value if self.ratio is None else self.ratio
        if self.bound is None:
            return None
        return measured >= self.bound if self.at_least else measured <= self.bound


class Measurements:
    """Everything that the workers said."""

    def __init__(self, entries: Iterable[Measurement]) -> None:
        self._entries = list(entries)

    def values(self, field: str, **wanted: Any) -> list[float]:
        """Return `field` of all entries that have the wanted values."""
        return [
            float(entry[field])
            for entry in self._entries
            if field in entry and all(entry.get(key) == value for key, value in wanted.items())
        ]

    def median(self, field: str, **wanted: Any) -> float | None:
        """Return the median of `values`, or None if there are none."""
        values = self.values(field, **wanted)
        return statistics.median(values) if values else None

    def variants(self, kind: str) -> list[str]:
        """Return the variants that have entries of this kind, in order of appearance."""
        return list(dict.fromkeys(entry["variant"] for entry in self._entries if entry["kind"] == kind))

    def wrong_loads(self) -> list[str]:
        """Return the variants whose load did not give what was saved."""
        return sorted({entry["variant"] for entry in self._entries if entry.get("equal") is False})


def _best(measured: Measurements, variants: Sequence[str]) -> tuple[str, float] | None:
    found = [
        (variant, pause)
        for variant in variants
        if (pause := measured.median("pause_s", kind="save", variant=variant, first=False)) is not None
    ]
    return min(found, key=lambda entry: entry[1]) if found else None


def _pauses(measured: Measurements, copy_s: float) -> list[Figure]:
    rows = []
    for name, variant, wanted, bound, peers in (
        ("pause, first save after prepare", "save", {"first": True}, 1.25, STAGES_FIRST),
        ("pause, later saves", "save", {"first": False}, 1.25, STAGES_FIRST),
        ("pause with overlap", "overlap", {}, 0.1, STAGES_IN_BACKGROUND),
    ):
        values = measured.values("pause_s", kind="save", variant=variant, **wanted)
        if not values:
            continue
        value = statistics.median(values)
        # Each beside its own copy: the machine's memory is not equally fast all the time.
        ratios = measured.values("pause_ratio", kind="save", variant=variant, **wanted)
        rows.append(
            Figure(
                name=name,
                value=value,
                unit="s",
                limit=f"the plain copy just before; median {copy_s:.3f} s" if ratios else f"plain copy {copy_s:.3f} s",
                ratio=statistics.median(ratios or [value / copy_s]),
                bound=bound,
                num_values=len(values),
            )
        )
        # The peer's saves are later ones, so ours are too, unless the row is about first ones.
        beside = measured.median("pause_s", kind="save", variant=variant, **{"first": False, **wanted})
        if beside is not None and (peer := _best(measured, peers)) is not None:
            rows.append(
                Figure(
                    name=f"{name}, beside the best peer",
                    value=beside,
                    unit="s",
                    limit=f"{peer[0]}, later saves {peer[1]:.4f} s",
                    ratio=beside / peer[1],
                    bound=1.0,
                    num_values=len(values),
                )
            )
    return rows


def _disk(measured: Measurements, write_s: float, read_s: float, copy_s: float) -> list[Figure]:
    rows = []
    windows = measured.values("window_s", kind="save", variant="save", first=False)
    if windows:
        value = statistics.median(windows)
        limit = f"raw direct write {write_s:.2f} s"
        rows.append(
            Figure(
                name="window, trainers idle",
                value=value,
                unit="s",
                limit=limit,
                ratio=write_s / value,
                bound=0.9,
                at_least=True,
                num_values=len(windows),
            )
        )
    for source, limit_s, words, bound, share in (
        ("flash", read_s, "raw direct read of these packs", 0.85, True),
        ("memory", copy_s, "plain copy", 1.5, False),
    ):
        values = measured.values("seconds", kind="restore", variant="restore", source=source)
        if values:
            value = statistics.median(values)
            rows.append(
                Figure(
                    name=f"restore from {source}" + (", cold" if source == "flash" else ""),
                    value=value,
                    unit="s",
                    limit=f"{words} {limit_s:.2f} s",
                    ratio=limit_s / value if share else value / limit_s,
                    bound=bound,
                    at_least=share,
                    num_values=len(values),
                )
            )
    return rows


def _interference(measured: Measurements) -> list[Figure]:
    rows = []
    for num_ranks, words, bound in ((1, "an idle core beside", 1.05), (2, "no idle core", 1.15)):
        wanted = {"kind": "interference", "num_ranks": num_ranks}
        means = measured.values("mean_ratio", **wanted)
        if means:
            inside = int(sum(measured.values("num_inside", **wanted)))
            worst = measured.values("worst_ratio", **wanted)
            outside = statistics.median(measured.values("worst_ratio_outside", **wanted))
            rows += [
                Figure(
                    name=f"step inside windows, {words}",
                    value=statistics.median(means),
                    unit="ratio",
                    limit=f"steps outside; {inside} inside",
                    bound=bound,
                    num_values=len(means),
                ),
                Figure(
                    name=f"longest step inside windows, {words}",
                    value=statistics.median(worst),
                    unit="ratio",
                    limit=f"median step outside (longest outside {outside:.2f})",
                    bound=1.5,
                    num_values=len(worst),
                ),
            ]
    return rows


def _costs(measured: Measurements, num_ranks: int) -> list[Figure]:
    rows = []
    for name, field, kind, unit, scale, bound, limit in (
        ("CPU of agent and flushers per GiB", "cpu_s_per_gib", "agent", "s", 1.0, 0.2, ""),
        ("memory of agent and flushers, arenas apart", "anon_bytes", "agent", "MB", 1e-6, 150.0, "150 MB"),
        ("memory of the arenas", "arena_bytes", "agent", "MB", 1e-6, None, "one generation"),
        ("files of a checkpoint", "num_files", "save", "", 1.0, float(num_ranks + 3), "ranks + 2 per node + 1"),
        ("system calls of a save, agent and flushers", "total", "calls", "", 1.0, None, ""),
        ("metadata calls among them", "metadata", "calls", "", 1.0, None, ""),
    ):
        variant = {"agent": "save", "save": "save", "calls": "calls"}[kind]
        values = measured.values(field, kind=kind, variant=variant)
        if values:
            value = statistics.median(values) * scale
            rows.append(Figure(name=name, value=value, unit=unit, limit=limit, bound=bound, num_values=len(values)))
    return rows


def figures(measured: Measurements, *, num_ranks: int) -> list[Figure]:
    """Return safehold's figures beside the limits of the same run."""
    limits = [measured.median(field, kind="limits") for field in ("copy_s", "write_s", "read_s")]
    if None in limits:
        return [*_interference(measured), *_costs(measured, num_ranks)]
    block_s, write_s, read_s = (float(value or 0) for value in limits)
    read_s = measured.median("read_s", kind="packs") or read_s  # of the very files that were restored from
    copy_s = measured.median("seconds", kind="copy", variant="save") or block_s
    copy_beside_restore_s = measured.median("seconds", kind="copy", variant="restore") or copy_s
    return [
        *_pauses(measured, copy_s),
        Figure(
            name="the same bytes copied as one block (no figure of ours; for scale)",
            value=block_s,
            unit="s",
            limit=f"plain copy {copy_s:.3f} s",
            ratio=block_s / copy_s,
            num_values=len(measured.values("copy_s", kind="limits")),
        ),
        *_disk(measured, write_s, read_s, copy_beside_restore_s),
        *_interference(measured),
        *_costs(measured, num_ranks),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def figures_table(rows: Sequence[Figure]) -> str:
    """Return safehold's figures as Markdown."""

    def number(value: float, unit: str) -> str:
        return f"{value:.3f}" if unit in ("s", "ratio") else f"{value:.0f}"

    return _table(
        ("figure", "median", "beside", "ratio", "bound", "kept", "n"),
        [
            (
                row.name,
                f"{number(row.value, row.unit)} {row.unit}".strip(),
                row.limit,
                "" if row.ratio is None else f"{row.ratio:.2f}",
                "" if row.bound is None else f"{'>=' if row.at_least else '<='} {row.bound:g}",
                {None: "", True: "yes", False: "no"}[row.is_kept],
                str(row.num_values),
            )
            for row in rows
        ],
    )


def candidates_table(measured: Measurements, names: dict[str, str]) -> str:
    """Return all candidates side by side as Markdown; seconds, medians, the slowest rank counts."""

    def cell(field: str, scale: float = 1.0, digits: int = 3, **wanted: Any) -> str:
        value = measured.median(field, **wanted)
        return "" if value is None else f"{value * scale:.{digits}f}"

    rows = []
    for variant in measured.variants("save"):
        save = {"kind": "save", "variant": variant}
        # A restore of safehold is a job of its own.
        loader = "restore" if variant == "save" else variant
        rows.append(
            (
                names.get(variant, variant),
                cell("pause_s", **save, first=True),
                cell("pause_s", **save, first=False),
                cell("staged_s", **save, first=False),
                cell("window_s", **save, first=False),
                cell("durable_s", **save, first=False),
                cell("seconds", kind="restore", variant=loader, source="flash"),
                cell("num_files", **save, digits=0),
                cell("peak_bytes", kind="memory", variant=variant, scale=1 / GIB, digits=1),
            )
        )
    head = (
        "candidate",
        "pause first",
        "pause later",
        "staged",
        "done",
        "durable",
        "cold load",
        "files",
        "peak memory, GiB",
    )
    return _table(head, rows)
