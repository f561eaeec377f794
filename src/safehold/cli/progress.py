"""A progress bar for long work: on stderr, and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tick = Callable[[int, int], None]


@contextmanager
def progress(label: str, *, in_bytes: bool = False) -> Iterator[Tick]:
    """Show a bar while inside; the yielded function is told (done, total).

    Args:
        label: What is being done.
        in_bytes: Whether the numbers are bytes.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as bars
    from rich.console import Console

    amount: list[bars.ProgressColumn] = (
        [bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn()]
        if in_bytes
        else [bars.MofNCompleteColumn()]
    )
    columns = [
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        *amount,
        bars.TimeRemainingColumn(),
    ]
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
