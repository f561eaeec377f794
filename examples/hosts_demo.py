"""The demonstration over several hosts: one is lost in the middle of a save, a storage link is cut, all ranks are killed.

Started by `scripts/hosts-demo`, as root: the hosts are Linux namespaces on this machine (docs/testing.md). Exit code 0 only if losses and
parameters are equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from safehold.testing.hosts import Hosts, HostsUnavailableError, Job, Zygote, run_job

SCRIPT = Path(__file__).resolve().parent / "hosts_training.py"
PRELOAD = ("torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "numpy", "safehold.checkpointer")
NUM_HOSTS = 4
LOST, CUT = 2, 1
STEPS, EVERY = 15, 3
KILL_AT, CUT_AT, KILL_ALL_AT = 6, 9, 12
FIRST_NAMES = [f"host-{index}" for index in range(NUM_HOSTS)]
JOB_S = 120.0
# A node writes 10 MB a save: at this rate that takes so long that it is easy to be in the middle of it.
SLOW = {"flush_rate_bytes_s": 8 << 20, "flush_block_bytes": 1 << 20, "direct_io": False}
SETTINGS = {"storage_interface": "storage", "peer_timeout_s": 3.0, "on_failure": "warn"}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def say(text: str) -> None:
    """Print, without breaking lines."""
    console.print(text, soft_wrap=True)


class DemoFailed(Exception):
    """Something did not happen as promised; the text says what."""


@dataclass(kw_only=True)
class Restored:
    """What the ranks said of their restore.

    Attributes:
        step: The step.
        seconds: The slowest rank's.
        sources: Source -> names of the hosts that read from it.
    """

    step: int
    seconds: float
    sources: dict[str, list[str]]


def said(job: Job, rank: int, what: str) -> list[str]:
    """What follows a word in the lines of a rank that begin with it."""
    lines = (line.removeprefix("* ") for line in job.output(rank).splitlines())
    return [line.removeprefix(what).strip() for line in lines if line.startswith(f"{what} ")]


def losses(job: Job) -> dict[int, list[str]]:
    """All ranks' losses, exactly, by step, of the steps that all of them did."""
    found = [dict(line.split() for line in said(job, rank, "loss")) for rank in range(NUM_HOSTS)]
    return {int(step): [entry[step] for entry in found] for step in found[0] if all(step in entry for entry in found)}


