"""Starts on some of the nodes each, that knew nothing of each other: joined where they have done nothing, refused where two have."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from joined_disks import LocalJob, LocalWorld
from whole_saves import Promises, believed

from safehold.errors import ConfigurationError
from safehold.format import paths, records
from safehold.pipeline import joining, ledger
from safehold.testing.disk_faults import Op
from safehold.tiers import flash_probe
from safehold.types import CommitId

NODES = ["a", "b", "c", "d"]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_probe, "_TRIAL_BYTES", 4096)


def start(world: LocalWorld, nodes: str, *steps: int) -> list[int]:
    """A job on some of the nodes; returns the steps that it believes at its start."""
    part = LocalWorld(list(nodes), {node: world.disks[node] for node in nodes})
    job = LocalJob(part, Promises())
    job.open()
    found = sorted(commit.step for commit in believed(part.view()))
    for number, step in enumerate(steps):
        job.save(step, number + 1)
    return found


def fresh(*steps: int) -> LocalWorld:
    world = LocalWorld(NODES)
    start(world, "abcd", *steps)
    return world


def steps_of(world: LocalWorld) -> list[int]:
    return sorted(commit.step for commit in believed(world.view()))


@pytest.mark.parametrize("starts", [["ab", "cd"], ["ab", "ab", "ab", "cd"], ["a", "b", "c", "d"], ["cd", "ab", "cd"]])
def test_failed_starts_on_parts_of_the_nodes_cost_nothing(starts: list[str]) -> None:
    world = fresh(10, 20)
    for nodes in starts:
        start(world, nodes)
    assert start(world, "abcd", 30) == [10, 20]
    assert steps_of(world) == [10, 20, 30]
    assert joining.heal(world.view()) == [], "nothing is left to join"


@pytest.mark.parametrize("first_at_work", [True, False])
def test_the_one_that_saved_counts(first_at_work: bool) -> None:
    world = fresh(10, 20)
    order = [("ab", [30, 40]), ("cd", [])] if first_at_work else [("cd", []), ("cd", []), ("ab", [30, 40])]
    for nodes, steps in order:
        start(world, nodes, *steps)
    assert start(world, "abcd") == [10, 20, 30, 40]


def test_what_it_went_back_from_stays_set_aside() -> None:
    world = fresh(10, 20)
    part = LocalWorld(["a", "b"], {node: world.disks[node] for node in "ab"})
    ledger.open_incarnation(part.view(), "back", lambda _: [CommitId(10, 1, 0)], "rollback")
    start(world, "ab", 15)
    start(world, "cd")
    assert start(world, "abcd") == [10, 15]


def test_two_that_saved_are_refused_and_nothing_is_touched() -> None:
    world = fresh(10)
    start(world, "ab", 20)
    start(world, "cd", 30)
    before = {node: disk.num_ops for node, disk in world.disks.items()}
    changes: list[Op] = []
    for disk in world.disks.values():
        disk.fail_at(lambda op: op.changes and not changes.append(op), errno.EIO, times=-1)  # type: ignore[func-returns-value]
    with pytest.raises(ConfigurationError, match="incarnation 2 was opened on node a and, without it, on node c"):
        joining.heal(world.view())
    assert not changes and before


def test_a_save_that_was_only_begun_is_something_that_was_done() -> None:
    world = fresh(10)
    start(world, "ab", 20)
    start(world, "cd")
    world.tiers["c"].put("checkpoints/000000020/2-0/00000-00001.0.safetensors", b"half a pack")
    with pytest.raises(ConfigurationError, match="without it"):
        joining.heal(world.view())


def test_a_node_that_was_away_all_the_time_is_joined_later() -> None:
    world = fresh(10)
    start(world, "a")
    start(world, "bc", 20)
    start(world, "bcd", 30)
    assert start(world, "abcd") == [10, 20, 30]


def test_a_process_of_an_undone_start_is_believed_nowhere() -> None:
    world = fresh(10)
    part = LocalWorld(["c", "d"], {node: world.disks[node] for node in "cd"})
    start(world, "ab", 20)
    late = LocalJob(part, Promises())
    late.open()
    start(world, "abcd", 40)
    with pytest.raises(Exception, match="owns the run now"):
        late.save(30, 1)
    assert steps_of(world) == [10, 20, 40] and start(world, "abcd") == [10, 20, 40]


def test_what_an_undone_start_commits_meanwhile_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fresh(10)
    start(world, "ab", 20)
    part = LocalWorld(["c", "d"], {node: world.disks[node] for node in "cd"})
    late = LocalJob(part, Promises())
    late.open()
    real = ledger.open_incarnation

    def slow(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(ledger, "open_incarnation", real)
        late.save(30, 1)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "open_incarnation", slow)
    joining.heal(world.view())
    assert steps_of(world) == [10, 20, 30]


def two_runs(*steps: int) -> LocalWorld:
    world = LocalWorld(NODES)
    start(world, "ab")
    start(world, "ab", *steps)
    start(world, "cd")
    return world


@pytest.mark.parametrize("steps", [(), (10,)])
def test_a_run_that_was_begun_and_never_saved_gives_way(steps: tuple[int, ...]) -> None:
    world = two_runs(*steps)
    run_id = records.decode_run(world.tiers["a"].get(paths.RUN_JSON, limit_bytes=1 << 16), path="").run_id
    assert start(world, "abcd", 20) == list(steps)
    found = {records.decode_run(world.tiers[n].get(paths.RUN_JSON, limit_bytes=1 << 16), path="").run_id for n in NODES}
    assert len(found) == 1 and (not steps or found == {run_id})
    assert steps_of(world) == [*steps, 20] and start(world, "dcba") == [*steps, 20]


def contradictory() -> LocalWorld:
    world = LocalWorld(["a", "b", "c"])
    start(world, "abc", 10)
    start(world, "a")
    start(world, "a", 20)
    start(world, "bc")
    start(world, "bc")
    return world


def two_small_runs() -> LocalWorld:
    world = LocalWorld(["a", "b", "c"])
    start(world, "a", 10)
    start(world, "bc")
    return world


@pytest.mark.parametrize(
    ("make", "wanted"), [(contradictory, [10, 20]), (two_small_runs, [10])], ids=["incarnations", "runs"]
)
def test_cut_short_anywhere_it_is_done_by_the_next(make: Callable[[], LocalWorld], wanted: list[int]) -> None:
    cut = 0
    while True:
        world, left = make(), [cut]

        def due(op: Op, left: list[int] = left) -> bool:
            left[0] -= op.changes
            return op.changes and left[0] < 0

        for disk in world.disks.values():
            disk.fail_at(due, errno.EIO, times=-1)
        try:
            joining.heal(world.view())
            break
        except Exception:
            pass
        for disk in world.disks.values():
            disk.heal()
        again = LocalWorld(world.nodes, world.disks)
        assert start(again, "abc") == wanted, f"cut short at change {cut}"
        cut += 1
    assert cut > 5
