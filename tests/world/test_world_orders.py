"""Two nodes with a rank each, one save: every fault at every event of it, and messages that come late or are lost, one by one and in pairs.

What is too much for every run is done in parts (`STRIDE`); `tests/soak` does all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from safehold.testing.world import Setting, World

SEED = 5
STRIDE = 12
SETTING = Setting(num_nodes=2, every_steps=10, undeclared=False, relayout=0.0)


Explore = Callable[[int, int], int]


def _machine(world: World, index: int) -> str:
    assert world.job is not None
    return world.job.machines[index].name


def _cut(world: World, seconds: float) -> None:
    pair = _machine(world, 0), _machine(world, 1)
    world.fabric.cut(*pair)
    world.timeline.at(seconds, None, lambda: world.fabric.heal_cut(*pair))


def _stop(world: World, index: int, seconds: float) -> None:
    machine = world.machines[index]
    machine.stop()
    world.timeline.at(seconds, None, machine.resume)


def _hang(world: World, index: int, seconds: float) -> None:
    name = _machine(world, index)
    world.storage.hanging.add(name)
    world.timeline.at(seconds, None, lambda: world.storage.heal(name))


def _kill_agent(world: World, index: int) -> None:
    for agent in list(world.machines[index].agents):
        agent.process.kill()


def _kill_flusher(world: World, index: int) -> None:
    for agent in world.machines[index].agents:
        if agent.flusher_process is not None:
            agent.flusher_process.kill()


def _kill_rank(world: World, rank: int) -> None:
    assert world.job is not None
    world.job.trainers[rank].process.kill()


FAULTS: dict[str, Callable[[World], None]] = {
    "lead's agent dies": lambda world: _kill_agent(world, 0),
    "follower's agent dies": lambda world: _kill_agent(world, 1),
    "lead's machine dies": lambda world: world.machines[0].die(),
    "follower's machine dies": lambda world: world.machines[1].die(),
    "lead's flusher dies": lambda world: _kill_flusher(world, 0),
    "follower's flusher dies": lambda world: _kill_flusher(world, 1),
    "rank 0 dies": lambda world: _kill_rank(world, 0),
    "rank 1 dies": lambda world: _kill_rank(world, 1),
    "lead's machine stops": lambda world: _stop(world, 0, 25.0),
    "follower's machine stops": lambda world: _stop(world, 1, 25.0),
    "a short cut": lambda world: _cut(world, 3.0),
    "a long cut": lambda world: _cut(world, 20.0),
    "lead's storage hangs": lambda world: _hang(world, 0, 45.0),
    "follower's storage hangs": lambda world: _hang(world, 1, 45.0),
    "the job is started again": lambda world: world.start_job() and None,
}


def one_save(setup: Callable[[World], None]) -> World:
    """A job up to its first save, which `setup` may disturb; then it has to go on."""
    with World(SETTING, seed=SEED) as world:
        setup(world)
        world.start_job()
        world.run(30.0)
        world.finish()
    return world


def events_of_the_save() -> tuple[range, range]:
    """Return the numbers of the events, and of the messages, from the beginning of the first save to its verdict."""
    found: list[tuple[int, int]] = []

    def watch(world: World) -> None:
        begun, verdict = world.checks.begun, world.checks.verdict

        def at_begin(*args: object) -> None:
            found.append((world.timeline.num_events, world.fabric.num_sent))
            begun(*args)  # type: ignore[arg-type]

        def at_verdict(*args: object) -> None:
            found.append((world.timeline.num_events, world.fabric.num_sent))
            verdict(*args)  # type: ignore[arg-type]

        world.checks.begun, world.checks.verdict = at_begin, at_verdict  # type: ignore[method-assign]

    one_save(watch)
    (first, sent), (last, sent_last) = found[0], found[3]
    return range(first, last + 3), range(sent + 1, sent_last + 1)


def strike(number: int, fault: Callable[[World], None]) -> None:
    def setup(world: World) -> None:
        def before(event: int) -> None:
            if event == number:
                fault(world)

        world.timeline.before_event = before

    one_save(setup)


def explore_faults(stride: int, offset: int) -> int:
    """Every fault before every event of the save; returns how many cases there are in all."""
    events, _ = events_of_the_save()
    cases = list(itertools.product(events, sorted(FAULTS)))
    for number, name in cases[offset::stride]:
        try:
            strike(number, FAULTS[name])
        except AssertionError as exc:
            raise AssertionError(f"{name}, before event {number}: {exc}") from exc
    return len(cases)


def explore_messages(stride: int, offset: int) -> int:
    """Messages of the save that come late, by less or by more than others wait for them, one by one and in pairs."""
    _, messages = events_of_the_save()
    late = [(number, seconds) for number in messages for seconds in (0.4, 4.0, 12.0)]
    cases = [dict([one]) for one in late] + [dict(pair) for pair in itertools.combinations(late, 2)]
    for delays in cases[offset::stride]:

        def setup(world: World, delays: dict[int, float] = delays) -> None:
            world.fabric.delay_message = lambda number: delays.get(number, 0.0)

        try:
            one_save(setup)
        except AssertionError as exc:
            raise AssertionError(f"messages late by {delays}: {exc}") from exc
    return len(cases)


def explore_losses(stride: int, offset: int) -> int:
    """A cut before each message, long enough to lose it or not, and another one before a later message."""
    _, messages = events_of_the_save()
    cuts = [(number, seconds) for number in messages for seconds in (0.5, 5.0, 12.0)]
    cases = [dict([one]) for one in cuts] + [dict(pair) for pair in itertools.combinations(cuts, 2)]
    for case in cases[offset::stride]:

        def setup(world: World, case: dict[int, float] = case) -> None:
            def before(number: int) -> float:
                seconds = case.pop(number, None)
                if seconds is not None:
                    world.timeline.at(0.0, None, lambda: _cut(world, seconds))
                return 0.0

            world.fabric.delay_message = before

        told = dict(case)
        try:
            one_save(setup)
        except AssertionError as exc:
            raise AssertionError(f"cuts before messages {told}: {exc}") from exc
    return len(cases)


@pytest.mark.parametrize("explore", [explore_faults, explore_messages, explore_losses])
def test_orders(explore: Explore) -> None:
    assert explore(STRIDE, 3) > 100
