"""Random faults: what may break in a world, and how often.

Invariants: all chance is the timeline's. A fault that lasts ends by itself, and at the latest when the world heals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from safehold.testing.world.machine import Agent, Machine

if TYPE_CHECKING:
    from safehold.testing.world.world import World


class Faults:
    """Strikes now and then.

    Args:
        world: Where.
        every_s: Shortest and longest time from one fault to the next.
        kinds: Which ones may strike; by default all.
    """

    def __init__(self, world: World, *, every_s: tuple[float, float], kinds: tuple[str, ...] = ()) -> None:
        self._world, self._timeline = world, world.timeline
        self._every_s = every_s
        self._all: dict[str, Callable[[], None]] = {
            "rank dies": self.rank_dies,
            "agent dies": self.agent_dies,
            "flusher dies": self.flusher_dies,
            "machine dies": self.machine_dies,
            "lead dies": self.lead_dies,
            "machine stops": self.machine_stops,
            "agent stops": self.agent_stops,
            "job twice": self.job_twice,
            "roll back": self.roll_back,
            "cut": self.cut,
            "split": self.split,
            "slow network": self.slow_network,
            "storage fails": self.storage_fails,
            "storage hangs": self.storage_hangs,
            "storage is slow": self.storage_is_slow,
        }
        self._kinds = kinds or tuple(self._all)
        self.struck: dict[str, int] = {}
        self._next()

    def _next(self) -> None:
        self._timeline.at(self._timeline.between(*self._every_s), None, self._strike)

    def _strike(self) -> None:
        if self._world.is_healing:
            return
        kind = self._timeline.chance.choice(self._kinds)
        self.strike(kind)
        self._next()

    def strike(self, kind: str) -> None:
        """Let a fault happen now."""
        self.struck[kind] = self.struck.get(kind, 0) + 1
        self._timeline.note("fault", kind)
        self._all[kind]()

    # -- who -------------------------------------------------------------------------------------------------------------

    def _machine(self) -> Machine | None:
        job = self._world.job
        found = [machine for machine in (job.machines if job else ()) if machine.alive]
        return self._timeline.chance.choice(found) if found else None

    def _agent(self) -> Agent | None:
        found = [agent for agent in self._world.agents() if not agent.process.stopped]
        return self._timeline.chance.choice(found) if found else None

    def _pair(self) -> tuple[str, str] | None:
        job = self._world.job
        if job is None or len(job.machines) < 2:
            return None
        one, other = self._timeline.chance.sample([machine.name for machine in job.machines], 2)
        if self._timeline.chance.random() < 0.7:  # the lead's links are those that are used
            lead = job.machines[0].name
            one, other = lead, one if one != lead else other
        return one, other

    def _later(self, shortest_s: float, longest_s: float, work: Callable[[], None]) -> None:
        self._timeline.at(self._timeline.between(shortest_s, longest_s), None, work)

    # -- processes and machines --------------------------------------------------------------------------------------------

    def rank_dies(self) -> None:
        """A rank is killed."""
        job = self._world.job
        if job is not None and not job.is_over:
            self._timeline.chance.choice(job.trainers).process.kill()

    def agent_dies(self) -> None:
        """An agent is killed, with its flusher and its memory; its ranks start another."""
        agent = self._agent()
        if agent is not None:
            agent.process.kill()

    def flusher_dies(self) -> None:
        """A flusher is killed."""
        agent = self._agent()
        if agent is not None and agent.flusher_process is not None:
            agent.flusher_process.kill()

    def machine_dies(self) -> None:
        """A machine is lost for good."""
        machine = self._machine()
        if machine is not None:
            machine.die()

    def lead_dies(self) -> None:
        """The machine or the agent beside rank 0 is lost."""
        job = self._world.job
        if job is None:
            return
        if self._timeline.chance.random() < 0.5:
            job.machines[0].die()
        else:
            for agent in job.machines[0].agents:
                agent.process.kill()

    def machine_stops(self) -> None:
        """A machine stands still, and wakes up later: perhaps when another job runs already."""
        machine = self._machine()
        if machine is not None and not machine.stopped:
            machine.stop()
            self._later(0.5, 200.0, machine.resume)

    def agent_stops(self) -> None:
        """An agent stands still, or its flusher does; both wake up later."""
        agent = self._agent()
        if agent is None:
            return
        flusher = agent.flusher_process
        both = [agent.process] if flusher is None else [agent.process, flusher]
        chosen = self._timeline.chance.choice([both, both[-1:]])
        for process in chosen:
            process.stop()
        self._world.fabric.changed()

        def resume() -> None:
            for process in chosen:
                process.resume()
            self._world.fabric.changed()

        self._later(0.1, 60.0, resume)

    def job_twice(self) -> None:
        """Somebody starts the job again, while it runs."""
        job = self._world.job
        if job is not None:
            self._world.launcher.start()

    def roll_back(self) -> None:
        """The job ends, and goes on from an older checkpoint."""
        job, believed = self._world.job, self._world.checks.believed
        if job is not None and believed:
            job.end()
            step = self._timeline.chance.choice(believed).step
            self._timeline.at(2.0, None, lambda: self._start_at(step))

    def _start_at(self, step: int) -> None:
        if any(commit.step == step for commit in self._world.checks.believed):
            self._world.launcher.start(restore_step=step)

    # -- network and storage -----------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Two machines cannot reach each other for a while."""
        pair = self._pair()
        if pair is not None:
            self._world.fabric.cut(*pair)
            self._later(0.01, 30.0, lambda: self._world.fabric.heal_cut(*pair))

    def split(self) -> None:
        """Some machines cannot reach the others for a while."""
        job = self._world.job
        if job is None or len(job.machines) < 2:
            return
        names = [machine.name for machine in job.machines]
        self._timeline.chance.shuffle(names)
        size = self._timeline.chance.randint(1, len(names) - 1)
        pairs = [(one, other) for one in names[:size] for other in names[size:]]
        for pair in pairs:
            self._world.fabric.cut(*pair)

        def heal() -> None:
            for pair in pairs:
                self._world.fabric.heal_cut(*pair)

        self._later(0.01, 40.0, heal)

    def slow_network(self) -> None:
        """Messages between two machines take long for a while."""
        pair = self._pair()
        if pair is not None:
            key = frozenset(pair)
            self._world.fabric.delay_s[key] = self._timeline.between(0.1, 6.0)
            self._later(1.0, 60.0, lambda: self._world.fabric.at_its_pace(*pair))

    def _storage_of(self) -> list[str]:
        """One machine, or all."""
        machine = self._machine()
        if machine is None:
            return []
        if self._timeline.chance.random() < 0.3:
            return [entry.name for entry in self._world.machines]
        return [machine.name]

    def storage_fails(self) -> None:
        """Storage refuses everything for a while."""
        storage, names = self._world.storage, self._storage_of()
        storage.failing.update(names)
        self._later(0.5, 40.0, lambda: storage.failing.difference_update(names))

    def storage_hangs(self) -> None:
        """Storage does not answer for a while."""
        storage, names = self._world.storage, self._storage_of()
        storage.hanging.update(names)

        def heal() -> None:
            for name in names:
                storage.heal(name)

        self._later(0.5, 120.0, heal)

    def storage_is_slow(self) -> None:
        """Storage takes far longer for a while."""
        storage, names = self._world.storage, self._storage_of()
        for name in names:
            storage.slow[name] = self._timeline.between(5.0, 200.0)

        def heal() -> None:
            for name in names:
                storage.slow.pop(name, None)

        self._later(5.0, 60.0, heal)
