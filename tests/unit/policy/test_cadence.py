"""When to save."""

from __future__ import annotations

import pytest

from safehold.errors import ConfigurationError
from safehold.policy.cadence import Announcement, Every, TimeCadence, due_by_steps, parse_every


@pytest.mark.parametrize(
    ("value", "every"),
    [
        ("20min", Every(seconds=1200.0)),
        ("2h", Every(seconds=7200.0)),
        ("1h30min", Every(seconds=5400.0)),
        ("1h 30m", Every(seconds=5400.0)),
        (" 90s ", Every(seconds=90.0)),
        ("1.5H", Every(seconds=5400.0)),
        ("1d", Every(seconds=86400.0)),
        (500, Every(steps=500)),
        ("500", Every(steps=500)),
        ("500steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        (None, Every()),
    ],
)
def test_intervals(value, every):
    assert parse_every(value) == every
    assert bool(parse_every(value)) == (value is not None)


@pytest.mark.parametrize(
    "value",
    [0, -1, True, "", "0s", "0", "-5min", "5 minuts", "min", "5min 3", "3 5min", 0.5, [], "1e3s", "400d", "steps", "5stepss",
     "nan", 1 << 50, "9" * 5000],
)  # fmt: skip
def test_what_is_no_interval_is_refused(value):
    with pytest.raises(ConfigurationError, match="no interval"):
        parse_every(value)


def test_due_by_steps():
    every = Every(steps=100)
    saved = [step for step in range(1, 501) if due_by_steps(every, step - 1, step, None)]
    assert saved == [100, 200, 300, 400, 500]
    # Steps may be left out, so multiples are passed rather than met.
    assert due_by_steps(every, 95, 107, None) and not due_by_steps(every, 107, 199, None)
    assert due_by_steps(every, 95, 500, None)


def test_not_due():
    every = Every(steps=100)
    assert not due_by_steps(every, None, 0, None)
    assert not due_by_steps(every, -1, 0, None)
    assert not due_by_steps(every, None, 150, None) and due_by_steps(every, None, 200, None)
    assert not due_by_steps(every, 99, 100, 100)  # just restored or saved
    assert not due_by_steps(every, 300, 150, None)  # went back
    assert not due_by_steps(Every(seconds=5), 99, 100, None)
    assert not due_by_steps(Every(), 99, 100, None)


CADENCE = TimeCadence(world_size=3, interval_s=60.0, margin_steps=2)
STEPS = {0: 10, 1: 12, 2: 11}


def test_an_announcement_lies_ahead_of_every_rank():
    assert CADENCE.announce(59.0, 0.0, STEPS, None) is None
    assert CADENCE.announce(60.0, 0.0, STEPS, None) == 14
    assert CADENCE.announce(1.0, 0.0, STEPS, None, requested=True) == 14


def test_nothing_is_announced_while_one_is_pending_or_a_rank_is_silent():
    pending = Announcement(step=14, made_s=60.0)
    assert CADENCE.announce(200.0, 0.0, STEPS, pending) is None
    assert CADENCE.announce(200.0, 0.0, {0: 10, 1: 12}, None) is None
    assert CADENCE.announce(200.0, 0.0, {}, None) is None
    assert TimeCadence(world_size=3).announce(1e9, 0.0, STEPS, None) is None


def test_after_a_drop_it_goes_further_ahead():
    ahead = [CADENCE.announce(1.0, 0.0, STEPS, None, num_dropped=n) - 12 for n in (1, 2, 3)]
    assert ahead == [4, 8, 16]
    assert CADENCE.announce(1.0, 0.0, STEPS, None, num_dropped=10**6) == 12 + CADENCE.max_margin_steps
    assert CADENCE.announce(99.0, 0.0, STEPS, None, step_s=0.01) == 12 + 50
    assert CADENCE.announce(99.0, 0.0, STEPS, None, step_s=1e-12) == 12 + CADENCE.max_margin_steps


def test_verdicts():
    pending = Announcement(step=14, made_s=60.0)
    assert CADENCE.judge(pending, {0: 13, 1: 14, 2: 12}, set()) == "wait"
    assert CADENCE.judge(pending, {0: 14, 1: 14, 2: 14}, {0, 1}) == "wait"
    assert CADENCE.judge(pending, {0: 15, 1: 14, 2: 13}, {0}) == "wait"
    assert CADENCE.judge(pending, {0: 15, 1: 14, 2: 13}, {1}) == "drop"
    assert CADENCE.judge(pending, {0: 15, 1: 16, 2: 15}, {0, 1, 2}) == "ok"
    assert CADENCE.judge(pending, {0: 13, 1: 14, 2: 12}, set(), 60.0 + CADENCE.expire_s + 1) == "drop"
    assert CADENCE.judge(pending, {0: 13, 1: 14, 2: 12}, set(), 61.0) == "wait"
