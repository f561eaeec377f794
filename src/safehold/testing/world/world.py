"""A world: machines, storage, network, launcher and checks in one virtual time."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from safehold.events import Event, EventStream
from safehold.testing.world import fibers
from safehold.testing.world.checks import Checks
from safehold.testing.world.job import Job, Launcher
from safehold.testing.world.machine import Agent, Machine
from safehold.testing.world.memory import Shared
from safehold.testing.world.network import Fabric
from safehold.testing.world.setting import Setting
from safehold.testing.world.storage import URL, Storage
from safehold.testing.world.timeline import Timeline, virtual_time

HEAL_S, REST_S = 900.0, 5.0
TERSE_NODES = 16


class World:
    """See the package.

    Attributes:
        setting: What it is like.
        timeline: Its time.
        machines: All of them, spares included.
        storage: The run directory.
        fabric: The networks between agents.
        launcher: Starts the job.
        checks: The invariants.
        measures: Whether CPU time of dispatchers is taken.
        is_healing: Whether the faults have ended.
        is_resting: Whether the job makes no more steps.
    """

    def __init__(self, setting: Setting, *, seed: int = 0, measures: bool = False) -> None:
        self.setting, self.measures = setting, measures
        self.timeline = Timeline(seed)
        self.timeline.is_terse = setting.num_nodes > TERSE_NODES
        self.url = URL
        self.shared = Shared()
        self.storage = Storage(self.timeline, setting.storage_s)
        self.fabric = Fabric(self)
        self.machines = [Machine(self, f"n{number}") for number in range(setting.num_nodes + setting.num_spares)]
        self._num_machines = len(self.machines)
        self.launcher = Launcher(self)
        self.checks = Checks(self)
        self.timeline.after_event = self.checks.after_event
        self.is_healing = self.is_resting = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(virtual_time(self.timeline, self._sleep))
        self.timeline.at(5.0, None, self.launcher.watch)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for machine in self.machines:
            machine.die()
        self._stack.close()

    def _sleep(self, seconds: float) -> None:
        fiber = fibers.current()
        if fiber is not None:
            fiber.pause(seconds)
        else:
            self.timeline.sleep(seconds)

    def events(self, who: str) -> EventStream:
        """Return an event stream whose events come into the trace, and which reports what no honest agent says."""
        stream = EventStream("agent", self.timeline)

        def listen(event: Event) -> None:
            if event.stage == "failed":
                self.timeline.note("event", f"{who}: {event.phase}: {event.fields.get('error', '')}")
                if event.phase == "heard":
                    self.timeline.problems.append(self.timeline.violation(str(event.fields.get("error"))))

        stream.subscribe(listen)
        return stream

    # -- the job -------------------------------------------------------------------------------------------------------------

    def start_job(self, restore_step: int | None = None) -> Job:
        """Start the job now."""
        return self.launcher.start(restore_step=restore_step)

    @property
    def job(self) -> Job | None:
        """The newest start of the job."""
        return self.launcher.job

    def job_ended(self, job: Job) -> None:
        """A job has ended; the newest is started again."""
        if job is self.launcher.job:
            self.launcher.restart_later()

    def usable_machines(self) -> list[Machine]:
        """Return machines for a start of the job: those that live, and new ones in the place of those that died.

        Processes that stand still on one of them do not hinder those that are started there.
        """
        while True:
            self.machines = [machine for machine in self.machines if machine.alive]
            if len(self.machines) >= self.setting.num_nodes:
                return self.machines[: self.setting.num_nodes]
            self.machines.append(Machine(self, f"n{self._num_machines}"))
            self._num_machines += 1

    def agents(self) -> list[Agent]:
        """Return all agents that live."""
        return [agent for machine in self.machines for agent in machine.agents if agent.process.alive]

    # -- time ------------------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.timeline.run(seconds)

    def heal(self) -> None:
        """End all faults."""
        self.timeline.note("heal")
        self.is_healing = True
        self.storage.heal()
        self.fabric.heal()
        for machine in self.machines:
            machine.resume()

    def finish(self) -> None:
        """End all faults and require that saves succeed again, that nothing waits, and that what was promised is there.

        Raises:
            Violation: See `checks`.
        """
        self.heal()
        started = self.timeline.now
        if self.job is None:
            self.start_job()
        if not self.timeline.run(HEAL_S, lambda: self.checks.num_whole_since(started) >= 2):
            raise self.timeline.violation(f"no two saves became durable within {HEAL_S:g} s after the faults had ended")
        self.is_resting = True
        for _ in range(int(self.checks.limit_s / REST_S)):
            self.run(REST_S)
            if self.checks.unrest() is None:
                break
        self.run(self.setting.wire["agent_linger_s"] + REST_S)
        self.checks.at_end()
