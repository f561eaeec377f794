"""Ranks that do not do the same: one saves alone, one fails, states change or differ, steps take longer on one of them."""

from __future__ import annotations

import signal
from typing import Any

import puppets
import pytest
from puppets import Job, RankError, Rig

pytestmark = [pytest.mark.procs, pytest.mark.timeout(200)]


def settled(job: Job, step: int) -> list[dict[str, Any]]:
    """Save on all ranks, and what became of it."""
    job.all("save", step)
    return job.all("settle", step)


def test_save_called_on_one_rank_only_fails_in_time_and_names_the_others(rig: Rig) -> None:
    with rig.job(3) as job:
        job.all("open", str(rig.run), begin_timeout_s=1.5, on_failure="warn")
        job.all("train", 1)
        with puppets.Lasts() as took:
            assert job[0].call("save", 1)["state"] == "staged"
            ended = job[0].call("settle", 1)
        assert 1 <= took.seconds < 6
        assert ended["state"] == "failed"
        assert ended["error"] == "DeadlineError"
        assert "ranks 1-2" in ended["text"] or "ranks 1, 2" in ended["text"]
        # The others come late: they hear the same at once, and nothing hangs.
        late = [job[rank].call("save", 1) and job[rank].call("settle", 1) for rank in (1, 2)]
        assert {entry["state"] for entry in late} <= {"failed", "skipped"}
        job.all("train", 2)
        assert [entry["state"] for entry in settled(job, 2)] == ["durable"] * 3
        job.all("close")
    assert rig.verified_steps() == [2]
    assert len(rig.attempts()) == 1


def test_the_error_is_raised_at_the_next_call_once(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), begin_timeout_s=1.0, every=2)
        job[0].call("save", 1)
        job[0].call("evaluate", "time.sleep(2)")
        with pytest.raises(RankError, match=r"DeadlineError.*rank 1"):
            job[0].call("save", 3)
        job.all("train", 2)
        job.all("drain")
        job.all("close")
    assert rig.verified_steps() == [2]


def test_a_rank_that_fails_before_or_in_a_save_fails_it_for_all_at_once(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run))
        # An object that cannot be saved, on one rank only: that rank raises, the other hears of it.
        job[1].call("evaluate", "me.training.extra['bad'] = object()")
        raised = job.each("save", 1)
        assert isinstance(raised[1], RankError)
        assert raised[1].name == "UnsupportedStateError"
        assert "extra.bad" in raised[1].text
        if isinstance(raised[0], RankError):  # it heard before it was through
            assert raised[0].name == "UnsupportedStateError"
            assert raised[0].fields["rank"] == 1
        else:
            with puppets.Lasts() as took:
                other = job[0].call("settle", 1)
            assert took.seconds < 5
            assert other["state"] == "failed"
            assert other["rank"] == 1
            assert "extra.bad" in other["text"]
        job[1].call("drop", "bad")
        assert [entry["state"] for entry in settled(job, 2)] == ["durable"] * 2
        # It dies before it enters the save.
        job[1].signal(signal.SIGKILL)
        job[0].call("save", 3)
        with puppets.Lasts() as took:
            other = job[0].call("settle", 3)
        assert took.seconds < 5
        assert other["state"] == "failed"
        assert other["error"] == "RankLostError"
        assert other["rank"] == 1
    assert rig.verified_steps() == [2]


def test_states_that_change_between_saves(rig: Rig) -> None:
    """On all ranks, and on one only: shapes, new leaves, leaves that go; plain and sharded."""
    with rig.job(2) as job:
        job.all("open", str(rig.run), keep=20, on_failure="warn", max_failures=0)
        job.all("train", 1)
        saved = 0

        def saves(expect: str = "durable") -> list[dict[str, Any]]:
            nonlocal saved
            saved += 1
            ended = settled(job, saved)
            assert [entry["state"] for entry in ended] == [expect] * 2, (saved, ended)
            return ended

        saves()
        for kind in ("plain", "dtensor"):
            job.all("put", kind, [7, 3], kind=kind)  # a new leaf
            saves()
            saves()
            job.all("put", kind, [9, 5], kind=kind)  # another shape
            saves()
            job.all("put", kind, [9, 5], 1.0, kind=kind)  # another tensor of this shape
            saves()
            job.all("drop", kind)  # gone
            saves()
        job.all("put", "late", [300, 1000])  # an arena that was large enough no longer is
        saves()
        # On one rank only: a new leaf there is no trouble.
        job[1].call("put", "only", [4])
        saves()
        job[1].call("put", "only", [5])
        saves()
        job[1].call("drop", "only")
        saves()
        # Another shape on one rank only contradicts the others; it is told by name, and mended.
        job[0].call("put", "late", [300, 999])
        for entry in saves("failed"):
            assert entry["error"] == "StateMismatchError"
            assert "extra.late" in entry["text"]
        job[0].call("put", "late", [300, 1000])
        saves()
        job.all("close")
    assert len(rig.verified_steps()) == saved - 1


