"""What saves and restores of large jobs cost the agents: messages, bytes, time, and CPU of the lead's dispatcher.

    python benchmarks/scale.py --nodes 128 1024 --seed 1 [--json]

The agents' code is the real one, in the simulated world of `safehold.testing.world`: messages and bytes are those that real agents send,
CPU seconds are measured on this machine, and latencies are virtual time (network 0.2 to 3 ms a message, storage 0.5 to 10 ms a call,
staging 20 to 200 ms, writing 0.1 to 1 s: what is left beside those is waiting for the slowest). Messages and bytes are the same for a seed.
Given is what a node gives away in bulk (documents of a restore): the lead, and who gives most. Storage is what all have read of documents.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from safehold.testing.world import Setting, World


@dataclass
class Row:
    """One phase of one job."""

    nodes: int
    ranks: int
    what: str
    messages: float = 0.0
    kbytes: float = 0.0
    lead_messages: float = 0.0
    lead_kbytes: float = 0.0
    lead_given_kbytes: float = 0.0
    most_given_kbytes: float = 0.0
    storage_kbytes: float = 0.0
    latency_s: float = 0.0
    lead_cpu_s: float = 0.0
    planning_cpu_s: float = 0.0


class Meter:
    """Takes the difference of all counts from one moment to the next."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what
        self._before = self._counts()

    def _counts(self) -> list[float]:
        world, job = self._world, self._world.job
        assert job is not None
        counts, lead = world.fabric.counts, (job.wire.token, job.machines[0].name)
        given = [counts["given_bytes", (job.wire.token, machine.name)] / 1e3 for machine in job.machines]
        agents = job.machines[0].agents
        return [
            counts["messages", None],
            counts["bytes", None] / 1e3,
            counts["messages", lead],
            counts["bytes", lead] / 1e3,
            given[0],
            max(given),
            world.storage.read_bytes / 1e3,
            world.timeline.now,
            sum(agent.busy_s for agent in agents),
            sum(agent.planning_s for agent in agents),
        ]

    def read(self) -> Row:
        """Return the figures since the beginning."""
        found = [after - before for before, after in zip(self._before, self._counts(), strict=True)]
        setting = self._world.setting
        return Row(setting.num_nodes, setting.world_size, self._what, *found)


def reach(world: World, condition: Callable[[], bool], limit_s: float = 600.0) -> None:
    """Let time pass until something is so."""
    if not world.timeline.run(limit_s, condition):
        raise SystemExit(f"not reached within {limit_s:g} virtual seconds")


def measure(nodes: int, ranks_per_node: int, seed: int, saves: int, *, alone: bool) -> list[Row]:
    """Start a job, save, start it again, restore."""
    setting = Setting(
        num_nodes=nodes,
        ranks_per_node=ranks_per_node,
        every_steps=20,
        interleaved=False,
        relayout=0.0,
        config={"restore_pass_on": "off"} if alone else {},
    )
    rows: list[Row] = []
    with World(setting, seed=seed, measures=True) as world:
        job = world.start_job()
        meter = Meter(world, "start")
        reach(world, lambda: job.phase == "joined")
        rows.append(meter.read())
        reach(world, lambda: job.is_training)
        for number in range(saves + 1):
            meter = Meter(world, "save" if number else "first save")
            reach(world, lambda number=number: len(world.checks.whole) > number)  # type: ignore[misc]
            row = meter.read()
            began, over = world.checks.whole[-1]
            row.latency_s = over - began
            rows.append(row)
        job.end()
        reach(world, lambda: world.job is not job)
        again = world.job
        assert again is not None
        reach(world, lambda: again.phase == "joined")
        meter = Meter(world, "restore")
        reach(world, lambda: again.is_training)
        rows.append(meter.read())
        later = [row for row in rows if row.what == "save"]
        mean = Row(nodes, nodes * ranks_per_node, "save")
        for name in list(asdict(mean))[3:]:
            setattr(mean, name, sum(getattr(row, name) for row in later) / max(1, len(later)))
        return [*[row for row in rows[:-1] if row.what != "save"], mean, rows[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--saves", type=int, default=3, help="saves after the first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="restores without passing on: restore_pass_on='off'")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for nodes in options.nodes:
        begun = time.perf_counter()
        rows += measure(nodes, options.ranks_per_node, options.seed, options.saves, alone=options.alone)
        print(f"{nodes} nodes: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    names = list(asdict(rows[0]))
    table = [
        names,
        *[
            [f"{value:.3f}" if isinstance(value, float) else str(value) for value in asdict(row).values()]
            for row in rows
        ],
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(names))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
