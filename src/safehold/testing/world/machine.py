"""A machine of the world: its agents (the real server without its sockets), and the lines that trainers talk to them by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from safehold.agent import messages as m
from safehold.agent.connection import Connection
from safehold.agent.means import Means
from safehold.agent.net.seam import Listeners
from safehold.agent.server import AgentServer
from safehold.config import Config
from safehold.testing.world.fibers import Fiber
from safehold.testing.world.flushers import WorldFlusher
from safehold.testing.world.memory import WorldPool
from safehold.testing.world.network import Endpoint
from safehold.testing.world.storage import URL
from safehold.testing.world.timeline import Process

if TYPE_CHECKING:
    from safehold.testing.world.trainer import Trainer
    from safehold.testing.world.world import World


class Machine:
    """See the module.

    Attributes:
        name: Its host name.
        alive: Until it dies.
        agents: Those that run on it, oldest first; more than one only where one does not answer.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.agents: list[Agent] = []
        self._processes: list[Process] = []
        self._num_agents = 0

    def process(self, name: str) -> Process:
        """Make a process on it."""
        made = Process(self.world.timeline, f"{self.name}/{name}")
        self._processes = [found for found in self._processes if found.alive]
        self._processes.append(made)
        return made

    def agent(self) -> Agent:
        """Return the agent that answers, or start one."""
        self.agents = [found for found in self.agents if found.process.alive]
        for found in self.agents:
            if not found.process.stopped:
                return found
        self._num_agents += 1
        self.agents.append(Agent(self.world, self, self._num_agents))
        return self.agents[-1]

    def die(self) -> None:
        """All its processes end at once, and what was not on storage is gone."""
        if not self.alive:
            return
        self.alive = False
        self.world.timeline.note("machine", f"{self.name} dies")
        for process in self._processes:
            process.kill()
        self.world.storage.machine_died(self.name)
        self.world.fabric.changed()

    def stop(self) -> None:
        """Nothing on it goes on, until `resume`."""
        for process in self._processes:
            process.stop()
        self.world.fabric.changed()

    def resume(self) -> None:
        """It goes on where it was."""
        for process in self._processes:
            process.resume()
        self.world.fabric.changed()

    @property
    def stopped(self) -> bool:
        """Whether something on it is stopped."""
        return any(process.stopped and process.alive for process in self._processes)


