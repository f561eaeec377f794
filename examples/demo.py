"""The demonstration: train, kill a rank in the middle of a save, resume, and compare with a run that nothing happened to.

Started by `scripts/demo`, which makes the environment. Exit code 0 only if losses and parameters are equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # the limits and the process keeping are shared with the benchmarks

from processes import adopt_orphans, stop_all  # noqa: E402

from safehold.testing import faults  # noqa: E402

NUM_RANKS = 2
KILLED_RANK = 1
ACT_TIMEOUT_S = 600.0
console = Console(highlight=False)


class DemoFailed(Exception):
    """Something did not happen as promised; the text says what."""


@dataclass(kw_only=True)
class Act:
    """What one start of the training program reported.

    Attributes:
        title: How the act is announced.
        losses: Loss after each step that it ran.
        restored: What `restore` reported, None at a fresh start.
        start: The step that it started at.
        saves: Steps whose save was begun.
        figures: What each durable save cost, by step.
        digest: Hash of the final parameters, if it reached the end.
        exit_code: Of the launcher.
        output: File that has what the program printed.
    """

    title: str
    losses: dict[int, float] = field(default_factory=dict)
    restored: dict[str, Any] | None = None
    start: int = 0
    num_parameters: int = 0
    saves: list[int] = field(default_factory=list)
    figures: dict[int, dict[str, Any]] = field(default_factory=dict)
    digest: str | None = None
    exit_code: int | None = None
    output: Path = Path(os.devnull)

    def last_words(self) -> str:
        """Return the end of what the ranks printed, or else of what the launcher printed."""
        lines = self.output.read_text(errors="replace").splitlines()
        words = [line for line in lines if line.startswith(("[rank", "safehold"))]
        return "\n".join((words or lines)[-60:])

    def take(self, event: dict[str, Any]) -> None:
        """Note one event of the training program."""
        kind = event["event"]
        if kind == "start":
            self.start, self.restored, self.num_parameters = event["step"], event["restored"], event["num_parameters"]
        elif kind == "step":
            self.losses[event["step"]] = event["loss"]
        elif kind == "save":
            self.saves.append(event["step"])
        elif kind == "durable":
            self.figures[event["step"]] = event["figures"]
        elif kind == "end":
            self.digest = event["digest"]


class Theatre:
    """Runs acts in a work directory of its own."""

    def __init__(self, work: Path, *, steps: int, save_every: int, layers: int) -> None:
        self.work, self.steps, self.save_every, self.layers = work, steps, save_every, layers
        self._num_acts = 0
        self.runtime = work / "runtime"
        self.runtime.mkdir(mode=0o700)

    def _command(self, run: str, events: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)),
            *(str(ROOT / "examples" / "train_llama.py"), str(self.work / run), "--events", str(events)),
            *("--steps", str(self.steps), "--save-every", str(self.save_every), "--layers", str(self.layers)),
            *("--batch-size", "2", "--length", "64"),
        ]

    def play(self, title: str, run: str, *, kill_at: int | None = None) -> Act:
        """Run the training program on the run directory `run`; with `kill_at`, one rank is killed in the save of that step."""
        self._num_acts += 1
        events, output = self.work / f"act-{self._num_acts}.jsonl", self.work / f"act-{self._num_acts}.log"
        events.touch()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // NUM_RANKS)),
            "SAFEHOLD_RUNTIME_DIR": str(self.runtime),
        }
        if kill_at is not None:
            environment |= faults.environment(faults.fail_at(KILLED_RANK, kill_at, "stage"))
        act = Act(title=title, output=output)
        console.print(f"\n[bold]{title}[/bold]")
        with output.open("w") as log, events.open() as lines:
            process = subprocess.Popen(
                self._command(run, events),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                self._follow(act, process, lines.readline)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if kill_at is None and act.exit_code != 0:
            raise DemoFailed(f"the training program ended with exit code {act.exit_code}:\n{act.last_words()}")
        return act

    def _follow(self, act: Act, process: subprocess.Popen[bytes], next_line: Callable[[], str]) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        deadline = time.monotonic() + ACT_TIMEOUT_S
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("starting", total=self.steps)
            while True:
                ended = process.poll()
                while line := next_line():
                    event = json.loads(line)
                    act.take(event)
                    self._show(act, event, progress, task)
                if ended is not None:
                    act.exit_code = ended
                    return
                if time.monotonic() > deadline:
                    raise DemoFailed(f"the training program did not end within {ACT_TIMEOUT_S:.0f} s")
                time.sleep(0.05)

    def _show(self, act: Act, event: dict[str, Any], progress: Progress, task: Any) -> None:
        step = event.get("step", 0)
        if event["event"] == "start":
            size = f"{event['num_parameters'] / 1e6:.1f} million parameters, {NUM_RANKS} ranks"
            begin = f"resumed at step {step}" if event["restored"] else "from the start"
            progress.console.print(f"  {size}, {begin}")
            progress.update(task, completed=step, description="training")
        elif event["event"] == "step":
            progress.update(task, completed=step, description=f"loss {event['loss']:.4f}")
            if not console.is_terminal and (step % self.save_every == 0 or step == act.start + 1):
                console.print(f"  step {step:3d}/{self.steps}  loss {event['loss']:.4f}")
        elif event["event"] == "save" and console.is_terminal:
            progress.console.print(f"  step {step}: rank 0 has staged, and goes on while it is flushed")


def measure_limits(work: Path, total_bytes: int) -> dict[str, Any]:
    """Measure plain copy, raw write and raw read of as many bytes as a checkpoint has, on the same disk."""
    script = ROOT / "benchmarks" / "limits.py"
    command = [
        sys.executable,
        str(script),
        "--bytes",
        str(total_bytes),
        "--processes",
        str(NUM_RANKS),
        "--dir",
        str(work),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise DemoFailed(f"the limits could not be measured:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compare(broken: Act, resumed: Act, whole: Act) -> list[str]:
    """Return what differs between the interrupted run and the one without a fault; empty if nothing does."""
    wrong = []
    for act in (broken, resumed):
        for step, loss in sorted(act.losses.items()):
            if loss != whole.losses[step]:
                wrong.append(f"step {step}: loss {loss!r} in '{act.title}', {whole.losses[step]!r} without a fault")
    if set(broken.losses) | set(resumed.losses) != set(whole.losses):
        wrong.append("the interrupted run and the one without a fault did not run the same steps")
    if resumed.digest is None or resumed.digest != whole.digest:
        wrong.append(f"final parameters: {resumed.digest} after the resume, {whole.digest} without a fault")
    return wrong


def cost_table(resumed: Act, whole: Act, limits: dict[str, Any]) -> Table:
    """Put what saves and resume cost beside what the machine can do."""
    figures = [entry for act in (resumed, whole) for entry in act.figures.values()]
    pause, window = (statistics.median(entry[key] for entry in figures) for key in ("pause_s", "window_s"))
    restored = resumed.restored or {}
    source = restored.get("source", "flash")
    copy_s, write_s, read_s = limits["copy_s"], limits["write_s"], limits["read_s"]
    table = Table(title=f"{limits['bytes'] / 1e6:.0f} MB of state, {NUM_RANKS} ranks, medians of {len(figures)} saves")
    for name, justify in (
        ("", "left"),
        ("seconds", "right"),
        ("limit", "left"),
        ("seconds", "right"),
        ("ratio", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    rows = [
        ("pause", pause, "plain copy", copy_s),
        ("window, training goes on", window, "raw direct write", write_s),
        (f"time to resume, from {source}", restored.get("seconds", 0.0), "raw direct read", read_s),
    ]
    if source == "memory":
        rows[-1] = (*rows[-1][:2], "plain copy", copy_s)
    for name, seconds, limit, limit_s in rows:
        table.add_row(name, f"{seconds:.3f}", limit, f"{limit_s:.3f}", f"{seconds / limit_s:.2f}")
    return table


def perform(theatre: Theatre, kill_at: int) -> None:
    """Play the three acts, compare, and show the table."""
    console.print(
        f"Training a small Llama on {NUM_RANKS} ranks for {theatre.steps} steps, saved every {theatre.save_every}."
    )
    first = f"1  train, and kill rank {KILLED_RANK} with SIGKILL in the middle of the save of step {kill_at}"
    broken = theatre.play(first, "interrupted", kill_at=kill_at)
    if broken.exit_code == 0 or max(broken.losses, default=0) != kill_at:
        wanted = (
            f"rank {KILLED_RANK} was to die in the save of step {kill_at}, and did not; exit code {broken.exit_code}"
        )
        raise DemoFailed(f"{wanted}:\n{broken.last_words()}")
    console.print(f"  rank {KILLED_RANK} was killed while it staged step {kill_at}; the launcher ended the job")
    resumed = theatre.play("2  start again with the same command, resume, train to the end", "interrupted")
    expected = kill_at - theatre.save_every
    if resumed.start != expected:
        raise DemoFailed(f"resumed at step {resumed.start}, the newest good checkpoint was {expected}")
    whole = theatre.play("3  the same steps without a fault, in another run directory", "whole")

    console.print("\n[bold]4  limits of this machine, the same bytes[/bold]")
    limits = measure_limits(theatre.work, next(iter(whole.figures.values()))["bytes"])
    console.print()
    console.print(cost_table(resumed, whole, limits))
    if wrong := compare(broken, resumed, whole):
        raise DemoFailed("the runs differ:\n  " + "\n  ".join(wrong))
    console.print(
        f"\n[bold green]Equal bit for bit:[/bold green] {len(broken.losses) + len(resumed.losses)} losses, and the final "
        f"parameters (sha256 {str(whole.digest)[:16]}...), with and without the fault."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8, help="8 give 24 million parameters, 3 million each")
    parser.add_argument("--kill-at", type=int, help="step whose save is interrupted; default: about the middle")
    parser.add_argument("--dir", type=Path, help="work directory's parent; default: runs/ in the repository")
    parser.add_argument("--keep", action="store_true", help="keep the run directories and logs, and say where they are")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    every = arguments.save_every
    kill_at = arguments.kill_at or max(2 * every, arguments.steps // 2 // every * every + every)
    if kill_at % every or not 2 * every <= kill_at <= arguments.steps:
        console.print(f"--kill-at must be a multiple of {every} from {2 * every} to {arguments.steps}")
        return 2
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    adopt_orphans()
    parent = arguments.dir or ROOT / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    begun = time.monotonic()
    try:
        perform(Theatre(work, steps=arguments.steps, save_every=every, layers=arguments.layers), kill_at)
    except DemoFailed as failure:
        console.print(f"\n[bold red]Failed:[/bold red] {escape(str(failure))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    finally:
        stop_all()
        if arguments.keep:
            console.print(f"\nkept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    console.print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
