"""Each invariant of a world catches a bug that is planted for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worlds import live, whole_save

from safehold.agent.arenas import ArenaPool
from safehold.agent.follower import Follower
from safehold.agent.head import Head
from safehold.agent.hearing import Hearing
from safehold.agent.saves import NodeSaves
from safehold.errors import CheckpointError, DeadlineError
from safehold.format import paths
from safehold.pipeline import ledger, maintenance
from safehold.policy import belief, commit
from safehold.testing.world import Setting, Violation, World
from safehold.testing.world.flushers import PackWork


def violated(match: str, run: Callable[[int], Any], seeds: int = 12) -> None:
    """Require that one of some seeds finds it."""
    for seed in range(seeds):
        try:
            run(seed)
        except Violation as exc:
            assert match in str(exc), str(exc)
            assert "seed " in str(exc)
            return
    raise AssertionError(f"nothing was found wrong by {seeds} seeds; looked for: {match}")


def calm(seed: int, seconds: float = 60.0, **fixed: Any) -> None:
    with World(Setting(**{"num_nodes": 2, **fixed}), seed=seed) as world:
        world.start_job()
        world.run(seconds)
        world.finish()


def test_a_pack_that_is_not_durable_when_the_flusher_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackWork, "_write", PackWork._sync)
    violated("is believed, and the pack of rank", calm)


def test_a_record_without_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    record = maintenance.record

    def less(tier: Any, config: Any, arguments: dict[str, Any], events: Any) -> Any:
        return record(tier, config, {**arguments, "packs": arguments["packs"][:1]}, events)

    monkeypatch.setitem(maintenance.OPERATIONS, "record", less)
    violated("is believed, and has packs of ranks", lambda seed: calm(seed, ranks_per_node=2))


def test_an_arena_that_is_handed_out_while_it_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    use = NodeSaves._granted

    def granted(self: Any, save: Any, peer: Any, message: Any, arena: Any) -> None:
        use(self, save, peer, message, arena)
        arena.busy = False
        for other in list(self._saves.values()):
            other.blocked = False

    monkeypatch.setattr(NodeSaves, "_granted", granted)
    monkeypatch.setattr("safehold.agent.node_save.NodeSave.holds_arenas", property(lambda self: False))
    violated("pack of rank", lambda seed: calm(seed, every_steps=1, step_s=0.3, write_s=(0.5, 2.0)))


def test_a_manifest_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(tier: Any, path: str, data: bytes, **_: Any) -> None:
        tier.put(path, data)
        if path.endswith(paths.MANIFEST):
            tier.put(path, data + b" ")

    monkeypatch.setattr(ledger, "_put_new", put)
    violated("was committed twice, and not alike", calm)


def stopped_while_it_publishes(seed: int) -> World:
    """The lead's machine stops between the last look at newer incarnations and the manifest, and wakes up when another job has begun."""
    check = ledger._check_plan
    with World(Setting(num_nodes=2), seed=seed) as world, pytest.MonkeyPatch.context() as patched:

        def stop(*args: Any) -> None:
            patched.undo()
            check(*args)
            world.machines[0].stop()

        job = world.start_job()
        patched.setattr(ledger, "_check_plan", stop)
        assert world.timeline.run(60.0, lambda: world.machines[0].stopped)
        world.launcher.start()
        opened = paths.incarnation(2)
        assert world.timeline.run(60.0, lambda: opened in world.storage.files)
        world.run(4.0)
        assert job is not world.job
        world.machines[0].resume()
        world.finish()
    return world


def test_an_old_incarnation_that_commits_late_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = stopped_while_it_publishes(3)
    assert f"manifest     {paths.CHECKPOINTS}/000000005/1-0/manifest.json" in str(world.timeline.violation(""))
    assert min(world.checks.told).incarnation == 2
    monkeypatch.setattr(ledger, "newer_incarnation", lambda tier, incarnation: None)
    violated("was told to be durable, and is not believed", stopped_while_it_publishes)


def test_a_checkpoint_that_is_no_longer_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(belief, "accepted_for_new", lambda *_, **__: [])
    violated("was told to be durable, and nothing has taken its place", lambda seed: live(seed, 120.0))


def test_a_restore_of_an_older_step(monkeypatch: pytest.MonkeyPatch) -> None:
    find = maintenance.find

    def older(tier: Any, config: Any, arguments: dict[str, Any], events: Any) -> Any:
        newest = find(tier, config, arguments, events)
        exclude = [newest["commit"]] if newest["commit"] else []
        try:
            second = find(tier, config, {**arguments, "exclude": exclude}, events)
        except CheckpointError:  # there is only this one
            return newest
        return second if second["commit"] else newest

    monkeypatch.setitem(maintenance.OPERATIONS, "find", older)
    violated("was offered, and", lambda seed: live(seed, 120.0))


def test_a_verdict_that_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Head._abandoned

    def abandoned(self: Any, action: Any) -> None:
        if not isinstance(action.error, DeadlineError):
            tell(self, action)

    monkeypatch.setattr(Head, "_abandoned", abandoned)
    monkeypatch.setattr(commit.CommitMachine, "_node_recorded", lambda *_: None)
    violated("has no verdict", lambda seed: calm(seed, 400.0, hang_s=1e6))


def test_an_arena_that_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaPool, "free", lambda self, arena: None)
    violated("are not freed", lambda seed: rest_after_one(seed))


def rest_after_one(seed: int) -> None:
    with World(Setting(num_nodes=2, every_steps=400, step_s=0.1), seed=seed) as world:
        whole_save(world)
        world.is_resting = True
        world.run(30.0)
        world.checks.at_end()


def test_saves_that_never_succeed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaPool, "free", lambda self, arena: None)
    violated("no two saves became durable", calm)


def test_memory_that_grows_with_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safehold.agent.saves.CLOSED_KEPT", 1 << 30)
    settle = NodeSaves._settle

    def keep(self: Any, save: Any) -> None:
        ranks = dict(save.ranks)
        settle(self, save)
        save.metrics = {str(number): number for number in range(20 * len(ranks))} or save.metrics

    monkeypatch.setattr(NodeSaves, "_settle", keep)
    violated("keeps", lambda seed: calm(seed, 100.0, every_steps=1))


def test_a_memory_offer_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaPool, "holding", lambda self, commit: [a for a in self._arenas.values() if a.fd >= 0])
    violated("is offered as", lambda seed: live(seed, 200.0))


def test_a_handler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(NodeSaves, "staged", broken)
    with pytest.raises((Violation, KeyError), match="planted"):
        calm(1)


def test_words_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "_check_ranks", lambda self, node, ranks: self._ranks_of[99])
    with pytest.raises((Violation, KeyError)):
        calm(1)
    monkeypatch.undo()
    monkeypatch.setattr("safehold.agent.words.EVENTS", {})
    violated("no event", calm)


def test_what_was_said_while_nodes_had_lost_each_other_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hearing, "_tell_what_is_open", lambda self: None)
    monkeypatch.setattr(Follower, "lost_error", lambda self: None)
    with pytest.raises((Violation, TypeError, AttributeError)):
        for seed in range(40):
            live(seed, 120.0)
