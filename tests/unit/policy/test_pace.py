"""How fast a flush goes beside training."""

from __future__ import annotations

import pytest

from safehold.policy.pace import IDLE_CORES, Pace


def run_for(pace: Pace, seconds: float, work_s: float) -> float:
    """Let one worker go on for some time; return the CPU seconds that it took."""
    now = used = 0.0
    while now < seconds:
        pause = pace.pause_s(now)
        now += pause
        if now >= seconds:
            break
        now += work_s
        used += work_s
        pace.spent(now, work_s)
    return used


def test_a_share_of_the_cores_while_none_is_idle() -> None:
    pace = Pace(num_cores=4, busy_share=0.05)
    pace.observe(0.0)
    assert run_for(pace, 100.0, 0.003) == pytest.approx(100.0 * 4 * 0.05, rel=0.05)


def test_full_speed_while_a_core_is_idle_and_at_once_when_it_becomes_so() -> None:
    pace = Pace(num_cores=2, busy_share=0.05)
    pace.observe(0.0)
    pace.spent(0.0, 1.0)
    assert pace.pause_s(0.0) == pytest.approx(9.0)
    pace.observe(IDLE_CORES)
    assert pace.pause_s(0.0) == 0.0 and run_for(pace, 10.0, 0.1) == pytest.approx(10.0, abs=0.2)


def test_work_of_several_threads_is_spaced_out_together() -> None:
    pace = Pace(num_cores=2, busy_share=0.05)
    pace.observe(0.0)
    pace.spent(0.0, 0.01)
    pace.spent(0.0, 0.01)
    assert pace.pause_s(0.0) == pytest.approx(0.19)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_limit(share: float) -> None:
    pace = Pace(num_cores=2, busy_share=share)
    pace.observe(0.0)
    pace.spent(0.0, 10.0)
    assert pace.pause_s(0.0) == 0.0 and not pace.limits


def test_what_is_not_known_limits_nothing() -> None:
    pace = Pace(num_cores=2, busy_share=0.05)
    pace.spent(0.0, 10.0)
    assert pace.pause_s(0.0) == 0.0
    pace.observe(0.0)
    pace.observe(None)
    assert not pace.limits


def test_idle_time_is_not_saved_up() -> None:
    pace = Pace(num_cores=2, busy_share=0.05)
    pace.observe(0.0)
    pace.spent(0.0, 0.01)
    pace.spent(100.0, 0.01)
    assert pace.pause_s(100.0) == pytest.approx(0.09)
