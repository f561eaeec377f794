"""One start of the job, and the launcher that starts it again: ranks on machines, their exchange at the start, steps in lockstep.

Invariants: as under a launcher, the death of one rank ends all, soon; so does standing still for long. A machine that died is replaced
by a spare one. What stands still cannot be killed: it may go on later, beside the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safehold.agent import messages as m
from safehold.testing.world.machine import Machine
from safehold.testing.world.trainer import Trainer

if TYPE_CHECKING:
    from safehold.testing.world.world import World

Answer = Callable[[Any], None]


class Job:
    """See the module.

    Attributes:
        number: Counts starts.
        wire: The world as agents are told it.
        machines: By node index.
        trainers: By rank.
        is_over: Whether it has ended.
        is_training: Whether all ranks are restored.
        step: The last step that all ranks have reached.
        phase: What all ranks have done of their start: `connected`, `met`, `opened`, `joined`.
        opened: What opening the run gave.
        restore_step: What its ranks ask to restore; None: the newest.
    """

    def __init__(self, world: World, number: int, machines: list[Machine], restore_step: int | None = None) -> None:
        setting = world.setting
        self.world, self.number, self.machines, self.restore_step = world, number, machines, restore_step
        token = f"{world.timeline.chance.getrandbits(128):032x}"
        node_of = [rank // setting.ranks_per_node for rank in range(setting.world_size)]
        self.wire = m.World(token, setting.world_size, node_of, [machine.name for machine in machines])
        self.addresses: dict[int, str] = {}
        self._all_addresses: list[str] = []
        self.opened: m.RunOpened = m.RunOpened(0, "", 0, None, [])
        self.is_over = self.is_training = False
        self.step = 0
        self.phase = "begun"
        self.moved_at = world.timeline.now
        self._gates: dict[str, dict[int, tuple[Trainer, Answer]]] = {}
        self._restored: dict[int, int] = {}
        self.trainers = [Trainer(self, rank, machines[node_of[rank]]) for rank in range(setting.world_size)]
        for trainer in self.trainers:
            trainer.run(trainer.life())

    def all_addresses(self) -> list[str]:
        """Return where the agents listen, by node, once all ranks know theirs."""
        if not self._all_addresses:
            self._all_addresses = [self.addresses[min(ranks)] for ranks in self.wire.ranks_by_node()]
        return self._all_addresses

    # -- what ranks wait for ---------------------------------------------------------------------------------------------

    def met(self, trainer: Trainer, gate: str) -> Callable[[Answer], None]:
        """Wait for all ranks."""
        return lambda answer: self._meet(gate, trainer, answer, 0.001)

    def stepped(self, trainer: Trainer, step: int) -> Callable[[Answer], None]:
        """Wait until all ranks have made their next step that matters: it is sent into the script."""
        setting = self.world.setting
        ahead = setting.every_steps - step % setting.every_steps if setting.every_steps else 1
        if setting.every_seconds:
            ahead = 1

        def wait(answer: Answer) -> None:
            self._meet(f"step {step}", trainer, lambda _: answer(step + ahead), ahead * setting.step_s, step)

        return wait

    def _meet(self, gate: str, trainer: Trainer, answer: Answer, after_s: float, step: int | None = None) -> None:
        here = self._gates.setdefault(gate, {})
        here[trainer.rank] = (trainer, answer)
        if len(here) < len(self.trainers) or (step is not None and self.world.is_resting):
            return
        del self._gates[gate]
        self.moved_at = self.world.timeline.now
        if step is not None:
            self.step = step
        else:
            self.phase = gate
        timeline = self.world.timeline
        for other, resume in here.values():
            timeline.at(after_s * timeline.between(1.0, 1.02), other.process, lambda resume=resume: resume(None))  # type: ignore[misc]

    def restored(self, trainer: Trainer, step: int) -> None:
        """A rank is through its restore."""
        self._restored[trainer.rank] = step
        if len(self._restored) == len(self.trainers):
            if len(set(self._restored.values())) > 1:
                raise self.world.timeline.violation(f"ranks restored different steps: {self._restored}")
            self.is_training = True
            self.moved_at = self.world.timeline.now
            self.world.timeline.note("job", f"job {self.number} goes on at step {step}")

    # -- its end -----------------------------------------------------------------------------------------------------------

    def rank_died(self, trainer: Trainer) -> None:
        """One is gone: the launcher will notice."""
        if not self.is_over:
            setting, timeline = self.world.setting, self.world.timeline
            timeline.at(timeline.between(*setting.notice_s), None, self.end)

    def end(self) -> None:
        """Kill all ranks that can be reached, and start again."""
        if self.is_over:
            return
        self.is_over = True
        self.world.timeline.note("job", f"job {self.number} ends")
        for trainer in self.trainers:
            if not trainer.process.stopped:
                trainer.process.kill()
        self.world.job_ended(self)

    @property
    def is_beaten(self) -> bool:
        """Whether another job has been started since."""
        return self.is_over or any(trainer.superseded for trainer in self.trainers)


class Launcher:
    """Starts the job, and starts it again; looks now and then whether it moves."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_jobs = 0
        self.jobs: list[Job] = []
        self._is_starting = False

    @property
    def job(self) -> Job | None:
        """The newest."""
        return self.jobs[-1] if self.jobs else None

    def start(self, machines: list[Machine] | None = None, restore_step: int | None = None) -> Job:
        """Start a job now, on these machines or on those that can be reached."""
        self._is_starting = False
        self._num_jobs += 1
        found = machines or self._world.usable_machines()
        self._world.timeline.note("job", f"job {self._num_jobs} starts on {[machine.name for machine in found][:8]}")
        job = Job(self._world, self._num_jobs, found, restore_step)
        alive = [entry for entry in self.jobs if any(rank.process.alive for rank in entry.trainers)]
        self.jobs = [*alive[-3:], job]
        return job

    def restart_later(self) -> None:
        """Start the job again in a while."""
        if not self._is_starting:
            self._is_starting = True
            timeline = self._world.timeline
            timeline.at(timeline.between(*self._world.setting.restart_s), None, self._start_again)

    def _start_again(self) -> None:
        self.start()

    def watch(self) -> None:
        """Look whether the job moves, from now on."""
        setting, timeline = self._world.setting, self._world.timeline
        job = self.job
        if (
            job is not None
            and not job.is_over
            and not self._world.is_resting
            and timeline.now - job.moved_at > setting.hang_s
        ):
            timeline.note("job", f"job {job.number} stands still")
            job.end()
        timeline.at(5.0, None, self.watch)