def test_a_leaf_that_goes_on_one_rank_only_harms_one_save_at_most(rig: Rig) -> None:
    names = [f"leaf{n}" for n in range(6)]
    with rig.job(2) as job:
        job.all("open", str(rig.run), keep=20, on_failure="warn", max_failures=0)
        for name in names:
            job.all("put", name, [3])
        job.all("prepare")
        assert [entry["state"] for entry in settled(job, 1)] == ["durable"] * 2
        for name in names:
            job[1].call("drop", name)
        first = settled(job, 2)
        assert first[0]["state"] == first[1]["state"]
        if first[0]["state"] == "failed":
            assert first[0]["error"] == "CoverageError"
            assert "extra.leaf" in first[0]["text"]
        assert [entry["state"] for entry in settled(job, 3)] == ["durable"] * 2
        job.all("close")
    with rig.job(1) as job:
        job.all("open", str(rig.run))
        for name in names:
            job.all("put", name, [3], 0.0)
        job.all("restore")
        assert [job[0].call("value_of", name) for name in names] == [[0.0, 1.0, 2.0]] * len(names)


@pytest.mark.parametrize("prepared", [False, True], ids=["at once", "prepared"])
def test_plain_tensors_that_differ_between_ranks_are_found_at_the_first_save(rig: Rig, prepared: bool) -> None:
    with rig.job(2) as job:
        job.all("open", str(rig.run), on_failure="warn", max_failures=0)
        for rank in (0, 1):
            job[rank].call("put", "rng", [5], float(rank))
        if prepared:
            job.all("prepare")
        for entry in settled(job, 1):
            assert entry["state"] == "failed"
            assert entry["error"] == "StateMismatchError"
            assert "'extra.rng' on rank 1" in entry["text"]
            assert "differ" in entry["text"]
            assert "PerRank" in entry["text"]
        assert rig.verified_steps() == []
        # Declared, they are kept.
        for rank in (0, 1):
            job[rank].call("put", "rng", [5], float(rank), kind="per_rank")
        assert [entry["state"] for entry in settled(job, 2)] == ["durable"] * 2
        for rank in (0, 1):
            job[rank].call("put", "rng", [5], 9.0, kind="per_rank")
        job.all("restore")
        assert job.all("value_of", "rng") == [[0.0] * 5, [1.0] * 5]
        # They drift apart later: the sample finds it sooner or later.
        job.all("put", "same", [64], 1.0)
        assert [entry["state"] for entry in settled(job, 3)] == ["durable"] * 2
        job[1].call("put", "same", [64], 2.0)
        found = next(step for step in range(4, 40) if settled(job, step)[0]["state"] == "failed")
        assert "extra.same" in job[0].call("handle_of", found)["text"]
        job.all("close")


def test_saves_by_time_are_for_the_same_steps_on_ranks_of_different_speed(rig: Rig) -> None:
    with rig.job(2) as job:
        job.all("build", kind="none")  # ranks that never wait for each other
        job.all("open", str(rig.run), every="0.4s", keep=50)
        for rank, pause_s in ((0, 0.02), (1, 0.021)):
            job[rank].send("train", 200, sleep_s=pause_s)
        for rank in (0, 1):
            job[rank].answer()
        job.all("drain")
        ended = job.all("handles")
        durable = [{int(step) for step, state in states.items() if state == "durable"} for states in ended]
        assert durable[0] == durable[1]
        assert len(durable[0]) >= 4
        assert {state for states in ended for state in states.values()} <= {"durable", "skipped"}
        job.all("close")
    assert set(rig.verified_steps()) == durable[0]


def test_a_rank_that_runs_ahead_makes_the_lead_announce_further_ahead(rig: Rig) -> None:
    """The ranks drift apart for good; what only one of them saved is dropped without an error, and quickly."""
    with rig.job(2) as job:
        job.all("build", kind="none")
        job.all("open", str(rig.run), every="0.3s", keep=50, begin_timeout_s=30)
        job[0].send("train", 400, sleep_s=0.004)
        job[1].send("train", 400, sleep_s=0.009)
        for rank in (0, 1):
            job[rank].answer()
        with puppets.Lasts() as took:
            job.all("drain")
        assert took.seconds < 15
        ended = job.all("handles")
        durable = [{int(step) for step, state in states.items() if state == "durable"} for states in ended]
        assert durable[0] == durable[1]
        assert {state for states in ended for state in states.values()} <= {"durable", "skipped"}
        job.all("close")