class Agent(AgentServer):
    """The real server; its events come from the world.

    Attributes:
        process: Where it runs.
        busy_s: CPU seconds of its dispatcher, where they are measured; `planning_s` those of making plans beside it.
    """

    def __init__(self, world: World, machine: Machine, number: int) -> None:
        self.process = machine.process(f"agent {number}")
        events = world.events(self.process.name)
        timeline = self._timeline = world.timeline
        means = Means(
            spawn=self._spawn,
            rank_control=world.shared.rank_control,
            node_control=world.shared.node_control,
            memory=world.shared.memory,
        )
        super().__init__(URL, cast(Any, None), log_fd=None, events=events, clock=timeline, means=means)
        self._world, self.machine = world, machine
        self._config = Config.from_wire(world.setting.wire)
        self._flusher = WorldFlusher(world, machine, self.process, post=self.post, dispatch=self.dispatch)
        self._pool = WorldPool(
            world.shared,
            self.post,
            self._config.memory_budget_bytes,
            released=self._flusher.forget,
            spawn=self._spawn,
        )
        self._wakes_at: float | None = None
        self.busy_s = self.planning_s = 0.0
        self._fibers: list[Fiber] = []
        self.process.on_end.append(self._kill_fibers)
        timeline.note("agent", f"{self.process.name} starts")
        self.post(lambda: None)

    # -- its dispatcher --------------------------------------------------------------------------------------------------

    def post(self, work: Callable[[], None]) -> None:
        """See `AgentServer`."""
        self._timeline.at(0.0, self.process, lambda: self.dispatch(work))

    def dispatch(self, work: Callable[[], None]) -> None:
        """One turn of the dispatcher, as `AgentServer.serve` makes them."""
        begun = time.thread_time() if self._world.measures else 0.0
        work()
        self._tick()
        if self._done():
            self._leave()
        else:
            self._wake_in(self._patience())
        if self._world.measures:
            self.busy_s += time.thread_time() - begun

    def _wake_in(self, seconds: float) -> None:
        due = self._timeline.now + seconds
        if self._wakes_at is not None and self._wakes_at <= due + 1e-6:
            return
        self._wakes_at = due

        def wake() -> None:
            if self._wakes_at == due:
                self._wakes_at = None
                self.dispatch(lambda: None)

        self._timeline.at(seconds, self.process, wake)

    def _leave(self) -> None:
        self._timeline.note("agent", f"{self.process.name} leaves")
        for connection in list(self._connections):
            connection.close()
        if self._flusher is not None:
            self._flusher.close()
        if self._pool is not None:
            self._pool.close()
        self.process.kill()
        self._world.fabric.changed()

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        setting = self._world.setting
        if name == "documents" and setting.interleaved:
            self._start_fiber(work)
            return
        known = {"plan": setting.plan_s, "network-close": (0.0, 0.01), "documents": setting.network_s}
        times = known.get(name, setting.populate_s)

        def measured() -> None:
            begun = time.thread_time()
            work()
            self.planning_s += time.thread_time() - begun

        is_measured = name == "plan" and self._world.measures
        self._timeline.at(self._timeline.between(*times), self.process, measured if is_measured else work)

    def _start_fiber(self, work: Callable[[], None]) -> None:
        """Begin what waits in its middle; it ends with the agent."""
        fiber = Fiber(self._timeline, self.process, work)
        self._fibers = [found for found in self._fibers if not found.over]
        self._fibers.append(fiber)
        fiber.start()

    def _kill_fibers(self) -> None:
        for fiber in self._fibers:
            fiber.kill()

    def _make_network(self, hello: m.Hello, listeners: Listeners) -> Endpoint:
        world = hello.world
        name = world.node_names[world.node_of[hello.rank]]
        return self._world.fabric.join(world.token, name, self.process, listeners)

    # -- lines -------------------------------------------------------------------------------------------------------------

    def accept(self, line: Line) -> None:
        """A trainer connects."""
        self._connections.add(line)

    def take(self, line: Line, message: m.Request) -> None:
        """A trainer says something."""
        self.dispatch(lambda: self._handle(line, message, None))

    def ended(self, line: Line) -> None:
        """A trainer's end of a line is closed."""
        self.dispatch(lambda: self._gone(line))

    # -- for the checks ----------------------------------------------------------------------------------------------------

    @property
    def has_trainers(self) -> bool:
        """Whether a trainer is connected."""
        return self._has_trainers()

    @property
    def num_sessions(self) -> int:
        """How many sessions it keeps."""
        return len(self._sessions)

    @property
    def num_idle_sessions(self) -> int:
        """How many of them have no rank; the current one may."""
        return sum(not session.peers for session in self._sessions.values())

    @property
    def current(self) -> Any:
        """The session that owns the run here, or None."""
        return self._current

    @property
    def flusher_process(self) -> Process | None:
        """Where its flusher runs, if it does."""
        assert isinstance(self._flusher, WorldFlusher)
        return self._flusher.running

    @property
    def pool(self) -> WorldPool:
        """Its arenas."""
        assert isinstance(self._pool, WorldPool)
        return self._pool


class Line(Connection):
    """The connection of a trainer: in order both ways, ends when either process does."""

    def __init__(self, world: World, agent: Agent, trainer: Trainer) -> None:
        self._world, self.agent, self._trainer = world, agent, trainer
        self.rank, self.pid = -1, 0
        self.process = None
        self.session = None
        self.orderly, self.linger, self.closed, self.refused = False, True, False, False
        self._down_at = self._up_at = 0.0
        self._is_over = False
        timeline = world.timeline
        timeline.at(0.0, agent.process, lambda: agent.accept(self))
        agent.process.on_end.append(self._agent_ended)
        trainer.process.on_end.append(self.hang_up)

    def _due(self, last: float) -> float:
        return max(last, self._world.timeline.now + self._world.timeline.between(*self._world.setting.local_s))

    # -- the trainer's end -------------------------------------------------------------------------------------------------

    def say(self, message: m.Request) -> None:
        """Send to the agent."""
        self._up_at = self._due(self._up_at)
        timeline = self._world.timeline
        timeline.at(self._up_at - timeline.now, self.agent.process, lambda: self.agent.take(self, message))

    def hang_up(self) -> None:
        """Close the trainer's end."""
        if self._is_over:
            return
        self._is_over = True
        self._up_at = self._due(self._up_at)
        timeline = self._world.timeline
        timeline.at(self._up_at - timeline.now, self.agent.process, lambda: self.agent.ended(self))

    # -- the agent's end -----------------------------------------------------------------------------------------------------

    def reply(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """See `Connection`."""
        if self.closed:
            return
        self._down_at = self._due(self._down_at)
        timeline, trainer = self._world.timeline, self._trainer
        timeline.at(
            self._down_at - timeline.now, trainer.process, lambda: trainer.take(self, cast(m.Reply, message), fds)
        )

    def close(self) -> None:
        """See `Connection`."""
        if not self.closed:
            self.closed = True
            self._agent_ended()

    def flush(self, timeout_s: float) -> None:
        """See `Connection`; what was said is under way."""

    def _agent_ended(self) -> None:
        self._down_at = self._due(self._down_at)
        timeline, trainer = self._world.timeline, self._trainer
        timeline.at(self._down_at - timeline.now, trainer.process, lambda: trainer.line_ended(self))