class Stage:
    """The hosts, and the jobs that run on them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def start(self, run: str, *more: str, **settings: object) -> Job:
        """Start the training on all hosts."""
        arguments = [str(self.hosts.shared / run), "--steps", str(STEPS), "--save-every", str(EVERY), *more]
        arguments += ["--settings", json.dumps({**SETTINGS, **settings})]
        return run_job(self.hosts, 1, SCRIPT, arguments, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=JOB_S)

    def finish(self, job: Job) -> str:
        """Wait for the end of a job; returns the hash of its parameters."""
        codes = job.wait(JOB_S)
        finals = {text for rank in range(NUM_HOSTS) for text in said(job, rank, "final")}
        if any(codes) or len(finals) != 1:
            raise DemoFailed(f"the ranks ended with {codes}:\n{job.tail()}")
        return finals.pop()

    def lose_a_host(self) -> dict[int, list[str]]:
        """Act 1: train, and lose a host while a save is being written; returns the losses up to there."""
        name = self.hosts[LOST].name
        say(f"\n[bold]1  train on {NUM_HOSTS} hosts, and lose {name} in the save of step {KILL_AT}[/bold]")
        with self.start("run", **SLOW) as job:
            for step in range(EVERY, KILL_AT, EVERY):
                job.until(f"* committed {step}")
                say(f"  step {step}: saved by all hosts, committed")
            for rank in range(NUM_HOSTS):
                job.until(f"staged {KILL_AT}", rank=rank)
            job.kill_host(LOST)
            say(f"  step {KILL_AT}: staged, being written; {name} is gone, with its memory and its disk")
            time.sleep(0.3)
            job.kill()
            say("  the launcher ends the job on the other hosts")
            if f"* committed {KILL_AT}" in job.text:
                raise DemoFailed(f"step {KILL_AT} was committed although {name} was lost before it was written")
            return losses(job)

    def restored(self, job: Job) -> Restored:
        """Wait until all ranks have restored."""
        reports = [job.until("* restored", rank=rank).split()[2:] for rank in range(NUM_HOSTS)]
        sources: dict[str, list[str]] = {}
        for rank, (_, _, source) in enumerate(reports):
            sources.setdefault(source, []).append(self.hosts[rank].name)
        step, seconds = int(reports[0][0]), max(float(report[1]) for report in reports)
        say(f"  resumed at step {step}")
        return Restored(step=step, seconds=seconds, sources=sources)

    def resume(self) -> tuple[Restored, dict[int, list[str]], str]:
        """Act 2: resume with a fresh host; a storage link is cut, then all ranks are killed; returns also why a save failed."""
        fresh = self.hosts.replace(LOST)
        say(f"\n[bold]2  {fresh.name} takes the place of the lost host; the same command again[/bold]")
        name, gate = self.hosts[CUT].name, self.hosts.shared / "go"
        gates = ("--gate", str(CUT_AT), str(gate), "--gate", str(KILL_ALL_AT + 1), "/never")
        with self.start("run", *gates) as job:
            restored = self.restored(job)
            for rank in range(NUM_HOSTS):
                job.until(f"waiting before {CUT_AT}", rank=rank)
            self.hosts[CUT].cut("storage")
            gate.touch()
            say(f"  step {CUT_AT}: {name}'s storage link is cut; training goes on, the save does not")
            why = job.until(f"* failed {CUT_AT}", rank=0).split(maxsplit=3)[3]
            say(f"    {escape(why)}")
            self.hosts[CUT].heal("storage")
            for rank in range(NUM_HOSTS):
                job.until(f"waiting before {KILL_ALL_AT + 1}", rank=rank)
            if f"* committed {KILL_ALL_AT}" not in job.output(0):
                raise DemoFailed(f"the save of step {KILL_ALL_AT} failed although the link was back:\n{job.tail()}")
            say(f"  step {KILL_ALL_AT}: the link is back, saved and committed")
            job.kill()
            self.hosts.timeline.add(None, "ranks killed")
            say("  all ranks are killed; the agents live on, and keep the memory")
            return restored, losses(job), why

    def resume_again(self) -> tuple[Restored, dict[int, list[str]], str]:
        """Act 3: start the job again, from the memory of its hosts, and train to the end."""
        say("\n[bold]3  the same command again[/bold]")
        with self.start("run") as job:
            restored = self.restored(job)
            final = self.finish(job)
            say(f"  trained to step {STEPS}")
            return restored, losses(job), final

    def unbroken(self) -> tuple[dict[int, list[str]], str]:
        """Act 4: the same steps in another run directory, and nothing happens."""
        say("\n[bold]4  the same steps without a fault, in another run directory[/bold]")
        with self.start("whole") as job:
            final = self.finish(job)
            return losses(job), final


def outcome(first: Restored, second: Restored, why: str) -> Table:
    """Put beside each other what each fault cost."""
    table = Table(title="What it cost")
    for name, justify in (("", "left"), ("lost steps", "right"), ("seconds to restore", "right"), ("sources", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for what, at, restored in (
        (f"{FIRST_NAMES[LOST]} lost in the save of step {KILL_AT}", KILL_AT, first),
        (f"all ranks killed after step {KILL_ALL_AT}", KILL_ALL_AT, second),
    ):
        sources = "\n".join(f"{source}: {', '.join(names)}" for source, names in sorted(restored.sources.items()))
        table.add_row(what, str(at - restored.step), f"{restored.seconds:.3f}", sources)
    what = f"{FIRST_NAMES[CUT]}'s storage link cut in the save of step {CUT_AT}"
    table.add_row(what, "0", "", f"none needed, the save failed: {why.split(':')[0]}")
    return table


def perform(hosts: Hosts) -> None:
    """Play the acts, show what it cost, and compare."""
    stage = Stage(hosts)
    parts = [stage.lose_a_host()]
    first, seen, why = stage.resume()
    second, rest, final = stage.resume_again()
    parts += [seen, rest]
    chart = hosts.timeline.render(max(100, min(140, console.width)))
    whole, whole_final = stage.unbroken()
    say(f"\n[bold]What happened[/bold]\n{escape(chart)}\n")
    console.print(outcome(first, second, why))
    for restored, wanted in ((first, KILL_AT - EVERY), (second, KILL_ALL_AT)):
        if restored.step != wanted:
            raise DemoFailed(f"resumed at step {restored.step}, the newest good checkpoint was {wanted}")
    compared = [(step, found) for part in parts for step, found in part.items()]
    if wrong := sorted({step for step, found in compared if whole.get(step) != found}):
        raise DemoFailed(f"losses differ from those of the unbroken run at steps {wrong}")
    if {step for step, _ in compared} != set(range(1, STEPS + 1)) or final != whole_final:
        raise DemoFailed(f"final parameters are {final[:16]}, those of the unbroken run {whole_final[:16]}")
    say(
        f"\n[bold green]Equal bit for bit:[/bold green] {len(compared) * NUM_HOSTS} losses, and the final parameters "
        f"(sha256 {final[:16]}...), with and without the faults."
    )


def main() -> int:
    argparse.ArgumentParser(prog="scripts/hosts-demo", description=__doc__.split("\n", 1)[0]).parse_args()
    begun = time.monotonic()
    say(f"Training a small Llama on {NUM_HOSTS} hosts for {STEPS} steps, saved every {EVERY}.")
    zygote = None
    try:
        zygote = Zygote(PRELOAD)
        with Hosts(NUM_HOSTS, zygote=zygote) as hosts:
            perform(hosts)
    except HostsUnavailableError as exc:
        say(f"cannot make hosts here: {escape(str(exc))}")
        return 2
    except (DemoFailed, TimeoutError) as failure:
        say(f"\n[bold red]Failed:[/bold red] {escape(str(failure))}")
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    finally:
        if zygote is not None:
            zygote.close()
    console.print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
